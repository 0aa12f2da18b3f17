"""Whole models whose collectives are in rings and chunks: one device's numbers, and what explain says is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import placement
from placement import runtime as rt
from tests.parity import models
from tests.parity.axes import explained
from tests.parity.measure import Measured, call, drifted, gradients, shared_capture, whole
from tests.runtime.worlds import Pool

# A device so slow that products of a few rows are worth cutting, and a link that is slower.
SLOW = """\
device slow = 0.05 GFLOP/s float32, 1 GB/s, 16 GB
link wire = 10 MB/s, 1 us
mesh tp over wire"""


def measured(mesh: Any, mode: str, line: str, setting: str = "mesh tp", said: tuple[str, ...] = ("",)) -> Measured:
    found = Measured()
    spec, given = models.spec("qwen3", mode).replace("mesh tp", setting, 1) + line, models.inputs()
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
    assert all(f"overlap={how}" in program.source for how in said)
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


@pytest.mark.parametrize(("mode", "said"), [("sp", ('"ring"',)), ("tp", ("4",))])
def test_simulated_as_prices_cut(mode: str, said: tuple[str, ...]) -> None:
    assert not measured(rt.simulate(tp=2), mode, "", SLOW, said).problems()


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


def test_blocks_of_features_go_in_one_piece() -> None:
    """A product takes whole rows: a ring of parts of them would multiply them with weights of others."""
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False)).double()
    spec = "mesh tp\ninput input : [batch, seq, hidden], Shard(hidden) @ tp\nparam 0.weight : Shard(out) @ tp\n"
    spec += "param 1.weight : Shard(in) @ tp\noutput output : Shard(2) @ tp\nlower ** : overlap = ring\n"
    x = torch.randn(3, 4, 6, dtype=torch.float64).requires_grad_()
    program = placement.compile(model, rt.simulate(tp=2), spec, example={"input": x})
    given, wanted = (x.detach().clone().requires_grad_() for _ in range(2))
    got, want = program(input=given), model(wanted)
    got.pow(2).sum().backward()
    want.pow(2).sum().backward()
    found = Measured()
    found.note("output", {"output": got}, {"output": want})
    found.note("input gradient", {"input": given.grad}, {"input": wanted.grad})
    found.note("gradient", program.full_gradients(), gradients(model))
    assert not found.problems()
    assert "all_gather_linears" in program.source
    assert "overlap=" not in program.source


def on_ranks(*how: Any) -> list[str]:
    return measured(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), *how).problems()


@pytest.mark.gloo
def test_in_processes_in_pieces(gloo: Pool) -> None:
    assert not any(gloo(2).run(on_ranks, *LINES[1]))


@pytest.mark.gloo
def test_in_processes_as_prices_cut(gloo: Pool) -> None:
    assert not any(gloo(2).run(on_ranks, "sp", "", SLOW, ('"ring"',)))
