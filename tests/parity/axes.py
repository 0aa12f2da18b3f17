"""The models and specs of the parity tests on meshes of several axes, and their comparison with one device."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import placement
from placement import api
from placement import runtime as rt
from placement.graph.capture import capture
from placement.graph.ir import Graph
from placement.graph.precision import lifted
from placement.report import to_json
from placement.solver.plan import Plan
from tests.parity import measure, models
from tests.parity.measure import Measured, call, gradients, whole

Sizes = Mapping[str, int]
Counts = Mapping[tuple[str, str, str, int], int]  # by phase, action, axis or group, and bytes
BATCH, SEQ = 8, 64  # enough tokens for dividing the batch to pay
SHAPES = ((BATCH, SEQ), (4, 24))  # of the steps: one compiled module serves both


def spec(family: str, mode: str, axes: Sizes, *, embeds: bool = False) -> str:
    """The example's spec on these axes: the batch on ``dp``, the sequence on ``cp`` (and within that on ``tp``)."""
    parts = {"dp": "Shard(batch) @ dp", "cp": "Shard(seq) @ cp"}
    placed = ", ".join(["", *(parts[axis] for axis in axes if axis in parts)])
    text = models.spec(family, mode, embeds=embeds)
    lines = []
    for line in text.splitlines():
        code = line.partition("#")[0].rstrip()
        if code == "mesh tp":
            lines += [f"mesh {axis}" for axis in axes]
        elif code.startswith(("input ", "output logits")):
            lines.append(code + placed)
        elif "Shard(seq) @ tp" in code and "cp" in axes:
            lines.append(code + ", Shard(seq) @ cp")
        else:
            lines.append(code)
    return "\n".join(lines) + "\n"


def inputs(*, batch: int = BATCH, seq: int = SEQ, embeds: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """One call's arguments: of the first half of the batch hardly a label counts, of the first row none."""
    given = models.inputs(batch, seq, embeds=embeds, seed=seed)
    given["labels"][0] = -100
    given["labels"][1, 2:] = -100
    return given


def build(family: str, layers: int) -> nn.Module:
    return models.build(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": layers})


@functools.cache
def _captured(family: str, embeds: bool, layers: int) -> Graph:
    first = ("batch", "seq", "hidden") if embeds else ("batch", "seq")
    given = inputs(embeds=embeds)
    with lifted(torch.float64):
        return capture(build(family, layers), given, {name: first[: x.ndim] for name, x in given.items()})


def compiled(mesh: Any, text: str, family: str, *, embeds: bool = False, layers: int = 1) -> tuple[nn.Module, Any]:
    """The one-device model and its compiled form, in float64 throughout."""
    model = build(family, layers)
    with mock.patch.object(api, "capture", return_value=_captured(family, embeds, layers)):
        return model, placement.compile(model, mesh, text, example=inputs(embeds=embeds))


def own(program: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One-device tensors by input as a rank's program takes them; on a simulated mesh it takes them as they are."""
    if isinstance(program, rt.Simulated):
        return dict(given)
    blocks = program.own_inputs(**{name: x.detach() for name, x in given.items()})
    return {name: x.clone().requires_grad_(given[name].requires_grad) for name, x in blocks.items()}


def explained(log: list[rt.Event], plan: Plan) -> None:
    """What a step at the plan's own sizes communicated is what the plan says, and its explanation."""
    counts = dict(Counter((e.phase, e.kind, e.axis, e.bytes) for e in log))
    assert counts == dict(Counter((x.phase, x.action.value, x.axis, x.nbytes) for x in plan.launches()))
    said = json.loads(to_json(plan))["totals"]
    assert totals(counts) == {axis: phases for axis, phases in said.items() if any(phases.values())}


def totals(counts: Counts) -> dict[str, Any]:
    """As ``explain --format json`` has them, of the axes and groups that send anything."""
    found: dict[str, Any] = {}
    for (phase, action, axis, size), count in sorted(counts.items()):
        by_action = found.setdefault(axis, {"forward": {}, "backward": {}})[phase]
        entry = by_action.setdefault(action, {"count": 0, "bytes": 0})
        entry["count"] += count
        entry["bytes"] += count * size
    return found


def compared(found: Measured, model: nn.Module, program: Any, given: Mapping[str, Tensor]) -> list[rt.Event]:
    """One step on both sides: outputs, gradients of inputs and of every parameter. Returns what was sent."""
    model.zero_grad()
    program.zero_grad()
    want, into = call(model, **given)
    with rt.record() as log:
        got, back = call(program, **own(program, given))
    assert type(got) is type(want)
    found.note("output", whole(got), whole(want))
    found.note("input gradient", back, own(program, {name: grad for name, grad in into.items() if grad is not None}))
    found.note("gradient", program.full_gradients(), gradients(model))
    return log


def measured(mesh: Any, family: str, mode: str, axes: Sizes, *, embeds: bool = False, layers: int = 1) -> Measured:
    """Compile, then train for two steps at two shapes next to one device; count what is sent."""
    found = Measured()
    model, program = compiled(mesh, spec(family, mode, axes, embeds=embeds), family, embeds=embeds, layers=layers)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (model, program)]
    for step, (batch, seq) in enumerate(SHAPES):
        log = compared(found, model, program, inputs(batch=batch, seq=seq, embeds=embeds))
        if not step:
            explained(log, program.plan)
        for optimizer in optimizers:
            optimizer.step()
    found.note("weight", program.full_state_dict(), dict(model.state_dict()))
    found.drifted = measure.drifted(program)
    return found


def on_gloo(family: str, mode: str, axes: Sizes, embeds: bool) -> Measured:
    """``measured`` on this process's mesh: every process solves."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    return measured(mesh, family, mode, axes, embeds=embeds)
