"""What ops and conversions cost on a mesh: picoseconds, bytes kept for the backward, launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch

from placement.graph.ir import Node, Value, evaluate
from placement.graph.signature import Signature
from placement.rules import Collective, JointStrategy, Strategy, lookup
from placement.solver.forms import Forms
from placement.solver.keeping import Keeping
from placement.solver.limbs import Ints
from placement.solver.mesh import Axes, Edge
from placement.solver.problem import LIMIT, Costs, Excessive
from placement.solver.states import chosen, states
from placement.solver.steiner import Conversions, conversions
from placement.types import Joint, Kind, P, R, Type

if TYPE_CHECKING:
    from placement.solver.bind import Bound

Cost = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Sent:
    """A launch inside an op: ``nbytes`` as the axes that do not take part leave them.

    time: picoseconds that the op takes longer for it. reduce: the dtype of a sum where a line says it.
    """

    axes: Axes
    collective: Collective
    nbytes: int
    time: int
    reduce: torch.dtype | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """The types of one value and the conversions between them."""

    joints: tuple[Joint, ...]
    edges: Mapping[tuple[int, int], Edge]
    least: Conversions


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """What variables of one form choose from. form: of what they choose from, by axis, and of what is left of it.

    combos: options, each by its position on every axis. costs: int64 [3, options]. work: picoseconds of an op's own
    work forward and backward, by option.
    """

    form: int
    combos: tuple[tuple[int, ...], ...]
    costs: Costs
    work: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class NetForm:
    """A net as it is for all values alike: its numbers, and the conversions of the first such value.

    produced, and one of asked for each consumer: by option, the place in made and the bit of the type asked for.
    made: places in the types of ``ways``. narrowed: whether conversions may pass through fewer types than there are.
    """

    value: Value
    ways: Ways
    made: tuple[int, ...]
    produced: Ints
    asked: tuple[Ints, ...]
    table: Costs
    sets: Ints
    narrowed: bool


@dataclass(frozen=True, slots=True)
class Restriction:
    """How a value may be converted. hook: it is a parameter, or a view of one, and used as it is placed.

    sealed: by axis, whether its blocks may not be gathered. stored: by axis, whether it may be kept in blocks. again:
    how often it is gathered in the backward if it is gathered in the forward. chosen: it may also be kept whole, which
    the solver decides.
    """

    hook: bool
    sealed: tuple[bool, ...]
    stored: tuple[bool, ...]
    again: int = 0
    chosen: bool = False


def _behind(found: Sequence[Sent], axes: Axes, phase: str, most: int) -> list[Sent]:
    """What runs behind the op's own work takes time only where that ends first: ``most`` picoseconds are for it.

    An op with a part of its work for each of n ranks does the first before anything must have come: of its work
    (n - 1) / n is there to run behind of. What is left is shared among the launches alike.
    """
    own = [s.axes == axes and s.collective.phase == phase and s.collective.behind for s in found]
    total, count = sum(s.time for s, mine in zip(found, own, strict=True) if mine), sum(own)
    left, index = max(0, total - most), 0
    made: list[Sent] = []
    for sent, mine in zip(found, own, strict=True):
        if mine:
            made.append(replace(sent, time=left * (index + 1) // count - left * index // count))
            index += 1
        else:
            made.append(sent)
    return made


def counted(time: int) -> int:
    """Picoseconds that the solver can count to. Raises Excessive."""
    if time > LIMIT:
        raise Excessive
    return time


class Prices:
    """The prices of one bound program."""

    def __init__(self, bound: Bound, forms: Forms | None = None) -> None:
        self.bound = bound
        self.mesh = bound.mesh
        self.machine = bound.mesh.machine((0,))
        self.forms = forms or Forms(bound, Keeping(bound, least=bound.limit is not None))
        self.keeping = self.forms.keeping
        self.options: dict[object, Options] = {}
        self.nets: dict[object, NetForm] = {}
        self._chosen = chosen(bound)
        self._work: dict[object, tuple[int, int]] = {}
        self._ways: dict[tuple[object, ...], tuple[Mapping[tuple[int, int], Edge], Conversions]] = {}

    def nbytes(self, value: Value) -> int:
        """The full value's bytes."""
        return self.forms.nbytes(value)

    # -- conversions --------------------------------------------------------------------------------

    def ways(
        self, value: Value, kinds: Sequence[Sequence[Type]], asked: Sequence[Joint], restriction: Restriction
    ) -> Ways:
        """The conversions of a value among types of ``kinds``, by axis, to those of ``asked``."""
        joints = tuple(self.bound.joints(kinds))
        ids = {joint: index for index, joint in enumerate(joints)}
        runs: dict[object, int] = {}
        shape = tuple(
            tuple(
                (kind.kind, kind.stored, runs.setdefault(kind.over, len(runs)), self.mesh.ordered(joint, (index,)))
                for index, kind in enumerate(joint)
            )
            for joint in joints
        )
        wanted = tuple(ids[joint] for joint in asked)
        sums = self.forms.sums.likeness(value)
        key = (self.nbytes(value), sums, value.requires_grad, restriction, shape, wanted, self.likeness_of(value))
        known = self._ways.get(key)
        if known is None:
            edges: dict[tuple[int, int], Edge] = {}
            prices: dict[tuple[int, int], Cost] = {}
            for pair, alike in self._edges(joints, kinds, shape, gradient=value.requires_grad):
                source, edge = joints[pair[0]], Edge(alike.axes, joints[pair[1]], alike.conversion)
                if not self._allowed(source, edge, restriction):
                    continue
                price = self.price(value, edge, source, restriction)
                if pair not in prices or price < prices[pair]:
                    edges[pair], prices[pair] = edge, price
            known = self._ways[key] = edges, conversions(len(joints), prices, wanted)
        return Ways(joints, *known)

    def _edges(
        self, joints: Sequence[Joint], kinds: Sequence[Sequence[Type]], shape: object, *, gradient: bool
    ) -> list[tuple[tuple[int, int], Edge]]:
        """Every direct conversion among the types, by their indices; of values of one ``shape`` they are alike."""
        key = self.mesh.axes, shape, gradient
        if key not in self.forms.edges:
            ids = {joint: index for index, joint in enumerate(joints)}
            self.forms.edges[key] = [
                ((index, ids[edge.target]), edge)
                for joint, index in ids.items()
                for edge in self.mesh.edges(joint, kinds, gradient=gradient)
                if edge.target in ids
            ]
        return self.forms.edges[key]

    def likeness_of(self, value: Value) -> object:  # noqa: ARG002 - what subclasses look at
        """What the prices of a value's conversions depend on beside its bytes and types."""
        return None

    def states(self, value: Value) -> int:
        """What a parameter that is left to the solver holds between steps, in bytes of the whole; 0 for others."""
        return states(self.bound, value) if value in self._chosen else 0

    def table(self, value: Value, ways: Ways, made: tuple[int, ...], sets: Ints) -> Costs:  # noqa: ARG002
        """What conversions from each type made to each set cost: int64 [3, made, sets]."""
        return ways.least.table(made, sets)

    def price(self, value: Value, edge: Edge, source: Joint, restriction: Restriction) -> Cost:
        """The price of a conversion."""
        hook = restriction.hook
        sent = self.mesh.sent(edge, source, self.nbytes(value))
        machine = self.mesh.machine(edge.axes)
        actions = [edge.conversion.forward, edge.conversion.backward]
        if hook and source.replaced(edge.axes, R) == edge.target:
            actions = actions[:1]
        actions += [edge.conversion.forward] * self.again(edge, source, restriction)
        times = self.times(value, edge, source, sent, restriction)
        return counted(sum(times)), 0, sum(map(machine.launches, actions))

    @staticmethod
    def again(edge: Edge, source: Joint, restriction: Restriction) -> int:
        """How often what the conversion gathers is gathered again in the backward."""
        return restriction.again if source[edge.axes[0]].stored else 0

    def times(self, value: Value, edge: Edge, source: Joint, nbytes: int, restriction: Restriction) -> tuple[int, int]:
        """Picoseconds forward and backward. All hooks are one flat launch: only their bytes count."""
        hook, made = restriction.hook, edge.conversion
        forward, backward = (
            self.mesh.collective(edge.axes, action, self.forms.sums.sent(value, made.source, action, nbytes))
            for action in (made.forward, made.backward)
        )
        backward += forward * self.again(edge, source, restriction)
        if hook and edge.conversion.source is Kind.I:
            backward -= self.mesh.collective(edge.axes, made.backward, 0)
        return forward, backward

    # -- ops ----------------------------------------------------------------------------------------

    def likeness_of_op(self, node: Node) -> object:  # noqa: ARG002 - what subclasses look at
        """What the prices of an op's strategies depend on beside its form."""
        return None

    def op(self, node: Node, strategy: JointStrategy) -> tuple[Cost, tuple[int, int]]:
        """The price of an op with the collectives inside it, and of its work alone forward and backward."""
        work = self.work(node, strategy)
        inside = self.inside(node, strategy, work)
        sent = sum(s.time for s in inside)
        launches = sum(self.mesh.machine(s.axes).launches(s.collective.action) for s in inside)
        return (counted(sum(work) + sent), self.keeping.nbytes(node, strategy), launches), work

    def work(self, node: Node, strategy: JointStrategy) -> tuple[int, int]:
        """Picoseconds of an op's own work forward and backward."""
        return self.work_of(node, [self.dims(node, part) for part in strategy.parts])

    def dims(self, node: Node, strategy: Strategy) -> tuple[int, ...]:
        """The dim in which one axis cuts each operand and result that a rank works with, -1 where it does not."""
        sides = [*zip(node.operands, strategy.operands, strict=True), *zip(node.results, strategy.results, strict=True)]
        places = (self.bound.dims.locate(v, kind.over) if kind.over else None for v, kind in sides)  # type: ignore[arg-type]
        return tuple(-1 if p is None or i in strategy.met else p[0] for i, p in enumerate(places))

    def work_of(self, node: Node, cuts: Sequence[tuple[int, ...]]) -> tuple[int, int]:
        """The work where each axis cuts operands and results in these dims; alike ops are asked about once."""
        key = (self.forms.alike.of(node), *cuts)
        if key not in self._work:
            self._work[key] = self._work_of(node, cuts)
        return self._work[key]

    def _work_of(self, node: Node, cuts: Sequence[tuple[int, ...]]) -> tuple[int, int]:
        found = lookup(node)
        parts: list[dict[int, int]] = []  # of each operand and result, into how many blocks each dim is cut
        for position in range(len(node.operands) + len(node.results)):
            by_dim: dict[int, int] = {}
            for axis, dims in zip(self.mesh.axes, cuts, strict=True):
                if dims[position] >= 0:
                    by_dim[dims[position]] = by_dim.get(dims[position], 1) * axis.n
            parts.append(by_dim)
        sides = zip((*node.operands, *node.results), parts, strict=True)
        view = found is not None and found.view
        traffic = 0 if view else sum(self.nbytes(v) // prod(by_dim.values()) for v, by_dim in sides)
        flops = self._flops(node, parts)
        dtype = str(node.results[0].dtype).removeprefix("torch.") if node.results else "float32"
        forward, backward = self.machine.compute(flops, traffic, dtype), 0
        if any(v.requires_grad for v in node.results):
            grads = sum(v.requires_grad for v in node.operands) if flops else 1
            backward = self.machine.compute(flops * grads, traffic, dtype)
        return forward, backward

    def inside(self, node: Node, strategy: JointStrategy, work: tuple[int, int]) -> list[Sent]:
        """The launches inside an op whose own work takes so long forward and backward."""
        found: list[Sent] = []
        sums = self.forms.sums
        for axes in strategy.groups().values():
            n = self.mesh.ranks(axes)
            for one in strategy.parts[axes[0]].collectives:
                parts = 1 if one.like is None else self.mesh.parts(strategy.operands[one.like], axes)
                reduce = sums.inside(node, one)
                nbytes = sums.sent_inside(node, one, one.nbytes // parts)
                time = self.mesh.collective(axes, one.action, nbytes)
                found += [Sent(axes, one, nbytes, time, reduce)] * one.times(n)
            for phase, own in zip(("forward", "backward"), work, strict=True):
                found = _behind(found, axes, phase, own * (n - 1) // n)
        return found

    def _flops(self, node: Node, parts: Sequence[Mapping[int, int]]) -> int:
        found = lookup(node)
        signature = found.signature(node) if found and found.flops else None
        if not found or not found.flops or not isinstance(signature, Signature):
            return 0
        extent: dict[str, int] = {}
        for value, dims, cuts in zip(node.operands, signature.operands, parts, strict=False):
            for index, (dim, size) in enumerate(zip(dims, value.shape, strict=True)):
                for letter in dim:
                    whole = evaluate(signature.sizes.get(letter, size), self.bound.hints)
                    extent[letter] = min(extent.get(letter, whole), whole // cuts.get(index, 1))
        return found.flops(extent)

    def _allowed(self, source: Joint, edge: Edge, restriction: Restriction) -> bool:
        kinds = edge.conversion.source, edge.conversion.target
        if not restriction.hook:
            return kinds[0] is not Kind.S or not any(restriction.sealed[axis] for axis in edge.axes)
        if kinds == (Kind.I, Kind.R):
            # A hook comes first, also before blocks are gathered: one reduction over all the axes that need it. On an
            # axis of stored blocks there is none: R does it.
            blocks = [axis for axis, stored in enumerate(restriction.stored) if stored and not restriction.chosen]
            first = all(source[axis].stored for axis in blocks) and not any(axis in edge.axes for axis in blocks)
            return first and R not in source and P not in source
        # A parameter is used as it is placed. Where it may be whole too, blocks are not gathered to what a hook sums.
        gathered = all(source[axis].stored for axis in edge.axes)
        gathered = gathered and (kinds[1] is Kind.R if restriction.chosen else kinds[1] is not Kind.P)
        return Kind.S not in kinds or gathered
