"""How far a compiled model is from the model on one device: the worst relative error of every kind."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import placement
from placement import api
from placement import runtime as rt
from placement.graph.capture import capture
from placement.graph.ir import Graph
from placement.graph.precision import lifted
from tests.parity import models

TOLERANCES = {"output": 1e-11, "input gradient": 1e-11, "gradient": 1e-11, "weight": 1e-9}
_NOISE = 1e-13
# Batch and sequence of further calls through one compiled module, whose example was 3 by 12.
SHAPES = ((3, 12), (2, 20), (1, 16))


@dataclass
class Measured:
    """Errors by kind and name, each relative to the largest element of what one device has."""

    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    drifted: list[str] = field(default_factory=list)  # parameters whose replicas are not bit-equal

    def note(self, kind: str, got: dict[str, Tensor | None], want: dict[str, Tensor | None]) -> None:
        """Compare by name; a tensor on one side only is an infinite error."""
        worst = self.errors.setdefault(kind, {})
        for name in {**got, **want}:
            one, many = want.get(name), got.get(name)
            if one is None and many is None:
                continue
            error = (
                float("inf")
                if one is None or many is None or one.shape != many.shape
                else _error(many, one, want, name)
            )
            worst[name] = max(worst.get(name, 0.0), error)

    def problems(self) -> list[str]:
        """What is past its tolerance."""
        found = [
            f"{kind} of {name}: {error:.2e}"
            for kind, errors in self.errors.items()
            for name, error in errors.items()
            if not error <= TOLERANCES[kind]
        ]
        return found + [f"replicas of {name} differ" for name in self.drifted]


def _error(got: Tensor, want: Tensor, everything: dict[str, Any], name: str) -> float:
    if not want.numel():
        return 0.0
    scale = _largest(want)
    if scale < _NOISE * (most := max((_largest(x) for x in everything.values() if x is not None), default=0.0)):
        # Zero but for rounding, as the gradient of what is added to all keys of a query: softmax does not see it.
        scale = most
    return float(((got.detach() - want.detach()).abs().max() / max(scale, 1e-300)).nan_to_num(nan=float("inf")))


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def whole(outputs: Any) -> dict[str, Tensor]:
    """The tensors of a model's outputs as one device has them."""
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in outputs.items() if isinstance(v, Tensor)}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """One-device gradients by name, tied names included."""
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


def ranks(program: Any) -> list[Any]:
    """The programs of the ranks in this process."""
    return program.programs if isinstance(program, rt.Simulated) else [program]


def drifted(program: Any) -> list[str]:
    """Parameters that no axis cuts and that are not bit-equal on all ranks."""
    own = [{name: p.detach() for name, p in r.named_parameters() if not r.layout_of(name)} for r in ranks(program)]
    if not isinstance(program, rt.Simulated):
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own[0])
        own = every
    return [name for name, p in own[0].items() if not all(torch.equal(p, other[name]) for other in own)]


def call(model: Any, **inputs: Tensor) -> tuple[Any, dict[str, Tensor | None]]:
    """Forward and backward; the outputs, and the gradients of inputs that have one."""
    fresh = {k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in inputs.items()}
    with lifted(torch.float64):
        out = model(**fresh)
    out["loss"].backward()
    return out, {k: v.grad for k, v in fresh.items() if v.requires_grad}


@functools.cache
def _captured(family: str, embeds: bool) -> tuple[nn.Module, Graph]:
    model = models.build(family)
    given = models.inputs(embeds=embeds)
    first = ("batch", "seq", "hidden") if embeds else ("batch", "seq")
    with lifted(torch.float64):
        return model, capture(model, given, {name: first[: x.ndim] for name, x in given.items()})


@contextlib.contextmanager
def shared_capture(family: str, embeds: bool) -> Iterator[nn.Module]:
    """The model, and while it is open, one graph of it for all meshes and specs: capture depends on neither."""
    model, graph = _captured(family, embeds)
    model.load_state_dict(models.build(family).state_dict())
    with mock.patch.object(api, "capture", return_value=graph):
        yield model


def compiled(mesh: Any, family: str, mode: str, *, embeds: bool = False) -> tuple[nn.Module, Any]:
    """The one-device model and its compiled form, in float64 throughout."""
    spec, example = models.spec(family, mode, embeds=embeds), models.inputs(embeds=embeds)
    with shared_capture(family, embeds) as model:
        return model, placement.compile(model, mesh, spec, example=example)


def measure(mesh: Any, family: str, mode: str, *, embeds: bool = False) -> Measured:
    """Compile and call at every shape next to one device; with token ids, a step of training follows each call."""
    found = Measured()
    model, program = compiled(mesh, family, mode, embeds=embeds)
    before = copy.deepcopy(model.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (model, program)]
    for batch, seq in SHAPES[: 2 if embeds else None]:
        model.zero_grad()
        program.zero_grad()
        given = models.inputs(batch, seq, embeds=embeds)
        want, into = call(model, **given)
        got, back = call(program, **given)
        assert type(got) is type(want)
        found.note("output", whole(got), whole(want))
        found.note("input gradient", back, into)
        found.note("gradient", program.full_gradients(), gradients(model))
        for optimizer in () if embeds else optimizers:
            optimizer.step()
    if not embeds:
        after = model.state_dict()
        assert all(not torch.equal(before[name], after[name]) for name, _ in model.named_parameters())
        found.note("weight", program.full_state_dict(), after)
        found.drifted = drifted(program)
    return found


def on_gloo(n: int, family: str, mode: str, embeds: bool) -> Measured:
    """``measure`` on this process's mesh of n ranks."""
    return measure(init_device_mesh("cpu", (n,), mesh_dim_names=("tp",)), family, mode, embeds=embeds)
