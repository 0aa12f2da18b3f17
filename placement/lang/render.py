"""How diagnostics are shown: for people, for a log, for a program, for GitHub.

``full`` shows each with its source, ``concise`` is one line each. ``github`` is the workflow commands that annotate
a pull request. ``json``, version 1, is ``{"format_version": 1, "diagnostics": [...]}``, each an object with

- ``code``, ``severity`` (error, warning or note), ``message``, ``hint`` (or null), ``notes`` (a list);
- ``file``, ``line``, ``column``, ``end_line``, ``end_column``: counted from 1 in characters, the end being the first
  one past it; all null where no place in a spec is at fault;
- ``model_line``: the model's own Python line as ``file:line``, or null;
- ``page``: where the code is described, relative to the project; ``placement explain CODE`` prints it.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from placement.lang.source import Span, split_lines

if TYPE_CHECKING:
    from placement.lang.diagnostics import Diagnostic

Form = Literal["full", "concise", "json", "github"]
FORMS: tuple[Form, ...] = ("full", "concise", "json", "github")
FORMAT_VERSION = 1

_STYLES = {
    "error": "\x1b[1;31m",
    "warning": "\x1b[1;33m",
    "note": "\x1b[1;36m",
    "bold": "\x1b[1m",
    "frame": "\x1b[1;34m",
    "help": "\x1b[1;36m",
}
_TAB = 4
_LONGEST_WORD, _KEPT = 200, 40  # characters, and those kept at both ends of a longer one
_LONG_WORD = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}")
_GITHUB = {"error": "error", "warning": "warning", "note": "notice"}

Paint = Callable[[str, str], str]


def render(
    diagnostics: Iterable[Diagnostic],
    sources: Mapping[str, str],
    *,
    form: Form = "full",
    color: bool = False,
    width: int = 80,
) -> str:
    """The diagnostics as text without a final line end.

    ``sources`` maps files to their text; a file that it lacks is named without its line. In full form a blank line
    stands between two, source lines are cut and words wrapped to ``width`` columns; other forms know neither
    ``color`` nor ``width``.
    """
    found = list(diagnostics)
    if form == "json":
        return _json(found)
    if form == "concise":
        return "\n".join(map(_concise, found))
    if form == "github":
        return "\n".join(map(_github, found))
    lines: dict[str, list[str]] = {}
    blocks: list[str] = []
    for diagnostic in found:
        file = diagnostic.file
        if file is not None and file in sources and file not in lines:
            lines[file] = split_lines(sources[file])
        blocks.append("\n".join(_block(diagnostic, lines.get(file or "", []), color=color, width=width)))
    return "\n\n".join(blocks)


# -- in full ----------------------------------------------------------------------------------------


def _block(diagnostic: Diagnostic, lines: Sequence[str], *, color: bool, width: int) -> list[str]:
    def paint(style: str, text: str) -> str:
        return f"{_STYLES[style]}{text}\x1b[0m" if color else text

    span, model = diagnostic.span, _model_place(diagnostic)
    gutter = " " * max(len(str(span.line)) if span else 1, len(str(model[1])) if model else 1)
    label = f"{diagnostic.severity}[{diagnostic.code}]"
    first, *more = _wrap(_told(diagnostic.message), width - len(label) - 2)
    out = [paint(diagnostic.severity, label) + paint("bold", f": {first}")]
    out += [paint("bold", " " * (len(label) + 2) + line) for line in more]
    if span is not None:
        out.append(f"{gutter}{paint('frame', '-->')} {printable(str(span))}")
        if span.line <= len(lines):
            out += _source(lines[span.line - 1], span, diagnostic.severity, gutter, paint, width)
    if diagnostic.model_line is not None:
        out.append(f"{gutter}{paint('frame', ':::')} {printable(_short(diagnostic.model_line))}")
    if model is not None:
        line = _model_text(*model)
        if line.strip():
            start, end = len(line) - len(line.lstrip()), len(line.rstrip())
            place = Span(model[0], model[1], start + 1, model[1], end + 1)
            out += _source(line, place, "frame", gutter, paint, width)
    for label, text in [("help", diagnostic.hint), *(("note", note) for note in diagnostic.notes)]:
        if text is not None:
            lead = f"{gutter} = {label}: "
            wrapped = _wrap(_told(text), width - len(lead))
            head = f"{gutter} {paint('frame', '=')} {paint('help', label)}: "
            out += [head + wrapped[0], *(" " * len(lead) + more for more in wrapped[1:])]
    return out


def _source(line: str, span: Span, style: str, gutter: str, paint: Paint, width: int) -> list[str]:
    """A line of a file with its number, and the carets below it."""
    shown, carets = _excerpt(line, span, max(width - len(gutter) - 3, 20))
    bar = paint("frame", f"{gutter} |")
    number = paint("frame", f"{span.line:>{len(gutter)}} |")
    return [bar, f"{number} {shown}".rstrip(), f"{bar} {paint(style, carets)}"]


def _model_place(diagnostic: Diagnostic) -> tuple[str, int] | None:
    """The file and line of the model's Python; None where there is none."""
    file, _, line = (diagnostic.model_line or "").rpartition(":")
    return (file, int(line)) if file and line.isdecimal() else None


def _model_name(place: str) -> str:
    """The place as a reader knows it: below the working directory without the way there."""
    here = os.getcwd() + os.sep
    return place.removeprefix(here)


def _short(place: str) -> str:
    """The place without the way to it where it is below the working directory, or in an installed package."""
    return _model_name(place).rpartition("site-packages" + os.sep)[2]


def _model_text(file: str, line: int) -> str:
    """The line itself, also of a notebook's cell; empty where it is not to be had."""
    import linecache  # noqa: PLC0415 - only a failing run needs it

    linecache.checkcache(file)
    return linecache.getline(file, line).rstrip("\r\n")


