"""Text → ``Spec``: the statements of a file and of all that it includes, or every fault in them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from placement.lang.diagnostics import Diagnostics, PlacementError, did_you_mean
from placement.lang.source import Source
from placement.lang.spec import (
    Device,
    ExpectLine,
    InputLine,
    LimitLine,
    LinkLine,
    LowerLine,
    MeshAxis,
    Name,
    OutputLine,
    ParamLine,
    Pattern,
    Span,
    Spec,
    Statement,
    StrategyLine,
    ValueLine,
)
from placement.lang.split import CARRIES, KEYWORDS, MAX_DEPTH, Raw, split
from placement.lang.statements import Include, Within, parse_statement

Read = Callable[[str], bytes | str]
"""Gives the content of an included file; raises OSError where it cannot."""

_IN_BLOCKS = ("param", "value", "strategy", "lower", "expect", "within")


def read_file(path: str) -> bytes:
    """The bytes of a file on disk."""
    return Path(path).read_bytes()


def parse(text: str, file: str = "<string>", *, read: Read = read_file) -> Spec:
    """The spec that ``text`` states. Files it includes are looked up beside ``file`` and read by ``read``.

    Raises PlacementError with every syntax fault of the file and of what it includes.
    """
    reader = _Reader(file, read)
    reader.take(file, text)
    return reader.finish()


def load(path: str | os.PathLike[str], *, read: Read = read_file) -> Spec:
    """The spec that a file states. Raises PlacementError, also where the file cannot be read."""
    file = os.fspath(path)
    reader = _Reader(file, read)
    text = reader.open(file, None)
    if text is not None:
        reader.take(file, text)
    return reader.finish()


class _Reader:
    """Collects statements and faults over a file and its includes."""

    def __init__(self, file: str, read: Read) -> None:
        self.file = file
        self.read = read
        self.found = Diagnostics()
        self.sources: dict[str, str] = {}
        self.statements: list[Statement] = []
        self.reading: dict[str, str] = {}  # the files being read, outermost first: identity → name
        self.done: set[str] = set()

    def finish(self) -> Spec:
        """The spec, or PlacementError."""
        device = self._one_device()
        self.found.raise_if_any(self.sources)
        of = self.statements
        return Spec(
            file=self.file,
            axes=tuple(s for s in of if isinstance(s, MeshAxis)),
            links=tuple(s for s in of if isinstance(s, LinkLine)),
            device=device,
            limits=tuple(s for s in of if isinstance(s, LimitLine)),
            inputs=tuple(s for s in of if isinstance(s, InputLine)),
            params=tuple(s for s in of if isinstance(s, ParamLine)),
            values=tuple(s for s in of if isinstance(s, ValueLine)),
            outputs=tuple(s for s in of if isinstance(s, OutputLine)),
            strategies=tuple(s for s in of if isinstance(s, StrategyLine)),
            lowers=tuple(s for s in of if isinstance(s, LowerLine)),
            expects=tuple(s for s in of if isinstance(s, ExpectLine)),
            sources=self.sources,
        )

    def _one_device(self) -> Device | None:
        devices = [s for s in self.statements if isinstance(s, Device)]
        for device in devices[1:]:
            notes = [f"the first one is at {devices[0].span}"]
            self.found.error("PLC112", "a second device", device.name.span, notes=notes)
        return devices[0] if devices else None

    def open(self, file: str, at: Span | None) -> str | None:
        """The text of a file; None, and a fault at ``at``, where there is none."""
        try:
            content = self.read(file)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            reason = getattr(error, "strerror", None) or str(error)
            hint = None if at is None else "the name is looked up beside the file that includes it"
            self.found.error("PLC014", f"cannot read '{file}': {reason.lower()}", at, hint=hint)
            return None
        if isinstance(content, str):
            return content
        content = content.removeprefix(b"\xef\xbb\xbf")
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            source = Source(file, content.decode(errors="replace"))
            offset = len(content[: error.start].decode())
            self.sources[file] = source.text
            message = f"not UTF-8: byte 0x{content[error.start]:02x} cannot stand here"
            self.found.error("PLC001", message, source.span(offset, offset + 1), hint="save the file as UTF-8")
            return None

    def take(self, file: str, text: str) -> None:
        """Read the statements of a file, in order."""
        source = Source(file, text)
        self.sources[file] = source.text
        identity = _identity(file)
        self.reading[identity] = file
        raws = split(source, self.found)
        patterns: dict[int, Pattern] = {}
        for i, raw in enumerate(raws):
            if self._allowed(raw, raws, source):
                within = patterns.get(raw.block) if raw.block is not None else None
                statement = parse_statement(raw, source, within, self.found)
                if isinstance(statement, Within):
                    patterns[i] = statement.pattern
                elif isinstance(statement, Include):
                    self._include(file, statement.name)
                elif statement is not None:
                    self.statements.append(statement)
        del self.reading[identity]
        self.done.add(identity)

    def _allowed(self, raw: Raw, raws: list[Raw], source: Source) -> bool:
        """Whether the statement is one that may stand where it does; a fault where it may not."""
        if raw.broken:
            return False
        span = source.span(raw.start, raw.start + max(len(raw.keyword), 1))
        if not raw.keyword:
            shown = source.text[raw.start]
            hint = f"to go on with a statement, put the '{shown}' at the end of its line" if shown in CARRIES else None
            self.found.error("PLC003", f"expected a statement, found {shown!r}", span, hint=hint)
        elif raw.keyword not in KEYWORDS:
            hint = did_you_mean(raw.keyword, KEYWORDS) or f"the statements are {', '.join(KEYWORDS)}"
            self.found.error("PLC002", f"unknown statement '{raw.keyword}'", span, hint=hint)
        elif raw.block is not None and raw.keyword not in _IN_BLOCKS and _is_block(raws[raw.block]):
            message = f"'{raw.keyword}' is not allowed inside a block"
            self.found.error("PLC010", message, span, hint=f"a block holds {', '.join(_IN_BLOCKS)}")
        else:
            return True
        return False

    def _include(self, file: str, name: Name) -> None:
        path = os.path.normpath(os.path.join(os.path.dirname(file), name))  # noqa: PTH118, PTH120 - names stay text
        identity = _identity(path)
        if identity in self.reading:
            chain = [*list(self.reading.values())[list(self.reading).index(identity) :], path]
            self.found.error("PLC015", f"'{name}' includes itself", name.span, notes=[" includes ".join(chain)])
        elif len(self.reading) == MAX_DEPTH:
            self.found.error("PLC016", f"more than {MAX_DEPTH} files within one another", name.span)
        elif identity not in self.done:  # a file included twice counts once
            text = self.open(path, name.span)
            if text is None:
                self.done.add(identity)
            else:
                self.take(path, text)


def _is_block(opener: Raw) -> bool:
    """Whether the block is one; of one left open no one can say where it was meant to end."""
    return opener.keyword == "within" and not opener.broken and opener.closed


def _identity(path: str) -> str:
    """What two names of one file have in common."""
    try:
        return os.path.realpath(path)
    except ValueError:  # a NUL in the path; reading it will say so
        return path


__all__ = ["PlacementError", "Read", "load", "parse", "read_file"]
