"""A problem as tables: what elimination works on.

Costs travel as *limbs*: int64 arrays compared lexicographically along axis 0, several components packed in
one limb where their sums fit. A net with few consumers is one table over its source and consumers. A net
with many is a chain of auxiliary variables, "what the consumers from here on ask for", in program order:
exact, and the width stays that of the program. Sets that the rest of the net cannot tell apart are one state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from placement.solver.problem import COMPONENTS, FORBIDDEN, Net, Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

Ints = NDArray[np.int64]

INFINITE = 1 << 58  # forbidden, inside the solver
_BITS = 57  # finite sums in a limb stay below 1 << _BITS; 16 infinities fit in int64
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
        totals = np.zeros(COMPONENTS, dtype=object)
        largest: dict[int, Ints] = {}
        for costs in (*(v.costs for v in problem.variables), *(net.table for net in problem.nets)):
            if id(costs) not in largest:
                finite = np.where(costs[0] < FORBIDDEN, costs, 0).reshape(COMPONENTS, -1)
                if finite.min() < 0:
                    raise ValueError("costs are at least 0")
                largest[id(costs)] = finite.max(axis=1)
            totals += largest[id(costs)]
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
        for limb, group in zip(packed, self.groups, strict=True):
            limb[...] = costs[group[0]]
            for part in group[1:]:
                limb <<= self.bits[part]
                limb += costs[part]
        packed[:, forbidden] = 0
        packed[0, forbidden] = INFINITE
        return packed

    def unpack(self, limbs: Sequence[int]) -> tuple[int, int, int]:
        parts = [0] * COMPONENTS
        for limb, group in zip(limbs, self.groups, strict=True):
            rest = int(limb)
            for part in reversed(group[1:]):
                parts[part] = rest & ((1 << self.bits[part]) - 1)
                rest >>= self.bits[part]
            parts[group[0]] = rest
        return parts[0], parts[1], parts[2]


def less_than(a: Ints, b: Ints) -> NDArray[np.bool_]:
    """Lexicographic a < b over axis 0."""
    less = a[-1] < b[-1]
    for limb in range(a.shape[0] - 2, -1, -1):
        less = (a[limb] < b[limb]) | ((a[limb] == b[limb]) & less)
    return less


def least(table: Ints) -> tuple[Ints, NDArray[np.intp]]:
    """Lexicographic minimum over axis 1 of [limbs, choices, ...], and the lowest index that has it."""
    lows = [table[0].min(axis=0)]
    ranked = table[0]
    for limb in table[1:]:
        ranked = np.where(ranked == lows[-1], limb, np.iinfo(np.int64).max)
        lows.append(ranked.min(axis=0))
    return np.stack(lows), ranked.argmin(axis=0)



@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A table [limbs, *domains of scope]; equal keys mean equal tables."""

    scope: tuple[int, ...]
    table: Ints
    key: int


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


