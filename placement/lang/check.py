"""What is wrong with a spec by itself: no model, no mesh is needed to see it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from placement.lang import conflicts
from placement.lang.diagnostics import Diagnostic, Diagnostics, did_you_mean
from placement.lang.expected import listed
from placement.lang.source import Span
from placement.lang.spec import (
    COLLECTIVES,
    DEVICES,
    DTYPES,
    LINKS,
    LOWERINGS,
    PARAMETER_DIMS,
    RESOURCES,
    Chosen,
    ExpectLine,
    Figure,
    InputLine,
    Name,
    ParamLine,
    Placed,
    PlacingLine,
    Setting,
    Spec,
    ValueLine,
)
from placement.types import Auto, Partial, Replicate, Shard


def check(spec: Spec) -> tuple[Diagnostic, ...]:
    """What shows without a model, in order of place: faults, and warnings of what has no effect."""
    found = Diagnostics()
    _check_mesh(spec, found)
    _check_device(spec, found)
    _check_axes(spec, found)
    _check_lists(spec, found)
    declared = list(dict.fromkeys(_declared(spec)))
    unnamed: dict[str, list[Span]] = {}
    for statement in spec.placing:
        _check_dims(spec, statement, declared, unnamed, found)
        for placed in statement.placed:
            _check_placement(spec, statement, placed, found)
    _tell_unnamed(declared, unnamed, found)
    _check_words(spec, found)
    conflicts.check(spec, found)
    return found.sorted(spec.sources)


def _check_mesh(spec: Spec, found: Diagnostics) -> None:
    links = [*LINKS, *map(str, (line.name for line in spec.links))]
    used = {axis.link for axis in spec.axes}
    for axis in spec.axes:
        if axis.link is not None and axis.link not in links:
            hint = did_you_mean(axis.link, links) or f"the links are {', '.join(links)}"
            found.error("PLC110", f"unknown link '{axis.link}'", axis.link.span, hint=hint)
    for line in spec.links:
        if line.name not in used and line.name not in LINKS:
            message = f"link '{line.name}' is never used"
            hint = f"name it on the line of an axis: mesh {spec.axes[0].name if spec.axes else 'tp'} over {line.name}"
            found.extend([Diagnostic("PLC114", message, line.name.span, hint, severity="warning")])


_NEEDED = {"bandwidth": "2 TB/s", "capacity": "96 GB", "rate for float32": "60 TFLOP/s float32"}
"""The figures that a device of one's own has in any case, with an example of each."""


def _check_device(spec: Spec, found: Diagnostics) -> None:
    """A device of one's own has a name of its own, each figure once, and all that prices need."""
    device = spec.device
    if device is None or not device.figures:
        return
    if device.name in DEVICES:
        hint = f"choose another name, or leave the figures out: device {device.name}"
        found.error("PLC112", f"device '{device.name}' is known already", device.name.span, hint=hint)
    faults = len(found)
    first: dict[str, Figure] = {}
    for figure in device.figures:
        span = figure.quantity.span
        if first.setdefault(figure.what, figure) is not figure:
            notes = [f"the first one is at {first[figure.what].quantity.span}"]
            found.error("PLC112", f"a second {figure.what}", span, notes=notes)
        elif figure.dtype is not None:
            _known(figure.dtype, DTYPES, "PLC120", "dtype", found)
    missing = [what for what in _NEEDED if what not in first]
    if missing and len(found) == faults:  # else what is missing may be what is at fault
        shown = ", ".join(_NEEDED[what] for what in missing)
        message = f"device '{device.name}' has no {listed(missing)}"
        found.error("PLC120", message, device.name.span, hint=f"add what it has, as in {shown}")


def _check_axes(spec: Spec, found: Diagnostics) -> None:
    axes = list(dict.fromkeys(str(axis.name) for axis in spec.axes))
    dims = set(_declared(spec))
    placed = (placed for statement in spec.placing for placed in statement.placed)
    ways = (way for line in spec.strategies for way in line.ways)
    users: tuple[Placed | Chosen | ExpectLine, ...] = (*placed, *ways, *spec.expects)
    for user in users:
        if not axes:
            # One cause, told once at the first placement.
            hint = f"add a line such as 'mesh {user.axis or 'tp'}'"
            found.error("PLC111", "no mesh axis is declared", user.span, hint=hint)
            return
        if user.axis is not None and user.axis not in axes:
            hint = did_you_mean(user.axis, axes) or f"the axes are {', '.join(axes)}"
            if user.axis in dims:
                hint = f"'{user.axis}' is a dim; the axes are {', '.join(axes)}"
            found.error("PLC101", f"unknown axis '{user.axis}'", user.axis.span, hint=hint)
        elif user.axis is None and len(axes) > 1 and not isinstance(user, ExpectLine) and not _for_all_axes(user):
            what, shown, span = (
                ("placement", repr(user.placement), user.span)
                if isinstance(user, Placed)
                else ("strategy", str(user.name), user.name.span)
            )
            hint = f"write {shown} @ {axes[0]}" + "".join(f" or @ {axis}" for axis in axes[1:])
            found.error("PLC113", f"the mesh has several axes and this {what} names none", span, hint=hint)


def _for_all_axes(user: Placed | Chosen) -> bool:
    """Whether it may speak of all axes at once, as a budget may: what is the same on each."""
    return isinstance(user, Placed) and isinstance(user.placement, Replicate | Auto) and not user.stored


