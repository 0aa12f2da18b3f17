"""The stages as the functions that users call: ``compile`` and its parts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from placement import specs
from placement.emit.members import refuse_names
from placement.emit.module import instantiate, load
from placement.emit.source import write
from placement.graph.capture import capture
from placement.graph.example import Example as Captured
from placement.graph.seen import keys_seen
from placement.lang import parser
from placement.lang.check import check as check_spec
from placement.lang.diagnostics import Diagnostic, Diagnostics, PlacementError
from placement.lang.spec import Spec
from placement.propose import mended
from placement.report import explain_data, view
from placement.report.against import checked, saved
from placement.report.budgets import broken
from placement.report.views import check_view
from placement.runtime import Program, Simulated, SimulatedMesh
from placement.solver.bind import bind
from placement.solver.build import plan as solve
from placement.solver.declared import mesh_of
from placement.solver.inputs import check_inputs
from placement.solver.plan import Plan
from placement.types import Shard
from placement.undisturbed import undisturbed

Mesh = DeviceMesh | SimulatedMesh | Mapping[str, int] | None
Example = Mapping[str, Any] | Sequence[Any]


def read(spec: Spec | str | Path) -> Spec:
    """A spec from a path, from text (anything with a line break) or as it is. Raises PlacementError."""
    if isinstance(spec, Spec):
        return spec
    if isinstance(spec, str) and "\n" in spec:
        return parser.parse(spec)
    return parser.load(str(spec))


def _read_for(spec: Spec | str | Path | None, model: torch.nn.Module, mesh: Mesh, example: Example) -> Spec:
    """The spec, or the one that comes with the package for the model's class. Raises PlacementError."""
    if spec is not None:
        return read(spec)
    sizes, _ = _axes(mesh)
    made = specs.ready(model, sizes, example if isinstance(example, Mapping) else {})
    if made is None:
        text = f"no spec was given, and none comes with the package for {type(model).__name__}"
        hint = "'placement init' writes a first one for any model"
        raise PlacementError([Diagnostic("PLC408", text, hint=hint)])
    return made


