"""Random problems, and brute force over them."""

from __future__ import annotations

import random
from itertools import product

import numpy as np

from placement.solver.problem import COMPONENTS, FORBIDDEN, Net, Problem, Variable

Cost = tuple[int, int, int]


def random_problem(
    rng: random.Random, variables: int, nets: int, *, choices: int = 4, types: int = 3, forbidden: float = 0.1
) -> Problem:
    """Trees and cycles, repeated consumers, a source among its own consumers, ``always`` masks; many ties."""
    sizes = [rng.randint(1, choices) for _ in range(variables)]
    return Problem(
        tuple(Variable(f"v{v}", _costs(rng, (size,), forbidden / 2)) for v, size in enumerate(sizes)),
        tuple(_net(rng, f"n{n}", sizes, rng.randint(1, types), forbidden) for n in range(nets)),
    )


def _net(rng: random.Random, name: str, sizes: list[int], types: int, forbidden: float) -> Net:
    def ids(v: int) -> np.ndarray:
        return np.array([rng.randrange(types) for _ in range(sizes[v])], dtype=np.int64)

    source = rng.randrange(len(sizes))
    consumers = rng.choices(range(len(sizes)), k=rng.choice((0, 1, 1, 2, 2, 3, 5)))  # may repeat, may be the source
    return Net(
        name=name,
        source=source,
        produced=ids(source),
        consumers=tuple((v, ids(v)) for v in consumers),
        table=_table(rng, types, forbidden),
        always=rng.randrange(1 << types) if rng.random() < 0.3 else 0,
    )


def _costs(rng: random.Random, shape: tuple[int, ...], forbidden: float) -> np.ndarray:
    costs = np.zeros((COMPONENTS, *shape), dtype=np.int64)
    for index in np.ndindex(*shape):
        costs[(slice(None), *index)] = [rng.choice((0, 1, 2, 2, 7)), rng.randint(0, 2), rng.randint(0, 2)]
        if rng.random() < forbidden:
            costs[(0, *index)] = FORBIDDEN
    return costs


def _table(rng: random.Random, types: int, forbidden: float) -> np.ndarray:
    """Arbitrary numbers: nothing in the solver may lean on the table being a Steiner table."""
    table = _costs(rng, (types, 1 << types), forbidden)
    table[:, :, 0] = 0
    for t in range(types):
        table[:, t, 1 << t] = 0
    return table


def brute_force(problem: Problem) -> Cost | None:
    """The least cost by trying every choice; None where all are forbidden."""
    costs = (problem.cost(choice) for choice in product(*(range(v.costs.shape[1]) for v in problem.variables)))
    return min((cost for cost in costs if cost[0] < FORBIDDEN), default=None)
