"""Why a conversion is there: the nearest statements on both of its sides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from placement.graph.ir import Node, Output, Value
from placement.lang.spec import Span
from placement.solver.bind import Bound
from placement.solver.plan import Step


class Causes:
    """Finds the statements that a conversion follows from: the nearest pins on both of its sides."""

    def __init__(self, bound: Bound) -> None:
        self.bound = bound
        self.producer = {v: node for node in bound.graph.nodes for v in node.results}
        self.consumers: dict[Value, list[Node]] = {}
        for node in bound.graph.nodes:
            for operand in node.operands:
                self.consumers.setdefault(operand, []).append(node)

    def explain(self, step: Step) -> Step:
        """The conversion with its cause: what made the value so, and what its consumers follow from."""
        return dataclasses.replace(step, cause=self.around(step.value, step.consumers))

    def around(self, value: Value, users: Iterable[Node | Output]) -> tuple[str, ...]:
        """``file:line`` of what made the value as it is, and of what these users of it follow from."""
        found: list[str] = []
        own = self.bound.values.get(value) or self.bound.inputs.get(value) or self.bound.parameters.get(value)
        if own is not None and own.cause:
            found.append(own.cause)
        else:
            found += self._upstream(self.producer.get(value))
        for user in users:
            found += self._downstream(user)
        return tuple(dict.fromkeys(found))

    def of_parameter(self, value: Value, steps: Iterable[Step]) -> tuple[str, ...]:
        """The statements because of which a parameter is used replicated."""
        users = [u for s in steps if s.value is value for u in s.consumers if isinstance(u, Node)]
        found: list[str] = []
        for user in users:
            found += self._pins_of(user) or self._upstream(user) or self._downstream(user)
        return tuple(dict.fromkeys(found))

    def nearest_span(self, node: Node) -> Span | None:
        """The span of a pin at or near a node."""
        for pins in (self.bound.values, self.bound.parameters):
            for value in (*node.results, *node.operands):
                pin = pins.get(value)
                if pin is not None and pin.span is not None:
                    return pin.span
        return None

    def _pins_of(self, node: Node) -> list[str]:
        found = [self.bound.parameters[v].cause for v in node.operands if v in self.bound.parameters]
        found += [self.bound.values[v].cause for v in (*node.operands, *node.results) if v in self.bound.values]
        return [c for c in found if c]

    def _upstream(self, node: Node | None) -> list[str]:
        seen: set[Node] = set()
        level = [node] if node is not None else []
        while level:
            found = [c for n in level for c in self._pins_of(n)]
            if found:
                return found[:2]
            seen.update(level)
            level = [p for n in level for v in n.operands if (p := self.producer.get(v)) is not None and p not in seen]
        return []

    def _downstream(self, user: Node | Output) -> list[str]:
        if isinstance(user, Output):
            pin = self.bound.outputs.get(user)
            return [pin.cause] if pin is not None and pin.cause else []
        seen: set[Node] = set()
        level = [user]
        while level:
            found = [c for n in level for c in self._pins_of(n)]
            if found:
                return found[:2]
            seen.update(level)
            level = [c for n in level for v in n.results for c in self.consumers.get(v, []) if c not in seen]
        return []
