"""Places in a text as the protocol counts them, and as the language does.

The language counts characters (code points) and lines from 1. The protocol counts lines from 0 and, within one,
units of an encoding on which client and server agree: UTF-16 unless both know better.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from lsprotocol.types import Position, PositionEncodingKind, Range

from placement.lang.source import Source
from placement.lang.spec import Span

_BOM = "\ufeff"


@dataclass(frozen=True, slots=True)
class Text:
    """A document. ``source`` is its text as the language reads it, without a byte order mark."""

    file: str
    text: str
    encoding: str = PositionEncodingKind.Utf16.value
    source: Source = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", Source(self.file, self.text))

    def range(self, span: Span) -> Range:
        """The range of a span; what lies past the end of a line or of the text is moved back to it."""
        return Range(
            self._position(span.line - 1, span.column - 1), self._position(span.end_line - 1, span.end_column - 1)
        )

    def between(self, start: int, end: int) -> Range:
        """The range from offset ``start`` up to ``end``, offsets counting the characters of ``source``."""
        return self.range(self.source.span(start, end))

    def offset(self, position: Position) -> int:
        """The offset in ``source`` of a position; one past the end of its line is the line's end."""
        starts = self.source.starts
        if position.line >= len(starts):
            return self.source.end()
        line = self._line(position.line)
        units, offset = position.character - self._shift(position.line), starts[position.line]
        for character in line:
            if units <= 0:
                break
            units -= self._units(character)
            offset += 1
        return offset

    def line_of(self, offset: int) -> int:
        """The line, counted from 1, that an offset lies in."""
        return bisect_right(self.source.starts, offset)

    def _position(self, line: int, column: int) -> Position:
        line = max(min(line, len(self.source.starts) - 1), 0)
        return Position(line, self._shift(line) + self._units(self._line(line)[: max(column, 0)]))

    def _line(self, line: int) -> str:
        starts = self.source.starts
        end = starts[line + 1] if line + 1 < len(starts) else self.source.end()
        return self.source.text[starts[line] : end].rstrip("\r\n")

    def _shift(self, line: int) -> int:
        """What a byte order mark, which is no character of ``source``, takes of the first line."""
        return self._units(_BOM) if line == 0 and self.text.startswith(_BOM) else 0

    def _units(self, text: str) -> int:
        if self.encoding == PositionEncodingKind.Utf8.value:
            return len(text.encode("utf-8", "surrogatepass"))
        if self.encoding == PositionEncodingKind.Utf32.value:
            return len(text)
        return len(text.encode("utf-16-le", "surrogatepass")) // 2
