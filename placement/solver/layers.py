"""Linear layers that run as one function with a conversion: of the input that they share, or of the result.

Patterns in a solved plan. A value is gathered, or shared by all ranks, for nothing but linear layers with parameters
for weights (``runtime.linears``); what is gathered so is not kept for the backward but gathered again there. And of the
result of one such layer each rank has a term, and nothing is done with the terms but to sum them (``runtime.sums``).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Container, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from placement.graph.ir import Graph, Node, Value
from placement.rules import lookup
from placement.types import Action, Kind

if TYPE_CHECKING:
    from placement.solver.plan import Step, Version


def weights_of(graph: Graph) -> frozenset[Value]:
    """What a layer's weight may be: a parameter or buffer as it is."""
    return frozenset(parameter.value for parameter in graph.parameters)


def is_layer(node: Node, weights: AbstractSet[Value]) -> bool:
    """Whether the op is a linear layer's product: of a value, and of one of ``weights``."""
    found = lookup(node)
    return (
        found is not None
        and found.layer
        and len(node.operands) == 2
        and node.operands[1] in weights
        and node.operands[0] not in weights
    )


def thin(node: Node, weights: AbstractSet[Value], kept: AbstractSet[str]) -> bool:
    """Whether the op's backward makes do with the blocks of an input that is gathered for it.

    kept: modules in which what is gathered is kept.
    """
    return is_layer(node, weights) and node.operands[1].requires_grad and not inside(node, kept)


def with_layers(steps: Sequence[Step], graph: Graph, used: AbstractSet[Version], kept: AbstractSet[str]) -> list[Step]:
    """The steps, those that run with linear layers with these, and with what is gathered again.

    used: what ops and outputs take.
    """
    weights = weights_of(graph)
    makers = {value: node for node in graph.nodes if is_layer(node, weights) for value in node.results}
    sources, targets = Counter(step.source for step in steps), {step.target for step in steps}
    parents = {path.rpartition(".")[0] for path in graph.modules}
    converted = {step.source for step in steps}
    found: list[Step] = []
    for step in steps:
        if step.value not in weights and _suits(step) and step.target not in converted:
            layers = _layers(step, weights, parents)
            again = step.conversion.forward is Action.ALL_GATHER and any(thin(n, weights, kept) for n in layers)
            found.append(dataclasses.replace(step, layers=layers, again=int(again)) if layers else step)
        elif _sums(step) and sources[step.source] == 1 and step.source not in used | targets:
            found.append(dataclasses.replace(step, product=makers.get(step.value)))
        else:
            found.append(step)
    return found


def _sums(step: Step) -> bool:
    """Whether the step sums terms, at once where these are made."""
    action = step.conversion.forward
    return step.source.stage == 0 and action in (Action.ALL_REDUCE, Action.REDUCE_SCATTER)


def _suits(step: Step) -> bool:
    kinds = step.conversion.source, step.conversion.target
    placed = step.source.stage != step.target.stage  # by a line of its own, where it is made
    return step.value.requires_grad and kinds in ((Kind.S, Kind.R), (Kind.I, Kind.R)) and not placed


def _layers(step: Step, weights: AbstractSet[Value], parents: AbstractSet[str]) -> tuple[Node, ...]:
    """The ops that take what the step gives, if all are layers of one module or of its leaves; else none."""
    layers = [node for node in step.consumers if isinstance(node, Node)]
    if len(layers) < len(step.consumers) or not all(is_layer(node, weights) for node in layers):
        return ()
    homes = {node.stack[:-1] if node.stack and node.module not in parents else node.stack for node in layers}
    return tuple(layers) if len(homes) == 1 else ()


def innermost(node: Node, modules: Container[str]) -> str | None:
    """The innermost of these modules that the op is part of, '' being the model itself."""
    return next((path for path in (*(call.path for call in reversed(node.stack)), "") if path in modules), None)


def inside(node: Node, modules: AbstractSet[str]) -> bool:
    """Whether the op is part of one of the modules, '' being the model itself."""
    return "" in modules or any(call.path in modules for call in node.stack)
