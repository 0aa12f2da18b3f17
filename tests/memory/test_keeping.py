"""The solver's sum of bytes, for any choice of strategies, against the walk through the plan that they make."""

from __future__ import annotations

import functools
import random

import pytest

from examples.llama.model import build
from placement.graph.capture import capture
from placement.lang.parser import parse
from placement.solver.bind import bind
from placement.solver.builder import Builder
from placement.solver.eliminate import solve
from placement.solver.memory import saved
from placement.solver.problem import FORBIDDEN

PLACED = """\
mesh tp
input input_ids, labels : [batch, seq]
within model.layers.* {
  param self_attn.{q,k,v}_proj.weight : Shard(out)
  param self_attn.o_proj.weight       : Shard(in)
  param mlp.{gate,up}_proj.weight     : Shard(out)
  param mlp.down_proj.weight          : Shard(in)
}
"""
KEPT = PLACED + "lower ** : gathered = kept\n"
LIMITED = PLACED + "limit memory 1 TB\n"  # bytes as a limit counts them: never too many


@functools.cache
def graph():
    """Norms written out: what they divide is kept by several ops, in whatever types these have."""
    model, inputs = build(batch=2, seq=16, layers=1, heads=4)
    return capture(model, inputs, dict.fromkeys(inputs, ("batch", "seq")))


@functools.cache
def drawn(spec, n):
    """The bytes of the optimum and of plans near it, by the solver's sum and by the walk."""
    builder = Builder(bind(graph(), parse(spec, "a.plc"), {"tp": n}))
    problem = builder.problem()
    best = solve(problem).choice
    found: list[tuple[int, int]] = []
    for seed in range(17):
        rng = random.Random(seed)
        choice = list(best)
        for v in rng.sample(range(len(choice)), 40 if seed else 0):
            before = choice[v]
            choice[v] = rng.randrange(problem.variables[v].costs.shape[1])
            if problem.cost(tuple(choice))[0] >= FORBIDDEN:
                choice[v] = before
        cost = problem.cost(tuple(choice))
        plan = builder.plan(choice, cost, cost)
        plan.verify()
        found.append((cost[1], sum(item.nbytes for item in saved(plan))))
    return found


@pytest.mark.parametrize("spec", [KEPT, KEPT + LIMITED.removeprefix(PLACED), LIMITED])
@pytest.mark.parametrize("n", [2, 4])
def test_the_sum_is_what_the_plan_keeps(spec, n):
    pairs = drawn(spec, n)
    assert len(set(pairs)) > 8
    # Less where ops keep one value in different types, or a block that is a view of the whole; where a conversion keeps
    # ops apart that else are one; and where an input is shared by all ranks that could have been gathered twice.
    assert all((0.7 if "kept" in spec else 0.6) * real < told <= real for told, real in pairs)
    assert "kept" not in spec or pairs[0][0] == pairs[0][1]