@undisturbed()
def plan(
    model: torch.nn.Module,
    mesh: Mesh,
    spec: Spec | str | Path | None = None,
    *,
    example: Example,
    sizes: Mapping[str, int] | None = None,
    device_type: str | None = None,
    say: Callable[[str], None] | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Plan:
    """The plan for ``model`` on ``mesh``, without a module.

    ``mesh`` may be sizes by axis name, or None where the spec has them. Without a ``spec`` it is the one that comes
    with the package for the model's class (``placement.specs``), and a note says so. ``sizes`` replaces the example's
    sizes of named dims in prices. Nothing is computed: the model may be on the meta device. ``say`` is told what
    begins: ``capturing the model``, ``solving``. ``reduce_dtype``: see ``compile``. Raises PlacementError, also for a
    plan that breaks an ``expect`` line.
    """
    spec = _read_for(spec, model, mesh, example)
    faults = check_spec(spec)
    if any(fault.severity == "error" for fault in faults):
        raise PlacementError(faults, spec.sources)
    axes, kind = _axes(mesh)
    dims = {
        str(name): tuple(map(str, line.dims)) for line in spec.inputs if line.dims is not None for name in line.names
    }
    say = say or (lambda _: None)
    say("capturing the model")
    started = time.perf_counter()
    whole = _global(example, spec, mesh)
    mesh_of(spec, axes, device_type or kind, Diagnostics())  # its faults at once, not after a capture
    try:
        _check_inputs(model, whole, spec)
        graph = capture(model, whole, dims)
    except PlacementError as error:
        raise PlacementError(error.diagnostics, spec.sources) from error.__cause__
    seen = keys_seen(graph, model, Captured.of(model, whole), _blocks(whole, example))
    graph = dataclasses.replace(graph, seen=seen)
    refuse_names(graph, axes, spec)
    captured = time.perf_counter()
    try:
        bound = bind(graph, spec, axes, device_type=device_type or kind, sizes=sizes, reduce=reduce_dtype)
        binding = time.perf_counter()
        say("solving")
        made = solve(bound, spec.sources, say)
    except PlacementError as error:
        raise mended(error, graph, spec, axes, device_type=device_type or kind, sizes=sizes) from error.__cause__
    faults = broken(made, spec)
    if faults:
        raise PlacementError(faults, spec.sources)
    stages = {"capture": captured - started, "bind": binding - captured, **made.stages}
    return dataclasses.replace(made, stages=stages)


def _check_inputs(model: torch.nn.Module, example: Example, spec: Spec) -> None:
    """The spec's ``input`` lines against the example, before a capture that takes seconds."""
    flat = Captured.of(model, example)
    found = Diagnostics()
    check_inputs(spec, {n: tuple(t.shape) for n, t in zip(flat.names, flat.tensors, strict=True)}, found)
    found.raise_if_any(spec.sources)


def _axes(mesh: Mesh) -> tuple[dict[str, int], str]:
    if mesh is None:
        return {}, "cpu"
    if isinstance(mesh, SimulatedMesh):
        return dict(mesh.sizes), mesh.device.type
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names
        if not names:
            raise PlacementError(
                [Diagnostic("PLC101", "the mesh has no axis names", hint="give mesh_dim_names to init_device_mesh")]
            )
        return dict(zip(names, mesh.shape, strict=True)), mesh.device_type
    return dict(mesh), "cpu"


def _global(example: Example, spec: Spec, mesh: Mesh) -> Example:
    """The example at one-device sizes: on a DeviceMesh, inputs placed Shard are this rank's own blocks."""
    if not isinstance(mesh, DeviceMesh) or not isinstance(example, Mapping):
        return example
    sizes, _ = _axes(mesh)
    result = dict(example)
    for line in spec.inputs:
        for placed in line.placed:
            n = sizes.get(spec.axis_of(placed) or "", 1)
            if not isinstance(placed.placement, Shard) or n == 1:
                continue
            dim = placed.placement.dim
            index = dim if isinstance(dim, int) else list(map(str, line.dims or ())).index(dim)
            for name in map(str, line.names):
                if isinstance(result.get(name), torch.Tensor):
                    whole = torch.cat([result[name].detach()] * n, index)
                    result[name] = whole.requires_grad_(result[name].requires_grad)
    return result


def _blocks(whole: Example, example: Example) -> tuple[str, ...]:
    """The tensors of which the example has this rank's block alone."""
    if not isinstance(whole, Mapping) or not isinstance(example, Mapping):
        return ()
    return tuple(name for name, tensor in whole.items() if tensor is not example[name])


def compile(  # noqa: A001 - the name users know from torch; what a program depends on
    model: torch.nn.Module,
    mesh: DeviceMesh | SimulatedMesh,
    spec: Spec | str | Path | None = None,
    *,
    example: Example,
    sizes: Mapping[str, int] | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Program | Simulated:
    """Compile ``model`` for ``mesh`` as ``spec`` says; returns a module with the same tree and names.

    Without a ``spec`` it is the one that comes with the package for the model's class; ``explain()`` names it.

    On a ``DeviceMesh`` it holds this rank's shards; on ``placement.simulate(...)`` every rank's. ``example``
    is what the model is called with: keyword arguments by name, or positional ones. The module has
    ``plan``, ``source`` (the emitted text) and ``explain()``. Parameters on the meta device stay there until
    ``load_full_state_dict``. ``reduce_dtype`` is the dtype in which sums over ranks are done where the spec
    says no other.

    Raises PlacementError with every fault of spec, model and mesh; the model is never changed.
    """
    spec = _read_for(spec, model, mesh, example)
    made = plan(model, mesh, spec, example=example, sizes=sizes, reduce_dtype=reduce_dtype)
    started = time.perf_counter()
    source = write(made, spec.file)
    with torch.inference_mode(mode=False):  # parameters made in inference mode could never be trained
        program = instantiate(source, made.graph, mesh, reduce_dtype)
        load(program, model, made.graph)
    made = dataclasses.replace(made, stages={**made.stages, "emit": time.perf_counter() - started})
    program.plan = made  # type: ignore[assignment]
    program.source = source.text  # type: ignore[assignment]

    def explained(format: str = "text", **options: Any) -> str:  # noqa: A002 - as in `explain`
        return view(made, format, name=spec.file, sources=spec.sources, **options)

    program.explain = explained  # type: ignore[assignment]
    program._repr_html_ = made._repr_html_  # type: ignore[assignment]
    return program


def explain(
    model: torch.nn.Module,
    mesh: Mesh,
    spec: Spec | str | Path | None = None,
    *,
    example: Example,
    sizes: Mapping[str, int] | None = None,
    format: str = "text",  # noqa: A002 - the command's own word
    why: str | None = None,
    against: Spec | str | Path | Mapping[str, Any] | None = None,
    time: bool = False,
    memory: bool = False,
    **options: Any,
) -> str:
    """What ``compile`` would insert and why, as text, json, html or dot; or one question answered.

    ``why`` is the dotted name, or a pattern, of values, parameters, inputs or outputs: what places them, and what any
    other placement would cost. ``against`` is another spec, or an explanation that was saved as JSON (its path or
    its data): what changes from that. ``time``: the step as a timeline, also as ``chrome`` for Perfetto. ``memory``:
    what one rank holds, and what one device would.
    ``options`` are those of the text: width, color, verbose.
    Raises PlacementError, and ValueError for a name that nothing has or a format that is not there.
    """
    check_view(format, why=why is not None, against=against is not None, time=time, memory=memory)
    spec = _read_for(spec, model, mesh, example)

    def explained(other: Spec) -> Mapping[str, Any]:
        return explain_data(plan(model, mesh, other, example=example, sizes=sizes))

    made = plan(model, mesh, spec, example=example, sizes=sizes)
    other = None if against is None else _other(against, explained)
    asked: dict[str, Any] = {"why": why, "against": other, "time": time, "memory": memory}
    return view(made, format, name=spec.file, sources=spec.sources, **asked, **options)


def _other(
    against: Spec | str | Path | Mapping[str, Any], explained: Callable[[Spec], Mapping[str, Any]]
) -> tuple[str, Mapping[str, Any]]:
    """The explanation to compare with, and its name."""
    if isinstance(against, Mapping):
        return "the saved plan", checked(against, "the saved plan")
    found = None if isinstance(against, Spec) or "\n" in str(against) else saved(against)
    if found is not None:
        return str(against), found
    other = read(against)
    return other.file, explained(other)


def emit(
    model: torch.nn.Module,
    mesh: Mesh,
    spec: Spec | str | Path | None = None,
    *,
    example: Example,
    sizes: Mapping[str, int] | None = None,
) -> str:
    """The Python text of the distributed program. Raises PlacementError."""
    spec = _read_for(spec, model, mesh, example)
    return write(plan(model, mesh, spec, example=example, sizes=sizes), spec.file).text


def check(
    spec: Spec | str | Path,
    model: torch.nn.Module | None = None,
    mesh: Mesh = None,
    *,
    example: Example | None = None,
    sizes: Mapping[str, int] | None = None,
) -> tuple[Diagnostic, ...]:
    """Every fault of a spec, alone or with a model; empty where there is none."""
    try:
        spec = read(spec)
        faults = check_spec(spec)
        if model is None or any(fault.severity == "error" for fault in faults):
            return faults
        plan(model, mesh, spec, example=example or {}, sizes=sizes)
    except PlacementError as error:
        return error.diagnostics
    return faults
