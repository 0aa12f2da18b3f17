"""A spec and a graph, bound: every statement matched to values of the model, every placement to a type.

Binding decides nothing. It turns names into values and ``Shard(seq)`` into the factors that are cut,
and reports every fault of the spec at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import sympy
import torch

from placement.graph.factors import Dims, Factors, NameClashError, infer
from placement.graph.ir import Graph, ModuleInfo, Node, Output, Parameter, Value, evaluate
from placement.graph.segments import extent, flattened, holds, shared
from placement.lang.diagnostics import Diagnostic, Diagnostics, did_you_mean
from placement.lang.spec import LimitLine, LowerLine, ParamLine, Placed, Span, Spec, ValueLine
from placement.rules import Context, Way, signature_of
from placement.solver.declared import mesh_of
from placement.solver.dynamic import dynamic
from placement.solver.inputs import check_inputs, named_dims, shown, tell_clash
from placement.solver.insisted import insisted
from placement.solver.leading import beyond_pieces, indivisible, leading
from placement.solver.lowerings import lowerings
from placement.solver.mesh import Mesh
from placement.solver.orders import Orders
from placement.solver.padding import Uneven
from placement.solver.unmatched import unmatched_lines
from placement.solver.unsupported import refuse
from placement.types import Auto, I, Joint, Kind, P, Partial, R, Replicate, S, Shard, Type


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """The types that statements, or the language's defaults, allow a value on each axis of the mesh.

    kinds: by axis; None where the axis is free. spans: by axis, of the statement, None for a default.
    """

    kinds: tuple[tuple[Type, ...] | None, ...]
    spans: tuple[Span | None, ...] = ()

    @property
    def span(self) -> Span | None:
        """The first statement's."""
        return next((span for span in self.spans if span is not None), None)

    @property
    def cause(self) -> str:
        """``file:line`` of the statement, '' for a default."""
        return f"{self.span.file}:{self.span.line}" if self.span else ""

    @property
    def types(self) -> tuple[Type, ...]:
        """The types allowed on some axis."""
        return tuple(dict.fromkeys(kind for kinds in self.kinds for kind in kinds or ()))


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """What the spec says of this graph on a mesh.

    contexts: what each axis may cut. lowerings: by ``setting = value``, the modules that are emitted so. ways: how
    an op is to run on an axis, where a line insists. reduce: the dtype of sums over ranks where no line says it, None
    for that of what is summed.
    """

    graph: Graph
    dims: Dims
    mesh: Mesh
    contexts: tuple[Context, ...]
    inputs: Mapping[Value, Pin]
    parameters: Mapping[Value, Pin]
    values: Mapping[Value, Pin]
    outputs: Mapping[Output, Pin | None]  # None: whatever costs least
    notes: tuple[Diagnostic, ...] = ()
    limit: LimitLine | None = None
    lowerings: Mapping[str, frozenset[str]] = field(default_factory=dict)
    lowers: tuple[LowerLine, ...] = ()  # the lines that say so
    ways: Mapping[tuple[Node, int], Way] = field(default_factory=dict)
    reduce: torch.dtype | None = None

    @property
    def hints(self) -> Mapping[sympy.Symbol, int]:
        """The size of each symbol in the example."""
        return self.contexts[0].hints

    def lowered(self, setting: str) -> frozenset[str]:
        """The modules for which a line sets ``gathered = kept`` or the like."""
        return self.lowerings.get(setting, frozenset())

    def said(self, key: str) -> Mapping[str, str]:
        """What lines set ``overlap`` or the like to, by module."""
        settings = ((setting.partition(" = "), paths) for setting, paths in self.lowerings.items())
        return {path: value for (name, _, value), paths in settings if name == key for path in paths}

    def joints(self, kinds: Sequence[Sequence[Type]]) -> Iterator[Joint]:
        """The types of a value that has one of these on each axis."""
        return (joint for joint in map(Joint, product(*kinds)) if self.mesh.fits(joint, self.hints))


