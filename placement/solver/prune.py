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
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from placement.solver.problem import Problem

_PASSES = 12
_CONTEXTS = 1 << 20  # numbers compared for one variable in one net; above, the net allows no dominance

AskSet = tuple[int, ...]  # masks, ascending
Asks = tuple[tuple[int, ...], AskSet]
"""The masks that a consumer's choices ask for, by choice and as a set."""
_Question = tuple[int, tuple[int, ...] | None]
"""The state of a net, and the masks of the consumer's choices; None where it is the source that is asked about."""


class Columns(NamedTuple):
    """A net's table, packed [limbs, rows, sets], and the bit masks of its columns; None where all have one."""

    table: Ints
    sets: Ints | None

    def at(self, rows: Ints, masks: Ints) -> Ints:
        """The costs at rows and masks that broadcast: [limbs, ...]."""
        return self.table[:, rows, masks if self.sets is None else np.searchsorted(self.sets, masks)]


class _State(NamedTuple):
    """All that a net is by now: table key, rows and own masks of the source's choices, what consumers ask for."""

    table: int
    rows: tuple[int, ...]
    own: tuple[int, ...]
    asks: tuple[tuple[AskSet, int], ...]


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
        # Nets of one form share their arrays, so most of what is known is found by which objects it is of.
        self._bits: dict[tuple[int, ...], Ints] = {}
        self.asked = [self._masks(net.consumers) for net in problem.nets]
        self.by_key: dict[int, Columns] = {}
        self.tables = self._keys(limbs)
        self.kept: list[Ints] = []
        self.costs: list[tuple[int, Ints]] = []  # key and table of the kept choices' own costs
        self.dropped: list[tuple[int, int, Instead]] = []
        self._merge(limbs)
        if compare:
            self._known_asks: dict[tuple[int, int], tuple[Ints, Asks]] = {}
            self._near: list[list[int]] = [[] for _ in problem.variables]
            self._asks: list[dict[int, Asks]] = []
            for n, (net, masks) in enumerate(zip(problem.nets, self.asked, strict=True)):
                for v in dict.fromkeys((net.source, *masks)):
                    self._near[v].append(n)
                self._asks.append({v: self._asking(bits, v) for v, bits in masks.items() if v != net.source})
            self._states: list[int | None] = [None] * len(problem.nets)
            self._numbers: dict[object, int] = {}
            self._known_states: dict[_State, int] = {}
            self._every_state: list[_State] = []
            self._contrasts: dict[_Question, _Contrast | None] = {}
            self._compared: dict[object, _Contrast | None] = {}
            self._decided: dict[tuple[object, ...], tuple[Ints, tuple[tuple[int, Instead], ...]]] = {}
            self._left: dict[tuple[int, int, int], tuple[Ints, Ints, tuple[int, Ints]]] = {}
            self._run()

    def _masks(self, consumers: Sequence[tuple[int, Ints]]) -> dict[int, Ints]:
        """``asked_masks``, equal ones as one array."""
        masks: dict[int, Ints] = {}
        for v, ids in consumers:
            if (name := (id(ids),)) not in self._bits:
                self._bits[name] = np.left_shift(1, ids)
            bits = self._bits[name]
            if v in masks:
                name = id(masks[v]), id(bits)
                bits = self._bits.setdefault(name, masks[v] | bits)
            masks[v] = bits
        return masks

    def _keys(self, limbs: Limbs) -> list[int]:
        """The key of each net's table; nets share tables by identity or by content."""
        seen: dict[tuple[int, bytes], int] = {}
        known: dict[tuple[int, int], int] = {}
        keys: list[int] = []
        for net in self.problem.nets:
            name = id(net.table), id(net.sets)
            if name not in known:
                content, table = self.store.key(limbs.pack(net.table))
                sets = net.sets
                known[name] = key = seen.setdefault((content, b"" if sets is None else sets.tobytes()), len(seen))
                self.by_key.setdefault(key, Columns(table, sets))
            keys.append(known[name])
        return keys

    def _merge(self, limbs: Limbs) -> None:
        """Of choices that every net sees alike keep the cheapest; drop forbidden ones."""
        seen: list[list[Ints]] = [[] for _ in self.problem.variables]
        for net, masks in zip(self.problem.nets, self.asked, strict=True):
            seen[net.source].append(net.produced)
            for v, bits in masks.items():
                seen[v].append(bits)
        same: dict[tuple[int, ...], tuple[bytes, ...]] = {}
        done: dict[tuple[bytes, ...], tuple[Ints, tuple[int, Ints], list[tuple[int, Instead]]]] = {}
        for v, variable in enumerate(self.problem.variables):
            parts = (variable.costs, *seen[v])
            ids = tuple([id(part) for part in parts])
            if ids not in same:
                same[ids] = tuple([part.tobytes() for part in parts])
            name = same[ids]
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
                        changed.update(self._asks[n])
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
        kept = self.kept[v]
        own = kept.tolist()
        self.dropped += [(v, own[a], tuple([(own[b], less) for b, less in instead])) for a, instead in gone]
        same = id(kept), key, id(left)
        if same not in self._left:
            self._left[same] = kept, kept[left], self.store.key(np.ascontiguousarray(costs[:, left]))
        _, self.kept[v], self.costs[v] = self._left[same]
        for n in self._near[v]:
            self._states[n] = None
            if v in self._asks[n]:
                self._asks[n][v] = self._asking(self.asked[n][v], v)
        return True

    def _asking(self, bits: Ints, v: int) -> Asks:
        """What the choices that are kept of a consumer ask for."""
        kept = self.kept[v]
        name = id(bits), id(kept)
        if name not in self._known_asks:
            found = tuple(bits[kept].tolist())
            self._known_asks[name] = kept, (found, ask_set(found))
        return self._known_asks[name][1]

    def _question(self, v: int, n: int) -> _Question:
        """All that a contrast depends on: the state of the net, and what v's choices do."""
        state = self._states[n]
        if state is None:
            state = self._states[n] = self._state(n)
        asks = self._asks[n].get(v)
        return state, None if asks is None else asks[0]

    def _state(self, n: int) -> int:
        """A number for the state of a net, equal for equal states."""
        net, masks, asks = self.problem.nets[n], self.asked[n], self._asks[n].values()
        kept, own = self.kept[net.source], masks.get(net.source)
        name = (self.tables[n], id(net.produced), id(kept), id(own), net.always, *[id(one) for one in asks])
        if name not in self._numbers:
            rows = tuple(net.produced[kept].tolist())
            asked = [0] * len(rows) if own is None else own[kept].tolist()
            counts = Counter(one for _, one in asks)
            state = _State(
                self.tables[n], rows, tuple(bits | net.always for bits in asked), tuple(sorted(counts.items()))
            )
            if state not in self._known_states:
                self._known_states[state] = len(self._every_state)
                self._every_state.append(state)
            self._numbers[name] = self._known_states[state]
        return self._numbers[name]

    def _contrast(self, question: _Question) -> _Contrast | None:
        if question not in self._contrasts:
            number, bits = question
            table, rows, own, others = self._every_state[number]
            if bits is not None:
                asks = ask_set(bits)
                others = tuple([(one, count - (one == asks)) for one, count in others if count > (one == asks)])
                pairs = sorted(set(zip(rows, own, strict=True)))
                rows, own = tuple([row for row, _ in pairs]), tuple([mask for _, mask in pairs])
            alike = table, rows, own, bits, others
            if alike not in self._compared:
                self._compared[alike] = _contrast(self.by_key[table], rows, own, bits, others)
            self._contrasts[question] = self._compared[alike]
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


def ask_set(bits: Iterable[int]) -> AskSet:
    """The masks that a consumer's choices ask for."""
    return tuple(sorted(set(bits)))


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
    bits: tuple[int, ...] | None,
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
