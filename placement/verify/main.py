"""``verify``: a program on n ranks against the model on one device."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from placement import api
from placement.lang.diagnostics import Diagnostic, PlacementError
from placement.lang.spec import Spec
from placement.report.units import plural
from placement.runtime import SimulatedMesh, simulate
from placement.verify import sides
from placement.verify.compare import Parts, measure, replicas
from placement.verify.parity import Failure, Parity, Worst
from placement.verify.processes import on_processes
from placement.verify.sides import Emitted, Expected, Task
from placement.verify.training import LEARNING_RATE

BACKENDS = ("simulated", "gloo", "nccl")

# Relative errors that pass: of everything after one step, and of weights after all. AdamW divides gradients
# by their own size, which magnifies rounding.
_TOLERANCES = {torch.float64: (1e-11, 1e-9), torch.float32: (1e-4, 1e-2)}
_COARSE = (5e-2, 1e-1)
_WEIGHTS_FACTOR = 100.0


def verify(
    model: nn.Module,
    mesh: SimulatedMesh | Mapping[str, int] | None,
    spec: Spec | str | Path,
    *,
    example: Mapping[str, Any] | Sequence[Any],
    backend: str = "simulated",
    dtype: torch.dtype = torch.float64,
    steps: int = 5,
    sizes: Mapping[str, int] | None = None,
    tolerance: float | None = None,
    timeout: float = 600.0,
    progress: Callable[[str], None] | None = None,
) -> Parity:
    """Compare the program compiled from ``model`` with the model itself on one device.

    Compared are outputs, every module's output, gradients of inputs that require one, every parameter's gradient,
    weights after ``steps`` AdamW steps, and the bits of replicas on different ranks. The model is never
    changed: both sides are copies of it in ``dtype``. In float64 the model's casts to float32 are lifted on
    both sides. Dropout is compared with the same masks on both sides.

    Args:
        model: as for ``compile``, with its weights.
        mesh: ``placement.simulate(...)``, sizes by axis name, or None where the spec has the sizes.
        spec: as for ``compile``.
        example: what the model is called with, at one-device sizes: keyword arguments by name, or positional ones.
        backend: ``simulated`` (all ranks in this process), or ``gloo`` or ``nccl`` (a process for each rank; the
            model must pickle, and nccl needs a GPU for each).
        dtype: of parameters and of floating-point inputs.
        steps: AdamW steps; with 0, gradients are the last thing compared.
        sizes: as for ``compile``; where the mesh does not divide the example's, the program is made for these and
            pads the example in each call.
        tolerance: the largest relative error that passes, weights after steps 100 times that; the default
            depends on ``dtype`` (float64: 1e-11 and 1e-9).
        timeout: seconds that processes may take to get from one stage to the next.
        progress: called with a line of text at each stage.

    Raises:
        PlacementError: the spec or the model is at fault, or the model has no weights.
        ValueError: an unknown backend, or fewer GPUs than ranks.
        verify.processes.ProcessFailure: a process failed, ended or hung.
    """
    say = progress or (lambda _: None)
    if backend not in BACKENDS:
        raise ValueError(f"no backend {backend!r}: there are {', '.join(BACKENDS)}")
    _refuse_meta(model)
    planned = sizes
    sizes = dict(mesh.sizes) if isinstance(mesh, SimulatedMesh) else dict(mesh or {})
    device = torch.device("cuda" if backend == "nccl" else mesh.device if isinstance(mesh, SimulatedMesh) else "cpu")
    task = dataclasses.replace(_task(model, api.read(spec), example, sizes, dtype, steps), planned=planned)
    say("compiling")
    made = sides.emitted(task, device.type)
    sizes = sizes or dict(made.plan.mesh.sizes)
    if backend == "nccl" and torch.cuda.device_count() < _ranks(sizes):
        have = torch.cuda.device_count()
        raise ValueError(f"nccl needs a GPU for each of the {_ranks(sizes)} ranks; this machine has {have}")
    say(f"training on one device, {plural(steps, 'step')}")
    task, expected = _expected(task, made, device)
    ranks: list[Parts]
    if backend == "simulated":
        say(f"training on {_ranks(sizes)} simulated ranks, {plural(steps, 'step')}")
        on = mesh if isinstance(mesh, SimulatedMesh) else simulate(**sizes)
        first, ranks = sides.on_simulated_ranks(task, made, on, expected.objective)
        global_ = {sides.OUTPUTS: first.outputs, sides.INPUTS: first.inputs}
        found = {kind: {name: [x] for name, x in named.items()} for kind, named in global_.items()}
    else:
        ranks = on_processes(task, sizes, backend, expected.objective, timeout=timeout, say=say)
        found = {kind: sides.joined(ranks, kind, sizes) for kind in (sides.OUTPUTS, sides.INPUTS)}
    found |= {kind: sides.joined(ranks, kind, sizes) for kind in (sides.LAYERS, sides.GRADIENTS, sides.WEIGHTS)}
    say("comparing")
    mesh_text = ", ".join(f"{axis} = {n}" for axis, n in sizes.items())
    ranks_text = f"{_ranks(sizes)} {backend} ranks against one device, {_name(dtype)}"
    return _parity(
        f"{Path(task.spec.file).name}, {mesh_text}: {ranks_text}", task, made, expected, found, ranks, sizes, tolerance
    )


def _ranks(sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.values())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse_meta(model: nn.Module) -> None:
    missing = [name for name, x in [*model.named_parameters(), *model.named_buffers()] if x.is_meta]
    if missing:
        message = f"there are no numbers to compare: {missing[0]} is on the meta device"
        hint = "verify needs a model with weights; random ones will do"
        raise PlacementError([Diagnostic("PLC405", message, hint=hint)])


def _task(
    model: nn.Module,
    spec: Spec,
    example: Mapping[str, Any] | Sequence[Any],
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    steps: int,
) -> Task:
    """Copies of the model and the example in ``dtype``."""
    own = copy.deepcopy(model).to(dtype)
    own.zero_grad()
    config = getattr(own, "config", None)
    if getattr(config, "use_cache", None):
        config.use_cache = False  # type: ignore[union-attr] - as capture does: training has no cache

    def cast(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        made = x.detach().to(dtype) if x.is_floating_point() else x.detach()
        return made.clone().requires_grad_(x.requires_grad)

    return Task(own, pytree.tree_map(cast, example), spec, sizes, dtype, steps)


def _expected(task: Task, made: Emitted, device: torch.device) -> tuple[Task, Expected]:
    """One device's numbers; without dropout where torch's own code drops by masks of its own."""
    dropout = task.model.training and sides.random(made.plan)
    try:
        expected = sides.on_one_device(task, device)
        if dropout:
            expected.notes.append("dropout is active, with the same masks on both sides")
    except NotImplementedError as error:
        task = dataclasses.replace(task, model=copy.deepcopy(task.model).eval())
        expected = sides.on_one_device(task, device)
        expected.notes.append(f"compared in eval mode, without dropout: {error} cannot be given masks")
    return task, expected


def _parity(
    title: str,
    task: Task,
    made: Emitted,
    expected: Expected,
    found: Mapping[str, Any],
    ranks: Sequence[Parts],
    sizes: Mapping[str, int],
    tolerance: float | None,
) -> Parity:
    close, steady = _TOLERANCES.get(task.dtype, _COARSE)
    if tolerance is not None:
        close, steady = tolerance, tolerance * _WEIGHTS_FACTOR
    compared = {call: x for call, x in expected.layers.items() if call in made.picks}
    wanted = {**expected.tensors, sides.LAYERS: {str(call): x for call, x in compared.items()}}
    # The program returns what was captured: an output that only one device has (a cache) is none of its outputs.
    outputs = {o.name for o in made.plan.graph.outputs if o.value is not None}
    wanted[sides.OUTPUTS] = {name: x for name, x in wanted[sides.OUTPUTS].items() if name in outputs}
    worst: dict[str, Worst] = {}
    failures: list[Failure] = []
    layers: dict[str, float] = {}
    for kind in (sides.OUTPUTS, sides.LAYERS, sides.INPUTS, sides.GRADIENTS, sides.WEIGHTS):
        limit, floor = (steady, LEARNING_RATE) if kind == sides.WEIGHTS else (close, 0.0)
        result = measure(kind, wanted[kind], found[kind], limit, at_least=floor)
        worst[kind], errors, past = result
        failures += past
        layers = errors if kind == sides.LAYERS else layers
    worst[sides.REPLICAS], past = replicas([rank[sides.WEIGHTS] for rank in ranks], sizes)
    failures += past
    return Parity(title, worst, layers, tuple(failures), tuple(_notes(task, expected, len(compared))))


def _notes(task: Task, expected: Expected, compared: int) -> list[str]:
    notes = list(expected.notes)
    if task.lifts:
        notes.append(f"casts to float32 inside the model are lifted to {_name(task.dtype)} on both sides")
    if not expected.objective.weights:
        notes.append("no output has a gradient: outputs and layers are all there is to compare")
    else:
        steps = plural(task.steps, "AdamW step")
        notes.append(f"gradients are those of {expected.objective.name}; weights are those after {steps}")
    if left := len(expected.layers) - compared:
        notes.append(
            f"{left} of {plural(len(expected.layers), 'module call')} have no output of their own in the program"
        )
    return notes
