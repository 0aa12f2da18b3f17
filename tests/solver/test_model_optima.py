"""Plans of real decoders take the time that HiGHS finds for the whole problem, on one axis and on two."""

from __future__ import annotations

import pytest

from placement.solver.builder import Builder
from placement.solver.joint import optimum
from tests.solver.flows import least_time
from tests.solver.models import FAMILIES, bound, slow_inside

CASES = [*((family, 1, axes) for family in FAMILIES for axes in (1, 2)), ("llama", 8, 1)]


@pytest.mark.parametrize(("family", "layers", "axes"), CASES)
def test_the_plan_takes_as_long_as_the_oracles(family: str, layers: int, axes: int) -> None:
    """``bench/oracle.py`` compares more layers and more specs: that takes minutes."""
    of = bound(family, layers, axes)
    _, found = optimum(of)
    whole = Builder(of)
    least = least_time(whole)
    assert found.bound[0] <= least.time
    assert found.cost[0] == least.time
    if axes == 1:
        problem = Builder(of).problem()
        assert found.bound == found.cost == problem.cost(found.choice)
        assert problem.cost(least.choice)[0] == least.time


def test_a_conversion_may_pass_through_types_that_nobody_is_left_to_ask_for() -> None:
    """The oracle's embedding is cut by dp, sent on the slow axis, and gathered by dp again."""
    of = slow_inside("gpt2")
    _, found = optimum(of)
    least = least_time(Builder(of))
    assert found.bound[0] <= least.time
    assert found.cost[0] == least.time
