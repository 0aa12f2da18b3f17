"""The plan that costs least on several axes at once, and the proof.

Options multiply from axis to axis, so the joint problem is made small before it is solved:

1. *Descent.* Each axis is solved with the others as they are, until nothing changes: a plan, so an upper bound.
2. *Bound.* The problem falls apart into one per axis if every op and conversion is charged to the axes so that the
   charges never add up to more than it costs (``charges``). The sum of the axes' optima is a lower bound. Where it
   meets the upper bound the plan is proven.
3. *Pruning.* What an option costs its axis more than the best, its regret, is known for every option. One whose
   regret alone exceeds the gap is in no better plan.
4. *Joint solution* of what is left, exact; where that is too much the plan is told with its gap.

Bounds are of time, the first component of costs. Ties in time are broken by the later components within an axis, and
jointly where step 4 runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from math import prod

from placement.graph.ir import Value
from placement.lang.diagnostics import PlacementError
from placement.solver.bind import Bound, Pin
from placement.solver.builder import Builder
from placement.solver.capacity import TooLittle, unmet
from placement.solver.charges import Charges, Free, Reference
from placement.solver.eliminate import Infeasible, Undecided, solve
from placement.solver.limbs import Conflict, Ints
from placement.solver.marginals import TooLarge, regrets
from placement.solver.memory import memory
from placement.solver.mesh import Mesh
from placement.solver.pricing import Prices
from placement.solver.problem import Problem, Solution
from placement.solver.tight import Tight, tightened
from placement.solver.uses import Uses

_WIDE, _SMALL = 36, 400  # options of one variable, and of all, up to which the joint problem is solved as it is
_FEW = 64  # options beyond one each, from which on nothing is pruned
_ROUNDS = 6  # of descent, and of pruning
_FITS = 2  # how often each axis is fitted to a limit of memory
_TABLE = 8_000_000  # entries of the largest table of one axis
_TYPES = 100  # of one value that conversions may pass through in a plan that is found by descent
_COSTS = 1 << 17  # of the conversions of one value, up to which they are charged tightly
_JOINT = 1_500  # options of all variables that are left, beyond one each, up to which they are solved jointly

Allowed = dict[str, list[Sequence[int] | None]]
"""The options left of each variable, by axis; None for all, where only the joint problem knows them."""
Chosen = Mapping[str, Sequence[int | None]]
Found = tuple[Builder, Solution]


def optimum(bound: Bound, say: Callable[[str], None] | None = None) -> Found:
    """The builder and the solution of the plan that costs least. Raises Infeasible, Undecided, TooLittle."""
    if len(bound.mesh.axes) == 1:
        builder = Builder(bound)
        return builder, builder.solved(builder.problem())
    return _Search(bound, say or (lambda _: None)).optimum()


def one_by_one(bound: Bound, order: Sequence[int]) -> Found:
    """The plan of one axis after the other, the first as if there were no other: a peer to compare with.

    Raises Infeasible, Undecided.
    """
    search = _Search(bound, lambda _: None)
    chosen: dict[str, list[int | None]] = {name: [None] * len(search.axes) for name in search.allowed}
    first, *rest = order
    alone = search.alone[first]
    builder = Builder(alone.bound, uses=alone)
    for name, (option,) in _chosen(builder, solve(builder.problem())).items():
        chosen[name][first] = option
    found = search.conditional(rest[0], chosen)
    for axis in rest[1:]:
        found = search.conditional(axis, {**chosen, **_chosen(*found)})
    return found


class _Search:
    def __init__(self, bound: Bound, say: Callable[[str], None]) -> None:
        self.bound, self.say = bound, say
        self.prices = Prices(bound)
        self.axes = range(len(bound.mesh.axes))
        self.uses = Uses(bound, self.prices.forms)
        self.alone = [Uses(_on_axis(bound, axis), self.prices.forms) for axis in self.axes]
        self.allowed = self._every()

    def optimum(self) -> Found:
        if max(self._counts(), default=1) <= _WIDE and sum(self._counts()) <= _SMALL:
            with contextlib.suppress(Undecided):
                found = self._joint()
                if not found[0].narrowed:
                    return found
        reference = Reference.most_divided(self.uses, self.prices, self.allowed)
        found = self._proven(self._descent(reference))
        return found if self.bound.limit is None else self._within_limit(found)

    def _every(self) -> Allowed:
        """All options of every variable, by axis."""
        found: Allowed = {}
        for axis in self.axes:
            alone = self.alone[axis]
            builder = Builder(alone.bound, Free(alone.bound, self.prices.forms), uses=alone)
            builder.variables()
            for name, (count,) in builder.counts.items():
                found.setdefault(name, [None] * len(self.axes))[axis] = range(count)
        return found

    def _counts(self) -> list[int]:
        """How many options each variable has left, of all axes together."""
        return [prod(len(options or (0,)) for options in by_axis) for by_axis in self.allowed.values()]

    def _left(self) -> int:
        """How many options are left, beyond one each."""
        return sum(count - 1 for count in self._counts())

    # -- an upper bound -----------------------------------------------------------------------------

    def _descent(self, reference: Reference) -> Found:
        """Axis after axis at its best, the others as they are, while that helps; at first as each is best alone."""
        chosen: Chosen = {name: [None] * len(self.axes) for name in self.allowed}
        for other in self.axes[:-1]:
            chosen = self._alone(other, reference, chosen)
        best: Found | None = None
        still = 0
        for count in range(_ROUNDS * len(self.axes)):
            axis = self.axes[-1 - count % len(self.axes)]
            self.say(f"solving axis {self.bound.mesh.axes[axis].name}, round {count // len(self.axes) + 1}")
            try:
                found = self.conditional(axis, chosen)
            except (Infeasible, PlacementError):
                if best is None and count + 1 < len(self.axes):
                    chosen = self._alone(axis, reference, chosen)
                    continue  # another axis may get out of the other one's way
                if best is None and self._left() <= _JOINT:
                    return self._joint()
                raise
            still = still + 1 if best is not None and found[1].cost >= best[1].cost else 0
            if best is None or found[1].cost < best[1].cost:
                best, chosen = found, {**chosen, **_chosen(*found)}
            if still >= len(self.axes) - 1:
                break
        assert best is not None
        return best

    def conditional(self, axis: int, chosen: Chosen) -> Found:
        """The best for one axis with the others as chosen; what nothing is chosen for is free."""
        builder, problem = self._given(axis, chosen)
        return builder, builder.solved(problem, limited=False)

    def _given(self, axis: int, chosen: Chosen) -> tuple[Builder, Problem]:
        allowed: Allowed = {
            name: [options[k] if k == axis or (one := chosen[name][k]) is None else (one,) for k in self.axes]
            for name, options in self.allowed.items()
        }
        builder = Builder(self.bound, self.prices, allowed, self.uses, most_types=_TYPES)
        problem = builder.problem()
        for name, counts in builder.counts.items():
            known = self.allowed[name]
            self.allowed[name] = [range(n) if own is None else own for own, n in zip(known, counts, strict=True)]
        return builder, problem

    # -- a lower bound ------------------------------------------------------------------------------

    def _proven(self, found: Found) -> Found:
        """The plan with its proof, or a better one with it."""
        lower = 0
        for round_ in range(_ROUNDS):
            self.say(f"bounding, round {round_ + 1}")
            reference = self._reference(*found)
            problems = [self._charged(axis, reference) for axis in self.axes]
            if self._tightened(reference, found, problems):
                problems = [(alone, alone.renewed(problem, reference.tight)) for alone, problem in problems]
            try:
                parts = [regrets(problem, _TABLE, exact=round_ > 0) for _, problem in problems]
            except TooLarge:
                break
            except Conflict as error:
                raise AssertionError("an axis has no plan, and all together have one") from error
            lower = max(lower, reference.constant + sum(total for total, _ in parts))
            gap = found[1].cost[0] - lower
            if gap <= 0:
                return found[0], dataclasses.replace(found[1], bound=found[1].cost)
            before = sum(self._counts())
            for axis, ((builder, _), (_, more)) in enumerate(zip(problems, parts, strict=True)):
                self._prune(axis, builder, more, gap, _chosen(*found))
            if self._left() <= _FEW or sum(self._counts()) <= _SMALL or sum(self._counts()) == before:
                break
        return self._closed(found, lower)

    def _reference(self, builder: Builder, solution: Solution) -> Reference:
        """Charges as they are at a plan."""
        chosen = _chosen(builder, solution)
        at = {node: chosen[node.name] for node in self.bound.graph.nodes}
        return Reference(self.uses, self.prices, at, self.allowed, builder.converting(solution.choice))

    def _tightened(self, reference: Reference, found: Found, problems: Sequence[tuple[Builder, Problem]]) -> bool:
        """Charge what is lost at the plan: where a value's conversions are charged less than they cost there."""
        builder, solution = found
        at = _chosen(builder, solution)
        charged: dict[Value, int] = {}
        for axis, (alone, _) in enumerate(problems):
            choice = [combos.index((at[name][axis],)) for name, combos in zip(alone.names, alone.combos, strict=True)]
            for value, cost in alone.converted(choice).items():
                charged[value] = charged.get(value, 0) + cost
        forms, whole = self.prices.forms, Builder(self.bound, self.prices, self.allowed, self.uses, most_costs=_COSTS)
        known: dict[object, Tight | None] = {}
        for value, cost in builder.converted(solution.choice).items():
            if charged[value] >= cost or value in builder.pinned:
                continue
            if not whole.chosen:
                whole.variables()
            try:
                form = whole.form(whole.nets[value])
            except Undecided:
                continue
            made, asked = builder.state(value, solution.choice)
            seen = [forms.kinds(value, (made[k], *(joint[k] for joint in asked))) for k in self.axes]
            states = tuple((own, frozenset(wanted)) for own, *wanted in seen)
            key = id(form), states, tuple(reference.order(value))
            if key not in known:
                known[key] = tightened(forms, form, states, reference.order(value))
            one = known[key]
            if one is not None:
                reference.tight[value] = one
        return bool(reference.tight)

    def _closed(self, found: Found, lower: int) -> Found:
        """Solve what is left jointly; where that is too much, the plan keeps its gap."""
        if self._left() <= _JOINT:
            self.say("solving jointly")
            try:
                builder, solution = self._joint(limited=False)  # what is left was chosen by time
            except Undecided:
                return found[0], dataclasses.replace(found[1], bound=(lower, 0, 0))
            if solution.bound == solution.cost or solution.cost < found[1].cost:
                bound = (lower, 0, 0) if builder.narrowed else max(solution.bound, (lower, 0, 0))
                return builder, dataclasses.replace(solution, bound=min(bound, solution.cost))
        return found[0], dataclasses.replace(found[1], bound=(lower, 0, 0))

    def _prune(
        self, axis: int, builder: Builder, more: Sequence[Ints], gap: int, chosen: Mapping[str, Sequence[int]]
    ) -> None:
        """Leave the options that a plan better than the one known may have, and that one's."""
        for name, combos, regret in zip(builder.names, builder.combos, more, strict=True):
            kept = {option for (option,), extra in zip(combos, regret, strict=True) if extra <= gap}
            kept.add(chosen[name][axis])
            self.allowed[name][axis] = tuple(i for i in self.allowed[name][axis] or () if i in kept)

    def _alone(self, axis: int, reference: Reference, chosen: Chosen) -> Chosen:
        """The choice with one axis as it is best for what that is charged."""
        builder, problem = self._charged(axis, reference)
        own = _chosen(builder, solve(problem))
        return {name: [*all_[:axis], *own.get(name, (None,)), *all_[axis + 1 :]] for name, all_ in chosen.items()}

    def _charged(self, axis: int, reference: Reference) -> tuple[Builder, Problem]:
        """The problem of one axis, at what it is charged."""
        allowed: Allowed = {name: [options[axis]] for name, options in self.allowed.items()}
        alone = self.alone[axis]
        builder = Builder(alone.bound, Charges(alone.bound, axis, reference), allowed, alone)
        return builder, builder.problem()

    # -- all axes -----------------------------------------------------------------------------------

    def _joint(self, *, limited: bool = True) -> Found:
        builder = Builder(self.bound, self.prices, self.allowed, self.uses)
        return builder, builder.solved(builder.problem(), limited=limited)

    def _within_limit(self, found: Found) -> Found:
        """The plan if it is within the limit of memory, else the best one that changes one axis after the other.

        What costs least without the limit bounds what costs least within it. Raises TooLittle where no plan was met.
        """
        builder, solution = found
        lower, limit = solution.bound, self.bound.limit
        assert limit is not None
        if memory(builder.plan(solution.choice, solution.cost, lower)).rank.peak <= limit.most.amount:
            return found
        self.allowed = self._every()
        best: Found | None = None
        least = found  # of the plans met, while none is within the limit the one that holds least
        chosen = _chosen(*found)
        for axis in [*reversed(self.axes)] * _FITS:
            self.say(f"fitting axis {self.bound.mesh.axes[axis].name} to the limit of memory")
            builder, problem = self._given(axis, chosen)
            try:
                other = builder, builder.solved(problem)
            except TooLittle as error:
                if best is None and error.least.cost[1] < least[1].cost[1]:
                    least = builder, error.least
                    chosen = _chosen(*least)
                continue
            except (Infeasible, Undecided):
                continue
            if best is None or other[1].cost < best[1].cost:
                best, chosen = other, _chosen(*other)
        if best is None:
            raise unmet(limit, least[0].plan(least[1].choice, least[1].cost, lower), least[1])
        return best[0], dataclasses.replace(best[1], bound=min(lower, best[1].cost))


