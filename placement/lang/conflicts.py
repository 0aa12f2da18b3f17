"""Statements of a spec that disagree, or say nothing new."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from placement.lang.diagnostics import Diagnostic, Diagnostics
from placement.lang.patterns import compile_pattern, expand
from placement.lang.source import Span
from placement.lang.spec import LINKS, InputLine, Name, OutputLine, ParamLine, Pattern, Placed, Spec, ValueLine

_MOST_COMPARISONS = 100_000
"""Of paths with patterns: keeps the time linear. What is not compared here is found with the model."""

_Matched = ParamLine | ValueLine
_Named = InputLine | OutputLine


def check(spec: Spec, found: Diagnostics) -> None:
    """Add what is declared twice, where two statements disagree, and which statement repeats another."""
    _declared_twice(spec, found)
    for code, kind, lines in (("PLC201", "parameter", spec.params), ("PLC202", "value", spec.values)):
        _patterns_disagree(spec, lines, code, kind, found)
    for kind, lines in (("input", spec.inputs), ("output", spec.outputs)):
        _names_disagree(spec, lines, kind, found)
    _dims_disagree(spec, found)
    _runs_disagree(spec, found)
    _repeated(spec, found)


def _declared_twice(spec: Spec, found: Diagnostics) -> None:
    _twice((axis.name for axis in spec.axes), "mesh axis", found)
    _twice((link.name for link in spec.links if link.name not in LINKS), "link", found)
    _twice((limit.resource for limit in spec.limits), "limit on", found)
    for link in spec.links:
        if link.name in LINKS:
            hint = "choose another name; the mesh line may then say 'over' it"
            found.error("PLC112", f"link '{link.name}' is known already", link.name.span, hint=hint)
    for kind, lines in (("input", spec.inputs), ("output", spec.outputs)):
        for line in lines:
            own: set[str] = set()
            for name in line.names:
                if name in own:
                    found.error("PLC112", f"{kind} '{name}' twice in one line", name.span)
                own.add(name)
    for line in spec.strategies:
        axes: dict[str, Span] = {}
        for way in line.ways:
            axis = spec.axis_of(way)
            if axis is not None and axes.setdefault(axis, way.span) is not way.span:
                text = f"a strategy on axis '{axis}' twice in one line"
                found.error("PLC112", text, way.span, notes=_first(axes[axis]))
    for line in spec.lowers:
        keys: dict[str, Span] = {}
        for setting in line.settings:
            if keys.setdefault(setting.key, setting.key.span) is not setting.key.span:
                notes = _first(keys[setting.key])
                found.error("PLC112", f"setting '{setting.key}' twice in one line", setting.key.span, notes=notes)


def _twice(names: Iterable[Name], what: str, found: Diagnostics) -> None:
    first: dict[str, Name] = {}
    for name in names:
        if first.setdefault(name, name) is not name:
            found.error("PLC112", f"a second {what} '{name}'", name.span, notes=_first(first[name].span))


def _first(span: Span) -> list[str]:
    return [f"the first one is at {span}"]


# -- placements ----------------------------------------------------------------------------------------


class _Placements:
    """What was said of one kind of thing, by name: the first placement on each axis."""

    def __init__(self, spec: Spec, code: str, kind: str, found: Diagnostics) -> None:
        self.spec, self.code, self.kind, self.found = spec, code, kind, found
        self.first: dict[tuple[str, str | None, bool], tuple[Placed, int]] = {}
        self.told: set[Span] = set()  # a line that speaks of many things has one fault for all of them

    def add(self, what: str, placed_list: Iterable[Placed], line: int) -> None:
        """Compare the placements of a line for one thing with those of earlier lines."""
        for placed in placed_list:
            axis = self.spec.axis_of(placed)
            earlier, other = self.first.setdefault((what, axis, placed.stored), (placed, line))
            if earlier is not placed and line == other:
                message = f"a second {'stored ' if placed.stored else ''}placement on axis '{axis}'"
                self._tell("PLC207", message, placed, _first(earlier.span))
            elif earlier is not placed:
                self.compare(what, placed, earlier, _first(earlier.span))

    def compare(self, what: str, placed: Placed, earlier: Placed, notes: list[str]) -> None:
        """Report two placements of one thing on one axis that differ."""
        if earlier.placement != placed.placement:
            message = f"{self.kind} '{what}' is placed {placed.placement!r} here, {earlier.placement!r} elsewhere"
            self._tell(self.code, message, placed, notes)

    def _tell(self, code: str, message: str, placed: Placed, notes: list[str]) -> None:
        if placed.span not in self.told:
            self.told.add(placed.span)
            self.found.error(code, message, placed.span, notes=notes)


def _names_disagree(spec: Spec, lines: Iterable[_Named], kind: str, found: Diagnostics) -> None:
    placements = _Placements(spec, "PLC202", kind, found)
    for i, line in enumerate(lines):
        for name in dict.fromkeys(line.names):
            placements.add(name, line.placed, i)


def _patterns_disagree(spec: Spec, lines: tuple[_Matched, ...], code: str, kind: str, found: Diagnostics) -> None:
    """Equal paths are compared by text; a path without wildcards also with every pattern that matches it."""
    placements = _Placements(spec, code, kind, found)
    paths: dict[str, list[int]] = {}
    wild: dict[tuple[str | None, str | None], list[int]] = {}  # by first and last segment, None: a wildcard
    for i, line in enumerate(lines):
        for path in expand(line.pattern.text):
            placements.add(path, line.placed, i)
            if _is_wild(path):
                wild.setdefault(_ends(path), []).append(i)
            elif line.placed:
                paths.setdefault(path, []).append(i)
    for i, j, path in _met(lines, paths, wild):
        earlier, later = lines[min(i, j)], lines[max(i, j)]
        for placed in later.placed:
            for other in earlier.placed:
                if placed.stored == other.stored and spec.axis_of(placed) == spec.axis_of(other):
                    notes = [f"'{earlier.pattern}' at {earlier.pattern.span} speaks of it too"]
                    placements.compare(path, placed, other, notes)


def _met(
    lines: tuple[_Matched, ...], paths: Mapping[str, list[int]], wild: Mapping[tuple[str | None, str | None], list[int]]
) -> Iterator[tuple[int, int, str]]:
    """Two lines, the first of which names a path that the second's pattern matches."""
    left = _MOST_COMPARISONS
    for path, named in paths.items():
        first, last = _ends(path)
        for j in {j for ends in ((first, last), (first, None), (None, last), (None, None)) for j in wild.get(ends, ())}:
            left -= 1
            if left < 0:
                return
            if compile_pattern(lines[j].pattern.text).fullmatch(path):
                yield from ((i, j, path) for i in named if i != j)


