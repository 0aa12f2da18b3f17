"""Lengths that no axis divides: whether a run with padded inputs gives what one of the given length does.

A dynamic dim is a symbol in all sizes, so the same program runs at a longer length; nothing is rewritten. The proof
walks forward over the graph: an op that treats positions one by one, or looks only backwards, or is told by a mask to
ignore the others, gives for the positions of the given length what it gave before. Then outputs, cut to that length,
are the same function of inputs and parameters, and so all gradients are the same: what reaches a padded position is
exactly zero. Zero times infinity is not; but a padded run is the model's own run of a longer input, whose last position
is repeated, and constants that ops ask for are those that they ignore. It is as finite as the model is on any input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import lcm
from pathlib import Path

import sympy

from placement.graph.ir import Graph, Node, Value, leaves, op_name
from placement.rules.bounds import number
from placement.rules.core import lookup
from placement.rules.lengths import created, drawn, told
from placement.rules.past import Fact, Place, Sizes, Step, StuckError, pointwise
from placement.solver.plan import Plan


@dataclass(frozen=True, slots=True)
class Padded:
    """How a length is padded: inputs with a constant (others with their last position), outputs' dims cut again.

    ``least`` is the shortest length given, and ``most`` the longest one padded, for which that is right. ``drawn``: by
    node, the dims that are padded of what it draws random numbers for. ``told``: nodes that must know by how much.
    """

    inputs: Mapping[str, float]
    outputs: Mapping[str, tuple[int, ...]]
    least: int = 1
    most: int | None = None
    drawn: Mapping[Node, tuple[int, ...]] = field(default_factory=dict, repr=False)
    told: frozenset[Node] = field(default=frozenset(), repr=False)


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What stands in the way: the place in the program, the words, and of which value to have which constant.

    ``tells``: it does not where ops are told the length.
    """

    index: int
    text: str
    wants: tuple[Value, ...] = ()
    constants: tuple[float, ...] = ()
    tells: bool = False


def parts(plan: Plan) -> dict[sympy.Symbol, int]:
    """Into how many blocks each dynamic size is cut, where that cannot be seen from the inputs."""
    kinds = [*plan.produced.values(), *(s.target.type for s in plan.steps)]
    sharded_input = {f for i in plan.graph.inputs for f in plan.produced[i.value].over}
    moved = {f for s in plan.steps for t in (s.source.type, s.target.type) for f in t.over}
    found: dict[sympy.Symbol, int] = {}
    for joint in dict.fromkeys(kinds):
        cuts: dict[sympy.Symbol, int] = {}
        for index, (axis, kind) in enumerate(zip(plan.mesh.axes, joint, strict=True)):
            for factor in kind.over:
                size = getattr(factor, "size", 1)
                if isinstance(size, sympy.Basic) and (factor not in sharded_input or factor in moved):
                    for symbol in size.free_symbols:
                        cuts[symbol] = blocks = cuts.get(symbol, 1) * axis.n  # type: ignore[index, arg-type]
                        chunks = 2 * blocks if plan.mesh.ordered(joint, (index,)) else blocks
                        found[symbol] = lcm(found.get(symbol, 1), chunks)  # type: ignore[index, arg-type]
    return found


def padded(plan: Plan) -> dict[str, Padded | str]:
    """By the name of each dim that is cut inside: how calls pad it, or why they cannot."""
    return {symbol.name: _blocks(plan, symbol) or proven(plan.graph, symbol) for symbol in parts(plan)}


def _blocks(plan: Plan, symbol: sympy.Symbol) -> str:
    """Why a rank does not have all of the dim, where it is an input's."""
    for item in plan.graph.inputs:
        joint = plan.produced[item.value]
        for axis, kind in zip(plan.mesh.axes, joint, strict=True):
            if any(getattr(getattr(f, "size", None), "free_symbols", set()) & {symbol} for f in kind.over):
                return f"each rank of {axis.name!r} is given its own block of {item.name!r}"
    return ""


def proven(graph: Graph, symbol: sympy.Symbol) -> Padded | str:
    """How inputs are padded so that calls of any length of ``symbol`` are exact; else what stands in the way."""
    walk = _Walk(graph, symbol)
    found = walk.run()
    while isinstance(found, Obstacle):
        for name, constant in _candidates(graph, found, walk.constants):
            again = walk.again(name, constant)
            tried = again.run()
            if not isinstance(tried, Obstacle) or tried.index > found.index:
                walk, found = again, tried
                break
        else:
            if not found.tells:
                return found.text
            walk = _Walk(graph, symbol, walk.constants, tells=True)
            found = walk.run()
    return found


