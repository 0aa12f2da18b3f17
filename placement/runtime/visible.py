"""Which keys a query of attention sees: how far they may be apart, and marks of both that are compared."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from placement.runtime.cuts import Cut, places, spans

if TYPE_CHECKING:
    from torch import Tensor

    from placement.runtime.axis import Axis

Span = tuple[int, int]

_COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}


@dataclass(frozen=True, slots=True, eq=False)
class Sees:
    """A query at place i of the sequence sees the key at j where all of this holds.

    ``j >= i - left`` and ``j <= i + right``, None for no bound: ``right=0`` is causal. Marks are of the whole sequence,
    [tokens] or [batch, tokens]: ``of_query`` at i compares with ``of_key`` at j as ``compare`` says, and those of
    ``of_key`` that are left over hold at j. Nothing sees the last ``spare`` keys, which only pad the sequence.
    """

    left: int | None = None
    right: int | None = None
    compare: tuple[str, ...] = ()
    of_query: tuple[Tensor, ...] = ()
    of_key: tuple[Tensor, ...] = ()
    spare: int = 0

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """``left`` and ``right``."""
        return self.left, self.right

    def mask(self, queries: Tensor | None, keys: Tensor | None, *, bounded: bool) -> Tensor | None:
        """Which keys at these places the queries at those see: bool, broadcasts to [batch, heads, queries, keys].

        None: all of them by what is asked, of the bounds only where ``bounded``. Places None: marks as they are. Of
        spare keys it says nothing.
        """
        found: list[Tensor] = []
        if bounded and self.bounds != (None, None):
            assert queries is not None
            assert keys is not None
            further = keys - queries.unsqueeze(-1)
            found += [further >= -self.left] if self.left is not None else []
            found += [further <= self.right] if self.right is not None else []
        its = [_at(mark, keys) for mark in self.of_key]
        for how, mark, other in zip(self.compare, self.of_query, its, strict=False):
            found.append(_COMPARISONS[how](_at(mark, queries).mT, other))
        found += [mark != 0 for mark in its[len(self.compare) :]]
        mask = None
        for one in found:
            mask = one if mask is None else mask & one
        return mask


def _at(mark: Tensor, at: Tensor | None) -> Tensor:
    """Marks of tokens as those of the keys of a mask [batch, heads, queries, keys]."""
    mark = mark if at is None else mark.index_select(-1, at)
    return mark.unsqueeze(0) if mark.ndim == 1 else mark[:, None, None]


def visible(
    query: Tensor,
    key: Tensor,
    axis: Axis | None = None,
    dim: int = -2,
    outer: int = 1,
    segments: tuple[int, ...] = (),
    *,
    zigzag: bool = False,
    left: int | None = None,
    right: int | None = None,
    compare: tuple[str, ...] = (),
    of_query: tuple[Tensor, ...] = (),
    of_key: tuple[Tensor, ...] = (),
    spare: int = 0,
    attn_mask: Tensor | None = None,
) -> Tensor | None:
    """The mask that ``Sees`` says, and ``attn_mask`` if there is one: broadcasts to [batch, heads, queries, keys].

    With an axis the queries are the own ones, of which ``query``'s dim ``dim`` is cut as a ``Cut`` of these says. Keys,
    marks and ``attn_mask`` are whole, of which the own rows are taken. None: every key is seen.
    """
    sees = Sees(left, right, compare, of_query, of_key, spare)
    own, keys, device = query.shape[dim], key.shape[-2], query.device
    at = None
    if axis is not None:
        at = places(own * axis.size, Cut(0, outer, segments, zigzag), axis.size, axis.rank).to(device)
        if attn_mask is not None and attn_mask.shape[-2] != 1:
            attn_mask = attn_mask.index_select(-2, at.clone())  # which may be kept: not all places with it
    if sees.bounds == (None, None):
        mask = sees.mask(at, None, bounded=False)
    else:
        at = torch.arange(own, device=device) if at is None else at
        mask = sees.mask(at, torch.arange(keys, device=device), bounded=True)
    if spare:
        given = (torch.arange(keys, device=device) < keys - spare).unsqueeze(0)
        mask = given if mask is None else mask & given
    if mask is None or attn_mask is None:
        return attn_mask if mask is None else mask
    return attn_mask & mask if attn_mask.dtype is torch.bool else attn_mask.masked_fill(~mask, -torch.inf)


class Pairs(NamedTuple):
    """Some own queries with some keys of a rank, each (start, stop) in its block.

    how: ``all`` of them see these, or ``some`` by the bounds, as a ``causal`` mask if so it is said. at: the places in
    the sequence of the first of both, where what is in between lies side by side.
    """

    queries: Span
    keys: Span
    how: str
    at: Span


@lru_cache(maxsize=4096)
def pairs(
    size: int,
    cut: Cut,
    n: int,
    rank: int,
    other: int,
    bounds: tuple[int | None, int | None],
    spare: int = 0,
    *,
    apart: bool,
) -> tuple[Pairs, ...]:
    """What own queries may see of another rank's keys, where both are cut alike out of ``size`` tokens.

    spare: so many keys at the end of all are seen by none. apart: each with queries, and with keys, that lie side by
    side in the sequence. Else they are as few as may be.
    """
    length = size // n
    if not length:
        return ()
    whole = (0, length)
    if not apart and not spare and bounds == (None, None):
        return (Pairs(whole, whole, "all", (0, 0)),)
    if not apart and not spare and bounds == (None, 0) and rank == other:  # spans ascend
        return (Pairs(whole, whole, "causal", (0, 0)),)
    found = list(_by_span(spans(size, cut, n, rank), spans(size, cut, n, other), bounds, size - spare))
    return tuple(found if apart else _merged(_merged(found, 1), 0))


def _by_span(
    own: tuple[Span, ...], theirs: tuple[Span, ...], bounds: tuple[int | None, int | None], end: int
) -> Iterator[Pairs]:
    starts = [sum(b - a for a, b in own[:at]) for at in range(len(own))]  # where each span is in the block
    for queries, at in zip(own, starts, strict=True):
        for (first, last), there in zip(theirs, starts, strict=True):
            keys = (first, min(last, end))
            seen = _seen(queries, keys, bounds) if first < end else None
            if seen is not None:
                (start, stop), (first, last), how = seen
                by, along = at - queries[0], there - keys[0]
                yield Pairs((start + by, stop + by), (first + along, last + along), how, (start, first))


def _seen(queries: Span, keys: Span, bounds: tuple[int | None, int | None]) -> tuple[Span, Span, str] | None:
    """The queries that see any of the keys, the keys that any of them sees, and how."""
    (start, stop), (first, last), (left, right) = queries, keys, bounds
    start = start if right is None else max(start, first - right)
    stop = stop if left is None else min(stop, last + left)
    first = first if left is None else max(first, start - left)
    last = last if right is None else min(last, stop + right)
    if start >= stop or first >= last:
        return None
    if (right is None or last - 1 - start <= right) and (left is None or stop - 1 - first <= left):
        return (start, stop), (first, last), "all"
    causal = bounds == (None, 0) and (start, stop) == (first, last)
    return (start, stop), (first, last), "causal" if causal else "some"


def _merged(found: list[Pairs], side: int) -> list[Pairs]:
    """Neighbours on one side (0: queries, 1: keys) that are alike on the other become one, where all is seen."""
    made = found[:1]
    for one in found[1:]:
        last = made[-1]
        alike = last.how == one.how == "all" and last[1 - side] == one[1 - side]
        if alike and last[side][1] == one[side][0]:
            span = (last[side][0], one[side][1])
            made[-1] = last._replace(keys=span) if side else last._replace(queries=span)
        else:
            made.append(one)
    return made
