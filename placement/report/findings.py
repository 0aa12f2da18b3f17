"""What a sound plan should make its reader aware of: notes of `check`, not faults."""

from __future__ import annotations

from placement.graph.ir import Parameter
from placement.lang.diagnostics import Diagnostic
from placement.report.fold import patterns
from placement.report.units import plural
from placement.rules.skeleton import without_rules
from placement.solver.plan import Plan

_PATTERN_WIDTH = 60  # longer patterns are told as several


def findings(plan: Plan, spec: str) -> tuple[Diagnostic, ...]:
    """Notes on the plan of the spec that is named ``spec``; empty where there is nothing to say."""
    found = list(plan.bound.notes)
    silent = [p for p in plan.graph.parameters if not p.is_buffer and plan.bound.parameters[p.value].span is None]
    if silent:
        message = f"no line of {spec} places {plural(len(silent), 'parameter')}, used replicated"
        found.append(Diagnostic("PLC208", message, notes=tuple(_by_shape(silent)), severity="note"))
    found += without_rules(plan.graph, plan.bound.dims)
    return tuple(found)


def _by_shape(parameters: list[Parameter]) -> list[str]:
    """Patterns that match the parameters, each with the shape that they have in common."""
    shapes: dict[str, list[str]] = {}
    for parameter in parameters:
        shape = f"[{', '.join(map(str, parameter.value.shape))}]"
        shapes.setdefault(shape, []).append(parameter.name)
    return [f"{pattern} {shape}" for shape, names in shapes.items() for pattern in patterns(names, _PATTERN_WIDTH)]
