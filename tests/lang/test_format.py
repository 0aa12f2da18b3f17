"""The one layout: what it looks like, what it keeps, what it refuses."""

from __future__ import annotations

import itertools
from itertools import pairwise
from pathlib import Path

import pytest

from placement.lang import PlacementError, parse
from placement.lang import format as formatter
from placement.lang.format import WIDTH, FormatError, format_text
from tests.counting import calls

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*/*.plc"))

LONG = "output " + ", ".join(f"hidden_states.{i}" for i in range(12)) + " : Replicate"

# name: before, after
CASES = {
    "spaces": ("  mesh\ttp=8   over  nvlink  ", "mesh tp = 8 over nvlink\n"),
    "nothing": (" \n\t\n", ""),
    "only a comment": ("\n\n  # a  \n\n\n", "# a\n"),
    "brackets": ("param a:[ x , y ],Shard( x,zigzag )@tp", "param a : [x, y], Shard(x, zigzag) @ tp\n"),
    "a path": ("value a.{b , c}.[0-3]:auto", "value a.{b,c}.[0-3] : auto\n"),
    "a string": ('include  "a  #b.plc"', 'include "a  #b.plc"\n'),
    "line ends": ("\ufeffmesh tp\r\rmesh dp\r\n", "mesh tp\n\nmesh dp\n"),
    "colons": (
        "input x : [b]\nparam a.b.c : auto\n\nvalue y : auto",
        "input x     : [b]\nparam a.b.c : auto\n\nvalue y : auto\n",
    ),
    "colons past a comment": (
        "input x : [b]\n# on y\nvalue yyyy : auto",
        "input x : [b]\n# on y\nvalue yyyy : auto\n",
    ),
    "colons past one that is far out": (
        f"value a : auto\nvalue {'x' * 61} : auto\nvalue abc : auto",
        f"value a   : auto\nvalue {'x' * 61} : auto\nvalue abc : auto\n",
    ),
    "wide letters": ("value 漢 : auto # a\nvalue abc : auto # b", "value 漢  : auto  # a\nvalue abc : auto  # b\n"),
    "comments behind": (
        "mesh tp=8# a\nmesh dp\nmesh cp = 16 #b",
        "mesh tp = 8   # a\nmesh dp\nmesh cp = 16  #b\n",
    ),
    "a comment that goes on": (
        "mesh tp # a\n        #  b\n        # c\n# d\nmesh dp",
        "mesh tp  # a\n         #  b\n         # c\n# d\nmesh dp\n",
    ),
    "blank lines": ("mesh a\n\n\n\nmesh b\n# c\n\n\n# d\n", "mesh a\n\nmesh b\n# c\n\n# d\n"),
    "a block": (
        "within a {\n\n\nparam b : auto\n# of c\nparam c : auto\n\n}\nmesh tp",
        "within a {\n  param b : auto\n  # of c\n  param c : auto\n}\nmesh tp\n",
    ),
    "blocks": (
        "within a { # x\nwithin b\n{\n} } # y\n",
        "within a {  # x\n  within b {\n  }\n}  # y\n",
    ),
    "comments before a brace": ("within a # x\n# y\n{ # z\n}", "within a {  # x\n  # y\n  # z\n}\n"),
    "a carried line": ("input a,\n  b :\n [x,\n y]", "input a, b : [x, y]\n"),
    "comments inside a list": (
        "input a, # first\n  # the second\n bcd : [x # rows\n, y # columns\n]\nvalue z : auto",
        """\
input a,       # first
    # the second
    bcd : [x,  # rows
    y          # columns
    ]
value z : auto
""",
    ),
    "a comment that cannot stay inside": (
        "input x : [a # one\n, value # two\n]",
        "# one\n# two\ninput x : [a, value]\n",
    ),
    "a long statement": (
        LONG,
        """\
output hidden_states.0, hidden_states.1, hidden_states.2, hidden_states.3, hidden_states.4,
    hidden_states.5, hidden_states.6, hidden_states.7, hidden_states.8, hidden_states.9,
    hidden_states.10, hidden_states.11 : Replicate
""",
    ),
    "a long sum": (
        f"strategy layers.*.{'x' * 40}:{'y' * 20}@tp+{'z' * 20}@cp +ring@ep",
        f"""\
strategy layers.*.{"x" * 40} : {"y" * 20} @ tp +
    {"z" * 20} @ cp + ring @ ep
""",
    ),
    "a comment inside a sum": (
        "strategy a : ring@cp + # outside\nall_to_all@ tp",
        "strategy a : ring @ cp +  # outside\n    all_to_all @ tp\n",
    ),
    "quantities": ("link a=450GB/s,3us\nlimit memory 60GB", "link a = 450 GB/s, 3 us\nlimit memory 60 GB\n"),
    "figures": (
        "device a=96GB,# memory\n60TFLOP/s float32 ,2 TB/s",
        "device a = 96 GB,  # memory\n    60 TFLOP/s float32, 2 TB/s\n",
    ),
    "other statements": (
        "expect a.*:all_gather@tp forward<=2\nlower a.b.c:overlap=ring,reduce =float32\nstrategy a:ring@cp+gather@tp",
        """\
expect a.*  : all_gather @ tp forward <= 2
lower a.b.c : overlap = ring, reduce = float32
strategy a  : ring @ cp + gather @ tp
""",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_layout(name):
    before, after = CASES[name]
    assert format_text(before) == after
    assert format_text(after) == after


@pytest.mark.parametrize("length", range(1, 40))
def test_no_line_is_wider_than_it_must_be(length):
    names = [f"{'x' * length}{i}" for i in range(40)]
    lines = format_text(f"output {', '.join(names)} : Replicate").rstrip("\n").split("\n")
    assert max(map(len, lines)) <= WIDTH
    for line, following in pairwise(lines):
        first = following.strip().replace(", ", ",\n").split("\n")[0]
        assert len(f"{line} {first}") > WIDTH


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_mean_the_same(path):
    text = path.read_text()
    formatted = format_text(text, path.name)
    assert parse(formatted) == parse(text)
    assert formatted.count("#") == text.count("#")
    assert all(len(line.partition("#")[0].rstrip()) <= WIDTH for line in formatted.split("\n"))


@pytest.mark.parametrize(
    "text", ["mesh", "foo", "within a {", "value a : Shrad(0)", "}", "mesh tp mesh dp", "include a"]
)
def test_what_does_not_parse_is_refused(text):
    with pytest.raises(PlacementError) as caught:
        format_text(f"mesh   tp\n{text}", "a.plc")
    assert {d.file for d in caught.value.diagnostics} == {"a.plc"}


def test_included_files_are_not_read():
    assert format_text('include   "nowhere.plc"', "a.plc") == 'include "nowhere.plc"\n'


@pytest.mark.parametrize(("old", "new"), [("Shard", "Replicate # "), ("#", "##"), ("seq", "sq"), ("}\n", "")])
def test_a_layout_that_says_something_else_is_never_returned(monkeypatch, old, new):
    written = formatter._Layout.text
    monkeypatch.setattr(formatter._Layout, "text", lambda self: written(self).replace(old, new))
    with pytest.raises((FormatError, PlacementError)):
        format_text("within  a {\nvalue b : Shard(seq) @ tp # c\n}\n")


def test_a_layout_that_would_change_again_is_never_returned(monkeypatch):
    written, blanks = formatter._Layout.text, itertools.count()
    monkeypatch.setattr(formatter._Layout, "text", lambda self: written(self) + "\n" * next(blanks))
    with pytest.raises(FormatError, match="twice"):
        format_text("mesh   tp")


def test_time_is_linear():
    def work(n):
        text = "within a {\n  param b.{c,d} : [x, y], Shard(x) @ tp # e\n  # f\n}\nvalue gg : auto # h\n" * n
        return calls(lambda: format_text(text))

    work(10)
    assert work(500) < 5.5 * work(100)  # five times the text; a square would be 25
