"""In-place ops as functional ones: what is written takes the place of what was there, through views too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from placement.graph._torch import (
    aten,
    gives_a_view,
    overload_name,
    schema_arguments,
    schema_name,
    written_arguments,
)
from placement.graph.ir import Node, Value, op_name, substitute
from placement.lang.diagnostics import Diagnostic, PlacementError

_SCATTERS: dict[Any, Any] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}
"""For an op that views a part of its operand, the op that gives the operand with that part replaced."""

_REARRANGED = {
    aten.flatten, aten.permute, aten.reshape, aten.squeeze, aten.t, aten.transpose, aten.unflatten, aten.unsqueeze,
    aten.view,
}  # fmt: skip
"""Views of all of their operand, each element once; or, some of them and at times, copies."""


def functional(
    nodes: Iterable[Node], returned: Iterable[Value], state: Mapping[Value, str] | None = None
) -> tuple[list[Node], Mapping[Value, Value]]:
    """The nodes without in-place ops, and what in the end has taken the place of each value written to.

    ``op_(x, ...)`` becomes ``op(x, ...)``, whose result takes the place of x from there on. A write to a slice of x is
    a write to x: x with that slice replaced takes its place. A write to x in another shape is a write to that alone: x
    itself may not be read again. Raises PlacementError (PLC407) where it is, for a write through any other view, and
    where a view that was taken before a write is read after it, or ``returned``; and where ``state`` is written to,
    parameters and buffers with their names, which would have to outlive the call.
    """
    maker = _Functional()
    made = list(maker.run(nodes))
    for value, name in (state or {}).items():
        write = maker.writes.get(value, maker.overwritten.get(value))
        if write is not None:
            raise _fault(f"the model writes to '{name}' in forward", write)
    maker.refuse_overwritten(returned)
    return made, maker.now


class _Functional:
    def __init__(self) -> None:
        self.now: dict[Value, Value] = {}  # what has taken the place of a value that was written to
        self.views: dict[Value, Node] = {}  # the op that made a view
        self.overwritten: dict[Value, Node] = {}  # views whose base was written to later, and by what
        self.writes: dict[Value, Node] = {}  # what wrote to a value first
        self.count = 0

    def run(self, nodes: Iterable[Node]) -> Iterator[Node]:
        for original in nodes:
            node = mapped(original, self.now)
            self.refuse_overwritten(node.operands)
            if gives_a_view(node.op) and node.operands and not passes_on(node) and not _casts(node):
                self.views.update((result, node) for result in node.results)
            if written_arguments(node.op):
                yield from self._write(node)
                continue
            yield node
            if passes_on(node):
                self.now[node.results[0]] = node.operands[0]

    def refuse_overwritten(self, read: Iterable[Value]) -> None:
        """Raise where a view is read whose base was written to since it was taken."""
        for write in (self.overwritten[value] for value in read if value in self.overwritten):
            raise _fault(f"in-place '{op_name(write.op)}' changes a view that is read later", write)

    def _write(self, node: Node) -> Iterator[Node]:
        target, (result,) = node.operands[0], node.results
        op = _functional_twin(node)
        if op is None:
            raise _fault(f"no functional form of '{op_name(node.op)}'", node)
        yield from _kept_dtype(dataclasses.replace(node, op=op))
        written = {target}
        value = result
        self.writes.setdefault(target, node)
        self._replace(target, result)
        while target in self.views:
            view = self.views[target]
            if getattr(view.op, "_overloadpacket", None) in _REARRANGED:
                self._spoil(view.operands[0], node)
                break
            scatter, target = _SCATTERS.get(view.op), view.operands[0]
            if scatter is None:
                raise _fault(f"in-place '{op_name(node.op)}' writes through a view", node)
            part, value = value, (yield from self._scatter(scatter, view, value, node))
            self._replace(target, value)
            self.views[part] = mapped(view, {target: value})  # what is written to the part later is written there, too
            self.writes.setdefault(target, node)
            written |= {target, part}
        self._overwrite(written, node)

    def _spoil(self, base: Value, write: Node) -> None:
        """What a view was taken of, up to its storage, may have changed with the view."""
        self.overwritten[base] = write
        while base in self.views:
            base = self.views[base].operands[0]
            self.overwritten[base] = write

    def _scatter(self, op: Callable[..., Any], view: Node, part: Value, node: Node) -> Iterator[Node]:
        """The node that puts ``part`` where ``view`` had looked; its result is returned to who delegates to this."""
        base = view.operands[0]
        self.count += 1
        needs = base.requires_grad or part.requires_grad
        result = dataclasses.replace(base, name=f"{base.name}_written_{self.count}", requires_grad=needs)
        rest = dict(zip((name for name, _ in schema_arguments(view.op)), view.args, strict=False)) | dict(view.kwargs)
        rest.pop("self")
        yield Node(result.name, op, (base, part), rest, (result,), node.stack, node.source)
        return result

    def _replace(self, old: Value, new: Value) -> None:
        for value in [v for v, now in self.now.items() if now is old]:
            self.now[value] = new
        self.now[old] = new

    def _overwrite(self, written: set[Value], write: Node) -> None:
        """Views of what was written to, but for the one that it was written through, show what is no more."""
        for view, made in self.views.items():
            if view not in written and self._base(made.operands[0]) in {self._base(v) for v in written}:
                self.overwritten[view] = write

    def _base(self, value: Value) -> Value:
        while value in self.views:
            value = self.views[value].operands[0]
        return value


def passes_on(node: Node) -> bool:
    """Whether the node returns the very tensor that it was given: a dropout that drops nothing, an idle detach."""
    if node.op is aten.detach.default:
        return not node.operands[0].requires_grad
    if node.op is not aten.dropout.default:
        return False
    names = [name for name, _ in schema_arguments(node.op)]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return given["p"] == 0 or given["train"] is False


def _casts(node: Node) -> bool:
    """Whether the node casts to another dtype than it was given, and so copies."""
    casts = schema_name(node.op) in {("aten", "to"), ("aten", "type_as")}
    return casts and node.results[0].dtype != node.operands[0].dtype


def _kept_dtype(node: Node) -> Iterator[Node]:
    """The node, of which in place the result had its target's dtype, also where its operands' are wider."""
    (result,) = node.results
    wide = result.dtype
    if len({value.dtype for value in node.operands}) > 1 and torch.Tag.pointwise in node.op.tags:  # type: ignore[attr-defined]

        def single(leaf: Any) -> Any:
            one = isinstance(leaf, Value)
            return torch.ones((1,) * len(leaf.shape), dtype=leaf.dtype, device="meta") if one else leaf

        kwargs = {name: substitute(argument, single) for name, argument in node.kwargs.items()}
        wide = node.op(*substitute(node.args, single), **kwargs).dtype
    if wide == result.dtype:
        yield node
        return
    made = dataclasses.replace(result, name=f"{result.name}_wide", dtype=wide)
    yield dataclasses.replace(node, name=made.name, outputs=(made,))
    cast = {"op": aten.to.dtype, "args": (made, result.dtype), "kwargs": {}}
    yield dataclasses.replace(node, **cast)


def _fault(text: str, node: Node) -> PlacementError:
    return PlacementError([Diagnostic("PLC407", text, model_line=node.source or None)])


def _functional_twin(node: Node) -> Callable[..., Any] | None:
    namespace, name = schema_name(node.op)
    if written_arguments(node.op) != (0,):
        return None
    plain = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")  # `x &= y` is `__iand__`
    packet = getattr(getattr(torch.ops, namespace), plain, None)
    return getattr(packet, overload_name(node.op), None) if packet is not None else None


def mapped(node: Node, replaced: Mapping[Value, Value]) -> Node:
    """The node with its operands replaced."""
    if not replaced or not any(v in replaced for v in node.operands):
        return node

    def now(leaf: Any) -> Any:
        return replaced.get(leaf, leaf) if isinstance(leaf, Value) else leaf

    return dataclasses.replace(
        node, args=substitute(node.args, now), kwargs={k: substitute(v, now) for k, v in node.kwargs.items()}
    )
