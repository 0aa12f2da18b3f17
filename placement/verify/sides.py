"""The two sides of a comparison: the model on one device, and its program on ranks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from placement import api
from placement.emit.expressions import Printer, draws
from placement.emit.module import instantiate, load
from placement.emit.source import Source, write
from placement.graph.capture import Example
from placement.graph.ir import Call, Value, evaluate
from placement.graph.precision import lifted
from placement.lang.diagnostics import Diagnostic, PlacementError
from placement.lang.spec import Spec
from placement.runtime import Cut, Padded, Program, SimulatedMesh, same_random
from placement.runtime.cuts import block
from placement.runtime.slices import own_block
from placement.solver.lengths import parts as blocks_of
from placement.solver.padding import own_lengths
from placement.solver.plan import Plan
from placement.types import Kind
from placement.verify.compare import Layout, Part, Parts, wholes
from placement.verify.training import First, Objective, train, watched

OUTPUTS, LAYERS, INPUTS = "outputs", "layers", "input gradients"
GRADIENTS, WEIGHTS, REPLICAS = "parameter gradients", "weights", "replicas"


@dataclass(frozen=True, slots=True)
class Task:
    """What is compared. The model is a copy of the user's, already of ``dtype``; ranks may be given it pickled."""

    model: nn.Module
    example: Mapping[str, Any] | Sequence[Any]
    spec: Spec
    sizes: Mapping[str, int]
    dtype: torch.dtype
    steps: int
    planned: Mapping[str, int] | None = None  # sizes of dims that the plan is for, where they are not the example's

    def precision(self) -> contextlib.AbstractContextManager[None]:
        """Casts to float32 lifted where ``dtype`` is wider than that."""
        return lifted(self.dtype) if self.lifts else contextlib.nullcontext()

    @property
    def lifts(self) -> bool:
        """Whether casts inside the model are lifted."""
        return torch.finfo(self.dtype).bits > torch.finfo(torch.float32).bits

    def plan(self, device_type: str) -> Plan:
        """The plan, captured in the precision of the comparison. Raises PlacementError."""
        with self.precision():
            return api.plan(
                self.model,
                self.sizes,
                self.spec,
                example=self.example,
                sizes=self.planned,
                device_type=device_type,
            )

    def inputs(self, device: torch.device) -> tuple[Example, dict[str, Tensor]]:
        """The example, and fresh leaves of its tensors by name."""
        call = Example.of(self.model, self.example)
        tensors = [x.detach().to(device).clone().requires_grad_(x.requires_grad) for x in call.tensors]
        return call, dict(zip(call.names, tensors, strict=True))


@dataclass(slots=True)
class Expected:
    """One device's tensors by kind and name, and the objective that both sides differentiate."""

    tensors: dict[str, dict[str, Tensor]]
    layers: dict[Call, Tensor]
    objective: Objective
    notes: list[str] = field(default_factory=list[str])


# -- one device -------------------------------------------------------------------------------------


def on_one_device(task: Task, device: torch.device) -> Expected:
    """Train a copy of the model as it stands. Raises PlacementError where it cannot be called (PLC404)."""
    model = copy.deepcopy(task.model).to(device)
    objective = Objective()
    gradients: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(same_random(model))
        stack.enter_context(task.precision())
        watch = stack.enter_context(contextlib.ExitStack())
        seen = watch.enter_context(watched(model))

        def look() -> None:
            watch.close()
            gradients.update(_by_name(model, _gradient))

        first = _called(task, model, device, objective, look)
    return Expected(
        {
            OUTPUTS: first.outputs,
            INPUTS: first.inputs,
            GRADIENTS: gradients if objective.weights else {},
            WEIGHTS: _by_name(model, lambda p: p.detach().clone()) if objective.weights and task.steps else {},
        },
        seen,
        objective,
    )


def _called(
    task: Task, model: nn.Module, device: torch.device, objective: Objective, look: Callable[[], None]
) -> First:
    call, inputs = task.inputs(device)
    try:
        return train(model, lambda m: call.call(m, list(inputs.values())), inputs, objective, task.steps, look)
    except (NotImplementedError, PlacementError):
        raise
    except Exception as error:
        message = f"the model fails on the example, on one device: {type(error).__name__}: {error}"
        raise PlacementError([Diagnostic("PLC404", message)]) from error


