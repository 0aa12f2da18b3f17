"""Makes a captured program functional and minimal: what every later stage may rely on.

After ``normalize`` a graph has no in-place op, no op that does nothing (same-dtype casts, ``contiguous``,
full slices, views to the same shape), no dead op, one spelling per operation (``linear`` and ``addmm``
carry no bias, every cast is ``to.dtype``, every regrouping of dims is ``reshape``), and no mask that attention has a
flag for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import sympy
import torch

from placement.graph._torch import aten, overload_name, to_copy, unsafe_view
from placement.graph.attention import with_masks
from placement.graph.functional import functional, mapped, passes_on
from placement.graph.ir import Graph, Node, Value, leaves
from placement.graph.rows import with_linears

Rewrite = Callable[["_Builder", Node], Value | tuple[Value | None, ...] | None]


def values_in(tree: Any) -> Iterator[Value]:
    """The values among the leaves of nested tuples."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, Value))


def normalize(graph: Graph) -> Graph:
    """The same program in normal form. Raises PlacementError (PLC407) for what cannot be made functional."""
    returned = (o.value for o in graph.outputs if o.value is not None)
    nodes, written = functional(graph.nodes, returned, {p.value: p.name for p in graph.parameters})
    builder = _Builder()
    for node in nodes:
        builder.add(node)
    modules = {
        path: dataclasses.replace(
            info,
            returned={i: tuple(map(builder.now, vs)) for i, vs in info.returned.items()},
            arguments={i: {k: builder.now(v) for k, v in vs.items()} for i, vs in info.arguments.items()},
        )
        for path, info in graph.modules.items()
    }
    outputs = tuple(
        o if o.value is None else dataclasses.replace(o, value=builder.now(written.get(o.value, o.value)))
        for o in graph.outputs
    )
    needed = {o.value for o in outputs if o.value is not None}
    given = [v for info in modules.values() for vs in info.returned.values() for v in vs]
    weights = {parameter.value for parameter in graph.parameters}
    constants = {p.value: graph.constants[p.name] for p in graph.parameters if p.name in graph.constants}
    nodes = _live(with_masks(builder.nodes, constants), needed)
    nodes = _live(with_linears(nodes, weights, [*needed, *given]), needed)
    result = dataclasses.replace(graph, nodes=nodes, outputs=outputs, modules=modules)
    result.verify()
    return result


def _live(nodes: Iterable[Node], returned: Iterable[Value]) -> tuple[Node, ...]:
    kept, needed = [], set(returned)
    for node in reversed(list(nodes)):
        if any(v in needed for v in node.results):
            kept.append(node)
            needed.update(node.operands)
    return tuple(reversed(kept))


# -- rewrites -----------------------------------------------------------------------------------


