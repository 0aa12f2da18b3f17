"""What a plan holds in memory: on one rank of its mesh, and what the same step holds on one device.

``docs/memory.md`` says what each figure means. What ops keep is in ``rules/saved.py``; ``storages`` follows tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from placement.graph.ir import Node, Value, numel
from placement.rules import JointStrategy
from placement.solver.bind import Bound
from placement.solver.fusion import fused
from placement.solver.plan import Plan, Step, Version
from placement.solver.states import ADAM_STATES, chosen, states
from placement.solver.storages import Layout, OneDevice, Saved, Walk, block_strides
from placement.types import Action, Joint, R


@dataclass(frozen=True, slots=True, eq=False)
class Usage:
    """Bytes on one rank. optimizer: AdamW's moments. saved: what the backward keeps, in program order."""

    parameters: int
    gradients: int
    optimizer: int
    saved: tuple[Saved, ...]

    @property
    def saved_bytes(self) -> int:
        """Bytes kept from forward for backward."""
        return sum(item.nbytes for item in self.saved)

    @property
    def states(self) -> int:
        """Bytes that are held between steps, whatever the batch: parameters, gradients, optimizer."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """The sum of all: where a backward begins while gradients of one before are held. Buffers are left out."""
        return self.states + self.saved_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """The use of one rank, and of one device that runs the model as it is."""

    rank: Usage
    one_device: Usage


def memory(plan: Plan) -> Memory:
    """What ``plan`` holds, with sizes as they are priced."""
    one = OneDevice(plan.bound)
    whole = dict.fromkeys(plan.produced, one.whole)
    return Memory(_usage(plan.bound, plan.produced, saved(plan)), _usage(plan.bound, whole, one.saved()))


def pinned_states(bound: Bound) -> int:
    """Bytes of parameters, gradients and optimizer on one rank, of what the spec places."""
    left = chosen(bound)
    placed = {value: Joint((kinds or (R,))[0] for kinds in pin.kinds) for value, pin in bound.parameters.items()}
    owned = [p.value for p in bound.graph.parameters if not p.is_buffer and p.value not in left]
    return sum(states(bound, value) // bound.mesh.parts(placed[value]) for value in owned)


def _usage(bound: Bound, kinds: Mapping[Value, Joint], kept_storages: tuple[Saved, ...]) -> Usage:
    owned = [p.value for p in bound.graph.parameters if not p.is_buffer]
    sizes = {v: numel(v.shape, bound.hints) * v.dtype.itemsize // bound.mesh.parts(kinds[v]) for v in owned}
    trained = sum(size for value, size in sizes.items() if value.requires_grad)
    return Usage(sum(sizes.values()), trained, ADAM_STATES * trained, kept_storages)


def saved(plan: Plan) -> tuple[Saved, ...]:
    """What one rank keeps for the backward; of the ranks that differ, the one that keeps most."""
    return _OneRank(fused(plan)).saved()


class _OneRank(Walk):
    """One rank of a plan: values at their types, and conversions in between."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.bound)
        self.plan = plan
        self.instead: dict[int, int] = {}
        self.layouts: dict[Version, Layout] = {}
        self.steps: dict[Value, list[Step]] = {}
        for step in plan.steps:
            self.steps.setdefault(step.value, []).append(step)
        self.run()

    def _taken(self, node: Node) -> list[Layout]:
        return [self.layouts[self.plan.uses[node, position]] for position in range(len(node.operands))]

    def _made(self, value: Value, layout: Layout) -> None:
        self.layouts[Version(value, self.plan.produced[value])] = layout
        for step in self.steps.get(value, ()):
            self.layouts[step.target] = self._converted(step, self.layouts[step.source])

    def _strategy(self, node: Node) -> JointStrategy | None:
        return self.plan.strategies[node]

    def _kind(self, value: Value) -> Joint:
        return self.plan.produced[value]

    def _stands_for(self, storage: int) -> int:
        return self.instead.get(storage, storage)

    def _converted(self, step: Step, layout: Layout) -> Layout:
        """What the runtime's conversion gives: the tensor itself where nothing happens, else one of its own."""
        action = step.conversion.forward
        mesh = self.bound.mesh
        n = mesh.ranks(step.axes)
        if action is Action.NONE or n == 1:
            return layout
        kind = step.target.type
        if action is Action.SPLIT:
            at = mesh.place(self.bound.dims, step.value, kind, step.axes)
            strides = None if at.segments or at.zigzag else block_strides(layout, at.dim, self.alike.size(at.outer), n)
            if strides is not None:
                return Layout(layout.storage, self.shape(step.value, kind), strides)
        made = self.fresh(step.value, kind)
        if step.again:  # of what is gathered again the own block is kept
            self.instead[made.storage] = self._stands_for(layout.storage)
        if layout.storage in self.heap.exempt:
            self.heap.exempt.add(made.storage)
        return made
