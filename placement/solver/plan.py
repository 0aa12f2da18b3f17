"""The solved program: a type for every value, a strategy for every op, and every conversion with its cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from placement.graph.ir import Graph, Node, Output, Parameter, Value, evaluate
from placement.rules import JointStrategy
from placement.solver.bind import Bound
from placement.solver.mesh import Axes, Mesh
from placement.solver.overlap import ASYNC, pieces
from placement.solver.pricing import Sent
from placement.solver.sums import SUMS, Bucket, buckets
from placement.types import Action, Conversion, Joint, Kind


@dataclass(frozen=True, slots=True)
class Version:
    """A value in one type. ``stage`` is 1 after a ``value`` line converted it where it is produced, else 0."""

    value: Value
    type: Joint
    stage: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A conversion of one version of a value into another.

    axis: the name of ``axes``, of several ``dp_tp``. nbytes: of the value as the other axes leave it. consumers: the
    ops and outputs that use the target directly or by further steps. cause: ``file:line`` of the statements it follows
    from. times: picoseconds forward and backward. again: how often what is gathered is gathered once more in the
    backward. layers: linear layers, all that take the target, which run as one function with the conversion. product:
    the linear layer whose terms it sums, if nothing else takes these: it runs as one function with the conversion as
    well. reduce: the dtype of its sums where a line says it; summed: bytes in the dtype that they are done in. overlap:
    how the collectives beside layers are cut; priced: since that is cheapest, where no line says it; rows: of a block,
    or where none is cut of the whole, what chunks divide.
    """

    source: Version
    target: Version
    axis: str
    axes: Axes
    conversion: Conversion
    nbytes: int
    consumers: tuple[Node | Output, ...]
    cause: tuple[str, ...]
    times: tuple[int, int] = (0, 0)
    again: int = 0
    layers: tuple[Node, ...] = ()
    product: Node | None = None
    reduce: torch.dtype | None = None
    summed: int = 0
    overlap: str = ASYNC
    rows: int = 0
    priced: bool = False

    def launches(self, n: int) -> tuple[tuple[str, Action, int, bool], ...]:
        """(phase, action, bytes, whether it counts as hidden) of what ``n`` ranks launch."""
        actions = [("forward", self.conversion.forward, False), ("backward", self.conversion.backward, False)]
        actions += [("backward", self.conversion.forward, bool(self.layers))] * self.again
        return tuple(
            (phase, piece, nbytes, hidden)
            for phase, action, hidden in actions
            if action.communicates and n > 1
            for piece, nbytes in pieces(action, n, self.overlap, self.rows, self.sent(action))
        )

    def sent(self, action: Action) -> int:
        """The bytes that one of its actions counts."""
        return self.summed if action in SUMS else self.nbytes

    @property
    def beside(self) -> tuple[Node, ...]:
        """The linear layers that run as one function with it."""
        return self.layers or (() if self.product is None else (self.product,))

    @property
    def value(self) -> Value:
        """The value converted."""
        return self.source.value

    @property
    def sums_gradient(self) -> bool:
        """Whether it is I → R: of a parameter, what its hook does."""
        return self.conversion.source is Kind.I and self.conversion.target is Kind.R


