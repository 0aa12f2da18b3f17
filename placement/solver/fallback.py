"""What is left to do where elimination alone gives no answer.

``search`` finds a choice when buckets had to be split, ``improve`` betters it, ``conflict`` says what is
wrong with a problem that has no choice. None of them looks at a clock: their effort is counted in steps,
so that the outcome is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from placement.solver.limbs import INFINITE, Conflict, saturating_sum
from placement.solver.problem import Net, Problem, Variable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from placement.solver.tables import Factor

# The best choice of a small problem; None where it is too large to tell; raises Conflict where there is none.
Choose = Callable[[Problem], tuple[int, ...] | None]

_STEPS = 200_000  # values tried by the search
_WINDOW = 32  # variables solved together at first
_ROUNDS = 4  # passes over the program
_NETS = 400  # nets of a conflict that is still reduced


def search(buckets: Sequence[Sequence[Factor]]) -> list[int] | None:
    """Values by position, found from the last bucket to the first, cheapest first, with backtracking.

    A bucket's tables, given the values after it, sum to what each value costs plus a lower bound of what
    the buckets before it add. None where the steps run out.
    """
    value = [0] * len(buckets)
    open_values: list[list[int]] = []
    steps = 0
    while len(open_values) < len(buckets):
        open_values.append(_ranked(buckets, len(buckets) - 1 - len(open_values), value))
        while not open_values[-1]:
            open_values.pop()
            if not open_values:
                return None
        steps += 1
        if steps > _STEPS:
            return None
        value[len(buckets) - len(open_values)] = open_values[-1].pop()
    return value


def _ranked(buckets: Sequence[Sequence[Factor]], at: int, value: Sequence[int]) -> list[int]:
    """The values of one bucket that may still fit, the cheapest last."""
    tables = [f.table[(slice(None), slice(None), *[value[u] for u in f.scope[1:]])] for f in buckets[at]]
    total = saturating_sum(tables)
    order = np.lexsort((np.arange(total.shape[1]), *total[::-1]))
    return [int(index) for index in order[::-1] if total[0, index] < INFINITE]


def improve(problem: Problem, choice: tuple[int, ...], choose: Choose) -> tuple[int, ...]:
    """Solve window after window of neighbouring variables exactly, the others fixed, while that helps."""
    touching = _touching(problem)
    best = choice
    for _ in range(_ROUNDS):
        before = best
        start = 0
        while start < len(best):
            best, width = _widest(problem, best, start, touching, choose)
            start += max(width // 2, 1)
        if best == before:
            break
    return best


def _widest(
    problem: Problem, choice: tuple[int, ...], start: int, touching: list[list[int]], choose: Choose
) -> tuple[tuple[int, ...], int]:
    """``choice`` with the widest window at ``start`` that can be solved at its best, and how wide that is."""
    width = _WINDOW
    while width:
        better = _window(problem, choice, range(start, min(start + width, len(choice))), touching, choose)
        if better is not None:
            return better, width
        width //= 2
    return choice, 0


def _window(
    problem: Problem, choice: tuple[int, ...], window: range, touching: list[list[int]], choose: Choose
) -> tuple[int, ...] | None:
    """``choice`` with the variables of ``window`` at their best, or None where they are too many."""
    nets = sorted({n for v in window for n in touching[v]})
    part, members = _part(problem, [problem.nets[n] for n in nets], window, choice)
    found = choose(part)
    if found is None:
        return None
    old = tuple(choice[v] if v in window else 0 for v in members)
    if part.cost(found) >= part.cost(old):
        return choice
    changed = list(choice)
    for v, index in zip(members, found, strict=True):
        if v in window:
            changed[v] = index
    return tuple(changed)


def _touching(problem: Problem) -> list[list[int]]:
    """The nets of each variable."""
    found: list[list[int]] = [[] for _ in problem.variables]
    for n, net in enumerate(problem.nets):
        for v in dict.fromkeys((net.source, *(v for v, _ in net.consumers))):
            found[v].append(n)
    return found


def _part(
    problem: Problem, nets: Iterable[Net], free: Iterable[int] | None, choice: Sequence[int] = ()
) -> tuple[Problem, list[int]]:
    """The problem of some nets, and its variables' indices in the whole.

    Variables outside ``free`` (None: all are free) keep the one value that ``choice`` gives them.
    """
    nets = tuple(nets)
    inside = {net.source for net in nets} | {v for net in nets for v, _ in net.consumers} | set(free or ())
    members = sorted(inside)
    place = {v: index for index, v in enumerate(members)}
    loose = inside if free is None else set(free)

    def cut(v: int) -> slice:
        return slice(None) if v in loose else slice(choice[v], choice[v] + 1)

    variables = tuple(Variable(problem.variables[v].name, problem.variables[v].costs[:, cut(v)]) for v in members)
    parts = tuple(
        Net(
            name=net.name,
            source=place[net.source],
            produced=net.produced[cut(net.source)],
            consumers=tuple((place[v], ids[cut(v)]) for v, ids in net.consumers),
            table=net.table,
            always=net.always,
            sets=net.sets,
            monotone=net.monotone,
        )
        for net in nets
    )
    return Problem(variables, parts), members


@dataclass(frozen=True, slots=True)
class Core:
    """Names of variables and nets that do not fit together, and of one variable among them."""

    hint: str
    variables: tuple[str, ...]
    nets: tuple[str, ...]
    minimal: bool


def conflict(problem: Problem, variable: int, choose: Choose) -> Core:
    """A small set of nets without a choice, near ``variable``: grown until it conflicts, then thinned out."""
    touching = _touching(problem)
    nets, reached = set[int](), {variable}
    while not _conflicts(problem, nets, variable, choose):
        grown = {n for v in reached for n in touching[v]}
        if grown == nets or len(grown) > _NETS:
            near = tuple(problem.nets[n].name for n in touching[variable])
            name = problem.variables[variable].name
            return Core(name, (name,), near, minimal=False)
        nets = grown
        reached = {v for n in nets for v in _members(problem.nets[n])}
    core = sorted(nets)
    size = len(core)
    while size:
        for start in reversed(range(0, len(core), size)):
            fewer = core[:start] + core[start + size :]
            if _conflicts(problem, fewer, variable, choose):
                core = fewer
        size //= 2
    inside = sorted({v for n in core for v in _members(problem.nets[n])}) or [variable]
    names = tuple(problem.variables[v].name for v in inside)
    hint = problem.variables[variable if variable in inside else inside[-1]].name
    return Core(hint, names, tuple(problem.nets[n].name for n in core), minimal=True)


def _members(net: Net) -> list[int]:
    return [net.source, *(v for v, _ in net.consumers)]


def _conflicts(problem: Problem, nets: Iterable[int], variable: int, choose: Choose) -> bool:
    """Whether these nets and the variables on them (``variable`` in any case) have no choice."""
    chosen = [problem.nets[n] for n in sorted(nets)]
    part = _part(problem, chosen, None)[0] if chosen else Problem((problem.variables[variable],), ())
    try:
        choose(part)
    except Conflict:
        return True
    return False
