"""What each axis of a mesh is charged for ops and conversions, so that charges never add up to more than the price.

An op's work w depends on the options of all axes. It is charged to the axes in turn, at a reference r: the first is
charged what changing it alone changes, w(s1, r2, ..) - w(r); the next the least that is left of w(s1, s2, r3, ..)
whatever the first does; and so on. So charges add up to w(r) at the reference, and nowhere to more than w. A conversion
is charged as if the other axes cut its value as much as they may. Where several axes may convert at once for less than
one after the other, the later ones are charged what is left of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from placement.graph.ir import Node, Value
from placement.rules import JointStrategy, Strategy
from placement.solver.bind import Bound
from placement.solver.limbs import Ints
from placement.solver.mesh import Axes, Edge
from placement.solver.pricing import Cost, Prices, Restriction, Ways
from placement.solver.problem import FORBIDDEN, Costs
from placement.solver.tight import Tight
from placement.solver.uses import Uses
from placement.types import Conversion, Joint, Kind


class Free(Prices):
    """Nothing costs anything: to see what there is to choose."""

    def op(self, node: Node, strategy: JointStrategy) -> tuple[Cost, tuple[int, int]]:  # noqa: ARG002, D102
        return (0, 0, 0), (0, 0)


@dataclass(frozen=True, slots=True)
class _Work:
    """One op: what all options are charged by axis, and what belongs to none of them."""

    charges: tuple[tuple[int, ...], ...]
    constant: int


class Reference:
    """Where charges are taken: a strategy of each op on each axis, and what values may be.

    allowed: the options that are left, by variable and axis. first: the axes that convert a value there one by one.
    kinds: by value and axis, the kinds of type it may have.
    """

    def __init__(
        self,
        uses: Uses,
        prices: Prices,
        at: Mapping[Node, Sequence[int]],
        allowed: Mapping[str, Sequence[Sequence[int] | None]],
        first: Mapping[Value, Sequence[int]],
    ) -> None:
        self.uses, self.bound, self.prices, self.at, self.allowed = uses, uses.bound, prices, at, allowed
        self.first = first
        self.axes = uses.axes
        self.kinds = self._kinds()
        self.tight: dict[Value, Tight] = {}
        self._dims: dict[object, tuple[tuple[int, ...], ...]] = {}
        self._known: dict[object, _Work] = {}
        self.work = {node: self._charged(node) for node in self.bound.graph.nodes}

    @property
    def constant(self) -> int:
        """Picoseconds that no axis is charged."""
        found = (*self.work.values(), *self.tight.values())
        return sum(one.constant for one in found)

    def options(self, node: Node, axis: int) -> Sequence[Strategy]:
        """The strategies of an op on an axis."""
        return self.uses.offered(node, axis)[0]

    def left(self, node: Node, axis: int) -> Sequence[int]:
        """The options of an op that are left on an axis."""
        own = self.allowed[node.name][axis]
        return range(len(self.options(node, axis))) if own is None else own

    def _kinds(self) -> dict[Value, list[set[Kind]]]:
        """The kinds of type that each value may have on each axis, left to choose or not: it may pass through them."""
        found: dict[Value, list[set[Kind]]] = {v: [set() for _ in self.axes] for v in self.bound.graph.values()}
        for pins in (self.bound.inputs, self.bound.parameters, self.bound.values):
            for value, pin in pins.items():
                for axis, kinds in enumerate(pin.kinds):
                    found[value][axis].update(kind.kind for kind in kinds or ())
        known: dict[int, list[set[Kind]]] = {}
        for node in self.bound.graph.nodes:
            for axis in self.axes:
                offered, form = self.uses.offered(node, axis)
                if form not in known:
                    places = zip(*[(*part.operands, *part.results) for part in offered], strict=True)
                    known[form] = [{kind.kind for kind in types} for types in places]
                for value, kinds in zip((*node.operands, *node.results), known[form], strict=True):
                    found[value][axis] |= kinds
        for output, pin in self.bound.outputs.items():
            for axis, context in enumerate(self.bound.contexts):
                assert output.value is not None
                types = pin.kinds[axis] if pin else None
                types = context.types(output.value) if types is None else types
                found[output.value][axis].update(kind.kind for kind in types)
        return found

    def parts(self, value: Value, without: Axes) -> int:
        """Into how many blocks the axes other than these may cut a value."""
        return prod(self.bound.mesh.axes[k].n for k in self.axes if k not in without and Kind.S in self.kinds[value][k])

    def order(self, value: Value) -> list[int]:
        """The axes in the order in which they are charged: those that convert the value at the reference first."""
        return list(dict.fromkeys((*self.first.get(value, ()), *reversed(self.axes))))

    # -- work ---------------------------------------------------------------------------------------

    def _charged(self, node: Node) -> _Work:
        dims = [self.dims(node, axis) for axis in self.axes]
        here = tuple(own[i] for own, i in zip(dims, self.at[node], strict=True))
        classes = [sorted({own[i] for i in self.left(node, axis)}) for axis, own in enumerate(dims)]
        key = (self.prices.forms.alike.of(node), here, *map(tuple, classes), *dims)
        if key not in self._known:
            self._known[key] = self._tangent(node, dims, here, classes)
        return self._known[key]

    def dims(self, node: Node, axis: int) -> tuple[tuple[int, ...], ...]:
        """The dims in which each option of an op on an axis cuts."""
        offered, form = self.uses.offered(node, axis)
        key = self.prices.forms.of_node(node), form
        if key not in self._dims:
            self._dims[key] = tuple(self.prices.dims(node, part) for part in offered)
        return self._dims[key]

    def _tangent(
        self,
        node: Node,
        dims: Sequence[Sequence[tuple[int, ...]]],
        here: tuple[tuple[int, ...], ...],
        classes: Sequence[Sequence[tuple[int, ...]]],
    ) -> _Work:
        base = sum(self.prices.work_of(node, here))
        rise: dict[int, dict[tuple[int, ...], int]] = {}
        for axis in reversed(self.axes):  # innermost first: there a plan has most choices
            own = {*dims[axis]}
            found = dict.fromkeys(own, FORBIDDEN)
            free = [classes[k] if k in rise else own if k == axis else (here[k],) for k in self.axes]
            for cuts in product(*free):
                rest = sum(self.prices.work_of(node, cuts)) - base - sum(rise[k][cuts[k]] for k in rise)
                found[cuts[axis]] = min(found[cuts[axis]], rest)
            rise[axis] = found
        least = [min(rise[axis].values()) for axis in self.axes]
        charges = tuple(tuple(rise[axis][cut] - least[axis] for cut in dims[axis]) for axis in self.axes)
        return _Work(charges, base + sum(least))

    @classmethod
    def most_divided(
        cls, uses: Uses, prices: Prices, allowed: Mapping[str, Sequence[Sequence[int] | None]]
    ) -> Reference:
        """Where every axis divides each op as much as it can, for want of a plan."""
        at: dict[Node, list[int]] = {}
        known: dict[object, list[int]] = {}
        for node in uses.bound.graph.nodes:
            found = [uses.offered(node, axis) for axis in uses.axes]
            key = (prices.forms.of_node(node), *[form for _, form in found])
            if key not in known:
                dims = [[prices.dims(node, part) for part in offered] for offered, _ in found]
                whole = tuple((-1,) * (len(node.operands) + len(node.results)) for _ in dims)
                known[key] = [
                    min(
                        range(len(own)),
                        key=lambda i: sum(prices.work_of(node, (*whole[:axis], own[i], *whole[axis + 1 :]))),
                    )
                    for axis, own in enumerate(dims)
                ]
            at[node] = known[key]
        return cls(uses, prices, at, allowed, {})


class Charges(Prices):
    """The prices of one axis by itself: what it is charged."""

    def __init__(self, alone: Bound, axis: int, reference: Reference) -> None:
        super().__init__(alone, reference.prices.forms)
        self.axis, self.reference = axis, reference
        self._ways_of: dict[int, tuple[list[str], list[int]]] = {}

    def states(self, value: Value) -> int:  # noqa: D102
        del value
        return 0  # bounds are of time

    def likeness_of_op(self, node: Node) -> object:  # noqa: D102
        ways, like = self._inside(node)
        return (
            id(self.reference.work[node]),
            tuple([self.reference.parts(node.operands[place], (self.axis,)) for place in like]),
            tuple([self._shared(node, way) for way in ways]),
        )

    def _inside(self, node: Node) -> tuple[list[str], list[int]]:
        """The implementations of an op, if there are several, and the operands that collectives inside are like."""
        offered, form = self.reference.uses.offered(node, self.axis)
        if form not in self._ways_of:
            ways = {part.implementation for part in offered}
            like = {one.like for part in offered for one in part.collectives if one.like is not None}
            self._ways_of[form] = sorted(ways) if len(ways) > 1 else [], sorted(like)
        return self._ways_of[form]

    def likeness_of(self, value: Value) -> object:  # noqa: D102
        reference = self.reference
        if value in reference.tight:
            return id(reference.tight[value])
        return tuple(map(frozenset, reference.kinds[value])), tuple(reference.order(value))

    def table(self, value: Value, ways: Ways, made: tuple[int, ...], sets: Ints) -> Costs:  # noqa: D102
        tight = self.reference.tight.get(value)
        if tight is None:
            return super().table(value, ways, made, sets)
        seen = self.forms.kinds(value, (kind for (kind,) in ways.joints))
        types = [seen[place] for place in ways.least.asked]
        asked = [frozenset(kind for bit, kind in enumerate(types) if mask >> bit & 1) for mask in sets.tolist()]
        found = tight.table(self.axis, [seen[place] for place in made], asked)
        return np.stack([found, np.zeros_like(found), np.zeros_like(found)])

    def price(self, value: Value, edge: Edge, source: Joint, restriction: Restriction) -> Cost:  # noqa: D102
        return self._share(value, edge.conversion, source, restriction)[self.axis], 0, 0

    def _share(self, value: Value, conversion: Conversion, source: Joint, restriction: Restriction) -> dict[int, int]:
        """What each axis is charged for one conversion of a value."""
        reference, mesh = self.reference, self.reference.bound.mesh
        whole = reference.prices.nbytes(value)
        charged: dict[int, int] = {}

        def together(axes: Axes) -> int:
            edge = Edge(axes, source, conversion)
            here = Joint([source[0]] * len(reference.axes))
            sent = whole // reference.parts(value, axes)
            return sum(reference.prices.times(value, edge, here, sent, restriction))

        for axis in reference.order(value):
            least = together((axis,))
            for group in mesh.groups:
                others = [k for k in group if k != axis]
                if axis in group and all(k in charged for k in others) and self._possible(value, conversion, group):
                    least = min(least, max(0, together(group) - sum(charged[k] for k in others)))
            charged[axis] = least
            if axis == self.axis:
                break
        return charged

    def _possible(self, value: Value, conversion: Conversion, group: Axes) -> bool:
        """Whether all axes of a group may have the value in the type that is converted, be it on the way only."""
        return conversion.source is not Kind.S or all(Kind.S in self.reference.kinds[value][k] for k in group)

    def op(self, node: Node, strategy: JointStrategy) -> tuple[Cost, tuple[int, int]]:
        """The share of the work, and the launches inside at the least size and the least share they may have."""
        (part,) = strategy.parts
        index = next(i for i, own in enumerate(self.reference.options(node, self.axis)) if own is part)
        charge = self.reference.work[node].charges[self.axis][index]
        mesh = self.reference.bound.mesh
        sent = 0
        for one in part.collectives:
            if one.behind:
                continue  # perhaps it takes no time
            parts = 1 if one.like is None else self.reference.parts(node.operands[one.like], (self.axis,))
            own = mesh.machine((self.axis,))
            nbytes = self.forms.sums.sent_inside(node, one, one.nbytes // parts)
            sent += own.collective(one.action, nbytes) * one.times(own.n)
        if self._shared(node, part.implementation):
            sent = 0
        return (charge + sent, 0, 0), (0, 0)

    def _shared(self, node: Node, implementation: str) -> bool:
        """Whether an axis that is charged first may run the same implementation, together with this one."""
        if not implementation:
            return False
        reference = self.reference
        here = [k for k in reference.axes if self._runs(node, k, implementation, reference.at[node][k])]
        order = list(dict.fromkeys((*here, *reversed(reference.axes))))
        before = order[: order.index(self.axis)]
        return any(self._runs(node, k, implementation, index) for k in before for index in reference.left(node, k))

    def _runs(self, node: Node, axis: int, implementation: str, index: int) -> bool:
        return self.reference.options(node, axis)[index].implementation == implementation
