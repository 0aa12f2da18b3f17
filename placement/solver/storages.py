"""Where every tensor of a program lies in memory, and which storages each op's backward keeps.

A backward keeps storages, not tensors: a view keeps all of its base, and what two ops need is kept once. So the
program is gone through once, op by op, with the place of every tensor; torch itself says, on tensors without data,
what is a view and what is a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch

from placement.graph._torch import schema_arguments, schema_name, storage_of
from placement.graph.factors import Factors
from placement.graph.ir import Node, Value, leaves, substitute
from placement.rules import JointStrategy, lookup
from placement.rules.core import arguments
from placement.rules.saved import LAYOUTS, Kept, kept
from placement.solver.alike import Alike
from placement.solver.bind import Bound
from placement.types import Joint, R


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A storage kept for the backward.

    value: the value that it is, or whose elements it was made for. node: the op that keeps it, the first one of
    several. own: whether it is a tensor of the op's own, such as a mask or statistics.
    """

    value: Value
    node: Node
    nbytes: int
    own: bool


class Layout(NamedTuple):
    """Where a tensor lies: its storage, and how it goes through it."""

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Use:
    """A storage that an op's backward keeps; ``storage`` is -1 for a tensor of its own."""

    kept: Kept
    storage: int
    nbytes: int


class Made(NamedTuple):
    """A result of an op: its strides, and the operand that it is a view of (-1: none)."""

    strides: tuple[int, ...]
    base: int


Lie = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""


@dataclass(slots=True)
class _Heap:
    """The storages: bytes and first value of each; those that nobody keeps for the backward are exempt."""

    nbytes: list[int] = field(default_factory=list[int])
    values: list[Value] = field(default_factory=list[Value])
    exempt: set[int] = field(default_factory=set[int])

    def new(self, value: Value, nbytes: int) -> int:
        self.nbytes.append(nbytes)
        self.values.append(value)
        return len(self.nbytes) - 1


