"""Settings of ``lower`` lines that change nothing: which are told, with the reason, and which are not."""

from __future__ import annotations

import pytest

from placement.report.findings import findings
from tests.report.plans import SEQUENCE, WHOLE, make

NOTHING = "in these modules "
CASES = {
    "a norm gathers nothing": (SEQUENCE, "blocks.*.norm : gathered = kept", f"{NOTHING}nothing is gathered for"),
    "nothing is gathered": (WHOLE, "** : gathered = kept", f"{NOTHING}nothing is gathered for"),
    "kept all the same": (SEQUENCE, "blocks.0 : gathered = kept\nlower blocks.0.up : gathered = again", "another line"),
    "what layers gather": (SEQUENCE, "blocks.* : gathered = kept", None),
    "a norm has no layer": (SEQUENCE, "blocks.*.norm : overlap = ring", f"{NOTHING}no collective is of"),
    "blocks of a ring": (SEQUENCE, "blocks.* : overlap = ring", None),
    "a sum that all get": (WHOLE, "blocks.* : overlap = ring", "every rank gets the whole of what is summed here"),
    "a sum in chunks": (WHOLE, "blocks.* : overlap = chunks", None),
    "nothing beside": (WHOLE, "blocks.* : overlap = none", None),
    "said further in": (SEQUENCE, "blocks.0 : overlap = ring\nlower blocks.0.{up,down} : overlap = none", "lines for"),
    "kept in one piece": (SEQUENCE, "blocks.* : gathered = kept\nlower blocks.0.up : overlap = ring", "in one piece"),
    "a norm is one op": (SEQUENCE, "blocks.*.norm : ops = written", f"{NOTHING}no ops would be joined"),
    "a layer and its bias": (SEQUENCE, "blocks.*.up : ops = written", None),
    "written all the same": (SEQUENCE, "blocks.0 : ops = written\nlower blocks.0.up : ops = fused", "another line"),
    "sums of terms": (SEQUENCE, "blocks.* : reduce = float64", None),
    "summed further in": (WHOLE, "blocks.0 : reduce = float64\nlower blocks.0.* : reduce = float32", "no sum"),
    "a layer without a sum": (WHOLE, "blocks.*.norm : reduce = float64", "no sum"),
    "one of several": (WHOLE, "blocks.* : reduce = float64, gathered = kept, ops = written", f"{NOTHING}nothing is"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_setting_that_changes_nothing_is_told_with_the_reason(name: str) -> None:
    spec, lower, why = CASES[name]
    told = [note for note in findings(make(f"{spec}lower {lower}\n"), "net.plc") if note.code == "PLC308"]
    if why is None:
        assert not told, told
        return
    (note,) = told
    assert why in note.message
    assert note.severity == "note"
    assert note.span is not None
    setting = note.message.split("'")[1]
    at = f"{spec}lower {lower}\n".splitlines()[note.span.line - 1]
    assert at[note.span.column - 1 :].startswith(setting)


def test_on_one_rank_nothing_is_told() -> None:
    notes = findings(make(f"{SEQUENCE}lower ** : overlap = ring\n", n=1), "net.plc")
    assert all(note.code != "PLC308" for note in notes)
