"""Masks that the program works out from positions and marks of tokens, and what they say.

Captured programs spell masks out: positions are counted, looked up, compared, and what is hidden is told by a truth or
by a number that is added to a score. Op by op it is followed what an element is as a function of its own indices. So it
is found out what attention hides, whatever the mask was computed with; nothing of size [queries, keys] need be made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch

from placement.graph._torch import schema_name
from placement.graph.conditions import (
    FALSE,
    TRUE,
    Affine,
    Compared,
    Conditions,
    Distance,
    Either,
    Element,
    Known,
    Number,
    Untrue,
    all_of,
    choice,
    combined,
    mapped,
    opposite,
    taken_from,
)
from placement.graph.ir import Node, Value, arguments, leaves, substitute
from placement.graph.places import REARRANGED

_WIDE = (torch.bool, torch.int32, torch.int64)
_POINTWISE = frozenset({"to", "where", "masked_fill", "rsub", "__and__", "__or__"})  # which torch's own tag leaves out
_LEAST = -1e30  # no score makes up for a number that is added and not above this


class Facts:
    """What is known of values, op by op. Of what no op says anything it is known that it is itself."""

    def __init__(self, constants: Mapping[Value, torch.Tensor] | None = None) -> None:
        """constants: tensors whose numbers never change, by the values that they are."""
        self.values: dict[Value, Known] = {}
        for value, tensor in (constants or {}).items():
            if tensor.numel() == 1 and (found := _everywhere(tensor.item(), value)) is not None:
                self.values[value] = found
        self.shaped: dict[Value, Value] = {}  # what was put in another shape, up to where it was not

    def note(self, node: Node) -> None:
        """Note what follows of an op's result."""
        namespace, name = schema_name(node.op)
        if namespace != "aten" or len(node.results) != 1:
            return
        (value,), given = node.results, arguments(node)
        found = _READERS[name](self, node, given) if name in _READERS else None
        if found is None and name in REARRANGED:
            found = self._rearranged(name, given["self"], value, given)
        if found is None and (torch.Tag.pointwise in node.op.tags or name in _POINTWISE):  # type: ignore[attr-defined]
            found = self.tried(node)
        if found is None or (isinstance(found, Affine) and not _within(found, value.dtype)):
            return  # numbers that wrap around are not what is counted
        alone = frozenset(dim for dim, size in enumerate(value.shape) if size == 1)  # at the only index, which is 0
        found = _without(found, alone) if alone else found
        if not _is_itself(found, value):
            self.values[value] = found

    def of(self, mask: Value) -> Conditions | None:
        """Where a mask, of truths or of numbers that are added to scores, lets a query see a key; None if it is not so.

        What is hidden is so by minus infinity. A finite number hides where each query sees a key at least: of one that
        sees none, it would hide nothing.
        """
        match self.known(mask):
            case tuple() as says:
                return says
            case Either(where=where, inside=0, outside=hidden) if mask.dtype.is_floating_point:
                says = where
            case Either(where=where, inside=hidden, outside=0) if mask.dtype.is_floating_point:
                says = opposite(where)
            case _:
                return None
        if says is None or says == TRUE or hidden == -math.inf:
            return says
        return says if hidden <= _LEAST and _each_sees_one(says, mask) else None

    def known(self, value: Value) -> Known | None:
        """A value: by its own dims. None where it is of numbers that are not counted."""
        found = self.values.get(value)
        if found is not None or value.dtype not in _WIDE:
            return found
        own = _itself(value)
        return (own,) if value.dtype is torch.bool else own

    def aligned(self, operand: Any, rank: int) -> Known | None:
        """An operand as it takes part in a result of ``rank`` dims: broadcast, or a number."""
        if isinstance(operand, bool):
            return TRUE if operand else FALSE
        if isinstance(operand, int):
            return Affine(operand)
        if not isinstance(operand, Value):
            return None
        found, more = self.known(operand), rank - len(operand.shape)
        return None if found is None else mapped(found, lambda one: one.moved(lambda dim: dim + more))

    def sides(self, node: Node, given: Mapping[str, Any]) -> tuple[Known | None, Known | None]:
        """Both operands of a result; integers that truths choose are elements here, which may be compared."""
        rank = len(node.results[0].shape)

        def side(operand: Any) -> Known | None:
            found = self.aligned(operand, rank)
            if isinstance(found, Either) and operand.dtype in _WIDE and operand.dtype is not torch.bool:
                more = rank - len(operand.shape)
                return mapped(_itself(operand), lambda one: one.moved(lambda dim: dim + more))
            return found

        return side(given["self"]), side(given["other"])

    def _rearranged(self, name: str, source: Value, result: Value, given: Mapping[str, Any]) -> Known | None:
        """What is known of what was rearranged; of a shape that is taken back, what was before."""
        before = self.shaped.get(source, source)
        for one in (source, before):
            at, found = REARRANGED[name](one, result, given), self.known(one)
            if name != "reshape" or at is not None:
                return taken_from(found, at) if found is not None and at is not None else None
        self.shaped[result] = before
        return None

    def tried(self, node: Node) -> Known | None:
        """What an op on single elements makes of numbers of which it is known which they can be."""
        (result,) = node.results
        operands = list(dict.fromkeys(node.operands))
        choices = [choice(self.aligned(operand, len(result.shape))) for operand in operands]
        known = [one for one in choices if one is not None]
        if not operands or len(known) < len(choices) or _has_sizes(node):
            return None

        def function(*numbers: Number) -> Number:
            single = {
                value: torch.full((1,) if value.shape else (), number, dtype=value.dtype)
                for value, number in zip(operands, numbers, strict=True)
            }

            def now(leaf: Any) -> Any:
                return single[leaf] if isinstance(leaf, Value) else leaf

            kwargs = {name: substitute(argument, now) for name, argument in node.kwargs.items()}
            with torch.no_grad():
                return node.op(*substitute(node.args, now), **kwargs).to(result.dtype).item()

        try:
            found = combined(known, function)
        except RuntimeError:  # a number that the dtype does not hold
            return None
        return None if found is None else _as(found, result)


