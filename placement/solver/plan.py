"""The solved program: a type for every value, a strategy for every op, and every conversion with its cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from placement.graph.ir import Graph, Node, Output, Parameter, Value, evaluate
from placement.rules import Collective, Strategy
from placement.solver.bind import Axis, Bound
from placement.types import Action, Conversion, Type


@dataclass(frozen=True, slots=True)
class Version:
    """A value in one type. ``stage`` is 1 after a ``value`` line converted it where it is produced, else 0."""

    value: Value
    type: Type
    stage: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A conversion of one version of a value into another.

    nbytes: the full value's bytes. consumers: the ops and outputs that use the target directly or by
    further steps. cause: ``file:line`` of the statements it follows from. times: picoseconds forward and backward.
    """

    source: Version
    target: Version
    axis: str
    conversion: Conversion
    nbytes: int
    consumers: tuple[Node | Output, ...]
    cause: tuple[str, ...]
    times: tuple[int, int] = (0, 0)

    @property
    def value(self) -> Value:
        """The value converted."""
        return self.source.value


@dataclass(frozen=True, slots=True, eq=False)
class Hook:
    """A parameter used replicated: its gradient is summed over the axis."""

    parameter: Parameter
    axis: str
    nbytes: int
    cause: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """One collective of a step of training, wherever it comes from."""

    axis: str
    phase: str
    action: Action
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The program that ``emit`` writes and ``report`` explains."""

    as_html: ClassVar[Callable[[Plan], str] | None] = None
    """What a notebook shows a plan as: given by ``report``, which this room does not know."""

    bound: Bound
    strategies: Mapping[Node, Strategy]
    produced: Mapping[Value, Type]
    uses: Mapping[tuple[Node | Output, int], Version]
    steps: tuple[Step, ...]
    hooks: tuple[Hook, ...]
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
    def axis(self) -> Axis:
        """The mesh axis."""
        return self.bound.axis

    def implementations(self) -> tuple[tuple[Node, Collective], ...]:
        """The collectives inside ops, in program order."""
        return tuple((node, c) for node in self.graph.nodes for c in self.strategies[node].collectives)

    def launches(self) -> tuple[Launch, ...]:
        """Every collective of one step: conversions, those inside ops, and the hooks' flat reductions."""
        found = []
        for step in self.steps:
            for phase, action in (("forward", step.conversion.forward), ("backward", step.conversion.backward)):
                if action.communicates and not self._is_hook(step):
                    found.append(Launch(step.axis, phase, action, step.nbytes))
        found += [Launch(self.axis.name, c.phase, c.action, c.nbytes) for _, c in self.implementations()]
        flat: dict[object, int] = {}
        for hook in self.hooks:
            dtype = hook.parameter.value.dtype
            flat[dtype] = flat.get(dtype, 0) + hook.nbytes
        found += [Launch(self.axis.name, "backward", Action.ALL_REDUCE, n) for n in flat.values()]
        return tuple(found) if self.axis.n > 1 else ()

    def _is_hook(self, step: Step) -> bool:
        return (
            any(step.value is hook.parameter.value for hook in self.hooks)
            and step.conversion.backward is Action.ALL_REDUCE
        )

    def nbytes(self, value: Value) -> int:
        """The full value's bytes at the example's sizes."""
        count = value.dtype.itemsize
        for size in value.shape:
            count *= evaluate(size, self.bound.context.hints)
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
