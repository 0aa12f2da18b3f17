"""What a notebook shows: the plan as a fragment of HTML that is safe in a page of someone else's."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import placement
from placement.lang import Diagnostic, parse
from placement.report.facts import facts
from placement.report.html import to_fragment
from placement.solver.bind import bind
from placement.solver.build import plan as solve
from tests.report.plans import PLACED, SEQUENCE, WHOLE, graph, make

SHOWN = {"div", "style", "h1", "h2", "h3", "p", "span", "details", "summary", "dl", "dt", "dd"}
SHOWN |= {"table", "thead", "tbody", "tr", "th", "td"}
EVIL = "<script>alert(1)</script>"


class Tags(HTMLParser):
    """Checks that tags nest; collects them, and the text of cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.outermost: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        if not self.open:
            self.outermost.append(tag)
        self.open.append(tag)
        self.tags.append((tag, dict(attrs)))
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data


@pytest.mark.parametrize("spec", [SEQUENCE, WHOLE, PLACED])
def test_the_fragment_is_one_element_that_loads_and_runs_nothing(spec) -> None:
    text = to_fragment(make(spec))
    page = Tags(text)
    assert page.outermost == ["div"]
    assert {tag for tag, _ in page.tags} <= SHOWN
    assert {name for _, attributes in page.tags for name in attributes} <= {"class", "scope", "data-value"}
    assert not re.search(r"https?:|@import|url\(|javascript:", text)


def test_its_styles_touch_nothing_else_and_leave_text_the_hosts_colour() -> None:
    (style,) = re.findall(r"<style>(.*?)</style>", to_fragment(make(SEQUENCE)), re.DOTALL)
    rules = re.findall(r"([^{}]+)\{([^}]*)\}", re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL))
    assert len(rules) > 10
    for selectors, declarations in rules:
        assert all(selector.strip().startswith(".placement-plan") for selector in selectors.split(",")), selectors
        background = re.findall(r"background: ([^;]+);", declarations)
        assert all(value == "transparent" or re.fullmatch(r"rgba\(128, 128, 128, \.1\)", value) for value in background)
    colours = set(re.findall(r"[^-]color: ([^;]+);", style))
    assert len(colours - {"inherit"}) == 1
    (accent,) = colours - {"inherit"}
    for host in ("#ffffff", "#111111"):
        assert contrast(accent, host) > 4.2, "large bold text needs 3, small text 4.5"


def contrast(one: str, other: str) -> float:
    """The WCAG contrast of two ``#rrggbb``."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_fragment_tells_what_the_page_tells() -> None:
    plan = make(SEQUENCE)
    found = facts(plan)
    cells = set(Tags(to_fragment(plan)).cells)
    assert {*found.params, *found.values} <= cells
    assert {"all_gather", "reduce_scatter"} <= cells


def test_text_of_a_spec_or_a_model_is_escaped() -> None:
    read = parse(WHOLE.replace("blocks", "a*"), "<script>alert(1).plc")
    plan = solve(bind(graph(3, "a<b>"), read, {"tp": 4}), read.sources)
    noted = dataclasses.replace(
        plan, bound=dataclasses.replace(plan.bound, notes=(Diagnostic("PLC203", EVIL, severity="note"),))
    )
    text = noted._repr_html_()
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)") >= 2  # in the title and in the note
    assert "<b>" not in text
    assert "a&lt;b&gt;.0" in text


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def test_a_compiled_program_and_its_plan_show_the_same() -> None:
    spec = "mesh tp\nparam up.{weight,bias} : Shard(0)\nparam down.weight : Shard(in)\n"
    compiled = placement.compile(Two(), placement.simulate(tp=2), spec, example={"x": torch.randn(2, 4)})
    shown = compiled._repr_html_()
    assert shown == compiled.plan._repr_html_() == to_fragment(compiled.plan)
    assert "Shard(out) @ tp" in shown
    assert shown.count("down.weight") >= 1
    assert Tags(shown).outermost == ["div"]
