"""The exact solver against brute force and a MILP."""

from __future__ import annotations

import random

import pytest

from placement.solver.eliminate import Infeasible, solve
from tests.solver.problems import brute_force, random_problem

CHAIN = 1  # ``dense`` so small that every net with two free consumers becomes a chain


def small(seed: int):  # noqa: ANN201 - a Problem
    rng = random.Random(seed)
    return random_problem(rng, rng.randint(1, 6), rng.randint(0, 6), forbidden=rng.choice((0, 0.1, 0.3)))


@pytest.mark.parametrize("dense", [CHAIN, 4096], ids=["chain", "clique"])
@pytest.mark.parametrize("block", range(10))
def test_equals_brute_force_in_all_three_components(block: int, dense: int) -> None:
    feasible = 0
    for seed in range(50 * block, 50 * (block + 1)):
        problem = small(seed)
        expected = brute_force(problem)
        if expected is None:
            with pytest.raises(Infeasible):
                solve(problem, dense=dense)
            continue
        feasible += 1
        solution = solve(problem, dense=dense)
        assert solution.cost == expected, f"seed {seed}"
        assert solution.bound == solution.cost == problem.cost(solution.choice)
    assert feasible > 25
