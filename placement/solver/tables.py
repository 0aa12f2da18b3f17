"""A problem as tables: what elimination works on.

A net with few consumers is one table over its source and consumers (a clique). A net with many gets one
auxiliary variable, a set of types that covers what is asked for, joined to the source by the price and to
each consumer by a yes or no (a hub). That is exact because a larger set never costs less, and it adds 1 to
the width however many layers use the value. For a table of which that is not true there is a chain of
auxiliary variables, "what the consumers from here on ask for"; sets that the rest of the net cannot tell
apart are one state.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from placement.solver.limbs import INFINITE, Conflict, Ints, Limbs, Store, less_than
from placement.solver.prune import Columns, Pruned, ask_set, union_masks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from placement.solver.problem import Net, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A table [limbs, *domains of scope]; equal keys mean equal tables."""

    scope: tuple[int, ...]
    table: Ints
    key: int


class Model:
    """A problem as factors over variables of at least two choices, the problem's own and auxiliary ones."""

    def __init__(self, problem: Problem, dense: int, *, compare: bool = True) -> None:
        self.limbs = Limbs.of(problem)
        self.dense = dense
        self.store = Store()
        self.factors: list[Factor] = []
        self.total = [0] * len(self.limbs.groups)
        self._built: dict[tuple[object, ...], tuple[int, Ints]] = {}
        self._rising: dict[int, bool] = {}
        pruned = Pruned(problem, self.limbs, self.store, compare=compare)
        self.kept, self.dropped = pruned.kept, pruned.dropped
        self.domains = [len(kept) for kept in self.kept]
        self.owner = list(range(len(self.domains)))  # auxiliary variables belong to their net's source
        for v, (key, table) in enumerate(pruned.costs):
            self._add((v,) if self.domains[v] > 1 else (), table if self.domains[v] > 1 else table[:, 0], key, v)
        # Nets of one form share their arrays: a clique is found by the objects that it is made of.
        cliques: dict[object, tuple[tuple[int, ...], Ints, int]] = {}
        for net, key, asked in zip(problem.nets, pruned.tables, pruned.asked, strict=True):
            ends = (net.source, *asked)
            arrays = (net.produced, *asked.values(), *[self.kept[v] for v in ends])
            name = (key, net.always, tuple(asked).index(net.source) if net.source in asked else -1, *map(id, arrays))
            known = cliques.get(name)
            if known is not None:
                places, whole, found = known
                self._add(tuple([ends[place] for place in places]), whole, found, net.source)
                continue
            masks = {v: bits[self.kept[v]] for v, bits in asked.items()}
            clique = self._net(net, key, pruned.by_key[key], masks)
            if clique is not None:
                cliques[name] = tuple([ends.index(v) for v in clique.scope]), clique.table, clique.key

    def choice(self, picked: Sequence[int]) -> tuple[int, ...]:
        """Choices of the problem from values of the model's variables."""
        return tuple(int(kept[picked[v]]) for v, kept in enumerate(self.kept))

    def _add(self, scope: tuple[int, ...], table: Ints, key: int, owner: int) -> None:
        if scope:
            self.factors.append(Factor(scope, table, key))
            return
        if table[0] >= INFINITE:
            raise Conflict(owner)
        self.total = [a + int(b) for a, b in zip(self.total, table, strict=True)]

    def _net(self, net: Net, key: int, table: Columns, masks: dict[int, Ints]) -> Factor | None:
        """Add what a net is; the table if it is one."""
        produced = net.produced[self.kept[net.source]]
        own = masks.pop(net.source, np.zeros_like(produced)) | net.always
        for v in [v for v in masks if self.domains[v] == 1]:
            own = own | masks.pop(v)
        if prod([self.domains[v] for v in (net.source, *masks)]) > self.dense and len(masks) > 1:
            build = self._hub if net.monotone or self._monotone(key, table) else self._chain
            build(table, produced, own, masks, net.source)
            return None
        factor = self._clique(key, table, produced, own, masks, net.source)
        self._add(factor.scope, factor.table, factor.key, net.source)
        return factor

    def _clique(
        self, key: int, table: Columns, produced: Ints, own: Ints, masks: dict[int, Ints], source: int
    ) -> Factor:
        """One table over the source (left out where it has one choice) and the consumers."""
        name = (key, produced.tobytes(), own.tobytes(), *(bits.tobytes() for bits in masks.values()))
        if name not in self._built:
            rank = 1 + len(masks)
            index = own.reshape(-1, *[1] * len(masks))
            for axis, bits in enumerate(masks.values(), 1):
                index = index | bits.reshape([-1 if axis == at else 1 for at in range(rank)])
            whole = table.at(produced.reshape(-1, *[1] * len(masks)), index)
            whole = whole if len(produced) > 1 else whole[:, 0]
            self._built[name] = self.store.key(np.ascontiguousarray(whole))
        scope = ((source,) if len(produced) > 1 else ()) + tuple(masks)
        found, whole = self._built[name]
        return Factor(scope, whole, found)

    def _hub(self, table: Columns, produced: Ints, own: Ints, masks: dict[int, Ints], source: int) -> None:
        """One auxiliary variable: a set that covers what is asked for. A larger set never costs less."""
        every = np.array(union_masks(Counter(ask_set(bits.tolist()) for bits in masks.values())), dtype=np.int64)
        columns = table.at(produced[:, None], own[:, None] | every)
        possible = columns[0].min(axis=0) < INFINITE
        if not possible.any():
            raise Conflict(source)
        kept = _covers(every[possible], columns[:, :, possible])
        sets, whole = every[possible][kept], columns[:, :, possible][:, :, kept]
        hub = self._auxiliary(len(sets), source) if len(sets) > 1 else None
        scope = tuple(v for v, kept in ((source, len(produced) > 1), (hub, True)) if kept and v is not None)
        key, whole = self.store.key(np.ascontiguousarray(whole.reshape(-1, *[self.domains[v] for v in scope])))
        self._add(scope, whole, key, source)
        for v, bits in masks.items():
            fits = (bits[:, None] & ~sets[None, :]) == 0
            if fits.all():
                continue
            pair = np.zeros((len(self.total), *fits.shape), dtype=np.int64)
            pair[0, ~fits] = INFINITE
            scope = (v, hub) if hub is not None else (v,)
            key, pair = self.store.key(pair.reshape(-1, *[self.domains[x] for x in scope]))
            self._add(scope, pair, key, v)

    def _monotone(self, key: int, columns: Columns) -> bool:
        """Whether adding types to a set never makes it cheaper. Conversion tables are so; any table may come."""
        if key not in self._rising:
            table, sets = columns
            masks = np.arange(table.shape[2]) if sets is None else sets
            self._rising[key] = not any(
                less_than(table[:, :, (masks & int(mask)) == int(mask)], table[:, :, at : at + 1]).any()
                for at, mask in enumerate(masks)
            )
        return self._rising[key]

    def _chain(self, table: Columns, produced: Ints, own: Ints, masks: dict[int, Ints], source: int) -> None:
        """Auxiliary variables for the set asked for so far, from the last consumer back to the first.

        Going backward closes the chain at the source, where the program is still narrow.
        """
        consumers = sorted(masks, reverse=True)
        asks = [sorted(set(masks[v].tolist())) for v in consumers]
        states = _states(Columns(table.table[:, produced], table.sets), own, asks)
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
        whole = table.at(produced[:, None], own[:, None] | ends[None, :])
        scope = tuple(v for v, kept in ((source, len(produced) > 1), (before, len(ends) > 1)) if kept and v is not None)
        whole = np.ascontiguousarray(whole.reshape(-1, *[self.domains[v] for v in scope]))
        self._add(scope, whole, self.store.key(whole)[0], source)

    def _auxiliary(self, domain: int, source: int) -> int:
        self.domains.append(domain)
        self.owner.append(source)
        return len(self.domains) - 1

    def _step(
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
            self._add(scope, whole, key, v)


def _covers(masks: Ints, columns: Ints) -> Ints:
    """Which sets are worth having: no larger one costs the same. Columns are [limbs, rows, sets]."""
    by_price: dict[bytes, list[int]] = {}
    for index in range(len(masks)):
        by_price.setdefault(columns[:, :, index].tobytes(), []).append(index)
    kept: list[int] = []
    for alike in by_price.values():
        own = masks[alike]
        kept += [index for index, mask in zip(alike, own, strict=True) if ((mask & ~own) == 0).sum() == 1]
    return np.array(sorted(kept))


def _states(rows: Columns, own: Ints, asks: list[list[int]]) -> list[dict[int, int]]:
    """For each place in a chain: reachable mask → state. Masks that the rest cannot tell apart share a state.

    rows: by choices of the source. Masks from which nothing is possible are left out.
    """
    reachable = [{0}]
    for bits in asks:
        reachable.append({mask | bit for mask in reachable[-1] for bit in bits})
    choices = np.arange(rows.table.shape[1])
    last: dict[int, int] = {}
    classes: dict[object, int] = {}
    for mask in sorted(reachable[-1]):
        column = rows.at(choices, own | mask)
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
