"""What lines say of the shapes of inputs and parameters, held against those of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placement.graph.factors import NameClashError, NamedDims
from placement.graph.ir import Graph, Size
from placement.lang.diagnostics import Diagnostics, did_you_mean
from placement.lang.source import Span
from placement.lang.spec import InputLine, Name, ParamLine, Spec


def check_inputs(spec: Spec, shapes: Mapping[str, Sequence[Size]], found: Diagnostics) -> None:
    """Report names that are no inputs (PLC105), lists of another length (PLC107), one name for two sizes (PLC108).

    ``shapes`` are those of the inputs by name. Sizes that are not numbers are compared later, with the model.
    """
    first: dict[str, tuple[int, str, Span]] = {}
    for line in spec.inputs:
        for name in line.names:
            if name not in shapes:
                hint = did_you_mean(name, shapes) or f"inputs of the example: {', '.join(shapes)}"
                found.error("PLC105", f"the model has no input '{name}'", name.span, hint=hint)
            elif line.dims is not None and dims_fit(line, f"input '{name}'", shapes[name], found):
                for dim, size in zip(line.dims, shapes[name], strict=True):
                    _same_size(dim, size, name, first, found)


def _same_size(dim: Name, size: Size, name: Name, first: dict[str, tuple[int, str, Span]], found: Diagnostics) -> None:
    if not isinstance(size, int):
        return
    known, other, there = first.setdefault(str(dim), (size, str(name), dim.span))
    if known != size:
        notes = [f"it has that name at {there}"] if there != dim.span else []
        text = f"dim '{dim}' is {size} in input '{name}' and {known} in input '{other}'"
        hint = "dims of different sizes need different names; inputs of different shapes lines of their own"
        found.error("PLC108", text, dim.span, hint=hint if there == dim.span else None, notes=notes)


def dims_fit(line: InputLine | ParamLine, what: str, shape: Sequence[Size], found: Diagnostics) -> bool:
    """Whether a line's list names as many dims as ``shape`` has; a fault at the surplus, or the list, where not."""
    dims = line.dims or ()
    if len(dims) == len(shape):
        return True
    surplus = dims[len(shape) :] or dims
    span = joined(surplus[0].span, surplus[-1].span) if surplus else line.span
    count = f"{len(shape)} dim{'s' if len(shape) != 1 else ''}" if shape else "no dims"
    message = f"{what} has {count}, and {len(dims)} {'are' if len(dims) != 1 else 'is'} named"
    found.error("PLC107", message, span, notes=[f"its shape is {shown(shape)}"])
    return False


def shown(shape: Sequence[Size | str]) -> str:
    """``[batch, seq, 64]``."""
    return f"[{', '.join(map(str, shape))}]"


def joined(first: Span, last: Span) -> Span:
    """From the beginning of the one to the end of the other."""
    return Span(first.file, first.line, first.column, last.end_line, last.end_column)


def named_dims(graph: Graph, spec: Spec, found: Diagnostics) -> list[NamedDims]:
    """What ``input`` and ``param`` lines call the dims of their values; reports lists of another length (PLC107)."""
    named: list[NamedDims] = []
    inputs = {i.name: i.value for i in graph.inputs}
    for line in spec.inputs:
        if line.dims is not None:
            named += [NamedDims(inputs[str(name)], tuple(map(str, line.dims)), line.dims) for name in line.names]
    for line in spec.params:
        if line.dims is None:
            continue
        for parameter in graph.parameters:
            if any(line.pattern.matches(name) for name in parameter.names):
                value = parameter.value
                if dims_fit(line, f"parameter '{parameter.name}'", value.shape, found):
                    named.append(NamedDims(value, tuple(map(str, line.dims)), line.dims))
    return named


def tell_clash(error: NameClashError, graph: Graph, named: Sequence[NamedDims], found: Diagnostics) -> None:
    """One name for two dims: what each of them is, and where the other one has the name."""
    what = {i.value: f"input '{i.name}'" for i in graph.inputs}
    what |= {p.value: f"parameter '{p.name}'" for p in graph.parameters}

    def told(given: NamedDims) -> tuple[Size, str, Span | None]:
        index = given.names.index(error.name)
        listed = given.where if isinstance(given.where, tuple) else ()
        return given.value.shape[index], what[given.value], listed[index].span if listed else None

    size, here, span = told(next(g for g in named if g.value is error.value and g.where is error.where))
    other, there, first = told(next(g for g in named if error.name in g.names))
    text = f"dim '{error.name}' is {size} in {here} and {other} in {there}"
    if size == other:
        text = f"dim '{error.name}' of {here} and of {there} are {size}, but of unlike parts"
    shape = f"the shape of {here} is {shown(error.value.shape)}"
    notes = [f"it has that name at {first}"] if first is not None and first != span else []
    found.error("PLC108", text, span, notes=[shape, *notes])
