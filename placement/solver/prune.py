"""Choices that no best solution needs, found before any table is built.

Choice a of a variable is not needed where some b costs no more whatever the neighbours choose: the sum over
the variable's nets of the worst that b can cost more than a, in any state the net can still reach, plus
the difference of their own costs, is at most 0. Choices that all nets see alike are the plain case. What
is dropped shrinks what the neighbours can be asked, so this runs until nothing changes.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from placement.solver.limbs import INFINITE, Conflict, Ints, Limbs, Store, least

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from placement.solver.problem import Problem

_PASSES = 12
_CONTEXTS = 1 << 20  # numbers compared for one variable in one net; above, the net allows no dominance

AskSet = tuple[int, ...]  # masks, ascending
# Table key, rows and own masks of the source's choices, masks of the consumer's choices (None: it is the
# source that is asked about), and how many other consumers have which set to ask for.
_Question = tuple[int, tuple[int, ...], tuple[int, ...], AskSet | None, tuple[tuple[AskSet, int], ...]]


class Columns(NamedTuple):
    """A net's table, packed [limbs, rows, sets], and the bit masks of its columns; None where all have one."""

    table: Ints
    sets: Ints | None

    def at(self, rows: Ints, masks: Ints) -> Ints:
        """The costs at rows and masks that broadcast: [limbs, ...]."""
        return self.table[:, rows, masks if self.sets is None else np.searchsorted(self.sets, masks)]


class _Contrast(NamedTuple):
    """What one net says of the choices of one variable.

    more: [limbs, a, b], the most that b costs more than a. worse: [a, b], b is forbidden somewhere that a is
    not. dead: [a], a is forbidden everywhere.
    """

    more: Ints
    worse: NDArray[np.bool_]
    dead: NDArray[np.bool_]


Instead = tuple[tuple[int, int], ...]
"""Choices that could stand in for one that is dropped, each with how much less it costs at least (limb 0)."""


