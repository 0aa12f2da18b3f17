"""A bound program as numbers, and the numbers' solution as a plan.

One variable per op (its strategy), per input and parameter (its type) and per output; one net per value.
A ``value`` line restricts the strategies of the op that produces the value; where no strategy gives such
a type (a row-parallel product is always partial) the value is converted at once, by a variable of its own.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

import numpy as np

from placement.graph.ir import Node, Output, Value
from placement.lang.diagnostics import PlacementError
from placement.rules import JointStrategy, Strategy, joint_strategy, lookup
from placement.solver.bind import Bound, Pin
from placement.solver.capacity import fitted
from placement.solver.causes import Causes
from placement.solver.eliminate import Undecided, solve
from placement.solver.faults import impossible, returned_otherwise
from placement.solver.forms import AsOwn, matching, renamed
from placement.solver.layers import with_layers
from placement.solver.plan import Hook, Plan, Step, Version
from placement.solver.pricing import Cost, NetForm, Options, Prices, Ways
from placement.solver.problem import COMPONENTS, Net, Problem, Solution, Variable
from placement.solver.prune import TooManyMasks, ask_set, asked_masks, union_masks
from placement.solver.uses import Uses
from placement.solver.waiting import with_overlap
from placement.types import Action, I, Joint, P, R, Type


@dataclass(frozen=True, slots=True, eq=False)
class _Variable:
    """Something to choose. offered: by axis, the strategies of an op or the types of a value."""

    name: str
    owner: Node | Output | Value
    chooses: Node | Value
    offered: tuple[Sequence[Strategy], ...] | tuple[tuple[Type, ...], ...]
    options: Options

    def types(self, place: int) -> list[list[Type]]:
        """By axis and option, the types of the operand or result at ``place``, or of the value."""
        return [
            options.types(place) if isinstance(options, AsOwn) else [_at(one, place) for one in options]
            for options in self.offered
        ]

    def joint(self, place: int, option: int) -> Joint:
        """The type that an option gives there."""
        combo = self.options.combos[option]
        return Joint(_at(options[i], place) for options, i in zip(self.offered, combo, strict=True))

    def joints(self, place: int) -> tuple[Joint, ...]:
        """The type that each option gives there."""
        types = self.types(place)
        return tuple(_joint(types, combo) for combo in self.options.combos)


def _at(option: Strategy | Type, place: int) -> Type:
    if isinstance(option, Type):
        return option
    count = len(option.operands)
    return option.operands[place] if place < count else option.results[place - count]


def _joint(kinds: Sequence[Sequence[Type]], combo: Sequence[int]) -> Joint:
    return Joint(own[i] for own, i in zip(kinds, combo, strict=True))


@dataclass(slots=True)
class _NetSpec:
    """A net while it grows: who makes the value, at which stage, and who asks for it where.

    consumers: variable, user, the value's position among the user's operands, its place in what the variable offers.
    """

    value: Value
    stage: int
    source: int
    place: int
    consumers: list[tuple[int, Node | Output, int, int]] = field(default_factory=list)
    form: NetForm | None = None


_MOST_BITS = 62  # types that one value may be asked for: sets of them are bit masks in int64
_MOST_SETS = 1 << 14  # of types that one value may be asked for at once
MOST_TYPES = 400  # of one value that conversions may pass through
MOST_COSTS = 1 << 20  # of the conversions of one value: of each set, and part of a set, from each type

Combo = tuple[int, ...]
"""One option per axis, by position in the axis' options."""


