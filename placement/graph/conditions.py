"""Integers, truths and numbers as functions of an element's own indices: what a mask can be known by.

An integer is affine in the indices, or an element of a tensor at such places. A truth is that some conditions all hold.
A number of which a truth chooses one of two is `Either`, so that what any op on single elements makes of it can be
found by trying both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import gcd
from typing import Any

from placement.graph.ir import Value


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

    @property
    def plain(self) -> bool:
        """Whether each place is an index of its own, or the only one that there is."""
        dims = [dim for place in self.at for dim in place.by]
        known = (
            not place.const and (set(place.by.values()) == {1} if place.by else size == 1)
            for size, place in zip(self.value.shape, self.at, strict=True)
        )
        return len(dims) == len(set(dims)) and all(known)


@dataclasses.dataclass(frozen=True, slots=True)
class Untrue:
    """That an element that is a truth does not hold."""

    of: Element


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """That of two elements the first is ``how`` the second: ``==``, ``!=``, ``>=`` or ``>``."""

    how: str
    first: Element
    second: Element


Condition = Affine | Element | Untrue | Compared
Conditions = tuple[Condition, ...]
"""A truth: that each of these holds, an integer being at least 0. Without any it holds everywhere."""

FALSE: Conditions = (Affine(-1),)
TRUE: Conditions = ()
Number = bool | int | float


@dataclasses.dataclass(frozen=True, slots=True)
class Either:
    """``inside`` where all of ``where`` holds, ``outside`` elsewhere; both are what the tensor's dtype holds."""

    where: Conditions
    inside: Number
    outside: Number


Known = Affine | Distance | Element | Conditions | Either


def all_of(conditions: Sequence[Condition]) -> Conditions:
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


def opposite(found: Conditions) -> Conditions | None:
    """What is not, of one condition at most."""
    if found == TRUE:
        return FALSE
    match found:
        case (Affine() as one,):
            return all_of([one * -1 - Affine(1)])
        case (Compared(how="==" | "!=" as how, first=first, second=second),):
            return (Compared("!=" if how == "==" else "==", first, second),)
        case (Compared(how=how, first=first, second=second),):
            return (Compared(">" if how == ">=" else ">=", second, first),)
        case (Element() as one,):
            return (Untrue(one),)
        case (Untrue(of=one),):
            return (one,)
        case _:
            return None


def taken_from(known: Known, at: Sequence[Affine | None]) -> Known | None:
    """What is known of an element, where its indices are these of another's; None where one that counts is None."""
    used: set[int] = set()
    mapped(known, lambda one: used.update(one.by) or one)
    if any(at[dim] is None for dim in used):
        return None
    places = [place or Affine(0) for place in at]
    return mapped(known, lambda one: sum((places[d] * f for d, f in one.by.items()), Affine(one.const)))


def mapped(known: Any, change: Callable[[Affine], Affine]) -> Any:
    """The same with every integer in it changed."""
    match known:
        case Affine():
            return change(known)
        case Distance():
            return Distance(change(known.of))
        case Element():
            return Element(known.value, tuple(map(change, known.at)))
        case Untrue():
            return Untrue(mapped(known.of, change))
        case Compared():
            return Compared(known.how, mapped(known.first, change), mapped(known.second, change))
        case Either():
            return _chosen(mapped(known.where, change), known.inside, known.outside)
        case _:
            return all_of([mapped(one, change) for one in known])


# -- numbers that truths choose ---------------------------------------------------------------------


def choice(known: Known | None) -> Either | None:
    """A truth, or an integer that is the same everywhere, as a choice."""
    match known:
        case Either():
            return known
        case tuple():
            return Either(known, True, False)
        case Affine(const=const, by={**by}) if not by:
            return Either(TRUE, const, const)
        case _:
            return None


def combined(choices: Sequence[Either], function: Callable[..., Number]) -> Either | None:
    """What a function makes of numbers that are chosen; None where that is not one of two, by conditions together."""
    free = [index for index, one in enumerate(choices) if one.where not in (TRUE, FALSE)]
    rows = list(product((True, False), repeat=len(free)))
    results: list[Number] = []
    for row in rows:
        holds = dict(zip(free, row, strict=True))
        taken = [holds.get(index, one.where == TRUE) for index, one in enumerate(choices)]
        results.append(function(*(c.inside if holds else c.outside for c, holds in zip(choices, taken, strict=True))))
    # A division tells zeros of two signs apart.
    kinds = list({(number, math.copysign(1, number)): number for number in results}.values())
    if len(kinds) > 2 or (len(kinds) == 2 and kinds[0] == kinds[1]):
        return None
    for inside, outside in ((kinds[0], kinds[-1]), (kinds[-1], kinds[0])):
        its = [row for row, number in zip(rows, results, strict=True) if number == inside]
        where = _conjunction([choices[index].where for index in free], its)
        if where is not None:
            return _chosen(where, inside, outside)
    return None


def _chosen(where: Conditions, inside: Number, outside: Number) -> Either:
    if where == FALSE:
        return Either(TRUE, outside, outside)
    return Either(where, inside, inside if where == TRUE else outside)


def _conjunction(truths: Sequence[Conditions], rows: Sequence[tuple[bool, ...]]) -> Conditions | None:
    """The conditions under which exactly these rows of a table of truths occur."""
    fixed = {i: rows[0][i] for i in range(len(truths)) if len({row[i] for row in rows}) == 1}
    if len(rows) != 2 ** (len(truths) - len(fixed)):
        return None
    parts = [truths[i] if holds else opposite(truths[i]) for i, holds in fixed.items()]
    return None if None in parts else all_of([one for part in parts for one in part or ()])