def _is_wild(path: str) -> bool:
    return "*" in path or "[" in path


def _ends(path: str) -> tuple[str | None, str | None]:
    first, last = path.partition(".")[0], path.rpartition(".")[2]
    return (None if _is_wild(first) else first), (None if _is_wild(last) else last)


# -- everything else ------------------------------------------------------------------------------------


def _dims_disagree(spec: Spec, found: Diagnostics) -> None:
    """Two lines may speak of one input or parameter, as long as they name its dims alike."""
    inputs = ((str(name), name.span, line) for line in spec.inputs for name in line.names)
    params = ((str(line.pattern), line.pattern.span, line) for line in spec.params)
    for kind, lines in (("input", inputs), ("parameter", params)):
        first: dict[str, tuple[Span, tuple[Name, ...]]] = {}
        for name, span, line in lines:
            if line.dims is not None:
                first_span, first_dims = first.setdefault(name, (span, line.dims))
                if first_dims != line.dims:
                    here, there = (f"[{', '.join(dims)}]" for dims in (line.dims, first_dims))
                    message = f"{kind} '{name}' has the dims {here} here, {there} elsewhere"
                    found.error("PLC112", message, span, notes=_first(first_span))


def _runs_disagree(spec: Spec, found: Diagnostics) -> None:
    """One pattern with two implementations on an axis, or two values of a setting."""
    said: list[tuple[Pattern, str, str, Name]] = []
    for line in spec.strategies:
        said += [(line.pattern, f"on axis '{spec.axis_of(way)}'", "strategy", way.name) for way in line.ways]
    for line in spec.lowers:
        said += [(line.pattern, str(setting.key), str(setting.key), setting.value) for setting in line.settings]
    first: dict[tuple[str, str], tuple[Name, Pattern]] = {}
    for pattern, key, what, value in said:
        earlier, of = first.setdefault((pattern.text, key), (value, pattern))
        if earlier != value and of is not pattern:  # twice in one line is told already
            message = f"the {what} of '{pattern}' is '{value}' here, '{earlier}' elsewhere"
            found.error("PLC304", message, value.span, notes=_first(earlier.span))


def _repeated(spec: Spec, found: Diagnostics) -> None:
    first: dict[object, Span] = {}
    for line in (*spec.placing, *spec.strategies, *spec.lowers, *spec.expects):
        if first.setdefault(line, line.span) is not line.span:
            notes = _first(first[line])
            text = "this line repeats an earlier one"
            found.extend([Diagnostic("PLC119", text, line.span, "take it out", tuple(notes), severity="warning")])
