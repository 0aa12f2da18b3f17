"""The solver's two questions: what is the plan that costs least, and what does it cost?"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

from placement.lang.diagnostics import Diagnostic, PlacementError
from placement.solver.bind import Bound
from placement.solver.capacity import TooLittle
from placement.solver.eliminate import Infeasible, Undecided
from placement.solver.faults import infeasible
from placement.solver.joint import optimum
from placement.solver.plan import Plan
from placement.solver.pricing import Cost
from placement.solver.problem import Excessive, Solution


def plan(bound: Bound, sources: Mapping[str, str] | None = None, say: Callable[[str], None] | None = None) -> Plan:
    """The plan that costs least, of those within the limit of memory if there is one.

    Raises PlacementError where the placements (PLC301, PLC402) or the limit (PLC305) cannot be met.
    """
    started = time.perf_counter()
    try:
        builder, solution = optimum(bound, say)
    except Infeasible as error:
        raise PlacementError([infeasible(bound, error)], sources) from error
    except TooLittle as error:
        raise PlacementError([error.diagnostic], sources) from error
    except Excessive as error:
        text = "one op or one collective takes more than an hour by these figures, more than the solver counts to"
        hint = "look at the figures on 'device' and 'link' lines, and at --size"
        raise PlacementError([Diagnostic("PLC120", text, hint=hint)], sources) from error
    except Undecided as error:
        text = "no plan was found before the solver's tables passed their limit; there may be one"
        hint = "place some values with 'value' lines: each one placed is one choice less"
        raise PlacementError([Diagnostic("PLC302", text, hint=hint, notes=(str(error),))], sources) from error
    solved = time.perf_counter()
    result = builder.plan(solution.choice, solution.cost, solution.bound)
    result.verify()
    if solution.bound < solution.cost:
        result = dataclasses.replace(result, bound=_noted(bound, solution))
    stages = {"solve": solved - started, "plan": time.perf_counter() - solved}
    return dataclasses.replace(result, stages=stages)


def _noted(bound: Bound, solution: Solution) -> Bound:
    """With the note that the plan is not proven to be the best."""
    gap = 100 * (solution.cost[0] - solution.bound[0]) / max(solution.bound[0], 1)
    more = f"{gap:.2g}" if gap < 100 else f"{gap:.0f}"
    text = f"the plan is not proven to cost least, at most {more} % more: the solver's tables would pass their limit"
    if bound.limit is not None:
        text = f"within the limit of memory the plan is not proven to cost least, at most {more} % more"
        return dataclasses.replace(
            bound, notes=(*bound.notes, Diagnostic("PLC305", text, bound.limit.span, severity="note"))
        )
    return dataclasses.replace(bound, notes=(*bound.notes, Diagnostic("PLC302", text, severity="note")))


def price(bound: Bound) -> Cost | None:
    """What the plan that costs least costs: picoseconds, bytes kept, launches. None where there is no plan."""
    try:
        return optimum(bound)[1].cost
    except (Infeasible, Undecided, TooLittle, Excessive, PlacementError):
        return None
