"""What a plan's values and types are called when a person reads of them: module paths, and the user's own words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, TypeVar, cast

from placement.graph.ir import Call, Node, Output, Parameter, Value, op_name
from placement.solver.bind import parameter_dims
from placement.types import Action, Joint, Kind, Type

if TYPE_CHECKING:
    from placement.graph.factors import Factors
    from placement.solver.plan import Plan

Stack = tuple[Call, ...]
_T = TypeVar("_T", bound=Hashable)


class Names:
    """Names for everything in one plan. Each value has one name, and no two values share one."""

    def __init__(self, plan: Plan) -> None:
        graph = plan.graph
        self._dims = plan.bound.dims
        self._axes = plan.mesh.axes
        self._zigzag = plan.mesh.zigzag
        self._modules = graph.modules
        self.parameters: dict[Value, Parameter] = {p.value: p for p in graph.parameters}
        self.producers: dict[Value, Node] = {v: node for node in graph.nodes for v in node.results}
        self.order: dict[Node, int] = {node: index for index, node in enumerate(graph.nodes)}
        self._ops = _operations(graph.nodes)
        self._values: dict[Value, str] = {item.value: item.name for item in (*graph.inputs, *graph.parameters)}
        taken = set(self._values.values())
        for value in self.producers:
            name = self._made(value)
            while name in taken:  # an op and a submodule may have the same name
                name += "'"
            taken.add(name)
            self._values[value] = name

    def value(self, value: Value) -> str:
        """The innermost module that returns the value first, else ``module.op``; a parameter's or input's own name."""
        return self._values[value]

    def user(self, user: Node | Output) -> str:
        """``module.op`` of a node, ``output NAME`` of an output."""
        return self._ops[user] if isinstance(user, Node) else f"output {user.name}"

    def placements(self, value: Value, joint: Joint) -> dict[str, str]:
        """The placement on each axis of the mesh."""
        pairs = enumerate(zip(self._axes, joint, strict=True))
        return {axis.name: self.placement(value, kind, (index,)) for index, (axis, kind) in pairs}

    def axes(self, axes: Iterable[int]) -> tuple[str, ...]:
        """The names of the axes at these positions of the mesh."""
        return tuple(self._axes[index].name for index in axes)

    def placement(self, value: Value, kind: Type, axes: Sequence[int]) -> str:
        """The type on ``axes`` as users write it: ``Replicate``, ``Partial``, ``Shard(seq)``, ``stored Shard(0)``."""
        if kind.kind is Kind.P:
            return "Partial"
        if kind.kind is not Kind.S:
            return "Replicate"
        if kind.stored:
            place = self._dims.locate(value, cast("Factors", kind.over))
            assert place is not None
            return f"stored Shard({place[0]})"  # of a whole dim, which a parameter's shape shows
        order = ", zigzag" if any((axis, kind.over) in self._zigzag for axis in axes) else ""
        return f"Shard({self._dim(value, kind)}{order})"

    def stack(self, user: Node | Output | None) -> Stack:
        """The module calls around a node; none around an output or what no op makes."""
        return user.stack if isinstance(user, Node) else ()

    def _made(self, value: Value) -> str:
        node = self.producers[value]
        for call in reversed(node.stack):
            returned = self._modules[call.path].returned.get(call.index, ()) if call.path in self._modules else ()
            if returned and returned[0] is value:
                return repr(call)
        position = node.results.index(value)
        return self._ops[node] + (f".{position}" if position else "")

    def _dim(self, value: Value, kind: Type) -> str | int:
        run = cast("Factors", kind.over)
        for name, factors in self._dims.names.items():
            rest = factors
            while rest and rest[0].piece:
                rest = rest[1:]
            if rest[: len(run)] == run:
                return name
        place = self._dims.locate(value, run)
        before = [f for inner, _ in self._dims.segments(value, run) for f in inner]
        if place is None or not all(factor.piece for factor in (*place[1], *before)):
            return "·".join(map(str, run))  # no word of the user's says it
        own = self._own_dims(self.parameters.get(value))
        return own[place[0]] if place[0] < len(own) else place[0]

    def _own_dims(self, parameter: Parameter | None) -> tuple[str, ...]:
        """What users call the dims of a parameter by the class that owns it: ``out`` and ``in`` of a Linear."""
        return parameter_dims(self._modules, parameter) if parameter else ()


def _operations(nodes: Iterable[Node]) -> dict[Node, str]:
    """``module.op`` of every node; the second ``add`` of one module call is ``add_1``."""
    seen: Counter[str] = Counter()
    names: dict[Node, str] = {}
    for node in nodes:
        plain = join(repr(node.stack[-1]) if node.stack else "", operation(node))
        names[node] = plain + (f"_{seen[plain]}" if seen[plain] else "")
        seen[plain] += 1
    return names


def operation(node: Node) -> str:
    """``add`` for ``aten.add.Tensor``."""
    parts = op_name(node.op).split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def common(stacks: Sequence[Stack]) -> str:
    """The innermost module that all of the stacks lie in, '' for the root."""
    calls = shared(stacks)
    return repr(calls[-1]) if calls else ""


def shared(sequences: Iterable[Sequence[_T]]) -> list[_T]:
    """What all sequences start with."""
    columns = zip(*sequences, strict=False)
    return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]


def told(placed: Mapping[str, str]) -> str:
    """``Shard(batch) @ dp, Shard(vocab) @ tp``: without the axis where there is one, without those replicated."""
    if len(placed) == 1:
        return next(iter(placed.values()))
    return ", ".join(f"{p} @ {axis}" for axis, p in placed.items() if p != "Replicate") or "Replicate"


def join(module: str, name: str) -> str:
    """``module.name``; either may be ''."""
    return f"{module}.{name}" if module and name else module or name


def within(path: str, module: str) -> bool:
    """Whether ``path`` is ``module`` or lies in it; everything lies in the root ''."""
    return not module or path == module or path.startswith(f"{module}.")


def relative(path: str, module: str) -> str:
    """``path`` as seen from ``module``: '' for the module itself, unchanged from outside."""
    if not module or not within(path, module):
        return path
    return path[len(module) + 1 :]


def visible(action: Action) -> str:
    """The action as reports call it: what only writes zeros is ``none``."""
    return Action.NONE.value if action in (Action.KEEP, Action.PAD) else action.value
