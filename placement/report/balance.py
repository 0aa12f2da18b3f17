"""How evenly attention with bounds is divided where an axis cuts its queries: pairs of query and key by rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from placement.graph.attention import bounds
from placement.graph.ir import Node, evaluate
from placement.graph.segments import flattened

if TYPE_CHECKING:
    import sympy

    from placement.solver.mesh import Place
    from placement.solver.plan import Plan

Spans = tuple[tuple[int, int], ...]
Bounds = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Balance:
    """The pairs that attention has to do with, of one head and sequence: on the rank with least, and with most.

    bounds: how far before and after a query its keys may be, None for no bound; what marks hide is known with the data.
    contiguous: the same two if every axis cut its blocks in one piece.
    """

    modules: tuple[str, ...]
    axes: tuple[str, ...]
    zigzag: bool
    bounds: Bounds
    pairs: tuple[int, int]
    contiguous: tuple[int, int]


def balances(plan: Plan) -> tuple[Balance, ...]:
    """One for all attention that is alike in this."""
    found: dict[object, Balance] = {}
    hints = plan.bound.hints
    for node in plan.strategies:
        seen = bounds(node)
        places = _places(plan, node) if seen != (None, None) else {}
        if not places:
            continue
        size = evaluate(node.operands[0].shape[-2], hints)
        cuts = [(plan.mesh.axes[axis].n, place) for axis, place in places.items()]
        key = size, seen, tuple(places.items())
        if key not in found:
            plain = [(n, dataclasses.replace(place, zigzag=False)) for n, place in cuts]
            found[key] = Balance(
                modules=(),
                axes=tuple(plan.mesh.axes[axis].name for axis in places),
                zigzag=any(place.zigzag for _, place in cuts),
                bounds=seen,
                pairs=_least_and_most(size, seen, cuts, hints),
                contiguous=_least_and_most(size, seen, plain, hints),
            )
        found[key] = dataclasses.replace(found[key], modules=(*found[key].modules, node.module))
    return tuple(found.values())


def told(balance: Balance) -> str:
    """The balance as a sentence."""
    order = "zigzag" if balance.zigzag else "contiguous"
    beside = f"; contiguous {_range(balance.contiguous)}" if balance.zigzag else ""
    axes = " and ".join(balance.axes)
    left, right = ("all" if bound is None else bound for bound in balance.bounds)
    what = f"attention to {left} before and {right} after"
    if right == 0:
        what = "causal attention" if left == "all" else f"causal attention to {left} before"
    return f"{_range(balance.pairs)} of {what} on a rank of {axes}, {order}{beside}"


def _range(pairs: tuple[int, int]) -> str:
    least, most = pairs
    if least == most:
        return f"{most} pairs"
    return f"{least} to {most} pairs, 1 : {most / least:.3g}" if least else f"{least} to {most} pairs"


def _places(plan: Plan, node: Node) -> dict[int, Place]:
    """Where axes cut the queries, by axis, outermost first."""
    query, joint = node.operands[0], plan.strategies[node].operands[0]
    along = set(flattened(plan.bound.dims.of(query)[-2]))
    order = joint.order
    return {
        axis: plan.mesh.place(plan.bound.dims, query, joint, (axis,), order[:at])
        for at, axis in enumerate(order)
        if plan.mesh.axes[axis].n > 1 and joint[axis].over and along.issuperset(joint[axis].over)
    }


def _least_and_most(
    size: int, seen: Bounds, cuts: Sequence[tuple[int, Place]], hints: Mapping[sympy.Symbol, int]
) -> tuple[int, int]:
    blocks: list[Spans] = [((0, size),)]
    for n, place in cuts:
        blocks = [part for block in blocks for part in _cut(block, n, place, evaluate(place.outer, hints))]
    counts = [sum(_before(stop, size, seen) - _before(start, size, seen) for start, stop in block) for block in blocks]
    return min(counts), max(counts)


def _before(count: int, size: int, seen: Bounds) -> int:
    """The pairs of the first ``count`` queries, with ``size`` keys."""
    left, right = seen
    ends = size * count if right is None else _clipped(count, size, right + 1)
    return ends - (0 if left is None else _clipped(count, size, -left))


def _clipped(count: int, size: int, more: int) -> int:
    """The sum of ``i + more``, between 0 and ``size``, for all i below ``count``."""
    first = min(max(0, -more), count)  # what is 0 until then
    last = min(max(first, size - more), count)  # and ``size`` from then on
    return (first + last - 1 + 2 * more) * (last - first) // 2 + (count - last) * size


def _cut(block: Spans, n: int, place: Place, outer: int) -> Iterator[Spans]:
    """The blocks of all ranks of an axis."""
    rest = sum(stop - start for start, stop in block) // outer
    segments = place.segments or (1,)
    pieces = 2 * n if place.zigzag else n
    for rank in range(n):
        own: list[tuple[int, int]] = []
        for window in range(outer):
            begin = window * rest
            for length in segments:
                piece = rest * length // sum(segments) // pieces
                for at in (rank, 2 * n - 1 - rank)[: pieces // n]:
                    own += _within(block, begin + at * piece, begin + (at + 1) * piece)
                begin += piece * pieces
        yield tuple(own)


def _within(block: Spans, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Where the elements from ``start`` to ``stop`` of a block lie in the whole."""
    before = 0
    for begin, end in block:
        first, last = max(start - before, 0), min(stop - before, end - begin)
        if first < last:
            yield begin + first, begin + last
        before += end - begin
