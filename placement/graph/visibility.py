"""Masks that the program works out from nothing but positions, and what they say.

Captured programs spell masks out: positions are counted, looked up, compared. An element of such a tensor is known as
a function of its own indices: an integer that is affine in them, or a set of affine conditions that all hold. So a mask
that lets every query see the keys up to its own place is found out, whatever it was computed with, and becomes the
flag that attention has for it; one that hides nothing is left out. Nothing of size [queries, keys] is made then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import gcd
from typing import Any

import torch

from placement.graph._torch import schema_name
from placement.graph.ir import Node, Value, arguments


@dataclasses.dataclass(frozen=True, slots=True)
class Affine:
    """An integer as a function of an element's indices: ``const`` and, by dim, what its index is multiplied with."""

    const: int
    by: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def __add__(self, other: Affine) -> Affine:
        by = {dim: self.by.get(dim, 0) + other.by.get(dim, 0) for dim in {**self.by, **other.by}}
        return Affine(self.const + other.const, {dim: factor for dim, factor in sorted(by.items()) if factor})

    def __mul__(self, factor: int) -> Affine:
        return Affine(self.const * factor, {dim: own * factor for dim, own in self.by.items()} if factor else {})

    def __sub__(self, other: Affine) -> Affine:
        return self + other * -1

    def moved(self, to: Callable[[int], int]) -> Affine:
        """The same with other numbers for the dims."""
        return Affine(self.const, {to(dim): factor for dim, factor in self.by.items()})


Conditions = tuple[Affine, ...]
"""A truth: that each of these is at least 0. Without any it holds everywhere."""

Known = Affine | Conditions
FALSE: Conditions = (Affine(-1),)
TRUE: Conditions = ()


def _all_of(conditions: Sequence[Affine]) -> Conditions:
    """The conditions in least numbers, without those that hold anyway; FALSE where one never does."""
    conditions = [_least(c) for c in conditions]
    if any(c.const < 0 and all(factor < 0 for factor in c.by.values()) for c in conditions):
        return FALSE
    left = [c for c in conditions if c.const < 0 or any(factor < 0 for factor in c.by.values())]  # no index is
    return tuple(c for index, c in enumerate(left) if c not in left[:index])


