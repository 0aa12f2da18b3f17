"""Cuts a text into statements before any of them is parsed.

A statement starts with a keyword at the start of a line. It ends with its line, except that an open
bracket or a trailing ``,``, ``:``, ``=`` or ``@`` carries it over to the next one, unless that looks like
a statement itself: so a mistake in one never swallows another. ``within`` opens a block that
``}`` closes; which brace opens a block and which belongs to a path is decided here.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from placement.lang.diagnostics import Diagnostics
from placement.lang.source import Source
from placement.lang.spec import COLLECTIVES

KEYWORDS = (
    *("mesh", "link", "device", "limit"),
    *("input", "param", "value", "output"),
    *("strategy", "lower", "expect"),
    *("within", "include"),
)

CARRIES = ",:=@+"
"""Signs that carry a statement over to the next line where they end one."""

MAX_DEPTH = 64
"""Blocks within blocks, and includes within includes."""

_PATH = r"(?:[\w.*-]|\{(?:[^{}\n\r#\"():@]|\{[^{}\n\r#\"():@]*\})*\}|\[[^\]\n\r#:]*\])+"  # as in the grammar
# The brace of a block stands apart from the path, or else ends the line: what is left is a path's own.
_WITHIN = re.compile(rf"(?P<header>within[^\S\r\n]+{_PATH})(?:(?:\s|#[^\r\n]*)+\{{|\{{(?=[^\S\r\n]*(?:[\r\n#]|\Z)))")
# Whether a line that could carry a statement on starts the next one: it does with two words in a row, which no
# list has (except `stored Shard` and `all_gather forward`), or with a keyword alone. A dim called `value` may thus
# stand at the start of a carried line.
_STARTS = (
    rf"[^\S\r\n]*(?:(?!(?:stored|{'|'.join(COLLECTIVES)})\b)[^\W\d]\w*[^\S\r\n]+[\w*{{\"]"
    rf"|(?:{'|'.join(KEYWORDS)})(?=[^\S\r\n]+[^\s,:\])=@]|[^\S\r\n]*(?:[\r\n#]|\Z)))"
)
_PIECE = re.compile(
    r"(?P<end>\r\n|\n|\r)|(?P<blank>[^\S\r\n]+|#[^\r\n]*)|(?P<string>\"[^\"\r\n]*\"?)|[{}()\[\]]|[^\s#\"{}()\[\]]+"
)
_WORD = re.compile(r"[^\W\d]\w*")
_CLOSES = {")": "(", "]": "[", "}": "{"}


class Raw(NamedTuple):
    """One statement as a stretch of text: ``keyword`` is its first word, which may be unknown.

    ``block`` is the index of the ``within`` statement that it lies in, among the statements of the file.
    ``broken`` says that its fault is already reported; it is kept, since a block may hang on it. ``closed`` is False
    for the opening of a block that nothing closes.
    """

    keyword: str
    start: int
    end: int
    block: int | None
    broken: bool = False
    closed: bool = True


class _Block(NamedTuple):
    statement: int
    opened: int
    reported: bool  # its opening is at fault already, so its closing is not asked for


class _Extent(NamedTuple):
    resume: int  # where the next piece after the statement begins
    end: int  # past the statement's last piece that is neither blank nor comment
    brackets: tuple[int, ...]  # offsets of those left open
    string: int | None  # offset of a string left open


def split(source: Source, found: Diagnostics) -> list[Raw]:
    """The statements of a file in order; faults of brackets, blocks and strings go to ``found``."""
    return _Splitter(source, found).run()


class _Splitter:
    def __init__(self, source: Source, found: Diagnostics) -> None:
        self.source = source
        self.text = source.text
        self.found = found
        self.raws: list[Raw] = []
        self.blocks: list[_Block] = []

    def run(self) -> list[Raw]:
        at, fresh = 0, True  # fresh: nothing but blanks on this line yet
        while at < len(self.text):
            piece = _piece(self.text, at)
            if piece["end"] is not None:
                at, fresh = piece.end(), True
            elif piece["blank"] is not None:
                at = piece.end()
            elif piece.group() == "}":
                self._close(at)
                at, fresh = at + 1, False
            else:
                at, fresh = self._statement(at, fresh=fresh), False
        for block in self.blocks:
            self.raws[block.statement] = self.raws[block.statement]._replace(closed=False)
            if not block.reported:
                self._error("PLC007", "this block is not closed", block.opened, hint="add the missing '}'")
        return self.raws

    def _error(self, code: str, message: str, start: int, end: int | None = None, *, hint: str | None = None) -> None:
        self.found.error(code, message, self.source.span(start, start + 1 if end is None else end), hint=hint)

    def _open(self, opened: int, *, reported: bool = False) -> None:
        """A block opens; the statement it belongs to is the last one added."""
        if len(self.blocks) == MAX_DEPTH:
            self._error("PLC016", f"more than {MAX_DEPTH} blocks within one another", opened)
        self.blocks.append(_Block(len(self.raws) - 1, opened, reported or len(self.blocks) >= MAX_DEPTH))

    def _close(self, at: int) -> None:
        if self.blocks:
            self.blocks.pop()
        else:
            self._error("PLC008", "this '}' closes no block", at, hint="take it out")

    def _add(self, keyword: str, start: int, end: int, *, broken: bool = False) -> None:
        block = self.blocks[-1].statement if self.blocks else None
        self.raws.append(Raw(keyword, start, end, block, broken or len(self.blocks) > MAX_DEPTH))

    def _statement(self, start: int, *, fresh: bool) -> int:
        """Take the statement at ``start``; return the offset from which to go on."""
        word = _WORD.match(self.text, start)
        keyword = word.group() if word else ""
        if not fresh and keyword in KEYWORDS:
            self._error("PLC009", "a statement starts on a line of its own", start, start + len(keyword))
        within = _WITHIN.match(self.text, start) if keyword == "within" else None
        if within is not None:
            self._add(keyword, start, within.end("header"))
            self._open(within.end() - 1)
            return within.end()
        extent = self._extent(start, start + len(keyword))
        brackets, broken = extent.brackets, extent.string is not None
        # A brace at the end opens a block all the same, although what stands before it is no good `within`.
        opens = bool(brackets) and self.text[brackets[-1]] == "{" and brackets[-1] + 1 == extent.end
        end = start + len(self.text[start : extent.end - 1].rstrip()) if opens else extent.end
        unclosed = brackets[:-1] if opens else brackets
        if extent.string is not None:
            self._error("PLC006", "this string is not closed", extent.string, extent.end)
        elif unclosed:
            broken = True
            opened = self.text[unclosed[0]]
            closer = next(closer for closer, opener in _CLOSES.items() if opener == opened)
            self._error("PLC005", f"this '{opened}' is not closed", unclosed[0], hint=f"add the missing '{closer}'")
        elif keyword == "within" and not opens:
            broken = True
            self._error(
                "PLC003", "expected '{' after the path", extent.end, extent.end, hint="write within PATH { ... }"
            )
        self._add(keyword, start, max(end, start + 1), broken=broken)
        if opens or keyword == "within":
            self._open(extent.end, reported=True)
        return extent.resume

    def _extent(self, start: int, at: int) -> _Extent:
        brackets = _Brackets()
        string: int | None = None
        end = max(at, start)
        while at < len(self.text):
            piece = _piece(self.text, at)
            shown = piece.group()
            if piece["end"] is not None:
                carried = brackets.offsets or self.text[end - 1] in CARRIES
                if not carried or brackets.count["{"] or _starts().match(self.text, piece.end()):
                    break
            elif piece["blank"] is None:
                if shown == "}" and not brackets.count["{"]:
                    break
                if piece["string"] is not None and (len(shown) == 1 or shown[-1] != '"'):
                    string = at if string is None else string
                brackets.take(shown, at)
                end = piece.end()
            at = piece.end()
        return _Extent(at, end, tuple(brackets.offsets), string)


class _Brackets:
    """The brackets that are open, outermost first."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.offsets: list[int] = []
        self.count = dict.fromkeys(_CLOSES.values(), 0)

    def take(self, shown: str, at: int) -> None:
        """Open or close a bracket; one that closes nothing is left to the parser, which will stop there."""
        opens = _CLOSES.get(shown)
        if shown in self.count:
            self.kinds.append(shown)
            self.offsets.append(at)
            self.count[shown] += 1
        elif opens is not None and self.count[opens]:
            closed = ""
            while closed != opens:  # what was opened inside is closed with it
                closed = self.kinds.pop()
                self.offsets.pop()
                self.count[closed] -= 1


@cache
def _starts() -> re.Pattern[str]:
    return re.compile(_STARTS)  # seldom needed, and slow to compile


def _piece(text: str, at: int) -> re.Match[str]:
    piece = _PIECE.match(text, at)
    if piece is None:
        raise AssertionError(f"no piece at offset {at}: the pieces are meant to cover every character")
    return piece
