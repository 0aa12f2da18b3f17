"""What a pattern that matches nothing was probably meant to be: the nearest paths of the model, segment by segment."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from placement.lang.patterns import compile_pattern, expand

_NEAR = 0.7  # as everywhere that a name is guessed
_MISSING, _EXTRA, _WRONG = 0.35, 0.6, 1.0  # what it costs to leave out a segment, to write one too many, a wrong one
_SLIP = 0.05  # a letter's case, a number that does not occur
_LOOSE = 0.01  # '*' for a name: right, but for a number it was meant more likely
_FARTHEST = 1.2  # a pattern that is off by more has no nearest path
_TOPS = 3  # beginnings to name
_MOST_RANKS = 64  # of an axis that is worth naming


def nearest(pattern: str, names: Iterable[str], others: Mapping[str, Iterable[str]] | None = None) -> str | None:
    """A hint for a pattern that matches none of ``names``; None where there are no names.

    ``others`` are paths of other kinds by what a statement that takes them is called: where the pattern matches one
    of those, that is said.
    """
    names = list(names)
    for statement, paths in (others or {}).items():
        matched = next((path for path in paths if path and compile_pattern(pattern).fullmatch(path)), None)
        if matched is not None:
            return _other_kind(statement, pattern, matched, names)
    found = nearest_path(pattern, names)
    if found is not None:
        return f"did you mean '{found}'?"
    tops = list(dict.fromkeys(path[0].name for path in _paths(names)))
    return f"nothing is near; paths of this model begin with {' or '.join(map(repr, tops[:_TOPS]))}" if tops else None


def nearest_path(pattern: str, names: Iterable[str]) -> str | None:
    """The pattern mended so that it matches one of ``names``; None where nothing is near."""
    paths = _paths(names)
    flats = expand(pattern)
    alive = [flat for flat in flats if not any(_distance(tuple(flat.split(".")), path)[0] == 0 for path in paths)]
    found = min(
        (
            (distance, index, mended)
            for flat in alive or flats
            for index, path in enumerate(paths)
            for distance, mended in [_distance(tuple(flat.split(".")), path)]
        ),
        default=None,
    )
    return None if found is None or found[0] > _FARTHEST else ".".join(found[2])


@dataclass(frozen=True, slots=True)
class _Segment:
    """A segment of alike paths: its name, or the numbers that occur there."""

    name: str
    numbers: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """As a pattern that matches all of it."""
        low, high = (min(self.numbers), max(self.numbers)) if self.numbers else (0, 0)
        return f"[{low}-{high}]" if low != high else str(low) if self.numbers else self.name


def _paths(names: Iterable[str]) -> list[tuple[_Segment, ...]]:
    """The paths with what differs in numbers alone told once, in order of first appearance."""
    numbers: dict[tuple[str, ...], list[set[int]]] = {}
    for name in names:
        segments = name.split(".")
        key = tuple("*" if segment.isdigit() else segment for segment in segments)
        seen = numbers.setdefault(key, [set() for _ in segments])
        for known, segment in zip(seen, segments, strict=True):
            known |= {int(segment)} if segment.isdigit() else set()
    return [tuple(map(_Segment, key, map(tuple, map(sorted, seen)))) for key, seen in numbers.items()]


def _other_kind(statement: str, pattern: str, matched: str, names: Iterable[str]) -> str:
    """The pattern is right and the statement is not."""
    if statement == "value":
        own = next((name for name in names if name.startswith(f"{matched}.")), None)
        leaf = own.removeprefix(f"{matched}.") if own else "weight"
        return f"it matches a module; a param line names a parameter: {pattern}.{leaf}"
    module = pattern.rpartition(".")[0]
    return f"it matches a parameter; a value line names a module: {module}" if module else "it matches a parameter"


def _distance(pattern: tuple[str, ...], path: tuple[_Segment, ...]) -> tuple[float, tuple[str, ...]]:
    """How far the pattern is from the path, and the pattern mended so that it reaches it: an alignment of segments."""

    @cache
    def best(i: int, j: int) -> tuple[float, tuple[str, ...]]:
        if i == len(pattern) and j == len(path):
            return 0.0, ()
        options: list[tuple[float, tuple[str, ...]]] = []
        if i < len(pattern) and pattern[i] == "**":
            options.append(_after(0.0, (pattern[i],), best(i + 1, j)))
            if j < len(path):
                options.append(best(i, j + 1))
        elif i < len(pattern):
            options.append(_after(_EXTRA, (), best(i + 1, j)))
            if j < len(path):
                cost, mended = _unlike(pattern[i], path[j])
                options.append(_after(cost, (mended,), best(i + 1, j + 1)))
        if j < len(path):
            every = "*" if path[j].numbers else path[j].name
            options.append(_after(_MISSING, (every,), best(i, j + 1)))
        return min(options)

    return best(0, 0)


def _after(
    cost: float, segments: tuple[str, ...], rest: tuple[float, tuple[str, ...]]
) -> tuple[float, tuple[str, ...]]:
    return cost + rest[0], (*segments, *rest[1])


def _unlike(segment: str, own: _Segment) -> tuple[float, str]:
    """0 where the segment matches, less than a whole fault where it looks alike; and what to write instead."""
    matches = compile_pattern(segment).fullmatch
    if own.numbers:
        if any(matches(str(number)) for number in own.numbers):
            return 0.0, segment
        return (_SLIP, own.text) if segment.isdigit() or segment.startswith("[") else (_WRONG, "*")
    if matches(own.name):
        return (_LOOSE if segment == "*" else 0.0), segment
    ratio = difflib.SequenceMatcher(None, segment.casefold(), own.name.casefold()).ratio()
    return (max(1.0 - ratio, _SLIP) if ratio >= _NEAR else _WRONG), own.name


def multiples(size: int, ranks: int) -> str:
    """``96 or 100`` for 97 and 4: the sizes nearby that would do."""
    below, above = size // ranks * ranks, -(-size // ranks) * ranks
    return f"{below} or {above}" if below else str(above)


def divisors(size: int, most: int = 4) -> Sequence[int]:
    """The smallest numbers of ranks, from 2, that divide ``size``."""
    return [ranks for ranks in range(2, min(size, _MOST_RANKS) + 1) if size % ranks == 0][:most]
