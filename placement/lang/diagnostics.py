"""Diagnostics: what is wrong, and where. How they are shown is in ``render.py``.

Every stage reports through these types. One fault is one ``Diagnostic``; all faults that a stage finds
travel in one ``PlacementError``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

from placement.lang.codes import CODES, Code
from placement.lang.render import render
from placement.lang.source import Span
from placement.record import record

__all__ = ["CODES", "Code", "Diagnostic", "Diagnostics", "PlacementError", "Severity", "did_you_mean", "near", "render"]

Severity = Literal["error", "warning", "note"]
"""Only an error stops the compiler. A warning is likely a mistake; a note states what a reader may not be aware of."""


@record
class Diagnostic:
    """One finding, mostly a fault. The message states it, the hint proposes a fix, notes add facts.

    ``model_line`` is the model's own Python line as ``file:line``, where the finding has one.
    Raises ValueError for a code that is not registered.
    """

    code: str
    message: str
    span: Span | None = None
    hint: str | None = None
    notes: tuple[str, ...] = ()
    model_line: str | None = None
    severity: Severity = "error"

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"{self.code} is not registered in placement/lang/codes.py")

    @property
    def file(self) -> str | None:
        """The file at fault, as it was named by the user."""
        return None if self.span is None else self.span.file

    @property
    def line(self) -> int | None:
        """The line, counted from 1."""
        return None if self.span is None else self.span.line

    @property
    def column(self) -> int | None:
        """The column in characters, counted from 1."""
        return None if self.span is None else self.span.column

    def __str__(self) -> str:
        where = "" if self.span is None else f"{self.span}: "
        return f"{where}{self.severity}[{self.code}]: {self.message}"


_SHORTEST = 3  # letters of a name that may be another one cut short
_LONGEST = 200  # letters of a name that is compared with others


class PlacementError(Exception):
    """The spec or the model is at fault. ``diagnostics`` holds everything found, in order of place.

    At least one of them is an error; ``sources`` maps the files they lie in to their text.
    """

    __module__ = "placement"  # the name that users import it by, and the one that a traceback shows

    def __init__(self, diagnostics: Iterable[Diagnostic], sources: Mapping[str, str] | None = None) -> None:
        self.diagnostics = tuple(diagnostics)
        self.sources = dict(sources or {})
        super().__init__(self.diagnostics, self.sources)  # as args: pickling calls the class with them

    def __str__(self) -> str:
        return render(self.diagnostics, self.sources)


class Diagnostics:
    """Collects faults until a stage ends, so that all of them are reported at once."""

    def __init__(self) -> None:
        self._found: dict[Diagnostic, None] = {}

    def error(
        self,
        code: str,
        message: str,
        span: Span | None = None,
        *,
        hint: str | None = None,
        notes: Iterable[str] = (),
        model_line: str | None = None,
    ) -> None:
        """Add a fault; the same fault found twice counts once."""
        self._found[Diagnostic(code, message, span, hint, tuple(notes), model_line)] = None

    def extend(self, diagnostics: Iterable[Diagnostic]) -> None:
        """Add what was found elsewhere, or is no error."""
        self._found.update(dict.fromkeys(diagnostics))

    def __len__(self) -> int:
        return len(self._found)

    def sorted(self, files: Iterable[str] = ()) -> tuple[Diagnostic, ...]:
        """The faults by place: those without one first, then file by file in the order of ``files``, line by line."""
        order = {file: i for i, file in enumerate(files)}

        def place(d: Diagnostic) -> tuple[int, str, int, int, str]:
            if d.span is None:
                return (-1, "", 0, 0, d.code)
            return (order.get(d.span.file, len(order)), d.span.file, d.span.line, d.span.column, d.code)

        return tuple(sorted(_one_per_cause(self._found), key=place))

    def raise_if_any(self, sources: Mapping[str, str] | None = None) -> None:
        """Raise PlacementError with everything found, if an error is in it. ``sources`` maps files to their text."""
        if any(d.severity == "error" for d in self._found):
            raise PlacementError(self.sorted(sources or ()), sources)


def _one_per_cause(found: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Of faults that one place in a spec has for many values of the model, the first, and how many more there are."""
    by_place: dict[object, list[Diagnostic]] = {}
    for diagnostic in found:
        place = diagnostic if diagnostic.span is None else (diagnostic.code, diagnostic.span, diagnostic.severity)
        by_place.setdefault(place, []).append(diagnostic)
    merged: list[Diagnostic] = []
    for first, *others in by_place.values():
        more = (f"the same holds for {len(others)} more that this line speaks of",) if others else ()
        merged.append(replace(first, notes=(*first.notes, *more)))
    return merged


def near(name: str, candidates: Iterable[str]) -> list[str]:
    """At most two candidates that ``name`` may be a slip of the pen for, the nearest first."""
    import difflib  # noqa: PLC0415 - only a failing run needs it

    if len(name) > _LONGEST:
        return []
    by_folded: dict[str, str] = {}
    for candidate in candidates:
        by_folded.setdefault(candidate.casefold(), candidate)
    folded = name.casefold()
    alike = difflib.get_close_matches(folded, by_folded, n=2, cutoff=0.7)
    return [by_folded[c] for c in alike or [c for c in by_folded if _shortens(c, folded)][:2]]


def _shortens(one: str, other: str) -> bool:
    """Whether one name is the other cut short: ``seq`` and ``sequence``."""
    short, long = sorted((one, other), key=len)
    return len(short) >= _SHORTEST and long.startswith(short)


def did_you_mean(name: str, candidates: Iterable[str]) -> str | None:
    """A hint that names the near candidates, or None where none is near."""
    found = near(name, candidates)
    return f"did you mean {' or '.join(map(repr, found))}?" if found else None
