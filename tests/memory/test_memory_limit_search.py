"""The search within a limit of bytes, against every choice there is."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from placement.solver.eliminate import Infeasible
from placement.solver.limit import TooSmall, within
from placement.solver.problem import FORBIDDEN, Net, Problem, Variable
from placement.solver.steiner import conversions
from tests.solver.problems import dense, random_problem


def priced_problem(seed):
    """A random problem in which faster choices keep more."""
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randint(3, 6), rng.randint(1, 5), choices=3, forbidden=0.05)
    variables = []
    for variable in problem.variables:
        costs = variable.costs.copy()
        for index in range(costs.shape[1]):
            if costs[0, index] < FORBIDDEN:
                costs[1, index] = rng.randint(0, 40)
                costs[0, index] = rng.randint(0, 40) + (40 - costs[1, index])
        variables.append(Variable(variable.name, costs))
    return Problem(tuple(variables), problem.nets), rng


def every(problem):
    sizes = (range(v.costs.shape[1]) for v in problem.variables)
    costs = (problem.cost(choice) for choice in product(*sizes))
    return [cost for cost in costs if cost[0] < FORBIDDEN]


@pytest.mark.parametrize("block", range(4))
def test_equals_the_best_of_every_choice(block):
    binding = small = 0
    for seed in range(25 * block, 25 * block + 25):
        problem, rng = priced_problem(seed)
        costs = every(problem)
        if not costs:
            with pytest.raises(Infeasible):
                within(problem, 10**6)
            continue
        low, high = min(c[1] for c in costs), max(c[1] for c in costs)
        most = rng.randint(low - 3, high)
        fitting = [cost for cost in costs if cost[1] <= most]
        if not fitting:
            small += 1
            with pytest.raises(TooSmall) as caught:
                within(problem, most)
            assert caught.value.least.cost[1] == low
            continue
        best = min(fitting)
        found = within(problem, most)
        assert problem.cost(found.choice) == found.cost
        assert found.cost[1] <= most
        assert found.bound[0] == best[0] == found.cost[0], f"seed {seed}"
        binding += best[0] > min(costs)[0]
    assert binding > 5
    assert small > 0


def chain(layers):
    """Alike layers, each of which is fast and keeps 10 or slow and keeps 2, and changing between them costs."""
    ids = np.arange(2)
    own = np.array([[100, 130], [10, 2], [0, 0]])
    variables = tuple(Variable(f"v{i}", own) for i in range(layers))
    table = dense(conversions(2, {(0, 1): (5, 0, 1), (1, 0): (5, 0, 1)}, (0, 1)))
    nets = tuple(Net(f"n{i}", i, ids, ((i + 1, ids),), table) for i in range(layers - 1))
    return Problem(variables, nets)


@pytest.mark.parametrize("most", [20, 37, 64, 90, 100])
def test_some_of_many_alike_layers(most):
    found = within(chain(10), most)
    slow = next(k for k in range(11) if 10 * (10 - k) + 2 * k <= most)
    assert found.cost[0] == 1000 + 30 * slow + (5 if 0 < slow < 10 else 0)
    assert found.cost[1] <= most
    assert found.bound[0] <= found.cost[0] <= found.bound[0] + 30 + 5


def test_a_limit_that_does_not_bind_changes_nothing():
    from placement.solver.eliminate import solve

    problem = chain(5)
    free, found = solve(problem), within(problem, 50)
    assert (found.choice, found.cost, found.bound) == (free.choice, free.cost, free.bound)