# What `out` and `in` mean inside one parameter, by the class that owns it; subclasses inherit.
_PARAMETER_DIMS: dict[str, dict[str, tuple[str, ...]]] = {
    "torch.nn.modules.linear.Linear": {"weight": ("out", "in"), "bias": ("out",)},
    "torch.nn.modules.sparse.Embedding": {"weight": ("vocab", "hidden")},
    "transformers.pytorch_utils.Conv1D": {"weight": ("in", "out"), "bias": ("out",)},
}


def parameter_dims(modules: Mapping[str, ModuleInfo], parameter: Parameter) -> tuple[str, ...]:
    """The names that a parameter's dims have by the class of the module that owns it, () where there are none."""
    return next(_owners_dims(modules, parameter), ())


def _owners_dims(modules: Mapping[str, ModuleInfo], parameter: Parameter) -> Iterator[tuple[str, ...]]:
    """As above, for each module that owns the parameter: a tied one is ``vocab`` here and ``out`` there."""
    for name in parameter.names:
        path, _, leaf = name.rpartition(".")
        for base in modules[path].type.__mro__ if path in modules else ():
            dims = _PARAMETER_DIMS.get(f"{base.__module__}.{base.__qualname__}", {}).get(leaf)
            if dims:
                yield dims
                break


def bind(
    graph: Graph,
    spec: Spec,
    axes: Mapping[str, int],
    *,
    device_type: str = "cpu",
    sizes: Mapping[str, int] | None = None,
    reduce: torch.dtype | None = None,
) -> Bound:
    """Match the statements of ``spec`` to ``graph`` on a mesh of ``axes``.

    ``sizes`` replaces the example's sizes of named dims in prices. A table that an axis does not divide is padded (see
    ``padding``). ``reduce`` is the dtype of sums over ranks where no line says it. Raises PlacementError with every
    fault.
    """
    found = Diagnostics()
    refuse(spec, found)
    mesh = mesh_of(spec, axes, device_type, found)
    check_inputs(spec, {i.name: i.value.shape for i in graph.inputs}, found)
    found.raise_if_any(spec.sources)
    unmatched = unmatched_lines(graph, spec, found)
    if any(isinstance(line, ParamLine) and line.dims is not None for line in unmatched):
        found.raise_if_any(spec.sources)  # names that they give to dims would be missing everywhere
    named = named_dims(graph, spec, found)
    if any(d.code == "PLC107" for d in found.sorted()):
        found.raise_if_any(spec.sources)
    try:
        dims = infer(graph, signature_of, named)
    except NameClashError as error:
        tell_clash(error, graph, named, found)
        found.raise_if_any(spec.sources)
        raise
    hints = {symbol: (sizes or {}).get(symbol.name, hint) for symbol, hint in graph.hints().items()}
    contexts = tuple(Context(dims, axis.n, hints, dynamic(graph, spec, hints, axis.name)) for axis in mesh.axes)
    binder = _Binder(graph, spec, dims, contexts, mesh, found)
    inputs, parameters, values, outputs = binder.inputs(), binder.parameters(), binder.values(), binder.outputs()
    bound = Bound(
        graph,
        dims,
        binder.orders.mesh,
        contexts,
        inputs=inputs,
        parameters=binder.orders.of_parameters(parameters),
        values=values,
        outputs=outputs,
        notes=(*spec.notes, *binder.notes),
        limit=spec.limits[0] if spec.limits else None,
        lowerings=lowerings(graph, spec, found),
        lowers=spec.lowers,
        ways=insisted(graph, spec, contexts, binder.orders.mesh, found),
        reduce=reduce,
    )
    longer = binder.uneven.padded(graph, dims, mesh, spec)
    if longer is not None:
        made = bind(longer, spec, axes, device_type=device_type, sizes=sizes, reduce=reduce)
        return dataclasses.replace(made, notes=(*binder.uneven.notes, *made.notes))
    found.raise_if_any(spec.sources)
    return bound


