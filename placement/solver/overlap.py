"""How much of a collective beside linear layers is waited for, by the way that it is cut.

A collective of time c = latency + volume / bandwidth, beside products that take w, on n ranks. In one piece it runs
behind what does not need it. A ring has n products of w / n and n - 1 hops between them, each behind one product; a
pipeline of k chunks has k of both, each collective behind the product before or after it. So of w + c there pass

    ring:   w/n + (n - 1) max(w/n, hop)          hop = latency + volume / (n - 1) / bandwidth
    chunks: t + (k - 1) max(t, w/k) + w/k        t = latency + volume / k / bandwidth

Arithmetic is taken to be as fast in pieces as in one, which on small tensors it is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from placement.graph.ir import evaluate
from placement.lang.spec import CHUNKS
from placement.solver.layers import innermost
from placement.types import Action

if TYPE_CHECKING:
    from placement.solver.bind import Bound
    from placement.solver.plan import Plan, Step

NONE, ASYNC, RING = "none", "async", "ring"


def chunks(overlap: str) -> int:
    """How many chunks ``chunks(4)`` has; 0 of what is no such thing."""
    return int(overlap[len("chunks(") : -1]) if overlap.startswith("chunks(") else 0


def cuts(overlap: str) -> bool:
    """Whether collectives are cut in pieces."""
    return overlap == RING or chunks(overlap) > 0


def sizes(rows: int, count: int) -> list[int]:
    """The rows of each of ``count`` chunks, as ``runtime.overlap`` makes them."""
    count = max(1, min(rows, count))
    least, more = divmod(rows, count)
    return [least + (index < more) for index in range(count)]


def pieces(action: Action, n: int, overlap: str, rows: int, nbytes: int) -> list[tuple[Action, int]]:
    """What is launched in place of an action of ``nbytes`` on ``n`` ranks, each with its bytes."""
    if overlap == RING:
        return [(Action.SEND_RECV, nbytes)] * (n - 1)
    if count := chunks(overlap):
        return [(action, nbytes * size // rows) for size in sizes(rows, count)]
    return [(action, nbytes)]


def with_overlap(steps: Sequence[Step], bound: Bound) -> list[Step]:
    """The steps, those beside layers with what ``lower`` lines say of the modules that these are in."""
    said = bound.said("overlap")
    return [_lowered(step, bound, said) for step in steps] if said else list(steps)


def _lowered(step: Step, bound: Bound, said: Mapping[str, str]) -> Step:
    if not step.beside:
        return step
    module = innermost(step.beside[0], said)
    overlap = ASYNC if module is None else said[module]
    overlap = f"chunks({CHUNKS})" if overlap == "chunks" else overlap
    actions = {step.conversion.forward, step.conversion.backward}
    if Action.ALL_REDUCE in actions:  # every rank gets the whole sum: there is no ring of blocks
        overlap = ASYNC if overlap == RING else overlap
        shape = bound.mesh.shape(bound.dims, step.value, step.source.type, step.value.shape)[:-1]
        return dataclasses.replace(step, overlap=overlap, rows=prod(evaluate(size, bound.hints) for size in shape))
    joint = step.target.type if step.conversion.forward is Action.REDUCE_SCATTER else step.source.type
    place = bound.mesh.place(bound.dims, step.value, joint, step.axes)
    trained = any(node.operands[1].requires_grad for node in step.layers)
    if cuts(overlap) and trained and step.conversion.forward is Action.ALL_GATHER and not step.again:
        return step  # what is to be kept is gathered in one piece
    if not place.whole:  # blocks that lie in several places travel in one piece
        return step if cuts(overlap) else dataclasses.replace(step, overlap=overlap)
    shape = bound.mesh.shape(bound.dims, step.value, joint, step.value.shape)
    return dataclasses.replace(step, overlap=overlap, rows=evaluate(shape[place.dim], bound.hints))


def exposed(plan: Plan, step: Step, overlap: str) -> tuple[int, int]:
    """Picoseconds forward and backward that a rank waits for the step's communication; what hides is not counted.

    overlap: ``none``, ``async``, ``ring`` or ``chunks(k)``; of a step without linear layers everything is waited for.
    """
    forward, backward = step.times
    if not step.beside:
        return forward, backward
    if overlap == RING and Action.ALL_REDUCE in (step.conversion.forward, step.conversion.backward):
        overlap = ASYNC
    work = sum(plan.work[node][0] for node in step.beside)
    both = sum(plan.work[node][1] for node in step.beside)  # of the input's gradient, and of the weights'
    cost = _Costs(plan, step, overlap)
    there, back = step.conversion.forward, step.conversion.backward
    if step.product is not None:
        return cost.waited(there, forward, work), cost.waited(back, backward, both)
    again = forward * step.again
    if overlap in (NONE, ASYNC):
        behind = both // 2 if overlap == ASYNC else 0
        return forward, max(0, again - behind) + max(0, backward - behind)
    left = cost.waited(back, backward, both // 2)
    if not step.again:  # the weights' gradients need nothing that travels
        return cost.waited(there, forward, work), max(0, left - both // 2)
    return cost.waited(there, forward, work), left + cost.waited(there, again, both // 2)


class _Costs:
    """What a step's collectives cost in pieces."""

    def __init__(self, plan: Plan, step: Step, overlap: str) -> None:
        self.n = plan.mesh.ranks(step.axes)
        self.overlap = overlap
        self.latency = lambda action: plan.mesh.collective(step.axes, action, 0)

    def waited(self, action: Action, time: int, work: int) -> int:
        """Of a collective of ``time`` beside products that take ``work``."""
        count = chunks(self.overlap)
        if not time or not action.communicates or not (count or self.overlap == RING):
            return time
        latency = self.latency(action)
        if count:
            piece = latency + (time - latency) // count
            return piece + (count - 1) * max(piece, work // count) + work // count - work
        hop = latency + (time - latency) // (self.n - 1)
        return (self.n - 1) * max(0, hop - work // self.n)
