"""How diagnostics look: carets under the fault, whatever stands before it."""

import json
import re
import unicodedata

import pytest

from placement.lang import Diagnostic, Diagnostics, PlacementError, Span, did_you_mean, near, parse, render
from placement.lang.render import FORMS


def at(line, column, end_column, file="a.plc", end_line=None):
    return Span(file, line, column, end_line or line, end_column)


def shown(text, span, **kwargs):
    """The lines of the excerpt: the source line and the carets, without the gutter."""
    lines = render([Diagnostic("PLC002", "m", span)], {"a.plc": text}, **kwargs).split("\n")
    return [line.split("|", 1)[1].removeprefix(" ") for line in lines[3:5]]


def columns(text):
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in text)


def test_the_whole_form():
    diagnostic = Diagnostic(
        "PLC101", "unknown axis 'x'", at(12, 11, 12), "did you mean 'tp'?", ("a fact",), "model.py:7"
    )
    text = "\n" * 11 + "value a @ x : auto"
    assert (
        render([diagnostic, Diagnostic("PLC901", "no place")], {"a.plc": text})
        == """\
error[PLC101]: unknown axis 'x'
  --> a.plc:12:11
   |
12 | value a @ x : auto
   |           ^
  ::: model.py:7
   = help: did you mean 'tp'?
   = note: a fact

error[PLC901]: no place"""
    )


@pytest.mark.parametrize(
    ("line", "column", "end"),
    [("\tmesh tp", 2, 6), ("a\tb\tmesh", 5, 9), ("漢字 mesh", 4, 8), ("e\u0301 mesh", 4, 8), ("\x1b[31m mesh", 7, 11)],
)
def test_carets_stand_below_the_fault(line, column, end):
    source, carets = shown(line, at(1, column, end))
    assert "\t" not in source
    assert "\x1b" not in source
    before, fault = source[: source.index("mesh")], "mesh"
    assert carets == " " * columns(before) + "^" * columns(fault)


def test_tabs_go_to_the_next_stop():
    assert shown("a\tb\t\tc", at(1, 6, 7)) == ["a   b       c", "            ^"]


def test_wide_faults_have_wide_carets():
    assert shown("x 漢字 y", at(1, 3, 5)) == ["x 漢字 y", "  ^^^^"]


def test_a_place_past_the_end_and_an_empty_one():
    assert shown("mesh", at(1, 5, 5)) == ["mesh", "    ^"]
    assert shown("", at(1, 1, 1)) == ["", "^"]
    assert shown("abc", at(1, 3, 9)) == ["abc", "  ^"]


def test_a_span_of_several_lines_is_marked_on_its_first():
    assert shown("ab cd\nef", at(1, 4, 2, end_line=2)) == ["ab cd", "   ^^"]


@pytest.mark.parametrize("column", [1, 50, 100, 200, 395, 401])
@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("letter", ["x", "漢"])
def test_long_lines_are_cut_around_the_fault(column, width, letter):
    line = letter * (column - 1) + "FAULT" + letter * 400
    text = render([Diagnostic("PLC002", "m", at(1, column, column + 5))], {"a.plc": line}, width=width)
    assert max(map(columns, text.split("\n"))) <= width
    source, carets = shown(line, at(1, column, column + 5), width=width)
    assert carets.strip() == "^^^^^"
    assert columns(source[: source.index("FAULT")]) == carets.index("^")


def test_a_fault_wider_than_the_terminal():
    text = render([Diagnostic("PLC002", "m", at(1, 300, 900))], {"a.plc": "x" * 1000}, width=60)
    assert max(map(len, text.split("\n"))) <= 60
    assert "^^^^^^^^^^^^^^^^^^^^" in text


def test_hints_wrap_and_never_cut_a_word():
    hint = "did you mean " + "model.layers.0.self_attn.q_proj.weight " * 4
    text = render([Diagnostic("PLC104", "m", None, hint)], {}, width=60)
    assert text.count("model.layers.0.self_attn.q_proj.weight") == 4
    assert max(map(len, text.split("\n"))) <= 60
    hyphens = "x" * 40 + " some-part.weight"
    assert "\n          some-part.weight" in render([Diagnostic("PLC104", "m", None, hyphens)], {}, width=60)


def test_colour_changes_nothing_else():
    diagnostic = Diagnostic("PLC101", "unknown axis", at(1, 1, 2), "hint", ("note",), "m.py:1")
    plain = render([diagnostic], {"a.plc": "x"})
    colored = render([diagnostic], {"a.plc": "x"}, color=True)
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain
    assert colored != plain


def test_what_could_steer_a_terminal_is_not_shown():
    with pytest.raises(PlacementError) as caught:
        parse('\x1b]0;owned\x07\ninclude "\x1b[2J\u202e"')
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", str(caught.value))


@pytest.mark.parametrize("form", FORMS)
def test_words_that_no_one_could_read_are_shortened(form):
    found = Diagnostic("PLC002", f"unknown statement '{'x' * 5000}', not {'y' * 200}", hint="h" * 5000)
    text = render([found], {}, form=form)
    assert "x" * 20 in text
    assert "y" * 200 in text
    assert "x" * 50 not in text
    assert "h" * 50 not in text


