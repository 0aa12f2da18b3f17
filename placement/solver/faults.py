"""What to say where a program has no plan: what op, which statements, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from placement.graph.ir import Node, Output, Value, op_name
from placement.graph.signature import Signature
from placement.lang.diagnostics import Diagnostic
from placement.rules.skeleton import notes, start
from placement.solver.bind import Bound, Pin
from placement.solver.causes import Causes
from placement.solver.eliminate import Infeasible


def impossible(bound: Bound, node: Node, *, alone: bool) -> Diagnostic:
    """The diagnostic for an op without a strategy: it has no rule, or parameters are placed as it cannot use them.

    ``alone``: on each axis by itself it has one, so that ways which lines insist on do not go together.
    """
    pins = [(v, bound.parameters[v]) for v in node.operands if v in bound.parameters]
    spoken = [(v, pin) for v, pin in pins if pin.span is not None]
    names = {p.value: p.name for p in bound.graph.parameters}
    where = f"in '{node.module}'" if node.module else "in the model"
    placed = " and ".join(f"'{names[v]}'" for v, _ in spoken or pins)
    text = f"'{op_name(node.op)}' {where} has no strategy that uses {placed or 'its operands'} as placed"
    span, line = spoken[0][1].span if spoken else None, node.source or None
    asked = [(axis.name, way) for i, axis in enumerate(bound.mesh.axes) if (way := bound.ways.get((node, i)))]
    if alone and len(asked) > 1:
        how = " and ".join(f"by {way.name} on axis '{axis}'" for axis, way in asked)
        text, hint = f"'{op_name(node.op)}' {where} cannot run {how} together", "run it in another way on one of them"
        return Diagnostic("PLC307", text, hint=hint, model_line=line)
    if node.operands and bound.dims.signature(node) is None:
        told = notes(node)
        return Diagnostic("PLC402", f"{text}: it has no rule", span, hint=start(node), notes=told, model_line=line)
    return Diagnostic("PLC301", text, span, notes=tuple(_whole(bound, node, spoken, names)), model_line=line)


def _whole(bound: Bound, node: Node, spoken: list[tuple[Value, Pin]], names: Mapping[Value, str]) -> Iterator[str]:
    """Why a cut parameter is no good: the op needs the dim whole."""
    signature = bound.dims.signature(node)
    if not isinstance(signature, Signature):
        return
    for value, pin in spoken:
        for kind in pin.types:
            place = bound.dims.locate(value, kind.over) if kind.over else None  # type: ignore[arg-type]
            dims = signature.operands[node.operands.index(value)]
            if place is not None and signature.blocked & set(dims[place[0]]):
                yield f"each rank needs the whole of dim {place[0]} of '{names[value]}' for it"


def returned_otherwise(bound: Bound, output: Output, pin: Pin | None) -> Diagnostic:
    """An output that is a parameter is returned as that is placed: nothing converts a parameter."""
    assert output.value is not None
    source = output.value
    producer = {value: node for node in bound.graph.nodes for value in node.results}
    while source in producer:  # a view or a cast of one
        (source,) = producer[source].operands
    own = bound.parameters[source]
    names = {p.value: p.name for p in bound.graph.parameters}
    text = f"output '{output.name}' is parameter '{names[source]}', which is placed otherwise than it is returned"
    hint = f"place both alike, or write: output {output.name} : auto"
    notes = [f"the parameter is placed at {own.span}"] if own.span and pin and pin.span else []
    return Diagnostic("PLC301", text, pin.span if pin and pin.span else own.span, hint, tuple(notes))


def infeasible(bound: Bound, error: Infeasible) -> Diagnostic:
    """The diagnostic for a problem without a solution, at the statement nearest to where it broke."""
    name = str(error.args[0]) if error.args else ""
    text = "no choice of placements satisfies every statement around"
    for node in bound.graph.nodes:
        if node.name == name:
            span = Causes(bound).nearest_span(node)
            line = node.source or None
            return Diagnostic("PLC301", f"{text} '{name}' in '{node.module}'", span, model_line=line)
    return Diagnostic("PLC301", f"{text} '{name}'")
