"""Whole models whose collectives are in rings and chunks: one device's numbers, and what explain says is sent."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

import placement
from placement import runtime as rt
from tests.parity import models
from tests.parity.axes import explained
from tests.parity.measure import Measured, call, drifted, gradients, shared_capture, whole
from tests.runtime.worlds import Pool


def measured(mesh: Any, mode: str, line: str) -> Measured:
    found = Measured()
    spec, given = models.spec("qwen3", mode) + line, models.inputs()
    with shared_capture("qwen3", embeds=False) as model:
        program = placement.compile(model, mesh, spec, example=given)
    model.zero_grad()
    want, _ = call(model, **given)
    with rt.record() as log:
        got, _ = call(program, **given)
    found.note("output", whole(got), whole(want))
    found.note("gradient", program.full_gradients(), gradients(model))
    found.drifted = drifted(program)
    explained(log, program.plan)
    assert "overlap=" in program.source
    return found


LINES = [
    ("sp", "lower ** : overlap = ring"),
    ("sp", "lower model.layers.* : overlap = chunks(5)\nlower model.layers.0.mlp : overlap = ring"),
    ("tp", "lower model.layers.* : overlap = chunks"),
    ("sp", "lower model : overlap = none"),
]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("mode", "line"), LINES)
def test_simulated_in_pieces(n: int, mode: str, line: str) -> None:
    assert not measured(rt.simulate(tp=n), mode, line).problems()


def test_blocks_in_several_places_go_in_one_piece() -> None:
    """Zigzag blocks are two chunks each: a ring of them would be of other tokens."""
    spec = models.spec("qwen3").replace("labels : [batch, seq]", "labels : [batch, seq], Shard(seq, zigzag) @ tp")
    spec = spec.replace("Shard(seq) @ tp", "Shard(seq, zigzag) @ tp") + "lower ** : overlap = ring\n"
    given = models.inputs()
    with shared_capture("qwen3", embeds=False) as model:
        program = placement.compile(model, rt.simulate(tp=2), spec, example=given)
    model.zero_grad()
    found = Measured()
    found.note("output", whole(call(program, **given)[0]), whole(call(model, **given)[0]))
    found.note("gradient", program.full_gradients(), gradients(model))
    assert not found.problems()
    assert "all_gather_linears" in program.source
    assert "overlap=" not in program.source


def on_ranks(mode: str, line: str) -> list[str]:
    return measured(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), mode, line).problems()


@pytest.mark.gloo
def test_in_processes_in_pieces(gloo: Pool) -> None:
    assert not any(gloo(2).run(on_ranks, *LINES[1]))
