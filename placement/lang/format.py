"""The one layout of ``.plc`` text: ``format_text``.

It works on the statements that ``split`` finds and on the tokens of the grammar, so a new statement needs no line
here. Layout is a function of tokens, comments and blank lines alone, which is why formatting twice changes nothing:

- a statement is one line, unless that is longer than ``WIDTH`` or there are comments inside; the rest is indented;
- in lines that follow one another the first ``:``, and the comments behind, stand in one column each;
- a comment behind a statement, or on a line of its own, stays so; one right below such a comment goes on with it;
- blank lines are kept, one in a row, but not at the edges of a file or block.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from placement.lang.diagnostics import Diagnostics
from placement.lang.lalr import Node
from placement.lang.lalr import parse as parse_tokens
from placement.lang.parser import parse
from placement.lang.render import columns
from placement.lang.source import Source
from placement.lang.split import Raw, split

__all__ = ["WIDTH", "FormatError", "format_text"]

WIDTH = 100
"""Columns that a statement may take before it goes on on the next line, its comment aside."""

_INDENT, _CARRIED = 2, 4  # of a block, and of what a statement carries over
_WIDEST_LEFT = 60  # what is longer before its ':' moves nobody else's,
_WIDEST_CODE = 80  # and what is longer before its comment neither
_GAP = re.compile(r"(?P<end>\r\n|\n|\r)|(?P<comment>#[^\r\n]*)|(?P<brace>[{}])|\s")
_LOOSE = re.compile(r"(?P<word>\w+|[^\w\s#])|#[^\r\n]*|\s+")
_TIGHT_BEFORE, _TIGHT_AFTER = frozenset(",()]"), frozenset("([")
_BREAKS = frozenset(",+")  # behind which a statement that is too wide goes on on the next line
_QUANTITY = re.compile(r"([+-]?[0-9][0-9._]*)\s*([^\W\d]+)?\s*(/\w*)?")


class FormatError(RuntimeError):
    """The formatter would have changed what a text says, which is a bug in it."""


def format_text(text: str, file: str = "<string>") -> str:
    """The text in its one layout, lines ended by LF. Files that it includes are not read.

    Raises PlacementError where it does not parse, and FormatError rather than return what says something else.
    """
    spec = parse(text, file, read=_nothing)
    before = _Layout(Source(file, text))
    result = before.text()
    if result == text:
        return result
    after = _Layout(Source(file, result))
    if parse(result, file, read=_nothing) != spec or after.said() != before.said():
        raise FormatError(f"formatting {file} would change what it says")
    if after.text() != result:
        raise FormatError(f"formatting {file} twice would change it twice")
    return result


def _nothing(path: str) -> str:
    del path
    return ""


class _Token(NamedTuple):
    text: str  # as it is written out
    start: int
    end: int


class _Comment(NamedTuple):
    text: str
    column: int  # where it stood, counted from 0
    ends: int  # line ends between it and what stands before it


class _Row(NamedTuple):
    """A line to be written; all is empty in a blank one. Rows of one ``group`` that follow one another are aligned."""

    group: object = None
    indent: int = 0
    code: str = ""
    colon: int | None = None  # the offset in the code past what stands before its first ':'
    comment: _Comment | None = None
    attached: bool = False  # a comment that goes on with the one above it
    opens: bool = False


class _Line:
    """A part of a statement that stays on one line, and the comments that end it."""

    __slots__ = ("comments", "tokens")

    def __init__(self) -> None:
        self.tokens: list[_Token] = []
        self.comments: list[_Comment] = []


class _Layout:
    """Reads a text that parses into rows."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.rows: list[_Row] = []
        self.statements: list[tuple[int | None, list[str]]] = []
        self.comments: list[str] = []
        self.depth = 0
        self.ends = 0  # line ends since the last thing that is not blank
        at = 0
        for raw in split(source, Diagnostics()):
            self._between(at, raw.start)
            at = self._statement(raw)
        self._between(at, source.end())

    def said(self) -> object:
        """What a layout must not change: tokens by statement and block, and all comments in order."""
        return self.statements, self.comments

    def text(self) -> str:
        """The new text."""
        return "".join(f"{line}\n" for _, run in groupby(self.rows, _group) for line in _aligned(list(run)))

    # -- reading ---------------------------------------------------------------------------------

    def _gap(self, start: int, end: int) -> Iterator[re.Match[str]]:
        """Comments and braces between two offsets; the line ends before each are counted."""
        for piece in _GAP.finditer(self.source.text, start, end):
            if piece["end"] is not None:
                self.ends += 1
            elif piece["comment"] is not None or piece["brace"] is not None:
                yield piece
                self.ends = 0

    def _between(self, start: int, end: int) -> None:
        """What stands between two statements: comments, and the ends of blocks."""
        for piece in self._gap(start, end):
            if piece["brace"] is not None:
                self.depth -= 1
                self._add(_Row(object(), self._indent(), "}"), closes=True)
            else:
                self._comment(self._read_comment(piece), self._indent())

    def _indent(self) -> int:
        return self.depth * _INDENT

    def _read_comment(self, piece: re.Match[str]) -> _Comment:
        text = piece.group().rstrip()
        self.comments.append(text)
        line = self.source.starts[bisect_right(self.source.starts, piece.start()) - 1]
        return _Comment(text, _extent(self.source.text[line : piece.start()]), self.ends)

    def _statement(self, raw: Raw) -> int:
        """Write a statement; return the offset past it and, where it opens a block, past the brace."""
        tokens = _tokens(self.source.text[raw.start : raw.end], raw)
        self.statements.append((raw.block, [token.text for token in tokens]))
        if raw.keyword == "within":
            return self._header(tokens, raw)
        ends = self.ends
        lines = [_Line()]
        for token, following in zip(tokens, [*tokens[1:], None], strict=True):
            lines[-1].tokens.append(token)
            if following is not None:
                self.ends = 0
                lines[-1].comments += map(self._read_comment, self._gap(token.end, following.start))
                if lines[-1].comments and following.text != ",":
                    lines.append(_Line())
        self.ends = ends
        self._write(lines)
        return raw.end

    def _header(self, tokens: list[_Token], raw: Raw) -> int:
        """``within PATH {``. Comments before the brace go behind it, where the next reading finds them."""
        self._add(_Row(object(), self._indent(), f"{_joined(tokens)} {{", opens=True))
        self.depth += 1
        for piece in self._gap(raw.end, self.source.end()):
            if piece["brace"] is not None:
                self.ends = 0
                return piece.end()
            self._comment(self._read_comment(piece), self._indent())
        raise AssertionError("a text that parses has a brace behind 'within'")

    # -- writing ---------------------------------------------------------------------------------

    def _add(self, row: _Row, *, closes: bool = False) -> None:
        """Add a row, and before it the blank one that stood there if it divides something."""
        if self.ends > 1 and self.rows and not self.rows[-1].opens and not closes:
            self.rows.append(_Row())
        self.rows.append(row)
        self.ends = 0

    def _comment(self, comment: _Comment, indent: int, group: object = None) -> None:
        """Add a comment: behind the last row, going on with the one there, or on its own."""
        above = self.rows[-1] if self.rows else _Row()
        if above.code and above.comment is None and not comment.ends:
            self.rows[-1] = above._replace(comment=comment)
            return
        attached = (
            above.comment is not None
            and bool(above.code or above.attached)
            and (comment.ends, comment.column) == (1, above.comment.column)
        )
        self.ends = comment.ends
        self._add(_Row(above.group if attached else group, indent, comment=comment, attached=attached))

    def _write(self, lines: list[_Line]) -> None:
        """Add a statement as one row if that will do, else as its comments and the width will have it."""
        room = WIDTH - self._indent()
        broken = [part for line in lines for part in _filled(line, room)]
        if len(broken) > 1 and not _is_one_statement(broken):
            whole = _Line()
            for line in lines:
                whole.tokens += line.tokens
                for comment in line.comments:
                    self._add(_Row(None, self._indent(), comment=comment))
            broken = [whole]
        group: object = self.depth if len(broken) == 1 else object()
        for i, line in enumerate(broken):
            colon = next((i for i, token in enumerate(line.tokens) if token.text == ":"), None)
            left = None if colon is None or len(broken) > 1 else len(_joined(line.tokens[:colon]))
            self._add(_Row(group, self._indent() + (_CARRIED if i else 0), _joined(line.tokens), left))
            for comment in line.comments:
                self._comment(comment, self._indent() + _CARRIED, group)