def _by_name(model: nn.Module, what: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    return {name: what(p) for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}


def _gradient(parameter: nn.Parameter) -> Tensor:
    """A copy of the gradient; a parameter that has none is as good as one of zeros."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()


# -- ranks ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Emitted:
    """A plan, its source, and which result of each emitted module is the first that the original returns."""

    plan: Plan
    source: Source
    picks: Mapping[Call, int]
    layouts: Mapping[Call, Layout]
    lengths: Mapping[Call, Mapping[int, int]]

    def part(self, call: Call, tensor: Tensor) -> Part:
        """What a module call returned on one rank."""
        return Part(tensor, self.layouts[call], self.lengths[call])


def emitted(task: Task, device_type: str) -> Emitted:
    """Plan and emit. Raises PlacementError."""
    plan = task.plan(device_type)
    source = write(plan, task.spec.file)
    printer, hints = Printer(plan), plan.graph.hints()
    inside = {symbol: hints[symbol] + -hints[symbol] % n for symbol, n in blocks_of(plan).items()}
    picks: dict[Call, int] = {}
    layouts: dict[Call, Layout] = {}
    lengths: dict[Call, Mapping[int, int]] = {}
    for inner in source.calls.walk():
        returned = plan.graph.modules[inner.path].returned.get(inner.call.index, ()) if inner.path else ()
        for index, version in enumerate(inner.gives):
            if not returned or version.value is not returned[0]:
                continue
            own = given_lengths(version.value, hints, inside)
            if own is None:
                continue
            names = [axis.name for axis in plan.mesh.axes]
            terms = {name: "P" for name, kind in zip(names, version.type, strict=True) if kind.kind is Kind.P}
            cuts = printer.cuts(version.value, version.type).items()
            picks[inner.call] = index
            made = {names[i]: Cut(c.dim, evaluate(c.outer, {**hints, **inside}), c.segments, c.zigzag) for i, c in cuts}
            layouts[inner.call] = {**terms, **made}
            lengths[inner.call] = {**own_lengths(plan.graph, plan.bound.dims, version.value), **own}
            break
    return Emitted(plan, source, picks, layouts, lengths)


def given_lengths(
    value: Value, hints: Mapping[sympy.Symbol, int], inside: Mapping[sympy.Symbol, int]
) -> dict[int, int] | None:
    """By dim of a value, how long it is on one device where a call pads it; None where that is not its end."""
    longer = {symbol for symbol, size in inside.items() if size != hints[symbol]}
    dims = {d: s for d, s in enumerate(value.shape) if isinstance(s, sympy.Basic) and s.free_symbols & longer}
    if not all(isinstance(size - symbol, sympy.Integer) for size in dims.values() for symbol in longer):
        return None
    return {dim: evaluate(size, hints) for dim, size in dims.items()}


def random(plan: Plan) -> bool:
    """Whether the program draws random numbers."""
    return any(map(draws, plan.graph.nodes))


def on_simulated_ranks(
    task: Task, made: Emitted, mesh: SimulatedMesh, objective: Objective
) -> tuple[First, list[Parts]]:
    """Train the program on all ranks in this process: what a caller sees, and each rank's own tensors."""
    module = instantiate(made.source, made.plan.graph, mesh)
    load(module, task.model, made.plan.graph)
    programs: list[Program] = getattr(module, "programs", [module])
    parts: list[Parts] = [{} for _ in programs]
    with contextlib.ExitStack() as watch:
        seen = [watch.enter_context(watched(program, made.picks)) for program in programs]

        def look() -> None:
            watch.close()
            for program, rank, layers in zip(programs, parts, seen, strict=True):
                rank[LAYERS] = {str(c): made.part(c, x) for c, x in layers.items()}
                rank[GRADIENTS] = _parts(program, _gradient)

        call, inputs = task.inputs(mesh.device)
        values = list(inputs.values())
        first = train(module, lambda m: call.call(m, values), inputs, objective, task.steps, look)
    for program, rank in zip(programs, parts, strict=True):
        rank[WEIGHTS] = _parts(program, lambda p: p.detach().clone())
    return first, parts


def on_this_rank(task: Task, made: Emitted, mesh: DeviceMesh, objective: Objective) -> Parts:
    """Train the program as one process of ``mesh``; its own parts of every tensor, on the CPU."""
    program = instantiate(made.source, made.plan.graph, mesh)
    assert isinstance(program, Program)
    load(program, task.model, made.plan.graph)
    parts: Parts = {}
    call, whole = task.inputs(torch.device(program.device))
    layouts = {name: dict(_names(program.layout(program.inputs[name][1]))) for name in whole if name in program.inputs}
    inputs = {
        name: _block(x, layouts.get(name, {}), program).requires_grad_(x.requires_grad) for name, x in whole.items()
    }
    outputs = {name: dict(_names(program.layout(how))) for name, how in program.outputs.items()}
    own = Objective({name: _weight(w, name, program) for name, w in objective.weights.items()})
    with contextlib.ExitStack() as watch:
        seen = watch.enter_context(watched(program, made.picks))

        def look() -> None:
            watch.close()
            parts[LAYERS] = {str(c): made.part(c, x) for c, x in seen.items()}
            parts[GRADIENTS] = _parts(program, _gradient)

        values = list(inputs.values())
        first = train(program, lambda m: call.call(m, values), inputs, own, task.steps, look)
    parts[OUTPUTS] = {name: Part(x, outputs.get(name, {})) for name, x in first.outputs.items()}
    parts[INPUTS] = {name: Part(x, layouts.get(name, {})) for name, x in first.inputs.items()}
    parts[WEIGHTS] = _parts(program, lambda p: p.detach().clone())
    return {kind: {n: replace(p, tensor=p.tensor.cpu()) for n, p in named.items()} for kind, named in parts.items()}


def _names(layout: Sequence[tuple[Any, Any]]) -> Iterator[tuple[str, Any]]:
    return ((axis.name, cut) for axis, cut in layout)


def _block(x: Tensor, layout: Layout, program: Program) -> Tensor:
    """This rank's block of a one-device tensor; of what meets a term every rank has the whole."""
    part = x.detach()
    for name, how in layout.items():
        if isinstance(how, Cut):
            axis = program.mesh_axes[name]
            part = block(part, how, axis.size, axis.rank)
    return part.to(program.device).clone()


def _weight(x: Tensor, output: str, program: Program) -> Tensor:
    """This rank's part of a one-device weight of an output, whose last blocks may be shorter than the others."""
    cuts = [(axis, how) for axis, how in program.layout(program.outputs.get(output)) if isinstance(how, Cut)]
    whole = list(x.shape)
    padded = [how.outputs.get(output, ()) for how in program.uneven.values() if isinstance(how, Padded)]
    for dim in {*program.lengths.get(output, ()), *(dim for dims in padded for dim in dims)}:
        n = prod(axis.size for axis, cut in cuts if cut.dim == dim)
        whole[dim] = -(-whole[dim] // n) * n
    return own_block(x.detach(), cuts, whole).to(program.device).clone()


def _parts(program: Program, what: Callable[[nn.Parameter], Tensor]) -> dict[str, Part]:
    return {
        name: Part(what(p), dict(_names(program.layout_of(name))), dict(enumerate(program.full_shape(name, p))))
        for name, p in program.named_parameters(remove_duplicate=False)
        if p.requires_grad
    }


def joined(ranks: Sequence[Parts], kind: str, mesh: Mapping[str, int]) -> dict[str, list[Tensor]]:
    """The one-device values of a kind, from every rank's parts."""
    names = ranks[0].get(kind, {})
    parts: Callable[[str], list[Part]] = partial(_of, ranks, kind)
    return {name: wholes(parts(name), mesh) for name in names if all(name in rank.get(kind, {}) for rank in ranks)}


def _of(ranks: Sequence[Parts], kind: str, name: str) -> list[Part]:
    return [rank[kind][name] for rank in ranks]
