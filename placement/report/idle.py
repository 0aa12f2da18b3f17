"""Settings of ``lower`` lines that change nothing in a plan, each with the reason: notes of ``check``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet

from placement.lang.diagnostics import Diagnostic
from placement.lang.spec import Setting
from placement.solver.fusion import joinable
from placement.solver.layers import innermost, inside
from placement.solver.overlap import ASYNC, NONE, RING, cuts
from placement.solver.plan import Plan, Step
from placement.solver.sums import SUMS, Sums
from placement.types import Action

_Modules = AbstractSet[str]


def idle(plan: Plan) -> Iterator[Diagnostic]:
    """A note for every setting that matches modules and has nothing to change there."""
    if all(axis.n == 1 for axis in plan.mesh.axes):
        return
    for line in plan.bound.lowers:
        matched = {path for path in plan.graph.modules if line.pattern.matches(path)}
        for setting in line.settings:
            why = _WHY[str(setting.key)](plan, setting, matched)
            if why is not None:
                yield Diagnostic("PLC308", f"'{setting}' changes nothing: {why}", setting.span, severity="note")


def _gathered(plan: Plan, setting: Setting, modules: _Modules) -> str | None:
    gathers = [step for step in plan.steps if step.layers and step.conversion.forward is Action.ALL_GATHER]
    here = [step for step in gathers if any(inside(node, modules) for node in step.layers)]
    if not here:
        return "in these modules nothing is gathered for linear layers alone"
    if not any(node.operands[1].requires_grad for step in here for node in step.layers):
        return "the weights that read what is gathered have no gradients, so none of it is kept"
    if str(setting.value) == "again" and not any(step.again for step in here):
        return "another line has what is gathered here kept"
    return None


def _overlap(plan: Plan, setting: Setting, modules: _Modules) -> str | None:
    said = plan.bound.said("overlap")
    here = [step for step in plan.steps if any(inside(node, modules) for node in step.beside)]
    if not here:
        return "in these modules no collective is of the input or the result of linear layers alone"
    own = [step for step in here if innermost(step.beside[0], said) in modules]
    if not own:
        return "lines for modules inside these say it for every collective beside linear layers"
    value = str(setting.value)
    if value in (NONE, ASYNC) or any(cuts(step.overlap) for step in own):
        return None
    if value == RING and all(_summed_whole(step) for step in own):
        return "every rank gets the whole of what is summed here, and a ring is of blocks: 'chunks' cuts it"
    return "the collectives here go in one piece: what they move is kept, or lies in several places"


def _ops(plan: Plan, setting: Setting, modules: _Modules) -> str | None:
    here = [node for node in joinable(plan) if inside(node, modules)]
    if not here:
        return "in these modules no ops would be joined"
    if str(setting.value) == "fused" and all(inside(node, plan.bound.lowered("ops = written")) for node in here):
        return "another line has the ops of these modules as written"
    return None


def _reduce(plan: Plan, setting: Setting, modules: _Modules) -> str | None:  # noqa: ARG001 - one signature for all
    """Whether some sum has another dtype without the line; a sum may obey the line of any of several modules."""
    others: dict[str, set[str]] = {}
    for line in plan.bound.lowers:
        for one in (one for one in line.settings if one is not setting):
            paths = {path for path in plan.graph.modules if line.pattern.matches(path)}
            others.setdefault(str(one), set()).update(paths)
    lowerings = {text: frozenset(paths) for text, paths in others.items()}
    told, without = Sums(plan.bound), Sums(dataclasses.replace(plan.bound, lowerings=lowerings))
    for step in plan.steps:
        kind = step.conversion.source
        sums = {step.conversion.forward, step.conversion.backward}.intersection(SUMS)
        if sums and told.said(step.value, kind) != without.said(step.value, kind):
            return None
    for node, sent in plan.inside.items():
        if any(told.inside(node, one.collective) != without.inside(node, one.collective) for one in sent):
            return None
    return "no sum over ranks obeys it"


def _summed_whole(step: Step) -> bool:
    return Action.ALL_REDUCE in (step.conversion.forward, step.conversion.backward)


_WHY: Mapping[str, Callable[[Plan, Setting, _Modules], str | None]] = {
    "gathered": _gathered,
    "ops": _ops,
    "overlap": _overlap,
    "reduce": _reduce,
}