class Builder:
    """The problem of a bound program, and plans from its solutions.

    ``allowed`` leaves only these options of a variable, by axis; what it does not name, or says None of, is free.
    """

    def __init__(
        self,
        bound: Bound,
        prices: Prices | None = None,
        allowed: Mapping[str, Sequence[Sequence[int] | None]] | None = None,
        uses: Uses | None = None,
        *,
        most_types: int = MOST_TYPES,
        most_costs: int = MOST_COSTS,
    ) -> None:
        self.bound = bound
        self.prices = prices or Prices(bound)
        self.forms = self.prices.forms
        self.uses = uses or Uses(bound, self.forms)
        self.allowed = allowed or {}
        self.most_types, self.most_costs = most_types, most_costs
        self.chosen: list[_Variable] = []
        self.nets: dict[Value, _NetSpec] = {}
        self.pinned: dict[Value, _NetSpec] = {}

    @property
    def narrowed(self) -> bool:
        """Whether the problem leaves conversions out, so that its least cost is not proven to be the least."""
        return any(spec.form is not None and spec.form.narrowed for spec in self.specs())

    @property
    def names(self) -> list[str]:
        """The variables' names."""
        return [variable.name for variable in self.chosen]

    @property
    def combos(self) -> list[tuple[Combo, ...]]:
        """The options of each variable, by axis."""
        return [variable.options.combos for variable in self.chosen]

    @property
    def counts(self) -> dict[str, tuple[int, ...]]:
        """How many options each axis has, of which some may not be allowed, by variable."""
        return {variable.name: tuple(map(len, variable.offered)) for variable in self.chosen}

    def solved(self, problem: Problem, *, limited: bool = True) -> Solution:
        """The choices that cost least, within the limit of memory if there is one.

        Raises Infeasible, Undecided, TooLittle.
        """
        if self.bound.limit is None or not limited:
            return solve(problem)
        return fitted(self.bound, self.bound.limit, problem, lambda s: self.plan(s.choice, s.cost, s.bound))

    # -- problem --------------------------------------------------------------------------------

    def variables(self) -> None:
        """What there is to choose, and who takes which value."""
        for item in self.bound.graph.inputs:
            self._source(item.value, self.bound.inputs[item.value])
        for parameter in self.bound.graph.parameters:
            self._source(parameter.value, self.bound.parameters[parameter.value])
        for node in self.bound.graph.nodes:
            self._node(node)
        for output, pin in self.bound.outputs.items():
            self._output(output, pin)

    def problem(self) -> Problem:
        """The numbers: a variable for each choice, a net for each value."""
        self.variables()
        variables = tuple(Variable(variable.name, variable.options.costs) for variable in self.chosen)
        return Problem(variables, tuple(self._net(spec) for spec in self.specs()))

    def renewed(self, problem: Problem, values: Container[Value]) -> Problem:
        """The problem with the nets of these values as they are priced by now."""
        nets = zip(self.specs(), problem.nets, strict=True)
        return Problem(problem.variables, tuple(self._net(spec) if spec.value in values else net for spec, net in nets))

    def specs(self) -> Iterator[_NetSpec]:
        """Every net: of each value as it is made, and as a ``value`` line has it made."""
        yield from self.nets.values()
        yield from self.pinned.values()

    def _source(self, value: Value, pin: Pin) -> None:
        self.nets[value] = _NetSpec(value, 0, self._typed(value.name, self._kinds(value, pin), value, value), 0)

    def _typed(self, name: str, kinds: Sequence[tuple[Type, ...]], value: Value, owner: Output | Value) -> int:
        """A variable whose options are types. They take no time; parameters left to the solver hold memory."""
        forms = self.forms
        allowed = self._allowed(name)
        states = self.prices.states(value) if owner is value else 0
        key = (forms.of_value(value), tuple(forms.kinds(value, own) for own in kinds), allowed, states)
        options = self.prices.options.get(key)
        if options is None:
            every = ((combo, _joint(kinds, combo)) for combo in _combos(map(len, kinds), allowed))
            found = {combo: joint for combo, joint in every if self.bound.mesh.fits(joint, self.bound.hints)}
            costs = np.zeros((COMPONENTS, len(found)), dtype=np.int64)
            costs[1] = [states // self.bound.mesh.parts(joint) for joint in found.values()]
            options = self.prices.options[key] = Options(forms.intern(key), tuple(found), costs)
        return self._add(_Variable(name, owner, value, tuple(kinds), options))

    def _add(self, variable: _Variable) -> int:
        self.chosen.append(variable)
        return len(self.chosen) - 1

    def _allowed(self, name: str) -> tuple[tuple[int, ...] | None, ...] | None:
        allowed = self.allowed.get(name)
        return None if allowed is None else tuple(None if own is None else tuple(own) for own in allowed)

    def _kinds(self, value: Value, pin: Pin | None) -> list[tuple[Type, ...]]:
        """The types that a pin leaves a value, by axis; where that is free, all that a value is handed out in."""
        kinds: list[tuple[Type, ...]] = []
        for axis, context in enumerate(self.bound.contexts):
            own = pin.kinds[axis] if pin else None
            free = tuple(t for t in context.types(value) if t != R or not value.requires_grad) if own is None else own
            kinds.append(free)
        return kinds

    def _node(self, node: Node) -> None:
        found = [self.uses.offered(node, axis) for axis in self.uses.axes]
        offered = tuple(own for own, _ in found)
        allowed = self._allowed(node.name)
        key = (self.forms.of_node(node), tuple(form for _, form in found), allowed)
        priced = key, self.prices.likeness_of_op(node)
        options = self.prices.options.get(priced)
        if options is None:
            options = self.prices.options[priced] = self._options(node, offered, allowed, self.forms.intern(key))
        index = self._add(_Variable(node.name, node, node, offered, options))
        for position, operand in enumerate(node.operands):
            self._consumers(operand).append((index, node, position, position))
        for position, result in enumerate(node.results, len(node.operands)):
            self.nets[result] = _NetSpec(result, 0, index, position)
            pin = self.bound.values.get(result)
            made = pin and [tuple(dict.fromkeys(own)) for own in self.chosen[index].types(position)]
            if not pin or not made:
                continue
            if all(k is None or set(m) <= set(k) for k, m in zip(pin.kinds, made, strict=True)):
                continue
            # Where an axis is free the value stays in a type that it is made in.
            kinds = [m if k is None else k for k, m in zip(pin.kinds, made, strict=True)]
            extra = self._typed(f"{result.name} as placed", kinds, result, result)
            self.nets[result].consumers.append((extra, node, -1, 0))
            self.pinned[result] = _NetSpec(result, 1, extra, 0)

    def _options(
        self,
        node: Node,
        offered: tuple[Sequence[Strategy], ...],
        allowed: tuple[tuple[int, ...] | None, ...] | None,
        form: int,
    ) -> Options:
        """What an op may choose from. Raises PlacementError where that is nothing."""
        chosen: dict[Combo, JointStrategy] = {}
        for combo in _combos(map(len, offered), allowed):
            joined = self._together(node, tuple(own[i] for own, i in zip(offered, combo, strict=True)))
            if joined is not None:
                chosen[combo] = joined
        if not chosen:
            raise PlacementError([impossible(self.bound, node, alone=all(offered))])
        costs, work = zip(*(self.prices.op(node, s) for s in chosen.values()), strict=True)
        return Options(form, tuple(chosen), np.array(costs, dtype=np.int64).T.reshape(COMPONENTS, -1), work)

    def _together(self, node: Node, parts: tuple[Strategy, ...]) -> JointStrategy | None:
        """The strategies of all axes at once, None where they do not go together."""
        joined = joint_strategy(node, parts)
        if joined is None or not all(
            self.bound.mesh.fits(joint, self.bound.hints) for joint in (*joined.operands, *joined.results)
        ):
            return None
        return joined if self._in_order(node, joined) else None

    def _in_order(self, node: Node, joined: JointStrategy) -> bool:
        """Whether every group of axes that runs an implementation has its blocks in one order, or only counts."""
        rule = lookup(node)
        counting = {one.name for one in (rule.implementations if rule else ()) if one.counts}
        groups = [axes for name, axes in joined.groups().items() if len(axes) > 1 and name not in counting]
        return not any(self.bound.mesh.ordered(joint, axes) for axes in groups for joint in joined.operands)

    def _consumers(self, value: Value) -> list[tuple[int, Node | Output, int, int]]:
        return (self.pinned.get(value) or self.nets[value]).consumers

    def _output(self, output: Output, pin: Pin | None) -> None:
        assert output.value is not None
        kinds = self._kinds(output.value, pin)
        allowed = self.uses.fixed.get(output.value)
        if allowed is not None:
            kinds = [tuple(t for t in own if t in fixed) for own, fixed in zip(kinds, allowed, strict=True)]
            if not all(kinds):
                raise PlacementError([returned_otherwise(self.bound, output, pin)])
        index = self._typed(f"output {output.name}", kinds, output.value, output)
        self._consumers(output.value).append((index, output, 0, 0))

    # -- nets -----------------------------------------------------------------------------------

    def _net(self, spec: _NetSpec) -> Net:
        form = spec.form = self.form(spec)
        consumers = tuple((v, asked) for (v, *_), asked in zip(spec.consumers, form.asked, strict=True))
        return Net(
            name=spec.value.name,
            source=spec.source,
            produced=form.produced,
            consumers=consumers,
            table=form.table,
            sets=form.sets,
            monotone=True,
        )

    def form(self, spec: _NetSpec) -> NetForm:
        """The net of a value, as all values alike have it."""
        value = spec.value
        chosen = self.chosen
        key = (
            self.most_types,
            self._structure(spec),
            self.prices.likeness_of(value),
            chosen[spec.source].options.form,
            *[chosen[variable].options.form for variable, *_ in spec.consumers],
        )
        found = self.prices.nets.get(key)
        if found is None:
            found = self.prices.nets[key] = self._formed(spec)
        return found

    def _structure(self, spec: _NetSpec) -> int:
        """Equal for nets of values alike whose ends see the value's factors alike; one spec's builders share it."""
        value, known = spec.value, self.uses.structures
        found = known.get((value, spec.stage))
        if found is None:
            ends = [(spec.source, spec.place), *[(variable, place) for variable, _, _, place in spec.consumers]]
            seen = tuple([(place, self.forms.seen(self.chosen[one].chooses, value)) for one, place in ends])
            repeated = _repeated([one for one, _ in ends])
            key = self.forms.of_value(value), self.uses.restriction(value), seen, repeated
            found = known[value, spec.stage] = self.forms.intern(key)
        return found

    def _formed(self, spec: _NetSpec) -> NetForm:
        produced, wanted = self.ends(spec)
        made = list(dict.fromkeys(produced))
        asked = list(dict.fromkeys(joint for joints in wanted for joint in joints))
        ways, narrowed = self.ways(spec)
        rows = {joint: index for index, joint in enumerate(made)}
        bits = {joint: index for index, joint in enumerate(asked)}
        own = tuple(np.array([bits[joint] for joint in joints], dtype=np.int64) for joints in wanted)
        consumers = tuple((variable, bit) for (variable, *_), bit in zip(spec.consumers, own, strict=True))
        text = f"too many sets of types that '{spec.value.name}' may be asked for"
        if len(asked) > _MOST_BITS:
            raise Undecided(text)
        try:
            unions = union_masks(
                Counter(ask_set(masks.tolist()) for masks in asked_masks(consumers).values()), _MOST_SETS
            )
        except TooManyMasks as error:
            raise Undecided(text) from error
        parts = min(sum(1 << mask.bit_count() for mask in unions), 1 << len(asked))
        if parts * len(ways.joints) > self.most_costs:
            raise Undecided(text)
        sets = np.array(unions)
        places = {joint: index for index, joint in enumerate(ways.joints)}
        at = tuple(places[joint] for joint in made)
        numbers = np.array([rows[joint] for joint in produced], dtype=np.int64)
        return NetForm(
            spec.value, ways, at, numbers, own, self.prices.table(spec.value, ways, at, sets), sets, narrowed
        )

    def ends(self, spec: _NetSpec) -> tuple[tuple[Joint, ...], list[tuple[Joint, ...]]]:
        """By option, the types that a value is made in and those that each consumer asks for."""
        wanted = [self.chosen[variable].joints(place) for variable, _, _, place in spec.consumers]
        return self.chosen[spec.source].joints(spec.place), wanted

    def ways(self, spec: _NetSpec) -> tuple[Ways, bool]:
        """The conversions of a value, and whether some were left out."""
        produced, wanted = self.ends(spec)
        asked = list(dict.fromkeys(joint for joints in wanted for joint in joints))
        kinds, narrowed = self._through(spec, (*produced, *asked))
        return self.prices.ways(spec.value, kinds, asked, self.uses.restriction(spec.value)), narrowed

    def _through(self, spec: _NetSpec, ends: Sequence[Joint]) -> tuple[list[tuple[Type, ...]], bool]:
        """The types that conversions may pass through, by axis: all that somebody might have the value in.

        What nobody is left to ask for may still be on the way. Where those are too many, the ends are enough for a
        plan but not for a proof: whether that is so comes second.
        """
        unsharded = (I, R, P) if spec.value.requires_grad else (R, P)
        places = [(spec.source, spec.place), *[(variable, place) for variable, _, _, place in spec.consumers]]
        offered = [self.chosen[variable].types(place) for variable, place in places]
        kinds = [
            tuple(dict.fromkeys((*unsharded, *[kind for types in offered for kind in types[axis]])))
            for axis in self.uses.axes
        ]
        if prod(map(len, kinds)) <= self.most_types:
            return kinds, False
        return [tuple(dict.fromkeys((*unsharded, *[joint[axis] for joint in ends]))) for axis in self.uses.axes], True

    # -- plan -----------------------------------------------------------------------------------

    def plan(self, choice: Sequence[int], cost: Cost, lower: Cost) -> Plan:
        """The plan of a choice, with its cost and a lower bound of what any plan costs."""
        strategy_of: dict[Node, JointStrategy] = {}
        work: dict[Node, tuple[int, int]] = {}
        for variable, index in zip(self.chosen, choice, strict=True):
            node, combo = variable.chooses, variable.options.combos[index]
            if isinstance(node, Node):
                parts = [own[i] for own, i in zip(variable.offered, combo, strict=True)]
                joined = joint_strategy(node, tuple(parts))  # type: ignore[arg-type]
                assert joined is not None
                strategy_of[node], work[node] = joined, variable.options.work[index]
        produced: dict[Value, Joint] = {}
        uses: dict[tuple[Node | Output, int], Version] = {}
        steps: list[Step] = []
        for spec in self.specs():
            if spec.stage == 0:
                produced[spec.value] = self.chosen[spec.source].joint(spec.place, choice[spec.source])
            for variable, user, position, place in spec.consumers:
                if position >= 0:
                    joint = self.chosen[variable].joint(place, choice[variable])
                    uses[user, position] = Version(spec.value, joint, spec.stage)
            steps += self._steps(spec, choice)
        order = {value: index for index, value in enumerate(self.bound.graph.values())}
        steps.sort(key=lambda s: (order[s.value], s.source.stage, s.target.stage))
        steps = with_layers(steps, self.bound.graph, frozenset(uses.values()), self.bound.lowered("gathered = kept"))
        steps = with_overlap(steps, self.bound, strategy_of, work)
        causes = Causes(self.bound)
        steps = [causes.explain(step) for step in steps]
        compute = sum(map(sum, work.values()))
        held = sum(self.prices.states(value) // self.bound.mesh.parts(joint) for value, joint in produced.items())
        found = tuple(steps), tuple(self._hooks(steps, causes))
        inside = {node: tuple(self.prices.inside(node, s, work[node])) for node, s in strategy_of.items() if s.leading}
        return Plan(self.bound, strategy_of, produced, uses, *found, inside, cost, lower, compute, cost[1] - held, work)

    def converting(self, choice: Sequence[int]) -> dict[Value, list[int]]:
        """The axes that convert each value one by one, in the order in which they do."""
        found: dict[Value, list[int]] = {}
        for spec in self.specs():
            form, tree = self._tree(spec, choice)
            axes = [form.ways.edges[pair].axes for pair in tree]
            if axes:
                found.setdefault(spec.value, []).extend(one for one, *more in axes if not more)
        return found

    def converted(self, choice: Sequence[int]) -> dict[Value, int]:
        """Picoseconds that the conversions of each value cost."""
        found: dict[Value, int] = {}
        for spec in self.specs():
            form = spec.form or self.form(spec)
            column = np.searchsorted(form.sets, self._asked(spec, form, choice))
            cost = int(form.table[0, form.produced[choice[spec.source]], column])
            found[spec.value] = found.get(spec.value, 0) + cost
        return found

    def state(self, value: Value, choice: Sequence[int]) -> tuple[Joint, tuple[Joint, ...]]:
        """The type that a value is made in, and those that it is asked for in."""
        spec = self.nets[value]
        wanted = (self.chosen[variable].joint(place, choice[variable]) for variable, _, _, place in spec.consumers)
        return self.chosen[spec.source].joint(spec.place, choice[spec.source]), tuple(wanted)

    @staticmethod
    def _asked(spec: _NetSpec, form: NetForm, choice: Sequence[int]) -> int:
        mask = 0
        for (variable, *_), bits in zip(spec.consumers, form.asked, strict=True):
            mask |= 1 << int(bits[choice[variable]])
        return mask

    def _tree(self, spec: _NetSpec, choice: Sequence[int]) -> tuple[NetForm, tuple[tuple[int, int], ...]]:
        """The conversions of a value, as places in the types of its form."""
        form = spec.form or self.form(spec)
        asked = self._asked(spec, form, choice)
        return form, form.ways.least.tree(form.made[form.produced[choice[spec.source]]], asked)

    def _hooks(self, steps: Sequence[Step], causes: Causes) -> Iterator[Hook]:
        of_value: dict[Value, list[Step]] = {}
        for step in steps:
            of_value.setdefault(step.value, []).append(step)
        for parameter in self.bound.graph.parameters:
            own = of_value.get(parameter.value, [])
            found = {step.axes: step for step in own if step.sums_gradient}
            for axes, step in found.items():
                cause = causes.of_parameter(parameter.value, own)
                yield Hook(parameter, step.axis, axes, step.summed, cause, step.reduce)

    def _steps(self, spec: _NetSpec, choice: Sequence[int]) -> list[Step]:
        """The conversions of a value, with who takes what they make."""
        form, edges = self._tree(spec, choice)
        if not edges:
            return []
        names = matching(self.forms.factors(form.value), self.forms.factors(spec.value))
        joints = {
            place: Joint(renamed(kind, names) for kind in form.ways.joints[place]) for edge in edges for place in edge
        }
        users: dict[Joint, list[Node | Output]] = {}
        for variable, user, _, place in spec.consumers:
            users.setdefault(self.chosen[variable].joint(place, choice[variable]), []).append(user)
        reach = {joints[b]: users.get(joints[b], []) for _, b in edges}
        for a, b in reversed(edges):
            reach[joints[a]] = [*reach.get(joints[a], users.get(joints[a], [])), *reach[joints[b]]]
        restriction = self.uses.restriction(spec.value)
        steps: list[Step] = []
        for a, b in edges:
            edge = form.ways.edges[a, b]
            source, target = Version(spec.value, joints[a], spec.stage), Version(spec.value, joints[b], spec.stage)
            consumers = tuple(dict.fromkeys(reach[joints[b]]))
            nbytes = self.bound.mesh.sent(edge, joints[a], self.prices.nbytes(spec.value))
            times = self.prices.times(spec.value, edge, joints[a], nbytes, restriction)
            again = self.prices.again(edge, joints[a], restriction)
            axis = self.bound.mesh.name(edge.axes)
            kind, sums = edge.conversion.source, self.forms.sums
            summed = sums.sent(spec.value, kind, Action.ALL_REDUCE, nbytes)
            given = source, target, axis, edge.axes, edge.conversion, nbytes, consumers, (), times, again
            steps.append(Step(*given, reduce=sums.said(spec.value, kind), summed=summed))
        fixed_to = self.pinned.get(spec.value) if spec.stage == 0 else None
        if fixed_to is not None:
            joint = self.chosen[fixed_to.source].joint(fixed_to.place, choice[fixed_to.source])
            steps = [_staged(s, joint) for s in steps]
        return steps


def _combos(counts: Iterable[int], allowed: Sequence[Sequence[int] | None] | None) -> Iterator[Combo]:
    """The options of all axes together, of those allowed."""
    whole = list(counts)
    own = allowed or [None] * len(whole)
    return product(*(range(n) if left is None else left for left, n in zip(own, whole, strict=True)))


def _repeated(variables: Sequence[int]) -> tuple[int, ...]:
    """Which of them are one and the same."""
    return tuple(map(variables.index, variables)) if len(set(variables)) < len(variables) else ()


def _staged(step: Step, joint: Joint) -> Step:
    """The step that reaches the placed type makes the value's stage 1."""
    if step.target.type != joint:
        return step
    return dataclasses.replace(step, target=Version(step.value, joint, 1))
