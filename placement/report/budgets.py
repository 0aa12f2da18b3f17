"""``expect`` lines held against a plan: how many launches, or bytes, of a collective lie in a module.

What is counted is what ``explain`` shows: each conversion under the module that it is told under, collectives inside
ops, and, for the model as a whole, the gradients' reductions at the end of backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from placement.graph.ir import Graph
from placement.lang.diagnostics import Diagnostic, Diagnostics
from placement.lang.spec import ExpectLine, Spec
from placement.report.facts import Converted, Facts, Inside, facts
from placement.report.fold import arrow, causes
from placement.report.names import join, within
from placement.report.units import show_bytes
from placement.solver.plan import Plan
from placement.types import Action

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    "==": operator.eq,
    ">=": operator.ge,
    ">": operator.gt,
}
_SAID = {"<=": "at most", "<": "less than", "==": "exactly", ">=": "at least", ">": "more than"}
_MOST, _USERS = 8, 2  # launches that are named, and ops that a value goes to


@dataclass(frozen=True, slots=True)
class Counted:
    """One launch. module: where it is told. what: the value and where it goes, or the op; with its statements.

    axes: those whose ranks take part; ``axis`` is the name of all together.
    """

    module: str
    phase: str
    action: str
    axis: str
    axes: tuple[str, ...]
    nbytes: int
    what: str


def broken(plan: Plan, spec: Spec) -> tuple[Diagnostic, ...]:
    """The budgets of ``spec`` that ``plan`` does not keep (PLC306), one diagnostic for each line and module."""
    if not spec.expects:
        return ()
    counted = tuple(launches(facts(plan)))
    found = Diagnostics()
    for line in spec.expects:
        found.extend(fault for module in spoken_of(line, plan.graph) if (fault := _fault(line, module, counted)))
    return found.sorted(spec.sources)


def spoken_of(line: ExpectLine, graph: Graph) -> tuple[str, ...]:
    """The outermost modules that the line's pattern matches: ``**`` speaks of the model itself, ''."""
    matched = [path for path in graph.modules if line.pattern.matches(path)]
    if line.pattern.matches(""):
        return ("",)
    return tuple(path for path in matched if not any(path != other and within(path, other) for other in matched))


def launches(found: Facts) -> Iterator[Counted]:
    """Every collective of one step, each under its module, in program order."""
    for event in sorted([*found.conversions, *found.inside], key=lambda e: e.position):
        module = event.place if isinstance(event, Converted) else event.module
        for phase, action, nbytes in event.launches:
            yield Counted(module.partition("@")[0], phase, action, event.axis, event.axes, nbytes, _told(event))
    flat: dict[tuple[str, tuple[str, ...], str, int], int] = {}
    for hook in found.hooks:
        if max(found.mesh[axis] for axis in hook.axes) > 1:
            key = hook.axis, hook.axes, hook.dtype, hook.bucket
            flat[key] = flat.get(key, 0) + hook.nbytes
    for (axis, axes, dtype, _), nbytes in flat.items():
        what = f"the gradients of replicated parameters in {dtype.removeprefix('torch.')}"
        yield Counted("", "backward", Action.ALL_REDUCE.value, axis, axes, nbytes, what)


def _told(event: Converted | Inside) -> str:
    if isinstance(event, Inside):
        return f"{join(event.module, event.op)} by {event.name}"
    goal = (
        ", ".join(event.users[:_USERS]) + (", ..." if len(event.users) > _USERS else "") if event.users else "as placed"
    )
    if event.users and event.module not in ("", event.home):
        goal = event.module
    cause = f", because of {causes(event.cause)}" if event.cause else ""
    return f"{event.value} -> {goal}, {arrow(event).replace(' -> ', ' to ')}{cause}"


def _fault(line: ExpectLine, module: str, counted: Sequence[Counted]) -> Diagnostic | None:
    inside = [one for one in counted if within(one.module, module) and _meant(line, one)]
    in_bytes = line.bound.unit is not None
    amount = sum(one.nbytes for one in inside) if in_bytes else len(inside)
    if _COMPARE[line.comparison](amount, line.bound.amount):
        return None
    what = f"{line.collective}{f' @ {line.axis}' if line.axis else ''}{f' {line.direction}' if line.direction else ''}"
    where = f"'{module}'" if module else "the model"
    has = f"{show_bytes(amount)} of {what}" if in_bytes else f"{amount} {what}"
    is_ = "is" if in_bytes or line.bound.amount == 1 else "are"
    text = f"{where} has {has}, and {_SAID[line.comparison]} {line.bound} {is_} expected"
    shown = [f"{_named(one)} {one.phase}, {show_bytes(one.nbytes)}: {one.what}" for one in inside[:_MOST]]
    if len(inside) > _MOST:
        shown.append(f"and {len(inside) - _MOST} more")
    return Diagnostic("PLC306", text, line.bound.span, notes=tuple(shown or ["nothing of it is sent there"]))


def _named(one: Counted) -> str:
    """The collective, with the axes where they are several."""
    return f"{one.action} @ {one.axis}" if len(one.axes) > 1 else one.action


def _meant(line: ExpectLine, one: Counted) -> bool:
    """A launch of several axes together is one of each."""
    named = one.action == line.collective and (line.axis is None or line.axis in one.axes)
    return named and line.direction in (None, one.phase)
