"""What it costs to have one value in several types at once, and which conversions to run for it.

The consumers of a value ask for a set of types; conversions may share their beginnings (one all-gather,
then two free splits). The least cost is that of a directed Steiner arborescence over the value's types:
rooted at the type it is produced in, reaching every type asked for, chains through types nobody asked for
allowed. Dynamic programming over sets of types gives all roots and all sets at once, 3**T steps.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from placement.solver.problem import COMPONENTS, FORBIDDEN, LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from placement.solver.problem import Costs
    from placement.types import Type

    Price = Callable[[Type, Type], tuple[int, int, int] | None]
    Matrix = tuple[tuple[int, int, int] | None, ...]

MOST_TYPES = 10
_FIELD = 60  # bits per component of a packed cost; LIMIT times the edges of any tree fits
_MASK = (1 << _FIELD) - 1


def conversion_table(types: Sequence[Type], price: Price) -> Costs:
    """The least cost to have, from each type, every type of each set.

    price(a, b) is what the direct conversion from ``a`` to ``b`` costs (ps, bytes kept, launches), each
    between 0 and LIMIT, or None where there is none. Returns int64 [3, T, 2 ** T], read-only and shared
    between calls with the same prices; FORBIDDEN where there is no way.
    Raises ValueError on more than 10 types or a price out of range.
    """
    return _solve(len(types), _matrix(types, price)).table


def conversion_tree(types: Sequence[Type], price: Price, source: int, asked: int) -> tuple[tuple[int, int], ...]:
    """The conversions (from, to) that give every type in the bit mask ``asked`` at the cost of the table.

    Each edge's source is ``source`` or the target of an earlier edge. Among trees of equal cost it has the
    fewest edges. Raises ValueError where there is no way.
    """
    return _solve(len(types), _matrix(types, price)).tree(source, asked)


def _matrix(types: Sequence[Type], price: Price) -> Matrix:
    """Direct prices, row by row; the diagonal is None."""
    if len(types) > MOST_TYPES:
        raise ValueError(f"{len(types)} types of one value; at most {MOST_TYPES} are supported")
    found = tuple(None if a == b else price(a, b) for a in types for b in types)
    for entry in found:
        if entry is not None and not all(0 <= part <= LIMIT for part in entry):
            raise ValueError(f"price {entry} is not between 0 and {LIMIT}")
    return found


class _Arborescences:
    """All least trees over one matrix of prices.

    Costs are packed in Python integers: ps, bytes, launches, edges from the highest bits down. The edge
    count makes every edge cost something, so a least tree has no cycle and no edge twice.
    """

    __slots__ = ("_best", "_next", "_split", "table")

    def __init__(self, count: int, matrix: Matrix) -> None:
        self._shortest(count, matrix)
        self._grow(count)
        self.table = self._unpack(count)

    def _shortest(self, count: int, matrix: Matrix) -> None:
        """Floyd and Warshall: _best[mask of one bit][from] and the first step of each path."""
        direct = [None if entry is None else _pack(entry) for entry in matrix]
        away = [direct[i * count : (i + 1) * count] for i in range(count)]
        step: list[list[int]] = [list(range(count)) for _ in range(count)]
        for i in range(count):
            away[i][i] = 0
        for via in range(count):
            for i in range(count):
                head = away[i][via]
                if head is None:
                    continue
                for j in range(count):
                    tail, old = away[via][j], away[i][j]
                    if tail is not None and (old is None or head + tail < old):
                        away[i][j], step[i][j] = head + tail, step[i][via]
        self._next = step
        self._best: list[list[int | None]] = [[0] * count]
        self._best += [[away[i][mask.bit_length() - 1] for i in range(count)] for mask in range(1, 1 << count)]

    def _grow(self, count: int) -> None:
        """Sets of two and more: walk from the root to some type, then split the set there.

        _split[mask][root] is (that type, one part of the set) for the rest of ``tree`` to follow.
        """
        best = self._best
        away = [best[1 << j] for j in range(count)]
        self._split: dict[tuple[int, int], tuple[int, int]] = {}
        for mask in range(1, 1 << count):
            if mask & (mask - 1) == 0:
                continue
            parts = [_halves(best, mask, at) for at in range(count)]
            for root in range(count):
                least: int | None = None
                for at in range(count):
                    walk, (rest, part) = away[at][root], parts[at]
                    if walk is not None and rest is not None and (least is None or walk + rest < least):
                        least = walk + rest
                        self._split[mask, root] = (at, part)
                best[mask][root] = least

    def _unpack(self, count: int) -> Costs:
        table = np.zeros((COMPONENTS, count, 1 << count), dtype=np.int64)
        for mask, row in enumerate(self._best):
            for root, cost in enumerate(row):
                if cost is None:
                    table[0, root, mask] = FORBIDDEN
                else:
                    for part in range(COMPONENTS):
                        table[part, root, mask] = cost >> (_FIELD * (COMPONENTS - part)) & _MASK
        table.setflags(write=False)
        return table

    def tree(self, source: int, asked: int) -> tuple[tuple[int, int], ...]:
        """The edges of the least tree, sorted so that each starts at a type already there."""
        if self._best[asked][source] is None:
            raise ValueError(f"no conversions lead from type {source} to every type in mask {asked:b}")
        edges: set[tuple[int, int]] = set()
        todo = [(source, asked)]
        while todo:
            root, mask = todo.pop()
            if mask & (mask - 1):
                at, part = self._split[mask, root]
                todo += [(at, part), (at, mask & ~part)]
                mask = 1 << at
            target = mask.bit_length() - 1
            while mask and root != target:
                edges.add((root, self._next[root][target]))
                root = self._next[root][target]
        have, ordered = {source}, []
        while edges:
            edge = min(edge for edge in edges if edge[0] in have)
            edges.remove(edge)
            ordered.append(edge)
            have.add(edge[1])
        return tuple(ordered)


def _pack(price: tuple[int, int, int]) -> int:
    return ((price[0] << _FIELD | price[1]) << _FIELD | price[2]) << _FIELD | 1


def _halves(best: list[list[int | None]], mask: int, at: int) -> tuple[int | None, int]:
    """The cheapest way to cover ``mask`` from ``at`` in two parts, and the part with the lowest bit.

    A type that is ``at`` itself is a part that costs nothing, so the two parts are never empty.
    """
    low = mask & -mask
    least, chosen, part = None, low, mask
    while True:
        part = (part - 1) & mask
        if part == 0:
            return least, chosen
        if part & low:
            one, other = best[part][at], best[mask & ~part][at]
            if one is not None and other is not None and (least is None or one + other < least):
                least, chosen = one + other, part


@lru_cache(maxsize=1024)
def _solve(count: int, matrix: Matrix) -> _Arborescences:
    """Thousands of values share a few matrices; the key is the prices, not the types."""
    return _Arborescences(count, matrix)
