"""The exact solver: min-sum variable elimination over integers.

    Problem ─ tables.Model ─▶ factors ─ greedy order ─▶ buckets, eliminated one by one
            ─ back-substitution ─▶ Solution

Every table carries a key, equal only for equal tables, and a message has its least entry taken out. So a
bucket met again, in the next layer, is looked up and not computed.

Where a bucket's table would pass ``limit`` entries it is split (mini-buckets): the result is then a lower
bound, and ``fallback`` finds a choice by search and improves it by exact solves of windows.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import prod
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from placement.solver import fallback
from placement.solver.limbs import INFINITE, Conflict, Ints, least, less_than, saturating_sum
from placement.solver.problem import Problem, Solution
from placement.solver.tables import Factor, Model

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_DENSE = 4096  # entries up to which a net is one table
_STREAMED = 1 << 16  # entries from which a bucket is summed slice by slice
_AMPLE = 1 << 20  # a largest table up to which the quick order is good enough
_REMEMBERED = 1 << 25  # numbers that the memory of buckets may hold in all


class Infeasible(Exception):
    """No choice satisfies every net.

    hint: the name of one variable of the conflict. variables, nets: names of all of it, in program order.
    Where ``minimal``, dropping any one of the nets removes it.
    """

    def __init__(self, hint: str, variables: tuple[str, ...], nets: tuple[str, ...], *, minimal: bool) -> None:
        super().__init__(hint)
        self.hint = hint
        self.variables = variables
        self.nets = nets
        self.minimal = minimal

    def __str__(self) -> str:
        return f"no choice fits {', '.join(self.nets or self.variables)}"


class Undecided(Exception):
    """Past the table limit, and the search met no choice that fits (there may be one)."""


def solve(problem: Problem, *, limit: int = 30_000_000, dense: int = _DENSE) -> Solution:
    """The choice that costs least, and the proof: ``bound == cost`` unless a table would pass ``limit`` entries.

    dense: entries up to which a net is one table, see ``tables``; the cost does not depend on it.
    The same problem gives the same choice in every process. Raises Infeasible with a small conflict where
    nothing fits, Undecided where the limit stood in the way of finding out, ValueError on a malformed problem.
    """
    started = perf_counter()
    problem.verify()

    def choose(part: Problem) -> tuple[int, ...] | None:
        return _choose(part, min(limit, _AMPLE), dense)

    try:
        model = Model(problem, dense)
        plan = order_of(model)
        run = _Elimination(model, plan, limit)
        run.eliminate()
    except Conflict as conflict:
        core = fallback.conflict(problem, conflict.variable, choose)
        raise Infeasible(core.hint, core.variables, core.nets, minimal=core.minimal) from None
    bound = model.limbs.unpack(run.total)
    if run.exact:
        choice = model.choice(run.substitute())
    else:
        value = fallback.search(run.buckets)
        if value is None:
            raise Undecided(f"tables past {limit} entries (the largest {plan.largest})")
        choice = fallback.improve(problem, model.choice(run.by_variable(value)), choose)
    cost = problem.cost(choice)
    if cost < bound or (run.exact and cost != bound):
        raise AssertionError(f"the solver's sum {bound} and the cost of its choice {cost} differ")
    return Solution(choice, cost, bound, plan.width, run.largest, perf_counter() - started)


def _choose(problem: Problem, limit: int, dense: int) -> tuple[int, ...] | None:
    """The best choice of a part of a problem, or None past the limit. Raises Conflict."""
    model = Model(problem, dense)
    plan = order_of(model)
    if plan.largest > limit:
        return None
    run = _Elimination(model, plan, limit)
    run.eliminate()
    return model.choice(run.substitute())


@dataclass(frozen=True, slots=True)
class Order:
    """The order of elimination and what it will cost."""

    order: tuple[int, ...]
    width: int
    largest: int
    work: int


def order_of(model: Model) -> Order:
    """The greedy order with the smaller tables of two."""
    by_size = _greedy(model, fill=False)
    if by_size.largest <= _AMPLE:
        return by_size
    return min(by_size, _greedy(model, fill=True), key=lambda plan: plan.work)


def _greedy(model: Model, *, fill: bool) -> Order:
    """Take the variable with the smallest bucket (or the fewest new pairs) next; the lowest index on a tie."""
    near: dict[int, set[int]] = {v: set() for factor in model.factors for v in factor.scope}
    for factor in model.factors:
        for v in factor.scope:
            near[v].update(factor.scope)
    for v, others in near.items():
        others.discard(v)
    domains = model.domains
    sizes = {v: domains[v] * prod([domains[u] for u in others]) for v, others in near.items()}

    def score(v: int) -> tuple[int, int]:
        own = near[v]
        return (sum([len(own - near[u]) for u in own]) - len(own), sizes[v]) if fill else (sizes[v], 0)

    current = {v: score(v) for v in near}
    heap = [(value, v) for v, value in current.items()]
    heapq.heapify(heap)
    order: list[int] = []
    width = largest = work = 0
    while heap:
        value, v = heapq.heappop(heap)
        if current.get(v) != value:
            continue
        del current[v]
        order.append(v)
        others = near.pop(v)
        size = sizes[v]
        width, largest, work = max(width, len(others)), max(largest, size), work + size
        for u in others:
            for new in others - near[u] - {u}:
                sizes[u] *= domains[new]
            sizes[u] //= domains[v]
            near[u] |= others
            near[u] -= {u, v}
        for u in others:
            current[u] = score(u)
            heapq.heappush(heap, (current[u], u))
    return Order(tuple(order), width, largest, work)


def position_factors(model: Model, order: Sequence[int]) -> list[list[Factor]]:
    """The factors by the first of their variables in the order; scopes are positions in it, ascending."""
    buckets: list[list[Factor]] = [[] for _ in order]
    position = {v: at for at, v in enumerate(order)}
    turned: dict[tuple[int, tuple[int, ...]], tuple[int, Ints]] = {}
    for factor in model.factors:
        places = [position[v] for v in factor.scope]
        axes = tuple(sorted(range(len(places)), key=places.__getitem__))
        if (factor.key, axes) not in turned:
            moved = factor.table.transpose(0, *(axis + 1 for axis in axes))
            turned[factor.key, axes] = model.store.key(np.ascontiguousarray(moved))
        key, table = turned[factor.key, axes]
        scope = tuple(places[axis] for axis in axes)
        buckets[scope[0]].append(Factor(scope, table, key))
    return buckets


@dataclass(frozen=True, slots=True, eq=False)
class _Message:
    """What is left of a bucket: its minimum over the variable, less a constant; and where the minimum is."""

    table: Ints
    key: int
    constant: tuple[int, ...]
    best: NDArray[np.unsignedinteger]


class _Elimination:
    """One run over the buckets. Variables go by their position in the order; scopes ascend."""

    def __init__(self, model: Model, plan: Order, limit: int) -> None:
        self.model, self.plan, self.limit = model, plan, limit
        self.exact = plan.largest <= limit  # otherwise buckets are kept for the search
        self.total = list(model.total)
        self.largest = 0
        self.rest: list[tuple[int, ...]] = []
        self.best: list[NDArray[np.unsignedinteger]] = []
        self.buckets = position_factors(model, plan.order)
        self._memory: dict[tuple[tuple[int, tuple[int, ...]], ...], _Message] = {}
        self._room = _REMEMBERED

    def eliminate(self) -> None:
        """Empty every bucket; ``total`` is then the minimum (a lower bound where buckets were split)."""
        for at, bucket in enumerate(self.buckets):
            for part in self._parts(bucket):
                rest = _joint(part)[1:]
                message = self._message(part, rest, at)
                self.total = [a + b for a, b in zip(self.total, message.constant, strict=True)]
                if rest:
                    self.buckets[rest[0]].append(Factor(rest, message.table, message.key))
                if self.exact:
                    self.rest.append(rest)
                    self.best.append(message.best)
            if self.exact:
                bucket.clear()

    def substitute(self) -> list[int]:
        """The choice behind the minimum, by the model's variables (after an exact run)."""
        value = [0] * len(self.plan.order)
        for at in range(len(value) - 1, -1, -1):
            value[at] = int(self.best[at][tuple(value[u] for u in self.rest[at])])
        return self.by_variable(value)

    def by_variable(self, value: Sequence[int]) -> list[int]:
        picked = [0] * len(self.model.domains)
        for at, v in enumerate(self.plan.order):
            picked[v] = value[at]
        return picked

    def _parts(self, bucket: list[Factor]) -> list[list[Factor]]:
        """The bucket whole, or first-fit parts whose tables stay within the limit."""
        if self.exact or self._size(bucket) <= self.limit:
            return [bucket]
        parts: list[list[Factor]] = []
        for factor in sorted(bucket, key=lambda factor: (-factor.table.size, factor.scope)):
            home = next((part for part in parts if self._size([*part, factor]) <= self.limit), None)
            if home is None:
                parts.append([factor])
            else:
                home.append(factor)
        return parts

    def _size(self, bucket: Sequence[Factor]) -> int:
        return prod([self.model.domains[self.plan.order[at]] for at in _joint(bucket)])

    def _message(self, bucket: list[Factor], rest: tuple[int, ...], at: int) -> _Message:
        """Sum the bucket and minimise over its variable, or recall the same sum."""
        place = {u: axis for axis, u in enumerate(rest)}
        name = tuple(sorted((f.key, tuple([place[u] for u in f.scope[1:]])) for f in bucket))
        known = self._memory.get(name)
        if known is None:
            views = self._views(bucket, rest)
            size = prod([max(view.shape[axis] for view in views) for axis in range(1, len(rest) + 2)])
            self.largest = max(self.largest, size)
            low, best = _streamed(views) if size > _STREAMED else least(saturating_sum(views))
            if low[0].min() >= INFINITE:
                raise Conflict(self.model.owner[self.plan.order[at]])
            known = self._normal(low, best.astype(np.min_scalar_type(views[0].shape[1])))
            if low.size <= self._room:
                self._room -= low.size
                self._memory[name] = known
        return known

    @staticmethod
    def _views(bucket: list[Factor], rest: tuple[int, ...]) -> list[Ints]:
        """Tables shaped [limbs, choices, ...] to broadcast over ``rest``, the largest first."""
        views: list[Ints] = []
        for factor in sorted(bucket, key=lambda factor: -factor.table.size):
            sizes = dict(zip(factor.scope, factor.table.shape[1:], strict=True))
            shape = (*factor.table.shape[:2], *[sizes.get(u, 1) for u in rest])
            views.append(factor.table.reshape(shape))
        return views

    def _normal(self, low: Ints, best: NDArray[np.unsignedinteger]) -> _Message:
        """Take the least entry out as a constant, so that messages along repeated layers become equal."""
        flat = low.reshape(low.shape[0], -1)
        constant = flat[:, flat[0].argmin()].copy()
        forbidden = flat[0] >= INFINITE
        flat -= constant[:, None]
        flat[:, forbidden] = 0
        flat[0, forbidden] = INFINITE
        key, table = self.model.store.key(flat.reshape(low.shape))
        return _Message(table, key, tuple(constant.tolist()), best)


def _joint(bucket: Iterable[Factor]) -> tuple[int, ...]:
    """The union of scopes, ascending; the bucket's own variable comes first."""
    union: set[int] = set()
    for factor in bucket:
        union.update(factor.scope)
    return tuple(sorted(union))


def _streamed(views: Sequence[Ints]) -> tuple[Ints, NDArray[np.intp]]:
    """``least(saturating_sum(views))`` one choice at a time: a large sum is never in memory."""
    low = np.array(saturating_sum([view[:, 0] for view in views]))
    best = np.zeros(low.shape[1:], dtype=np.intp)
    for index in range(1, views[0].shape[1]):
        other = saturating_sum([view[:, index] for view in views])
        less = less_than(other, low)
        np.copyto(low, other, where=less)
        best[less] = index
    return low, best
