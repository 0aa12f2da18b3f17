"""Random problems, and oracles that solve them otherwise."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from placement.solver.problem import COMPONENTS, FORBIDDEN, Net, Problem, Variable
from placement.solver.steiner import Conversions, conversions

Cost = tuple[int, int, int]


def random_problem(
    rng: random.Random,
    variables: int,
    nets: int,
    *,
    choices: int = 4,
    types: int = 3,
    forbidden: float = 0.1,
    fan: tuple[int, ...] = (0, 1, 2, 3, 3, 5),
) -> Problem:
    """Trees and cycles, repeated consumers, a source among its own consumers, ``always`` masks.

    Half have few different numbers, so many ties, and much that pruning finds; half have conversions that
    cost more than choices differ by, and little that it finds.
    """
    sizes = [rng.randint(1, choices) for _ in range(variables)]
    wide = rng.random() < 0.5
    return Problem(
        tuple(Variable(f"v{v}", _costs(rng, (size,), forbidden / 2, wide=wide)) for v, size in enumerate(sizes)),
        tuple(
            _net(rng, f"n{n}", sizes, rng.choice((1, *[types] * 3, types - 1)), forbidden, rng.choice(fan), wide=wide)
            for n in range(nets)
        ),
    )


def tangled_problem(rng: random.Random, variables: int, nets: int) -> Problem:
    """Four choices each of four types, nets of two or three members at random, every conversion at a price."""
    ids = np.arange(4)

    def net(name: str) -> Net:
        source, *consumers = rng.sample(range(variables), rng.choice((2, 2, 3)))
        prices = {(a, b): (rng.randint(2, 9), rng.randint(0, 1), 1) for a in range(4) for b in range(4)}
        return Net(name, source, ids, tuple((v, ids) for v in consumers), dense(conversions(4, prices, range(4))))

    own = [
        np.array([[rng.randint(0, 20) for _ in ids], [rng.randint(0, 3) for _ in ids], [0] * 4])
        for _ in range(variables)
    ]
    return Problem(
        tuple(Variable(f"v{v}", costs) for v, costs in enumerate(own)), tuple(net(f"n{n}") for n in range(nets))
    )


def repeated_problem(rng: random.Random, variables: int, nets: int) -> Problem:
    """Two kinds of variable and two kinds of net over and over, like the layers of a model."""
    ids = np.arange(3)
    own = [np.array([[rng.randint(0, 5) for _ in ids], [0] * 3, [0] * 3]) for _ in range(2)]
    tables = [_steiner(rng, 3, 0, wide=True), _arbitrary(rng, 3, 0, wide=True)]

    def net(name: str) -> Net:
        source, *consumers = rng.sample(range(variables), rng.choice((2, 3, 4)))
        return Net(name, source, ids, tuple((v, ids) for v in consumers), rng.choice(tables))

    return Problem(
        tuple(Variable(f"v{v}", rng.choice(own)) for v in range(variables)), tuple(net(f"n{n}") for n in range(nets))
    )


def _net(rng: random.Random, name: str, sizes: list[int], types: int, forbidden: float, fan: int, *, wide: bool) -> Net:
    def ids(v: int) -> np.ndarray:
        some = [t % types for t in range(sizes[v])] if wide else [rng.randrange(types) for _ in range(sizes[v])]
        return np.array(rng.sample(some, len(some)), dtype=np.int64)

    source = rng.randrange(len(sizes))
    consumers = rng.choices(range(len(sizes)), k=fan)  # may repeat, may be the source
    return Net(
        name=name,
        source=source,
        produced=ids(source),
        consumers=tuple((v, ids(v)) for v in consumers),
        table=_steiner(rng, types, forbidden, wide=wide)
        if rng.random() < 0.5
        else _arbitrary(rng, types, forbidden, wide=wide),
        always=rng.randrange(1 << types) if rng.random() < 0.3 else 0,
    )


def _costs(rng: random.Random, shape: tuple[int, ...], forbidden: float, *, wide: bool = False) -> np.ndarray:
    costs = np.zeros((COMPONENTS, *shape), dtype=np.int64)
    for index in np.ndindex(*shape):
        costs[(slice(None), *index)] = [
            rng.randint(0, 5) if wide else rng.choice((0, 1, 2, 2, 7)),
            rng.randint(0, 2),
            rng.randint(0, 2),
        ]
        if rng.random() < forbidden:
            costs[(0, *index)] = FORBIDDEN
    return costs


def _steiner(rng: random.Random, types: int, forbidden: float, *, wide: bool) -> np.ndarray:
    """What a conversion table is: more types never cost less."""
    prices = {
        (a, b): (rng.randint(2, 9) if wide else rng.choice((0, 1, 3)), rng.randint(0, 1), rng.randint(0, 2))
        for a in range(types)
        for b in range(types)
        if rng.random() >= forbidden
    }
    return dense(conversions(types, prices, range(types)))


def dense(least: Conversions) -> np.ndarray:
    """From every type to every set of those that may be asked for."""
    return least.table(tuple(range(least.count)), np.arange(1 << len(least.asked)))


def _arbitrary(rng: random.Random, types: int, forbidden: float, *, wide: bool) -> np.ndarray:
    """Any numbers: the contract does not say that a table is a conversion table."""
    table = _costs(rng, (types, 1 << types), forbidden, wide=wide)
    table[:, :, 0] = 0
    for t in range(types):
        table[:, t, 1 << t] = 0
    return table


def brute_force(problem: Problem) -> Cost | None:
    """The least cost by trying every choice; None where all are forbidden."""
    costs = (problem.cost(choice) for choice in product(*(range(v.costs.shape[1]) for v in problem.variables)))
    return min((cost for cost in costs if cost[0] < FORBIDDEN), default=None)


def by_milp(problem: Problem) -> int | None:
    """The least first component by HiGHS: one binary per choice, one per (row, mask) of each net."""
    costs: list[int] = []
    rows: list[tuple[dict[int, int], float, float]] = []

    def binaries(prices: np.ndarray) -> list[int]:
        costs.extend(int(price) for price in prices)
        return list(range(len(costs) - len(prices), len(costs)))

    def one_of(columns: list[int]) -> None:
        rows.append((dict.fromkeys(columns, 1), 1, 1))

    chosen = [binaries(variable.costs[0]) for variable in problem.variables]
    for columns in chosen:
        one_of(columns)
    for net in problem.nets:
        assert net.sets is None
        cells = np.array(binaries(net.table[0].ravel())).reshape(net.table.shape[1:])
        one_of(cells.ravel().tolist())
        for t in range(len(cells)):
            row = dict.fromkeys(cells[t].tolist(), 1)
            row |= {chosen[net.source][j]: -1 for j in np.flatnonzero(net.produced == t)}
            rows.append((row, 0, 0))
            has = cells[:, [mask for mask in range(cells.shape[1]) if mask >> t & 1]].ravel().tolist()
            asks = [{chosen[v][j]: -1 for j in np.flatnonzero(ids == t)} for v, ids in net.consumers]
            if net.always >> t & 1:
                rows.append((dict.fromkeys(has, 1), 1, 1))
                continue
            rows.extend((dict.fromkeys(has, 1) | ask, 0, np.inf) for ask in asks)  # asked for: in the mask
            total: dict[int, int] = dict.fromkeys(has, 1)  # in the mask: asked for by one of them
            for ask in asks:
                for column, sign in ask.items():
                    total[column] = total.get(column, 0) + sign
            rows.append((total, -np.inf, 0))
    entries = [(i, column, value) for i, (row, _, _) in enumerate(rows) for column, value in row.items()]
    i, j, value = zip(*entries, strict=True)
    matrix = csr_array((value, (i, j)), shape=(len(rows), len(costs)))
    upper = [0 if cost >= FORBIDDEN else 1 for cost in costs]
    found = milp(
        [0 if cost >= FORBIDDEN else cost for cost in costs],
        integrality=np.ones(len(costs)),
        bounds=Bounds(0, upper),
        constraints=LinearConstraint(matrix, [low for _, low, _ in rows], [high for _, _, high in rows]),
    )
    if found.status == 2:
        return None
    assert found.success, found.message
    return round(found.fun)
