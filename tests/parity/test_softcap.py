"""Attention whose scores a tanh keeps small: the plain formula on one device against every way of the program."""

from __future__ import annotations

import dataclasses
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
from placement.graph.attention import ATTENTION
from placement.graph.capture import capture
from placement.graph.ir import Graph
from placement.solver.memory import memory
from tests.gloo import GlooPool
from tests.memory.saved_hooks import kept_bytes
from tests.parity import axes
from tests.parity.marked import INNER, KV, MASKS, NAMES, ORDERS, Attention, Model, inputs, spec
from tests.parity.measure import Measured

Pool = Callable[[int], GlooPool]
CAP = 0.8  # scores are about as large
CALLS = {"gather": "rt.capped_attention", "all_to_all": "rt.all_to_all", "ring": "softcap=0.8"}


class Capped(Attention):
    """As it is written where no op has it: scores, their tanh, the mask, softmax, dropout."""

    def forward(self, x: Tensor, documents: Tensor, kept: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, INNER)).transpose(1, 2) for one in (self.q, self.k, self.v))
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
        scores = CAP * torch.tanh(q @ k.mT * INNER**-0.5 / CAP)
        mask = self.mask(torch.arange(x.shape[1]), documents, kept)
        blind = ~mask.any(-1, keepdim=True)
        weights = scores.masked_fill(~mask, -torch.inf).masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
        y = F.dropout(weights, self.dropout, self.training) @ v
        return self.out(y.transpose(1, 2).flatten(2))


@functools.cache
def _captured(mask: str, heads: str, dropout: float, dtype: torch.dtype) -> tuple[nn.Module, Graph]:
    """The formula's model, and the program of the same one with torch's op, which is then told of the cap."""
    torch.manual_seed(2)
    plain, given = Model(mask, KV[heads], dropout).to(dtype), inputs()
    given["x"] = given["x"].detach().to(dtype).requires_grad_()
    graph = capture(plain, given, {name: NAMES[: x.ndim] for name, x in given.items()})
    nodes = tuple(_told(node) for node in graph.nodes)
    plain.attention.__class__ = Capped
    return plain, dataclasses.replace(graph, nodes=nodes)


def _told(node: Any) -> Any:
    if not str(node.op).startswith(("aten.scaled_dot_product", "placement.attention")):
        return node
    given = {**dict(zip(("dropout_p", "is_causal"), node.args[4:], strict=False)), **node.kwargs}
    causal = {"right": 0} if given.pop("is_causal", False) else {}
    args = node.args if node.op is ATTENTION else (*node.args[:3], (), ())
    return dataclasses.replace(node, op=ATTENTION, args=args, kwargs={"compare": (), **given, **causal, "softcap": CAP})


def compiled(mesh: Any, way: str, order: str, mask: str, heads: str, dropout: float = 0.0) -> tuple[nn.Module, Any]:
    model, graph = _captured(mask, heads, dropout, torch.float64)
    with mock.patch.object(api, "capture", return_value=graph):
        return model, placement.compile(model, mesh, spec(way, order), example=inputs())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_every_way(mask: str, dropout: float) -> None:
    """Of 36 plans of each mask every fifth, with dropout every seventh: each way, order and grouping with some mask."""
    cases = list(itertools.product(CALLS, ORDERS, KV, (2, 3)))
    for way, order, heads, n in cases[list(MASKS).index(mask) :: 7 if dropout else 5]:
        model, program = compiled(rt.simulate(cp=n), way, order, mask, heads, dropout)
        found = Measured()
        with rt.same_random(model):
            axes.explained(axes.compared(found, model, program, inputs()), program.plan)
        assert not found.problems(), (way, order, heads, n)
        assert CALLS[way] in program.source
        assert "F.scaled_dot_product_attention" not in program.source


@pytest.mark.parametrize("way", CALLS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_is_kept(way: str, dropout: float) -> None:
    for mask in ("bidirectional", "packed"):
        model, graph = _captured(mask, "grouped", dropout, torch.float32)
        given = inputs()
        given["x"] = given["x"].detach().float().requires_grad_()
        with mock.patch.object(api, "capture", return_value=graph):
            program = placement.compile(model, rt.simulate(cp=2), spec(way, ", zigzag"), example=given)
        exempt = [*program.parameters(), *program.buffers()]
        kept = kept_bytes(lambda p=program, g=given: p(**g), exempt, given.values(), 2)
        assert memory(program.plan).rank.saved_bytes == kept, mask


def on_gloo(n: int) -> list[str]:
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))
    problems = []
    for way in CALLS:
        model, program = compiled(mesh, way, ", zigzag", "packed", "grouped")
        found = Measured()
        axes.compared(found, model, program, inputs())
        problems += [f"{way}: {problem}" for problem in found.problems()]
    return problems


@pytest.mark.gloo
def test_processes(gloo: Pool) -> None:
    assert not [problem for problems in gloo(2).run(on_gloo, 2) for problem in problems]