def _wrap(text: str, width: int) -> list[str]:
    """Lines of at most ``width``; a word is never cut, since paths and code must stay whole."""
    import textwrap  # noqa: PLC0415 - only a failing run needs it

    wrapped: list[str] = []
    for line in text.split("\n"):
        wrapped += textwrap.wrap(line, max(width, 20), break_long_words=False, break_on_hyphens=False) or [""]
    return wrapped


# -- for machines -----------------------------------------------------------------------------------


def _one_line(text: str) -> str:
    return " ".join(_told(text).split())


def _concise(diagnostic: Diagnostic) -> str:
    place = str(diagnostic.span) if diagnostic.span is not None else _model_name(diagnostic.model_line or "")
    where = f"{printable(place)}: " if place else ""
    return f"{where}{diagnostic.severity}[{diagnostic.code}]: {_one_line(diagnostic.message)}"


def _json(diagnostics: Iterable[Diagnostic]) -> str:
    import json  # noqa: PLC0415 - only this form needs it

    found = [
        {
            "code": d.code,
            "severity": d.severity,
            "message": _short_words(d.message),
            "hint": None if d.hint is None else _short_words(d.hint),
            "notes": list(map(_short_words, d.notes)),
            "file": d.file,
            "line": d.line,
            "column": d.column,
            "end_line": d.span.end_line if d.span else None,
            "end_column": d.span.end_column if d.span else None,
            "model_line": d.model_line,
            "page": f"docs/diagnostics/{d.code}.md",
        }
        for d in diagnostics
    ]
    return json.dumps({"format_version": FORMAT_VERSION, "diagnostics": found}, indent=2)


def _github(diagnostic: Diagnostic) -> str:
    """One workflow command. GitHub takes columns only where they are of one line."""
    span, model = diagnostic.span, _model_place(diagnostic)
    properties: dict[str, object] = {"title": diagnostic.code}
    if span is not None:
        properties |= {"file": span.file, "line": span.line, "endLine": span.end_line}
        if span.line == span.end_line:
            properties |= {"col": span.column, "endColumn": span.end_column}
    elif model is not None:
        properties |= {"file": _model_name(model[0]), "line": model[1]}
    told = ",".join(f"{name}={_escaped(str(value), properties=True)}" for name, value in properties.items())
    parts = [diagnostic.message, *(f"note: {note}" for note in diagnostic.notes)]
    if diagnostic.hint is not None:
        parts.insert(1, f"help: {diagnostic.hint}")
    if span is not None and diagnostic.model_line is not None:
        parts.append(f"model: {_model_name(diagnostic.model_line)}")
    text = _told("\n".join(parts))
    return f"::{_GITHUB[diagnostic.severity]} {told}::{_escaped(text)}"


def _escaped(text: str, *, properties: bool = False) -> str:
    """The text as a workflow command carries it; properties also end at ``:`` and ``,``."""
    pairs = [("%", "%25"), ("\r", "%0D"), ("\n", "%0A"), *([(":", "%3A"), (",", "%2C")] if properties else [])]
    for character, code in pairs:
        text = text.replace(character, code)
    return text


# -- characters -------------------------------------------------------------------------------------


def _excerpt(line: str, span: Span, width: int) -> tuple[str, str]:
    """A source line cut to ``width`` columns around the span, and the carets that go below it."""
    cells = _cells(line)
    first = min(span.column - 1, len(cells))
    last = span.end_column - 1 if span.end_line == span.line else len(cells)
    last = min(max(last, first + 1), max(len(cells), first + 1))

    def extent(start: int, end: int) -> int:
        return sum(columns(cell) for cell in cells[start:end])

    # Keep what leads up to the fault if there is room, else at least a little of it.
    start = 0
    if extent(0, min(last, len(cells))) > width - 1:
        room = max(width // 3, width - 2 - extent(first, last)) if extent(first, last) < width else width // 3
        start, used = first, 0
        while start > 0 and used + columns(cells[start - 1]) <= room:
            start -= 1
            used += columns(cells[start])
    end, used = start, 1 if start else 0
    while end < len(cells) and used + columns(cells[end]) <= width - 1:
        used += columns(cells[end])
        end += 1
    cut_left, cut_right = "…" if start else "", "…" if end < len(cells) else ""
    carets = "^" * max(extent(first, min(last, end)), 1)
    return cut_left + "".join(cells[start:end]) + cut_right, " " * (len(cut_left) + extent(start, first)) + carets


def _cells(line: str) -> list[str]:
    """What is shown of each character: tabs as blanks up to the next stop, control characters as a mark."""
    cells: list[str] = []
    column = 0
    for character in line:
        cell = " " * (_TAB - column % _TAB) if character == "\t" else printable(character)
        cells.append(cell)
        column += columns(cell)
    return cells


def columns(text: str) -> int:
    """Terminal columns: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.category(c) in {"Mn", "Me"} else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def _told(text: str) -> str:
    """A message, a hint or a note as it is shown."""
    return printable(_short_words(text), keep_newlines=True)


def _short_words(text: str) -> str:
    """The text without the middle of words that no one could read: a file may be one such word."""
    if len(text) <= _LONGEST_WORD:
        return text
    return _LONG_WORD.sub(lambda word: f"{word.group()[:_KEPT]}…{word.group()[-_KEPT:]}", text)


def printable(text: str, *, keep_newlines: bool = False) -> str:
    """The text without control characters, which could steer the terminal or reorder what it shows."""
    if text.isprintable():
        return text
    return "".join(
        c if unicodedata.category(c) not in {"Cc", "Cf", "Cs", "Zl", "Zp"} or (keep_newlines and c == "\n") else "�"
        for c in text
    )