def _candidates(graph: Graph, obstacle: Obstacle, constants: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Inputs that the values are made of element by element, and what they might be padded with."""
    producers = {value: node for node in graph.nodes for value in node.results}
    seen: set[Value] = set()
    waiting = list(obstacle.wants)
    while waiting:
        value = waiting.pop()
        node = producers.get(value)
        if value in seen or node is None:
            seen.add(value)
            continue
        seen.add(value)
        rule = lookup(node)
        if (rule is not None and (rule.view or pointwise(node))) or not value.requires_grad:
            waiting += node.operands
    for item in graph.inputs:
        # A number that is no position's own is for masks and indices: not for data, which has features.
        data = item.value.dtype.is_floating_point and any(isinstance(s, int) and s != 1 for s in item.value.shape)
        if item.value in seen and item.name not in constants and not data:
            for constant in obstacle.constants:
                yield item.name, constant


class _Walk:
    """One walk over the program, with some inputs padded with constants."""

    def __init__(
        self, graph: Graph, symbol: sympy.Symbol, constants: Mapping[str, float] | None = None, *, tells: bool = False
    ) -> None:
        self.graph, self.sizes, self.tells = graph, Sizes(symbol), tells
        self.constants: dict[str, float] = dict(constants or {})
        self.facts: dict[Value, Fact] = {}
        self.wrong: dict[Value, Obstacle] = {}
        self.drawn: dict[Node, tuple[int, ...]] = {}
        self.told: set[Node] = set()
        self.changed: set[Value] | None = None  # since the walk before

    def again(self, name: str, constant: float) -> _Walk:
        """A walk with one more input padded with a constant, over what that changes."""
        made = _Walk(self.graph, self.sizes.symbol, {**self.constants, name: constant}, tells=self.tells)
        made.facts, made.wrong, made.drawn = dict(self.facts), dict(self.wrong), dict(self.drawn)
        made.told = set(self.told)
        made.sizes.least, made.sizes.most = self.sizes.least, self.sizes.most
        made.changed = {item.value for item in self.graph.inputs if item.name == name}
        return made

    def run(self) -> Padded | Obstacle:
        """What calls do, or the first obstacle before an output."""
        for item in self.graph.inputs:
            if self.changed is None or item.value in self.changed:
                self._input(item.name, item.value)
        for index, node in enumerate(self.graph.nodes):
            if self.changed is None:
                self._node(index, node)
            elif any(v in self.changed for v in node.operands):
                before = [(self.facts.pop(v, None), self.wrong.pop(v, None)) for v in node.results]
                self._node(index, node)
                after = [(self.facts.get(v), self.wrong.get(v)) for v in node.results]
                self.changed |= {v for v, a, b in zip(node.results, before, after, strict=True) if a != b}
        outputs: dict[str, tuple[int, ...]] = {}
        obstacles: list[Obstacle] = []
        for output in self.graph.outputs:
            if output.value is None:
                continue
            places = self.facts.get(output.value, Fact()).places
            if output.value in self.wrong:
                obstacles.append(self.wrong[output.value])
            elif not all(place.alone for place in places.values()):
                obstacles.append(
                    Obstacle(len(self.graph.nodes), f"output {output.name!r} has it merged with another dim")
                )
            elif places:
                outputs[output.name] = tuple(places)
        if obstacles:
            return min(obstacles, key=lambda obstacle: obstacle.index)
        least, most = self.sizes.least, self.sizes.most
        return Padded(dict(self.constants), outputs, least, most, self.drawn, frozenset(self.told))

    def _input(self, name: str, value: Value) -> None:
        dims = [dim for dim, size in enumerate(value.shape) if self.sizes.depends(size)]
        if any(self.sizes.more(value.shape[dim]) != 0 for dim in dims):
            self.wrong[value] = Obstacle(-1, f"input {name!r} has another length")
        elif dims:
            fact = Fact({dim: Place() for dim in dims})
            if name in self.constants:
                known = number(self.constants[name])
                fact = Fact(fact.places, {region: known for region in fact.regions if region})
            self.facts[value] = fact

    def _node(self, index: int, node: Node) -> None:
        before = [self.wrong[v] for v in node.operands if v in self.wrong]
        if before:
            self.wrong |= dict.fromkeys(node.results, min(before, key=lambda obstacle: obstacle.index))
            return
        if node.operands and not any(v in self.facts for v in node.operands) and not self._told(node):
            return
        self.told.discard(node)
        step = Step(node, self.facts, self.sizes, self.tells)
        try:
            made = step.facts() if node.operands else created(step)
        except StuckError as stuck:
            text = f"{_named(node)} {stuck}"
            self.wrong |= dict.fromkeys(node.results, Obstacle(index, text, stuck.wants, stuck.constants, stuck.tells))
            return
        self.facts |= {value: fact for value, fact in zip(node.results, made, strict=True) if fact != Fact()}
        if dims := drawn(step):
            self.drawn[node] = dims
        if told(step):
            self.told.add(node)

    def _told(self, node: Node) -> bool:
        """Whether the length is among the op's arguments."""
        return any(map(self.sizes.depends, leaves((node.args, tuple(node.kwargs.values())))))


def _named(node: Node) -> str:
    """``'cumsum' in 'model.layers.0' (model.py:12)``."""
    name = op_name(node.op).split(".")
    where = f" in {node.module!r}" if node.module else ""
    source = f" ({Path(node.source).name})" if node.source else ""
    return f"{name[1] if len(name) > 1 else name[0]!r}{where}{source}"