class Model:
    """A problem as factors over variables of at least two choices, the problem's own and auxiliary ones."""

    def __init__(self, problem: Problem, dense: int) -> None:
        self.limbs = Limbs.of(problem)
        self.dense = dense
        self.store = Store()
        self.factors: list[Factor] = []
        self.total = [0] * len(self.limbs.groups)
        self.count = len(problem.variables)
        self.owner = list(range(self.count))  # auxiliary variables belong to their net's source
        self.kept: list[Ints] = []
        self._tables: dict[int, tuple[int, Ints]] = {}
        self._built: dict[tuple[object, ...], tuple[int, Ints]] = {}
        asked = [_asked(net) for net in problem.nets]
        self._variables(problem, asked)
        self.domains = [len(kept) for kept in self.kept]
        for net, masks in zip(problem.nets, asked, strict=True):
            self._net(net, {v: bits[self.kept[v]] for v, bits in masks.items()})

    def choice(self, picked: Sequence[int]) -> tuple[int, ...]:
        """Choices of the problem from values of the model's variables."""
        return tuple(int(kept[picked[v]]) for v, kept in enumerate(self.kept))

    def _variables(self, problem: Problem, asked: list[dict[int, Ints]]) -> None:
        """Of choices that every net sees alike keep the cheapest; drop forbidden ones."""
        seen: list[list[Ints]] = [[] for _ in problem.variables]
        for net, masks in zip(problem.nets, asked, strict=True):
            seen[net.source].append(net.produced)
            for v, bits in masks.items():
                seen[v].append(bits)
        done: dict[tuple[bytes, ...], tuple[Ints, int, Ints]] = {}
        for v, variable in enumerate(problem.variables):
            columns = (variable.costs, *seen[v])
            name = tuple(part.tobytes() for part in columns)
            if name not in done:
                packed = self.limbs.pack(variable.costs)
                kept = _distinct(packed, seen[v])
                if not len(kept):
                    raise Conflict(v)
                done[name] = (kept, *self.store.key(packed[:, kept]))
            kept, key, table = done[name]
            self.kept.append(kept)
            self._add((v,) if len(kept) > 1 else (), table if len(kept) > 1 else table[:, 0], key)

    def _add(self, scope: tuple[int, ...], table: Ints, key: int) -> None:
        if scope:
            self.factors.append(Factor(scope, table, key))
            return
        if table[0] >= INFINITE:
            raise Conflict(self._at)
        self.total = [a + int(b) for a, b in zip(self.total, table, strict=True)]

    def _packed(self, table: Ints) -> tuple[int, Ints]:
        """A net's table in limbs; nets share tables by identity or by content."""
        if id(table) not in self._tables:
            self._tables[id(table)] = self.store.key(self.limbs.pack(table))
        return self._tables[id(table)]

    def _net(self, net: Net, masks: dict[int, Ints]) -> None:
        self._at = net.source
        key, table = self._packed(net.table)
        produced = net.produced[self.kept[net.source]]
        own = masks.pop(net.source, np.zeros_like(produced)) | net.always
        for v in [v for v in masks if self.domains[v] == 1]:
            own = own | masks.pop(v)
        if prod([self.domains[v] for v in (net.source, *masks)]) > self.dense and len(masks) > 1:
            self._chain(table, produced, own, masks, net.source)
        else:
            self._clique(key, table, produced, own, masks, net.source)

    def _clique(self, key: int, table: Ints, produced: Ints, own: Ints, masks: dict[int, Ints], source: int) -> None:  # noqa: PLR0913
        """One table over the source (left out where it has one choice) and the consumers."""
        name = (key, produced.tobytes(), own.tobytes(), *(bits.tobytes() for bits in masks.values()))
        if name not in self._built:
            rank = 1 + len(masks)
            index = own.reshape(-1, *[1] * len(masks))
            for axis, bits in enumerate(masks.values(), 1):
                index = index | bits.reshape([-1 if axis == at else 1 for at in range(rank)])
            whole = table[:, produced.reshape(-1, *[1] * len(masks)), index]
            whole = whole if len(produced) > 1 else whole[:, 0]
            self._built[name] = self.store.key(np.ascontiguousarray(whole))
        scope = ((source,) if len(produced) > 1 else ()) + tuple(masks)
        found, whole = self._built[name]
        self._add(scope, whole, found)

    def _chain(self, table: Ints, produced: Ints, own: Ints, masks: dict[int, Ints], source: int) -> None:
        """Auxiliary variables for the set asked for so far, from the last consumer back to the first.

        Going backward closes the chain at the source, where the program is still narrow.
        """
        consumers = sorted(masks, reverse=True)
        asks = [sorted(set(masks[v].tolist())) for v in consumers]
        states = _states(table[:, produced, :], own, asks)
        if not all(states):
            raise Conflict(source)
        before, old = None, states[0]
        for v, new in zip(consumers, states[1:], strict=True):
            after = None
            if max(new.values()) > 0:
                after = self._auxiliary(max(new.values()) + 1, source)
            self._step(before, old, v, masks[v], after, new)
            before, old = after, new
        ends = _representatives(old)
        whole = table[:, produced[:, None], own[:, None] | ends[None, :]]
        scope = tuple(v for v, kept in ((source, len(produced) > 1), (before, len(ends) > 1)) if kept and v is not None)
        whole = np.ascontiguousarray(whole.reshape(-1, *[self.domains[v] for v in scope]))
        self._add(scope, whole, self.store.key(whole)[0])

    def _auxiliary(self, domain: int, source: int) -> int:
        self.domains.append(domain)
        self.owner.append(source)
        return len(self.domains) - 1

    def _step(  # noqa: PLR0913 - one link of a chain is these six things
        self, before: int | None, old: dict[int, int], v: int, bits: Ints, after: int | None, new: dict[int, int]
    ) -> None:
        """Allow exactly: state before, what ``v`` asks for, the state that follows."""
        starts = _representatives(old)
        whole = np.zeros((len(self.total), len(starts), len(bits), max(new.values()) + 1), dtype=np.int64)
        whole[0] = INFINITE
        for i, start in enumerate(starts.tolist()):
            for j, bit in enumerate(bits.tolist()):
                if (start | bit) in new:
                    whole[0, i, j, new[start | bit]] = 0
        scope = tuple(x for x in (before, v, after) if x is not None)
        whole = whole.reshape(-1, *[self.domains[x] for x in scope])
        if whole.any():
            key, whole = self.store.key(whole)
            self._add(scope, whole, key)


