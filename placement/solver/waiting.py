"""How the collectives beside linear layers are cut, as lines say or by price, and how much of them is waited for.

A collective of time c = latency + volume / bandwidth, beside products that take w, on n ranks. In one piece it runs
behind what does not need it. A ring has n products and n - 1 hops between them, each behind one product; a pipeline of
k chunks has k of both, each collective behind the product before or after it. So of w + c there pass

    ring:   p + (n - 1) max(p, hop)        p: a product of w / n,   hop = latency + volume / (n - 1) / bandwidth
    chunks: t + (k - 1) max(t, p) + p      p: a product of w / k,   t = latency + volume / k / bandwidth

A product of a part of the rows takes its part of the time, but never less than to read the weights, or to add to their
gradients, nor than a host takes to launch it with what travels beside it. Sums of blocks in a ring, and copies of rows
that chunks take from between others, are counted as traffic.

Where no line says it, what is waited for decides, forward and backward together: one piece, a ring or chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from placement.graph.ir import Node, Value, evaluate
from placement.lang.spec import CHUNKS
from placement.solver.layers import innermost
from placement.solver.overlap import ASYNC, NONE, RING, chunks, cuts
from placement.types import Action, Joint

if TYPE_CHECKING:
    from placement.rules import JointStrategy
    from placement.solver.bind import Bound
    from placement.solver.plan import Plan, Step

LAUNCH = 50_000_000
"""Picoseconds of a host for one piece: its products, and what travels beside them. On a CPU core it takes 40 to 60 us,
autograd and Python included, as the time of a ring over that in one piece says in a group that sends nothing."""

_ONE_PIECE = (ASYNC, NONE)
_BY_PRICE = (ASYNC, RING, f"chunks({CHUNKS})")  # of equals the first
_Strategies = Mapping[Node, "JointStrategy"]
_Work = Mapping[Node, tuple[int, int]]


def with_overlap(steps: Sequence[Step], bound: Bound, strategies: _Strategies, work: _Work) -> list[Step]:
    """The steps, those beside layers cut as ``lower`` lines say of the modules that these are in, or by price.

    work: picoseconds of each op forward and backward.
    """
    said, waiting = bound.said("overlap"), Waiting(bound, strategies, work)
    found: list[Step] = []
    for step in steps:
        module = innermost(step.beside[0], said) if step.beside else None
        if module is not None:
            overlap = f"chunks({CHUNKS})" if said[module] == "chunks" else said[module]
            found.append(_cut(step, bound, overlap))
        else:
            found.append(_by_price(step, waiting))
    return found


def _cut(step: Step, bound: Bound, overlap: str) -> Step:
    """The step with its collectives cut so, in one piece where they cannot be."""
    if _whole_sum(step):  # every rank gets all of it: there is no ring of blocks
        overlap = ASYNC if overlap == RING else overlap
        shape = bound.mesh.shape(bound.dims, step.value, step.source.type, step.value.shape)[:-1]
        return dataclasses.replace(step, overlap=overlap, rows=prod(evaluate(size, bound.hints) for size in shape))
    joint = step.target.type if step.conversion.forward is Action.REDUCE_SCATTER else step.source.type
    place = bound.mesh.place(bound.dims, step.value, joint, step.axes)
    trained = any(node.operands[1].requires_grad for node in step.layers)
    if cuts(overlap) and trained and step.conversion.forward is Action.ALL_GATHER and not step.again:
        return step  # what is to be kept is gathered in one piece
    features = place.dim == len(step.value.shape) - 1
    if features or not place.whole:  # products take whole rows; blocks that lie in several places travel in one piece
        return step if cuts(overlap) else dataclasses.replace(step, overlap=overlap)
    shape = bound.mesh.shape(bound.dims, step.value, joint, step.value.shape)
    return dataclasses.replace(step, overlap=overlap, rows=evaluate(shape[place.dim], bound.hints))


def _by_price(step: Step, waiting: Waiting) -> Step:
    """The step cut so that least is waited for.

    Pieces keep what a backward of everything needs, so layers with frozen weights stay in one.
    """
    bound = waiting.bound
    device, n = bound.mesh.device, bound.mesh.ranks(step.axes)
    trained = all(value.requires_grad for node in step.beside for value in node.operands)
    if not step.beside or n == 1 or not device.apart or not trained:
        return step
    ways = (_cut(step, bound, overlap) for overlap in _BY_PRICE)
    best = min(ways, key=lambda way: sum(waiting.exposed(way, way.overlap)))
    return dataclasses.replace(best, priced=True) if cuts(best.overlap) else step


def exposed(plan: Plan, step: Step, overlap: str) -> tuple[int, int]:
    """Picoseconds forward and backward that a rank waits for the step's communication; what hides is not counted.

    overlap: ``none``, ``async``, ``ring`` or ``chunks(k)``; of a step without linear layers everything is waited for.
    """
    return Waiting(plan.bound, plan.strategies, plan.work).exposed(step, overlap)


def _whole_sum(step: Step) -> bool:
    """Whether every rank gets the whole of what is summed."""
    return Action.ALL_REDUCE in (step.conversion.forward, step.conversion.backward)


@dataclasses.dataclass(frozen=True)
class Waiting:
    """What is waited for in a program whose ops run by ``strategies`` and take ``work``, forward and backward."""

    bound: Bound
    strategies: _Strategies
    work: _Work

    def exposed(self, step: Step, overlap: str) -> tuple[int, int]:
        """As the function of that name."""
        forward, backward = step.times
        if not step.beside:
            return forward, backward
        if overlap == RING and _whole_sum(step):
            overlap = ASYNC
        ahead = sum(self.work[node][0] for node in step.beside)
        both = sum(self.work[node][1] for node in step.beside)  # of the input's gradient, and of the weights'
        cost = _Costs(self, step, overlap)
        there, back = step.conversion.forward, step.conversion.backward
        if step.product is not None:
            return cost.waited(there, forward, ahead), cost.waited(back, backward, both, weighs=2)
        again = forward * step.again
        if overlap in _ONE_PIECE:
            behind = both // 2 if overlap == ASYNC else 0
            return forward, max(0, again - behind) + max(0, backward - behind)
        left = cost.waited(back, backward, both // 2)
        if not step.again:  # the weights' gradients need nothing that travels
            return cost.waited(there, forward, ahead), max(0, left - both // 2)
        return cost.waited(there, forward, ahead), left + cost.waited(there, again, both // 2, weighs=2)


@dataclasses.dataclass(frozen=True)
class _Costs:
    """What a step's collectives cost in pieces."""

    waiting: Waiting
    step: Step
    overlap: str

    def waited(self, action: Action, time: int, work: int, weighs: int = 1) -> int:
        """Of a collective of ``time`` beside products that take ``work``.

        weighs: how often a product passes over the bytes of the weights, 2 where it adds to their gradients.
        """
        count = chunks(self.overlap)
        if not time or not action.communicates or not (count or self.overlap == RING):
            return time
        mesh = self.waiting.bound.mesh
        n, latency = mesh.ranks(self.step.axes), mesh.collective(self.step.axes, action, 0)
        least = max(LAUNCH, self._traffic(weighs * self._weights))
        sums = action in (Action.REDUCE_SCATTER, Action.ALL_REDUCE)
        if count:
            joined = self._traffic(2 * self.step.nbytes // (1 if action is Action.ALL_REDUCE else n)) if sums else 0
            copied = 0 if _whole_sum(self.step) else self._traffic(2 * self._rows)
            piece, sent = max(least, (work + copied) // count), latency + (time - latency) // count
            return sent + (count - 1) * max(sent, piece) + piece + joined - work
        piece = max(least, work // n) + (self._traffic(3 * self.step.nbytes // n) if sums else 0)
        hop = latency + (time - latency) // (n - 1)
        return piece + (n - 1) * max(hop, piece) - work

    @cached_property
    def _weights(self) -> int:
        """The bytes of the layers' weights on a rank."""
        return sum(self._held(n.operands[1], self.waiting.strategies[n].operands[1]) for n in self.step.beside)

    @cached_property
    def _rows(self) -> int:
        """The bytes of what the products have on the side that is not sent."""
        strategies = self.waiting.strategies
        if self.step.product is not None:
            return self._held(self.step.product.operands[0], strategies[self.step.product].operands[0])
        return sum(self._held(node.results[0], strategies[node].results[0]) for node in self.step.layers)

    def _held(self, value: Value, joint: Joint) -> int:
        count = prod(evaluate(size, self.waiting.bound.hints) for size in value.shape)
        return count * value.dtype.itemsize // self.waiting.bound.mesh.parts(joint)

    def _traffic(self, nbytes: int) -> int:
        return self.waiting.bound.mesh.machine(self.step.axes).compute(0, nbytes, "float32")
