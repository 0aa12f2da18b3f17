"""What is wrong with a spec by itself: no model, no mesh is needed to see it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from placement.lang.diagnostics import Diagnostic, Diagnostics, did_you_mean
from placement.lang.spec import (
    LINKS,
    PARAMETER_DIMS,
    InputLine,
    Name,
    OutputLine,
    ParamLine,
    Placed,
    Spec,
    ValueLine,
)
from placement.types import Shard

_Placing = InputLine | ParamLine | ValueLine | OutputLine


def check(spec: Spec) -> tuple[Diagnostic, ...]:
    """The faults in ``spec`` that show without a model, in order of place; empty where there is none."""
    found = Diagnostics()
    _check_mesh(spec, found)
    placing: tuple[_Placing, ...] = (*spec.inputs, *spec.params, *spec.values, *spec.outputs)
    _check_axes(spec, placing, found)
    for statement in placing:
        _check_dims(spec, statement, found)
    _check_inputs(spec, found)
    params = ((str(line.pattern), line.placed) for line in spec.params)
    _check_twice(spec, params, "PLC201", "parameter", found)
    values = ((str(line.pattern), line.placed) for line in spec.values)
    _check_twice(spec, values, "PLC202", "value", found)
    for kind, lines in (("input", spec.inputs), ("output", spec.outputs)):
        named = ((str(name), line.placed) for line in lines for name in line.names)
        _check_twice(spec, named, "PLC202", kind, found)
    return found.sorted(spec.sources)


def _check_mesh(spec: Spec, found: Diagnostics) -> None:
    first: dict[str, Name] = {}
    for axis in spec.axes:
        if axis.name in first:
            notes = [f"the first one is at {first[axis.name].span}"]
            found.error("PLC112", f"a second mesh axis '{axis.name}'", axis.name.span, notes=notes)
        first.setdefault(axis.name, axis.name)
        if axis.link is not None and axis.link not in LINKS:
            hint = did_you_mean(axis.link, LINKS) or f"the links are {', '.join(LINKS)}"
            found.error("PLC110", f"unknown link '{axis.link}'", axis.link.span, hint=hint)


def _check_axes(spec: Spec, placing: Iterable[_Placing], found: Diagnostics) -> None:
    axes = list(dict.fromkeys(str(axis.name) for axis in spec.axes))
    for placed in (placed for statement in placing for placed in statement.placed):
        if not axes:
            # One cause, told once at the first placement.
            found.error("PLC111", "no mesh axis is declared", placed.span, hint="add a line such as 'mesh tp'")
            return
        if placed.axis is not None and placed.axis not in axes:
            hint = did_you_mean(placed.axis, axes) or f"the axes are {', '.join(axes)}"
            found.error("PLC101", f"unknown axis '{placed.axis}'", placed.axis.span, hint=hint)
        elif placed.axis is None and len(axes) > 1:
            hint = f"write {placed.placement!r} @ {axes[0]}" + "".join(f" or @ {axis}" for axis in axes[1:])
            found.error("PLC113", "the mesh has several axes and this placement names none", placed.span, hint=hint)


def _check_dims(spec: Spec, statement: _Placing, found: Diagnostics) -> None:
    """A dim's name must come from somewhere, an index must be within the dims that the line itself lists."""
    own = statement.dims if isinstance(statement, InputLine | ParamLine) else None
    builtin = () if isinstance(statement, InputLine) else PARAMETER_DIMS
    known = list(dict.fromkeys([*(_declared(spec) if own is None else map(str, own)), *builtin]))
    for placed in statement.placed:
        if not isinstance(placed.placement, Shard):
            continue
        dim = placed.placement.dim
        if isinstance(dim, str) and dim not in known:
            hint = did_you_mean(dim, known) or (f"dims known here: {', '.join(known)}" if known else None)
            found.error("PLC103", f"unknown dim '{dim}'", placed.dim_span, hint=hint)
        elif isinstance(dim, int) and own is not None and dim >= len(own):
            message = f"dim {dim} of {len(own)}: there is none"
            notes = ["indices count from 0"]
            found.error("PLC204", message, placed.dim_span, notes=notes)


def _declared(spec: Spec) -> Iterator[str]:
    for line in (*spec.inputs, *spec.params):
        yield from map(str, line.dims or ())


def _check_inputs(spec: Spec, found: Diagnostics) -> None:
    """Two lines may speak of one input, as long as they name its dims alike."""
    dims: dict[str, tuple[Name, InputLine]] = {}
    for line in spec.inputs:
        own: set[str] = set()
        for name in line.names:
            if name in own:
                found.error("PLC112", f"input '{name}' twice in one line", name.span)
            own.add(name)
            if line.dims is None:
                continue
            first, first_line = dims.setdefault(name, (name, line))
            if first_line.dims != line.dims:
                notes = [f"the first ones are at {first.span}"]
                found.error("PLC112", f"other dims for input '{name}'", name.span, notes=notes)


def _check_twice(
    spec: Spec, placings: Iterable[tuple[str, tuple[Placed, ...]]], code: str, kind: str, found: Diagnostics
) -> None:
    """Two placements of one thing on one axis, in one statement or in two that disagree."""
    first: dict[tuple[str, str | None], tuple[Placed, tuple[Placed, ...]]] = {}
    for what, placed_list in placings:
        for placed in placed_list:
            key = (what, spec.axis_of(placed))
            earlier, line = first.setdefault(key, (placed, placed_list))
            notes = [f"the first one is at {earlier.span}"]
            if earlier is placed:
                continue
            if line is placed_list:
                found.error("PLC207", f"a second placement on axis '{key[1]}'", placed.span, notes=notes)
            elif earlier.placement != placed.placement:
                message = f"{kind} '{what}' is placed {placed.placement!r} here, {earlier.placement!r} elsewhere"
                found.error(code, message, placed.span, notes=notes)
