"""Which candidates to propose: each is planned, and kept where the plan costs less than without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from placement.graph.factors import Factors
from placement.graph.ir import Node, Output, Value, evaluate
from placement.graph.signature import Signature
from placement.propose.cuts import Cut, Group, bytes_of, cuts, placeable, wild
from placement.rules import lookup
from placement.solver.bind import Bound, Pin
from placement.solver.build import price
from placement.types import S

_NOTICEABLE = 1000  # a line is worth writing where it saves at least this fraction of the step
_HEAVY = 20  # cut for memory: at least this fraction of the parameters' bytes,
_CHEAP = 20  # all of it for at most this fraction of the step, and never for more than replication takes
_LARGE = 1500  # ops from which on the price of each single line is left out: a plan takes seconds there

Cost = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Held:
    """A module whose output is to be cut because its weight cannot be, over the dim of this name."""

    wild: str
    modules: tuple[str, ...]
    dim: str
    pins: Mapping[Value, Pin]
    saved: int = 0


@dataclass(frozen=True, slots=True)
class Kept:
    """An output that stays as it is made, and the picoseconds that this saves."""

    name: str
    saved: int


class Search:
    """The lines worth proposing on top of ``bound``, in which nothing is placed; one plan per candidate.

    Prices are picoseconds of a step. replicated: with nothing placed. cost: with the whole proposal.
    """

    def __init__(self, bound: Bound) -> None:
        free = _own_outputs(bound)
        self._whole = bound
        self._base = dataclasses.replace(bound, outputs={**bound.outputs, **dict.fromkeys(free)})
        self._start = _needed(price(self._base))
        self._candidates = cuts(self._base)
        self.replicated = _needed(price(bound))[0]
        self.cuts, cost = self._parameters()
        self.values, cost = self._modules(cost)
        self.outputs = tuple(self._outputs(free, cost[0]))
        self.cost = cost[0]

    def left_out(self, groups: Iterable[Group]) -> int | None:
        """How much longer a step takes with these groups replicated; None where there is no plan or too little time."""
        if len(self._base.graph.nodes) > _LARGE:
            return None
        gone = tuple(groups)
        without = price(self._with([cut.without(gone) for cut in self.cuts], self.values))
        return None if without is None else without[0] - self.cost

    def _noticeable(self, saved: int) -> bool:
        return saved > 0 and saved * _NOTICEABLE >= self._start[0]

    def _with(self, accepted: Iterable[Cut], values: Iterable[Held] = ()) -> Bound:
        parameters = {value: pin for cut in accepted for value, pin in cut.pins.items()}
        placed = {value: pin for held in values for value, pin in held.pins.items()}
        base = self._base
        return dataclasses.replace(base, parameters={**base.parameters, **parameters}, values={**base.values, **placed})

    def _outputs(self, free: Iterable[Output], cost: int) -> Iterator[Kept]:
        done = self._with(self.cuts, self.values)
        for output in free:
            kept = dataclasses.replace(done, outputs={**done.outputs, output: self._whole.outputs[output]})
            other = price(kept)
            if other is not None and self._noticeable(other[0] - cost):
                yield Kept(output.name, other[0] - cost)

    # -- parameters -----------------------------------------------------------------------------

    def _parameters(self) -> tuple[tuple[Cut, ...], Cost]:
        """The best of two greedy runs, by savings per byte cut and by savings; then what saves memory."""
        saved = [(cut, self._start[0] - cost[0]) for cut in self._candidates for cut, cost in self._feasible(cut)]
        helpful = [(cut, gain) for cut, gain in saved if gain > 0]
        per_byte = [cut for cut, _ in sorted(helpful, key=lambda item: -item[1] / item[0].nbytes)]
        by_gain = [cut for cut, _ in sorted(helpful, key=lambda item: -item[1])]
        accepted, cost = self._greedy(per_byte)
        if by_gain != per_byte and _overlap(by_gain):
            accepted, cost = min((accepted, cost), self._greedy(by_gain), key=lambda result: result[1])
        return self._for_memory([cut for cut, _ in saved], accepted, cost)

    def _feasible(self, cut: Cut) -> Iterator[tuple[Cut, Cost]]:
        """The candidate with its price; where no plan meets it, the same without one of its groups."""
        for attempt in (cut, *(cut.without([group]) for group in cut.groups if len(cut.groups) > 1)):
            cost = price(self._with([attempt]))
            if cost is not None:
                yield attempt, cost
                return

    def _greedy(self, order: Iterable[Cut]) -> tuple[tuple[Cut, ...], Cost]:
        accepted: tuple[Cut, ...] = ()
        cost = self._start
        for candidate in order:
            cut = _unplaced(candidate, accepted)
            new = price(self._with([*accepted, cut])) if cut.groups else None
            if new is not None and self._noticeable(cost[0] - new[0]):
                accepted, cost = (*accepted, cut), new
        return accepted, cost

    def _for_memory(
        self, feasible: Iterable[Cut], accepted: tuple[Cut, ...], cost: Cost
    ) -> tuple[tuple[Cut, ...], Cost]:
        """What costs next to no time and holds a good part of the parameters, as a table of words does."""
        total = sum(map(bytes_of, placeable(self._base)))
        most = min(self.replicated, cost[0] + cost[0] // _CHEAP)
        for candidate in feasible:
            if candidate.nbytes * _HEAVY < total:
                continue
            if _unplaced(candidate, accepted) != candidate:
                continue
            new = price(self._with([*accepted, candidate]))
            if new is not None and new[0] <= most:
                accepted, cost = (*accepted, candidate), new
        return accepted, cost

    # -- outputs of modules ---------------------------------------------------------------------

    def _modules(self, cost: Cost) -> tuple[tuple[Held, ...], Cost]:
        """Modules whose product is worth dividing by tokens, because nothing else divides its work."""
        made: tuple[Held, ...] = ()
        for held in self._undivided():
            new = price(self._with(self.cuts, [*made, held]))
            if new is not None and self._noticeable(cost[0] - new[0]):
                made = (*made, dataclasses.replace(held, saved=cost[0] - new[0]))
                cost = new
        return made, cost

    def _undivided(self) -> Iterator[Held]:
        """Modules that multiply with a weight that nothing cuts, their output cut by tokens."""
        placed = {value for cut in self.cuts for value in cut.pins}
        weights = {p.value for p in placeable(self._base) if p.value not in placed}
        found = self._tokens()
        if found is None:
            return
        dim, factors = found
        alike: dict[str, tuple[dict[Value, Pin], list[str]]] = {}
        for node in self._base.graph.nodes:
            if not _multiplies(node, weights) or node.module not in self._base.graph.modules:
                continue
            returned = self._base.graph.modules[node.module].returned.values()
            firsts = [values[0] for values in returned if values]
            if firsts and all(self._base.contexts[0].shard(value, factors) for value in firsts):
                pins, modules = alike.setdefault(wild(node.module), ({}, []))
                pins.update(dict.fromkeys(firsts, Pin(((S(*factors),),))))
                modules.append(node.module)
        for path, (pins, modules) in alike.items():
            yield Held(path, tuple(dict.fromkeys(modules)), dim, pins)

    def _tokens(self) -> tuple[str, Factors] | None:
        """The named dim that a plan may cut and that changes from call to call: the sequence, as a rule."""
        context = self._base.contexts[0]
        for name, factors in self._base.dims.names.items():
            if len(factors) != 1 or isinstance(factors[0].size, int) or not context.divides(factors[0].size):
                continue
            if evaluate(factors[0].size, self._base.graph.hints()) % context.n == 0:  # the example must fit too
                return name, factors
        return None


def _own_outputs(bound: Bound) -> tuple[Output, ...]:
    """Outputs that a training step does not need on every rank: those beside a loss."""
    values = [(o, o.value) for o in bound.outputs if o.value is not None]
    if not any(v.requires_grad and not v.shape for _, v in values):
        return ()
    return tuple(o for o, v in values if v.shape)


def _multiplies(node: Node, weights: set[Value]) -> bool:
    """Whether the node is a product with one of the weights, summed over a dim of both."""
    found = lookup(node)
    signature = found.signature(node) if found and found.flops else None
    return isinstance(signature, Signature) and bool(signature.contracted) and not weights.isdisjoint(node.operands)


def _unplaced(cut: Cut, accepted: Iterable[Cut]) -> Cut:
    placed = {value for other in accepted for value in other.pins}
    return cut.without([group for group in cut.groups if placed & set(group.pins)])


def _overlap(candidates: Sequence[Cut]) -> bool:
    return len({value for cut in candidates for value in cut.pins}) < sum(len(cut.pins) for cut in candidates)


def _needed(cost: Cost | None) -> Cost:
    if cost is None:
        raise AssertionError("a program with nothing placed runs replicated")
    return cost
