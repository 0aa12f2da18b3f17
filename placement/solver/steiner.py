"""What it costs to have one value in several types at once, and which conversions to run for it.

The consumers of a value ask for a set of types; conversions may share their beginnings (one all-gather,
then two free splits). The least cost is that of a directed Steiner arborescence over the value's types:
rooted at the type it is produced in, reaching every type asked for, chains through types nobody asked for
allowed. Dynamic programming over sets of types asked for (Dreyfus and Wagner) gives all roots at once, in 3**k
steps for a set of k types; only the sets that somebody asks about are found.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from placement.solver.limbs import INFINITE, Ints, least, less_than
from placement.solver.problem import COMPONENTS, FORBIDDEN, LIMIT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from placement.solver.problem import Costs

    Price = tuple[int, int, int]

_PARTS = COMPONENTS + 1
_LARGE = 64  # types from which what was found is let go with the last value that uses it


def conversions(count: int, prices: Mapping[tuple[int, int], Price], asked: Sequence[int]) -> Conversions:
    """The least conversions among ``count`` types, of which those in ``asked`` may be asked for.

    prices: what the direct conversion from one type to another costs (ps, bytes kept, launches), each
    between 0 and LIMIT; pairs that are left out have none. The same few numbers give the same object: thousands of
    values share them. Raises ValueError on a price out of range.
    """
    for entry in prices.values():
        if not all(0 <= part <= LIMIT for part in entry):
            raise ValueError(f"price {entry} is not between 0 and {LIMIT}")
    if count > _LARGE:
        return Conversions(count, dict(prices), tuple(asked))
    return _shared(count, tuple(sorted(prices.items())), tuple(asked))


class Conversions:
    """All least trees over one set of prices. Sets of types are bit masks over ``asked``.

    Costs are arrays of four numbers: ps, bytes, launches, and the number of edges. The last makes every edge cost
    something, so a least tree has no cycle and no edge twice.
    """

    def __init__(self, count: int, prices: Mapping[tuple[int, int], Price], asked: tuple[int, ...]) -> None:
        self.count = count
        self.asked = asked
        self._paths(prices)
        self._best: dict[int, Ints] = {0: np.zeros((_PARTS, count), dtype=np.int64)}
        self._split: dict[int, tuple[Ints, Ints]] = {}
        self._tables: dict[tuple[tuple[int, ...], bytes], Costs] = {}

    def table(self, sources: tuple[int, ...], sets: Ints) -> Costs:
        """The least cost to have, from each of ``sources``, every type of each set.

        Returns int64 [3, sources, sets], read-only and shared; FORBIDDEN where there is no way.
        """
        key = sources, sets.tobytes()
        if key not in self._tables:
            rows = list(sources)
            table = np.stack([self._costs(mask)[:COMPONENTS, rows] for mask in sets.tolist()], axis=2)
            forbidden = table[0] >= INFINITE
            table[:, forbidden] = 0
            table[0, forbidden] = FORBIDDEN
            table.setflags(write=False)
            self._tables[key] = table
        return self._tables[key]

    def tree(self, source: int, mask: int) -> tuple[tuple[int, int], ...]:
        """The conversions (from, to) that give every type in ``mask`` at the cost of the table.

        Each edge's source is ``source`` or the target of an earlier edge. Among trees of equal cost it has the
        fewest edges. Raises ValueError where there is no way.
        """
        if self._costs(mask)[0, source] >= INFINITE:
            raise ValueError(f"no conversions lead from type {source} to every type in mask {mask:b}")
        edges: set[tuple[int, int]] = set()
        todo = [(source, mask)]
        while todo:
            root, mask = todo.pop()
            if mask & (mask - 1):
                walk, parts = self._split[mask]
                at = int(walk[root])
                part = int(parts[at])
                todo += [(at, part), (at, mask & ~part)]
                edges |= self._path(root, at)
            elif mask:
                edges |= self._path(root, self.asked[mask.bit_length() - 1])
        have, ordered = {source}, []
        while edges:
            edge = min(edge for edge in edges if edge[0] in have)
            edges.remove(edge)
            ordered.append(edge)
            have.add(edge[1])
        return tuple(ordered)

    def _path(self, root: int, target: int) -> set[tuple[int, int]]:
        edges: set[tuple[int, int]] = set()
        while root != target:
            edges.add((root, int(self._next[root, target])))
            root = int(self._next[root, target])
        return edges

    def _paths(self, prices: Mapping[tuple[int, int], Price]) -> None:
        """Floyd and Warshall: the least cost from each type to each, and the first step of each path."""
        count = self.count
        away = np.zeros((_PARTS, count, count), dtype=np.int64)
        away[0] = INFINITE
        away[0, range(count), range(count)] = 0
        for (i, j), price in prices.items():
            away[:, i, j] = (*price, 1)
        step = np.tile(np.arange(count), (count, 1))
        for via in range(count):
            other = _capped(away[:, :, via, None] + away[:, None, via, :])
            less = less_than(other, away)
            away = np.where(less, other, away)
            step = np.where(less, step[:, via, None], step)
        self._away, self._next = away, step

    def _costs(self, mask: int) -> Ints:
        """What a set costs from each root, [4, types]: walk to some type, then split the set there.

        _split[mask] is (that type by root, one part of the set by type) for ``tree`` to follow.
        """
        known = self._best.get(mask)
        if known is not None:
            return known
        if mask & (mask - 1) == 0:
            found = self._away[:, :, self.asked[mask.bit_length() - 1]]
        else:
            halves, parts = self._halves(mask)
            found, walk = least(_capped(self._away.transpose(0, 2, 1) + halves[:, :, None]))
            self._split[mask] = walk, parts
        self._best[mask] = found
        return found

    def _halves(self, mask: int) -> tuple[Ints, Ints]:
        """The cheapest way to cover ``mask`` from each type in two parts, and the part with the lowest bit.

        A type that is asked for costs nothing where the walk is at it, so the two parts are never empty.
        """
        low = mask & -mask
        parts: list[int] = []
        part = (mask - 1) & mask
        while part:
            if part & low:
                parts.append(part)
            part = (part - 1) & mask
        costs = np.stack([self._costs(part) + self._costs(mask & ~part) for part in parts], axis=1)
        best, index = least(_capped(costs))
        return best, np.array(parts)[index]


def _capped(costs: Ints) -> Ints:
    np.minimum(costs[0], INFINITE, out=costs[0])
    return costs


@lru_cache(maxsize=1024)
def _shared(count: int, prices: tuple[tuple[tuple[int, int], Price], ...], asked: tuple[int, ...]) -> Conversions:
    return Conversions(count, dict(prices), asked)