def _chosen(builder: Builder, solution: Solution) -> dict[str, Sequence[int]]:
    """The options chosen, by variable and axis."""
    chosen = zip(builder.names, builder.combos, solution.choice, strict=True)
    return {name: combos[index] for name, combos, index in chosen}


def _on_axis(bound: Bound, axis: int) -> Bound:
    """What the spec says of one axis."""
    ordered = frozenset((0, run) for index, run in bound.mesh.zigzag if index == axis)
    mesh = Mesh((bound.mesh.axes[axis],), bound.mesh.device, (bound.mesh.links[axis],), ordered)

    def alone(pin: Pin) -> Pin:
        return Pin((pin.kinds[axis],), pin.spans[axis : axis + 1])

    return dataclasses.replace(
        bound,
        mesh=mesh,
        contexts=(bound.contexts[axis],),
        inputs={value: alone(pin) for value, pin in bound.inputs.items()},
        parameters={value: alone(pin) for value, pin in bound.parameters.items()},
        values={value: alone(pin) for value, pin in bound.values.items() if pin.kinds[axis] is not None},
        outputs={o: pin and (alone(pin) if pin.kinds[axis] is not None else None) for o, pin in bound.outputs.items()},
        limit=None,
        ways={(node, 0): way for (node, index), way in bound.ways.items() if index == axis},
    )
