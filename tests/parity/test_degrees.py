"""The number of ranks changes nothing: losses of ten steps with dropout on, and eight ranks on three axes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import placement
from placement import api
from placement import runtime as rt
from placement.graph.capture import capture
from placement.graph.ir import Graph
from placement.graph.precision import lifted
from tests.cases import toys
from tests.gloo import GlooPool
from tests.parity import axes, models
from tests.parity.measure import Measured

Pool = Callable[[int], GlooPool]
BATCH, SEQ, STEPS = 2, 16, 10
DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


def batches() -> list[dict[str, torch.Tensor]]:
    return [models.inputs(BATCH, SEQ, seed=seed) for seed in range(STEPS)]


@functools.cache
def captured() -> Graph:
    with lifted(torch.float64):
        given = batches()[0]
        return capture(models.build("gpt2", n_layer=1, **DROPOUT), given, dict.fromkeys(given, ("batch", "seq")))


def trained(model: nn.Module, step: Callable[..., torch.Tensor]) -> list[float]:
    """The loss of every step."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for batch in batches():
        optimizer.zero_grad()
        loss = step(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@functools.cache
def one_device() -> list[float]:
    model = models.build("gpt2", n_layer=1, **DROPOUT)
    with rt.same_random(model, seed=5), lifted(torch.float64):
        return trained(model, lambda **batch: model(**batch).loss)


def spec(sizes: dict[str, int], way: str, order: str) -> str:
    inside = ", Shard(seq) @ tp" if "tp" in sizes else ""
    text = "link quick = 10 GB/s, 1 ns\n" + "".join(f"mesh {axis} over quick\n" for axis in sizes)
    text += f"input input_ids, labels : [batch, seq], Shard(seq{order}) @ cp{inside}\n"
    text += f"strategy transformer.h.*.attn : {way} @ cp\n"
    if "tp" in sizes:  # heads on the inner axis, and blocks of tokens between
        text += "strategy transformer.h.*.attn : all_to_all @ tp\n"
    return text


@pytest.mark.parametrize(
    ("sizes", "way", "order"),
    [
        ({"cp": 1}, "gather", ""),
        ({"cp": 2}, "ring", ", zigzag"),
        ({"cp": 4}, "ring", ""),
        ({"cp": 4}, "all_to_all", ", zigzag"),
        ({"cp": 2}, "gather", ", zigzag"),
        ({"cp": 2, "tp": 2}, "ring", ", zigzag"),
        ({"cp": 2, "tp": 2}, "gather", ""),
        ({"cp": 2, "tp": 2}, "all_to_all", ""),
    ],
)
def test_the_same_ten_losses(sizes: dict[str, int], way: str, order: str) -> None:
    """The same seed and data: embeddings, residuals and probabilities are dropped alike, whoever has them."""
    model = models.build("gpt2", n_layer=1, **DROPOUT)
    with mock.patch.object(api, "capture", return_value=captured()):
        program = placement.compile(model, rt.simulate(**sizes), spec(sizes, way, order), example=batches()[0])
    placement.seed(program, 5)
    losses = trained(program, lambda **batch: program(**batch)["loss"])
    assert len(set(losses)) == STEPS
    torch.testing.assert_close(losses, one_device(), rtol=1e-9, atol=0)


def eight_axes(names: str, rows: str, columns: str, layers: str, attention: str) -> str:
    """Sequence over cp and inside of it over tp between the regions, heads over tp in attention, batch over dp."""
    return f"""
link quick = 10 GB/s, 1 ns
mesh dp over quick
mesh cp over quick
mesh tp over quick
input {names} : [batch, seq], Shard(batch) @ dp, Shard(seq, zigzag) @ cp
param {rows} : Shard(out) @ tp
param {columns} : Shard(in) @ tp
value {layers} : Shard(batch) @ dp, Shard(seq, zigzag) @ cp, Shard(seq) @ tp
strategy {attention} : ring @ cp
"""


QWEN3 = eight_axes(
    "input_ids, labels",
    "model.layers.*.{self_attn.{q,k,v},mlp.{gate,up}}_proj.weight",
    "model.layers.*.{self_attn.o,mlp.down}_proj.weight",
    "model.layers.*",
    "model.layers.*.self_attn",
)


EIGHT = {"dp": 2, "cp": 2, "tp": 2}
SMALL = {"batch": 4, "seq": 16}


def test_eight_ranks_simulated() -> None:
    model, given, found = models.build("qwen3", num_hidden_layers=1), axes.inputs(batch=4, seq=16), Measured()
    with lifted(torch.float64):
        graph = capture(model, given, dict.fromkeys(given, ("batch", "seq")))
    with mock.patch.object(api, "capture", return_value=graph):
        program = placement.compile(model, rt.simulate(**EIGHT), QWEN3, example=given)
    axes.explained(axes.compared(found, model, program, given), program.plan)
    axes.compared(found, model, program, axes.inputs(batch=2, seq=24))
    assert not found.problems()
    assert "rt.ring_attention" in program.source
    assert "rt.all_gather_linears" in program.source
    assert "rt.reduce_scatter_linear" in program.source


TOY = eight_axes(
    "ids, labels",
    "blocks.*.{attention.{q,k,v}.weight,attention.q.bias,mlp.up.{weight,bias}}",
    "blocks.*.{attention.o,mlp.down}.weight",
    "blocks.*",
    "blocks.*.attention",
)


def on_gloo(source: str) -> list[str]:
    """The emitted program, put on real processes."""
    names: dict[str, Any] = {}
    exec(source, names)
    program = names["build"](init_device_mesh("cpu", tuple(EIGHT.values()), mesh_dim_names=tuple(EIGHT)))
    model, found = toys.drawn(toys.Toy()), Measured()
    program.load_full_state_dict(model.state_dict())
    axes.compared(found, model, program, toys.batch(size=4, seq=16))
    return found.problems()


@pytest.mark.gloo
def test_eight_processes(gloo: Pool) -> None:
    with mock.patch.object(api, "capture", return_value=toys._captured()):
        program = placement.compile(toys.Toy().double(), rt.simulate(**EIGHT), TOY, example=toys.batch(), sizes=SMALL)
    assert "rt.ring_attention" in program.source
    assert not [problem for problems in gloo(8).run(on_gloo, program.source) for problem in problems]
