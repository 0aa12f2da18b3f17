"""A bound program as numbers, and the numbers' solution as a plan.

One variable per op (its strategy), per input and parameter (its type) and per output; one net per value.
A ``value`` line restricts the strategies of the op that produces the value; where no strategy gives such
a type (a row-parallel product is always partial) the value is converted at once, by a variable of its own.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from placement.graph.ir import Node, Output, Parameter, Value, evaluate, numel, op_name
from placement.graph.signature import Signature
from placement.lang.diagnostics import Diagnostic, PlacementError
from placement.rules import Strategy, lookup, strategies
from placement.rules.skeleton import notes, start
from placement.solver.bind import Bound, Pin
from placement.solver.causes import Causes
from placement.solver.eliminate import Infeasible, solve
from placement.solver.plan import Hook, Plan, Step, Version
from placement.solver.problem import Net, Problem, Variable
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
    """The plan that costs least. Raises PlacementError (PLC301, PLC402) where the placements cannot be met."""
    started = time.perf_counter()
    builder = _Builder(bound)
    problem = builder.problem()
    built = time.perf_counter()
    try:
        solution = solve(problem)
    except Infeasible as error:
        raise PlacementError([builder.infeasible(error)], sources) from error
    solved = time.perf_counter()
    result = builder.plan(solution.choice, solution.cost, solution.bound)
    result.verify()
    stages = {"strategies": built - started, "solve": solved - built, "plan": time.perf_counter() - solved}
    return dataclasses.replace(result, stages=stages)


def price(bound: Bound) -> Cost | None:
    """What the plan that costs least costs: picoseconds, bytes kept, launches. None where there is no plan."""
    try:
        return solve(_Builder(bound).problem()).cost
    except (Infeasible, PlacementError):
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
        self.compute_of: dict[int, list[int]] = {}
        self.bytes: dict[Value, int] = {}
        self.prices: dict[tuple[int, bool, bool, bool], dict[tuple[Kind, Kind], Cost | None]] = {}

    # -- problem --------------------------------------------------------------------------------

    def problem(self) -> Problem:
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
        costs, compute = zip(*(self._strategy_cost(node, s) for s in offered), strict=True)
        index = self._variable(node.name, offered, costs, node)
        self.compute_of[index] = list(compute)
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
        total, launches = 0, 0
        for action in (found.forward, found.backward):
            total += self.machine.collective(action, nbytes)
            if hook and action is Action.ALL_REDUCE:  # one flat launch for all hooks: only its bytes count here
                total -= self.machine.collective(action, 0)
            else:
                launches += self.machine.launches(action)
        return total, 0, launches

    def _local(self, value: Value, kind: Type) -> int:
        return self._nbytes(value) // (self.context.n if kind.over else 1)

    def _strategy_cost(self, node: Node, strategy: Strategy) -> tuple[Cost, int]:
        """The price of an op: its work forward and backward, and the collectives inside it."""
        found = lookup(node)
        operands = list(zip(node.operands, strategy.operands, strict=True))
        results = list(zip(node.results, strategy.results, strict=True))
        view = found is not None and found.view
        traffic = 0 if view else sum(self._local(v, t) for v, t in (*operands, *results))
        flops = self._flops(node, strategy)
        dtype = str(node.results[0].dtype).removeprefix("torch.") if node.results else "float32"
        work = self.machine.compute(flops, traffic, dtype)
        if any(v.requires_grad for v in node.results):
            grads = sum(v.requires_grad for v in node.operands) if flops else 1
            work += self.machine.compute(flops * grads, traffic, dtype)
        sent = sum(self.machine.collective(c.action, c.nbytes) for c in strategy.collectives)
        launches = sum(self.machine.launches(c.action) for c in strategy.collectives)
        return (work + sent, self._saved(node, strategy), launches), work

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

    def _saved(self, node: Node, strategy: Strategy) -> int:
        """Bytes kept for the backward: what a product needs of its other factors, what a nonlinear op took."""
        if not any(v.requires_grad for v in node.results):
            return 0
        found = lookup(node)
        signature = found.signature(node) if found else None
        if (
            found is None
            or found.view
            or not isinstance(signature, Signature)
            or len(signature.additive) == len(node.operands)
        ):
            return 0
        kept = 0
        parameters = self.fixed
        for index, (value, kind) in enumerate(zip(node.operands, strategy.operands, strict=True)):
            others = [v for i, v in enumerate(node.operands) if i != index]
            needed = any(v.requires_grad for v in others) if signature.linear else value.requires_grad
            if needed and value not in parameters:
                kept += self._local(value, kind)
        return kept

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
        compute = sum(costs[choice[index]] for index, costs in self.compute_of.items())
        saved = sum(self.costs[index][choice[index]][1] for index in self.compute_of)
        return Plan(self.bound, strategy_of, produced, uses, tuple(steps), tuple(hooks), cost, lower, compute, saved)

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
            steps.append(Step(source, target, self.bound.axis.name, found, self._nbytes(spec.value), consumers, ()))
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
        return Diagnostic("PLC301", text, span, model_line=line)

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
