"""Linear layers that run as one with a conversion of their input or result: which blocks and ops a call stands for."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from placement.emit.blocks import Block
from placement.graph.ir import Call, Node, Value
from placement.solver.overlap import cuts
from placement.solver.plan import Plan, Step


@dataclass(frozen=True, slots=True)
class Layer:
    """A module that does nothing but one linear layer.

    steps: conversions of its own parameters, which come first.
    """

    steps: tuple[Step, ...]
    product: Node


def _layer(plan: Plan, block: Block, parameters: AbstractSet[Value]) -> Layer | None:
    """The block as a layer, None where it is more than that."""
    steps = tuple(e for e in block.entries if isinstance(e, Step) and e.value in parameters)
    product, *more = (e for e in block.entries if e not in steps)
    if more or len(block.gives) != 1 or not isinstance(product, Node) or block.takes != [plan.uses[product, 0]]:
        return None
    return Layer(steps, product)


@dataclass(frozen=True, slots=True)
class Layers:
    """What runs with a conversion.

    calls: the calls of modules that do. sums: ops and calls whose result is summed, each with the step that does it.
    unfit: calls that do more; their ops go to their callers.
    """

    calls: Mapping[Block, Layer]
    sums: Mapping[Node | Block, Step]
    unfit: frozenset[Call]


def layer_calls(plan: Plan, root: Block) -> Layers:
    """The layers of a program that run with conversions."""
    parameters = {parameter.value for parameter in plan.graph.parameters}
    found: dict[Block, Layer] = {}
    sums: dict[Node | Block, Step] = {}
    unfit: set[Call] = set()
    for block in root.walk():
        for step in (e for e in block.entries if isinstance(e, Step)):
            if step.product in block.entries:
                sums[step.product] = step
            elif step.product is not None and (child := child_of(block, step.product)) is not None:
                layer = _layer(plan, child, parameters)
                if layer is not None:
                    found[child], sums[child] = layer, step
                elif cuts(step.overlap):
                    unfit.add(child.call)
                # Else one that does more is called, and what it gives is summed after.
            for child in (child for node in step.layers if (child := child_of(block, node))):
                layer = _layer(plan, child, parameters)
                if layer is None:
                    unfit.add(child.call)
                else:
                    found[child] = layer
    return Layers(found, sums, frozenset(unfit))


def child_of(block: Block, node: Node) -> Block | None:
    """The call inside ``block`` that the op is somewhere in, None where it is in none."""
    children = (e for e in block.entries if isinstance(e, Block))
    return next((child for child in children if any(node in inner.entries for inner in child.walk())), None)