class _Builder:
    """The new program as it grows; a rewrite may add nodes, or say which value stands for the result."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.replaced: dict[Value, Value] = {}
        # Of tensors made without data: the dim in which parts have been written, and these by where they begin.
        self.filling: dict[Value, tuple[int, dict[int, Value]]] = {}

    def now(self, value: Value) -> Value:
        while value in self.replaced:
            value = self.replaced[value]
        return value

    def add(self, node: Node) -> None:
        node = _by_one_name(mapped(node, {v: self.now(v) for v in node.operands if v in self.replaced}))
        rewrite = _REWRITES.get(getattr(node.op, "_overloadpacket", node.op))
        result = rewrite(self, node) if rewrite else None
        if result is None:
            self.nodes.append(node)
            return
        results = result if isinstance(result, tuple) else (result,)
        for old, new in zip(node.outputs, results, strict=True):
            if old is not None and new is not None and old is not new:
                self.replaced[old] = new

    def make(self, like: Node, op: Callable[..., Any], args: tuple[Any, ...], result: Value, suffix: str = "") -> Value:
        """Add a node at the place of ``like``."""
        self.nodes.append(Node(like.name + suffix, op, args, {}, (result,), like.stack, like.source))
        return result


_ALIASES: dict[Any, Any] = {
    aten.multiply: aten.mul, aten.divide: aten.div, aten.true_divide: aten.div, aten.subtract: aten.sub,
    aten.absolute: aten.abs, aten.negative: aten.neg, aten.clip: aten.clamp, aten.concat: aten.cat,
    aten.concatenate: aten.cat, aten.greater: aten.gt, aten.greater_equal: aten.ge, aten.less: aten.lt,
    aten.less_equal: aten.le, aten.not_equal: aten.ne, aten.swapaxes: aten.swapdims, aten.moveaxis: aten.movedim,
}  # fmt: skip


def _by_one_name(node: Node) -> Node:
    """The node with the op that its op is another name of."""
    packet = _ALIASES.get(getattr(node.op, "_overloadpacket", None))
    op = getattr(packet, overload_name(node.op), None)
    return node if op is None else dataclasses.replace(node, op=op)


def _argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _identity(_: _Builder, node: Node) -> Value:
    return node.args[0]


def _cast(builder: _Builder, node: Node) -> Value:
    source, (result,) = node.args[0], node.results
    if source.dtype == result.dtype:
        return source
    return builder.make(node, aten.to.dtype, (source, result.dtype), result)


def _regroup(builder: _Builder, node: Node) -> Value:
    source, (result,) = node.args[0], node.results
    if source.shape == result.shape:
        return source
    asked = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], tuple) else ()
    shape = result.shape
    if len(asked) == len(shape):  # an inferred size stays inferred: it may be a count that happens to be one
        shape = tuple(-1 if a == -1 else s for a, s in zip(asked, shape, strict=True))
    return builder.make(node, aten.reshape.default, (source, shape), result)


def _expand(builder: _Builder, node: Node) -> Value | None:
    source, (result,) = node.args[0], node.results
    if source.shape == result.shape:
        return source
    if node.op is aten.expand_as.default:
        return builder.make(node, aten.expand.default, (source, result.shape), result)
    return None


def _broadcast(builder: _Builder, node: Node) -> tuple[Value | None, ...]:
    """Each tensor in the shape that all have together."""

    def extended(source: Value, result: Value | None, suffix: str) -> Value | None:
        if result is None or source.shape == result.shape:
            return source
        return builder.make(node, aten.expand.default, (source, result.shape), result, suffix)

    return tuple(extended(s, r, f"_{i}") for i, (s, r) in enumerate(zip(node.args[0], node.outputs, strict=True)))


def _filled(number: Any) -> Rewrite:
    """``new_ones(x, size)`` takes nothing of x but its dtype and device."""

    def rewrite(builder: _Builder, node: Node) -> Value:
        return _full(builder, node, _argument(node, 2, "fill_value") if number is None else number)

    return rewrite


def _full(builder: _Builder, node: Node, number: Any) -> Value:
    (result,) = node.results
    kwargs = {"dtype": result.dtype, "device": torch.device("cpu")}  # the emitter puts the program's own device
    builder.nodes.append(
        Node(node.name, aten.full.default, (result.shape, number), kwargs, (result,), node.stack, node.source)
    )
    return result


def _uninitialized(builder: _Builder, node: Node) -> None:
    (result,) = node.results
    builder.filling[result] = (0, {})


def _slice_scatter(builder: _Builder, node: Node) -> Value | None:
    """Parts that are written one after the other into a tensor without data, all of it, are put side by side."""
    base, part = node.args[:2]
    (result,) = node.results
    if base not in builder.filling or base.dtype != part.dtype or _argument(node, 5, "step", 1) != 1:
        return None
    dim = _argument(node, 2, "dim", 0) % len(base.shape)
    start, size = _argument(node, 3, "start") or 0, base.shape[dim]
    filled, parts = builder.filling[base]
    lengths = [value.shape[dim] for value in (part, *parts.values())]
    if (parts and filled != dim) or not all(isinstance(length, int) for length in (start, size, *lengths)) or start < 0:
        return None
    parts = {**parts, start: part}
    builder.filling[result] = (dim, parts)
    end = 0
    for begin in sorted(parts):
        if begin != end:
            return None
        end += parts[begin].shape[dim]
    if end != size:
        return None
    listed = tuple(parts[begin] for begin in sorted(parts))
    return part if len(listed) == 1 else builder.make(node, aten.cat.default, (listed, dim), result)


def _fill(builder: _Builder, node: Node) -> Value | None:
    """What ``fill_`` leaves behind is nothing but the number."""
    (result,) = node.results
    if result.requires_grad or isinstance(node.args[1], Value):
        return None
    return _full(builder, node, node.args[1])


def _copy(builder: _Builder, node: Node) -> Value:
    """What ``copy_`` leaves behind: the source, in the dtype and shape of the target."""
    source, (result,) = node.args[1], node.results
    if source.dtype != result.dtype:
        cast = dataclasses.replace(source, name=f"{result.name}_cast", dtype=result.dtype)
        source = builder.make(node, aten.to.dtype, (source, result.dtype), cast, "_cast")
    if source.shape == result.shape:
        return source
    return builder.make(node, aten.expand.default, (source, result.shape), result)


def _slice(_: _Builder, node: Node) -> Value | None:
    source, (result,) = node.args[0], node.results
    dim = _argument(node, 1, "dim", 0)
    start, step = _argument(node, 2, "start"), _argument(node, 4, "step", 1)
    same = source.shape[dim] == result.shape[dim]
    return source if same and start in (0, None) and step == 1 else None


def _dropout(builder: _Builder, node: Node) -> Value | tuple[Value | None, ...] | None:
    source, probability = node.args[0], node.args[1]
    first = node.outputs[0]
    if first is None or probability == 0 or passes_on(node):
        return source if len(node.outputs) == 1 else (source, None)
    if node.op is aten.native_dropout.default:
        builder.make(node, aten.dropout.default, (source, probability, True), first)
        return (first, None)
    return None


def _linear(builder: _Builder, node: Node) -> Value | None:
    """``linear`` with a bias is a product and a sum: the sum may be done after the product is reduced."""
    bias = _argument(node, 2, "bias")
    (result,) = node.results
    if bias is None:
        return None
    product = dataclasses.replace(
        result, name=f"{result.name}_product", requires_grad=node.args[0].requires_grad or node.args[1].requires_grad
    )
    builder.make(node, aten.linear.default, node.args[:2], product, "_product")
    return builder.make(node, aten.add.Tensor, (product, bias), result)


def _addmm(builder: _Builder, node: Node) -> Value | None:
    bias, left, right = node.args[:3]
    (result,) = node.results
    if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1:
        return None
    product = dataclasses.replace(
        result, name=f"{result.name}_product", requires_grad=left.requires_grad or right.requires_grad
    )
    builder.make(node, aten.mm.default, (left, right), product, "_product")
    return builder.make(node, aten.add.Tensor, (product, bias), result)


def _neutral(neutral: int) -> Rewrite:
    def rewrite(_: _Builder, node: Node) -> Value | None:
        left, right = node.args[:2]
        (result,) = node.results
        if isinstance(right, Value) or not isinstance(left, Value) or node.kwargs:
            return None
        unchanged = left.dtype == result.dtype and not isinstance(right, sympy.Basic) and right == neutral
        return left if unchanged else None

    return rewrite


def _detach(_: _Builder, node: Node) -> Value | None:
    return None if node.args[0].requires_grad else node.args[0]


_REWRITES: dict[Any, Rewrite] = {
    aten.alias: _identity,
    aten.contiguous: _identity,
    aten.clone: _identity,
    aten.lift_fresh_copy: _identity,
    aten.detach: _detach,
    aten.detach_: _detach,
    aten.to: _cast,
    to_copy: _cast,
    aten.type_as: _cast,
    aten.view: _regroup,
    aten.reshape: _regroup,
    unsafe_view: _regroup,
    aten.flatten: _regroup,
    aten.unflatten: _regroup,
    aten.view_as: _regroup,
    aten.reshape_as: _regroup,
    aten.squeeze: _regroup,
    aten.broadcast_tensors: _broadcast,
    aten.expand: _expand,
    aten.expand_as: _expand,
    aten.copy: _copy,
    aten.new_full: _filled(None),
    aten.new_ones: _filled(1),
    aten.new_zeros: _filled(0),
    aten.fill: _fill,
    aten.new_empty: _uninitialized,
    aten.empty: _uninitialized,
    aten.empty_like: _uninitialized,
    aten.slice_scatter: _slice_scatter,
    aten.slice: _slice,
    aten.dropout: _dropout,
    aten.native_dropout: _dropout,
    aten.linear: _linear,
    aten.addmm: _addmm,
    aten.mul: _neutral(1),
    aten.div: _neutral(1),
    aten.add: _neutral(0),
    aten.sub: _neutral(0),
}
