"""A family's compiled form next to one device: every output, every gradient, every launch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import placement
from placement import api
from placement import runtime as rt
from placement.graph.capture import capture
from placement.graph.ir import Graph
from placement.graph.precision import lifted
from tests.parity.axes import explained
from tests.parity.measure import Measured, drifted, gradients, whole
from tests.zoo.families import Family


@contextlib.contextmanager
def one_capture() -> Iterator[None]:
    """While it is open, one graph of a model serves all meshes and specs: capture depends on neither."""
    known: list[Graph] = []

    def once(model: nn.Module, example: Mapping[str, Any], dims: Mapping[str, Any]) -> Graph:
        if not known:
            known.append(capture(model, example, dims))
        return known[0]

    with mock.patch.object(api, "capture", once):
        yield


def compiled(family: Family, model: nn.Module, mode: str, n: int) -> Any:
    with lifted(torch.float64):
        return placement.compile(model, placement.simulate(tp=n), family.spec(mode), example=family.inputs())


def step(model: Any, given: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Outputs, and gradients of inputs, of a backward through every output that has a gradient: none cancels out."""
    fresh = {k: _fresh(v) for k, v in given.items()}
    with lifted(torch.float64):
        out = whole(model(**fresh))
    total = sum(
        (x * torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).reshape(x.shape)).sum()
        for x in out.values()
        if x.requires_grad
    )
    assert isinstance(total, Tensor)
    total.backward()
    tensors = {k: v for k, v in fresh.items() if isinstance(v, Tensor)}
    return out, {k: v.grad for k, v in tensors.items() if v.requires_grad}


def _fresh(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def measured(family: Family, model: nn.Module, mode: str, n: int) -> list[str]:
    """What differs from one device; empty where nothing does."""
    found = Measured()
    program = compiled(family, model, mode, n)
    model.zero_grad()
    want, into = step(model, family.inputs())
    with rt.record() as log:
        got, back = step(program, family.inputs())
    found.note("output", got, want)
    found.note("input gradient", back, into)
    found.note("gradient", program.full_gradients(), gradients(model))
    found.drifted = drifted(program)
    explained(log, program.plan)
    return found.problems()
