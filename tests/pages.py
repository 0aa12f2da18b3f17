"""Pages of Markdown as tests: their fenced blocks, and what the comments of a ``plc`` block claim.

In the comments of a spec

- ``# error[PLC203]: message`` behind a line: exactly these faults has the line; the message may be left out;
- ``# revealed: Shard(seq) @ tp`` behind a statement: what it speaks of has this placement in the plan;
- ``# revealed value layers.*.mlp : Partial @ tp``: the same of anything, as a statement would name it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from placement.lang import Diagnostic, parse
from placement.lang.spec import InputLine, OutputLine, PlacingLine, Spec

_FENCE = re.compile(r"(?P<fence>`{3,})(?P<info>[^`]*)")
_MARK = re.compile(r"# *(?P<severity>error|warning|note)\[(?P<code>PLC\d{3})\](?:: (?P<message>.*?))?\s*(?=#|$)")
_BEHIND = re.compile(r"\S.*# *revealed: *(?P<placed>[^#]+)")
_ALONE = re.compile(r"\s*# *revealed (?P<statement>[^#]+)")

Placements = Mapping[str, Mapping[str, Mapping[str, str]]]
"""kind of statement → name → axis → placement."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. ``line`` is that of its first line in the page, from 1; ``options``: words, or ``key=value``."""

    language: str
    options: Mapping[str, str]
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The file that the block is, by its first line: ``# common.plc``."""
        match = re.match(r"# ([\w/]+\.\w+)\n", self.text)
        return match[1] if match else None


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """A fault of a line of a block, as it is claimed or as it is found."""

    line: int
    severity: str
    code: str
    message: str | None

    def __str__(self) -> str:
        return f"line {self.line}: {self.severity}[{self.code}]: {self.message}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page in order. A longer fence holds shorter ones as text."""
    found: list[Block] = []
    opened: tuple[str, str, int] | None = None
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        fence = _FENCE.fullmatch(line.rstrip())
        if opened is None and fence is not None:
            opened = fence["fence"], fence["info"], number
        elif opened is not None and line.rstrip() == opened[0]:
            language, *options = opened[1].split() or [""]
            pairs = {key: value for key, _, value in (option.partition("=") for option in options)}
            assert number > opened[2] + 1, f"{page}:{number}: an empty block claims nothing"
            found.append(Block(language, pairs, "".join(lines[opened[2] : number - 1]), opened[2] + 1))
            opened = None
    assert opened is None, f"{page}:{opened[2]}: a fence that is not closed"
    return found


def marks(text: str) -> list[Mark]:
    """The faults that the comments of a spec claim."""
    return [
        Mark(number, match["severity"], match["code"], match["message"])
        for number, line in enumerate(text.splitlines(), 1)
        for match in _MARK.finditer(line)
    ]


def differences(claimed: Iterable[Mark], diagnostics: Iterable[Diagnostic], file: str) -> Iterator[str]:
    """What is claimed and not found, or found and not claimed. A claim without a message fits every message."""
    found = sorted({Mark(d.line or 0, d.severity, d.code, d.message) for d in diagnostics if d.file in (file, None)})
    for mark in claimed:
        fits = [m for m in found if m == mark or (mark.message is None and m.code == mark.code and m.line == mark.line)]
        if fits:
            found.remove(fits[0])
        else:
            yield f"not reported: {mark}"
    yield from (f"not claimed: {mark}" for mark in found)


def corrected(text: str, diagnostics: Iterable[Diagnostic], file: str) -> str:
    """The text with the messages of today in the marks that name a right code in a right line."""
    lines = text.splitlines(keepends=True)
    for found in diagnostics:
        if found.file == file and found.line is not None:
            mark = re.compile(rf"(# *{found.severity}\[{found.code}\]: )[^#\n]*?(?=\s*(?:#|$))")
            lines[found.line - 1] = mark.sub(lambda m, d=found: m[1] + d.message, lines[found.line - 1], count=1)
    return "".join(lines)


def claims(text: str, spec: Spec) -> Iterator[tuple[int, PlacingLine, str]]:
    """The placements that the comments of a spec claim: line, a statement that names the values, the placement."""
    for number, line in enumerate(text.splitlines(), 1):
        if match := _ALONE.fullmatch(line):
            (said,) = parse(match["statement"]).placing
            yield number, said, _shown(said)
        elif match := _BEHIND.fullmatch(line):
            named = [statement for statement in spec.placing if statement.span.line == number]
            assert named, f"line {number}: no statement there places anything"
            (said,) = parse(f"value x : {match['placed']}").placing
            yield from ((number, statement, _shown(said)) for statement in named)


def unlike(statement: PlacingLine, claimed: str, placements: Placements) -> Iterator[str]:
    """The values named by ``statement`` whose placements are not as claimed."""
    kind = type(statement).__name__.removesuffix("Line").lower()
    found = {
        name: ", ".join(f"{placed} @ {axis}" for axis, placed in axes.items())
        for name, axes in placements[kind].items()
        if _names(statement, name)
    }
    if not found:
        yield f"there is no {kind} that this speaks of"
    yield from (f"{kind} {name} is {placed}, not {claimed}" for name, placed in found.items() if placed != claimed)


def _names(statement: PlacingLine, name: str) -> bool:
    if isinstance(statement, InputLine | OutputLine):
        return name in statement.names
    return statement.pattern.matches(name.partition("@")[0])  # `path@1` is the second call of a module


def _shown(statement: PlacingLine) -> str:
    return ", ".join(map(str, statement.placed))
