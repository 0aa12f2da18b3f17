"""HTML that needs nothing from elsewhere and dot that Graphviz can read."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from placement.lang.diagnostics import Diagnostic
from placement.report import to_dot, to_html
from placement.report.dot import _quoted
from placement.report.facts import facts
from placement.report.fold import blocks
from tests.report.plans import SEQUENCE, make
from tests.report.test_data import PLANS

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Reader(HTMLParser):
    """Checks that tags nest, and collects the rows of every table and the attributes of every tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


@pytest.fixture(params=PLANS)
def plan(request):
    return PLANS[request.param]()


def test_page_is_well_formed_and_alone(plan):
    text = to_html(plan)
    page = Reader(text)
    assert not {name for name, _ in page.attributes} & {"src", "href"}
    assert not re.search(r"https?:|@import|url\(", text)
    assert all(len({len(row) for row in table}) == 1 for table in page.tables)


def test_page_tells_every_item_parameter_and_module(plan):
    found = facts(plan)
    cells = {tuple(row) for table in Reader(to_html(plan)).tables for row in table}
    rows = sum(len(item.rows) for block in blocks(found) for item in block.items)
    assert (
        sum(len(row) == 8 and row[0] != "value" for row in (r for t in Reader(to_html(plan)).tables for r in t)) == rows
    )
    for name, placed in (*found.params.items(), *found.values.items()):
        assert (name, f"{placed['tp']} @ tp") in cells


def test_page_escapes_what_it_is_given():
    plan = make(SEQUENCE)
    note = Diagnostic("PLC203", "<script>alert(1)</script>", severity="note")
    noted = dataclasses.replace(plan, bound=dataclasses.replace(plan.bound, notes=(note,)))
    text = to_html(noted)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_graph_is_readable_dot(plan):
    text = to_dot(plan)
    bare = re.sub(r'"(?:\\.|[^"\\])*"', "", text)
    assert '"' not in bare
    assert bare.count("{") == bare.count("}") == 1 + len(blocks(facts(plan)))
    declared = re.findall(r"^ +(b\d+_\d+) \[", bare, re.MULTILINE)
    assert len(declared) == len(set(declared))
    edges = re.findall(r"^ +(b\d+_\d+) -> (b\d+_\d+) \[label", bare, re.MULTILINE)
    assert {end for edge in edges for end in edge} == set(declared)
    assert len(edges) == sum(len(block.items) for block in blocks(facts(plan)))


def test_graph_tells_collectives_and_sizes():
    text = to_dot(make(SEQUENCE, seq=4096))
    assert "Shard(seq) -> Replicate @ tp\\nall_gather | reduce_scatter  768 KiB" in text
    assert 'label = "blocks.[0-2] (3 alike)"' in text


def test_graph_quotes_what_names_may_hold():
    assert _quoted('a"b\\c\nd') == '"a\\"b\\\\c\\nd"'