def _least(condition: Affine) -> Affine:
    """``2 q - 2 k + 1 >= 0`` is ``q - k >= 0``, of integers."""
    by = gcd(*condition.by.values()) or 1
    return Affine(condition.const // by, {dim: factor // by for dim, factor in condition.by.items()})


def spelled_out(nodes: Iterable[Node]) -> Iterator[Node]:
    """The ops of a program, in order, with attention's own flag in place of masks that say as much."""
    known = _Known()
    for node in nodes:
        known.note(node)
        yield _without_mask(node, known.values) if schema_name(node.op) == _ATTENTION else node


_ATTENTION = ("aten", "scaled_dot_product_attention")


def _without_mask(node: Node, known: Mapping[Value, Known]) -> Node:
    given = arguments(node)
    mask, query, key = given["attn_mask"], given["query"], given["key"]
    said = known.get(mask) if isinstance(mask, Value) else None
    if not isinstance(said, tuple) or given["is_causal"]:
        return node
    rank = len(mask.shape)
    causal = rank >= 2 and said == (Affine(0, {rank - 2: 1, rank - 1: -1}),)
    square = query.shape[-2] == key.shape[-2] == mask.shape[-2] == mask.shape[-1] if rank >= 2 else False
    # A mask may have more batches than what it masks: its shape is the result's then.
    same = len(node.results[0].shape) >= rank and all(
        size in (1, own) for size, own in zip(mask.shape[-3::-1], node.results[0].shape[-3::-1], strict=False)
    )
    if not same or not (said == TRUE or (causal and square)):
        return node
    given |= {"attn_mask": None, "is_causal": said != TRUE}
    args = tuple(given[name] for name in ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"))
    return dataclasses.replace(node, args=args, kwargs={"scale": given["scale"], "enable_gqa": given["enable_gqa"]})


class _Known:
    """What is known of values, op by op; of what is not in ``values`` nothing is."""

    def __init__(self) -> None:
        self.values: dict[Value, Known] = {}

    def note(self, node: Node) -> None:
        """Note what follows of an op's result."""
        namespace, name = schema_name(node.op)
        reader = _READERS.get(name) if namespace == "aten" and len(node.results) == 1 else None
        found = reader(self, node, arguments(node)) if reader else None
        if found is None:
            return
        (value,) = node.results
        if value.dtype not in _WIDE:
            return  # numbers that wrap around are not what is counted
        alone = frozenset(dim for dim, size in enumerate(value.shape) if size == 1)  # at the only index, which is 0
        self.values[value] = _without(found, alone) if alone else found

    def aligned(self, operand: Any, rank: int) -> Known | None:
        """An operand as it takes part in a result of ``rank`` dims: broadcast, or a number."""
        if isinstance(operand, bool):
            return TRUE if operand else FALSE
        if isinstance(operand, int):
            return Affine(operand)
        if not isinstance(operand, Value) or operand not in self.values:
            return None
        more = rank - len(operand.shape)
        return _moved(self.values[operand], lambda dim: dim + more)

    def pair(self, node: Node, given: Mapping[str, Any]) -> tuple[Affine, Affine] | None:
        """Both operands as integers."""
        rank = len(node.results[0].shape)
        left, right = (self.aligned(given[name], rank) for name in ("self", "other"))
        return (left, right) if isinstance(left, Affine) and isinstance(right, Affine) else None


_WIDE = (torch.bool, torch.int32, torch.int64)


def _without(known: Known, dims: frozenset[int]) -> Known:
    """Where the indices of ``dims`` are 0."""

    def cut(one: Affine) -> Affine:
        return Affine(one.const, {dim: factor for dim, factor in one.by.items() if dim not in dims})

    return cut(known) if isinstance(known, Affine) else _all_of(list(map(cut, known)))


def _moved(known: Known, to: Callable[[int], int]) -> Known:
    return known.moved(to) if isinstance(known, Affine) else tuple(c.moved(to) for c in known)


Reader = Callable[[_Known, Node, dict[str, Any]], "Known | None"]


def _arange(_: _Known, node: Node, given: dict[str, Any]) -> Known | None:
    start, step = given.get("start", 0), given.get("step", 1)
    plain = type(start) is int and type(step) is int and not node.results[0].dtype.is_floating_point
    return Affine(start, {0: step}) if plain else None


def _filled(_: _Known, __: Node, given: dict[str, Any]) -> Known | None:
    number = given["fill_value"]
    if isinstance(number, bool):
        return TRUE if number else FALSE
    return Affine(number) if type(number) is int else None


def _full(known: _Known, node: Node, given: dict[str, Any]) -> Known | None:
    found = _filled(known, node, given)
    if node.results[0].dtype is torch.bool and isinstance(found, Affine):
        return TRUE if found.const else FALSE
    return None if node.results[0].dtype.is_floating_point else found


def _ones(number: int) -> Reader:
    return lambda known, node, given: _full(known, node, {**given, "fill_value": number})


def _same(known: _Known, node: Node, given: dict[str, Any]) -> Known | None:
    source = given["self"]
    kinds = [v.dtype is torch.bool for v in (source, node.results[0])]
    plain = kinds[0] == kinds[1] and not node.results[0].dtype.is_floating_point
    return known.values.get(source) if plain else None


def _unsqueeze(known: _Known, node: Node, given: dict[str, Any]) -> Known | None:
    at = given["dim"] % len(node.results[0].shape)
    found = known.values.get(given["self"])
    return None if found is None else _moved(found, lambda dim: dim + (dim >= at))


def _expand(known: _Known, node: Node, given: dict[str, Any]) -> Known | None:
    return known.aligned(given["self"], len(node.results[0].shape)) if isinstance(given["self"], Value) else None


def _slice(known: _Known, _: Node, given: dict[str, Any]) -> Known | None:
    source = given["self"]
    found, dim, start, step = known.values.get(source), given["dim"], given["start"] or 0, given["step"]
    if found is None or type(start) is not int or start < 0 or type(step) is not int:
        return None
    dim %= len(source.shape)

    def sliced(one: Affine) -> Affine:
        factor = one.by.get(dim, 0)
        return one + Affine(factor * start, {dim: factor * (step - 1)} if factor * (step - 1) else {})

    return sliced(found) if isinstance(found, Affine) else tuple(map(sliced, found))


def _summed(sign: int) -> Reader:
    def read(known: _Known, node: Node, given: dict[str, Any]) -> Known | None:
        pair = known.pair(node, given)
        factor = given.get("alpha", 1)
        return None if pair is None or type(factor) is not int else pair[0] + pair[1] * (sign * factor)

    return read


def _compared(difference: Callable[[Affine, Affine], Affine]) -> Reader:
    def read(known: _Known, node: Node, given: dict[str, Any]) -> Known | None:
        pair = known.pair(node, given)
        return None if pair is None else _all_of([difference(*pair)])

    return read


def _equal(known: _Known, node: Node, given: dict[str, Any]) -> Known | None:
    pair = known.pair(node, given)
    if pair is None or (pair[0] - pair[1]).by:
        return None
    return FALSE if (pair[0] - pair[1]).const else TRUE


def _unequal(known: _Known, node: Node, given: dict[str, Any]) -> Known | None:
    found = _equal(known, node, given)
    return None if found is None else FALSE if found == TRUE else TRUE


def _both(known: _Known, node: Node, given: dict[str, Any]) -> Known | None:
    sides = [known.aligned(given[name], len(node.results[0].shape)) for name in ("self", "other")]
    if any(not isinstance(side, tuple) for side in sides):
        return FALSE if FALSE in sides else None
    return _all_of([condition for side in sides for condition in side])  # type: ignore[union-attr]


def _neither(known: _Known, _: Node, given: dict[str, Any]) -> Known | None:
    """What is not, of one condition."""
    found = known.values.get(given["self"])
    if not isinstance(found, tuple) or len(found) > 1:
        return None
    return _all_of([found[0] * -1 - Affine(1)]) if found else FALSE


def _looked_up(known: _Known, node: Node, given: dict[str, Any]) -> Known | None:
    """An element of what is affine in its indices, at indices that are affine in theirs and never negative."""
    source, rank = known.values.get(given["self"]), len(node.results[0].shape)
    places = [known.aligned(index, rank) for index in given["indices"]]
    if source is None or len(places) != len(given["self"].shape):
        return None
    at: dict[int, Affine] = {}
    for dim, place in enumerate(places):
        if not isinstance(place, Affine) or place.const < 0 or any(factor < 0 for factor in place.by.values()):
            return None
        at[dim] = place

    def looked_up(one: Affine) -> Affine:
        return sum((at[dim] * factor for dim, factor in one.by.items()), Affine(one.const))

    return looked_up(source) if isinstance(source, Affine) else tuple(map(looked_up, source))


def _differences(known: _Known, _: Node, given: dict[str, Any]) -> Known | None:
    """From each element to the next, with elements put before the first: where all are one number."""
    source, before = given["self"], given["prepend"]
    found, first = known.values.get(source), known.values.get(before) if isinstance(before, Value) else None
    if not isinstance(found, Affine) or given["n"] != 1 or given["append"] is not None:
        return None
    dim = given["dim"] % len(source.shape)
    step = Affine(found.by.get(dim, 0))
    if before is None:
        return step
    if not isinstance(first, Affine) or before.shape[dim] != 1:
        return None
    at = Affine(found.const, {d: f for d, f in found.by.items() if d != dim})
    last = Affine(first.const, {d: f for d, f in first.by.items() if d != dim})
    return step if at - last == step else None


def _running_sum(known: _Known, node: Node, given: dict[str, Any]) -> Known | None:
    """Of what is the same everywhere."""
    found, dim = known.values.get(given["self"]), given["dim"] % len(node.results[0].shape)
    if found in (TRUE, FALSE):
        found = Affine(int(found == TRUE))
    if not isinstance(found, Affine) or found.by or node.results[0].dtype.is_floating_point:
        return None
    return found + Affine(0, {dim: found.const} if found.const else {})


def _triangle(sign: int) -> Reader:
    """``tril``, ``triu`` of a truth: on and below, or above, a diagonal."""

    def read(known: _Known, node: Node, given: dict[str, Any]) -> Known | None:
        found, rank, diagonal = known.values.get(given["self"]), len(node.results[0].shape), given["diagonal"]
        if not isinstance(found, tuple) or type(diagonal) is not int:
            return None
        return _all_of([*found, Affine(sign * diagonal, {rank - 2: sign, rank - 1: -sign})])

    return read


def _difference(left: Affine, right: Affine) -> Affine:
    return left - right


_READERS: dict[str, Reader] = {
    "arange": _arange,
    "full": _full,
    "full_like": _full,
    "ones": _ones(1),
    "ones_like": _ones(1),
    "zeros": _ones(0),
    "zeros_like": _ones(0),
    "to": _same,
    "alias": _same,
    "unsqueeze": _unsqueeze,
    "expand": _expand,
    "slice": _slice,
    "add": _summed(1),
    "sub": _summed(-1),
    "ge": _compared(_difference),
    "gt": _compared(lambda left, right: left - right - Affine(1)),
    "le": _compared(lambda left, right: right - left),
    "lt": _compared(lambda left, right: right - left - Affine(1)),
    "eq": _equal,
    "ne": _unequal,
    "bitwise_and": _both,
    "__and__": _both,
    "logical_and": _both,
    "bitwise_not": _neither,
    "logical_not": _neither,
    "index": _looked_up,
    "diff": _differences,
    "cumsum": _running_sum,
    "tril": _triangle(1),
    "triu": _triangle(-1),
}
