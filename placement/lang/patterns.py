"""Path patterns: their syntax, and the regular expression that each stands for.

A path is segments joined by dots. In a pattern ``*`` as a whole segment is exactly one segment, and
inside a segment any characters of it; ``**`` is any number of segments, none included; ``{a,b}`` are
alternatives, dots allowed inside; ``[0-3]`` is a range of indices, both ends included.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

MAX_ALTERNATIVES = 1000
"""Alternatives are multiplied out, which keeps matching linear; past this many a pattern is refused."""

MAX_LENGTH = 10_000
"""Characters of a pattern, with those of the blocks around it."""

_TOKEN = re.compile(r"\{|\}|,|\s+|\[[^\]]*\]|\[|\.|\*+|[\w-]+|.", re.DOTALL)
_RANGE_FORM = "an index range is written [first-last]"
_RANGE = re.compile(r"\[([0-9]{1,9})-([0-9]{1,9})\]")


class PatternError(ValueError):
    """A malformed pattern: ``start`` and ``end`` are offsets of the fault in its text."""

    def __init__(self, message: str, start: int, end: int) -> None:
        super().__init__(message)
        self.start = start
        self.end = end


@lru_cache(maxsize=4096)
def compile_pattern(text: str) -> re.Pattern[str]:
    """The regular expression of a pattern. Raises PatternError (a ValueError) where it is malformed."""
    return re.compile("|".join(_flat_regex(flat) for flat in expand(text)))


def normalize(text: str) -> str:
    """The pattern without the white space that may stand inside braces, and in Unicode's form NFC as all names are."""
    return unicodedata.normalize("NFC", "".join(text.split()))


def expand(text: str) -> tuple[str, ...]:
    """The brace-free patterns that ``text`` stands for, in order, each once.

    ``expand("a.{b,c.d}")`` is ``("a.b", "a.c.d")``. Raises PatternError.
    """
    if len(text) > MAX_LENGTH:
        raise PatternError(f"a pattern of more than {MAX_LENGTH} characters", 0, len(text))
    # One frame per open brace: the finished alternatives, and the expansions of the one being read.
    frames: list[tuple[int, list[str], list[str]]] = [(0, [], [""])]
    for token in _TOKEN.finditer(text):
        start, piece = token.start(), token.group()
        opened, done, current = frames[-1]
        if piece == "{":
            frames.append((start, [], [""]))
        elif piece == "}":
            if len(frames) == 1:
                raise PatternError("this '}' closes nothing", start, token.end())
            frames.pop()
            outer_opened, outer_done, outer_current = frames[-1]
            choices = list(dict.fromkeys([*done, *current]))
            if len(outer_current) * len(choices) > MAX_ALTERNATIVES:
                raise PatternError(f"a pattern of more than {MAX_ALTERNATIVES} alternatives", opened, token.end())
            frames[-1] = (outer_opened, outer_done, [a + b for a in outer_current for b in choices])
        elif piece == "," and len(frames) > 1:
            done.extend(current)
            frames[-1] = (opened, done, [""])
        elif not piece.isspace():
            _check_piece(piece, start, token.end())
            frames[-1] = (opened, done, [prefix + piece for prefix in current])
        elif len(frames) == 1:
            raise PatternError("white space inside a path", start, token.end())
    if len(frames) > 1:
        raise PatternError("this '{' is not closed", frames[-1][0], frames[-1][0] + 1)
    flats = tuple(dict.fromkeys(frames[0][2]))
    for flat in flats:
        _check_flat(flat, text)
    return flats


def _check_piece(piece: str, start: int, end: int) -> None:
    if piece.startswith("["):
        bounds = _RANGE.fullmatch(piece)
        if bounds is None:
            one = piece[1:-1].strip()
            text = f"a single index has no brackets: layers.{one}.mlp" if one.isdecimal() else _RANGE_FORM
            raise PatternError(text, start, end)
        if int(bounds[1]) > int(bounds[2]):
            raise PatternError(f"the index range {piece} is empty", start, end)
    elif piece.startswith("***"):
        raise PatternError("only '*' and '**' have a meaning", start, end)
    elif not (piece[0] in ".*-" or piece[0].isalnum() or piece[0] == "_"):
        raise PatternError(f"{piece!r} has no place in a path", start, end)


def _check_flat(flat: str, text: str) -> None:
    """Faults of whole segments, seen only when the alternatives are multiplied out."""
    shown = "" if flat == text else f" in {flat!r}"
    for segment in flat.split("."):
        if not segment:
            raise PatternError(f"an empty segment{shown}", 0, len(text))
        if "**" in segment and segment != "**":
            message = f"'**' stands for whole segments, but is part of {segment!r}: inside one write '*'"
            raise PatternError(message, 0, len(text))


def _flat_regex(flat: str) -> str:
    segments = flat.split(".")
    # Neighbouring '**' say what one says, and would make matching slow.
    segments = [s for i, s in enumerate(segments) if s != "**" or i == 0 or segments[i - 1] != "**"]
    if segments == ["**"]:
        return ".*"
    parts: list[str] = []
    for i, segment in enumerate(segments):
        if segment != "**":
            after_start = i > 0 and not (i == 1 and segments[0] == "**")
            parts.append((r"\." if after_start else "") + _segment_regex(segment))
        elif i == 0:
            parts.append(r"(?:[^.]+\.)*")
        else:
            parts.append(r"(?:\.[^.]+)*")
    return "".join(parts)


def _segment_regex(segment: str) -> str:
    if segment == "*":
        return "[^.]+"
    pieces: list[str] = []
    for token in _TOKEN.finditer(segment):
        piece = token.group()
        bounds = _RANGE.fullmatch(piece)
        if bounds is not None:
            pieces.append(_number_regex(int(bounds[1]), int(bounds[2])))
        else:
            pieces.append("[^.]*" if piece == "*" else re.escape(piece))
    return "".join(pieces)


def _number_regex(first: int, last: int) -> str:
    """The decimal numbers from ``first`` to ``last``: ranges that share all but trailing free digits."""
    branches: list[str] = []
    while first <= last:
        # The widest block 10^k of numbers that starts at `first`, has one length and ends by `last`.
        free = 0
        while first and first % 10 ** (free + 1) == 0 and first + 10 ** (free + 1) - 1 <= last:
            free += 1
        step = 10**free
        head = first // step
        # As many of these blocks as differ in the last fixed digit only.
        count = min(9 - head % 10, (last - first + 1) // step - 1)
        digits = str(head)
        ending = digits[-1] if count == 0 else f"[{digits[-1]}-{int(digits[-1]) + count}]"
        branches.append(digits[:-1] + ending + (f"[0-9]{{{free}}}" if free else ""))
        first += (count + 1) * step
    return f"(?:{'|'.join(branches)})"
