"""Hints for placements that cannot be met: edits of the line at fault, tried, and told with what they cost.

Runs only once a plan has failed. Whatever it finds, the fault stays what it was; where nothing helps, nothing is said.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from placement.graph.ir import Graph
from placement.lang.diagnostics import Diagnostic, PlacementError
from placement.lang.spec import InputLine, OutputLine, ParamLine, Placed, Span, Spec, ValueLine
from placement.report.units import show_time
from placement.solver.bind import bind, parameter_dims
from placement.solver.build import price
from placement.types import Placement, Replicate, Shard

_CODES = {"PLC203", "PLC204", "PLC205", "PLC301", "PLC402"}
_SECONDS = 1.0  # no attempt begins later
_LARGE = 1500  # ops from which on a single attempt takes longer than that

Line = InputLine | ParamLine | ValueLine | OutputLine
_Tried = tuple[int, int, Placement | None]  # picoseconds, which attempt, the placement (None: no line)


@dataclass(frozen=True, slots=True)
class _Edit:
    """Another placement on the line, or None for the line left out, and the spec with it."""

    placement: Placement | None
    spec: Spec


def mended(
    error: PlacementError,
    graph: Graph,
    spec: Spec,
    axes: Mapping[str, int],
    *,
    device_type: str = "cpu",
    sizes: Mapping[str, int] | None = None,
    seconds: float = _SECONDS,
) -> PlacementError:
    """The error with hints on what would be possible at its lines. Trying stops after ``seconds``."""
    end = time.perf_counter() + seconds
    errors = [d for d in error.diagnostics if d.severity == "error"]
    at_fault = [_line(spec, d.span) for d in errors]
    if len(graph.nodes) > _LARGE or None in at_fault:
        return error
    others: dict[int, Line] = {id(line): line for line in at_fault if line is not None}
    result: list[Diagnostic] = []
    for diagnostic in error.diagnostics:
        line = _line(spec, diagnostic.span)
        if diagnostic.severity == "error" and diagnostic.code in _CODES and line is not None:
            rest = _left_out(spec, (other for key, other in others.items() if key != id(line)))
            costs: list[_Tried] = []
            for index, edit in enumerate(_edits(rest, line, diagnostic.span, graph)):
                if time.perf_counter() > end:
                    break
                cost = _cost(graph, edit.spec, axes, device_type, sizes)
                if cost is not None:
                    costs.append((cost, index, edit.placement))
            diagnostic = _told(diagnostic, _best(costs))
        result.append(diagnostic)
    return PlacementError(result, error.sources)


def _best(costs: list[_Tried]) -> list[_Tried]:
    """The cheapest shard, since one was asked for, and the cheapest of what shards nothing."""
    shards = [tried for tried in costs if isinstance(tried[2], Shard)]
    others = [tried for tried in costs if not isinstance(tried[2], Shard)]
    return sorted([*sorted(shards)[:1], *sorted(others)[:1]])


def _told(diagnostic: Diagnostic, costs: list[_Tried]) -> Diagnostic:
    if not costs:
        return diagnostic
    parts: list[str] = []
    for cost, _, placement in costs:
        what = "leaving the line out" if placement is None else f"{placement!r} here"
        parts.append(f"{what} {'' if parts else 'costs '}{show_time(cost)}{'' if parts else ' per step'}")
    hint = ", ".join(parts)
    return replace(diagnostic, hint=f"{diagnostic.hint}\n{hint}" if diagnostic.hint else hint)


def _cost(
    graph: Graph, spec: Spec, axes: Mapping[str, int], device_type: str, sizes: Mapping[str, int] | None
) -> int | None:
    try:
        bound = bind(graph, spec, axes, device_type=device_type, sizes=sizes)
    except PlacementError:
        return None
    cost = price(bound)
    return None if cost is None else cost[0]


# -- the line, and what else it could say ---------------------------------------------------------------


def _lines(spec: Spec) -> tuple[Line, ...]:
    return (*spec.inputs, *spec.params, *spec.values, *spec.outputs)


def _line(spec: Spec, span: Span | None) -> Line | None:
    """The statement that the span lies in."""
    if span is None:
        return None
    inside = [line for line in _lines(spec) if line.span.file == span.file and _covers(line.span, span)]
    return inside[0] if inside else None


def _covers(outer: Span, inner: Span) -> bool:
    return (outer.line, outer.column) <= (inner.line, inner.column) and (inner.end_line, inner.end_column) <= (
        outer.end_line,
        outer.end_column,
    )


def _edits(spec: Spec, line: Line, span: Span | None, graph: Graph) -> Iterator[_Edit]:
    """Other dims of what the line places, whole on every rank, and the line left out."""
    at = next((p for p in line.placed if span is not None and _covers(p.span, span)), None)
    at = at or next(iter(line.placed), None)
    if at is None:
        return
    edits: list[_Edit] = []
    for placement in (p for p in _placements(spec, line, graph) if p != at.placement):
        new = Placed(placement, at.axis, at.span)
        placed = tuple(new if p is at else p for p in line.placed)
        edits.append(_Edit(placement, _exchanged(spec, line, replace(line, placed=placed))))
    edits.insert(1, _Edit(None, _left_out(spec, [line])))  # early, as time may run out
    yield from edits


def _placements(spec: Spec, line: Line, graph: Graph) -> Iterator[Placement]:
    dims: Iterable[str | int]
    match line:
        case ParamLine():
            matched = [p for p in graph.parameters if any(line.pattern.matches(name) for name in p.names)]
            rank = min((len(p.value.shape) for p in matched), default=0)
            own = parameter_dims(graph.modules, matched[0]) if matched else ()
            dims = [own[i] if i < len(own) else i for i in range(rank)]
        case InputLine() if line.dims is not None:
            dims = [str(dim) for dim in line.dims]
        case _:
            dims = dict.fromkeys(str(dim) for named in spec.inputs for dim in named.dims or ())
    yield from (Shard(dim) for dim in dims)
    if isinstance(line, ValueLine):  # elsewhere that is what leaving the line out means
        yield Replicate()


def _left_out(spec: Spec, lines: Iterable[Line]) -> Spec:
    """Without the placements of the lines; the names that they give to dims stay."""
    for line in lines:
        keeps = isinstance(line, InputLine | ParamLine) and line.dims is not None
        spec = _exchanged(spec, line, replace(line, placed=()) if keeps else None)
    return spec


def _exchanged(spec: Spec, line: Line, new: Line | None) -> Spec:
    def swap(lines: tuple[Line, ...]) -> tuple[Line, ...]:
        return tuple(made for old in lines for made in [new if old is line else old] if made is not None)

    return replace(
        spec,
        inputs=swap(spec.inputs),
        params=swap(spec.params),
        values=swap(spec.values),
        outputs=swap(spec.outputs),
    )
