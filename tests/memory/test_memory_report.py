"""What ``--memory`` tells adds up, and fits a terminal."""

from __future__ import annotations

import json

import pytest

from placement.report import explain_data, view
from placement.report.views import ViewError
from placement.solver.memory import memory
from tests.report.plans import LONG, SEQUENCE, make


def test_the_json_adds_up():
    plan = make(SEQUENCE, seq=4096)
    found = json.loads(view(plan, "json", memory=True))
    assert found["memory"] == explain_data(plan)["memory"]
    told, use = found["memory"], memory(plan).rank
    assert told["saved_for_backward"] == sum(m["saved_for_backward"] for m in told["modules"]) == use.saved_bytes
    assert told["one_device"]["saved_for_backward"] == sum(m["one_device"] for m in told["modules"])
    assert told["peak"] == sum(told[key] for key in ("params", "gradients", "optimizer", "saved_for_backward"))
    assert told["params"] < told["one_device"]["params"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_text_fits_and_has_the_sums(width):
    text = view(make(SEQUENCE, name=LONG), memory=True, width=width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("parameters", "gradients", "AdamW's two moments", "kept for backward", "the peak", "one device"):
        assert word in text


def test_alike_layers_are_one_row():
    rows = [line for line in view(make(SEQUENCE, seq=4096), memory=True).splitlines() if "alike, each" in line]
    assert rows[0].strip().startswith("blocks.[0-2] (3 alike, each)")
    assert len(rows) == len({row.split(" (")[0] for row in rows}) > 2


def test_it_is_a_question_of_its_own():
    with pytest.raises(ViewError, match="two questions"):
        view(make(SEQUENCE), memory=True, time=True)
    with pytest.raises(ViewError, match="memory is answered as text or json"):
        view(make(SEQUENCE), "html", memory=True)
