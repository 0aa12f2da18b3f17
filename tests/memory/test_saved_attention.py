"""What attention over a cut sequence keeps for the backward, in every way, is what the model of memory says."""

from __future__ import annotations

import pytest

import placement
from placement import runtime as rt
from placement.solver.memory import memory
from tests.memory.saved_hooks import kept_bytes
from tests.parity.marked import MASKS, Model, inputs, spec


@pytest.mark.parametrize("way", ["gather", "all_to_all", "ring"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_each_way_keeps(way: str, dropout: float) -> None:
    for mask in MASKS if not dropout else ("packed", "padded"):
        model, given = Model(mask, 4, dropout).float(), inputs()
        given["x"] = given["x"].detach().float().requires_grad_()
        program = placement.compile(model, rt.simulate(cp=2), spec(way, ", zigzag"), example=given)
        exempt = [*program.parameters(), *program.buffers()]
        kept = kept_bytes(lambda p=program, g=given: p(**g), exempt, given.values(), 2)
        assert memory(program.plan).rank.saved_bytes == kept, mask
