"""A text that is being written: its statements as far as they can be read, and what stands at a place in it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from placement.editor.positions import Text
from placement.editor.words import STATEMENTS, pathed
from placement.lang.diagnostics import Diagnostics
from placement.lang.spec import InputLine, LinkLine, MeshAxis, Name, ParamLine, Pattern
from placement.lang.split import CARRIES, Raw, split
from placement.lang.statements import Include, Parsed, Within, parse_statement


class Slot(Enum):
    """What kind of word belongs at a place."""

    STATEMENT = "a statement"
    AXIS = "an axis"
    LINK = "a link"
    DEVICE = "a device"
    DTYPE = "a dtype, behind a rate"
    RESOURCE = "a resource"
    OVER = "'over'"
    FILE = "a file"
    PATH = "a path"
    INPUT = "an input"
    OUTPUT = "an output"
    PLACEMENT = "a placement"
    STORED = "a placement, or 'stored' before one"
    DIM = "a dim or its index, in Shard"
    ORDER = "an order, in Shard"
    DIMS = "the name of a dim, in a list"
    STRATEGY = "an implementation"
    SETTING = "a setting"
    CHOICE = "the value of a setting"
    COLLECTIVE = "a collective"
    DIRECTION = "'forward' or 'backward'"


@dataclass(frozen=True, slots=True)
class Stated:
    """A statement: its stretch of text, and what it says, None where it is at fault."""

    raw: Raw
    parsed: Parsed | None


@dataclass(frozen=True, slots=True)
class Place:
    """What belongs at an offset, and the word there: ``word`` up to the offset, from ``start`` to ``end`` in all.

    ``statement`` is the keyword, ``block`` the pattern of the block around it; ``setting`` the word before ``=``.
    """

    slot: Slot
    start: int
    end: int
    word: str
    statement: str = ""
    block: str | None = None
    setting: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """A text and its statements."""

    text: Text
    stated: tuple[Stated, ...]

    def at(self, offset: int) -> Stated | None:
        """The statement that an offset lies in or right behind, on the statement's last line."""
        found = self._before(offset)
        if found is None:
            return None
        between = self.text.source.text[found.raw.end : offset] if offset > found.raw.end else ""
        carried = found.raw.keyword != "within" and self.text.source.text[found.raw.end - 1] in f"{CARRIES}(["
        return found if "}" not in between and (carried or not re.search(r"[\r\n]", between)) else None

    def block(self, offset: int) -> str | None:
        """The pattern of the innermost block around an offset; None outside, '**' where it cannot be read."""
        last = self._before(offset)
        if last is None:
            return None
        chain: list[int] = []
        index: int | None = last.raw.block
        while index is not None:
            chain.insert(0, index)
            index = self.stated[index].raw.block
        between = _bare(self.text.source.text[last.raw.end : max(offset, last.raw.end)])
        if last.raw.keyword == "within" and "{" in between:
            chain.append(self.stated.index(last))
        for _ in range(between.count("}")):
            chain = chain[:-1]
        if not chain:
            return None
        header = self.stated[chain[-1]].parsed
        return header.pattern.text if isinstance(header, Within) else "**"

    def place(self, offset: int) -> Place | None:
        """What belongs at ``offset``; None in a comment and where a new name is given."""
        text = self.text.source.text
        line = text[self.text.source.starts[self.text.line_of(offset) - 1] : offset]
        if "#" in re.sub(r'"[^"]*"?', "", line):
            return None
        here = self.at(offset)
        if here is None or offset <= here.raw.start + len(here.raw.keyword):
            start = offset - len(_behind(r"\w*", line))
            if line.strip() == text[start:offset]:
                return Place(Slot.STATEMENT, start, _end(text, offset), text[start:offset], "", self.block(start))
            return None
        keyword, begin = here.raw.keyword, here.raw.start + len(here.raw.keyword)
        before = _bare(text[begin:offset])
        if ":" not in before and keyword in pathed():
            start = begin + len(before) - len(before.lstrip())
            return Place(Slot.PATH, start, offset, text[start:offset], keyword, self.block(here.raw.start))
        word = _behind(r'[^"]*' if keyword == "include" else r"[\w.\-]*" if ":" not in before else r"\w*", before)
        slot = _slot(keyword, before.removesuffix(word).rstrip())
        if slot is None:
            return None
        setting = _behind(r"\w*", before.removesuffix(word).rstrip().removesuffix("=").rstrip())
        return Place(slot, offset - len(word), _end(text, offset), word, keyword, None, setting)

    def patterns(self) -> Iterator[tuple[Pattern, Stated]]:
        """Every path that a statement begins with, joined with its block."""
        for stated in self.stated:
            pattern = getattr(stated.parsed, "pattern", None)
            if isinstance(pattern, Pattern):
                yield pattern, stated

    def includes(self) -> Iterator[Name]:
        """The files that the text includes, as it names them."""
        for stated in self.stated:
            if isinstance(stated.parsed, Include):
                yield stated.parsed.name

    def _before(self, offset: int) -> Stated | None:
        """The last statement that begins at or before an offset."""
        found = None
        for stated in self.stated:
            if stated.raw.start > offset:
                break
            found = stated
        return found