def _tokens(text: str, raw: Raw) -> list[_Token]:
    """The tokens of a statement as they are written out, with their offsets in the file.

    Its tree has those with a name of their own; what stands between them is words and signs of one character.
    """
    found: list[_Token] = []
    at = 0
    for start, end, shown in [*_named(parse_tokens(text, raw.keyword)), (len(text), len(text), "")]:
        words = (piece for piece in _LOOSE.finditer(text, at, start) if piece["word"] is not None)
        found += [_Token(word.group(), raw.start + word.start(), raw.start + word.end()) for word in words]
        if shown:
            found.append(_Token(shown, raw.start + start, raw.start + end))
        at = end
    return found


def _named(tree: Node) -> Iterator[tuple[int, int, str]]:
    """Start, end and new text of the tokens that a tree has kept, in order."""
    for child in tree.children:
        if isinstance(child, Node):
            yield from _named(child)
        elif child is not None:
            shown = child.text
            if child.kind == "PATH":
                shown = "".join(shown.split())
            elif child.kind == "QUANTITY" and (parts := _QUANTITY.fullmatch(shown)):
                shown = " ".join(part for part in parts.group(1, 2) if part) + (parts[3] or "")
            yield child.start, child.start + len(child.text), shown


def _joined(tokens: list[_Token]) -> str:
    """The tokens as one line."""
    pieces: list[str] = []
    before = ""
    for token in tokens:
        if pieces and token.text not in _TIGHT_BEFORE and before not in _TIGHT_AFTER:
            pieces.append(" ")
        pieces.append(token.text)
        before = token.text
    return "".join(pieces)