class Pruned:
    """The choices kept of each variable, ascending, and the masks that each net's consumers ask for.

    dropped: variable, choice and its substitutes, in the order of dropping; a forbidden choice has none. Without
    ``compare`` only those are left out that are forbidden, or that all nets see as they see a cheaper one.
    """

    def __init__(self, problem: Problem, limbs: Limbs, store: Store, *, compare: bool = True) -> None:
        self.problem = problem
        self.store = store
        self.asked = [asked_masks(net.consumers) for net in problem.nets]
        self.by_key: dict[int, Columns] = {}
        self.tables = self._keys(limbs)
        self.kept: list[Ints] = []
        self.costs: list[tuple[int, Ints]] = []  # key and table of the kept choices' own costs
        self.dropped: list[tuple[int, int, Instead]] = []
        self._merge(limbs)
        self._near: list[list[int]] = [[] for _ in problem.variables]
        self._sets: list[dict[int, AskSet]] = []
        self._counts: list[Counter[AskSet]] = []
        for n, (net, masks) in enumerate(zip(problem.nets, self.asked, strict=True)):
            for v in dict.fromkeys((net.source, *masks)):
                self._near[v].append(n)
            sets = {v: ask_set(bits[self.kept[v]]) for v, bits in masks.items() if v != net.source}
            self._sets.append(sets)
            self._counts.append(Counter(sets.values()))
        self._sources: dict[int, tuple[AskSet, AskSet, tuple[AskSet, AskSet]]] = {}
        self._contrasts: dict[_Question, _Contrast | None] = {}
        self._decided: dict[tuple[object, ...], tuple[Ints, tuple[tuple[int, Instead], ...]]] = {}
        if compare:
            self._run()

    def _keys(self, limbs: Limbs) -> list[int]:
        """The key of each net's table; nets share tables by identity or by content."""
        seen: dict[tuple[int, bytes], int] = {}
        packed: dict[int, tuple[int, Ints]] = {}
        keys: list[int] = []
        for net in self.problem.nets:
            if id(net.table) not in packed:
                packed[id(net.table)] = self.store.key(limbs.pack(net.table))
            content, table = packed[id(net.table)]
            sets = net.sets
            key = seen.setdefault((content, b"" if sets is None else sets.tobytes()), len(seen))
            self.by_key.setdefault(key, Columns(table, sets))
            keys.append(key)
        return keys

    def _merge(self, limbs: Limbs) -> None:
        """Of choices that every net sees alike keep the cheapest; drop forbidden ones."""
        seen: list[list[Ints]] = [[] for _ in self.problem.variables]
        for net, masks in zip(self.problem.nets, self.asked, strict=True):
            seen[net.source].append(net.produced)
            for v, bits in masks.items():
                seen[v].append(bits)
        done: dict[tuple[bytes, ...], tuple[Ints, tuple[int, Ints], list[tuple[int, Instead]]]] = {}
        for v, variable in enumerate(self.problem.variables):
            name = tuple([part.tobytes() for part in (variable.costs, *seen[v])])
            if name not in done:
                packed = limbs.pack(variable.costs)
                kept, gone = _distinct(packed, seen[v])
                if not len(kept):
                    raise Conflict(v)
                done[name] = (kept, self.store.key(packed[:, kept]), gone)
            kept, costs, gone = done[name]
            self.kept.append(kept)
            self.costs.append(costs)
            self.dropped += [(v, choice, instead) for choice, instead in gone]

    def _run(self) -> None:
        pending = [v for v, kept in enumerate(self.kept) if len(kept) > 1]
        for _ in range(_PASSES):
            changed: set[int] = set()
            for v in pending:
                if self._prune(v):
                    for n in self._near[v]:
                        changed.add(self.problem.nets[n].source)
                        changed.update(self._sets[n])
            pending = sorted(v for v in changed if len(self.kept[v]) > 1)
            if not pending:
                return

    def _prune(self, v: int) -> bool:
        """Drop what is not needed of one variable; whether anything was."""
        key, costs = self.costs[v]
        asks = [self._question(v, n) for n in self._near[v]]
        name = (key, *asks)
        if name not in self._decided:
            self._decided[name] = self._needed(costs, [self._contrast(ask) for ask in asks])
        left, gone = self._decided[name]
        if len(left) == costs.shape[1]:
            return False
        if not len(left):
            raise Conflict(v)
        own = self.kept[v].tolist()
        self.dropped += [(v, own[a], tuple((own[b], less) for b, less in instead)) for a, instead in gone]
        self.kept[v] = self.kept[v][left]
        self.costs[v] = self.store.key(np.ascontiguousarray(costs[:, left]))
        for n in self._near[v]:
            if v == self.problem.nets[n].source:
                self._sources.pop(n, None)
            else:
                self._counts[n][self._sets[n][v]] -= 1
                self._sets[n][v] = ask_set(self.asked[n][v][self.kept[v]])
                self._counts[n][self._sets[n][v]] += 1
        return True

    def _question(self, v: int, n: int) -> _Question:
        """All that a contrast depends on: the table, the states of the others, what v's choices do."""
        if n not in self._sources:
            self._sources[n] = self._source(n)
        rows, own, states = self._sources[n]
        if v == self.problem.nets[n].source:
            return (self.tables[n], rows, own, None, self._others(n, None))
        bits = tuple(self.asked[n][v][self.kept[v]].tolist())
        return (self.tables[n], *states, bits, self._others(n, self._sets[n][v]))

    def _source(self, n: int) -> tuple[AskSet, AskSet, tuple[AskSet, AskSet]]:
        """Rows and own masks by the source's choices, and the distinct pairs of them."""
        net, masks = self.problem.nets[n], self.asked[n]
        kept = self.kept[net.source]
        rows = net.produced[kept].tolist()
        asked = masks[net.source][kept].tolist() if net.source in masks else [0] * len(rows)
        own = [bits | net.always for bits in asked]
        states = sorted(set(zip(rows, own, strict=True)))
        return tuple(rows), tuple(own), (tuple(row for row, _ in states), tuple(mask for _, mask in states))

    def _others(self, n: int, left: AskSet | None) -> tuple[tuple[AskSet, int], ...]:
        """How many consumers have which set of masks to ask for, one consumer with the set ``left`` left out."""
        items = sorted(self._counts[n].items())
        return tuple([(asks, count - (asks == left)) for asks, count in items if count > (asks == left)])

    def _contrast(self, question: _Question) -> _Contrast | None:
        if question not in self._contrasts:
            self._contrasts[question] = _contrast(self.by_key[question[0]], *question[1:])
        return self._contrasts[question]

    @staticmethod
    def _needed(costs: Ints, contrasts: list[_Contrast | None]) -> tuple[Ints, tuple[tuple[int, Instead], ...]]:
        """Indices of the choices to keep, and the others with their substitutes. On a draw the lower index stays."""
        known = [contrast for contrast in contrasts if contrast is not None]
        dead = np.zeros(costs.shape[1], dtype=bool)
        for contrast in known:
            dead |= contrast.dead
        alive = [a for a in range(costs.shape[1]) if not dead[a]]
        gone: list[tuple[int, Instead]] = [(a, ()) for a in range(costs.shape[1]) if dead[a]]
        if len(known) == len(contrasts):
            more = costs[:, None, :] - costs[:, :, None]
            worse = np.zeros(more.shape[1:], dtype=bool)
            for contrast in known:
                more = more + contrast.more
                np.maximum(more[0], -INFINITE, out=more[0])
                worse |= contrast.worse
            over = np.zeros_like(worse)
            for limb in more[::-1]:
                over = (limb > 0) | ((limb == 0) & over)
            fine = ~(over | worse)
            for a in alive[::-1]:
                instead = tuple((b, -int(more[0, a, b])) for b in alive if b != a and fine[a, b])
                if instead:
                    alive.remove(a)
                    gone.append((a, instead))
        return np.array(alive, dtype=np.int64), tuple(gone)


