"""A file's text, and the way from an offset in it to a line and column."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import NamedTuple

_NEWLINE = re.compile(r"\r\n|\n|\r")


def split_lines(text: str) -> list[str]:
    """The lines of a text without their ends. Unlike ``str.splitlines``, only what editors count as a line end."""
    return _NEWLINE.split(text)


class Span(NamedTuple):
    """A stretch of a file. Lines and columns count characters from 1; the end is the first one past it."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class Source:
    """The text of one file. A byte order mark is no part of it."""

    __slots__ = ("file", "starts", "text")

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.text = text.removeprefix("\ufeff")
        self.starts = (0, *(m.end() for m in _NEWLINE.finditer(self.text)))  # the offset of each line

    def span(self, start: int, end: int) -> Span:
        """The span of the characters from offset ``start`` up to ``end``."""
        line, end_line = bisect_right(self.starts, start), bisect_right(self.starts, end)
        return Span(self.file, line, start - self.starts[line - 1] + 1, end_line, end - self.starts[end_line - 1] + 1)

    def end(self) -> int:
        """The offset past the last character."""
        return len(self.text)
