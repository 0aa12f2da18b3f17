"""Diagnostics: what is wrong, where, and how it is shown.

Every stage reports through these types. One fault is one ``Diagnostic``; all faults that a stage finds
travel in one ``PlacementError``.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from placement.lang.codes import CODES, Code
from placement.lang.source import split_lines
from placement.lang.spec import Span

__all__ = ["CODES", "Code", "Diagnostic", "Diagnostics", "PlacementError", "did_you_mean", "near", "render"]


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One fault. The message states it, the hint proposes a fix, notes add facts.

    ``model_line`` is the model's own Python line as ``file:line``, where the fault has one.
    Raises ValueError for a code that is not registered.
    """

    code: str
    message: str
    span: Span | None = None
    hint: str | None = None
    notes: tuple[str, ...] = ()
    model_line: str | None = None

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
        return f"{where}error[{self.code}]: {self.message}"


class PlacementError(Exception):
    """The spec or the model is at fault. ``diagnostics`` holds every fault found, in order of place."""

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
        """Add faults found elsewhere."""
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
        """Raise PlacementError with every fault, if there is one. ``sources`` maps files to their text."""
        if self._found:
            raise PlacementError(self.sorted(sources or ()), sources)


def _one_per_cause(found: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Of faults that one place in a spec has for many values of the model, the first, and how many more there are."""
    by_place: dict[object, list[Diagnostic]] = {}
    for diagnostic in found:
        place = diagnostic if diagnostic.span is None else (diagnostic.code, diagnostic.span)
        by_place.setdefault(place, []).append(diagnostic)
    merged: list[Diagnostic] = []
    for first, *others in by_place.values():
        more = (f"the same holds for {len(others)} more that this line speaks of",) if others else ()
        merged.append(replace(first, notes=(*first.notes, *more)))
    return merged


def near(name: str, candidates: Iterable[str]) -> list[str]:
    """At most two candidates that ``name`` may be a slip of the pen for, the nearest first."""
    import difflib  # noqa: PLC0415 - only a failing run needs it

    by_folded: dict[str, str] = {}
    for candidate in candidates:
        by_folded.setdefault(candidate.casefold(), candidate)
    return [by_folded[c] for c in difflib.get_close_matches(name.casefold(), by_folded, n=2, cutoff=0.7)]


def did_you_mean(name: str, candidates: Iterable[str]) -> str | None:
    """A hint that names the near candidates, or None where none is near."""
    found = near(name, candidates)
    return f"did you mean {' or '.join(map(repr, found))}?" if found else None


_STYLES = {"error": "\x1b[1;31m", "bold": "\x1b[1m", "frame": "\x1b[1;34m", "help": "\x1b[1;36m"}
_TAB = 4


def render(
    diagnostics: Iterable[Diagnostic], sources: Mapping[str, str], *, color: bool = False, width: int = 80
) -> str:
    """The diagnostics as text, a blank line between two.

    ``sources`` maps files to their text; a file that it lacks is named without its line. Source lines
    are cut, and hints and notes wrapped, to ``width`` columns.
    """
    lines: dict[str, list[str]] = {}
    blocks: list[str] = []
    for diagnostic in diagnostics:
        file = diagnostic.file
        if file is not None and file in sources and file not in lines:
            lines[file] = split_lines(sources[file])
        blocks.append("\n".join(_block(diagnostic, lines.get(file or "", []), color=color, width=width)))
    return "\n\n".join(blocks)


def _block(diagnostic: Diagnostic, lines: list[str], *, color: bool, width: int) -> list[str]:
    def paint(style: str, text: str) -> str:
        return f"{_STYLES[style]}{text}\x1b[0m" if color else text

    out = [paint("error", f"error[{diagnostic.code}]") + paint("bold", f": {_printable(diagnostic.message)}")]
    span = diagnostic.span
    gutter = " " * (len(str(span.line)) if span is not None else 1)
    if span is not None:
        out.append(f"{gutter}{paint('frame', '-->')} {_printable(str(span))}")
    if diagnostic.model_line is not None:
        out.append(f"{gutter}{paint('frame', ':::')} {_printable(diagnostic.model_line)}")
    if span is not None and span.line <= len(lines):
        shown, carets = _excerpt(lines[span.line - 1], span, max(width - len(gutter) - 3, 20))
        bar = paint("frame", f"{gutter} |")
        out += [bar, f"{paint('frame', f'{span.line} |')} {shown}".rstrip(), f"{bar} {paint('error', carets)}"]
    for label, text in [("help", diagnostic.hint), *(("note", note) for note in diagnostic.notes)]:
        if text is not None:
            lead = f"{gutter} = {label}: "
            wrapped = _wrap(_printable(text, keep_newlines=True), width - len(lead))
            head = f"{gutter} {paint('frame', '=')} {paint('help', label)}: "
            out += [head + wrapped[0], *(" " * len(lead) + more for more in wrapped[1:])]
    return out


def _wrap(text: str, width: int) -> list[str]:
    """Lines of at most ``width``; a word is never cut, since paths and code must stay whole."""
    import textwrap  # noqa: PLC0415 - only a failing run needs it

    wrapped: list[str] = []
    for line in text.split("\n"):
        wrapped += textwrap.wrap(line, max(width, 20), break_long_words=False, break_on_hyphens=False) or [""]
    return wrapped


def _excerpt(line: str, span: Span, width: int) -> tuple[str, str]:
    """A source line cut to ``width`` columns around the span, and the carets that go below it."""
    cells = _cells(line)
    first = min(span.column - 1, len(cells))
    last = span.end_column - 1 if span.end_line == span.line else len(cells)
    last = min(max(last, first + 1), max(len(cells), first + 1))

    def columns(start: int, end: int) -> int:
        return sum(_columns(cell) for cell in cells[start:end])

    # Keep what leads up to the fault if there is room, else at least a little of it.
    start = 0
    if columns(0, min(last, len(cells))) > width - 1:
        room = max(width // 3, width - 2 - columns(first, last)) if columns(first, last) < width else width // 3
        start, used = first, 0
        while start > 0 and used + _columns(cells[start - 1]) <= room:
            start -= 1
            used += _columns(cells[start])
    end, used = start, 1 if start else 0
    while end < len(cells) and used + _columns(cells[end]) <= width - 1:
        used += _columns(cells[end])
        end += 1
    cut_left, cut_right = "…" if start else "", "…" if end < len(cells) else ""
    carets = "^" * max(columns(first, min(last, end)), 1)
    return cut_left + "".join(cells[start:end]) + cut_right, " " * (len(cut_left) + columns(start, first)) + carets


def _cells(line: str) -> list[str]:
    """What is shown of each character: tabs as blanks up to the next stop, control characters as a mark."""
    cells: list[str] = []
    column = 0
    for character in line:
        cell = " " * (_TAB - column % _TAB) if character == "\t" else _printable(character)
        cells.append(cell)
        column += _columns(cell)
    return cells


def _columns(text: str) -> int:
    """Terminal columns: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.category(c) in {"Mn", "Me"} else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def _printable(text: str, *, keep_newlines: bool = False) -> str:
    """The text without control characters, which could steer the terminal or reorder what it shows."""
    if text.isprintable():
        return text
    return "".join(
        c if unicodedata.category(c) not in {"Cc", "Cf", "Cs", "Zl", "Zp"} or (keep_newlines and c == "\n") else "�"
        for c in text
    )