@dataclass(frozen=True, slots=True, eq=False)
class Hook:
    """A parameter used replicated: its gradient is summed over the axes, together.

    nbytes: in the dtype that the sum is done in. reduce: that dtype where a line says it.
    """

    parameter: Parameter
    axis: str
    axes: Axes
    nbytes: int
    cause: tuple[str, ...] = ()
    reduce: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """One collective of a step of training, wherever it comes from.

    hidden: whether it is counted as taking no time, since it runs behind arithmetic that does not need it.
    """

    axis: str
    phase: str
    action: Action
    nbytes: int
    hidden: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The program that ``emit`` writes and ``report`` explains."""

    as_html: ClassVar[Callable[[Plan], str] | None] = None
    """What a notebook shows a plan as: given by ``report``, which this room does not know."""

    bound: Bound
    strategies: Mapping[Node, JointStrategy]
    produced: Mapping[Value, Joint]
    uses: Mapping[tuple[Node | Output, int], Version]
    steps: tuple[Step, ...]
    hooks: tuple[Hook, ...]
    inside: Mapping[Node, tuple[Sent, ...]]  # the launches inside ops
    cost: tuple[int, int, int]
    lower_bound: tuple[int, int, int]
    compute: int  # picoseconds of the cost that is work, not communication
    saved: int  # bytes kept for the backward on one rank, as the solver counts them; `memory` has the exact number
    work: Mapping[Node, tuple[int, int]]  # picoseconds of each op's own work, forward and backward: ``compute`` in all
    stages: Mapping[str, float] = field(default_factory=dict)  # seconds by stage

    @property
    def graph(self) -> Graph:
        """The global program."""
        return self.bound.graph

    @property
    def mesh(self) -> Mesh:
        """The mesh axes."""
        return self.bound.mesh

    def launches(self) -> tuple[Launch, ...]:
        """Every collective of one step: conversions, those inside ops, and the hooks' flat reductions."""
        found: list[Launch] = []
        hooked = {hook.parameter.value for hook in self.hooks}
        for step in self.steps:
            if not (step.value in hooked and step.sums_gradient):
                found += [Launch(step.axis, *launch) for launch in step.launches(self.mesh.ranks(step.axes))]
        inside = [
            one for node in self.graph.nodes for one in self.inside.get(node, ()) if self.mesh.ranks(one.axes) > 1
        ]
        found += [Launch(self.mesh.name(s.axes), s.collective.phase, s.collective.action, s.nbytes) for s in inside]
        flat = [bucket for bucket in self.buckets() if self.mesh.ranks(bucket.axes) > 1]
        found += [Launch(bucket.axis, "backward", Action.ALL_REDUCE, bucket.nbytes) for bucket in flat]
        return tuple(found)

    def buckets(self) -> tuple[Bucket, ...]:
        """The hooks that are reduced at once, in the order in which they are."""
        order: dict[Node | Output, int] = {node: index for index, node in enumerate(self.graph.nodes)}
        uses = {(step.value, step.axes): step.consumers for step in self.steps if step.sums_gradient}
        last = len(order)
        first_use = {
            hook: min((order.get(user, last) for user in uses[hook.parameter.value, hook.axes]), default=last)
            for hook in self.hooks
        }
        return buckets(self.hooks, first_use)

    def nbytes(self, value: Value) -> int:
        """The full value's bytes at the example's sizes."""
        count = value.dtype.itemsize
        for size in value.shape:
            count *= evaluate(size, self.bound.hints)
        return count

    def _repr_html_(self) -> str | None:
        """HTML for a notebook; None, so that it shows the text, where no report is loaded."""
        return None if Plan.as_html is None else Plan.as_html(self)

    def verify(self) -> None:
        """Raise ValueError unless every use is given by the producer or by a step, and every type follows the rules."""
        have = {Version(v, t) for v, t in self.produced.items()}
        for step in self.steps:
            if step.source not in have:
                raise ValueError(f"{step.source} is converted before it exists")
            have.add(step.target)
        for (user, position), version in self.uses.items():
            if version not in have:
                raise ValueError(f"{user} uses {version}, which nothing makes")
            if isinstance(user, Node) and self.strategies[user].operands[position] != version.type:
                raise ValueError(
                    f"{user.name} takes {self.strategies[user].operands[position]} and is given {version.type}"
                )
        for node, strategy in self.strategies.items():
            for value, kind in zip(node.results, strategy.results, strict=True):
                if self.produced[value] != kind:
                    raise ValueError(f"{node.name} gives {kind} and {value} is {self.produced[value]}")