def _everywhere(number: Any, value: Value) -> Known | None:
    """A number that is the same in all of a tensor."""
    if not isinstance(number, bool | int | float) or value.dtype.is_complex:
        return None
    number = torch.full((), number, dtype=value.dtype).item()
    return _as(Either(TRUE, number, number), value)


def _as(found: Either, value: Value) -> Known:
    """A truth as conditions, or an integer as such, where it is one."""
    if value.dtype is torch.bool:
        says = found.where if found.inside else opposite(found.where)
        return found if says is None else says
    if value.dtype in _WIDE and found.where == TRUE:
        return Affine(int(found.inside))
    return found


def _within(number: Affine, dtype: torch.dtype) -> bool:
    """Whether it stays far from where numbers of ``dtype`` wrap around, at indices below 2 ** 24."""
    most = torch.iinfo(dtype).max // 4 if dtype in _WIDE and dtype is not torch.bool else 0
    return abs(number.const) <= most and all(abs(factor) << 24 <= most for factor in number.by.values())


def _has_sizes(node: Node) -> bool:
    return any(isinstance(leaf, sympy.Basic) for leaf in leaves((node.args, tuple(node.kwargs.values()))))


def _without(known: Known, dims: frozenset[int]) -> Known:
    """Where the indices of ``dims`` are 0."""
    return mapped(known, lambda one: Affine(one.const, {d: f for d, f in one.by.items() if d not in dims}))


def _itself(value: Value) -> Element:
    return Element(value, tuple(Affine(0, {} if size == 1 else {dim: 1}) for dim, size in enumerate(value.shape)))