def asked_masks(consumers: Sequence[tuple[int, Ints]]) -> dict[int, Ints]:
    """Per consuming variable of a net the mask each of its choices asks for, several uses joined."""
    masks: dict[int, Ints] = {}
    for v, ids in consumers:
        bits = np.left_shift(1, ids)
        masks[v] = masks[v] | bits if v in masks else bits
    return masks


def ask_set(bits: Ints) -> AskSet:
    """The masks that a consumer's choices ask for."""
    return tuple(sorted(set(bits.tolist())))


def _distinct(packed: Ints, seen: list[Ints]) -> tuple[Ints, list[tuple[int, Instead]]]:
    """Indices of the cheapest choice of each kind, ascending, and the others; none that is forbidden is kept."""
    best: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}
    kinds = list(zip(*(part.tolist() for part in seen), strict=True) if seen else [()] * packed.shape[1])
    for index, (kind, cost) in enumerate(zip(kinds, zip(*packed.tolist(), strict=True), strict=True)):
        if cost[0] < INFINITE and (kind not in best or (cost, index) < best[kind]):
            best[kind] = (cost, index)
    kept = np.array(sorted(index for _, index in best.values()), dtype=np.int64)
    gone: list[tuple[int, Instead]] = []
    for index, kind in enumerate(kinds):
        one = best.get(kind)
        if packed[0, index] >= INFINITE or one is None:
            gone.append((index, ()))
        elif one[1] != index:
            gone.append((index, ((one[1], int(packed[0, index]) - one[0][0]),)))
    return kept, gone


def _contrast(
    columns: Columns,
    rows: tuple[int, ...],
    own: tuple[int, ...],
    bits: AskSet | None,
    others: tuple[tuple[AskSet, int], ...],
) -> _Contrast | None:
    """Compare the choices in every state of the net; None where that is too much."""
    row, mask, rest = (np.array(part, dtype=np.int64) for part in (rows, own, union_masks(dict(others))))
    choices = len(rows) if bits is None else len(bits)
    states = len(rest) * (1 if bits is None else len(rows))
    limbs = columns.table.shape[0]
    if states * choices * choices * limbs > _CONTEXTS:
        return None
    if bits is None:
        cost = columns.at(row, rest[:, None] | mask)
    else:
        base = (mask[:, None] | rest)[..., None]
        cost = columns.at(row[:, None, None], base | np.array(bits)).reshape(limbs, -1, choices)
    fits = cost[0] < INFINITE
    less = cost[:, :, :, None] - cost[:, :, None, :]  # how much b costs less than a
    both = fits[:, :, None] & fits[:, None, :]
    less[:, ~both] = 0
    less[0, ~both] = INFINITE
    worse = (fits[:, :, None] & ~fits[:, None, :]).any(axis=0)
    return _Contrast(-least(less)[0], worse, ~fits.any(axis=0))


class TooManyMasks(Exception):
    """More masks than the limit."""


def union_masks(others: Mapping[AskSet, int], most: int | None = None) -> list[int]:
    """Every mask that consumers can ask for together, each choosing one of its own.

    Raises TooManyMasks past ``most`` of them.
    """
    masks = {0}
    for asks, count in others.items():
        for _ in range(count):
            grown = {mask | bit for mask in masks for bit in asks}
            if grown == masks:
                break
            if most is not None and len(grown) > most:
                raise TooManyMasks
            masks = grown
    return sorted(masks)
