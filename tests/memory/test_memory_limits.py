"""``limit memory``: the plan that fits, what it costs, and what is said where none does."""

from __future__ import annotations

import pytest
import torch

import placement
from placement.solver.memory import memory
from tests.memory.gpt_block import Net, spec

FREE = "\n".join(line for line in spec("Replicate").splitlines() if "value" not in line and "output" not in line)
# Launches so dear that replicated norms are fastest, though they keep more.
DEAR = FREE.replace("mesh tp", "mesh tp over slow\nlink slow = 900 GB/s, 20 us") + "\noutput output : Replicate\n"


def planned(text, limit=None, layers=4):
    line = "" if limit is None else f"limit memory {limit} B\n"
    with torch.device("meta"):
        model = Net(layers, 64, 4).train()
    example = {"x": torch.empty(2, 64, 64, device="meta").requires_grad_()}
    return placement.plan(model, {"tp": 4}, text + line, example=example)


def peak(plan):
    return memory(plan).rank.peak


def test_a_limit_makes_the_plan_smaller_and_slower_and_says_what_it_proves():
    free = planned(DEAR)
    with pytest.raises(placement.PlacementError) as caught:
        planned(DEAR, 1)
    assert "PLC305" in str(caught.value)
    sizes = [peak(free)]
    times = [free.cost[0]]
    for part in (0.97, 0.9):
        limit = int(peak(free) * part)
        try:
            small = planned(DEAR, limit)
        except placement.PlacementError:
            continue
        assert peak(small) <= limit
        assert free.cost[0] <= small.lower_bound[0] <= small.cost[0]
        assert any("not proven" in n.message for n in small.bound.notes) == (small.lower_bound < small.cost)
        sizes.append(peak(small))
        times.append(small.cost[0])
    assert len(sizes) > 1
    assert sizes == sorted(sizes, reverse=True)
    assert times == sorted(times)


def test_a_limit_that_the_fastest_plan_keeps_changes_nothing():
    free = planned(DEAR)
    same = planned(DEAR, peak(free))
    assert (same.cost[::2], same.lower_bound[::2]) == (free.cost[::2], free.cost[::2])
    assert [repr(s) for s in same.strategies.values()] == [repr(s) for s in free.strategies.values()]


def test_what_does_not_fit_is_told_with_the_least_and_what_dominates():
    with pytest.raises(placement.PlacementError) as caught:
        planned(DEAR, 100_000)
    (fault,) = caught.value.diagnostics
    assert fault.code == "PLC305"
    assert fault.message.startswith("no plan holds 100000 B or less on one rank: the least takes ")
    sums, kept = fault.notes
    assert all(word in sums for word in ("of parameters", "AdamW's moments", "kept for the backward"))
    assert kept.startswith("of that kept: ")
    assert "layers.*" in kept
    least = int(fault.message.split("the least takes ")[1].split()[0])
    fits = planned(DEAR, least)
    assert peak(fits) <= least
    with pytest.raises(placement.PlacementError, match="PLC305"):
        planned(DEAR, least - 1)
