"""A ``limit memory`` line: what it leaves for the backward, the plan within it, and what to say where there is none."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from placement.lang.diagnostics import Diagnostic
from placement.lang.spec import UNITS, LimitLine
from placement.solver.bind import Bound
from placement.solver.limit import TooSmall, within
from placement.solver.memory import Usage, memory, pinned_states
from placement.solver.plan import Plan
from placement.solver.problem import Problem, Solution

_TIGHTER = 4  # attempts with less, where the plan keeps more than the solver's sum says
_LARGEST = 3  # modules that are named


class TooLittle(Exception):
    """No plan is within the limit; ``diagnostic`` says what the least takes, which is ``least``."""

    def __init__(self, diagnostic: Diagnostic, least: Solution) -> None:
        super().__init__(diagnostic.message)
        self.diagnostic = diagnostic
        self.least = least


def fitted(bound: Bound, line: LimitLine, problem: Problem, make: Callable[[Solution], Plan]) -> Solution:
    """The solution that costs least of those whose plan holds no more than the line allows.

    ``make`` gives the plan of a solution. Raises TooLittle, and what ``solve`` raises.
    """
    allowed = int(line.most.amount) - pinned_states(bound)
    try:
        first = found = within(problem, allowed)
    except TooSmall as error:
        raise TooLittle(_nothing_fits(make(error.least), line), error.least) from error
    try:
        for _ in range(_TIGHTER):
            more = memory(make(found)).rank.peak - int(line.most.amount)
            if more <= 0:
                return found if found is first else replace(found, bound=(min(first.bound[0], found.cost[0]), 0, 0))
            found = within(problem, found.cost[1] - more)
    except TooSmall as error:
        raise TooLittle(_nothing_fits(make(error.least), line, proven=False), error.least) from error
    raise TooLittle(_nothing_fits(make(found), line, proven=False), found)


def _nothing_fits(least: Plan, line: LimitLine, *, proven: bool = True) -> Diagnostic:
    """What the plan that holds least takes; the sum that the solver knows may be less than a plan holds."""
    use = memory(least).rank
    text = f"no plan holds {line.most} or less on one rank: the least takes {shown(use.peak, line)}"
    if not proven:
        text = f"no plan of {line.most} or less on one rank was found; there may be one. The least found takes "
        text += shown(use.peak, line)
    parts = [
        f"{shown(use.parameters, line)} of parameters",
        f"{shown(use.gradients, line)} of gradients",
        f"{shown(use.optimizer, line)} of AdamW's moments",
        f"{shown(use.saved_bytes, line)} kept for the backward",
    ]
    notes = (", ".join(parts[:-1]) + f" and {parts[-1]}", *_dominating(use, line))
    return Diagnostic("PLC305", text, line.most.span, notes=notes)


def unmet(line: LimitLine, least: Plan, solution: Solution) -> TooLittle:
    """On several axes: no plan within the limit was met, which does not prove that there is none."""
    return TooLittle(_nothing_fits(least, line, proven=False), solution)


def _dominating(use: Usage, line: LimitLine) -> tuple[str, ...]:
    """What keeps most for the backward: modules, alike ones together."""
    sums: dict[str, int] = {}
    for item in use.saved:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", item.node.module)
        sums[pattern] = sums.get(pattern, 0) + item.nbytes
    largest = sorted(sums.items(), key=lambda pair: (-pair[1], pair[0]))[:_LARGEST]
    told = ", ".join(f"{shown(nbytes, line)} in {module or 'the model itself'}" for module, nbytes in largest)
    return (f"of that kept: {told}",) if told else ()


def shown(nbytes: int, line: LimitLine) -> str:
    """Bytes in the unit that the line is written in: ``61.2 GB``."""
    unit = line.most.unit or "B"
    _, over, under = UNITS[unit]
    amount = nbytes * under / over
    return f"{amount:.3g} {unit}" if amount < 1000 else f"{amount:.0f} {unit}"
