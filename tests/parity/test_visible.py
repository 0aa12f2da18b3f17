"""Attention over a cut sequence, for every way, order, mask, grouping of heads and number of ranks.

The mask is written out by the model, from positions and from marks that are inputs; what a rank makes of it is its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import placement
from placement import api
from placement import runtime as rt
from placement.graph.capture import capture
from placement.graph.ir import Graph
from tests.gloo import GlooPool
from tests.parity import axes
from tests.parity.measure import Measured

Pool = Callable[[int], GlooPool]
BATCH, SEQ, WIDTH, HEADS, INNER = 2, 24, 10, 12, 4
KV = {"multi-head": 12, "grouped": 4, "multi-query": 1}


def causal(at: Tensor, _: Tensor, __: Tensor) -> Tensor:
    return at[:, None] >= at[None]


def everything(at: Tensor, _: Tensor, __: Tensor) -> Tensor:
    return (at[:, None] >= 0) & (at[None] >= 0)


def packed(at: Tensor, documents: Tensor, _: Tensor) -> Tensor:
    return causal(at, documents, documents) & (documents[:, None, :, None] == documents[:, None, None, :])


def window(at: Tensor, _: Tensor, __: Tensor) -> Tensor:
    return causal(at, at, at) & (at[:, None] - at[None] < 5)


def padded(at: Tensor, _: Tensor, kept: Tensor) -> Tensor:
    return causal(at, at, at) & kept.bool()[:, None, None]


MASKS = {"causal": causal, "bidirectional": everything, "packed": packed, "window": window, "padded": padded}


class Attention(nn.Module):
    """Queries, keys and values with biases, and what comes out of them projected."""

    def __init__(self, mask: str, kv: int) -> None:
        super().__init__()
        self.mask, self.kv = MASKS[mask], kv
        self.q, self.out = nn.Linear(WIDTH, HEADS * INNER), nn.Linear(HEADS * INNER, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, kv * INNER), nn.Linear(WIDTH, kv * INNER)

    def forward(self, x: Tensor, documents: Tensor, kept: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, INNER)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mask = self.mask(torch.arange(x.shape[1]), documents, kept)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A loss in which every token has its own share."""

    def __init__(self, mask: str, kv: int) -> None:
        super().__init__()
        self.attention = Attention(mask, kv)

    def forward(self, x: Tensor, documents: Tensor, kept: Tensor) -> dict[str, Tensor]:
        y = self.attention(x, documents, kept)
        return {"y": y, "loss": (y * torch.arange(1, x.shape[1] + 1)[:, None]).square().sum()}


def inputs() -> dict[str, Tensor]:
    """Documents that end inside of blocks, one longer than a block; of one row the first queries see nothing."""
    at, generator = torch.arange(SEQ), torch.Generator().manual_seed(1)
    ends = torch.tensor([[2, 5, SEQ], [13, 15, SEQ]])
    return {
        "x": torch.randn(BATCH, SEQ, WIDTH, generator=generator, dtype=torch.float64).requires_grad_(),
        "documents": (at[None, :, None] >= ends[:, None]).sum(-1),
        "kept": torch.stack((at >= 7, at < 11)).long(),
    }


NAMES = ("batch", "seq", "width")
ORDERS = ("", ", zigzag")
CALLS = {"gather": "rt.visible", "all_to_all": "rt.all_to_all", "ring": "rt.ring_attention"}


@functools.cache
def _captured(mask: str, heads: str) -> tuple[nn.Module, Graph]:
    torch.manual_seed(2)
    model, given = Model(mask, KV[heads]).double(), inputs()
    return model, capture(model, given, {name: NAMES[: x.ndim] for name, x in given.items()})


def measured(mesh: Any, way: str, order: str, mask: str, heads: str) -> tuple[Measured, Any]:
    """What is sent at the example's length is what the plan says."""
    (model, graph), given, found = _captured(mask, heads), inputs(), Measured()
    spec = "mesh cp over quick\nlink quick = 10 GB/s, 1 ns\n"
    spec += f"input x : [batch, seq, width], Shard(seq{order}) @ cp\n"
    spec += f"input documents, kept : [batch, seq], Shard(seq{order}) @ cp\nstrategy attention : {way} @ cp\n"
    with mock.patch.object(api, "capture", return_value=graph):
        program = placement.compile(model, mesh, spec, example=given)
    axes.explained(axes.compared(found, model, program, given), program.plan)
    return found, program


@pytest.mark.parametrize("mask", MASKS)
def test_every_way(mask: str) -> None:
    """72 plans of each mask: ways, orders, heads and ranks."""
    for way, order, heads, n in itertools.product(CALLS, ORDERS, KV, (2, 3, 4)):
        found, program = measured(rt.simulate(cp=n), way, order, mask, heads)
        assert not found.problems(), (way, order, heads, n)
        assert CALLS[way] in program.source or (way, mask) == ("gather", "bidirectional")


def on_gloo(n: int) -> list[str]:
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))
    cases = itertools.product(CALLS, ORDERS, ("packed", "window", "padded"))
    found = {case: measured(mesh, *case, "grouped")[0].problems() for case in cases}
    return [f"{case}: {problem}" for case, problems in found.items() for problem in problems]


@pytest.mark.gloo
def test_processes(gloo: Pool) -> None:
    assert not [problem for problems in gloo(3).run(on_gloo, 3) for problem in problems]
