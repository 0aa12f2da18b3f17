"""What ops and conversions cost on a mesh: picoseconds, bytes kept for the backward, launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

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
    """A launch inside an op: ``nbytes`` as the axes that do not take part leave them."""

    axes: Axes
    collective: Collective
    nbytes: int


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
            tuple((kind.kind, kind.stored, runs.setdefault(kind.over, len(runs))) for kind in joint) for joint in joints
        )
        wanted = tuple(ids[joint] for joint in asked)
        key = (self.nbytes(value), value.requires_grad, restriction, shape, wanted, self.likeness_of(value))
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
        return counted(sum(self.times(edge, source, sent, restriction))), 0, sum(map(machine.launches, actions))

    @staticmethod
    def again(edge: Edge, source: Joint, restriction: Restriction) -> int:
        """How often what the conversion gathers is gathered again in the backward."""
        return restriction.again if source[edge.axes[0]].stored else 0

    def times(self, edge: Edge, source: Joint, nbytes: int, restriction: Restriction) -> tuple[int, int]:
        """Picoseconds forward and backward. All hooks are one flat launch: only their bytes count."""
        hook = restriction.hook
        forward, backward = self.mesh.times(edge, nbytes)
        backward += forward * self.again(edge, source, restriction)
        if hook and edge.conversion.source is Kind.I:
            backward -= self.mesh.times(edge, 0)[1]
        return forward, backward

    # -- ops ----------------------------------------------------------------------------------------

    def likeness_of_op(self, node: Node) -> object:  # noqa: ARG002 - what subclasses look at
        """What the prices of an op's strategies depend on beside its form."""
        return None

    def op(self, node: Node, strategy: JointStrategy) -> tuple[Cost, tuple[int, int]]:
        """The price of an op with the collectives inside it, and of its work alone forward and backward."""
        work = self.work(node, strategy)
        inside = self.inside(strategy)
        sent = sum(self.mesh.machine(s.axes).collective(s.collective.action, s.nbytes) for s in inside)
        launches = sum(self.mesh.machine(s.axes).launches(s.collective.action) for s in inside)
        return (counted(sum(work) + sent), self.keeping.nbytes(node, strategy), launches), work

    def work(self, node: Node, strategy: JointStrategy) -> tuple[int, int]:
        """Picoseconds of an op's own work forward and backward."""
        return self.work_of(node, [self.dims(node, part) for part in strategy.parts])

    def dims(self, node: Node, strategy: Strategy) -> tuple[int, ...]:
        """The dim in which one axis cuts each operand and result, -1 where it does not."""
        sides = [*zip(node.operands, strategy.operands, strict=True), *zip(node.results, strategy.results, strict=True)]
        places = (self.bound.dims.locate(v, kind.over) if kind.over else None for v, kind in sides)  # type: ignore[arg-type]
        return tuple(-1 if place is None else place[0] for place in places)

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

    def inside(self, strategy: JointStrategy) -> list[Sent]:
        """The launches inside an op."""
        found: list[Sent] = []
        for axes in strategy.groups().values():
            for one in strategy.parts[axes[0]].collectives:
                parts = 1 if one.like is None else self.mesh.parts(strategy.operands[one.like], axes)
                found.append(Sent(axes, one, one.nbytes // parts))
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