class _Binder:
    def __init__(
        self, graph: Graph, spec: Spec, dims: Dims, contexts: Sequence[Context], mesh: Mesh, found: Diagnostics
    ) -> None:
        self.graph, self.spec, self.dims, self.found = graph, spec, dims, found
        self.contexts, self.mesh = contexts, mesh
        self.notes: list[Diagnostic] = []
        self.uneven = Uneven()
        self.orders = Orders(mesh, contexts[0].hints, found)

    # -- statements ------------------------------------------------------------------------------

    def placed(self, placed: Sequence[Placed], *, stored: bool = False) -> dict[int, Placed]:
        """The placement on each axis that the line speaks of: where it is used, or where it is ``stored``."""
        names = [axis.name for axis in self.mesh.axes]
        result: dict[int, Placed] = {}
        for item in (item for item in placed if item.stored == stored):
            name = self.spec.axis_of(item)
            if name is None and isinstance(item.placement, Replicate | Auto):
                result.update({i: item for i in range(len(names)) if i not in result})  # on every axis
            elif name is None:
                hint = f"write {' or '.join(f'{item.placement!r} @ {axis}' for axis in names)}"
                text = "the mesh has several axes and this placement names none"
                self.found.error("PLC113", text, item.span, hint=hint)
            elif name not in names:
                hint = did_you_mean(str(name), names)
                self.found.error(
                    "PLC101", f"unknown axis '{name}'", item.axis.span if item.axis else item.span, hint=hint
                )
            elif names.index(name) in result:
                self.found.error("PLC207", f"two placements on axis '{name}' in one statement", item.span)
            else:
                result[names.index(name)] = item
        return result

    def pin(
        self, value: Value, placed: Mapping[int, Placed], what: str, parameter: Parameter | None = None
    ) -> tuple[list[tuple[Type, ...] | None], tuple[Span | None, ...]]:
        """The types on each axis that placements mean, None on the others, and the placements' places."""
        kinds: list[tuple[Type, ...] | None] = [None] * len(self.mesh.axes)
        for index, item in placed.items():
            if not isinstance(item.placement, Auto):
                meant = self.types(value, item, index, what, parameter)
                kinds[index] = meant if self.mesh.axes[index].n > 1 or not meant else _unsharded(value)[:1]
        spans = tuple(placed[i].span if i in placed else None for i in range(len(kinds)))
        self._together(kinds, placed, what)
        return kinds, spans

    def _together(self, kinds: Sequence[tuple[Type, ...] | None], placed: Mapping[int, Placed], what: str) -> None:
        """Refuse axes that cannot cut the value at the same time: one dim more often than it divides."""
        cuts = [(i, k[0]) for i, k in enumerate(kinds) if k is not None and len(k) == 1 and k[0].over]
        for position, (index, kind) in enumerate(cuts[1:], 1):
            part = dict(cuts[: position + 1])
            joint = Joint(part.get(i, R) for i in range(len(kinds)))
            if not self.orders.mesh.fits(joint, self.contexts[0].hints):
                own = set(flattened(kind.over))  # type: ignore[arg-type]
                first = next(self.mesh.axes[i] for i, other in cuts if own.intersection(flattened(other.over)))  # type: ignore[arg-type]
                axis = self.mesh.axes[index]
                size = evaluate(extent(kind.over), self.contexts[0].hints)  # type: ignore[arg-type]
                text = f"{what} is cut {first.n} times by axis '{first.name}': axis '{axis.name}' of {axis.n} cannot "
                text += f"cut the blocks evenly, the dim is {size}"
                self.uneven.missed(kind.over, what, placed[index], axis)  # type: ignore[arg-type]
                self.found.error("PLC203", text, placed[index].dim_span or placed[index].span)
                return

    def inputs(self) -> dict[Value, Pin]:
        lines = {str(name): line for line in self.spec.inputs for name in line.names if line.placed}
        pins = {}
        for item in self.graph.inputs:
            line = lines.get(item.name)
            kinds, spans = self.pin(item.value, self.placed(line.placed) if line else {}, f"input '{item.name}'")
            default = _unsharded(item.value)[:1]
            pins[item.value] = Pin(tuple(default if k is None or (k and not k[0].over) else k for k in kinds), spans)
        return pins

    def parameters(self) -> dict[Value, Pin]:
        lines: dict[Parameter, ParamLine] = {}
        for line in self.spec.params:
            matched = [p for p in self.graph.parameters if any(line.pattern.matches(name) for name in p.names)]
            for parameter in matched if line.placed else ():
                self._same_parameter(parameter, lines.setdefault(parameter, line), line)
        return {p.value: self.parameter(p, lines[p].placed if p in lines else ()) for p in self.graph.parameters}

    def parameter(self, parameter: Parameter, line: Sequence[Placed]) -> Pin:
        """Where a parameter is kept: as it is used, or on an axis where it is stored in blocks of its own."""
        value = parameter.value
        placed, stored = self.placed(line), self.placed(line, stored=True)
        for item in placed.values():
            if isinstance(item.placement, Partial):
                self.found.error("PLC205", "a parameter is not a sum over ranks", item.span)
        fine = {index: item for index, item in placed.items() if not isinstance(item.placement, Partial)}
        kinds, spans = self.pin(value, fine, f"parameter '{parameter.name}'", parameter)
        default = _unsharded(value)[:1]
        used = [default if k is None else k[:1] for k in kinds]
        free = {i for i, item in fine.items() if isinstance(item.placement, Auto)}
        used = [self.choices(parameter, i) if i in free else own for i, own in enumerate(used)]
        for index, item in stored.items():
            blocks = self.stored(parameter, item, used, index)
            if blocks is not None and self.mesh.axes[index].n > 1:
                used[index] = (blocks,)
        return Pin(
            tuple(used), tuple(span or (stored[i].span if i in stored else None) for i, span in enumerate(spans))
        )

    def choices(self, parameter: Parameter, index: int) -> tuple[Type, ...]:
        """What a parameter may be on an axis where it is left to the solver: every placement that a line could say.

        Stored blocks save memory and nothing else: they are for a ``limit``.
        """
        value, context = parameter.value, self.contexts[index]
        found = [*_unsharded(value)[:1]]
        if parameter.is_buffer or context.n == 1:
            return tuple(found)
        runs = (leading(context, factors) for factors in self.dims.of(value) if beyond_pieces(factors))
        found += [S(*run) for run in runs if run is not None and self.dims.locate(value, run) is not None]
        if self.spec.limits:
            blocks = [Type(Kind.S, factors, stored=True) for factors in self.dims.of(value) if factors]
            whole = Joint([R] * len(self.mesh.axes))
            fitting = (
                kind
                for kind in blocks
                if self.dims.locate(value, kind.over) is not None  # type: ignore[arg-type]
                and self.mesh.fits(whole.replaced((index,), kind), context.hints)
            )
            found += list(fitting)[:1]
        return tuple(found)

    def stored(self, parameter: Parameter, item: Placed, used: Sequence[tuple[Type, ...]], index: int) -> Type | None:
        """The blocks in which an axis keeps a parameter: of a whole dim, of what the other axes leave of it."""
        what = f"parameter '{parameter.name}'"
        if not isinstance(item.placement, Shard):
            text = f"{what} is stored {item.placement!r}: what is stored is a block"
            self.found.error("PLC210", text, item.span, hint="write stored Shard(DIM), or leave it out")
            return None
        named = self.factors(parameter.value, item.placement.dim, item, what, parameter)
        if named is None:
            return None
        dim = next(factors for factors in self.dims.of(parameter.value) if set(named) <= set(factors))
        if self.dims.locate(parameter.value, dim) is None:
            text = f"{what} cannot be stored in blocks: several of its dims are one and the same"
            self.found.error("PLC204", text, item.dim_span or item.span, hint="keep it as it is used: leave stored out")
            return None
        self.uneven.cut(dim, index)
        blocks = Type(Kind.S, dim, stored=True)
        axis, hints = self.mesh.axes[index], self.contexts[index].hints
        joint = Joint(kinds[0] if kinds else R for kinds in used).replaced((index,), blocks)
        if not self.mesh.fits(joint, hints):
            at, whole = self.dims.of(parameter.value).index(dim), joint.replaced((index,), R)
            size = parameter.value.shape[at]
            left = self.mesh.shape(self.dims, parameter.value, whole, parameter.value.shape)[at]
            text = f"dim '{item.placement.dim}' of {what} is {size}"
            text += f", {left} on one rank" if left != size else ""
            text += f", which axis '{axis.name}' of {axis.n} does not divide"
            hint = "store it by another dim, or on fewer ranks"
            self.uneven.missed(dim, what, item, axis)
            self.found.error("PLC203", text, item.dim_span or item.span, hint=hint)
            return None
        return blocks

    def values(self) -> dict[Value, Pin]:
        lines: dict[Value, tuple[ValueLine, str]] = {}
        pins: dict[Value, Pin] = {}
        produced = {v for node in self.graph.nodes for v in node.results}
        for line in self.spec.values:
            matched = [info for path, info in self.graph.modules.items() if line.pattern.matches(path)]
            placed = self.placed(line.placed)
            for info in matched:
                firsts = [values[0] for values in info.returned.values() if values and values[0] in produced]
                if not firsts:
                    self._returns_nothing(line, info)
                for value in firsts:
                    earlier, path = lines.setdefault(value, (line, info.path))
                    if line is not earlier:
                        self._same_value(placed, info, earlier, path)
                    kinds, spans = self.pin(value, placed, f"the output of '{info.path}'")
                    if any(k is not None for k in kinds):
                        # Replicate is I where there is a choice: R would let the gradient stay partial through the
                        # module, and so turn its weights' hooks on and its collectives into halves.
                        pins[value] = Pin(tuple((I,) if k is not None and I in k else k for k in kinds), spans)
        return pins

    def _same_value(self, placed: Mapping[int, Placed], info: ModuleInfo, earlier: ValueLine, path: str) -> None:
        """Two lines that place one value."""
        other = self.placed(earlier.placed)
        if not placed or not other:
            return
        index = next((i for i in placed if i in other), next(iter(placed)))
        here, there = placed[index], other.get(index, next(iter(other.values())))
        same = "" if path == info.path else f", which is what '{path}' returns,"
        text = f"the output of '{info.path}'{same} is placed {_twice(here, there)}"
        notes = [f"'{earlier.pattern}' at {earlier.pattern.span} speaks of it too"]
        self.found.error("PLC202", text, here.span, notes=notes)

    def outputs(self) -> dict[Output, Pin | None]:
        lines: dict[str, Mapping[int, Placed]] = {}
        names = [o.name for o in self.graph.outputs if o.value is not None]
        for line in self.spec.outputs:
            placed = self.placed(line.placed)
            for name in line.names:
                if name not in names:
                    hint = did_you_mean(name, names) or f"outputs of the model: {', '.join(names)}"
                    self.found.error("PLC106", f"the model has no output '{name}'", name.span, hint=hint)
                elif str(name) in lines:
                    self.found.error("PLC202", f"output '{name}' is placed by two statements", name.span)
                lines[str(name)] = placed
        pins: dict[Output, Pin | None] = {}
        for output in self.graph.outputs:
            if output.value is None:
                continue
            placed = lines.get(output.name, {})
            kinds, spans = self.pin(output.value, placed, f"output '{output.name}'")
            free = {i for i, item in placed.items() if isinstance(item.placement, Auto)}
            default = _unsharded(output.value)[:1]
            fixed = tuple(None if i in free else default if k is None else k[:1] for i, k in enumerate(kinds))
            pins[output] = None if all(k is None for k in fixed) else Pin(fixed, spans)
        return pins

    def _same_parameter(self, parameter: Parameter, earlier: ParamLine, line: ParamLine) -> None:
        """One line places a parameter, under whichever of its names; two that agree today will not tomorrow."""
        own, others = (self.placed(p) or self.placed(p, stored=True) for p in (line.placed, earlier.placed))
        if line is earlier or not own or not others:
            return
        index = next((i for i in own if i in others), next(iter(own)))
        placed, other = own[index], others.get(index, next(iter(others.values())))
        here, there = (next(n for n in parameter.names if one.pattern.matches(n)) for one in (line, earlier))
        text = f"parameter '{here}' is placed {_twice(placed, other)}"
        notes = [f"'{earlier.pattern}' at {earlier.pattern.span} speaks of it too"]
        if here != there:
            notes.insert(0, f"'{here}' and '{there}' are one parameter: the model ties them")
        self.found.error("PLC201", text, placed.span, notes=notes)

    def _returns_nothing(self, line: ValueLine, info: ModuleInfo) -> None:
        """A module without an output that a line could place: why, and what to name instead."""
        hint = None
        given = next((value for values in info.returned.values() for value in values), None)
        if {"ModuleList", "ModuleDict"} & {base.__name__ for base in info.type.__mro__}:
            text = f"'{info.path}' is a {info.type.__name__}: it is never called and returns nothing"
            if any(path.rpartition(".")[0] == info.path for path in self.graph.modules):
                hint = f"name its members: {line.pattern.own}.*"
        elif given is not None:
            what = "an input" if any(given is i.value for i in self.graph.inputs) else "a parameter"
            text = f"what module '{info.path}' returns is {what} of the model"
            hint = f"place it where it comes from, on {'an input' if what == 'an input' else 'a param'} line"
        elif info.returned:
            text = f"module '{info.path}' returns no tensor that could be placed"
        elif any(call.path == info.path for node in self.graph.nodes for call in node.stack):
            text = f"what module '{info.path}' returns is not known: the capture of the model lost it"
            hint = "place what a module inside it or around it returns"
        else:
            text = f"module '{info.path}' is never called with this example"
        self.found.error("PLC104", text, line.pattern.span, hint=hint)

    # -- placements to types ---------------------------------------------------------------------

    def types(
        self, value: Value, placed: Placed, index: int, what: str, parameter: Parameter | None = None
    ) -> tuple[Type, ...]:
        """The types of ``value`` that a placement on an axis means; reports and returns () where it means none."""
        placement = placed.placement
        if isinstance(placement, Replicate):
            return _unsharded(value)
        if isinstance(placement, Partial):
            return (P,)
        assert isinstance(placement, Shard)
        factors = self.factors(value, placement.dim, placed, what, parameter)
        if factors is None:
            return ()
        if parameter is not None:
            self.uneven.cut(factors, index)
        return self.shard(value, factors, placed, index, what, parameter)

    def factors(
        self, value: Value, dim: str | int, placed: Placed, what: str, parameter: Parameter | None
    ) -> Factors | None:
        """The factors of the dim that the user means."""
        span = placed.dim_span or placed.span
        rank = len(value.shape)
        if isinstance(dim, int):
            if not -rank <= dim < rank:
                text = f"{what} is a scalar: it has no dim to shard"
                if rank:
                    shape = self._described(value, parameter)
                    text = f"{what} has {rank} dim{'s' if rank > 1 else ''}, counted from 0: {shape}"
                self.found.error("PLC204", text, span, hint=None if rank else "write Replicate")
                return None
            return self.dims.of(value)[dim]
        owners = tuple(_owners_dims(self.graph.modules, parameter)) if parameter else ()
        for own in owners:
            if dim in own and own.index(dim) < rank:
                return self.dims.of(value)[own.index(dim)]
        if dim in self.dims.names:
            wanted = self.dims.names[dim]
            for factors in self.dims.of(value):
                if wanted and (all(f in factors for f in wanted) or _in_segments(factors, wanted)):
                    return wanted
            text = f"{what} has no dim '{dim}': its dims are {self._described(value, parameter)}"
            self.found.error("PLC204", text, span, hint=self._where_named(value, dim, wanted))
            return None
        names = [*(name for own in owners for name in own), *self.dims.names]
        text = f"{what} has no dim '{dim}': its dims are {self._described(value, parameter)}"
        self.found.error("PLC103", text, span, hint=did_you_mean(dim, names))
        return None

    def _described(self, value: Value, parameter: Parameter | None = None) -> str:
        """``[batch, seq, 64]``: each dim by a name that it may be called, else its size."""
        owners = tuple(_owners_dims(self.graph.modules, parameter)) if parameter else ()
        called = [own for own in owners if len(own) == len(value.shape)][:1]
        return shown([called[0][i] if called else self._called(value, i) for i in range(len(value.shape))])

    def _called(self, value: Value, index: int) -> str:
        factors = self.dims.of(value)[index]
        named = (name for name, wanted in self.dims.names.items() if wanted and wanted == factors)
        return next(named, str(value.shape[index]))

    def _where_named(self, value: Value, dim: str, wanted: Factors) -> str | None:
        """A weight whose dim is one of the value's and of the right size: naming it there joins the two."""
        own = self.dims.of(value)
        for parameter in self.graph.parameters:
            for index, factors in enumerate(self.dims.of(parameter.value)):
                if factors in own and extent(factors) == extent(wanted):
                    called = [self._called(parameter.value, i) for i in range(len(parameter.value.shape))]
                    names = [dim if i == index else n if n.isidentifier() else f"d{i}" for i, n in enumerate(called)]
                    return f"if it is the same dim, name it there too: param {parameter.name} : {shown(names)}"
        return None

    def shard(
        self, value: Value, factors: Factors, placed: Placed, index: int, what: str, parameter: Parameter | None
    ) -> tuple[Type, ...]:
        """The shard of a dim: its first factor that does not count pieces, or as few more as the axis needs."""
        rest = beyond_pieces(factors)
        if factors and not rest:
            text = f"{what} cannot be cut there: an op takes the dim apart into {extent(factors)} pieces"
            self.found.error("PLC204", text, placed.dim_span or placed.span)
            return ()
        run = leading(self.contexts[index], factors)
        if run is None:
            return self._indivisible(value, factors, placed, index, what, parameter)
        if self.dims.locate(value, run) is None:
            self.found.error(
                "PLC204",
                f"{what} cannot be cut there: its dims are {self._described(value, parameter)}",
                placed.dim_span or placed.span,
            )
            return ()
        return (S(*run),) if self.orders.add(run, placed, index, what) else ()

    def _indivisible(
        self, value: Value, factors: Factors, placed: Placed, index: int, what: str, parameter: Parameter | None
    ) -> tuple[Type, ...]:
        axis, hints = self.mesh.axes[index], self.contexts[index].hints
        rest = beyond_pieces(factors)
        first = rest[0].size if rest else 1
        if parameter is not None and len(rest) > 1 and isinstance(first, int) and not shared(rest[0]):
            parts = f"{extent(rest)} are {first} parts of {extent(rest[1:])}"
            note = f"{what} stays replicated: {parts}, which axis '{axis.name}' of {axis.n} does not divide"
            self.notes.append(Diagnostic("PLC203", note, placed.dim_span or placed.span, severity="note"))
            return _unsharded(value)
        dim = placed.placement.dim if isinstance(placed.placement, Shard) else ""
        if parameter is not None:
            self.uneven.missed(factors, what, placed, axis)
        text, hint = indivisible(f"dim '{dim}' of {what}", factors, axis, hints)
        self.found.error("PLC203", text, placed.dim_span or placed.span, hint=hint)
        return ()


def _in_segments(factors: Factors, wanted: Factors) -> bool:
    """Whether the dim is a sum whose segments all have what a name stands for."""
    return any(f.segments and all(holds(segment, wanted) for segment in f.segments) for f in factors)


def _twice(placed: Placed, other: Placed) -> str:
    here, there = (f"{'stored ' if item.stored else ''}{item.placement!r}" for item in (placed, other))
    return f"{here} by two lines: one is enough" if here == there else f"{here} here, {there} elsewhere"


def _unsharded(value: Value) -> tuple[Type, ...]:
    return (I, R) if value.requires_grad else (R,)
