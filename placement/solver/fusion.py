"""Several ops of a solved plan as the one that torch has for them: fewer launches, and fewer tensors kept.

Three plain patterns: a linear layer and its bias; a root mean square norm that is written out; attention whose keys
and values were repeated for the query heads of each group. They are joined only where nothing stands between: no
conversion, no other reader, no border of a module. What is joined gives what the ops gave, to rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from placement.graph.attention import ATTENTION
from placement.graph.ir import Node, Output, Value
from placement.rules import JointStrategy
from placement.rules.core import arguments, lookup
from placement.solver.layers import inside
from placement.types import P, Type

if TYPE_CHECKING:
    from placement.solver.bind import Bound
    from placement.solver.plan import Plan, Version

aten = torch.ops.aten

_Use = tuple[Node, int]  # an operand: the op, and its position


@dataclass(frozen=True, slots=True)
class _Joined:
    """Ops, in program order, and the one in their place.

    uses: of each of its operands, the use it stands for. kept: of values that are kept for the backward no longer, the
    one that is kept for them, or None.
    """

    nodes: tuple[Node, ...]
    made: Node
    uses: tuple[_Use, ...]
    kept: Mapping[Value, Value | None] = dataclasses.field(default_factory=dict)


def fused(plan: Plan) -> Plan:
    """The plan with the ops of each pattern as one."""
    return _Fusion(plan).plan_with_fewer_ops()


def joinable(plan: Plan) -> list[Node]:
    """The last of the ops of each pattern in the plan, whether a line keeps them as written or not."""
    fusion = _Fusion(plan)
    fusion.written = frozenset()
    return list(fusion.found())


def kept_instead(bound: Bound) -> dict[Value, Value | None]:
    """Where ops are joined, what the backward keeps in place of values that it would keep, None for nothing.

    For plans that convert nothing between them, which are all that join them: of others it is less than they keep.
    """
    return {value: other for found in _Ops(bound).found().values() for value, other in found.kept.items()}


class _Ops:
    """The patterns in a program, whatever its plan."""

    def __init__(self, bound: Bound) -> None:
        self.bound, self.graph = bound, bound.graph
        self.written = bound.lowered("ops = written")
        self.makers: dict[Value, Node] = {value: node for node in self.graph.nodes for value in node.results}
        self.users: dict[Value, list[Node | Output]] = {}
        for node in self.graph.nodes:
            for value in node.operands:
                self.users.setdefault(value, []).append(node)
        for output in self.graph.outputs:
            if output.value is not None:
                self.users.setdefault(output.value, []).append(output)

    def found(self) -> dict[Node, _Joined]:
        """The ops that are joined, by the last of them."""
        joined: dict[Node, _Joined] = {}
        gone: set[Node] = set()
        for node in self.graph.nodes:
            for pattern in _PATTERNS.get(node.op, ()):
                found = pattern(self, node)
                if found is not None and not gone.intersection(found.nodes) and self.alone(found):
                    joined[found.nodes[-1]] = found
                    gone.update(found.nodes)
        return joined

    def alone(self, found: _Joined) -> bool:
        """Whether nothing stands between the ops, and each runs as it is."""
        last = found.nodes[-1]
        inner = {value for node in found.nodes[:-1] for value in node.results}
        return (
            all(node.stack == last.stack for node in found.nodes)
            and all(user in found.nodes for value in inner for user in self.users.get(value, ()))
            and not inside(last, self.written)
        )

    def maker(self, value: Any, *ops: Any) -> Node | None:
        """The op that gives the value, if it is one of ``ops``."""
        node = self.makers.get(value) if isinstance(value, Value) else None
        return node if node is not None and node.op in ops else None

    def only_user(self, value: Value, *ops: Any) -> Node | None:
        """The op that is alone in reading the value, if it is one of ``ops``."""
        users = self.users.get(value, [])
        user = users[0] if len(users) == 1 else None
        return user if isinstance(user, Node) and user.op in ops else None

    def type_of(self, use: _Use) -> Iterable[Type]:  # noqa: ARG002 - what plans know
        """The types in which an operand is taken, on each axis."""
        return ()

    def sums(self, value: Value) -> bool:  # noqa: ARG002 - as above
        """Whether each rank has a term of the value."""
        return False


class _Fusion(_Ops):
    """The patterns of a plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.bound)
        self.plan = plan
        self.converted = {step.value for step in plan.steps}

    def alone(self, found: _Joined) -> bool:
        inner = {value for node in found.nodes[:-1] for value in node.results}
        plain = not any(self.plan.strategies[node].leading for node in found.nodes[:-1]) and self._runs_joined(found)
        return plain and not inner & self.converted and super().alone(found)

    def _runs_joined(self, found: _Joined) -> bool:
        """Whether the last op runs as it is, or by an implementation that also does for the op in place of all."""
        last, rule = found.nodes[-1], lookup(found.made)
        name = self.plan.strategies[last].implementation
        known = rule.implementations if rule is not None and last.op is found.made.op else ()
        return not name or any(one.name == name and one.joined for one in known)

    def type_of(self, use: _Use) -> Iterable[Type]:
        return self.plan.uses[use].type

    def sums(self, value: Value) -> bool:
        return P in self.plan.produced[value]

    def plan_with_fewer_ops(self) -> Plan:
        joined = self.found()
        return self._without(joined, {n for found in joined.values() for n in found.nodes}) if joined else self.plan

    def _without(self, joined: Mapping[Node, _Joined], gone: set[Node]) -> Plan:
        plan = self.plan
        instead = {node: found.made for found in joined.values() for node in found.nodes}
        nodes = tuple(
            joined[node].made if node in joined else node
            for node in plan.graph.nodes
            if node in joined or node not in gone
        )
        strategies = {node: s for node, s in plan.strategies.items() if node not in gone}
        uses: dict[tuple[Node | Output, int], Version] = {k: v for k, v in plan.uses.items() if k[0] not in gone}
        work = {node: times for node, times in plan.work.items() if node not in gone}
        inside = {node: sent for node, sent in plan.inside.items() if node not in gone}
        for found in joined.values():
            strategies[found.made] = self._strategy(found)
            uses |= {(found.made, position): plan.uses[use] for position, use in enumerate(found.uses)}
            if found.nodes[-1] in plan.inside:
                inside[found.made] = plan.inside[found.nodes[-1]]
            forward, backward = zip(*(plan.work[node] for node in found.nodes), strict=True)
            work[found.made] = sum(forward), sum(backward)
        steps = tuple(
            dataclasses.replace(
                step,
                consumers=tuple(dict.fromkeys(_now(user, instead) for user in step.consumers)),
                layers=tuple(instead.get(node, node) for node in step.layers),
                product=step.product and instead.get(step.product, step.product),
            )
            for step in plan.steps
        )
        graph = dataclasses.replace(plan.graph, nodes=nodes)
        bound = dataclasses.replace(plan.bound, graph=graph)
        made = dataclasses.replace(
            plan, bound=bound, strategies=strategies, uses=uses, steps=steps, work=work, inside=inside
        )
        made.verify()
        return made

    def _strategy(self, found: _Joined) -> JointStrategy:
        operands = tuple(self.plan.uses[use].type for use in found.uses)
        results = tuple(self.plan.produced[value] for value in found.made.results)
        last = self.plan.strategies[found.nodes[-1]]
        parts = tuple(
            dataclasses.replace(
                part, operands=tuple(kinds[axis] for kinds in operands), results=tuple(kinds[axis] for kinds in results)
            )
            for axis, part in enumerate(last.parts)
        )
        return JointStrategy(parts, operands, results, last.leading)