class Laying:
    """How ops lay out their results; those of alike ops on operands that lie alike are found once."""

    def __init__(self, alike: Alike) -> None:
        self.alike = alike
        self._known: dict[object, tuple[Made, ...]] = {}

    def made(self, node: Node, lying: Sequence[Lie], shapes: Sequence[tuple[int, ...]]) -> tuple[Made, ...]:
        """How the results lie, of these shapes, where the operands lie so: as torch does it on tensors without data."""
        key = self.alike.of(node), tuple(lying), tuple(shapes)
        found = self._known.get(key)
        if found is None:
            name = schema_name(node.op)[1]
            if name in LAYOUTS:
                found = tuple(Made(_ordered(shape, LAYOUTS[name]), -1) for shape in shapes)
            else:
                found = _run(node, lying, *self._local_arguments(node, shapes), shapes)
            self._known[key] = found
        return found

    def _local_arguments(self, node: Node, shapes: Sequence[tuple[int, ...]]) -> tuple[Any, dict[str, Any]]:
        """The op's arguments with sizes as one rank has them; a placeholder stands for each operand."""

        def local(leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return _OPERAND
            return leaf if isinstance(leaf, bool | float | str) or not _is_size(leaf) else self.alike.size(leaf)

        args, kwargs = substitute(node.args, local), {k: substitute(v, local) for k, v in node.kwargs.items()}
        rule = lookup(node)
        named = {rule.shape: shapes[0], rule.piece: None, rule.pieces: None} if rule and shapes else {}
        if rule and (rule.piece or rule.pieces):
            dim = arguments(node)["dim"]
            sizes = tuple(shape[dim] for shape in shapes)
            named |= {rule.piece: sizes[0]}
            if len(shapes) == len(node.outputs):
                named |= {rule.pieces: sizes}
        names = [name for name, _ in schema_arguments(node.op)]
        for name, value in named.items():
            if name is not None and value is not None and name in names:
                position = names.index(name)
                if position < len(args):
                    args = (*args[:position], value, *args[position + 1 :])
                elif name in kwargs:
                    kwargs[name] = value
        return args, kwargs


class Walk:
    """Goes through a program in order; subclasses say in which types its values are."""

    def __init__(self, bound: Bound, alike: Alike | None = None) -> None:
        self.bound, self.graph = bound, bound.graph
        self.alike = alike or Alike(bound)
        self.heap = _Heap()
        self.uses: dict[Node, tuple[Use, ...]] = {}
        self.laying = Laying(self.alike)
        self._kept: dict[object, tuple[Node, tuple[Kept, ...]]] = {}

    # -- what subclasses say --------------------------------------------------------------------

    def _taken(self, node: Node) -> list[Layout]:
        """Where the operands lie."""
        raise NotImplementedError

    def _made(self, value: Value, layout: Layout) -> None:
        """Note where a value lies that has just been made."""
        raise NotImplementedError

    def _strategy(self, node: Node) -> JointStrategy | None:
        """How an op is run, None for the op as it is."""
        raise NotImplementedError

    def shape(self, value: Value, joint: Joint) -> tuple[int, ...]:
        """The shape of a value of this type on one rank."""
        return self.bound.mesh.shape(self.bound.dims, value, joint, self.alike.shape(value))  # type: ignore[return-value]

    # -- the walk -------------------------------------------------------------------------------

    def run(self) -> None:
        """Place every value, and find what every op keeps."""
        for value in (item.value for item in self.graph.inputs):
            self._made(value, self.fresh(value, self._kind(value)))
        for value in (item.value for item in self.graph.parameters):
            layout = self.fresh(value, self._kind(value))
            self.heap.exempt.add(layout.storage)
            self._made(value, layout)
        for node in self.graph.nodes:
            operands = self._taken(node)
            results = self._results(node, operands)
            for value, layout in zip(node.results, results, strict=True):
                self._made(value, layout)
            self.uses[node] = tuple(self._uses(node, operands, results))

    def _kind(self, value: Value) -> Joint:
        """The type in which a value is made."""
        raise NotImplementedError

    def fresh(self, value: Value, kind: Joint) -> Layout:
        """A tensor of a storage of its own, contiguous."""
        shape = self.shape(value, kind)
        return Layout(self.heap.new(value, prod(shape) * value.dtype.itemsize), shape, contiguous(shape))

    def saved(self) -> tuple[Saved, ...]:
        """Every storage that some backward keeps, once, in the order in which they are first kept."""
        found: list[Saved] = []
        seen = set(self.heap.exempt)
        for node, uses in self.uses.items():
            for use in uses:
                if use.storage < 0:
                    found.append(Saved(use.kept.value, node, use.nbytes, own=True))
                elif (storage := self._stands_for(use.storage)) not in seen:
                    seen.add(storage)
                    found.append(Saved(self.heap.values[storage], node, self.heap.nbytes[storage], own=False))
        return tuple(found)

    def _stands_for(self, storage: int) -> int:
        """The storage that is kept instead of this one."""
        return storage

    def _results(self, node: Node, operands: list[Layout]) -> list[Layout]:
        shapes = [self.shape(value, self._kind(value)) for value in node.results]
        made = self._lies(node, operands, shapes)
        return [
            Layout(operands[one.base].storage, shape, one.strides)
            if one.base >= 0
            else Layout(self.heap.new(value, prod(shape) * value.dtype.itemsize), shape, one.strides)
            for value, shape, one in zip(node.results, shapes, made, strict=True)
        ]

    def _lies(self, node: Node, operands: list[Layout], shapes: list[tuple[int, ...]]) -> tuple[Made, ...]:
        """How the results lie in memory."""
        strategy = self._strategy(node)
        if strategy is not None and strategy.code is not None:
            order = LAYOUTS.get(f"{schema_name(node.op)[1]} by {strategy.implementation}")
            return tuple(Made(_ordered(shape, order) if order else contiguous(shape), -1) for shape in shapes)
        return self.laying.made(node, [layout[1:] for layout in operands], shapes)

    # -- what is kept ---------------------------------------------------------------------------

    def _uses(self, node: Node, operands: list[Layout], results: list[Layout]) -> Iterator[Use]:
        strategy = self._strategy(node)
        return self.used(node, strategy.implementation if strategy else "", operands, results)

    def used(self, node: Node, implementation: str, operands: list[Layout], results: list[Layout]) -> Iterator[Use]:
        """What an op keeps that is run so."""
        key = self.alike.of(node), implementation
        if key not in self._kept:
            self._kept[key] = node, kept(node, implementation)
        first, found = self._kept[key]
        values = (*node.operands, *node.results)
        alike = (*first.operands, *first.results)
        for one in found:
            value = values[alike.index(one.value)]
            own = one if first is node else Kept(value, one.itemsize, one.dims, one.times, one.folded)
            yield from self._use(node, own, operands, results)

    def _use(self, node: Node, one: Kept, operands: list[Layout], results: list[Layout]) -> Iterator[Use]:
        """What keeping ``one`` keeps: for a value that is taken twice in two types, both."""
        places = [layout for v, layout in zip(node.operands, operands, strict=True) if v is one.value]
        places += [layout for v, layout in zip(node.results, results, strict=True) if v is one.value]
        for layout in places[:1] if one.itemsize else dict.fromkeys(places):
            if one.itemsize:
                dims = range(len(layout.shape)) if one.dims is None else one.dims
                yield Use(one, -1, prod(layout.shape[d] for d in dims) * one.itemsize * self.alike.size(one.times))
            elif not layout.shape:
                continue
            elif one.folded and (copied := _copied(node, node.operands.index(one.value), layout, results[0].shape)):
                yield Use(one, -1, copied * one.value.dtype.itemsize)
            else:
                yield Use(one, layout.storage, self.heap.nbytes[layout.storage])


class OneDevice(Walk):
    """The model as it is: every value whole, nothing converted.

    What is a view on a rank of one of the ``thin`` axes is taken to be one, whatever torch says.
    """

    def __init__(self, bound: Bound, alike: Alike | None = None, thin: Sequence[Thin] = ()) -> None:
        super().__init__(bound, alike)
        self.layouts: dict[Value, Layout] = {}
        self.whole = Joint([R] * len(bound.mesh.axes))
        self.thin = thin
        self.run()

    def shape(self, value: Value, joint: Joint) -> tuple[int, ...]:  # noqa: ARG002, D102
        return self.alike.shape(value)

    def fresh(self, value: Value, kind: Joint) -> Layout:  # noqa: D102
        for axis in self.thin:
            axis.fresh(value)
        return super().fresh(value, kind)

    def _lies(self, node: Node, operands: list[Layout], shapes: list[tuple[int, ...]]) -> tuple[Made, ...]:
        made = super()._lies(node, operands, shapes)
        for axis in reversed(self.thin):
            views = axis.made(node, self.laying)
            pairs = zip(made, views, strict=True)
            made = tuple([Made(one.strides, view.base) if one.base < 0 <= view.base else one for one, view in pairs])
        return made

    def _taken(self, node: Node) -> list[Layout]:
        return [self.layouts[v] for v in node.operands]

    def _made(self, value: Value, layout: Layout) -> None:
        self.layouts[value] = layout

    def _strategy(self, node: Node) -> JointStrategy | None:  # noqa: ARG002 - as of every walk
        return None

    def _kind(self, value: Value) -> Joint:  # noqa: ARG002 - as of every walk
        return self.whole


class Thin:
    """Every value cut by one axis to blocks of one element, where some dim has as many parts as there are ranks.

    There results are views that on one device may be copies. ``allowed`` are the runs that may be cut, None for all.
    """

    def __init__(self, bound: Bound, axis: int, allowed: frozenset[Factors] | None, alike: Alike) -> None:
        self.dims, self.context, self.allowed, self.alike = bound.dims, bound.contexts[axis], allowed, alike
        self._lies: dict[Value, Lie] = {}
        self._shapes: dict[object, tuple[int, ...]] = {}

    def fresh(self, value: Value) -> None:
        """Note a value that lies in row-major order."""
        shape = self._shape(value)
        self._lies[value] = shape, contiguous(shape)

    def made(self, node: Node, laying: Laying) -> tuple[Made, ...]:
        """How the results of an op lie."""
        shapes = [self._shape(value) for value in node.results]
        made = laying.made(node, [self._lies[value] for value in node.operands], shapes)
        for value, shape, one in zip(node.results, shapes, made, strict=True):
            self._lies[value] = shape, one.strides
        return made

    def _shape(self, value: Value) -> tuple[int, ...]:
        dims, whole = self.dims.of(value), self.alike.shape(value)
        if (dims, whole) not in self._shapes:
            self._shapes[dims, whole] = self._cut(value, whole)
        return self._shapes[dims, whole]

    def _cut(self, value: Value, whole: tuple[int, ...]) -> tuple[int, ...]:
        n = self.context.n
        for run in (run for dim in self.dims.of(value) for run in self.context.runs(dim)):
            if self.allowed is not None and run not in self.allowed:
                continue
            if prod(self.alike.size(f.size) for f in run) == n and self.context.shard(value, run) is not None:
                place = self.dims.locate(value, run)
                assert place is not None
                return tuple(size // n if dim == place[0] else size for dim, size in enumerate(whole))
        return whole


# -- geometry -------------------------------------------------------------------------------------

_OPERAND = "<operand>"


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor in row-major order."""
    return _ordered(shape, range(len(shape)))


def _ordered(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides where ``order`` lists the dims from the outermost in memory."""
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _is_size(leaf: Any) -> bool:
    return isinstance(leaf, int) or hasattr(leaf, "free_symbols")


def _tensor(lie: Lie, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(*lie, dtype=dtype, device="meta")


def _run(
    node: Node, lying: Sequence[Lie], args: Any, kwargs: dict[str, Any], shapes: Sequence[tuple[int, ...]]
) -> tuple[Made, ...]:
    tensors = [_tensor(lie, v.dtype) for lie, v in zip(lying, node.operands, strict=True)]
    given = iter(tensors)

    def filled(leaf: Any) -> Any:
        return next(given) if leaf is _OPERAND else "meta" if isinstance(leaf, torch.device) else leaf

    args, kwargs = substitute(args, filled), {k: substitute(v, filled) for k, v in kwargs.items()}
    try:
        with torch.no_grad():
            outs = node.op(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return tuple(Made(contiguous(shape), -1) for shape in shapes)  # an op that needs data
    made = [out for out in leaves(list(outs) if isinstance(outs, tuple | list) else [outs]) if out is not None]
    made = [out for out, value in zip(made, node.outputs, strict=True) if value is not None]
    storages = [storage_of(t) for t in tensors]
    return tuple(
        Made(tuple(out.stride()), storages.index(storage_of(out)) if storage_of(out) in storages else -1)
        if tuple(out.shape) == shape
        else Made(contiguous(shape), -1)
        for out, shape in zip(made, shapes, strict=True)
    )


def _copied(node: Node, position: int, layout: Layout, result: tuple[int, ...]) -> int:
    """How many elements a product copies of an operand, to have a stack of matrices: 0 where a view is one."""
    rank = len(layout.shape)
    if rank <= 2:
        return 0
    tensor = _tensor(layout[1:], torch.int8)
    if len(node.operands[1 - position].shape) <= 2:
        rows = tensor if position == 0 else tensor.mT
        stack = rows.reshape(-1, rows.shape[-1])
    else:
        stack = tensor.expand(*result[:-2], *layout.shape[-2:]).reshape(-1, *layout.shape[-2:])
    return 0 if storage_of(stack) == storage_of(tensor) else stack.numel()


def block_strides(layout: Layout, dim: int, outer: int, n: int) -> tuple[int, ...] | None:
    """The strides of one of ``n`` blocks where it is a view, None where it is copied."""
    tensor = _tensor(layout[1:], torch.int8)
    part = layout.shape[dim] // (outer * n)
    shape = (*layout.shape[:dim], outer * part, *layout.shape[dim + 1 :])
    block = tensor.unflatten(dim, (outer, n, part)).select(dim + 1, 0).reshape(shape).contiguous()
    return tuple(block.stride()) if storage_of(block) == storage_of(tensor) else None