def test_a_file_without_text_is_named():
    assert render([Diagnostic("PLC002", "m", at(3, 1, 2))], {}) == "error[PLC002]: m\n --> a.plc:3:1"


def test_codes_are_registered():
    with pytest.raises(ValueError, match="PLC999 is not registered"):
        Diagnostic("PLC999", "m")


def test_the_collector_sorts_and_tells_a_fault_once():
    found = Diagnostics()
    found.raise_if_any()
    for span in (at(2, 1, 2), at(1, 5, 6), at(1, 1, 2, file="0.plc"), None, at(1, 5, 6)):
        found.error("PLC003", "m", span)
    with pytest.raises(PlacementError) as caught:
        found.raise_if_any({"a.plc": "", "0.plc": ""})
    assert [d.span for d in caught.value.diagnostics] == [None, at(1, 5, 6), at(2, 1, 2), at(1, 1, 2, file="0.plc")]
    assert [(d.file, d.line, d.column) for d in caught.value.diagnostics][:2] == [(None, None, None), ("a.plc", 1, 5)]


def test_near():
    assert near("parm", ["mesh", "param", "parms", "parmss"]) == ["parms", "param"]
    assert near("SHARD", ["Shard", "Partial"]) == ["Shard"]
    assert near("xyz", ["mesh"]) == []
    assert did_you_mean("abcd", ["abce", "abcf", "abcg"]).count("'") == 4
    assert did_you_mean("abcd", ["xyz"]) is None


FOUND = (
    Diagnostic("PLC101", "unknown axis 'x'", at(2, 9, 10, end_line=2), "50% did:\nmean 'tp'", ("a, fact",), "m.py:7"),
    Diagnostic("PLC208", "several\nlines", None, severity="note"),
    Diagnostic("PLC407", "an op", None, None, (), "lib/m.py:7"),
    Diagnostic("PLC203", "odd", at(1, 3, 2, end_line=2, file="b,c:d.plc"), severity="warning"),
)


def test_concise_is_a_line_each():
    assert render(FOUND, {}, form="concise").split("\n") == [
        "a.plc:2:9: error[PLC101]: unknown axis 'x'",
        "note[PLC208]: several lines",
        "lib/m.py:7: error[PLC407]: an op",
        "b,c:d.plc:1:3: warning[PLC203]: odd",
    ]


def test_github_takes_commands_with_everything_escaped():
    text = "unknown axis 'x'%0Ahelp: 50%25 did:%0Amean 'tp'%0Anote: a, fact%0Amodel: m.py:7"
    assert render(FOUND, {}, form="github").split("\n") == [
        f"::error title=PLC101,file=a.plc,line=2,endLine=2,col=9,endColumn=10::{text}",
        "::notice title=PLC208::several%0Alines",
        "::error title=PLC407,file=lib/m.py,line=7::an op",
        "::warning title=PLC203,file=b%2Cc%3Ad.plc,line=1,endLine=2::odd",
    ]


def test_json_has_every_field_of_every_diagnostic():
    document = json.loads(render(FOUND, {}, form="json"))
    assert document["format_version"] == 1
    assert len(document["diagnostics"]) == len(FOUND)
    assert document["diagnostics"][0] == {
        "code": "PLC101",
        "severity": "error",
        "message": "unknown axis 'x'",
        "hint": "50% did:\nmean 'tp'",
        "notes": ["a, fact"],
        "file": "a.plc",
        "line": 2,
        "column": 9,
        "end_line": 2,
        "end_column": 10,
        "model_line": "m.py:7",
        "page": "docs/diagnostics/PLC101.md",
    }
    assert json.loads(render([], {}, form="json")) == {"format_version": 1, "diagnostics": []}


def test_both_places_are_shown_where_there_are_two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text("\n" * 104 + "    y = odd(x)  # here\n")
    place = f"{tmp_path / 'model.py'}:105"
    diagnostic = Diagnostic("PLC402", "no rule for 'odd'", at(1, 7, 8), "state one", (), place)
    assert (
        render([diagnostic], {"a.plc": "value a : auto"})
        == """\
error[PLC402]: no rule for 'odd'
   --> a.plc:1:7
    |
  1 | value a : auto
    |       ^
   ::: model.py:105
    |
105 |     y = odd(x)  # here
    |     ^^^^^^^^^^^^^^^^^^
    = help: state one"""
    )


def test_messages_wrap_below_themselves():
    text = render([Diagnostic("PLC203", "a dim of a size " * 12)], {}, width=60)
    assert max(map(len, text.split("\n"))) <= 60
    assert text.split("\n")[1].startswith(" " * len("error[PLC203]: ") + "size a ")


def test_only_errors_are_raised():
    found = Diagnostics()
    found.extend([Diagnostic("PLC203", "m", severity="warning"), Diagnostic("PLC208", "m", severity="note")])
    found.raise_if_any()
    found.error("PLC003", "m")
    with pytest.raises(PlacementError) as caught:
        found.raise_if_any()
    assert str(caught.value) == "error[PLC003]: m\n\nwarning[PLC203]: m\n\nnote[PLC208]: m"
