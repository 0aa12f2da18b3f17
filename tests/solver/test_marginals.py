"""What each choice costs more than the best, against the enumeration of every choice."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from problems import random_problem, repeated_problem

from placement.solver.limbs import Conflict
from placement.solver.marginals import TooLarge, regrets
from placement.solver.problem import FORBIDDEN, Problem, Variable


def in_time_only(problem: Problem) -> Problem:
    def first(costs: np.ndarray) -> np.ndarray:
        kept = costs.copy()
        kept[1:] = 0
        return kept

    variables = tuple(Variable(v.name, first(v.costs)) for v in problem.variables)
    return Problem(variables, tuple(replace(n, table=first(n.table)) for n in problem.nets))


def enumerated(problem: Problem) -> tuple[int | None, dict[tuple[int, int], int]]:
    """The least total, and that with each choice of each variable, of what is possible."""
    least: dict[tuple[int, int], int] = {}
    for choice in itertools.product(*(range(v.costs.shape[1]) for v in problem.variables)):
        cost = problem.cost(choice)[0]
        if cost < FORBIDDEN:
            for at in enumerate(choice):
                least[at] = min(least.get(at, cost), cost)
    return min(least.values(), default=None), least


@pytest.mark.parametrize("seed", range(60))
def test_regrets_are_those_of_every_choice(seed: int) -> None:
    rng = random.Random(seed)
    made = repeated_problem(rng, 6, 5) if seed % 4 == 0 else random_problem(rng, rng.randint(1, 6), rng.randint(1, 6))
    problem = in_time_only(made)
    total, least = enumerated(problem)
    if total is None:
        with pytest.raises(Conflict):
            regrets(problem, 10**7)
        return
    found, more = regrets(problem, 10**7)
    assert found == total
    for v, costs in enumerate(more):
        for index, extra in enumerate(costs.tolist()):
            known = least.get((v, index))
            assert extra == known - total if known is not None else extra >= FORBIDDEN


@pytest.mark.parametrize("seed", range(60))
def test_where_choices_are_spared_regrets_are_never_too_large(seed: int) -> None:
    rng = random.Random(seed)
    problem = in_time_only(random_problem(rng, rng.randint(1, 6), rng.randint(1, 6)))
    total, least = enumerated(problem)
    if total is None:
        return
    found, more = regrets(problem, 10**7, exact=False)
    assert found == total
    for v, costs in enumerate(more):
        assert costs.min() == 0
        for index, extra in enumerate(costs.tolist()):
            assert (v, index) not in least or 0 <= extra <= least[v, index] - total


def test_a_table_past_the_limit_is_not_made() -> None:
    with pytest.raises(TooLarge):
        regrets(in_time_only(repeated_problem(random.Random(0), 12, 20)), 8)