def _is_itself(found: Known, value: Value) -> bool:
    """Whether a tensor is as good by itself: it is elements of another at odd places, or all their opposites."""
    match found:
        case Element() | (Element(),) | (Untrue(),):
            one = found[0] if isinstance(found, tuple) else found
            element = one.of if isinstance(one, Untrue) else one
            odd = element is not one or not element.plain
            return odd and element.dims == _itself(value).dims
        case _:
            return False


def _each_sees_one(says: Conditions, mask: Value) -> bool:
    """Whether each query of as many keys sees at least the one at its own place."""
    queries, keys = len(mask.shape) - 2, len(mask.shape) - 1
    if queries < 0 or mask.shape[queries] != mask.shape[keys]:
        return False
    places = [Affine(0, {queries if dim == keys else dim: 1}) for dim in range(len(mask.shape))]
    own = taken_from(says, places)
    return isinstance(own, tuple) and all(
        isinstance(one, Compared) and one.how in ("==", ">=") and one.first == one.second for one in own
    )


Reader = Callable[[Facts, Node, dict[str, Any]], "Known | None"]


def _constant(_: Facts, node: Node, given: dict[str, Any]) -> Known | None:
    return _everywhere(given["fill_value"], node.results[0])


def _number(number: int) -> Reader:
    return lambda _, node, __: _everywhere(number, node.results[0])


def _arange(_: Facts, node: Node, given: dict[str, Any]) -> Known | None:
    start, step = given.get("start", 0), given.get("step", 1)
    plain = type(start) is int and type(step) is int and not node.results[0].dtype.is_floating_point
    return Affine(start, {0: step}) if plain else None


def _same(known: Facts, node: Node, given: dict[str, Any]) -> Known | None:
    source = given["self"]
    kinds = [v.dtype is torch.bool for v in (source, node.results[0])]
    plain = kinds[0] == kinds[1] and not node.results[0].dtype.is_floating_point
    found = known.known(source) if plain else None
    return found if source.dtype == node.results[0].dtype or isinstance(found, Affine) else None


def _summed(sign: int) -> Reader:
    def read(known: Facts, node: Node, given: dict[str, Any]) -> Known | None:
        left, right = known.sides(node, given)
        factor = given.get("alpha", 1)
        if not isinstance(left, Affine) or not isinstance(right, Affine) or type(factor) is not int:
            return None
        return left + right * (sign * factor)

    return read


def _times(known: Facts, node: Node, given: dict[str, Any]) -> Known | None:
    sides = known.sides(node, given)
    for one, other in (sides, sides[::-1]):
        if isinstance(one, Affine) and isinstance(other, Affine) and not other.by:
            return one * other.const
    return None


def _negative(known: Facts, _: Node, given: dict[str, Any]) -> Known | None:
    found = known.known(given["self"])
    return found * -1 if isinstance(found, Affine) else None


def _distance(known: Facts, _: Node, given: dict[str, Any]) -> Known | None:
    found = known.known(given["self"])
    return Distance(found) if isinstance(found, Affine) else None


def _ordered(*, strictly: bool, downwards: bool) -> Reader:
    """``self >= other``, or ``>``; downwards ``<=`` or ``<``, which is the same of both exchanged."""

    def read(known: Facts, node: Node, given: dict[str, Any]) -> Known | None:
        larger, smaller = reversed(known.sides(node, given)) if downwards else known.sides(node, given)
        if isinstance(larger, Element) and isinstance(smaller, Element):
            return _of_two(">" if strictly else ">=", larger, smaller)
        if isinstance(larger, Distance) and isinstance(smaller, Affine):  # where it is not that much, or less
            within = [smaller - one - Affine(int(not strictly)) for one in (larger.of, larger.of * -1)]
            return _as(Either(all_of(within), False, True), node.results[0])
        if not isinstance(larger, Affine) or not isinstance(smaller, Affine | Distance):
            return None
        each = [smaller.of, smaller.of * -1] if isinstance(smaller, Distance) else [smaller]
        return all_of([larger - one - Affine(int(strictly)) for one in each])

    return read


