"""How values may be used and converted: parameters as they are placed, and no work divided that nobody asked for.

``docs/architecture.md``, "What the search leaves out", says why.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING

from placement.graph.ir import Node, Value
from placement.graph.signature import Signature
from placement.rules import Strategy, lookup, runs_as, strategies
from placement.solver.pricing import Restriction
from placement.types import I, P, R, Type

if TYPE_CHECKING:
    from placement.solver.bind import Bound
    from placement.solver.forms import Forms, Offered


class Uses:
    """What the statements of one spec leave of the uses of each value."""

    def __init__(self, bound: Bound, forms: Forms) -> None:
        self.bound, self.forms = bound, forms
        self.axes = range(len(bound.mesh.axes))
        self.fixed = self._derived_from_parameters()
        self.weights = self._weights()
        self._known = [forms.known.setdefault(context, {}) for context in bound.contexts]
        self.structures: dict[tuple[Value, int], int] = {}  # of nets, by value and stage, see `builder`
        self._restrictions: dict[Value, Restriction] = {}

    def offered(self, node: Node, axis: int) -> Offered:
        """The strategies of an op on one axis that the placements leave, and their form."""
        known = self._known[axis]
        found = known.get(node)
        if found is None:
            found = known[node] = self.forms.offered(
                node,
                self.bound.contexts[axis],
                lambda: self._asked(node, axis),
                lambda: tuple(self._offered(node, axis)),
            )
        return found

    def _asked(self, node: Node, axis: int) -> object:
        """What ``_offered`` looks at, beside the op's form and its factors' sizes; in the numbers of its factors."""
        dims, kinds, numbers = self.bound.dims, self.forms.kinds, self.forms.numbers(node)
        fixed = [self.fixed.get(value) for value in node.operands]
        pins = [self.bound.values.get(value) for value in node.results]
        placed = [pin and pin.kinds[axis] for pin in pins]
        return (
            tuple((letter, tuple(map(numbers.get, run))) for letter, run in dims.letters.get(node, {}).items()),
            repr(dims.signature(node)),
            node in dims.opaque,
            tuple(own and frozenset(kinds(node, own[axis])) for own in fixed),
            tuple(value in self.weights for value in node.operands),
            tuple(own and kinds(node, own) for own in placed),
            tuple(number for factor, number in numbers.items() if factor in self._divided[axis]),
            tuple(frozenset(map(numbers.get, self.bound.contexts[axis].repeated(value))) for value in node.operands),
            way.name if (way := self.bound.ways.get((node, axis))) else None,
        )

    def _offered(self, node: Node, axis: int) -> list[Strategy]:
        found = [s for s in strategies(node, self.bound.contexts[axis]) if self._accepts(node, s, axis)]
        way = self.bound.ways.get((node, axis))
        if way is not None:
            found = [s for s in found if runs_as(way, node, s, self.bound.contexts[axis])]
        for position, result in enumerate(node.results):
            found = self._within_pin(result, found, position, axis)
        return found

    def restriction(self, value: Value) -> Restriction:
        """How a value may be converted."""
        if value not in self._restrictions:
            sealed = tuple(value in sealed for sealed in self._sealed)
            kinds = pin.kinds if (pin := self.bound.parameters.get(value)) else ((),) * len(self.axes)
            stored = tuple(any(t.stored for t in own or ()) for own in kinds)
            chosen = any(stored) and any(len(own or ()) > 1 for own in kinds)
            again = self._keepers[self.forms.keeping.one.layouts[value].storage] if any(stored) else 0
            self._restrictions[value] = Restriction(value in self.fixed, sealed, stored, again, chosen)
        return self._restrictions[value]

    # -- strategies -----------------------------------------------------------------------------

    def _accepts(self, node: Node, strategy: Strategy, axis: int) -> bool:
        """Whether parameters are used as placed: a replicated one is never cut, a sharded one never gathered."""
        for value, kind in zip(node.operands, strategy.operands, strict=True):
            allowed = self.fixed.get(value)
            if allowed is not None and kind not in allowed[axis]:
                return False
        return not self._divides_work(node, strategy, axis)

    def _divides_work(self, node: Node, strategy: Strategy, axis: int) -> bool:
        """Whether the strategy divides the work with a replicated weight among the ranks, unasked.

        A product with a replicated LM head could take each rank's own tokens and sum the weight's whole
        gradient afterwards. That is data parallelism: it is for data that comes divided (an ``input`` line)
        or for a product that a ``value`` line places so. A weight that only runs along the result, as a
        norm's does, is no such product, and a buffer, such as a mask, no weight.
        """
        found = lookup(node)
        signature = found.signature(node) if found else None
        if not isinstance(signature, Signature):
            return False
        cuts = {f for kind in (*strategy.operands, *strategy.results) for f in kind.over}
        if (
            not cuts
            or cuts <= self._divided[axis]
            or any(t.over for v in node.results if (pin := self.bound.values.get(v)) for t in pin.kinds[axis] or ())
        ):
            return False
        kept_letters = {letter for dims in signature.results for dim in dims for letter in dim}
        return any(
            value in self.weights and kind == R and not {letter for dim in dims for letter in dim} <= kept_letters
            for position, (value, kind, dims) in enumerate(
                zip(node.operands, strategy.operands, signature.operands, strict=True)
            )
            if not signature.linear or position in signature.linear  # a learned mask of attention is no factor
        )

    def _within_pin(self, value: Value, offered: list[Strategy], position: int, axis: int) -> list[Strategy]:
        pin = self.bound.values.get(value)
        kinds = pin.kinds[axis] if pin else None
        if kinds is None:
            return offered
        fitting = [s for s in offered if s.results[position] in kinds]
        return fitting or offered

    @cached_property
    def _divided(self) -> list[set[object]]:
        """By axis, the factors in which the data comes divided."""
        pins = self.bound.inputs.values()
        return [{f for pin in pins for t in pin.kinds[axis] or () for f in t.over} for axis in self.axes]

    # -- values ---------------------------------------------------------------------------------

    def _derived_from_parameters(self) -> dict[Value, tuple[frozenset[Type], ...]]:
        """Parameters, and what is a view or a cast of one: the types in which they may be used, by axis."""
        result: dict[Value, tuple[frozenset[Type], ...]] = {}
        for value, pin in self.bound.parameters.items():
            whole = frozenset({I, R, P} if value.requires_grad else {R, P})
            result[value] = tuple(
                frozenset(t for t in kinds or () if t.over and not t.stored)
                | (whole if any(t.stored or not t.over for t in kinds or ()) else frozenset())
                for kinds in pin.kinds
            )
        for node in self.bound.graph.nodes:
            if len(node.operands) == 1 and node.operands[0] in result and len(node.results) == 1 and not node.kwargs:
                found = lookup(node)
                if found and (found.view or node.results[0].shape == node.operands[0].shape):
                    kinds = result[node.operands[0]]
                    if not any(t.over for allowed in kinds for t in allowed):
                        result[node.results[0]] = kinds
        return result

    def _weights(self) -> frozenset[Value]:
        """Those of them that come of parameters, and not of buffers."""
        found = {p.value for p in self.bound.graph.parameters if not p.is_buffer}
        for node in self.bound.graph.nodes:
            if node.results[:1] and node.results[0] in self.fixed and node.operands[0] in found:
                found.add(node.results[0])
        return frozenset(found & self.fixed.keys())

    @cached_property
    def _sealed(self) -> list[frozenset[Value]]:
        return [self._inside_placed_modules(axis) for axis in self.axes]

    def _inside_placed_modules(self, axis: int) -> frozenset[Value]:
        """Values that live inside a module without children whose output a ``value`` line places on the axis.

        They are not gathered: a norm placed Replicate is computed replicated, not computed in blocks and
        gathered before its last product. A product with a weight that is placed Shard has no such choice.
        """
        graph = self.bound.graph
        parents = {path.rpartition(".")[0] for path in graph.modules}
        placed = {
            node.stack
            for node in graph.nodes
            for v in node.results
            if (pin := self.bound.values.get(v)) and pin.kinds[axis] is not None and node.module not in parents
        }
        if not placed:
            return frozenset()
        users: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            for operand in node.operands:
                users.setdefault(operand, []).append(node)
        outputs = {o.value for o in graph.outputs}
        return frozenset(
            value
            for node in graph.nodes
            if node.stack in placed and not any(t.over for v in node.operands for t in self._used(v, axis))
            for value in node.results
            if value not in outputs and all(user.stack == node.stack for user in users.get(value, ()))
        )

    def _used(self, value: Value, axis: int) -> frozenset[Type]:
        return self.fixed[value][axis] if value in self.fixed else frozenset()

    @cached_property
    def _keepers(self) -> Counter[int]:
        """How many tensors that ops keep for the backward lie in each storage."""
        return Counter(use.storage for uses in self.forms.keeping.one.uses.values() for use in uses)
