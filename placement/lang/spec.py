"""What a ``.plc`` text says: frozen statements, each with the place where it is written.

A ``Spec`` is flattened: its includes are read, and a path inside ``within P { }`` is ``P`` joined with
``.``. Equality ignores places, so ``parse(str(spec)) == spec``; ``str(spec)`` is the language's own text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from placement.lang.patterns import compile_pattern
from placement.types import Placement

LINKS = ("nvlink", "ib", "pcie", "host")
"""The links known by name, from the fastest to the slowest."""

PARAMETER_DIMS = ("out", "in", "vocab", "hidden")
"""Dim names that work inside one parameter without being declared: Linear's, then Embedding's."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A stretch of a file. Lines and columns count characters from 1; the end is the first one past it."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class Name(str):
    """An identifier with the place where it is written. It is a ``str`` and equal to its text."""

    __slots__ = ("span",)
    span: Span

    def __new__(cls, text: str, span: Span) -> Self:
        """A ``str`` is made here, not in ``__init__``."""
        self = super().__new__(cls, text)
        self.span = span
        return self

    def __reduce__(self) -> tuple[type[Name], tuple[str, Span]]:  # so that copies and pickles keep the place
        return Name, (self.text, self.span)

    @property
    def text(self) -> str:
        """The identifier as a plain ``str``."""
        return str.__str__(self)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Dotted paths: ``*`` is one segment, ``**`` any number, ``{a,b}`` alternatives, ``[0-3]`` an index range."""

    text: str
    span: Span = field(compare=False)

    def matches(self, path: str) -> bool:
        """Whether the whole of ``path`` fits. Raises ValueError where the pattern itself is malformed."""
        return compile_pattern(self.text).fullmatch(path) is not None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Placed:
    """``Shard(seq) @ tp``: a placement on one axis. ``axis`` is None where ``@ axis`` is left out."""

    placement: Placement
    axis: Name | None
    span: Span = field(compare=False)
    dim_span: Span | None = field(default=None, compare=False)  # the dim's name or index inside Shard(...)

    def __str__(self) -> str:
        return repr(self.placement) if self.axis is None else f"{self.placement!r} @ {self.axis}"


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """``mesh tp = 8 over nvlink``; without a size or link the mesh given at compile time decides."""

    name: Name
    size: int | None
    link: Name | None
    span: Span = field(compare=False)
    size_span: Span | None = field(default=None, compare=False)

    def __str__(self) -> str:
        size = "" if self.size is None else f" = {self.size}"
        return f"mesh {self.name}{size}" + (f" over {self.link}" if self.link is not None else "")


@dataclass(frozen=True, slots=True)
class Device:
    """``device h100``: the kind of device that prices compute and bounds memory."""

    name: Name
    span: Span = field(compare=False)

    def __str__(self) -> str:
        return f"device {self.name}"


def _tail(dims: tuple[Name, ...] | None, placed: tuple[Placed, ...]) -> str:
    shown = [] if dims is None else [f"[{', '.join(dims)}]"]
    return ", ".join([*shown, *map(str, placed)])


@dataclass(frozen=True, slots=True)
class InputLine:
    """``input a, b : [batch, seq], Shard(batch) @ dp``: names the dims of inputs, places them, or both."""

    names: tuple[Name, ...]
    dims: tuple[Name, ...] | None
    placed: tuple[Placed, ...]
    span: Span = field(compare=False)

    def __str__(self) -> str:
        return f"input {', '.join(self.names)} : {_tail(self.dims, self.placed)}"


@dataclass(frozen=True, slots=True)
class ParamLine:
    """``param PATTERN : [vocab, hidden], Shard(vocab) @ tp``: names the dims of parameters, places them, or both."""

    pattern: Pattern
    dims: tuple[Name, ...] | None
    placed: tuple[Placed, ...]
    span: Span = field(compare=False)

    def __str__(self) -> str:
        return f"param {self.pattern} : {_tail(self.dims, self.placed)}"


@dataclass(frozen=True, slots=True)
class ValueLine:
    """``value PATTERN : Shard(seq) @ tp``: where a module's first output tensor is produced."""

    pattern: Pattern
    placed: tuple[Placed, ...]
    span: Span = field(compare=False)

    def __str__(self) -> str:
        return f"value {self.pattern} : {_tail(None, self.placed)}"


@dataclass(frozen=True, slots=True)
class OutputLine:
    """``output logits : Shard(vocab) @ tp``: how outputs of the whole model are returned."""

    names: tuple[Name, ...]
    placed: tuple[Placed, ...]
    span: Span = field(compare=False)

    def __str__(self) -> str:
        return f"output {', '.join(self.names)} : {_tail(None, self.placed)}"


Statement = MeshAxis | Device | InputLine | ParamLine | ValueLine | OutputLine


@dataclass(frozen=True, slots=True)
class Spec:
    """All statements of a file and of what it includes, each kind in the order of reading.

    ``sources`` maps every file that was read, the root first, to its text.
    """

    file: str = field(compare=False)
    axes: tuple[MeshAxis, ...] = ()
    device: Device | None = None
    inputs: tuple[InputLine, ...] = ()
    params: tuple[ParamLine, ...] = ()
    values: tuple[ValueLine, ...] = ()
    outputs: tuple[OutputLine, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)

    @property
    def statements(self) -> tuple[Statement, ...]:
        """Every statement, kind by kind."""
        device = () if self.device is None else (self.device,)
        return (*self.axes, *device, *self.inputs, *self.params, *self.values, *self.outputs)

    def axis_of(self, placed: Placed) -> str | None:
        """The axis that ``placed`` speaks of; None where it is left out and the spec has not exactly one."""
        if placed.axis is not None:
            return str(placed.axis)
        return str(self.axes[0].name) if len(self.axes) == 1 else None

    def __str__(self) -> str:
        return "".join(f"{statement}\n" for statement in self.statements)
