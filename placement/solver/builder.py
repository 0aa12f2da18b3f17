"""A bound program as numbers, and the numbers' solution as a plan.

One variable per op (its strategy), per input and parameter (its type) and per output; one net per value.
A ``value`` line restricts the strategies of the op that produces the value; where no strategy gives such
a type (a row-parallel product is always partial) the value is converted at once, by a variable of its own.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import numpy as np

from placement.graph.ir import Node, Output, Parameter, Value, op_name
from placement.graph.signature import Signature
from placement.lang.diagnostics import Diagnostic, PlacementError
from placement.rules import Context, JointStrategy, Strategy, joint_strategy, lookup, strategies
from placement.rules.saved import kept
from placement.rules.skeleton import notes, start
from placement.solver.bind import Bound, Pin
from placement.solver.capacity import fitted
from placement.solver.causes import Causes
from placement.solver.eliminate import Infeasible, Undecided, solve
from placement.solver.plan import Hook, Plan, Step, Version
from placement.solver.pricing import Cost, Prices, Restriction, Ways
from placement.solver.problem import Net, Problem, Solution, Variable
from placement.solver.prune import TooManyMasks, ask_set, asked_masks, union_masks
from placement.types import I, Joint, P, R, Type


@dataclass(slots=True)
class _NetSpec:
    """A net while it grows: who makes the value, at which stage, and who asks for it."""

    value: Value
    stage: int
    source: int
    made: tuple[Joint, ...]
    consumers: list[tuple[int, Node | Output, int, tuple[Joint, ...]]] = field(default_factory=list)


_MOST_SETS = 1 << 14  # of types that one value may be asked for at once

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
        offers: dict[tuple[Node, Context], list[Strategy]] | None = None,
    ) -> None:
        self.bound = bound
        self.prices = prices or Prices(bound)
        self.allowed = allowed or {}
        self.offers = {} if offers is None else offers
        self.names: list[str] = []
        self.combos: list[tuple[Combo, ...]] = []
        self.options: dict[str, tuple[int, ...]] = {}  # how many options each axis has, by variable
        self.choices: list[tuple[JointStrategy, ...] | tuple[Joint, ...]] = []
        self.costs: list[list[Cost]] = []
        self.owner: list[Node | Parameter | Output | Value] = []
        self.nets: dict[Value, _NetSpec] = {}
        self.pinned: dict[Value, _NetSpec] = {}
        self.fixed = self._derived_from_parameters()
        self.sealed = [self._inside_placed_modules(axis) for axis in range(len(bound.mesh.axes))]
        self.divided = [
            {f for pin in bound.inputs.values() for t in pin.kinds[axis] or () for f in t.over}
            for axis in range(len(bound.mesh.axes))
        ]
        self.work_of: dict[int, list[tuple[int, int]]] = {}
        self.restrictions: dict[Value, Restriction] = {}

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
        variables = tuple(
            Variable(name, np.array(costs, dtype=np.int64).T.reshape(3, -1))
            for name, costs in zip(self.names, self.costs, strict=True)
        )
        specs = [*self.nets.values(), *self.pinned.values()]
        problem = Problem(variables, tuple(self._net(spec) for spec in specs))
        problem.verify()
        return problem

    def _variable(
        self,
        name: str,
        chosen: Mapping[Combo, JointStrategy] | Mapping[Combo, Joint],
        costs: Sequence[Cost],
        owner: object,
    ) -> int:
        choices = tuple(chosen.values())
        self.combos.append(tuple(chosen))
        self.names.append(name)
        self.choices.append(choices)  # type: ignore[arg-type]
        self.costs.append(list(costs))
        self.owner.append(owner)  # type: ignore[arg-type]
        return len(self.names) - 1

    def _source(self, value: Value, pin: Pin) -> None:
        index = self._typed(value.name, self._kinds(value, pin), value)
        self.nets[value] = _NetSpec(value, 0, index, self.choices[index])  # type: ignore[arg-type]

    def _typed(self, name: str, kinds: Sequence[Sequence[Type]], owner: object) -> int:
        """A variable whose options are types, which cost nothing by themselves."""
        joints = {
            combo: joint
            for combo in self._combos(name, [len(k) for k in kinds])
            if self.bound.mesh.fits(joint := Joint(k[i] for k, i in zip(kinds, combo, strict=True)), self.bound.hints)
        }
        return self._variable(name, joints, [(0, 0, 0)] * len(joints), owner)

    def _combos(self, name: str, counts: Sequence[int]) -> Iterator[Combo]:
        """The options of all axes together, of those allowed."""
        self.options[name] = tuple(counts)
        allowed = self.allowed.get(name, [None] * len(counts))
        return product(*(range(n) if own is None else own for own, n in zip(allowed, counts, strict=True)))

    def _kinds(self, value: Value, pin: Pin | None) -> list[tuple[Type, ...]]:
        """The types that a pin leaves a value, by axis; where that is free, all that a value is handed out in."""
        kinds: list[tuple[Type, ...]] = []
        for axis, context in enumerate(self.bound.contexts):
            own = pin.kinds[axis] if pin else None
            free = tuple(t for t in context.types(value) if t != R or not value.requires_grad) if own is None else own
            kinds.append(free)
        return kinds

    def _node(self, node: Node) -> None:
        by_axis: list[list[Strategy]] = []
        for axis, context in enumerate(self.bound.contexts):
            offered = self.offers.get((node, context))
            if offered is None:
                offered = self.offers[node, context] = self._offered(node, axis)
            if not offered:
                raise PlacementError([self._impossible(node)])
            by_axis.append(offered)
        chosen: dict[Combo, JointStrategy] = {}
        for combo in self._combos(node.name, list(map(len, by_axis))):
            joined = self._together(node, tuple(by_axis[axis][i] for axis, i in enumerate(combo)))
            if joined is not None:
                chosen[combo] = joined
        if not chosen:
            raise PlacementError([self._impossible(node)])
        together = list(chosen.values())
        costs, work = zip(*(self.prices.op(node, s) for s in together), strict=True)
        index = self._variable(node.name, chosen, costs, node)
        self.work_of[index] = list(work)
        for position, operand in enumerate(node.operands):
            self._consumers(operand).append((index, node, position, tuple(s.operands[position] for s in together)))
        for position, result in enumerate(node.results):
            self.nets[result] = _NetSpec(result, 0, index, tuple(s.results[position] for s in together))
            made = [tuple(dict.fromkeys(s.results[position] for s in offered)) for offered in by_axis]
            pin = self.bound.values.get(result)
            if pin is None or all(k is None or set(m) <= set(k) for k, m in zip(pin.kinds, made, strict=True)):
                continue
            # Where an axis is free the value stays in a type that it is made in.
            kinds = [m if k is None else k for k, m in zip(pin.kinds, made, strict=True)]
            extra = self._typed(f"{result.name} as placed", kinds, result)
            joints: tuple[Joint, ...] = self.choices[extra]  # type: ignore[assignment]
            self.nets[result].consumers.append((extra, node, -1, joints))
            self.pinned[result] = _NetSpec(result, 1, extra, joints)

    def _offered(self, node: Node, axis: int) -> list[Strategy]:
        """The strategies on one axis that the placements leave."""
        offered = [s for s in strategies(node, self.bound.contexts[axis]) if self._accepts(node, s, axis)]
        for position, result in enumerate(node.results):
            offered = self._within_pin(result, offered, position, axis)
        return offered

    def _together(self, node: Node, parts: tuple[Strategy, ...]) -> JointStrategy | None:
        """The strategies of all axes at once, None where they do not go together."""
        joined = joint_strategy(node, parts)
        if joined is None or not all(
            self.bound.mesh.fits(joint, self.bound.hints) for joint in (*joined.operands, *joined.results)
        ):
            return None
        return joined

    def _consumers(self, value: Value) -> list[tuple[int, Node | Output, int, tuple[Joint, ...]]]:
        return (self.pinned.get(value) or self.nets[value]).consumers

    def _output(self, output: Output, pin: Pin | None) -> None:
        assert output.value is not None
        kinds = self._kinds(output.value, pin)
        allowed = self.fixed.get(output.value)
        if allowed is not None:
            kinds = [tuple(t for t in own if t in fixed) for own, fixed in zip(kinds, allowed, strict=True)]
            if not all(kinds):
                raise PlacementError([self._returned_otherwise(output, pin)])
        index = self._typed(f"output {output.name}", kinds, output)
        self._consumers(output.value).append((index, output, 0, self.choices[index]))  # type: ignore[arg-type]

    def _accepts(self, node: Node, strategy: Strategy, axis: int) -> bool:
        """Whether parameters are used as placed: a replicated one is never cut, a sharded one never gathered."""
        for value, kind in zip(node.operands, strategy.operands, strict=True):
            allowed = self.fixed.get(value)
            if allowed is not None and kind not in allowed[axis]:
                return False
        return not self._divides_work(node, strategy, axis)

    def _divides_work(self, node: Node, strategy: Strategy, axis: int) -> bool:
        """Whether the strategy divides the work with a replicated weight among the ranks, unasked.

        A product with a replicated LM head could take each rank's own tokens and sum the weight's whole
        gradient afterwards. That is data parallelism: it is for data that comes divided (an ``input`` line)
        or for a product that a ``value`` line places so. A weight that only runs along the result, as a
        norm's does, is no such product.
        """
        found = lookup(node)
        signature = found.signature(node) if found else None
        if not isinstance(signature, Signature):
            return False
        cuts = {f for kind in (*strategy.operands, *strategy.results) for f in kind.over}
        if (
            not cuts
            or cuts <= self.divided[axis]
            or any(t.over for v in node.results if (pin := self.bound.values.get(v)) for t in pin.kinds[axis] or ())
        ):
            return False
        kept = {letter for dims in signature.results for dim in dims for letter in dim}
        return any(
            value in self.fixed and kind == R and not {letter for dim in dims for letter in dim} <= kept
            for value, kind, dims in zip(node.operands, strategy.operands, signature.operands, strict=True)
        )

    def _derived_from_parameters(self) -> dict[Value, tuple[frozenset[Type], ...]]:
        """Parameters, and what is a view or a cast of one: the types in which they may be used, by axis."""
        result: dict[Value, tuple[frozenset[Type], ...]] = {}
        for value, pin in self.bound.parameters.items():
            whole = frozenset({I, R, P} if value.requires_grad else {R, P})
            sharded = [frozenset(t for t in kinds or () if t.over and not t.stored) for kinds in pin.kinds]
            result[value] = tuple(kinds or whole for kinds in sharded)
        for node in self.bound.graph.nodes:
            if len(node.operands) == 1 and node.operands[0] in result and len(node.results) == 1 and not node.kwargs:
                found = lookup(node)
                if found and (found.view or node.results[0].shape == node.operands[0].shape):
                    kinds = result[node.operands[0]]
                    if not any(t.over for allowed in kinds for t in allowed):
                        result[node.results[0]] = kinds
        return result

    def _inside_placed_modules(self, axis: int) -> frozenset[Value]:
        """Values that live inside a module without children whose output a ``value`` line places on the axis.

        They are not gathered: a norm placed Replicate is computed replicated, not computed in blocks and
        gathered before its last product. A product with a weight that is placed Shard has no such choice.
        """
        graph = self.bound.graph
        parents = {path.rpartition(".")[0] for path in graph.modules}
        users: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            for operand in node.operands:
                users.setdefault(operand, []).append(node)
        placed = {
            node.stack
            for node in graph.nodes
            for v in node.results
            if (pin := self.bound.values.get(v)) and pin.kinds[axis] is not None and node.module not in parents
        }
        outputs = {o.value for o in graph.outputs}
        return frozenset(
            value
            for node in graph.nodes
            if node.stack in placed and not any(t.over for v in node.operands for t in self._used(v, axis))
            for value in node.results
            if value not in outputs and all(user.stack == node.stack for user in users.get(value, ()))
        )

    def _stored(self, value: Value) -> tuple[bool, ...]:
        """By axis, whether a parameter is kept in blocks of its own."""
        pin = self.bound.parameters.get(value)
        return tuple(any(t.stored for t in kinds or ()) for kinds in pin.kinds) if pin else (False,) * len(self.sealed)

    @cached_property
    def keepers(self) -> Counter[Value]:
        """How many tensors that ops keep for the backward are each value."""
        return Counter(one.value for node in self.bound.graph.nodes for one in kept(node, "") if not one.itemsize)

    def _used(self, value: Value, axis: int) -> frozenset[Type]:
        return self.fixed[value][axis] if value in self.fixed else frozenset()

    def _within_pin(self, value: Value, offered: list[Strategy], position: int, axis: int) -> list[Strategy]:
        pin = self.bound.values.get(value)
        kinds = pin.kinds[axis] if pin else None
        if kinds is None:
            return offered
        fitting = [s for s in offered if s.results[position] in kinds]
        return fitting or offered

    def _net(self, spec: _NetSpec) -> Net:
        made, asked, ways = self._ways(spec)
        rows = {joint: index for index, joint in enumerate(made)}
        bits = {joint: index for index, joint in enumerate(asked)}
        consumers = tuple(
            (v, np.array([bits[joint] for joint in joints], dtype=np.int64)) for v, _, _, joints in spec.consumers
        )
        try:
            unions = union_masks(Counter(ask_set(masks) for masks in asked_masks(consumers).values()), _MOST_SETS)
        except TooManyMasks as error:
            raise Undecided(
                f"more than {_MOST_SETS} sets of types that '{spec.value.name}' may be asked for"
            ) from error
        sets = np.array(unions)
        places = {joint: index for index, joint in enumerate(ways.joints)}
        return Net(
            name=spec.value.name,
            source=spec.source,
            produced=np.array([rows[joint] for joint in spec.made], dtype=np.int64),
            consumers=consumers,
            table=ways.least.table(tuple(places[joint] for joint in made), sets),
            sets=sets,
            monotone=True,
        )

    def _ways(self, spec: _NetSpec) -> tuple[list[Joint], list[Joint], Ways]:
        """The types that a value may be made in and those it may be asked for, and what converts it."""
        made = list(dict.fromkeys(spec.made))
        asked = list(dict.fromkeys(joint for *_, joints in spec.consumers for joint in joints))
        through = (I, R, P) if spec.value.requires_grad else (R, P)
        kinds = [tuple(dict.fromkeys((*through, *(j[axis] for j in (*made, *asked))))) for axis in range(len(made[0]))]
        return made, asked, self.prices.ways(spec.value, kinds, asked, self._restriction(spec.value))

    def _restriction(self, value: Value) -> Restriction:
        if value not in self.restrictions:
            sealed = tuple(value in sealed for sealed in self.sealed)
            stored = self._stored(value)
            again = self.keepers[value] if any(stored) else 0
            self.restrictions[value] = Restriction(value in self.fixed, sealed, stored, again)
        return self.restrictions[value]

    # -- plan -----------------------------------------------------------------------------------

    def plan(self, choice: Sequence[int], cost: Cost, lower: Cost) -> Plan:
        """The plan of a choice, with its cost and a lower bound of what any plan costs."""
        chosen = [options[index] for options, index in zip(self.choices, choice, strict=True)]
        strategy_of = {
            owner: s
            for owner, s in zip(self.owner, chosen, strict=True)
            if isinstance(owner, Node) and isinstance(s, JointStrategy)
        }
        produced: dict[Value, Joint] = {}
        uses: dict[tuple[Node | Output, int], Version] = {}
        steps: list[Step] = []
        for spec in (*self.nets.values(), *self.pinned.values()):
            made = spec.made[choice[spec.source]]
            if spec.stage == 0:
                produced[spec.value] = made
            steps += self._steps(spec, made, choice, uses)
        order = {value: index for index, value in enumerate(self.bound.graph.values())}
        steps.sort(key=lambda s: (order[s.value], s.source.stage, s.target.stage))
        causes = Causes(self.bound)
        steps = [causes.explain(step) for step in steps]
        owned = ((self.owner[index], times[choice[index]]) for index, times in self.work_of.items())
        work = {node: times for node, times in owned if isinstance(node, Node)}
        compute = sum(map(sum, work.values()))
        found = tuple(steps), tuple(self._hooks(steps, causes))
        inside = {node: tuple(self.prices.inside(s)) for node, s in strategy_of.items() if s.leading}
        return Plan(self.bound, strategy_of, produced, uses, *found, inside, cost, lower, compute, cost[1], work)

    def _hooks(self, steps: Sequence[Step], causes: Causes) -> Iterator[Hook]:
        for parameter in self.bound.graph.parameters:
            found = {s.axes: s for s in steps if s.value is parameter.value and s.sums_gradient}
            for axes, step in found.items():
                yield Hook(parameter, step.axis, axes, step.nbytes, causes.of_parameter(parameter.value, steps))

    def _steps(
        self, spec: _NetSpec, made: Joint, choice: Sequence[int], uses: dict[tuple[Node | Output, int], Version]
    ) -> Iterable[Step]:
        _, wanted, ways = self._ways(spec)
        bits = {joint: index for index, joint in enumerate(wanted)}
        joints = ways.joints
        asked, users = 0, {}
        for variable, user, position, options in spec.consumers:
            joint = options[choice[variable]]
            asked |= 1 << bits[joint]
            if position >= 0:
                uses[user, position] = Version(spec.value, joint, spec.stage)
            users.setdefault(joint, []).append(user)
        edges = ways.least.tree(joints.index(made), asked)
        fixed_to = self.pinned.get(spec.value) if spec.stage == 0 else None
        steps = []
        reach = {joints[b]: users.get(joints[b], []) for _, b in edges}
        for a, b in reversed(edges):
            reach[joints[a]] = [*reach.get(joints[a], users.get(joints[a], [])), *reach[joints[b]]]
        restriction = self._restriction(spec.value)
        for a, b in edges:
            edge = ways.edges[a, b]
            source, target = Version(spec.value, joints[a], spec.stage), Version(spec.value, joints[b], spec.stage)
            consumers = tuple(dict.fromkeys(reach[joints[b]]))
            nbytes = self.bound.mesh.sent(edge, joints[a], self.prices.nbytes(spec.value))
            times = self.prices.times(edge, joints[a], nbytes, restriction)
            again = self.prices.again(edge, joints[a], restriction)
            axis = self.bound.mesh.name(edge.axes)
            steps.append(Step(source, target, axis, edge.axes, edge.conversion, nbytes, consumers, (), times, again))
        if fixed_to is not None:
            joint = fixed_to.made[choice[fixed_to.source]]
            steps = [_staged(s, joint) for s in steps]
        return steps

    # -- faults ---------------------------------------------------------------------------------

    def _impossible(self, node: Node) -> Diagnostic:
        pins = [(v, self.bound.parameters[v]) for v in node.operands if v in self.bound.parameters]
        spoken = [(v, pin) for v, pin in pins if pin.span is not None]
        names = {p.value: p.name for p in self.bound.graph.parameters}
        where = f"in '{node.module}'" if node.module else "in the model"
        placed = " and ".join(f"'{names[v]}'" for v, _ in spoken or pins)
        text = f"'{op_name(node.op)}' {where} has no strategy that uses {placed or 'its operands'} as placed"
        span, line = spoken[0][1].span if spoken else None, node.source or None
        if node.operands and self.bound.dims.signature(node) is None:
            told = notes(node)
            return Diagnostic("PLC402", f"{text}: it has no rule", span, hint=start(node), notes=told, model_line=line)
        return Diagnostic("PLC301", text, span, notes=tuple(self._whole(node, spoken, names)), model_line=line)

    def _whole(self, node: Node, spoken: list[tuple[Value, Pin]], names: Mapping[Value, str]) -> Iterator[str]:
        """Why a cut parameter is no good: the op needs the dim whole."""
        signature = self.bound.dims.signature(node)
        if not isinstance(signature, Signature):
            return
        for value, pin in spoken:
            for kind in pin.types:
                place = self.bound.dims.locate(value, kind.over) if kind.over else None  # type: ignore[arg-type]
                dims = signature.operands[node.operands.index(value)]
                if place is not None and signature.blocked & set(dims[place[0]]):
                    yield f"each rank needs the whole of dim {place[0]} of '{names[value]}' for it"

    def _returned_otherwise(self, output: Output, pin: Pin | None) -> Diagnostic:
        """An output that is a parameter is returned as that is placed: nothing converts a parameter."""
        assert output.value is not None
        source = output.value
        producer = {value: node for node in self.bound.graph.nodes for value in node.results}
        while source in producer:  # a view or a cast of one
            (source,) = producer[source].operands
        own = self.bound.parameters[source]
        names = {p.value: p.name for p in self.bound.graph.parameters}
        text = f"output '{output.name}' is parameter '{names[source]}', which is placed otherwise than it is returned"
        hint = f"place both alike, or write: output {output.name} : auto"
        notes = [f"the parameter is placed at {own.span}"] if own.span and pin and pin.span else []
        return Diagnostic("PLC301", text, pin.span if pin and pin.span else own.span, hint, tuple(notes))


def infeasible(bound: Bound, error: Infeasible) -> Diagnostic:
    """The diagnostic for a problem without a solution, at the statement nearest to where it broke."""
    name = str(error.args[0]) if error.args else ""
    text = "no choice of placements satisfies every statement around"
    for node in bound.graph.nodes:
        if node.name == name:
            span = Causes(bound).nearest_span(node)
            line = node.source or None
            return Diagnostic("PLC301", f"{text} '{name}' in '{node.module}'", span, model_line=line)
    return Diagnostic("PLC301", f"{text} '{name}'")


def _staged(step: Step, joint: Joint) -> Step:
    """The step that reaches the placed type makes the value's stage 1."""
    if step.target.type != joint:
        return step
    return dataclasses.replace(step, target=Version(step.value, joint, 1))
