"""What a shard of a dim cuts: its leading factor, or as few more as the axis needs, in every piece and segment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import sympy

from placement.graph.factors import Factors
from placement.graph.ir import evaluate
from placement.graph.segments import extent, shared
from placement.solver.nearest import divisors, multiples

if TYPE_CHECKING:
    from placement.rules import Context
    from placement.solver.mesh import Axis


def leading(context: Context, factors: Factors) -> Factors | None:
    """The run that a shard of a dim cuts; a run of several factors leaves the last one whole. None: it has none.

    Of a sum whose segments have factors in common it is what all of them begin with.
    """
    rest = beyond_pieces(factors)
    starts = heads(rest)
    for run in context.runs(rest):
        if all(s[: len(run)] == run and (len(run) == 1 or len(run) < len(s)) for s in starts):
            return run
    return None


def heads(rest: Factors) -> tuple[Factors, ...]:
    """The product itself, or the segments of the sum that it begins with."""
    if rest and shared(rest[0]):
        return tuple(map(beyond_pieces, rest[0].segments))
    return (rest,)


def beyond_pieces(factors: Factors) -> Factors:
    """The product without the leading factors that count pieces: what a shard cuts of each piece."""
    while factors and factors[0].piece:
        factors = factors[1:]
    return factors


def indivisible(what: str, factors: Factors, axis: Axis, hints: Mapping[sympy.Symbol, int]) -> tuple[str, str]:
    """The message and the hint for a dim that has no leading run for the axis; ``what`` begins the message."""
    rest = beyond_pieces(factors)
    if rest and shared(rest[0]):
        return _unlike(what, rest, axis)
    first = rest[0].size if rest else 1
    size = extent(rest)
    whole = evaluate(size, hints)
    text = f"{what} is {whole if isinstance(size, int) else f'{size} = {whole}'}"
    if len(rest) < len(factors):
        text = f"{what} is {evaluate(extent(factors), hints)}, in {extent(factors[: -len(rest)])} pieces of {whole}"
    parts = evaluate(first, hints)
    if len(rest) > 1:
        text += f", in {parts} parts of {evaluate(extent(rest[1:]), hints)}"
    count = "a number of parts" if len(rest) > 1 else "pieces" if len(rest) < len(factors) else "a size"
    return _divided(text, parts, axis, count)


def _divided(text: str, parts: int, axis: Axis, count: str) -> tuple[str, str]:
    ranks = ", ".join(map(str, divisors(parts)))
    hint = f"{count} of {multiples(parts, axis.n)} would do" + (f", or {ranks} ranks" if ranks else "")
    return f"{text}, which axis '{axis.name}' of {axis.n} does not divide", hint


def _unlike(what: str, rest: Factors, axis: Axis) -> tuple[str, str]:
    """A sum: its segments begin alike with a factor that the axis does not divide, or not alike at all."""
    sizes = [str(extent(segment)) for segment in rest[0].segments]
    text = f"{what} is {extent(rest)}, in segments of {', '.join(sizes[:-1])} and {sizes[-1]}"
    firsts = {segment[:1] for segment in heads(rest)}
    if len(firsts) == 1:
        ((first,),) = firsts
        assert isinstance(first.size, int)
        return _divided(f"{text} with {first.size} parts each", first.size, axis, "a number of parts")
    return f"{text} that do not begin with the same parts", "leave the line out: it is then used replicated"
