"""Several axes: descent, bound, pruning and joint solution against the whole joint problem, that against all choices.

Models, specs, sizes, ranks and links are drawn at random, so that work and communication weigh differently each time.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from placement.graph.capture import capture
from placement.graph.ir import Graph
from placement.lang import parse
from placement.lang.diagnostics import PlacementError
from placement.solver import joint
from placement.solver.bind import Bound, bind
from placement.solver.builder import Builder
from placement.solver.eliminate import Infeasible, solve
from placement.solver.problem import FORBIDDEN, Problem

SEEDS = 500
LINKS = ("nvlink", "ib", "pcie", "host", "slow")


class Chain(nn.Module):
    """A few ops in a row, with a residual; ``kinds`` says which."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = kinds
        self.ops = nn.ModuleDict()
        for i, kind in enumerate(kinds):
            if kind == "norm":
                self.ops[str(i)] = nn.LayerNorm(8)
            if kind == "linear":
                self.ops[str(i)] = nn.Linear(8, 8, bias=i % 2 == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for i, kind in enumerate(self.kinds):
            if kind in ("norm", "linear"):
                h = self.ops[str(i)](h)
            elif kind == "relu":
                h = torch.relu(h)
            elif kind == "residual":
                h = h + x
            else:
                h = h * 2.0
        return h.sum()


@functools.cache
def captured(kinds: tuple[str, ...]) -> Graph:
    return capture(Chain(kinds), {"x": torch.randn(4, 8, 8, requires_grad=True)}, {"x": ("batch", "seq", "width")})


def drawn(seed: int) -> tuple[Graph, str, dict[str, int], dict[str, int]]:
    """A model, a spec, a mesh and sizes for prices."""
    rng = random.Random(seed)
    kinds = tuple(rng.choice(("norm", "linear", "linear", "relu", "residual")) for _ in range(rng.randint(1, 3)))
    axes = rng.choice((("dp", "tp"), ("tp", "dp")))
    mesh = {name: rng.choice((2, 2, 4)) for name in axes}
    lines = [f"mesh {name} = {mesh[name]} over {rng.choice(LINKS)}" for name in axes]
    lines += ["link slow = 10 MB/s, 1 us", f"device {rng.choice(('h100', 'cpu'))}"]
    given = rng.choice(("", ", Shard(batch) @ dp", ", Shard(seq) @ tp", ", Shard(batch) @ dp, Shard(seq) @ tp"))
    lines.append(f"input x : [batch, seq, width]{given}")
    for i, kind in enumerate(kinds):
        if kind == "linear":
            placed = rng.choice(("", "Shard(out) @ tp", "Shard(in) @ tp", "Shard(out) @ tp, Shard(in) @ dp"))
            lines += [f"param ops.{i}.weight : {placed}"] if placed else []
        if kind == "norm" and seed % 3 == 0:
            lines.append(f"param ops.{i}.weight : stored Shard(0) @ dp")
        if kind in ("linear", "norm") and rng.random() < 0.3:
            lines.append(f"value ops.{i} : {rng.choice(('Replicate', 'Shard(seq)', 'Shard(width)'))} @ tp")
    sizes = {"batch": rng.choice((8, 64, 4096)), "seq": rng.choice((8, 512, 65536))}
    return captured(kinds), "\n".join(lines) + "\n", mesh, sizes


def bound(seed: int) -> Bound | None:
    graph, text, mesh, sizes = drawn(seed)
    try:
        return bind(graph, parse(text), mesh, sizes=sizes)
    except PlacementError:
        return None


def whole(of: Bound) -> Problem | None:
    """The joint problem with every option."""
    try:
        return Builder(of).problem()
    except PlacementError:
        return None


@pytest.mark.parametrize("part", range(10))
def test_the_search_finds_the_joint_optimum(part: int) -> None:
    proven = met = 0
    for seed in range(part, SEEDS, 10):
        made = bound(seed)
        problem = made and whole(made)
        if not made or not problem:
            continue
        try:
            best = solve(problem)
        except Infeasible:
            continue
        met += 1
        with mock.patch.multiple(joint, _SMALL=0, _WIDE=0):
            _, found = joint.optimum(made)
        assert found.bound[0] <= best.cost[0] <= found.cost[0], seed
        proven += found.bound[0] == found.cost[0]
    assert met > SEEDS / 10 * 0.6
    assert proven == met


_PRINT = """
import torch
from placement.emit.source import write
from placement.report.data import to_json
from placement.solver.build import plan
from tests.solver import models
from tests.solver.test_joint import bound, joint

print(torch.get_num_threads())
decoder = plan(models.bound("llama", 2, 2))
print(to_json(decoder), write(decoder).text)
for seed in (0, 3, 4, 9):
    joint._SMALL = joint._WIDE = 0
    builder, found = joint.optimum(bound(seed))
    plan = builder.plan(found.choice, found.cost, found.bound)
    print(found, [(s.axis, s.value.name, s.source.type, s.target.type) for s in plan.steps], plan.launches())
"""


def test_the_same_plan_in_every_process() -> None:
    """Of a two-layer Llama as saved and as emitted, and of small models whose axes are searched."""
    root = Path(__file__).resolve().parents[2]
    told = set()
    for seed, threads in (("0", "1"), ("1", "2")):
        env = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        run = subprocess.run(
            [sys.executable, "-c", _PRINT], cwd=root, env=env, capture_output=True, text=True, check=True
        )
        first, _, rest = run.stdout.partition("\n")
        assert first == threads
        told.add(re.sub(r"seconds=[^,)]*", "", rest))
    assert len(told) == 1
    text = told.pop()
    assert text.count("Solution(") == 4
    assert '"format_version"' in text


@pytest.mark.parametrize("seed", range(2000, 2040))
def test_the_joint_problem_is_solved_as_by_trying_all(seed: int) -> None:
    made = bound(seed)
    problem = made and whole(made)
    if not problem or not made:
        return
    counts = [v.costs.shape[1] for v in problem.variables]
    free = functools.reduce(lambda a, b: a * b, counts)
    if free > 40_000:
        return
    costs = (problem.cost(choice) for choice in itertools.product(*map(range, counts)))
    best = min((cost for cost in costs if cost[0] < FORBIDDEN), default=None)
    if best is not None:
        assert solve(problem).cost == best
