"""Between which numbers the elements of a value lie, where a dynamic dim is longer than it was given.

Bounds are linear in the ``given`` length of the dim and in its ``padded`` one, which is longer: that is enough to see
that a causal mask hides every position past the given length from those before it. What is not known is anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from placement.graph.ir import Node

INFINITY = math.inf


@dataclass(frozen=True, slots=True)
class Bound:
    """``given · L + padded · P + more``, for all lengths 1 <= L < P; no number where ``more`` is infinite."""

    given: int = 0
    padded: int = 0
    more: float = 0

    def __add__(self, other: Bound) -> Bound:
        return Bound(self.given + other.given, self.padded + other.padded, self.more + other.more)

    def __neg__(self) -> Bound:
        return Bound(-self.given, -self.padded, -self.more)

    def at_most(self, other: Bound, *, strictly: bool = False) -> bool:
        """Whether it is no more, or less if ``strictly``, than the other, whatever the lengths."""
        if -INFINITY in (self.more, -other.more):
            return not strictly or self.more != other.more
        if INFINITY in (self.more, -other.more):
            return False
        given, padded, more = (other.given - self.given, other.padded - self.padded, other.more - self.more)
        least = given + 2 * padded + more  # at L = 1, P = 2
        return given + padded >= 0 and padded >= 0 and (least > 0 if strictly else least >= 0)


@dataclass(frozen=True, slots=True)
class Range:
    """Elements are not under ``low`` and not over ``high``."""

    low: Bound
    high: Bound

    @property
    def constant(self) -> float | None:
        """The number that all elements are."""
        known = self.low == self.high and not (self.low.given or self.low.padded)
        return self.low.more if known else None

    def hull(self, other: Range) -> Range:
        """Bounds of the elements of both."""
        low = next((a.low for a, b in ((self, other), (other, self)) if a.low.at_most(b.low)), ANY.low)
        high = next((a.high for a, b in ((self, other), (other, self)) if b.high.at_most(a.high)), ANY.high)
        return Range(low, high)


def number(x: float) -> Range:
    """All elements are ``x``."""
    return Range(Bound(more=x), Bound(more=x))


ANY = Range(Bound(more=-INFINITY), Bound(more=INFINITY))
NO, YES = number(0), number(1)
EITHER = Range(NO.low, YES.high)

Bounds = Callable[[Node, Mapping[str, Range]], Range]
"""From the ranges of an op's arguments, by name, that of its result: numbers and the elements of tensors."""


def whatever(dtype: torch.dtype) -> Range:
    """What is known of the elements of any tensor of this dtype."""
    return EITHER if dtype is torch.bool else ANY


def _truth(x: Range) -> Range:
    if x.constant is not None:
        return YES if x.constant else NO
    if x == EITHER:
        return x
    apart = NO.high.at_most(x.low, strictly=True) or x.high.at_most(NO.low, strictly=True)
    return YES if apart else EITHER


def _not(x: Range) -> Range:
    return {YES: NO, NO: YES}.get(x, EITHER)


def _less(x: Range, y: Range, *, strictly: bool) -> Range:
    if x.high.at_most(y.low, strictly=strictly):
        return YES
    return NO if y.high.at_most(x.low, strictly=not strictly) else EITHER


def _equal(x: Range, y: Range) -> Range:
    if NO in (_less(x, y, strictly=False), _less(y, x, strictly=False)):
        return NO
    return YES if x.constant is not None and x.constant == y.constant else EITHER


def compared(sign: str) -> Bounds:
    """Of a comparison: ``<``, ``<=``, ``==`` and their opposites."""

    def bounds(node: Node, given: Mapping[str, Range]) -> Range:
        del node
        x, y = given["self"], given["other"]
        match sign:
            case "<" | "<=":
                return _less(x, y, strictly=sign == "<")
            case ">" | ">=":
                return _less(y, x, strictly=sign == ">")
            case _:
                return _equal(x, y) if sign == "==" else _not(_equal(x, y))

    return bounds


def both(node: Node, given: Mapping[str, Range]) -> Range:
    """Of ``and``: no where one is; bits of integers may be anything."""
    if node.results[0].dtype is not torch.bool:
        return ANY
    x, y = _truth(given["self"]), _truth(given["other"])
    return NO if NO in (x, y) else YES if x == y == YES else EITHER


def one_of(node: Node, given: Mapping[str, Range]) -> Range:
    """Of ``or``."""
    if node.results[0].dtype is not torch.bool:
        return ANY
    x, y = _truth(given["self"]), _truth(given["other"])
    return YES if YES in (x, y) else NO if x == y == NO else EITHER


def negated(node: Node, given: Mapping[str, Range]) -> Range:
    """Of ``not``."""
    return _not(_truth(given["self"])) if node.results[0].dtype is torch.bool else ANY


def _added(node: Node, x: Range, y: Range) -> Range:
    if node.results[0].dtype is torch.bool:
        return EITHER
    for one in (x, y):
        if one.constant == -INFINITY:
            return one  # whatever is added to it is a number
    return Range(x.low + y.low, x.high + y.high)


def total(node: Node, given: Mapping[str, Range]) -> Range:
    """Of a sum."""
    return _added(node, given["self"], given["other"]) if given["alpha"] == YES else ANY


def difference(node: Node, given: Mapping[str, Range]) -> Range:
    """Of a difference."""
    y = given["other"]
    return _added(node, given["self"], Range(-y.high, -y.low)) if given["alpha"] == YES else ANY


def product(node: Node, given: Mapping[str, Range]) -> Range:
    """Of a product: zero times what is a number is zero, and a truth times a number is that or zero."""
    del node
    for x, y in (given["self"], given["other"]), (given["other"], given["self"]):
        if x == NO and y.constant not in (INFINITY, -INFINITY):
            return NO
        if EITHER.low.at_most(x.low) and x.high.at_most(EITHER.high) and NO.low.at_most(y.low):
            return Range(NO.low, y.high)
    return ANY


def opposite(node: Node, given: Mapping[str, Range]) -> Range:
    """Of the negative of a number."""
    del node
    x = given["self"]
    return Range(-x.high, -x.low)


def cast(node: Node, given: Mapping[str, Range]) -> Range:
    """Of a cast: what was a whole number stays one, and for a truth it matters whether it is zero."""
    before, after = node.operands[0].dtype, node.results[0].dtype
    if after is torch.bool:
        return _truth(given["self"])
    whole = not before.is_floating_point or after.is_floating_point
    return given["self"] if whole or given["self"].constant == 0 else ANY


def chosen(node: Node, given: Mapping[str, Range]) -> Range:
    """Of ``where(condition, self, other)``."""
    del node
    condition = _truth(given["condition"])
    x, y = given["self"], given["other"]
    return x if condition == YES else y if condition == NO else x.hull(y)


def filled(node: Node, given: Mapping[str, Range]) -> Range:
    """Of ``masked_fill(self, mask, value)``."""
    return chosen(node, {"condition": given["mask"], "self": given["value"], "other": given["self"]})


def same(node: Node, given: Mapping[str, Range]) -> Range:
    """Of an op that gives its operand."""
    del node
    return given["self"]


def made_of(name: str) -> Bounds:
    """Of a tensor that is filled with one number: an argument's name, or the number itself."""

    def bounds(node: Node, given: Mapping[str, Range]) -> Range:
        del node
        return number(float(name)) if name in "01" else given[name]

    return bounds
