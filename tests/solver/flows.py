"""The least time of a bound program on all its axes, by HiGHS and without the solver's tables.

One binary per option of a variable. A value is a flow network over its types: each consumer takes one unit from the
type that the value is made in to the type that this consumer asks for, and a conversion is paid for once however
many units it carries. No set of types is listed, and no axis is treated apart from the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from placement.solver.builder import Builder, Combo
from placement.solver.problem import FORBIDDEN

_UNIT = 1_000  # picoseconds: HiGHS stops at an absolute gap of 1e-6, which must be less than one of them


@dataclass(frozen=True, slots=True)
class Least:
    """The least time in picoseconds, what each variable chose for it, and the size of the program."""

    time: int
    choice: tuple[int, ...]
    chosen: Mapping[str, Combo]
    columns: int


class _Program:
    """A MILP while it grows."""

    def __init__(self) -> None:
        self.costs: list[int] = []
        self.integral: list[bool] = []
        self.entries: list[tuple[int, int, int]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def columns(self, costs: list[int], *, integral: bool) -> list[int]:
        """A column from 0 to 1 of each cost."""
        first = len(self.costs)
        self.costs += costs
        self.integral += [integral] * len(costs)
        return list(range(first, len(self.costs)))

    def row(self, entries: list[tuple[int, int]], low: float, high: float) -> None:
        """low <= sum of factor times column <= high."""
        self.entries += [(len(self.low), column, factor) for column, factor in entries]
        self.low.append(low)
        self.high.append(high)

    def solved(self, seconds: float) -> tuple[float, list[float]]:
        """The least cost, and the columns' values there. Raises TimeoutError."""
        rows, columns, factors = zip(*self.entries, strict=True)
        matrix = csr_array((factors, (rows, columns)), shape=(len(self.low), len(self.costs)))
        found = milp(
            [0 if cost >= FORBIDDEN else cost / _UNIT for cost in self.costs],
            integrality=np.array(self.integral),
            bounds=Bounds(0, [cost < FORBIDDEN for cost in self.costs]),
            constraints=LinearConstraint(matrix, self.low, self.high),
            options={"mip_rel_gap": 0, "time_limit": seconds},
        )
        if found.status == 1:
            raise TimeoutError(found.message)
        assert found.success, found.message
        return found.fun * _UNIT, found.x.tolist()


def least_time(builder: Builder, seconds: float = 600) -> Least:
    """The least time of what a builder may choose from. ``seconds``: what HiGHS may take. Raises TimeoutError."""
    if not builder.chosen:
        builder.variables()
    program = _Program()
    chosen: list[list[int]] = []
    for variable in builder.chosen:
        chosen.append(program.columns(variable.options.costs[0].tolist(), integral=True))
        program.row([(column, 1) for column in chosen[-1]], 1, 1)
    for spec in builder.specs():
        produced, wanted = builder.ends(spec)
        ways, _ = builder.ways(spec)
        places = {joint: place for place, joint in enumerate(ways.joints)}
        made = [(places[joint], column) for joint, column in zip(produced, chosen[spec.source], strict=True)]
        asked = {
            tuple((places[joint], column) for joint, column in zip(joints, chosen[v], strict=True))
            for (v, *_), joints in zip(spec.consumers, wanted, strict=True)
        }
        restriction = builder.uses.restriction(spec.value)
        prices = {
            pair: builder.prices.price(spec.value, edge, ways.joints[pair[0]], restriction)[0]
            for pair, edge in ways.edges.items()
        }
        _carry(program, made, sorted(asked), _direct(len(places), prices))
    told, values = program.solved(seconds)
    choice = tuple(max(range(len(columns)), key=lambda i: values[columns[i]]) for columns in chosen)
    time = _time(builder, choice)
    assert math.isclose(told, time, rel_tol=1e-7), f"HiGHS tells {told} ps of a choice that costs {time}"
    names = {n: combos[i] for n, combos, i in zip(builder.names, builder.combos, choice, strict=True)}
    return Least(time, choice, names, len(values))


def _time(builder: Builder, choice: Sequence[int]) -> int:
    """The exact time of a choice: HiGHS adds floats."""
    total = sum(int(v.options.costs[0, i]) for v, i in zip(builder.chosen, choice, strict=True))
    for spec in builder.specs():
        produced, wanted = builder.ends(spec)
        ways, _ = builder.ways(spec)
        given = [joints[choice[v]] for (v, *_), joints in zip(spec.consumers, wanted, strict=True)]
        mask = sum({1 << ways.least.asked.index(ways.joints.index(joint)) for joint in given})
        source = ways.joints.index(produced[choice[spec.source]])
        total += int(ways.least.table((source,), np.array([mask]))[0, 0, 0])
    return total


def _direct(count: int, prices: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], int]:
    """The conversions without those that cost more than others in a row, which can stand in for them anywhere."""
    away = np.full((count, count), FORBIDDEN)
    for pair, price in prices.items():
        away[pair] = price
    for via in range(count):
        away = np.minimum(away, away[:, via, None] + away[None, via, :])
    return {pair: price for pair, price in prices.items() if price <= away[pair]}


def _carry(
    program: _Program,
    made: list[tuple[int, int]],
    asked: list[tuple[tuple[int, int], ...]],
    prices: Mapping[tuple[int, int], int],
) -> None:
    """From the type of the column in ``made`` that is chosen to that of each list in ``asked``."""
    one = len(asked) == 1
    paid = [] if one else program.columns(list(prices.values()), integral=True)
    for wanted in asked:
        carried = program.columns(list(prices.values()) if one else [0] * len(prices), integral=False)
        for low, high in zip(carried, paid, strict=False):
            program.row([(low, 1), (high, -1)], -np.inf, 0)
        balance: dict[int, list[tuple[int, int]]] = {}
        for (source, target), column in zip(prices, carried, strict=True):
            balance.setdefault(source, []).append((column, -1))
            balance.setdefault(target, []).append((column, 1))
        for place, column in made:
            balance.setdefault(place, []).append((column, 1))
        for place, column in wanted:
            balance.setdefault(place, []).append((column, -1))
        for entries in balance.values():
            program.row(entries, 0, 0)
