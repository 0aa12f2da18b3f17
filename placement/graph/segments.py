"""A factor that is a sum: a dim that ops take apart in unequal pieces, each a product of factors.

A fused q | k | v of a grouped-query model has the segments kv_heads · group · head_dim, kv_heads · head_dim and
kv_heads · head_dim. A shard over a run that every segment has takes its block of each of them; a run that only some
have cannot be cut there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from placement.graph.ir import Size


@dataclass(frozen=True, slots=True)
class Factor:
    """A part of dims.

    piece: it counts equal pieces that an op takes apart, so no shard cuts it first. segments: of a sum, the products
    that lie side by side in it, none of which is a sum alone; their sizes are ints.
    """

    id: int
    size: Size
    name: str
    piece: bool = False
    segments: tuple[tuple[Factor, ...], ...] = ()

    def __hash__(self) -> int:
        return self.id  # types over factors are keys everywhere: no need to hash an expression for each

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__


Factors = tuple[Factor, ...]


def extent(factors: Iterable[Factor]) -> Size:
    """The size of a product."""
    return prod((factor.size for factor in factors), start=1)


def flattened(factors: Iterable[Factor]) -> Iterator[Factor]:
    """The factors, each followed by those inside its segments."""
    for factor in factors:
        yield factor
        for segment in factor.segments:
            yield from flattened(segment)


def holds(segment: Factors, run: Factors) -> bool:
    """Whether the product has the run side by side, and each of its factors once."""
    if run[0] not in segment:
        return False
    start = segment.index(run[0])
    return segment[start : start + len(run)] == run and all(segment.count(factor) == 1 for factor in run)


def shared(factor: Factor) -> bool:
    """Whether all segments of a sum have a factor in common: then a shard cuts every segment, and never the sum."""
    first, *others = factor.segments or ((),)
    return any(f.size != 1 and all(holds(segment, (f,)) for segment in (first, *others)) for f in first)


def side_by_side(whole: Factors, parts: Sequence[Factors]) -> tuple[Factors, ...] | None:
    """The segments of ``whole`` where ``parts`` are those, in order and side by side; None where they are not.

    Either the whole is a sum, or it is equal pieces and every part is one of them.
    """
    found: list[Factors] = []
    for part in parts:
        found += part[0].segments if len(part) == 1 and part[0].segments else (part,)
    if len(whole) == 1 and whole[0].segments == tuple(found):
        return tuple(found)
    if len(whole) > 1 and whole[0].size == len(found) and all(part == whole[1:] for part in found):
        return tuple(found)
    return None


def pattern(lengths: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Lengths of neighbours as (how often, in what ratio): 4 2 2 4 2 2 is twice (2, 1, 1), equal ones are (n, ())."""
    unit = gcd(*lengths)
    ratio = [length // unit for length in lengths]
    for period in range(1, len(ratio) + 1):
        if len(ratio) % period == 0 and ratio == ratio[:period] * (len(ratio) // period):
            return len(ratio) // period, tuple(ratio[:period]) if period > 1 else ()
    raise AssertionError("a sequence is its own period")
