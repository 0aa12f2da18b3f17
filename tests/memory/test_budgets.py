"""``expect`` lines: what they count is what ``explain`` counts, and what breaks one is named."""

from __future__ import annotations

import pytest

from placement.lang.parser import parse
from placement.report import explain_data
from placement.report.budgets import broken
from tests.report.plans import SEQUENCE, make

KEPT = [
    "expect blocks.* : all_gather @ tp forward <= 1",
    "expect blocks.* : reduce_scatter forward < 2",
    "expect blocks.* : all_gather <= 3",  # backward's own gather too, and what it gathers again
    "expect blocks.* : all_to_all == 0",
    "expect blocks.*.norm : all_gather == 0",
    "expect blocks.*.up : all_gather == 2",  # what is made for one module alone is its own
    "expect ** : all_gather @ tp forward > 3",
    "expect ** : all_reduce backward == 1",  # all gradients in one
]
BROKEN = [  # line, what is counted, notes
    ("expect blocks.* : all_gather forward <= 0", "'blocks.0' has 1 all_gather forward, and at most 0 are expected", 1),
    ("expect blocks.[0-1] : all_gather < 2", "'blocks.0' has 3 all_gather, and less than 2 are expected", 3),
    ("expect blocks.* : all_reduce >= 1", "'blocks.0' has 0 all_reduce, and at least 1 is expected", 1),
    ("expect ** : all_reduce backward == 0", "the model has 1 all_reduce backward, and exactly 0 are expected", 1),
    ("expect blocks.2 : all_gather forward < 1 B", "'blocks.2' has {} of all_gather forward, and less than 1 B is", 1),
]


def faults(*lines, spec=SEQUENCE, n=4):
    text = spec + "".join(f"{line}\n" for line in lines)
    return broken(make(spec, seq=4096, n=n), parse(text, "net.plc")), text


@pytest.mark.parametrize("line", KEPT)
def test_kept(line):
    assert faults(line)[0] == ()


@pytest.mark.parametrize(("line", "message", "notes"), BROKEN)
def test_broken(line, message, notes):
    (fault,), text = faults(line)
    size = "768 KiB"
    assert fault.code == "PLC306"
    assert fault.message.startswith(message.format(size)), fault.message
    told = [note for note in fault.notes if not note.startswith("the same holds")]
    assert len(told) == notes
    assert text.splitlines()[fault.line - 1] == line


def test_the_conversion_is_named_with_its_statements():
    ((fault,), _) = faults("expect blocks.1 : all_gather forward <= 0")
    (note,) = fault.notes
    assert note.startswith("all_gather forward, ")
    assert "blocks.1.norm -> blocks.1.up, Shard(seq) to Replicate, because of net.plc:" in note


def test_bytes_are_those_of_explain():
    data = explain_data(make(SEQUENCE, seq=4096))
    sent = data["totals"]["tp"]["forward"]["all_gather"]["bytes"]
    assert faults(f"expect ** : all_gather forward == {sent} B")[0] == ()
    assert len(faults(f"expect ** : all_gather forward == {sent + 1} B")[0]) == 1


def test_every_line_and_one_rank():
    found, _ = faults("expect blocks.* : all_gather <= 0", "expect ** : reduce_scatter <= 0")
    assert [fault.code for fault in found] == ["PLC306", "PLC306"]
    assert faults("expect ** : all_gather <= 0", "expect ** : all_reduce <= 0", n=1)[0] == ()


def test_a_change_of_the_spec_breaks_a_budget_and_plan_and_check_say_so():
    import torch

    import placement
    from tests.memory.gpt_block import Net, spec

    example = {"x": torch.randn(2, 16, 32)}
    line = "expect layers.* : all_reduce @ tp == 0\n"
    assert placement.plan(Net(1), {"tp": 2}, spec("Shard(seq)") + line, example=example)
    with pytest.raises(placement.PlacementError) as caught:
        placement.plan(Net(1), {"tp": 2}, spec("Replicate") + line, example=example)
    assert [d.code for d in caught.value.diagnostics] == ["PLC306"]
    found = placement.check(spec("Replicate") + line, Net(1), {"tp": 2}, example=example)
    assert [d.code for d in found] == ["PLC306"]


def test_a_pattern_that_matches_nothing_is_a_fault():
    import torch

    import placement
    from tests.memory.gpt_block import Net, spec

    text = spec("Replicate") + "expect layer.* : all_reduce @ tp == 0\n"
    with pytest.raises(placement.PlacementError, match="PLC104"):
        placement.plan(Net(1), {"tp": 2}, text, example={"x": torch.randn(2, 16, 32)})
