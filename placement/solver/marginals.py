"""How much each choice costs more than the best: the least total with that choice, less the least total.

The buckets of the elimination are emptied once towards the last variable and once back (the two passes of dynamic
programming on a tree of buckets). Alike layers give alike tables, which are computed once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from placement.solver.eliminate import order_of, position_factors
from placement.solver.limbs import INFINITE, Conflict, Ints, saturating_sum
from placement.solver.tables import Factor, Model

if TYPE_CHECKING:
    from collections.abc import Iterable

    from placement.solver.problem import Problem

_DENSE = 4096
_EASY = 1 << 14  # entries of the largest table up to which no choice is spared


class TooLarge(Exception):
    """A table would pass the limit."""


class _Bucket(NamedTuple):
    """What is summed at one variable; ``children`` are the messages among the factors, with where they come from."""

    factors: list[Factor]
    rest: tuple[int, ...]
    children: list[tuple[int, Factor]]


def regrets(problem: Problem, limit: int, *, exact: bool = True) -> tuple[int, list[Ints]]:
    """The least total, and for each variable int64 [choices]: how much more the least total with each choice is.

    Where tables would be large, or ``exact`` is not asked for, a lower bound of that for choices that no best solution
    needs, as another is as good everywhere. Only the first
    component of costs counts, and the others must be 0. A choice that fits nowhere has FORBIDDEN or more. Raises
    Conflict where nothing fits, TooLarge where a table would pass ``limit`` entries.
    """
    for compare, most in ((False, min(limit, _EASY)), (True, limit))[not exact :]:
        model = Model(problem, _DENSE, compare=compare)
        plan = order_of(model)
        if plan.largest <= most:
            break
    else:
        raise TooLarge
    run = _Passes(model, plan.order)
    total = run.inward()
    found = run.outward()
    result: list[Ints] = []
    for v, kept in enumerate(model.kept):
        whole = np.full(problem.variables[v].costs.shape[1], INFINITE, dtype=np.int64)
        whole[kept] = found.get(v, np.zeros(len(kept), dtype=np.int64))
        result.append(whole)
    for v, choice, instead in reversed(model.dropped):
        least = (int(result[v][other]) + less for other, less in instead)
        result[v][choice] = min(INFINITE, max(least, default=INFINITE))
    return total, result


class _Passes:
    def __init__(self, model: Model, order: tuple[int, ...]) -> None:
        self.model, self.order = model, order
        self.buckets = [
            _Bucket([Factor(f.scope, f.table[0], f.key) for f in factors], (), [])
            for factors in position_factors(model, order)
        ]
        self._sums: dict[object, tuple[int, Ints]] = {}
        self._messages: dict[object, tuple[int, Ints, int]] = {}
        self._back: dict[object, tuple[int, Ints]] = {}

    def inward(self) -> int:
        """Messages from the first bucket to the last; returns the least total."""
        total = self.model.total[0]
        for at, bucket in enumerate(self.buckets):
            rest = _union(bucket.factors)[1:]
            self.buckets[at] = bucket = bucket._replace(rest=rest)
            key, table = self._sum(bucket.factors, at, rest)
            known = self._messages.get(key)
            if known is None:
                low = table.min(axis=0)
                least = int(low.min())
                if least >= INFINITE:
                    raise Conflict(self.model.owner[self.order[at]])
                low = np.where(low >= INFINITE, INFINITE, low - least)
                known = self._messages[key] = (*self._key(low), least)
            total += known[2]
            if rest:
                message = Factor(rest, known[1], known[0])
                self.buckets[rest[0]].factors.append(message)
                self.buckets[rest[0]].children.append((at, message))
        return total

    def outward(self) -> dict[int, Ints]:
        """Back again: for each variable what each value costs more than the best."""
        back: dict[int, tuple[int, Ints]] = {}
        found: dict[int, Ints] = {}
        for at in range(len(self.buckets) - 1, -1, -1):
            bucket = self.buckets[at]
            factors = bucket.factors
            if bucket.rest:
                key, table = back.pop(at)
                factors = [*factors, Factor(bucket.rest, table, key)]
            scope = (at, *bucket.rest)
            belief_key, belief = self._sum(factors, at, bucket.rest)
            own = belief.reshape(belief.shape[0], -1).min(axis=1)
            found[self.order[at]] = own - own.min()
            for child, message in bucket.children:
                places = tuple(scope.index(u) for u in message.scope)
                name = (belief_key, places, message.key)
                if name not in self._back:
                    gone = tuple(axis for axis in range(len(scope)) if axis not in places)
                    out = belief.min(axis=gone) if gone else belief
                    out = np.where((message.table >= INFINITE) | (out >= INFINITE), INFINITE, out - message.table)
                    self._back[name] = self._key(_lowered(out))
                back[child] = self._back[name]
        return found

    def _sum(self, factors: list[Factor], at: int, rest: tuple[int, ...]) -> tuple[int, Ints]:
        """The factors over (at, *rest) added up, and a key of the sum."""
        scope = (at, *rest)
        name = tuple(sorted((f.key, tuple(scope.index(u) for u in f.scope)) for f in factors))
        if name not in self._sums:
            views: list[Ints] = []
            for factor in factors:
                sizes = dict(zip(factor.scope, factor.table.shape, strict=True))
                views.append(factor.table.reshape([sizes.get(u, 1) for u in scope]))
            shape = [self.model.domains[self.order[u]] for u in scope]
            whole = np.minimum(saturating_sum([np.zeros(shape, dtype=np.int64), *views]), INFINITE)
            self._sums[name] = self._key(whole)
        return self._sums[name]

    def _key(self, table: Ints) -> tuple[int, Ints]:
        key, known = self.model.store.key(np.ascontiguousarray(table)[None])
        return key, known[0]


def _lowered(table: Ints) -> Ints:
    """With its least entry taken out, so that equal tables of different layers are equal."""
    least = table.min()
    return table if least >= INFINITE else np.where(table >= INFINITE, INFINITE, table - least)


def _union(factors: Iterable[Factor]) -> tuple[int, ...]:
    union: set[int] = set()
    for factor in factors:
        union.update(factor.scope)
    return tuple(sorted(union))