def _now(user: Node | Output, instead: Mapping[Node, Node]) -> Node | Output:
    return instead.get(user, user) if isinstance(user, Node) else user


# -- patterns ---------------------------------------------------------------------------------------


def _biased(fusion: _Ops, node: Node) -> _Joined | None:
    """``linear(x, w) + b``."""
    if len(node.operands) != 2 or len(node.args) != 2 or node.kwargs:
        return None
    product, bias = node.operands
    layer = fusion.makers.get(product)
    found = lookup(layer) if layer is not None else None
    if layer is None or found is None or not found.layer or len(layer.operands) != 2:
        return None
    if len(bias.shape) != 1 or bias.dtype != product.dtype or bias in fusion.makers:
        return None
    if fusion.sums(product) or bias.shape[0] != product.shape[-1]:
        return None
    return _Joined((layer, node), _made(node, layer.op, (*layer.args, bias)), ((layer, 0), (layer, 1), (node, 1)))


def _normed(fusion: _Ops, node: Node) -> _Joined | None:
    """``x * rsqrt(mean(x ** 2, -1) + eps) * weight``, from the root on; perhaps computed in a wider dtype."""
    added = fusion.maker(node.args[0], aten.add.Tensor)
    mean = fusion.maker(added.args[0], aten.mean.dim) if added is not None else None
    square = fusion.maker(mean.args[0], aten.pow.Tensor_Scalar) if mean is not None else None
    scaled = fusion.only_user(node.results[0], aten.mul.Tensor)
    if added is None or mean is None or square is None or scaled is None or square.args[1] != 2:
        return None
    source, eps = square.args[0], added.args[1]
    where = arguments(mean)
    last = len(source.shape) - 1
    dims = tuple(dim % len(source.shape) for dim in where["dim"] or ())
    if (
        not isinstance(eps, float)
        or added.kwargs
        or dims != (last,)
        or not where["keepdim"]
        or len(scaled.operands) != 2
    ):
        return None
    at = next((i for i, value in enumerate(scaled.operands) if value is source), None)
    if at is None or scaled.operands[1 - at] is not node.results[0]:
        return None
    if any(one.results[0].dtype != source.dtype for one in (square, mean, added, node, scaled)):
        return None
    if fusion.type_of((square, 0)) != fusion.type_of((scaled, at)):
        return None
    return _weighted(fusion, (square, mean, added, node, scaled), source, eps)


