"""What a sound plan should make its reader aware of: notes of `check`, not faults."""

from __future__ import annotations

from collections.abc import Iterator

from placement.graph.ir import Parameter
from placement.lang.diagnostics import Diagnostic, Diagnostics
from placement.report.fold import patterns
from placement.report.idle import idle
from placement.report.units import plural
from placement.rules.skeleton import without_rules
from placement.solver.plan import Plan
from placement.types import P

_PATTERN_WIDTH = 60  # longer patterns are told as several


def findings(plan: Plan, spec: str) -> tuple[Diagnostic, ...]:
    """Notes on the plan of the spec that is named ``spec``; empty where there is nothing to say."""
    notes = Diagnostics()  # of many for one place, the first and how many more
    notes.extend(plan.bound.notes)
    found = list(notes.sorted())
    silent = [p for p in plan.graph.parameters if not p.is_buffer and plan.bound.parameters[p.value].span is None]
    if silent:
        message = f"no line of {spec} places {plural(len(silent), 'parameter')}, used replicated"
        found.append(Diagnostic("PLC208", message, notes=tuple(_by_shape(silent)), severity="note"))
    found += _no_sums(plan)
    found += idle(plan)
    found += without_rules(plan.graph, plan.bound.dims)
    return tuple(found)


def _no_sums(plan: Plan) -> Iterator[Diagnostic]:
    """Where ``Partial`` is written of a value that no op sums: it is possible, and hardly what was meant."""
    pins = [(value, pin, "what the module returns") for value, pin in plan.bound.values.items()]
    for output, pin in plan.bound.outputs.items():
        if output.value is not None and pin is not None:
            pins.append((output.value, pin, f"output '{output.name}'"))
    for value, pin, what in pins:
        if any(k == (P,) and made != P for k, made in zip(pin.kinds, plan.produced[value], strict=True)):
            text = f"{what} is no sum over ranks: one rank keeps it and the others hold zeros"
            hint = "Partial is what a product leaves whose summed dim is sharded; write Replicate or Shard(DIM)"
            yield Diagnostic("PLC205", text, pin.span, hint, severity="warning")


def _by_shape(parameters: list[Parameter]) -> list[str]:
    """Patterns that match the parameters, each with the shape that they have in common."""
    shapes: dict[str, list[str]] = {}
    for parameter in parameters:
        shape = f"[{', '.join(map(str, parameter.value.shape))}]"
        shapes.setdefault(shape, []).append(parameter.name)
    return [f"{pattern} {shape}" for shape, names in shapes.items() for pattern in patterns(names, _PATTERN_WIDTH)]
