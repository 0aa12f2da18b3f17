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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import placement
from placement import api
from placement import runtime as rt
from placement.graph.capture import capture
from placement.graph.ir import Graph
from tests.gloo import GlooPool
from tests.parity import axes
from tests.parity.marked import KV, MASKS, NAMES, ORDERS, Model, inputs, spec
from tests.parity.measure import Measured

Pool = Callable[[int], GlooPool]
CALLS = {"gather": "rt.visible", "all_to_all": "rt.all_to_all", "ring": "rt.ring_attention"}


@functools.cache
def _captured(mask: str, heads: str) -> tuple[nn.Module, Graph]:
    torch.manual_seed(2)
    model, given = Model(mask, KV[heads]).double(), inputs()
    return model, capture(model, given, {name: NAMES[: x.ndim] for name, x in given.items()})


def measured(mesh: Any, way: str, order: str, mask: str, heads: str) -> tuple[Measured, Any]:
    """What is sent at the example's length is what the plan says."""
    (model, graph), given, found = _captured(mask, heads), inputs(), Measured()
    with mock.patch.object(api, "capture", return_value=graph):
        program = placement.compile(model, mesh, spec(way, order), example=given)
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