def _weighted(fusion: _Ops, nodes: tuple[Node, ...], source: Value, eps: float) -> _Joined | None:
    """The norm with the casts around it and its weight."""
    result, use = nodes[-1].results[0], (nodes[0], 0)
    kept: dict[Value, Value | None] = {}
    wide = fusion.maker(source, aten.to.dtype)
    narrow = fusion.only_user(result, aten.to.dtype) if wide is not None else None
    if wide is not None and narrow is not None and narrow.results[0].dtype == wide.operands[0].dtype:
        if result.dtype is not torch.float32 or narrow.results[0].dtype not in (torch.float16, torch.bfloat16):
            return None  # torch's own is as wide as that, and no wider
        nodes, source, result, use = (wide, *nodes, narrow), wide.operands[0], narrow.results[0], (wide, 0)
        kept[wide.results[0]] = source
    size = source.shape[-1]
    product = fusion.only_user(result, aten.mul.Tensor)
    uses: tuple[_Use, ...] = (use,)
    weight = None
    if product is not None and len(product.operands) == 2:
        at = product.operands.index(result)
        other = product.operands[1 - at]
        if len(other.shape) == 1 and other.shape[0] == size and other.dtype == result.dtype and other is not result:
            weight, nodes, uses = other, (*nodes, product), (*uses, (product, 1 - at))
            kept[result] = None  # the normalised rows
    if not isinstance(size, int) or any(kind.over for kind in _along(fusion, source, use)):
        return None
    return _Joined(nodes, _made(nodes[-1], aten.rms_norm.default, (source, (size,), weight, eps)), uses, kept)


def _along(fusion: _Ops, source: Value, use: _Use) -> Iterator[Any]:
    """The types that cut the last dim of a value."""
    for kind in fusion.type_of(use):
        place = fusion.bound.dims.locate(source, kind.over) if kind.over else None  # type: ignore[arg-type]
        if place is not None and place[0] == len(source.shape) - 1:
            yield kind


def _grouped(fusion: _Ops, node: Node) -> _Joined | None:
    """Attention to keys and values that are repeated for the query heads of each group."""
    given = arguments(node)
    narrow = node.operands[0].dtype in (torch.float16, torch.bfloat16)
    query, key = node.operands[:2]
    if given.get("attn_mask") is not None or given["dropout_p"] or given["enable_gqa"]:
        return None
    if len(query.shape) != 4 or query.shape[:2] != key.shape[:2]:
        return None
    if not narrow and fusion.bound.mesh.device.name != "cpu":  # kernels that group heads are of narrow dtypes there
        return None
    sides = [_repeated(fusion, (node, position)) for position in (1, 2)]
    if any(side is None for side in sides):
        return None
    (keys, key), (values, value) = (side for side in sides if side is not None)
    sources = [use[0].operands[use[1]] for use in (key, value)]
    if sources[0].shape[1] != sources[1].shape[1]:
        return None
    args = (node.operands[0], *sources, *node.args[3:])
    made = _made(node, node.op, args, {**node.kwargs, "enable_gqa": True})
    nodes = tuple(dict.fromkeys((*keys, *values, node)))
    kept = dict(zip(node.operands[1:3], sources, strict=True))
    marks = ((node, position) for position in range(3, len(node.operands)))
    return _Joined(nodes, made, ((node, 0), key, value, *marks), kept)


def _repeated(fusion: _Ops, use: _Use) -> tuple[tuple[Node, ...], _Use] | None:
    """The ops that repeat heads [batch, heads, tokens, size] for the operand, and what they take: cut as they give."""
    node, position = use
    nodes = _opened(fusion.makers, node.operands[position])
    # Of heads that are cut through a group a rank has queries of several groups: they stay repeated.
    if nodes is None or fusion.type_of((nodes[0], 0)) != fusion.type_of(use):
        return None
    return nodes, (nodes[0], 0)


def _opened(makers: Mapping[Value, Node], value: Value) -> tuple[Node, Node, Node] | None:
    """The ops that repeat heads: a dim beside them, its expansion, and one of both."""
    joined = makers.get(value)
    expanded = makers.get(joined.operands[0]) if joined is not None and joined.op is aten.reshape.default else None
    opened = makers.get(expanded.operands[0]) if expanded is not None and expanded.op is aten.expand.default else None
    if joined is None or expanded is None or opened is None or opened.op is not aten.unsqueeze.default:
        return None
    (source,), (wide,) = opened.operands, expanded.results
    if len(source.shape) != 4 or len(wide.shape) != 5 or len(value.shape) != 4 or opened.args[1] not in (2, -3):
        return None
    batch, heads, tokens, size = source.shape
    times = wide.shape[2]
    same = wide.shape[:2] == (batch, heads) and wide.shape[3:] == (tokens, size)
    return (opened, expanded, joined) if same and value.shape == (batch, heads * times, tokens, size) else None


def _made(like: Node, op: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Node:
    return dataclasses.replace(like, op=op, args=args, kwargs=dict(kwargs or {}))


_PATTERNS: dict[Any, tuple[Callable[[_Ops, Node], _Joined | None], ...]] = {
    aten.add.Tensor: (_biased,),
    aten.rsqrt.default: (_normed,),
    aten.scaled_dot_product_attention.default: (_grouped,),
    ATTENTION: (_grouped,),
}