def _check_lists(spec: Spec, found: Diagnostics) -> None:
    """A name stands once in a list of dims."""
    for line in (*spec.inputs, *spec.params):
        first: dict[str, Name] = {}
        for name in line.dims or ():
            if first.setdefault(name, name) is not name:
                notes = [f"the first one is at {first[name].span}"]
                hint = "a name stands for one dim: give each its own"
                found.error("PLC118", f"dim '{name}' twice in one list", name.span, hint=hint, notes=notes)


def _check_dims(
    spec: Spec, statement: PlacingLine, declared: list[str], unnamed: dict[str, list[Span]], found: Diagnostics
) -> None:
    """A dim's name must come from somewhere, an index must be within the dims that the line itself lists.

    Names that nothing gives to a dim, and that are near none, go to ``unnamed``.
    """
    own = statement.dims if isinstance(statement, InputLine | ParamLine) else None
    builtin = () if isinstance(statement, InputLine) else PARAMETER_DIMS
    known = list(dict.fromkeys([*(declared if own is None else map(str, own)), *builtin]))
    for placed in statement.placed:
        if not isinstance(placed.placement, Shard):
            continue
        dim = placed.placement.dim
        if isinstance(dim, str) and dim not in known:
            hint = did_you_mean(dim, known)
            if any(dim == axis.name for axis in spec.axes):
                hint = f"'{dim}' is an axis: write Shard(DIM) @ {dim}"
            if hint is None and own is not None:
                hint = f"the line names {', '.join(map(str, own))}"
            if hint is None:
                unnamed.setdefault(dim, []).append(placed.dim_span or placed.span)
            else:
                found.error("PLC103", f"unknown dim '{dim}'", placed.dim_span, hint=hint)
        elif isinstance(dim, int) and own is not None and dim >= len(own):
            listed = f"[{', '.join(own)}]"
            message = f"there is no dim {dim} in {listed}: dims count from 0"
            found.error("PLC204", message, placed.dim_span)


def _tell_unnamed(declared: list[str], unnamed: dict[str, list[Span]], found: Diagnostics) -> None:
    """A name that is missing is missing once, however often it is used."""
    if any(d.code == "PLC118" for d in found.sorted()):
        return  # the list that has one name twice lacks another
    known = ", ".join(dict.fromkeys([*declared, *PARAMETER_DIMS]))
    for dim, spans in unnamed.items():
        hint = f"an input or param line gives a dim its name, as in: input x : [batch, {dim}]"
        notes = [f"dims known here: {known}", *(f"it is also at {span}" for span in spans[1:3])]
        found.error("PLC103", f"no line names a dim '{dim}'", spans[0], hint=hint, notes=notes)


def _declared(spec: Spec) -> Iterator[str]:
    for line in (*spec.inputs, *spec.params):
        yield from map(str, line.dims or ())


def _check_placement(spec: Spec, statement: PlacingLine, placed: Placed, found: Diagnostics) -> None:
    """A placement that its statement cannot have."""
    kept = isinstance(statement, ParamLine)
    if placed.stored and not kept:
        message = "only a parameter is stored"
        found.error("PLC209", message, placed.span, hint=f"write {placed.without_stored()}")
        return
    if isinstance(placed.placement, Partial) and isinstance(statement, ParamLine | InputLine):
        what = "a parameter" if kept else "an input"
        hint = "write Replicate or Shard(DIM), or leave it out"
        found.error("PLC205", f"{what} is not a sum over ranks", placed.span, hint=hint)
    elif placed.stored:
        axis = spec.axis_of(placed)
        for other in statement.placed:
            if not other.stored and spec.axis_of(other) == axis and isinstance(other.placement, Shard):
                message = f"axis '{axis}' shards the parameter already where it is used"
                notes = [f"it is used {other}", "what is stored is a part of what is used"]
                found.error("PLC210", message, placed.span, notes=notes, hint="store it on another axis")
                break
    if isinstance(placed.placement, Shard) and placed.placement.order != "contiguous":
        dim = placed.placement.dim
        built_in = isinstance(statement, ValueLine) and dim in PARAMETER_DIMS and dim not in set(_declared(spec))
        if kept or built_in:
            message = f"the {placed.placement.order} order is for a sequence, which a parameter has not"
            found.error("PLC211", message, placed.span, hint=f"write Shard({dim})")


def _check_words(spec: Spec, found: Diagnostics) -> None:
    """Words that only some statements know."""
    for line in spec.limits:
        _known(line.resource, RESOURCES, "PLC117", "resource", found)
    for line in spec.expects:
        _known(line.collective, COLLECTIVES, "PLC116", "collective", found)
    for line in spec.lowers:
        for setting in line.settings:
            if _known(setting.key, LOWERINGS, "PLC115", "setting", found):
                _check_value(setting, found)


def _check_value(setting: Setting, found: Diagnostics) -> None:
    word, opening, count = setting.value.partition("(")
    values = LOWERINGS[setting.key]
    if not opening or word not in values:
        _known(setting.value, values, "PLC115", f"value of '{setting.key}'", found)
    elif word != "chunks":
        found.error("PLC115", f"'{word}' takes nothing in parentheses", setting.value.span, hint=f"write {word}")
    elif not count[:-1].strip().isdecimal() or int(count[:-1]) < 2:
        found.error("PLC115", f"'{setting.value}' is no number of chunks", setting.value.span, hint="write chunks(4)")


def _known(name: Name, known: Iterable[str], code: str, what: str, found: Diagnostics) -> bool:
    if name in known:
        return True
    hint = did_you_mean(name, known) or f"there is {', '.join(known)}"
    found.error(code, f"unknown {what} '{name}'", name.span, hint=hint)
    return False
