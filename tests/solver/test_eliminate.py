"""The exact solver against brute force and a MILP, in every form that a net can take."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.decoder import decoder
from placement.solver import eliminate, prune
from placement.solver.cost import DEVICES, LINKS, Machine
from placement.solver.eliminate import Infeasible, solve
from placement.solver.problem import FORBIDDEN, Net, Problem, Variable
from placement.solver.tables import Model
from tests.solver.problems import brute_force, by_milp, random_problem, repeated_problem, tangled_problem

ROOT = Path(__file__).resolve().parents[2]
FORMS = {"clique": 4096, "auxiliary": 1}  # ``dense``: at 1 every net of two free consumers gets auxiliary variables


def small(seed: int) -> Problem:
    rng = random.Random(seed)
    return random_problem(rng, rng.randint(2, 6), rng.randint(1, 7), forbidden=rng.choice((0, 0.1, 0.3)))


def medium(seed: int) -> Problem:
    rng = random.Random(seed)
    return random_problem(rng, 24, 20, forbidden=0.05, fan=(1, 1, 2, 3, 8))


def hard(seed: int) -> Problem:
    """Nothing is dominated: many cycles, prices of conversions near the differences of own costs."""
    return tangled_problem(random.Random(seed), 16, 28)


@pytest.fixture(params=["pruned", "unpruned"])
def pruning(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruning alone solves most small problems, so they are solved without it too."""
    if request.param == "unpruned":
        monkeypatch.setattr(prune, "_PASSES", 0)


@pytest.mark.usefixtures("pruning")
@pytest.mark.parametrize("dense", FORMS.values(), ids=FORMS)
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


@pytest.mark.parametrize("dense", FORMS.values(), ids=FORMS)
def test_equals_a_milp_on_medium_problems(dense: int) -> None:
    feasible = 0
    for problem in (*map(medium, range(8)), hard(0)):
        expected = by_milp(problem)
        if expected is None:
            with pytest.raises(Infeasible):
                solve(problem, dense=dense)
            continue
        feasible += 1
        assert solve(problem, dense=dense).cost[0] == expected
    assert feasible > 3


def test_the_random_problems_reach_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prune, "_PASSES", 0)
    used = dict.fromkeys(("_clique", "_hub", "_chain", "_step"), 0)
    for name in used:
        real = getattr(Model, name)

        def spy(self: Model, *args: object, name: str = name, real=real) -> object:
            used[name] += 1
            return real(self, *args)

        monkeypatch.setattr(Model, name, spy)
    for seed in range(100):
        try:
            solve(small(seed), dense=1)
        except Infeasible:
            continue
    assert min(used.values()) > 20, used