def _filled(line: _Line, room: int) -> list[_Line]:
    """The line, or where it is wider than the room several that end with a comma or ``+`` outside of parentheses."""
    if columns(_joined(line.tokens)) <= room:
        return [line]
    parts, nested = [_Line()], 0
    for token in line.tokens:
        parts[-1].tokens.append(token)
        nested += (token.text == "(") - (token.text == ")")
        if token.text in _BREAKS and not nested:
            parts.append(_Line())
    filled = parts[:1]
    for part in parts[1:]:
        carried = _CARRIED if len(filled) > 1 else 0
        if columns(_joined([*filled[-1].tokens, *part.tokens])) <= room - carried:
            filled[-1].tokens += part.tokens
        else:
            filled.append(part)
    filled[-1].comments = line.comments
    return filled


def _is_one_statement(lines: list[_Line]) -> bool:
    """Whether the splitter takes the lines for what they are: a line may look like a statement of its own."""
    text = "\n".join(shown for line in lines for shown in (_joined(line.tokens), *(c.text for c in line.comments)))
    found = Diagnostics()
    raws = split(Source("", text), found)
    return len(raws) == 1 and not len(found)


def _group(row: _Row) -> object:
    return row.group


def _extent(text: str) -> int:
    """Columns of a text that starts a line."""
    return columns(text.expandtabs())


def _aligned(rows: list[_Row]) -> Iterator[str]:
    """The rows of one group as lines."""
    lefts = [columns(row.code[: row.colon]) for row in rows if row.colon is not None]
    left = max((width for width in lefts if width <= _WIDEST_LEFT), default=0)
    codes: list[str] = []
    for row in rows:
        code = row.code
        if row.colon is not None:
            code = code[: row.colon] + " " * (left - columns(code[: row.colon])) + code[row.colon :]
        codes.append(" " * row.indent + code)
    widths = [_extent(code) for row, code in zip(rows, codes, strict=True) if row.code and row.comment]
    column = max((width for width in widths if width <= _WIDEST_CODE), default=0)
    at = 0
    for row, code in zip(rows, codes, strict=True):
        if row.code and row.comment:
            at = max(column, _extent(code)) + 2
            yield code + " " * (at - _extent(code)) + row.comment.text
        elif row.comment:
            yield " " * (at if row.attached else row.indent) + row.comment.text
        else:
            yield code.rstrip()