def read(text: Text) -> Document:
    """The document of a text; what is at fault in it is left out, for it is told elsewhere."""
    left_out = Diagnostics()
    raws = split(text.source, left_out)
    stated: list[Stated] = []
    for raw in raws:
        header = stated[raw.block].parsed if raw.block is not None else None
        within = header.pattern if isinstance(header, Within) else None
        known = not raw.broken and raw.keyword in STATEMENTS
        stated.append(Stated(raw, parse_statement(raw, text.source, within, left_out) if known else None))
    return Document(text, tuple(stated))


def resolve(file: str, name: str) -> str:
    """The path of a file that ``file`` includes as ``name``."""
    return os.path.normpath(os.path.join(os.path.dirname(file), name))  # noqa: PTH118, PTH120 - as the parser does


def family(file: str, get: Callable[[str], Document | None]) -> list[Document]:
    """The document of a file and of all that it includes, each once; ``get`` gives None for what cannot be read."""
    found: dict[str, Document] = {}
    waiting = [file]
    while waiting:
        path = waiting.pop(0)
        document = None if path in found else get(path)
        if document is not None:
            found[path] = document
            waiting += [resolve(path, name) for name in document.includes()]
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Declared:
    """Where the names of a spec are declared first."""

    axes: dict[str, Name]
    dims: dict[str, Name]
    links: dict[str, Name]


def declared(documents: Iterable[Document]) -> Declared:
    """The declarations in all of ``documents``."""
    names = Declared({}, {}, {})
    for stated in (stated for document in documents for stated in document.stated):
        match stated.parsed:
            case MeshAxis(name=name):
                names.axes.setdefault(str(name), name)
            case LinkLine(name=name):
                names.links.setdefault(str(name), name)
            case InputLine(dims=dims) | ParamLine(dims=dims):
                for dim in dims or ():
                    names.dims.setdefault(str(dim), dim)
            case _:
                pass
    return names


# -- words ------------------------------------------------------------------------------------------

_PLACING = ("input", "param", "value", "output")
# What comes before the word, from the statement's keyword on, without blanks at its end.
_SLOTS: tuple[tuple[tuple[str, ...], str, Slot | None], ...] = (
    ((), r"@$", Slot.AXIS),
    (("mesh",), r"\bover$", Slot.LINK),
    (("mesh",), r"^\s*\w+(?:\s*=\s*\w+)?$", Slot.OVER),
    (("device",), r"^$", Slot.DEVICE),
    (("device",), r"FLOP/s$", Slot.DTYPE),
    (("limit",), r"^$", Slot.RESOURCE),
    (("include",), r'^\s*"$', Slot.FILE),
    (("input",), r"^[^:]*$", Slot.INPUT),
    (("output",), r"^[^:]*$", Slot.OUTPUT),
    (_PLACING, r":\s*\[[^\]]*$", Slot.DIMS),
    (_PLACING, r"\bShard\s*\($", Slot.DIM),
    (_PLACING, r"\bShard\s*\([^(),]*,$", Slot.ORDER),
    (("param",), r"[:,]$", Slot.STORED),
    (("param",), r"[:,]\s*stored$", Slot.PLACEMENT),
    (("input", "value", "output"), r"[:,]$", Slot.PLACEMENT),
    (("strategy",), r"[:+]$", Slot.STRATEGY),
    (("lower",), r"[:,]$", Slot.SETTING),
    (("lower",), r"=$", Slot.CHOICE),
    (("expect",), r":$", Slot.COLLECTIVE),
    (("expect",), r":\s*\w+(?:\s*@\s*\w+)?$", Slot.DIRECTION),
)


def _slot(keyword: str, before: str) -> Slot | None:
    for keywords, pattern, slot in _SLOTS:
        if (not keywords or keyword in keywords) and re.search(pattern, before):
            return slot
    return None


def _bare(text: str) -> str:
    """The text with blanks in place of its comments; every other character stays where it is."""
    return re.sub(r'("[^"\r\n]*"?)|#[^\r\n]*', lambda m: m[1] or " " * len(m[0]), text)


def _behind(pattern: str, text: str) -> str:
    """What ``pattern`` matches at the end of ``text``."""
    match = re.search(rf"(?:{pattern})\Z", text)
    return match[0] if match else ""


def _end(text: str, offset: int) -> int:
    """The end of the word that an offset lies in."""
    match = re.compile(r"\w*").match(text, offset)
    return match.end() if match else offset
