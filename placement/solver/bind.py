"""A spec and a graph, bound: every statement matched to values of the model, every placement to a type.

Binding decides nothing. It turns names into values and ``Shard(seq)`` into the factors that are cut,
and reports every fault of the spec at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from placement.graph.factors import Dims, Factors, NameClashError, NamedDims, infer
from placement.graph.ir import Graph, ModuleInfo, Output, Parameter, Size, Value, evaluate
from placement.lang.diagnostics import Diagnostic, Diagnostics, did_you_mean
from placement.lang.spec import OutputLine, ParamLine, Placed, Span, Spec, ValueLine
from placement.rules import Context, signature_of
from placement.solver.cost import DEVICES, LINKS, Link, Machine, defaults, known_link
from placement.solver.nearest import divisors, multiples, nearest
from placement.solver.unsupported import refuse
from placement.types import Auto, I, P, Partial, R, Replicate, S, Shard, Type


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis: its name and how many ranks it has."""

    name: str
    n: int


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """The types that a statement, or the language's default, allows a value; ``span`` is None for a default."""

    types: tuple[Type, ...]
    span: Span | None = None

    @property
    def cause(self) -> str:
        """``file:line`` of the statement, '' for a default."""
        return f"{self.span.file}:{self.span.line}" if self.span else ""


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """What the spec says of this graph on one axis."""

    graph: Graph
    dims: Dims
    context: Context
    axis: Axis
    machine: Machine
    inputs: Mapping[Value, Pin]
    parameters: Mapping[Value, Pin]
    values: Mapping[Value, Pin]
    outputs: Mapping[Output, Pin | None]  # None: whatever costs least
    notes: tuple[Diagnostic, ...] = ()


# What `out` and `in` mean inside one parameter, by the class that owns it; subclasses inherit.
_PARAMETER_DIMS: dict[str, dict[str, tuple[str, ...]]] = {
    "torch.nn.modules.linear.Linear": {"weight": ("out", "in"), "bias": ("out",)},
    "torch.nn.modules.sparse.Embedding": {"weight": ("vocab", "hidden")},
    "transformers.pytorch_utils.Conv1D": {"weight": ("in", "out"), "bias": ("out",)},
}


def parameter_dims(modules: Mapping[str, ModuleInfo], parameter: Parameter) -> tuple[str, ...]:
    """The names that a parameter's dims have by the class of the module that owns it, () where there are none."""
    for name in parameter.names:
        path, _, leaf = name.rpartition(".")
        for base in modules[path].type.__mro__ if path in modules else ():
            dims = _PARAMETER_DIMS.get(f"{base.__module__}.{base.__qualname__}", {}).get(leaf)
            if dims:
                return dims
    return ()


def bind(
    graph: Graph,
    spec: Spec,
    axes: Mapping[str, int],
    *,
    device_type: str = "cpu",
    sizes: Mapping[str, int] | None = None,
) -> Bound:
    """Match the statements of ``spec`` to ``graph`` on a mesh of ``axes``.

    ``sizes`` replaces the example's sizes of named dims in prices. Raises PlacementError with every fault.
    """
    found = Diagnostics()
    refuse(spec, found)
    axis, machine = _mesh(spec, axes, device_type, found)
    _check_inputs(graph, spec, found)
    found.raise_if_any(spec.sources)
    named = _named_dims(graph, spec, found)
    found.raise_if_any(spec.sources)
    try:
        dims = infer(graph, signature_of, named)
    except NameClashError as error:
        span = error.where if isinstance(error.where, Span) else None
        found.error(
            "PLC108", f"dim '{error.name}' of '{error.value.name}' has another size than '{error.name}' elsewhere", span
        )
        found.raise_if_any(spec.sources)
        raise
    hints = {symbol: (sizes or {}).get(symbol.name, hint) for symbol, hint in graph.hints().items()}
    context = Context(dims, axis.n, hints, _dynamic(graph, spec, hints))
    binder = _Binder(graph, spec, dims, context, axis, found)
    bound = Bound(
        graph,
        dims,
        context,
        axis,
        machine,
        inputs=binder.inputs(),
        parameters=binder.parameters(),
        values=binder.values(),
        outputs=binder.outputs(),
        notes=tuple(binder.notes),
    )
    found.raise_if_any(spec.sources)
    return bound


