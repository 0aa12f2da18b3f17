"""`limit memory` on several axes: a plan within it, or a diagnostic at the line with what is known."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from placement import PlacementError, plan
from placement.solver import joint
from placement.solver.memory import memory


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(torch.relu(self.up(self.norm(x))))).square().mean()


TEXT = """mesh dp = 2
mesh tp = 2
device cpu
input x : [batch, seq, width], Shard(batch) @ dp
param up.* : Shard(out) @ tp
param down.weight : Shard(in) @ tp
"""
EXAMPLE = {"x": torch.randn(8, 64, 8)}


@pytest.fixture(autouse=True)
def _not_jointly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small as it is, solved axis by axis: the joint problem has its limit tested with one axis."""
    monkeypatch.setattr(joint, "_SMALL", 0)


def held(text: str) -> int:
    return memory(plan(Net(), None, text, example=EXAMPLE)).rank.peak


def test_a_plan_that_fits_is_left_alone() -> None:
    free = held(TEXT)
    assert held(f"{TEXT}limit memory {free} B\n") == free


def test_a_tighter_limit_is_kept_and_its_gap_told() -> None:
    free = held(TEXT)
    made = plan(Net(), None, f"{TEXT}limit memory {free - 1} B\n", example=EXAMPLE)
    assert memory(made).rank.peak < free
    assert made.lower_bound[0] <= made.cost[0]
    if made.lower_bound != made.cost:
        assert any(note.code == "PLC305" for note in made.bound.notes)


def test_what_was_not_found_is_told_at_the_limit() -> None:
    with pytest.raises(PlacementError) as caught:
        plan(Net(), None, f"{TEXT}limit memory 1000 B\n", example=EXAMPLE)
    (fault,) = caught.value.diagnostics
    assert (fault.code, fault.line) == ("PLC305", 7)
    # What the least takes that was met is within what is met where it is the limit.
    least = re.search(r"there may be one\. The least found takes (\d+) B$", fault.message)
    assert held(f"{TEXT}limit memory {least[1]} B\n") <= int(least[1])
    assert "kept for the backward" in fault.notes[0]
    assert "of that kept" in fault.notes[1]
    assert "there may be one" in fault.message
