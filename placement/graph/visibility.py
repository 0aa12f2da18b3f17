"""Masks that the program works out from positions and marks of tokens, and what they say.

Captured programs spell masks out: positions are counted, looked up, compared. An element of such a tensor is known as
a function of its own indices: an integer that is affine in them, an element of another tensor at such places, or a set
of conditions that all hold. So it is found out what attention hides, whatever the mask was computed with; nothing of
size [queries, keys] need be made then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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


@dataclasses.dataclass(frozen=True, slots=True)
class Distance:
    """How far an integer is from 0."""

    of: Affine


@dataclasses.dataclass(frozen=True, slots=True)
class Element:
    """The element of ``value`` at these places; where it is a truth, that it holds."""

    value: Value
    at: tuple[Affine, ...]

    @property
    def dims(self) -> frozenset[int]:
        """The dims on whose indices it depends."""
        return frozenset(dim for place in self.at for dim in place.by)


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """That of two elements the first is ``how`` the second: ``==``, ``!=``, ``>=`` or ``>``."""

    how: str
    first: Element
    second: Element

    @property
    def opposite(self) -> Compared:
        """What holds where this does not."""
        if self.how in ("==", "!="):
            return Compared("!=" if self.how == "==" else "==", self.first, self.second)
        return Compared(">" if self.how == ">=" else ">=", self.second, self.first)


Condition = Affine | Element | Compared
Conditions = tuple[Condition, ...]
"""A truth: that each of these holds, an integer being at least 0. Without any it holds everywhere."""

Known = Affine | Distance | Element | Conditions
FALSE: Conditions = (Affine(-1),)
TRUE: Conditions = ()


def _all_of(conditions: Sequence[Condition]) -> Conditions:
    """The conditions in least numbers, without those that hold anyway; FALSE where one never does."""
    conditions = [_least(c) if isinstance(c, Affine) else c for c in conditions]
    if any(isinstance(c, Affine) and c.const < 0 and all(f < 0 for f in c.by.values()) for c in conditions):
        return FALSE
    left = [c for c in conditions if not isinstance(c, Affine) or c.const < 0 or any(f < 0 for f in c.by.values())]
    return tuple(c for index, c in enumerate(left) if c not in left[:index])


def _least(condition: Affine) -> Affine:
    """``2 q - 2 k + 1 >= 0`` is ``q - k >= 0``, of integers."""
    by = gcd(*condition.by.values()) or 1
    return Affine(condition.const // by, {dim: factor // by for dim, factor in condition.by.items()})


def mapped(known: Any, change: Callable[[Affine], Affine]) -> Any:
    """The same with every integer in it changed."""
    match known:
        case Affine():
            return change(known)
        case Distance():
            return Distance(change(known.of))
        case Element():
            return Element(known.value, tuple(map(change, known.at)))
        case Compared():
            return Compared(known.how, mapped(known.first, change), mapped(known.second, change))
        case _:
            return _all_of([mapped(one, change) for one in known])


class Facts:
    """What is known of values, op by op. Of what no op says anything it is known that it is itself."""

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
        if value.dtype not in _WIDE or (isinstance(found, Affine) and not _within(found, value.dtype)):
            return  # numbers that wrap around are not what is counted
        alone = frozenset(dim for dim, size in enumerate(value.shape) if size == 1)  # at the only index, which is 0
        self.values[value] = _without(found, alone) if alone else found

    def of(self, value: Value) -> Known | None:
        """A value: by its own dims. None where it is of numbers that are not counted."""
        found = self.values.get(value)
        if found is not None or value.dtype not in _WIDE:
            return found
        own = Element(value, tuple(Affine(0, {} if size == 1 else {dim: 1}) for dim, size in enumerate(value.shape)))
        return (own,) if value.dtype is torch.bool else own

    def aligned(self, operand: Any, rank: int) -> Known | None:
        """An operand as it takes part in a result of ``rank`` dims: broadcast, or a number."""
        if isinstance(operand, bool):
            return TRUE if operand else FALSE
        if isinstance(operand, int):
            return Affine(operand)
        if not isinstance(operand, Value):
            return None
        return _moved(self.of(operand), rank - len(operand.shape))

    def sides(self, node: Node, given: Mapping[str, Any]) -> tuple[Known | None, Known | None]:
        """Both operands of a result."""
        rank = len(node.results[0].shape)
        return self.aligned(given["self"], rank), self.aligned(given["other"], rank)


_WIDE = (torch.bool, torch.int32, torch.int64)


def _within(number: Affine, dtype: torch.dtype) -> bool:
    """Whether it stays far from where numbers of ``dtype`` wrap around, at indices below 2 ** 24."""
    most = torch.iinfo(dtype).max // 4 if dtype is not torch.bool else 0
    return abs(number.const) <= most and all(abs(factor) << 24 <= most for factor in number.by.values())


def _without(known: Known, dims: frozenset[int]) -> Known:
    """Where the indices of ``dims`` are 0."""
    return mapped(known, lambda one: Affine(one.const, {d: f for d, f in one.by.items() if d not in dims}))


def _moved(known: Known | None, by: int) -> Known | None:
    return None if known is None else mapped(known, lambda one: one.moved(lambda dim: dim + by))


Reader = Callable[[Facts, Node, dict[str, Any]], "Known | None"]


def _arange(_: Facts, node: Node, given: dict[str, Any]) -> Known | None:
    start, step = given.get("start", 0), given.get("step", 1)
    plain = type(start) is int and type(step) is int and not node.results[0].dtype.is_floating_point
    return Affine(start, {0: step}) if plain else None


def _filled(_: Facts, __: Node, given: dict[str, Any]) -> Known | None:
    number = given["fill_value"]
    if isinstance(number, bool):
        return TRUE if number else FALSE
    return Affine(number) if type(number) is int else None


def _full(known: Facts, node: Node, given: dict[str, Any]) -> Known | None:
    found = _filled(known, node, given)
    if node.results[0].dtype is torch.bool and isinstance(found, Affine):
        return TRUE if found.const else FALSE
    return None if node.results[0].dtype.is_floating_point else found


def _ones(number: int) -> Reader:
    return lambda known, node, given: _full(known, node, {**given, "fill_value": number})


def _same(known: Facts, node: Node, given: dict[str, Any]) -> Known | None:
    source = given["self"]
    kinds = [v.dtype is torch.bool for v in (source, node.results[0])]
    plain = kinds[0] == kinds[1] and not node.results[0].dtype.is_floating_point
    found = known.of(source) if plain else None
    return found if source.dtype == node.results[0].dtype or isinstance(found, Affine) else None


def _unsqueeze(known: Facts, node: Node, given: dict[str, Any]) -> Known | None:
    at = given["dim"] % len(node.results[0].shape)
    found = known.of(given["self"])
    return None if found is None else mapped(found, lambda one: one.moved(lambda dim: dim + (dim >= at)))


def _transpose(known: Facts, node: Node, given: dict[str, Any]) -> Known | None:
    rank = len(node.results[0].shape)
    one, other = (given[name] % rank for name in ("dim0", "dim1")) if rank else (0, 0)
    found, to = known.of(given["self"]), {one: other, other: one}
    return None if found is None else mapped(found, lambda at: at.moved(lambda dim: to.get(dim, dim)))


def _expand(known: Facts, node: Node, given: dict[str, Any]) -> Known | None:
    return known.aligned(given["self"], len(node.results[0].shape)) if isinstance(given["self"], Value) else None


def _slice(known: Facts, _: Node, given: dict[str, Any]) -> Known | None:
    source = given["self"]
    found, dim, start, step = known.of(source), given["dim"], given["start"] or 0, given["step"]
    if found is None or type(start) is not int or start < 0 or type(step) is not int:
        return None
    dim %= len(source.shape)

    def sliced(one: Affine) -> Affine:
        factor = one.by.get(dim, 0)
        return one + Affine(factor * start, {dim: factor * (step - 1)} if factor * (step - 1) else {})

    return mapped(found, sliced)


def _summed(sign: int) -> Reader:
    def read(known: Facts, node: Node, given: dict[str, Any]) -> Known | None:
        left, right = known.sides(node, given)
        factor = given.get("alpha", 1)
        if not isinstance(left, Affine) or not isinstance(right, Affine) or type(factor) is not int:
            return None
        return left + right * (sign * factor)

    return read


def _distance(known: Facts, _: Node, given: dict[str, Any]) -> Known | None:
    found = known.of(given["self"])
    return Distance(found) if isinstance(found, Affine) else None


def _ordered(*, strictly: bool, downwards: bool) -> Reader:
    """``self >= other``, or ``>``; downwards ``<=`` or ``<``, which is the same of both exchanged."""

    def read(known: Facts, node: Node, given: dict[str, Any]) -> Known | None:
        larger, smaller = reversed(known.sides(node, given)) if downwards else known.sides(node, given)
        if isinstance(larger, Element) and isinstance(smaller, Element):
            return _of_two(">" if strictly else ">=", larger, smaller)
        if not isinstance(larger, Affine) or not isinstance(smaller, Affine | Distance):
            return None
        each = [smaller.of, smaller.of * -1] if isinstance(smaller, Distance) else [smaller]
        return _all_of([larger - one - Affine(int(strictly)) for one in each])

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
    return None if found is None else _opposite(found)


def _opposite(found: Conditions) -> Conditions | None:
    """What is not, of one condition at most."""
    if found == TRUE:
        return FALSE
    match found:
        case (Affine() as one,):
            return _all_of([one * -1 - Affine(1)])
        case (Compared() as one,):
            return (one.opposite,)
        case _:
            return None


def _both(known: Facts, node: Node, given: dict[str, Any]) -> Known | None:
    sides = known.sides(node, given)
    if any(not isinstance(side, tuple) for side in sides):
        return FALSE if FALSE in sides else None
    return _all_of([condition for side in sides for condition in side])  # type: ignore[union-attr]


def _neither(known: Facts, _: Node, given: dict[str, Any]) -> Known | None:
    found = known.of(given["self"])
    return _opposite(found) if isinstance(found, tuple) else None


def _looked_up(known: Facts, node: Node, given: dict[str, Any]) -> Known | None:
    """An element at indices that are affine in theirs and never negative."""
    source, rank = known.of(given["self"]), len(node.results[0].shape)
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

    return mapped(source, looked_up)


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


def _triangle(sign: int) -> Reader:
    """``tril``, ``triu`` of a truth: on and below, or above, a diagonal."""

    def read(known: Facts, node: Node, given: dict[str, Any]) -> Known | None:
        found, rank, diagonal = known.of(given["self"]), len(node.results[0].shape), given["diagonal"]
        if not isinstance(found, tuple) or type(diagonal) is not int:
            return None
        return _all_of([*found, Affine(sign * diagonal, {rank - 2: sign, rank - 1: -sign})])

    return read


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
    "transpose": _transpose,
    "unsqueeze": _unsqueeze,
    "expand": _expand,
    "slice": _slice,
    "add": _summed(1),
    "sub": _summed(-1),
    "abs": _distance,
    "ge": _ordered(strictly=False, downwards=False),
    "gt": _ordered(strictly=True, downwards=False),
    "le": _ordered(strictly=False, downwards=True),
    "lt": _ordered(strictly=True, downwards=True),
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