@pytest.mark.parametrize("scale", [1, 10**9, 10**13], ids=["one limb", "two limbs", "three limbs"])
@pytest.mark.parametrize("streamed", [1 << 16, 1], ids=["summed whole", "summed in slices"])
def test_components_do_not_mix_however_they_are_packed(
    scale: int, streamed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaling components keeps their order, and moves them from one limb to three."""
    monkeypatch.setattr(prune, "_PASSES", 0)
    monkeypatch.setattr(eliminate, "_STREAMED", streamed)
    factors = np.array([scale, scale, scale if scale == 10**13 else 1])[:, None]
    limbs: set[int] = set()
    for seed in range(60):
        problem = small(seed)
        expected = brute_force(problem)
        if expected is None:
            continue
        scaled = Problem(
            tuple(Variable(v.name, times(v.costs, factors)) for v in problem.variables),
            tuple(
                Net(n.name, n.source, n.produced, n.consumers, times(n.table, factors[..., None]), n.always)
                for n in problem.nets
            ),
        )
        limbs.add(len(Model(scaled, 1).limbs.groups))
        assert solve(scaled).cost == tuple(c * int(f) for c, f in zip(expected, factors[:, 0], strict=True))
    assert max(limbs) == {1: 1, 10**9: 2, 10**13: 3}[scale]


def times(costs: np.ndarray, factors: np.ndarray) -> np.ndarray:
    forbidden = costs[0] >= FORBIDDEN
    scaled = costs * factors
    scaled[0, forbidden] = FORBIDDEN
    return scaled


@pytest.mark.usefixtures("pruning")
@pytest.mark.parametrize("dense", FORMS.values(), ids=FORMS)
def test_repeated_parts_are_told_apart_by_how_they_are_joined(dense: int) -> None:
    """All variables and tables alike, joined at random: what is recalled for one bucket must fit the other."""
    for seed in range(60):
        problem = repeated_problem(random.Random(seed), 6, 7)
        assert solve(problem, dense=dense).cost == brute_force(problem), f"seed {seed}"


def test_many_infinities_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 nets that each forbid one choice of a variable: their sum is infinite, not negative."""
    monkeypatch.setattr(prune, "_PASSES", 0)
    free = Variable("free", np.array([[0, 7], [0, 0], [0, 0]]))
    fixed = [Variable(f"v{k}", np.array([[1], [0], [0]])) for k in range(40)]
    table = np.zeros((3, 2, 4), dtype=np.int64)
    table[0, 0, 0b10] = table[0, 0, 0b11] = FORBIDDEN  # type 0 cannot become type 1
    nets = [Net(f"n{k}", 0, np.array([0, 1]), ((k + 1, np.array([1])),), table) for k in range(40)]
    solution = solve(Problem((free, *fixed), tuple(nets)))
    assert solution.cost == (47, 0, 0)
    assert solution.choice[0] == 1


def test_ties_go_to_the_lowest_index() -> None:
    costs = np.array([[3, 1, 1, 1], [0, 5, 2, 2], [0, 0, 1, 1]])
    assert solve(Problem((Variable("v", costs),), ())).choice == (2,)


def test_a_value_used_by_very_many_keeps_the_width() -> None:
    """A line of variables that all ask for the first one: the hub costs one in width, not sixty."""
    rng = random.Random(0)
    count = 60
    variables = [
        Variable(f"v{k}", np.array([[rng.randint(0, 9) for _ in range(3)], [0] * 3, [0] * 3])) for k in range(count)
    ]
    ids = np.arange(3)
    table = np.zeros((3, 3, 8), dtype=np.int64)
    for row in range(3):
        table[0, row] = [4 * (mask & ~(1 << row)).bit_count() for mask in range(8)]
    nets = [Net(f"n{k}", k, ids, ((k + 1, ids),), table) for k in range(1, count - 1)]
    nets.append(Net("shared", 0, ids, tuple((k, np.roll(ids, k)) for k in range(1, count)), table))
    problem = Problem(tuple(variables), tuple(nets))
    solution = solve(problem)
    assert solution.width <= 3
    assert solution.cost[0] == by_milp(problem)


@pytest.mark.parametrize("dense", FORMS.values(), ids=FORMS)
def test_past_the_limit_the_bound_holds_and_a_choice_is_found(dense: int) -> None:
    gaps = 0
    for seed in range(4):
        problem = hard(seed)
        exact = solve(problem).cost
        for limit in (16, 256):
            rough = solve(problem, limit=limit, dense=dense)
            assert rough.bound <= exact <= rough.cost, f"seed {seed}"
            assert problem.cost(rough.choice) == rough.cost
            assert rough.cost[0] <= 1.3 * exact[0]
            gaps += rough.bound < rough.cost
    assert gaps > 3


def test_past_the_limit_windows_improve_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    improved = [solve(hard(seed), limit=64).cost for seed in range(4)]
    monkeypatch.setattr(eliminate.fallback, "improve", lambda problem, choice, choose: choice)
    plain = [solve(hard(seed), limit=64).cost for seed in range(4)]
    assert all(a <= b for a, b in zip(improved, plain, strict=True))
    assert improved != plain


def two_types(name: str, source: int, consumers: tuple[int, ...]) -> Net:
    """Both variables choose between types 0 and 1; nothing converts."""
    ids = np.array([0, 1])
    table = np.full((3, 2, 4), FORBIDDEN)
    table[:, :, 0] = 0
    table[:, 0, 1] = table[:, 1, 2] = 0
    return Net(name, source, ids, tuple((v, ids) for v in consumers), table)


@pytest.mark.parametrize("seed", range(6))
def test_a_conflict_is_named_by_its_nets_alone(seed: int) -> None:
    """A path of equalities whose ends are fixed to different types, in a forest of nets that do no harm."""
    rng = random.Random(seed)
    free = np.zeros((3, 2), dtype=np.int64)
    only_0, only_1 = free.copy(), free.copy()
    only_0[0, 1] = only_1[0, 0] = FORBIDDEN
    costs = [free] * 30
    costs[4], costs[9] = only_0, only_1
    path = [(4, 12), (12, 20), (20, 9)]
    others = [(v, v + 1) for v in range(21, 29)] + [(4, 0), (12, 1), (20, 2), (0, 13), (1, 14), (2, 15), (9, 16)]
    nets = [two_types(f"path{k}", a, (b,)) for k, (a, b) in enumerate(path)]
    nets += [two_types(f"other{k}", a, (b,)) for k, (a, b) in enumerate(others)]
    rng.shuffle(nets)
    problem = Problem(tuple(Variable(f"v{v}", c) for v, c in enumerate(costs)), tuple(nets))
    with pytest.raises(Infeasible, match="path") as caught:
        solve(problem)
    assert sorted(caught.value.nets) == ["path0", "path1", "path2"]
    assert caught.value.variables == ("v4", "v9", "v12", "v20")
    assert caught.value.args == (caught.value.hint,)
    assert caught.value.hint in caught.value.variables
    assert caught.value.minimal


def test_a_variable_without_a_choice_is_named() -> None:
    with pytest.raises(Infeasible) as caught:
        solve(
            Problem(
                (Variable("fine", np.zeros((3, 1), dtype=np.int64)), Variable("stuck", np.full((3, 2), FORBIDDEN))), ()
            )
        )
    assert caught.value.variables == ("stuck",)
    assert caught.value.nets == ()


def test_what_is_malformed_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        solve(Problem((Variable("v", np.array([[-1], [0], [0]])),), ()))
    with pytest.raises(ValueError, match="do not fit"):
        solve(
            Problem(
                (Variable("v", np.zeros((3, 2), dtype=np.int64)),),
                (Net("n", 0, np.array([0]), (), np.zeros((3, 1, 2))),),
            )
        )


def test_an_empty_problem_costs_nothing() -> None:
    assert solve(Problem((), ())).cost == (0, 0, 0)


PRINT_CHOICES = """
import json
from placement.solver.eliminate import solve
from tests.solver.test_eliminate import Infeasible, hard, medium
def choice(problem, **options):
    try:
        return solve(problem, **options).choice
    except Infeasible as error:
        return (error.variables, error.nets)
problems = (medium(0), medium(1), hard(0))
print(json.dumps([[choice(p), choice(p, dense=1), choice(p, limit=64)] for p in problems]))
"""


def test_every_process_finds_the_same_choice() -> None:
    outputs = {run_with(seed, threads) for seed, threads in (("0", "1"), ("1", "2"), ("4242", "1"))}
    assert len(outputs) == 1
    assert any(json.loads(outputs.pop()))


def run_with(seed: str, threads: str) -> str:
    env = os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    return subprocess.run(
        [sys.executable, "-c", PRINT_CHOICES], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("placed", [True, False], ids=["placed", "free"])
def test_tables_do_not_grow_with_the_layers(placed: bool) -> None:
    """A decoder whose every layer uses cos, sin and the mask; each layer more costs the same."""
    machine = Machine(DEVICES["h100"], LINKS["nvlink"], 8)
    solutions = [solve(decoder(layers, placed=placed, machine=machine)) for layers in (4, 5, 6)]
    assert all(solution.bound == solution.cost for solution in solutions)
    assert max(solution.width for solution in solutions) <= 12
    assert max(solution.largest_table for solution in solutions) <= 500_000
    first, second, third = (np.array(solution.cost) for solution in solutions)
    assert (third - second == second - first).all()