def _mesh(spec: Spec, axes: Mapping[str, int], device_type: str, found: Diagnostics) -> tuple[Axis, Machine]:
    if not spec.axes:
        found.error("PLC111", "the spec declares no mesh axis", hint="begin with a line like: mesh tp = 2")
        found.raise_if_any(spec.sources)
    declared = spec.axes[0]
    name = str(declared.name)
    for given in axes:
        if given not in {str(a.name) for a in spec.axes}:
            hint = did_you_mean(given, [name])
            found.error(
                "PLC101", f"the mesh has an axis '{given}' that the spec does not declare", declared.span, hint=hint
            )
    size = axes.get(name, declared.size)
    if size is None:
        found.error("PLC102", f"the size of axis '{name}' is not known", declared.span, hint=f"write: mesh {name} = 2")
    elif declared.size is not None and size != declared.size:
        text = f"axis '{name}' is {declared.size} in the spec and {size} in the mesh"
        found.error("PLC102", text, declared.size_span or declared.span)
    device, link = defaults(device_type)
    if spec.device is not None:
        if str(spec.device.name) not in DEVICES:
            hint = did_you_mean(str(spec.device.name), DEVICES) or f"known devices: {', '.join(DEVICES)}"
            found.error("PLC109", f"unknown device '{spec.device.name}'", spec.device.name.span, hint=hint)
        else:
            device = DEVICES[str(spec.device.name)]
            link = link if device.name == "cpu" else known_link("nvlink", device)
    if declared.link is not None:
        own = {str(line.name): line for line in spec.links}
        if declared.link in own:
            line = own[declared.link]
            link = Link(str(line.name), max(1, int(line.bandwidth.amount)), line.latency.amount)
        elif str(declared.link) not in LINKS:
            hint = did_you_mean(str(declared.link), [*LINKS, *own]) or f"known links: {', '.join([*LINKS, *own])}"
            found.error("PLC110", f"unknown link '{declared.link}'", declared.link.span, hint=hint)
        else:
            link = known_link(str(declared.link), device)
    found.raise_if_any(spec.sources)
    assert size is not None
    return Axis(name, size), Machine(device, link, size)


def _check_inputs(graph: Graph, spec: Spec, found: Diagnostics) -> None:
    known = {i.name: i for i in graph.inputs}
    for line in spec.inputs:
        for name in line.names:
            if name not in known:
                hint = did_you_mean(name, known) or f"inputs of the example: {', '.join(known)}"
                found.error("PLC105", f"the model has no input '{name}'", name.span, hint=hint)
            elif line.dims is not None and len(line.dims) != len(known[name].value.shape):
                rank = len(known[name].value.shape)
                found.error(
                    "PLC107",
                    f"input '{name}' has {rank} dims, not {len(line.dims)}",
                    line.dims[0].span if line.dims else name.span,
                )


def _named_dims(graph: Graph, spec: Spec, found: Diagnostics) -> list[NamedDims]:
    named = []
    inputs = {i.name: i.value for i in graph.inputs}
    for line in spec.inputs:
        if line.dims is not None:
            named += [NamedDims(inputs[str(name)], tuple(map(str, line.dims)), line.span) for name in line.names]
    for line in spec.params:
        if line.dims is None:
            continue
        for parameter in graph.parameters:
            if any(line.pattern.matches(name) for name in parameter.names):
                if len(parameter.value.shape) != len(line.dims):
                    rank = len(parameter.value.shape)
                    text = f"parameter '{parameter.name}' has {rank} dims, not {len(line.dims)}"
                    found.error("PLC107", text, line.dims[0].span if line.dims else line.span)
                else:
                    named.append(NamedDims(parameter.value, tuple(map(str, line.dims)), line.span))
    return named