def _asked(net: Net) -> dict[int, Ints]:
    """Per consuming variable the mask each of its choices asks for, several uses joined."""
    masks: dict[int, Ints] = {}
    for v, ids in net.consumers:
        bits = np.left_shift(1, ids)
        masks[v] = masks[v] | bits if v in masks else bits
    return masks


def _distinct(packed: Ints, seen: list[Ints]) -> Ints:
    """Indices of the cheapest choice of each kind, ascending; none that is forbidden."""
    best: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}
    kinds = zip(*(part.tolist() for part in seen), strict=True) if seen else [()] * packed.shape[1]
    for index, (kind, cost) in enumerate(zip(kinds, zip(*packed.tolist(), strict=True), strict=True)):
        if cost[0] < INFINITE and (kind not in best or (cost, index) < best[kind]):
            best[kind] = (cost, index)
    return np.array(sorted(index for _, index in best.values()), dtype=np.int64)


def _states(rows: Ints, own: Ints, asks: list[list[int]]) -> list[dict[int, int]]:
    """For each place in a chain: reachable mask → state. Masks that the rest cannot tell apart share a state.

    rows: [limbs, choices of the source, masks]. Masks from which nothing is possible are left out.
    """
    reachable = [{0}]
    for bits in asks:
        reachable.append({mask | bit for mask in reachable[-1] for bit in bits})
    choices = np.arange(rows.shape[1])
    last: dict[int, int] = {}
    classes: dict[object, int] = {}
    for mask in sorted(reachable[-1]):
        column = rows[:, choices, own | mask]
        if column[0].min() < INFINITE:
            last[mask] = classes.setdefault(column.tobytes(), len(classes))
    found = [last]
    for bits, masks in zip(reversed(asks), reversed(reachable[:-1]), strict=True):
        state: dict[int, int] = {}
        classes = {}
        for mask in sorted(masks):
            follow = tuple(found[-1].get(mask | bit, -1) for bit in bits)
            if max(follow) >= 0:
                state[mask] = classes.setdefault(follow, len(classes))
        found.append(state)
    return found[::-1]


def _representatives(state: dict[int, int]) -> Ints:
    """One mask per state."""
    chosen: dict[int, int] = {}
    for mask, index in state.items():
        chosen.setdefault(index, mask)
    return np.array([chosen[index] for index in range(len(chosen))], dtype=np.int64)
