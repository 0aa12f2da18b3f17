"""A bound program as numbers, and the numbers' solution as a plan.

One variable per op (its strategy), per input and parameter (its type) and per output; one net per value.
A ``value`` line restricts the strategies of the op that produces the value; where no strategy gives such
a type (a row-parallel product is always partial) the value is converted at once, by a variable of its own.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from placement.graph.ir import Node, Output, Parameter, Value, evaluate, numel, op_name
from placement.graph.signature import Signature
from placement.lang.diagnostics import Diagnostic, PlacementError
from placement.rules import Strategy, lookup, strategies
from placement.rules.skeleton import notes, start
from placement.solver.bind import Bound, Pin
from placement.solver.capacity import TooLittle, fitted
from placement.solver.causes import Causes
from placement.solver.eliminate import Infeasible, Undecided, solve
from placement.solver.keeping import Keeping
from placement.solver.plan import Hook, Plan, Step, Version
from placement.solver.problem import Net, Problem, Solution, Variable
from placement.solver.steiner import conversion_table, conversion_tree
from placement.types import Action, Conversion, I, Kind, P, R, Type, conversion

Cost = tuple[int, int, int]


@dataclass(slots=True)
class _NetSpec:
    """A net while it grows: who makes the value, at which stage, and who asks for it."""

    value: Value
    stage: int
    source: int
    made: tuple[Type, ...]
    consumers: list[tuple[int, Node | Output, int, tuple[Type, ...]]] = field(default_factory=list)


def plan(bound: Bound, sources: Mapping[str, str] | None = None) -> Plan:
    """The plan that costs least, of those within the limit of memory if there is one.

    Raises PlacementError where the placements (PLC301, PLC402) or the limit (PLC305) cannot be met.
    """
    started = time.perf_counter()
    builder = _Builder(bound)
    problem = builder.problem()
    built = time.perf_counter()
    try:
        solution = builder.solved(problem)
    except Infeasible as error:
        raise PlacementError([builder.infeasible(error)], sources) from error
    except TooLittle as error:
        raise PlacementError([error.diagnostic], sources) from error
    except Undecided as error:
        text = "no plan was found before the solver's tables passed their limit; there may be one"
        hint = "place some values with 'value' lines: each one placed is one choice less"
        raise PlacementError([Diagnostic("PLC302", text, hint=hint, notes=(str(error),))], sources) from error
    solved = time.perf_counter()
    result = builder.plan(solution.choice, solution.cost, solution.bound)
    result.verify()
    if solution.bound < solution.cost:
        result = dataclasses.replace(result, bound=_noted(bound, solution))
    stages = {"strategies": built - started, "solve": solved - built, "plan": time.perf_counter() - solved}
    return dataclasses.replace(result, stages=stages)


def _noted(bound: Bound, solution: Solution) -> Bound:
    """With the note that the plan is not proven to be the best."""
    gap = 100 * (solution.cost[0] - solution.bound[0]) / max(solution.bound[0], 1)
    more = f"{gap:.2g}" if gap < 100 else f"{gap:.0f}"
    text = f"the plan is not proven to cost least, at most {more} % more: the solver's tables would pass their limit"
    if bound.limit is not None:
        text = f"within the limit of memory the plan is not proven to cost least, at most {more} % more"
        return dataclasses.replace(
            bound, notes=(*bound.notes, Diagnostic("PLC305", text, bound.limit.span, severity="note"))
        )
    return dataclasses.replace(bound, notes=(*bound.notes, Diagnostic("PLC302", text, severity="note")))


def price(bound: Bound) -> Cost | None:
    """What the plan that costs least costs: picoseconds, bytes kept, launches. None where there is no plan."""
    try:
        builder = _Builder(bound)
        return builder.solved(builder.problem()).cost
    except (Infeasible, Undecided, TooLittle, PlacementError):
        return None


class _Builder:
    def __init__(self, bound: Bound) -> None:
        self.bound = bound
        self.context = bound.context
        self.machine = bound.machine
        self.names: list[str] = []
        self.choices: list[tuple[Strategy, ...] | tuple[Type, ...]] = []
        self.costs: list[list[Cost]] = []
        self.owner: list[Node | Parameter | Output | Value] = []
        self.nets: dict[Value, _NetSpec] = {}
        self.pinned: dict[Value, _NetSpec] = {}
        self.fixed = self._derived_from_parameters()
        self.sealed = self._inside_placed_modules()
        self.divided = {f for pin in bound.inputs.values() for t in pin.types for f in t.over}
        self.work_of: dict[int, list[tuple[int, int]]] = {}
        self.keeping = Keeping(bound, least=bound.limit is not None)
        self.bytes: dict[Value, int] = {}
        self.prices: dict[tuple[int, bool, bool, bool], dict[tuple[Kind, Kind], Cost | None]] = {}

    def solved(self, problem: Problem) -> Solution:
        """The choices that cost least. Raises Infeasible, Undecided, TooLittle."""
        if self.bound.limit is None:
            return solve(problem)
        return fitted(self.bound, self.bound.limit, problem, lambda s: self.plan(s.choice, s.cost, s.bound))

    # -- problem --------------------------------------------------------------------------------

    def problem(self) -> Problem:
        """The numbers: a variable for each choice, a net for each value."""
        for item in self.bound.graph.inputs:
            self._source(item.value, self.bound.inputs[item.value])
        for parameter in self.bound.graph.parameters:
            self._source(parameter.value, self.bound.parameters[parameter.value])
        for node in self.bound.graph.nodes:
            self._node(node)
        for output, pin in self.bound.outputs.items():
            self._output(output, pin)
        variables = tuple(
            Variable(name, np.array(costs, dtype=np.int64).T.reshape(3, -1))
            for name, costs in zip(self.names, self.costs, strict=True)
        )
        specs = [*self.nets.values(), *self.pinned.values()]
        problem = Problem(variables, tuple(self._net(spec) for spec in specs))
        problem.verify()
        return problem

    def _variable(
        self, name: str, choices: Sequence[Strategy] | Sequence[Type], costs: Sequence[Cost], owner: object
    ) -> int:
        self.names.append(name)
        self.choices.append(tuple(choices))  # type: ignore[arg-type]
        self.costs.append(list(costs))
        self.owner.append(owner)  # type: ignore[arg-type]
        return len(self.names) - 1

    def _source(self, value: Value, pin: Pin) -> None:
        index = self._variable(value.name, pin.types, [(0, 0, 0)] * len(pin.types), value)
        self.nets[value] = _NetSpec(value, 0, index, pin.types)

    def _node(self, node: Node) -> None:
        offered = [s for s in strategies(node, self.context) if self._accepts(node, s)]
        for result in node.results:
            offered = self._within_pin(result, offered, node.results.index(result))
        if not offered:
            raise PlacementError([self._impossible(node)])
        costs, work = zip(*(self._strategy_cost(node, s) for s in offered), strict=True)
        index = self._variable(node.name, offered, costs, node)
        self.work_of[index] = list(work)
        for position, operand in enumerate(node.operands):
            self._consumers(operand).append((index, node, position, tuple(s.operands[position] for s in offered)))
        for position, result in enumerate(node.results):
            self.nets[result] = _NetSpec(result, 0, index, tuple(s.results[position] for s in offered))
            pin = self.bound.values.get(result)
            if pin is not None and not set(self.nets[result].made) <= set(pin.types):
                extra = self._variable(f"{result.name} as placed", pin.types, [(0, 0, 0)] * len(pin.types), result)
                self.nets[result].consumers.append((extra, node, -1, pin.types))
                self.pinned[result] = _NetSpec(result, 1, extra, pin.types)

    def _consumers(self, value: Value) -> list[tuple[int, Node | Output, int, tuple[Type, ...]]]:
        return (self.pinned.get(value) or self.nets[value]).consumers

    def _output(self, output: Output, pin: Pin | None) -> None:
        assert output.value is not None
        kinds = (
            pin.types
            if pin
            else tuple(t for t in self.context.types(output.value) if t != R or not output.value.requires_grad)
        )
        allowed = self.fixed.get(output.value)
        if allowed is not None and not allowed & set(kinds):
            raise PlacementError([self._returned_otherwise(output, pin)])
        index = self._variable(f"output {output.name}", kinds, [(0, 0, 0)] * len(kinds), output)
        self._consumers(output.value).append((index, output, 0, kinds))

    def _accepts(self, node: Node, strategy: Strategy) -> bool:
        """Whether parameters are used as placed: a replicated one is never cut, a sharded one never gathered."""
        for value, kind in zip(node.operands, strategy.operands, strict=True):
            allowed = self.fixed.get(value)
            if allowed is not None and kind not in allowed:
                return False
        return not self._divides_work(node, strategy)

    def _divides_work(self, node: Node, strategy: Strategy) -> bool:
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
            or cuts <= self.divided
            or any(t.over for v in node.results if v in self.bound.values for t in self.bound.values[v].types)
        ):
            return False
        kept = {letter for dims in signature.results for dim in dims for letter in dim}
        return any(
            value in self.fixed and kind == R and not {letter for dim in dims for letter in dim} <= kept
            for value, kind, dims in zip(node.operands, strategy.operands, signature.operands, strict=True)
        )

    def _derived_from_parameters(self) -> dict[Value, frozenset[Type]]:
        """Parameters, and what is a view or a cast of one: the types in which they may be used."""
        result = {}
        for value, pin in self.bound.parameters.items():
            sharded = [t for t in pin.types if t.over]
            result[value] = frozenset(sharded) if sharded else frozenset({I, R, P} if value.requires_grad else {R, P})
        for node in self.bound.graph.nodes:
            if len(node.operands) == 1 and node.operands[0] in result and len(node.results) == 1 and not node.kwargs:
                found = lookup(node)
                if found and (found.view or node.results[0].shape == node.operands[0].shape):
                    kinds = result[node.operands[0]]
                    if not any(t.over for t in kinds):
                        result[node.results[0]] = kinds
        return result

    def _inside_placed_modules(self) -> frozenset[Value]:
        """Values that live inside a module without children whose output a ``value`` line places.

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
            if v in self.bound.values and node.module not in parents
        }
        outputs = {o.value for o in graph.outputs}
        return frozenset(
            value
            for node in graph.nodes
            if node.stack in placed and not any(t.over for v in node.operands for t in self.fixed.get(v, ()))
            for value in node.results
            if value not in outputs and all(user.stack == node.stack for user in users.get(value, ()))
        )

    def _within_pin(self, value: Value, offered: list[Strategy], position: int) -> list[Strategy]:
        pin = self.bound.values.get(value)
        if pin is None:
            return offered
        fitting = [s for s in offered if s.results[position] in pin.types]
        return fitting or offered

    def _net(self, spec: _NetSpec) -> Net:
        kinds = self._kinds(spec)
        ids = {kind: index for index, kind in enumerate(kinds)}
        return Net(
            name=spec.value.name,
            source=spec.source,
            produced=np.array([ids[t] for t in spec.made], dtype=np.int64),
            consumers=tuple(
                (v, np.array([ids[t] for t in asked], dtype=np.int64)) for v, _, _, asked in spec.consumers
            ),
            table=conversion_table(kinds, self._price(spec.value)),
        )

    def _kinds(self, spec: _NetSpec) -> tuple[Type, ...]:
        """The types that may occur: made, asked for, and the unsharded ones that chains pass through."""
        through = (I, R, P) if spec.value.requires_grad else (R, P)
        return tuple(dict.fromkeys((*through, *spec.made, *(t for *_, asked in spec.consumers for t in asked))))

    # -- prices ---------------------------------------------------------------------------------

    def _nbytes(self, value: Value) -> int:
        if value not in self.bytes:
            self.bytes[value] = numel(value.shape, self.context.hints) * value.dtype.itemsize
        return self.bytes[value]

    def _price(self, value: Value) -> Callable[[Type, Type], Cost | None]:
        """What a conversion of ``value`` costs, forward and backward. It depends on kinds only, so prices are kept."""
        nbytes, gradient = self._nbytes(value), value.requires_grad
        hook, sealed = value in self.fixed, value in self.sealed
        prices = self.prices.setdefault((nbytes, gradient, hook, sealed), {})

        def price(source: Type, target: Type) -> Cost | None:
            kinds = source.kind, target.kind
            if kinds not in prices:
                found = conversion(source, target, gradient=gradient)
                used_otherwise = hook and Kind.S in kinds  # a parameter is used as it is placed
                leaves_block = sealed and source.kind is Kind.S
                prices[kinds] = (
                    None if found is None or used_otherwise or leaves_block else self._sent(found, nbytes, hook=hook)
                )
            return prices[kinds]

        return price

    def _sent(self, found: Conversion, nbytes: int, *, hook: bool) -> Cost:
        actions = [a for a in (found.forward, found.backward) if not (hook and a is Action.ALL_REDUCE)]
        return sum(self._times(found, nbytes, hook=hook)), 0, sum(map(self.machine.launches, actions))

    def _times(self, found: Conversion, nbytes: int, *, hook: bool) -> tuple[int, int]:
        """Picoseconds forward and backward. All hooks are one flat launch: only their bytes count."""

        def time(action: Action) -> int:
            flat = hook and action is Action.ALL_REDUCE
            return self.machine.collective(action, nbytes) - (self.machine.collective(action, 0) if flat else 0)

        return time(found.forward), time(found.backward)

    def _local(self, value: Value, kind: Type) -> int:
        return self._nbytes(value) // (self.context.n if kind.over else 1)

    def _strategy_cost(self, node: Node, strategy: Strategy) -> tuple[Cost, tuple[int, int]]:
        """The price of an op with the collectives inside it, and of its work alone forward and backward."""
        found = lookup(node)
        operands = list(zip(node.operands, strategy.operands, strict=True))
        results = list(zip(node.results, strategy.results, strict=True))
        view = found is not None and found.view
        traffic = 0 if view else sum(self._local(v, t) for v, t in (*operands, *results))
        flops = self._flops(node, strategy)
        dtype = str(node.results[0].dtype).removeprefix("torch.") if node.results else "float32"
        forward, backward = self.machine.compute(flops, traffic, dtype), 0
        if any(v.requires_grad for v in node.results):
            grads = sum(v.requires_grad for v in node.operands) if flops else 1
            backward = self.machine.compute(flops * grads, traffic, dtype)
        sent = sum(self.machine.collective(c.action, c.nbytes) for c in strategy.collectives)
        launches = sum(self.machine.launches(c.action) for c in strategy.collectives)
        return (forward + backward + sent, self.keeping.nbytes(node, strategy), launches), (forward, backward)

    def _flops(self, node: Node, strategy: Strategy) -> int:
        found = lookup(node)
        signature = found.signature(node) if found and found.flops else None
        if not found or not found.flops or not isinstance(signature, Signature):
            return 0
        extent: dict[str, int] = {}
        for value, dims, kind in zip(node.operands, signature.operands, strategy.operands, strict=True):
            place = self.bound.dims.locate(value, kind.over) if kind.over else None  # type: ignore[arg-type]
            for index, (dim, size) in enumerate(zip(dims, value.shape, strict=True)):
                for letter in dim:
                    whole = evaluate(signature.sizes.get(letter, size), self.context.hints)
                    cut = place is not None and place[0] == index
                    extent[letter] = min(extent.get(letter, whole), whole // self.context.n if cut else whole)
        return found.flops(extent)

    # -- plan -----------------------------------------------------------------------------------

    def plan(self, choice: Sequence[int], cost: Cost, lower: Cost) -> Plan:
        chosen = [options[index] for options, index in zip(self.choices, choice, strict=True)]
        strategy_of = {
            owner: s
            for owner, s in zip(self.owner, chosen, strict=True)
            if isinstance(owner, Node) and isinstance(s, Strategy)
        }
        produced: dict[Value, Type] = {}
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
        hooks = [
            Hook(p, self.bound.axis.name, self._nbytes(p.value), causes.of_parameter(p.value, steps))
            for p in self.bound.graph.parameters
            if any(s.value is p.value and s.target.type == R and s.source.type == I for s in steps)
        ]
        owned = ((self.owner[index], times[choice[index]]) for index, times in self.work_of.items())
        work = {node: times for node, times in owned if isinstance(node, Node)}
        compute = sum(map(sum, work.values()))
        found = tuple(steps), tuple(hooks)
        return Plan(self.bound, strategy_of, produced, uses, *found, cost, lower, compute, cost[1], work)

    def _steps(
        self, spec: _NetSpec, made: Type, choice: Sequence[int], uses: dict[tuple[Node | Output, int], Version]
    ) -> Iterable[Step]:
        kinds = self._kinds(spec)
        ids = {kind: index for index, kind in enumerate(kinds)}
        asked, users = 0, {}
        for variable, user, position, types in spec.consumers:
            kind = types[choice[variable]]
            asked |= 1 << ids[kind]
            if position >= 0:
                uses[user, position] = Version(spec.value, kind, spec.stage)
            users.setdefault(kind, []).append(user)
        edges = conversion_tree(kinds, self._price(spec.value), ids[made], asked)
        fixed_to = self.pinned.get(spec.value) if spec.stage == 0 else None
        steps = []
        reach = {kinds[b]: users.get(kinds[b], []) for _, b in edges}
        for a, b in reversed(edges):
            reach[kinds[a]] = [*reach.get(kinds[a], users.get(kinds[a], [])), *reach[kinds[b]]]
        for a, b in edges:
            found = conversion(kinds[a], kinds[b], gradient=spec.value.requires_grad)
            assert found is not None
            source, target = Version(spec.value, kinds[a], spec.stage), Version(spec.value, kinds[b], spec.stage)
            consumers = tuple(dict.fromkeys(reach[kinds[b]]))
            nbytes = self._nbytes(spec.value)
            times = self._times(found, nbytes, hook=spec.value in self.fixed)
            steps.append(Step(source, target, self.bound.axis.name, found, nbytes, consumers, (), times))
        if fixed_to is not None:
            kind = fixed_to.made[choice[fixed_to.source]]
            steps = [_staged(s, kind) for s in steps]
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

    def infeasible(self, error: Infeasible) -> Diagnostic:
        """The diagnostic for a problem without a solution, at the statement nearest to where it broke."""
        name = str(error.args[0]) if error.args else ""
        for index, known in enumerate(self.names):
            owner = self.owner[index]
            if known == name and isinstance(owner, Node):
                causes = Causes(self.bound)
                span = causes.nearest_span(owner)
                return Diagnostic(
                    "PLC301",
                    f"no choice of placements satisfies every statement around '{owner.name}' in '{owner.module}'",
                    span,
                    model_line=owner.source or None,
                )
        return Diagnostic("PLC301", f"no choice of placements satisfies every statement around '{name}'")


def _staged(step: Step, kind: Type) -> Step:
    """The step that reaches the placed type makes the value's stage 1."""
    if step.target.type != kind:
        return step
    return dataclasses.replace(step, target=Version(step.value, kind, 1))