def _dynamic(graph: Graph, spec: Spec, hints: Mapping[sympy.Symbol, int]) -> frozenset[sympy.Symbol]:
    """The dynamic sizes that a shard may cut: those that the spec speaks of, and of the others the longest.

    Cutting every dynamic dim that the example happens to divide would make a plan that the next batch
    size does not fit.
    """
    lines = (*spec.inputs, *spec.params, *spec.values, *spec.outputs)
    spoken = {str(p.placement.dim) for line in lines for p in line.placed if isinstance(p.placement, Shard)}
    symbols = [s.symbol for s in graph.symbols]
    allowed = {s for s in symbols if s.name in spoken}
    rest = [s for s in symbols if s not in allowed]
    if rest:
        longest = max(hints[s] for s in rest)
        allowed |= {[s for s in rest if hints[s] == longest][-1]}
    return frozenset(allowed)


class _Binder:
    def __init__(self, graph: Graph, spec: Spec, dims: Dims, context: Context, axis: Axis, found: Diagnostics) -> None:
        self.graph, self.spec, self.dims, self.context, self.axis, self.found = graph, spec, dims, context, axis, found
        self.notes: list[Diagnostic] = []

    # -- statements ------------------------------------------------------------------------------

    def placed(self, placed: Sequence[Placed]) -> Placed | None:
        """The placement on the axis, None where the line says nothing of it."""
        result = None
        for item in placed:
            name = self.spec.axis_of(item)
            if name != self.axis.name:
                hint = did_you_mean(str(name), [self.axis.name])
                self.found.error(
                    "PLC101", f"unknown axis '{name}'", item.axis.span if item.axis else item.span, hint=hint
                )
            elif result is not None:
                self.found.error("PLC207", f"two placements on axis '{name}' in one statement", item.span)
            else:
                result = item
        return result

    def inputs(self) -> dict[Value, Pin]:
        lines = {str(name): line for line in self.spec.inputs for name in line.names if line.placed}
        pins = {}
        for item in self.graph.inputs:
            line = lines.get(item.name)
            placed = self.placed(line.placed) if line else None
            kinds = self.types(item.value, placed, f"input '{item.name}'") if placed else _unsharded(item.value)[:1]
            pins[item.value] = Pin(kinds[:1] if kinds and not kinds[0].over else kinds, placed.span if placed else None)
        return pins

    def parameters(self) -> dict[Value, Pin]:
        lines: dict[Parameter, ParamLine] = {}
        for line in self.spec.params:
            matched = [p for p in self.graph.parameters if any(line.pattern.matches(name) for name in p.names)]
            if not matched:
                self._matches_nothing(line)
            if not line.placed:
                continue
            for parameter in matched:
                if parameter in lines:
                    other = lines[parameter].span
                    text = f"'{parameter.name}' is placed by two statements"
                    self.found.error("PLC201", text, line.pattern.span, notes=(f"the other is {other}",))
                lines[parameter] = line
        pins = {}
        for parameter in self.graph.parameters:
            line = lines.get(parameter)
            placed = self.placed(line.placed) if line else None
            pins[parameter.value] = (
                self.parameter(parameter, placed) if placed else Pin(_unsharded(parameter.value)[:1])
            )
        return pins

    def parameter(self, parameter: Parameter, placed: Placed) -> Pin:
        value = parameter.value
        if isinstance(placed.placement, Partial):
            self.found.error("PLC205", "a parameter is not a sum over ranks", placed.span)
            return Pin(_unsharded(value)[:1], placed.span)
        kinds = self.types(value, placed, f"parameter '{parameter.name}'", parameter)
        return Pin(kinds[:1], placed.span)

    def values(self) -> dict[Value, Pin]:
        lines: dict[Value, tuple[ValueLine, str]] = {}
        pins: dict[Value, Pin] = {}
        produced = {v for node in self.graph.nodes for v in node.results}
        for line in self.spec.values:
            matched = [info for path, info in self.graph.modules.items() if line.pattern.matches(path)]
            if not matched:
                self._matches_nothing(line)
            placed = self.placed(line.placed)
            for info in matched:
                firsts = [values[0] for values in info.returned.values() if values and values[0] in produced]
                if not firsts and not info.returned:
                    text = f"module '{info.path}' returns no tensor that could be placed"
                    self.found.error("PLC104", text, line.pattern.span)
                for value in firsts:
                    if value in lines and lines[value][0] is not line:
                        text = f"the output of '{info.path}' is placed by two statements"
                        self.found.error(
                            "PLC202", text, line.pattern.span, notes=(f"the other is {lines[value][0].span}",)
                        )
                    lines[value] = (line, info.path)
                    if placed and not isinstance(placed.placement, Auto):
                        kinds = self.types(value, placed, f"the output of '{info.path}'")
                        # Replicate is I where there is a choice: R would let the gradient stay partial through the
                        # module, and so turn its weights' hooks on and its collectives into halves.
                        pins[value] = Pin((I,) if I in kinds else kinds, placed.span)
        return pins

    def outputs(self) -> dict[Output, Pin | None]:
        lines: dict[str, tuple[OutputLine, Placed | None]] = {}
        names = [o.name for o in self.graph.outputs if o.value is not None]
        for line in self.spec.outputs:
            placed = self.placed(line.placed)
            for name in line.names:
                if name not in names:
                    hint = did_you_mean(name, names) or f"outputs of the model: {', '.join(names)}"
                    self.found.error("PLC106", f"the model has no output '{name}'", name.span, hint=hint)
                elif str(name) in lines:
                    self.found.error("PLC202", f"output '{name}' is placed by two statements", name.span)
                lines[str(name)] = (line, placed)
        pins: dict[Output, Pin | None] = {}
        for output in self.graph.outputs:
            if output.value is None:
                continue
            _, placed = lines.get(output.name, (None, None))
            if placed is None:
                pins[output] = Pin(_unsharded(output.value)[:1])
            elif isinstance(placed.placement, Auto):
                pins[output] = None
            else:
                kinds = self.types(output.value, placed, f"output '{output.name}'")
                pins[output] = Pin(kinds[:1], placed.span)
        return pins

    def _matches_nothing(self, line: ParamLine | ValueLine) -> None:
        modules = [path for path in self.graph.modules if path]
        parameters = [name for p in self.graph.parameters for name in p.names]
        if isinstance(line, ParamLine):
            what, names, others = "parameter", parameters, {"value": modules}
        else:
            what, names, others = "module", modules, {"param": parameters}
        hint = nearest(str(line.pattern), names, others)
        self.found.error("PLC104", f"pattern '{line.pattern}' matches no {what}", line.pattern.span, hint=hint)

    # -- placements to types ---------------------------------------------------------------------

    def types(self, value: Value, placed: Placed, what: str, parameter: Parameter | None = None) -> tuple[Type, ...]:
        """The types of ``value`` that a placement means; reports and returns () where it means none."""
        placement = placed.placement
        if isinstance(placement, Replicate):
            return _unsharded(value)
        if isinstance(placement, Partial):
            return (P,)
        assert isinstance(placement, Shard)
        factors = self.factors(value, placement.dim, placed, what, parameter)
        if factors is None:
            return ()
        return self.shard(value, factors, placed, what, parameter)

    def factors(
        self, value: Value, dim: str | int, placed: Placed, what: str, parameter: Parameter | None
    ) -> Factors | None:
        """The factors of the dim that the user means."""
        span = placed.dim_span or placed.span
        rank = len(value.shape)
        if isinstance(dim, int):
            if not -rank <= dim < rank:
                self.found.error("PLC204", f"{what} has {rank} dims, there is no dim {dim}", span)
                return None
            return self.dims.of(value)[dim]
        own = parameter_dims(self.graph.modules, parameter) if parameter else ()
        if dim in own and own.index(dim) < rank:
            return self.dims.of(value)[own.index(dim)]
        if dim in self.dims.names:
            wanted = self.dims.names[dim]
            for factors in self.dims.of(value):
                if wanted and all(f in factors for f in wanted):
                    return wanted
            text = f"{what} has no dim '{dim}': its dims are {self.dims.describe(value)}"
            self.found.error("PLC204", text, span, hint=self._where_named(value, dim, wanted))
            return None
        names = [*own, *self.dims.names]
        self.found.error(
            "PLC103", f"unknown dim '{dim}'", span, hint=did_you_mean(dim, names) or f"known here: {', '.join(names)}"
        )
        return None

    def _where_named(self, value: Value, dim: str, wanted: Factors) -> str | None:
        """A weight whose dim is one of the value's and of the right size: naming it there joins the two."""
        own = self.dims.of(value)
        for parameter in self.graph.parameters:
            for index, factors in enumerate(self.dims.of(parameter.value)):
                if factors in own and _extent(factors) == _extent(wanted):
                    names = ", ".join(dim if i == index else f"d{i}" for i in range(len(parameter.value.shape)))
                    return f"if it is the same dim, name it there too: param {parameter.name} : [{names}]"
        return None

    def shard(
        self, value: Value, factors: Factors, placed: Placed, what: str, parameter: Parameter | None
    ) -> tuple[Type, ...]:
        """The shard of a dim: its first factor that does not count pieces, or as few more as the axis needs."""
        rest = _beyond_pieces(factors)
        run = leading(self.context, factors)
        if run is None:
            return self._indivisible(value, rest, placed, what, parameter)
        if self.dims.locate(value, run) is None:
            self.found.error(
                "PLC204",
                f"{what} cannot be cut there: its dims are {self.dims.describe(value)}",
                placed.dim_span or placed.span,
            )
            return ()
        return (S(*run),)

    def _indivisible(
        self, value: Value, factors: Factors, placed: Placed, what: str, parameter: Parameter | None
    ) -> tuple[Type, ...]:
        first = factors[0].size if factors else 1
        if parameter is not None and len(factors) > 1 and isinstance(first, int):
            parts = f"{first} times {_product(factors[1:])}"
            note = f"{what} stays replicated: {parts} does not divide into {self.axis.n} blocks of whole parts"
            self.notes.append(Diagnostic("PLC203", note, placed.dim_span or placed.span, severity="note"))
            return _unsharded(value)
        size = first if isinstance(first, int) else f"{first} = {evaluate(first, self.context.hints)}"
        dim = placed.placement.dim if isinstance(placed.placement, Shard) else ""
        text = f"dim '{dim}' of {what} is {size}, which axis '{self.axis.name}' of {self.axis.n} does not divide"
        whole = evaluate(first, self.context.hints)
        ranks = ", ".join(map(str, divisors(whole)))
        hint = f"a size of {multiples(whole, self.axis.n)} would do" + (f", or {ranks} ranks" if ranks else "")
        self.found.error("PLC203", text, placed.dim_span or placed.span, hint=hint)
        return ()


def leading(context: Context, factors: Factors) -> Factors | None:
    """The run that a shard of a dim cuts; a run of several factors leaves the last one whole. None: it has none."""
    rest = _beyond_pieces(factors)
    for run in context.runs(rest):
        if run[0] == rest[0] and (len(run) == 1 or len(run) < len(rest)):
            return run
    return None


def _beyond_pieces(factors: Factors) -> Factors:
    """The product without the leading factors that count pieces: what a shard cuts of each piece."""
    while factors and factors[0].piece:
        factors = factors[1:]
    return factors


def _unsharded(value: Value) -> tuple[Type, ...]:
    return (I, R) if value.requires_grad else (R,)


def _extent(factors: Factors) -> Size:
    total: Size = 1
    for factor in factors:
        total = total * factor.size
    return total


def _product(factors: Factors) -> str:
    return "·".join(str(f.size) for f in factors)