def _of_two(how: str, first: Element, second: Element) -> Conditions | None:
    """Two elements compared; where one depends on all that the other does the result is as good a tensor as they."""
    apart = first.dims - second.dims and second.dims - first.dims
    return (Compared(how, first, second),) if apart else None


def _equal(known: Facts, node: Node, given: dict[str, Any]) -> Conditions | None:
    left, right = known.sides(node, given)
    if isinstance(left, Element) and isinstance(right, Element):
        return _of_two("==", left, right)
    if not isinstance(left, Affine) or not isinstance(right, Affine) or (left - right).by:
        return None
    return FALSE if (left - right).const else TRUE


def _unequal(known: Facts, node: Node, given: dict[str, Any]) -> Conditions | None:
    found = _equal(known, node, given)
    return None if found is None else opposite(found)


def _looked_up(known: Facts, node: Node, given: dict[str, Any]) -> Known | None:
    """An element at indices that are affine in theirs and never negative."""
    source, rank = known.known(given["self"]), len(node.results[0].shape)
    places = [known.aligned(index, rank) for index in given["indices"]]
    if source is None or len(places) != len(given["self"].shape):
        return None
    at = [place for place in places if isinstance(place, Affine) and place.const >= 0]
    if len(at) < len(places) or any(factor < 0 for place in at for factor in place.by.values()):
        return None

    return taken_from(source, at)


def _differences(known: Facts, _: Node, given: dict[str, Any]) -> Known | None:
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


def _running_sum(known: Facts, node: Node, given: dict[str, Any]) -> Known | None:
    """Of what is the same everywhere."""
    found, dim = known.values.get(given["self"]), given["dim"] % len(node.results[0].shape)
    if found in (TRUE, FALSE):
        found = Affine(int(found == TRUE))
    if not isinstance(found, Affine) or found.by or node.results[0].dtype.is_floating_point:
        return None
    return found + Affine(0, {dim: found.const} if found.const else {})


def _written(known: Facts, node: Node, given: dict[str, Any]) -> Known | None:
    """Where a truth of the same shape chooses what is written over."""
    (result,) = node.results
    shapes = [index.shape for index in given["indices"] if isinstance(index, Value) and index.dtype is torch.bool]
    return known.tried(node) if shapes == [result.shape] == [given["self"].shape] and not given["accumulate"] else None


def _triangle(sign: int) -> Reader:
    """``tril``, ``triu``: what is on and below, or above, a diagonal; elsewhere 0."""

    def read(known: Facts, node: Node, given: dict[str, Any]) -> Known | None:
        (result,), diagonal = node.results, given["diagonal"]
        found, rank = choice(known.known(given["self"])), len(result.shape)
        if found is None or type(diagonal) is not int:
            return None
        zero = torch.zeros((), dtype=result.dtype).item()
        band = Either(all_of([Affine(sign * diagonal, {rank - 2: sign, rank - 1: -sign})]), True, False)
        made = combined([found, band], lambda number, inside: number if inside else zero)
        return None if made is None else _as(made, result)

    return read


_READERS: dict[str, Reader] = {
    "arange": _arange,
    "full": _constant,
    "full_like": _constant,
    "ones": _number(1),
    "ones_like": _number(1),
    "zeros": _number(0),
    "zeros_like": _number(0),
    "to": _same,
    "alias": _same,
    "add": _summed(1),
    "sub": _summed(-1),
    "mul": _times,
    "neg": _negative,
    "abs": _distance,
    "ge": _ordered(strictly=False, downwards=False),
    "gt": _ordered(strictly=True, downwards=False),
    "le": _ordered(strictly=False, downwards=True),
    "lt": _ordered(strictly=True, downwards=True),
    "eq": _equal,
    "ne": _unequal,
    "index": _looked_up,
    "index_put": _written,
    "diff": _differences,
    "cumsum": _running_sum,
    "tril": _triangle(1),
    "triu": _triangle(-1),
}
