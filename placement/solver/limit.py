"""The plan that costs least among those that keep at most so many bytes for the backward.

Exact where the fastest plan fits anyway. Else bytes get a price: for any price per byte the solver's optimum of time
plus price, less the price of what is allowed, is a bound that no plan within the limit can beat. The best price is
found from the two plans that bracket the limit; between them the limit may fall (in a model of 80 alike layers, some
layers have to be as in the one and some as in the other), so plans are mixed of both, and branches close what gap is
left. What cannot be closed in a fixed number of solves is told by the bound.

Nothing here looks at a clock: the same problem has the same answer everywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from time import perf_counter

import numpy as np

from placement.solver.eliminate import Infeasible, solve
from placement.solver.limbs import Ints
from placement.solver.problem import FORBIDDEN, Net, Problem, Solution, Variable

_ROUNDS = 24  # prices tried for one problem
_WORK = 6_000  # variables solved for, all together, after which no more branches are opened
_BITS = 52  # sums of priced costs stay below, so that none is taken for forbidden


class TooSmall(Exception):
    """No choice keeps so little; ``least`` is the choice that keeps least."""

    def __init__(self, least: Solution) -> None:
        super().__init__(least.cost[1])
        self.least = least


def within(problem: Problem, most: int) -> Solution:
    """The choice that costs least of those that keep at most ``most`` bytes, with a bound in picoseconds.

    ``bound[0]`` is what no such choice can cost less than; ``bound == cost`` where that is proven to be reached.
    Raises TooSmall where there is none; Infeasible and Undecided as ``solve``.
    """
    started = perf_counter()
    free = solve(problem)
    if free.cost[1] <= most:
        return free
    search = _Search(problem, most)
    search.run(free)
    assert search.best is not None
    cost = problem.cost(search.best)
    bound = cost if search.bound >= cost[0] else (search.bound, 0, 0)
    return replace(free, choice=search.best, cost=cost, bound=bound, seconds=perf_counter() - started)


@dataclass(frozen=True, slots=True)
class _Bracket:
    """The cheapest choices found on both sides of the limit, and the bound of the problem they are of."""

    fits: tuple[int, ...]
    over: tuple[int, ...] | None
    bound: int


class _Search:
    def __init__(self, problem: Problem, most: int) -> None:
        self.problem, self.most = problem, most
        self.best: tuple[int, ...] | None = None
        self.cost: tuple[int, int, int] | None = None
        self.bound = 0
        self.effort = _WORK
        self.worst = _worst(problem)

    def run(self, free: Solution) -> None:
        """Bracket the whole problem, then branch while a gap is left and effort remains."""
        whole = self.bracket(self.problem, free)
        open_parts: list[tuple[int, int, Problem, _Bracket]] = [(whole.bound, 0, self.problem, whole)]
        count = 0
        while open_parts:
            self.bound = open_parts[0][0]
            if self.cost is not None and self.bound >= self.cost[0]:
                break
            if self.effort < 0:
                return
            _, _, part, bracket = heapq.heappop(open_parts)
            for child in _branches(part, bracket):
                try:
                    found = self.bracket(child, None, bracket.bound)
                except (Infeasible, TooSmall):
                    continue
                count += 1
                if found.over is not None:
                    heapq.heappush(open_parts, (found.bound, count, child, found))
        assert self.cost is not None
        self.bound = self.cost[0]

    # -- one problem ----------------------------------------------------------------------------

    def bracket(self, part: Problem, free: Solution | None, bound: int = 0) -> _Bracket:
        """The best price per byte for ``part``: its bound, and the choices on both sides of the limit."""
        free = free or solve(part)
        bound = max(bound, free.bound[0])
        if free.cost[1] <= self.most:
            self.offer(free.choice)
            return _Bracket(free.choice, None, bound)
        least = _least_bytes(part)
        if least.cost[1] > self.most:
            raise TooSmall(least)
        fits, over = least, free
        self.offer(fits.choice)
        for _ in range(_ROUNDS):
            price = Fraction(fits.cost[0] - over.cost[0], over.cost[1] - fits.cost[1])
            weights = _weights(price, self.worst)
            found, value = _priced(part, weights)
            self.effort -= len(part.variables)
            bound = max(bound, -(-(value - weights[1] * self.most) // weights[0]))
            line = weights[0] * fits.cost[0] + weights[1] * fits.cost[1]
            if weights[0] * found.cost[0] + weights[1] * found.cost[1] >= line or found.cost == over.cost:
                break
            if found.cost[1] <= self.most:
                fits = found
                self.offer(fits.choice)
            else:
                over = found
        for choice in _mixed(part, fits.choice, over.choice, self.most):
            self.offer(choice)
        return _Bracket(fits.choice, over.choice, bound)

    def offer(self, choice: tuple[int, ...]) -> None:
        """Keep the choice if it is the best so far."""
        cost = self.problem.cost(choice)
        if cost[1] <= self.most and cost[0] < FORBIDDEN and (self.cost is None or cost < self.cost):
            self.best, self.cost = choice, cost


def _branches(part: Problem, bracket: _Bracket) -> Iterator[Problem]:
    """The problem with one variable as it fits the limit, and with it otherwise."""
    assert bracket.over is not None
    pairs = enumerate(zip(bracket.fits, bracket.over, strict=True))
    apart = [v for v, (a, b) in pairs if a != b]
    if not apart:
        return

    def saves(v: int) -> int:
        own = part.variables[v].costs[1]
        return abs(int(own[bracket.fits[v]]) - int(own[bracket.over[v]])) if bracket.over else 0

    chosen = max(apart, key=lambda v: (saves(v), -v))
    own = part.variables[chosen].costs
    here = np.arange(own.shape[1]) == bracket.fits[chosen]
    for forbidden in (~here, here):
        costs = own.copy()
        costs[0, forbidden] = FORBIDDEN
        if (costs[0] < FORBIDDEN).any():
            variables = list(part.variables)
            variables[chosen] = Variable(part.variables[chosen].name, costs)
            yield Problem(tuple(variables), part.nets)


# -- priced problems --------------------------------------------------------------------------------


def _worst(problem: Problem) -> tuple[int, int]:
    """More than any choice can cost, and keep."""
    tables = [variable.costs for variable in problem.variables] + [net.table for net in problem.nets]
    finite = [np.where(table[0] < FORBIDDEN, table[:2], 0).reshape(2, -1).max(axis=1) for table in tables]
    return sum(int(most[0]) for most in finite) + 1, sum(int(most[1]) for most in finite) + 1


def _weights(price: Fraction, worst: tuple[int, int]) -> tuple[int, int]:
    """Whole weights of picoseconds and bytes about in the ratio of the price, as large as the solver's numbers are."""
    room = Fraction(1 << _BITS) / (worst[0] + price * worst[1])
    scale = max(1, room.numerator // room.denominator)
    return scale, round(price * scale)


def _priced(problem: Problem, weights: tuple[int, int]) -> tuple[Solution, int]:
    """The optimum of the weighted sum, with its own costs, and the sum's bound."""
    time, byte = weights

    def weighted(costs: Ints) -> Ints:
        return np.stack([np.where(costs[0] < FORBIDDEN, costs[0] * time + costs[1] * byte, FORBIDDEN), *costs[1:]])

    return _as_own(problem, _with(problem, weighted))


def _least_bytes(problem: Problem) -> Solution:
    """The choice that keeps least, and of those the fastest."""

    def swapped(costs: Ints) -> Ints:
        forbidden = costs[0] >= FORBIDDEN
        bytes_first = np.where(forbidden, FORBIDDEN, costs[1])
        return np.stack([bytes_first, np.where(forbidden, 0, costs[0]), costs[2]])

    return _as_own(problem, _with(problem, swapped))[0]


def _as_own(problem: Problem, other: Problem) -> tuple[Solution, int]:
    """The solution of a problem with other costs, at its own; and the bound of the other's first component."""
    found = solve(other)
    return replace(found, cost=problem.cost(found.choice)), found.bound[0]


def _with(problem: Problem, costs: Callable[[Ints], Ints]) -> Problem:
    """The problem with all costs mapped; equal tables stay one object, by which the solver knows them again."""
    known: dict[int, Ints] = {}

    def table(net: Net) -> Ints:
        if id(net.table) not in known:
            known[id(net.table)] = costs(net.table)
        return known[id(net.table)]

    variables = tuple(Variable(v.name, costs(v.costs)) for v in problem.variables)
    return Problem(variables, tuple(replace(net, table=table(net)) for net in problem.nets))


# -- mixed choices ----------------------------------------------------------------------------------


def _mixed(problem: Problem, fits: Sequence[int], over: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """The best choice that is as ``fits`` up to some variable and as ``over`` behind it; and the other way round."""
    apart = [v for v, (a, b) in enumerate(zip(fits, over, strict=True)) if a != b]
    touching: dict[int, list[int]] = {v: [] for v in apart}
    for n, net in enumerate(problem.nets):
        for v in {net.source, *(v for v, _ in net.consumers)} & touching.keys():
            touching[v].append(n)
    for order in (apart, apart[::-1]):
        choice = list(over)
        costs = [_net_cost(net, choice) for net in problem.nets]
        total = np.array(problem.cost(tuple(choice)), dtype=np.int64)
        best, best_total = 0, None
        for count, v in enumerate(order, 1):
            own = problem.variables[v].costs
            total = total - own[:, choice[v]] + own[:, fits[v]]
            choice[v] = fits[v]
            for n in touching[v]:
                new = _net_cost(problem.nets[n], choice)
                total = total - costs[n] + new
                costs[n] = new
            key = tuple(total.tolist())
            if key[1] <= most and key[0] < FORBIDDEN and (best_total is None or key < best_total):
                best, best_total = count, key
        if best_total is not None:
            mixed = list(over)
            for v in order[:best]:
                mixed[v] = fits[v]
            yield tuple(mixed)


def _net_cost(net: Net, choice: Sequence[int]) -> Ints:
    mask = net.always
    for variable, asked in net.consumers:
        mask |= 1 << int(asked[choice[variable]])
    return net.table[:, net.produced[choice[net.source]], net.columns(mask)]
