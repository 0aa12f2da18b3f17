"""Text → ``Spec``: the statements of a file and of all that it includes, or every fault in them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

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
    """The bytes of a file on disk. Raises OSError."""
    with open(path, "rb") as stream:
        return stream.read()


def read_include(path: str) -> bytes:
    """The bytes of a file that another one includes. Raises OSError, also for a pipe or a device: it may never end."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "not a regular file")
    return read_file(path)


def parse(text: str, file: str = "<string>", *, read: Read = read_include) -> Spec:
    """The spec that ``text`` states. Files it includes are looked up beside ``file`` and read by ``read``.

    Raises PlacementError with every syntax fault of the file and of what it includes.
    """
    reader = _Reader(file, read)
    reader.take(file, text)
    return reader.finish()


def load(path: str | os.PathLike[str], *, read: Read | None = None) -> Spec:
    """The spec that a file states; ``read`` gives its content and that of all it includes.

    Raises PlacementError, also where the file cannot be read.
    """
    file = os.fspath(path)
    reader = _Reader(file, read or read_include)
    text = reader.open(file, read or read_file)  # the shell makes a pipe of `<(command)`
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

    def open(self, file: str, read: Read, at: Span | None = None) -> str | None:
        """The text of a file; None, and a fault at ``at``, where there is none."""
        try:
            content = read(file)
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
        raws = self._put_together(split(source, self.found), source)
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

    def _put_together(self, raws: list[Raw], source: Source) -> list[Raw]:
        """The statements, each with the lines after it that begin with what should end the line before.

        That is one mistake: told at the first sign, once, and what the whole says is read as it was meant.
        """
        made: list[Raw] = []
        owner: int | None = None
        told = False
        for i, raw in enumerate(raws):
            made.append(raw)
            if raw.keyword or raw.broken or source.text[raw.start] not in CARRIES:
                reads = raw.keyword in KEYWORDS and raw.keyword != "within" and not raw.broken
                owner, told = i if reads else None, False
            elif owner is not None and raws[owner].block == raw.block:
                if not told:
                    self._no_statement(raw, source)
                told = True
                made[owner] = made[owner]._replace(end=raw.end)
                made[i] = raw._replace(broken=True)
        return made

    def _no_statement(self, raw: Raw, source: Source) -> None:
        shown = source.text[raw.start]
        hint = f"to go on with a statement, put the '{shown}' at the end of its line" if shown in CARRIES else None
        span = source.span(raw.start, raw.start + 1)
        self.found.error("PLC003", f"expected a statement, found {shown!r}", span, hint=hint)

    def _allowed(self, raw: Raw, raws: list[Raw], source: Source) -> bool:
        """Whether the statement is one that may stand where it does; a fault where it may not."""
        if raw.broken:
            return False
        span = source.span(raw.start, raw.start + max(len(raw.keyword), 1))
        if not raw.keyword:
            self._no_statement(raw, source)
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
        path = os.path.normpath(os.path.join(os.path.dirname(file), name))
        identity = _identity(path)
        if identity in self.reading:
            chain = [*list(self.reading.values())[list(self.reading).index(identity) :], path]
            self.found.error("PLC015", f"'{name}' includes itself", name.span, notes=[" includes ".join(chain)])
        elif len(self.reading) == MAX_DEPTH:
            self.found.error("PLC016", f"more than {MAX_DEPTH} files within one another", name.span)
        elif identity not in self.done:  # a file included twice counts once
            text = self.open(path, self.read, name.span)
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


__all__ = ["PlacementError", "Read", "load", "parse", "read_file", "read_include"]
