"""How evenly attention is divided where an axis cuts its queries: pairs of query and key by rank."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from placement.graph.attention import bounds
from placement.graph.ir import Node, arguments, evaluate
from placement.graph.segments import flattened

if TYPE_CHECKING:
    import sympy
    from torch import Tensor

    from placement.solver.mesh import Place
    from placement.solver.plan import Plan

Spans = tuple[tuple[int, int], ...]
Bounds = tuple[int | None, int | None]
Before = Callable[[int], int]  # the pairs of the first so many queries


@dataclass(frozen=True, slots=True)
class Balance:
    """The pairs that attention has to do with, of one head: on the rank with least, and with most.

    bounds: how far before and after a query its keys may be, None for no bound. marks: what is known of the pairs that
    marks hide: ``counted`` as in the example, ``unknown`` where that has no numbers, '' where there are no marks.
    sequences: of how many the pairs of a rank are. axes: those that cut the queries, and the sequences where each has
    its own count. contiguous: the same two if every axis cut its blocks in one piece.
    """

    modules: tuple[str, ...]
    axes: tuple[str, ...]
    zigzag: bool
    bounds: Bounds
    pairs: tuple[int, int]
    contiguous: tuple[int, int]
    marks: str = ""
    sequences: int = 1


def balances(plan: Plan) -> tuple[Balance, ...]:
    """One for all attention that is alike in this."""
    found: dict[object, Balance] = {}
    for node in plan.strategies:
        within, counts = bounds(node), _counts(plan, node)
        tokens = _places(plan, node, -2) if within != (None, None) or counts is not None else {}
        if not tokens:
            continue
        rows = _places(plan, node, 0) if counts is not None and len(counts) > 1 else {}
        marks = "" if not arguments(node).get("of_key") else "unknown" if counts is None else "counted"
        size = evaluate(node.operands[0].shape[-2], plan.bound.hints)
        key = size, within, tuple(tokens.items()), tuple(rows.items()), marks, id(counts)
        if key not in found:
            found[key] = _balance(plan, size, within, counts, tokens, rows, marks)
        found[key] = dataclasses.replace(found[key], modules=(*found[key].modules, node.module))
    return tuple(found.values())


def _counts(plan: Plan, node: Node) -> Tensor | None:
    """The keys that each query sees in the example, [sequences or 1, queries], if that has the sizes of the plan."""
    counts = plan.graph.seen.get(node.results[0].name)
    if counts is None:
        return None
    shape = [evaluate(size, plan.bound.hints) for size in node.operands[0].shape]
    return counts if counts.shape[1] == shape[-2] and len(counts) in (1, shape[0]) else None


def _balance(
    plan: Plan,
    size: int,
    within: Bounds,
    counts: Tensor | None,
    tokens: Mapping[int, Place],
    rows: Mapping[int, Place],
    marks: str,
) -> Balance:
    hints, axes = plan.bound.hints, plan.mesh.axes
    cuts = [(axes[axis].n, place) for axis, place in tokens.items()]
    plain = [(n, dataclasses.replace(place, zigzag=False)) for n, place in cuts]
    sequences, sums = 1, [functools.partial(_before, size=size, seen=within)]
    if counts is not None:
        own = list(_blocks(len(counts), [(axes[axis].n, place) for axis, place in rows.items()], hints))
        sequences, sums = _length(own[0]), [_running(counts, block) for block in own]
    return Balance(
        modules=(),
        axes=tuple(axes[axis].name for axis in (*rows, *tokens)),
        zigzag=any(place.zigzag for _, place in cuts),
        bounds=within,
        pairs=_least_and_most(sums, _blocks(size, cuts, hints)),
        contiguous=_least_and_most(sums, _blocks(size, plain, hints)),
        marks=marks,
        sequences=sequences,
    )


_MARKS = {"": "", "counted": " with the example's marks", "unknown": " without its marks"}


def told(balance: Balance) -> str:
    """The balance as a sentence."""
    order = "zigzag" if balance.zigzag else "contiguous"
    beside = f"; contiguous {_range(balance.contiguous)}" if balance.zigzag else ""
    axes = " and ".join(balance.axes)
    left, right = ("all" if bound is None else bound for bound in balance.bounds)
    what = f"attention to {left} before and {right} after" if balance.bounds != (None, None) else "attention"
    if right == 0:
        what = "causal attention" if left == "all" else f"causal attention to {left} before"
    what += f" in {balance.sequences} sequences" if balance.sequences > 1 else ""
    return f"{_range(balance.pairs)} of {what}{_MARKS[balance.marks]} on a rank of {axes}, {order}{beside}"


def _range(pairs: tuple[int, int]) -> str:
    least, most = pairs
    if least == most:
        return f"{most} pairs"
    return f"{least} to {most} pairs, 1 : {most / least:.3g}" if least else f"{least} to {most} pairs"


def _places(plan: Plan, node: Node, dim: int) -> dict[int, Place]:
    """Where axes cut a dim of the queries, by axis, outermost first."""
    query, joint = node.operands[0], plan.strategies[node].operands[0]
    along = set(flattened(plan.bound.dims.of(query)[dim]))
    order = joint.order
    return {
        axis: plan.mesh.place(plan.bound.dims, query, joint, (axis,), order[:at])
        for at, axis in enumerate(order)
        if plan.mesh.axes[axis].n > 1 and joint[axis].over and along.issuperset(joint[axis].over)
    }


def _least_and_most(sums: Sequence[Before], blocks: Sequence[Spans]) -> tuple[int, int]:
    """Of all blocks of queries, with each of ``sums``."""
    counts = [sum(before(stop) - before(start) for start, stop in block) for before in sums for block in blocks]
    return min(counts), max(counts)


def _running(counts: Tensor, rows: Spans) -> Before:
    """The pairs of the first queries of some sequences together."""
    each = counts[[row for start, stop in rows for row in range(start, stop)]].sum(0)
    return [0, *each.cumsum(0).tolist()].__getitem__


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


def _blocks(size: int, cuts: Sequence[tuple[int, Place]], hints: Mapping[sympy.Symbol, int]) -> list[Spans]:
    """What all ranks have of a dim that axes cut one after the other."""
    blocks: list[Spans] = [((0, size),)]
    for n, place in cuts:
        blocks = [part for block in blocks for part in _cut(block, n, place, evaluate(place.outer, hints))]
    return blocks


def _length(block: Spans) -> int:
    return sum(stop - start for start, stop in block)


def _cut(block: Spans, n: int, place: Place, outer: int) -> Iterator[Spans]:
    """The blocks of all ranks of an axis."""
    rest = _length(block) // outer
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
