"""Costs inside the solver: limbs, and tables that know when they are equal.

Costs travel as *limbs*: int64 arrays compared lexicographically along axis 0, several of the three components
packed in one limb where their sums fit. Two limbs are usual: picoseconds; bytes and launches.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from placement.solver.problem import COMPONENTS, FORBIDDEN, Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

Ints = NDArray[np.int64]

INFINITE = 1 << 58  # forbidden, inside the solver
_BITS = 57  # finite sums in a limb stay below 1 << _BITS
_ADDENDS = 16  # infinities that are summed before the sum is clipped; 31 of them would fit in int64
_INTERNED = 1 << 14  # entries up to which a table is compared with those before it


class Conflict(Exception):
    """Everything is forbidden; this variable of the problem is where it showed."""

    def __init__(self, variable: int) -> None:
        super().__init__(variable)
        self.variable = variable


@dataclass(frozen=True, slots=True)
class Limbs:
    """How the three components lie in int64 limbs: groups of neighbours, and the bits of each component."""

    groups: tuple[tuple[int, ...], ...]
    bits: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem) -> Limbs:
        """Pack what fits: no total of any choice passes the sum of the largest finite entries."""
        tables = {id(net.table): net.table for net in problem.nets}
        own = [variable.costs for variable in problem.variables]
        starts = np.cumsum([0, *(costs.shape[1] for costs in own)])[:-1]
        totals = np.zeros(COMPONENTS, dtype=object)
        if own:
            most = np.maximum.reduceat(_finite(np.concatenate(own, axis=1)), starts, axis=1)
            totals += most.astype(object).sum(axis=1)
        for table, uses in Counter(id(net.table) for net in problem.nets).items():
            totals += _finite(tables[table]).max(axis=1).astype(object) * uses
        bits = tuple(int(total).bit_length() for total in totals)
        if max(bits[1:]) > _BITS:
            raise ValueError("bytes kept or launches add up to more than 2**57")
        for groups in (((0, 1, 2),), ((0,), (1, 2)), ((0, 1), (2,))):
            if all(sum(bits[part] for part in group) <= _BITS for group in groups):
                return cls(groups, bits)
        return cls(((0,), (1,), (2,)), bits)

    def pack(self, costs: Ints) -> Ints:
        """[3, ...] to [limbs, ...]; forbidden entries become infinite in limb 0 and 0 elsewhere."""
        forbidden = costs[0] >= FORBIDDEN
        packed = np.empty((len(self.groups), *costs.shape[1:]), dtype=np.int64)
        for limb, group in enumerate(self.groups):
            packed[limb] = costs[group[0]]
            for part in group[1:]:
                packed[limb] = (packed[limb] << self.bits[part]) + costs[part]
        packed[:, forbidden] = 0
        packed[0, forbidden] = INFINITE
        return packed

    def unpack(self, limbs: Sequence[int]) -> tuple[int, int, int]:
        """The three components of a sum of packed costs."""
        parts = [0] * COMPONENTS
        for limb, group in zip(limbs, self.groups, strict=True):
            rest = int(limb)
            for part in reversed(group[1:]):
                parts[part] = rest & ((1 << self.bits[part]) - 1)
                rest >>= self.bits[part]
            parts[group[0]] = rest
        return parts[0], parts[1], parts[2]


def _finite(costs: Ints) -> Ints:
    """[3, entries] with 0 for what is forbidden. Raises ValueError on a negative cost."""
    finite = np.where(costs[0] < FORBIDDEN, costs, 0).reshape(COMPONENTS, -1)
    if finite.min() < 0:
        raise ValueError("costs are at least 0")
    return finite


def less_than(a: Ints, b: Ints) -> NDArray[np.bool_]:
    """Lexicographic a < b over axis 0."""
    less = a[-1] < b[-1]
    for limb in range(a.shape[0] - 2, -1, -1):
        less = (a[limb] < b[limb]) | ((a[limb] == b[limb]) & less)
    return less


def saturating_sum(tables: Sequence[Ints]) -> Ints:
    """The sum of tables that broadcast; what passes INFINITE stays above it without overflow."""
    total = tables[0]
    for count, table in enumerate(tables[1:], 2):
        total = total + table
        if count % _ADDENDS == 0:
            np.minimum(total[:1], INFINITE, out=total[:1])
    return total


def least(table: Ints) -> tuple[Ints, NDArray[np.intp]]:
    """Lexicographic minimum over axis 1 of [limbs, choices, ...], and the lowest index that has it."""
    lows = [table[0].min(axis=0)]
    ranked = table[0]
    for limb in table[1:]:
        ranked = np.where(ranked == lows[-1], limb, np.iinfo(np.int64).max)
        lows.append(ranked.min(axis=0))
    return np.stack(lows), ranked.argmin(axis=0)


@dataclass(slots=True)
class Store:
    """Gives each table a key by its content."""

    known: dict[tuple[tuple[int, ...], bytes], tuple[int, Ints]] = field(default_factory=dict)
    count: int = 0

    def key(self, table: Ints) -> tuple[int, Ints]:
        """The key, and the table first seen with it. Large tables are taken to be new."""
        if table.size > _INTERNED * table.shape[0]:
            self.count += 1
            return self.count, table
        found = self.known.setdefault((table.shape, table.tobytes()), (self.count + 1, table))
        self.count = max(self.count, found[0])
        return found
