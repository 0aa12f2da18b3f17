"""What a ``.plc`` text says: frozen statements, each with the place where it is written.

A ``Spec`` is flattened: its includes are read, and a path inside ``within P { }`` is ``P`` joined with
``.``. Equality ignores places, so ``parse(str(spec)) == spec``; ``str(spec)`` is the language's own text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Literal, Self

from placement.lang.diagnostics import Diagnostic
from placement.lang.patterns import compile_pattern
from placement.lang.source import Span
from placement.record import record
from placement.types import Placement

if TYPE_CHECKING:
    from fractions import Fraction

LINKS = ("nvlink", "ib", "pcie", "host")
"""The links known by name, from the fastest to the slowest."""

DEVICES = ("h100", "h200", "a100", "b200", "cpu")
"""The devices known by name."""

DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""The dtypes, by torch's names, that a device of one's own may have a rate for; float32's is that of all others."""

PARAMETER_DIMS = ("out", "in", "vocab", "hidden")
"""Dim names that work inside one parameter without being declared: Linear's, then Embedding's."""

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")
"""The collectives that an ``expect`` line may count."""

DIRECTIONS = ("forward", "backward")

Comparison = Literal["<=", "<", "==", ">=", ">"]

RESOURCES = ("memory",)
"""What a ``limit`` line may bound, per rank."""

LOWERINGS: dict[str, tuple[str, ...]] = {
    "overlap": ("none", "async", "ring", "chunks"),
    "gathered": ("again", "kept"),
    "ops": ("fused", "written"),
    "reduce": ("float64", "float32", "bfloat16", "float16"),
}
"""What a ``lower`` line may set, and to what; ``chunks`` may say how many."""

CHUNKS = 4
"""How many ``chunks`` are where nothing is said."""

Unit = Literal["bytes", "bytes/s", "seconds", "flop/s"]

UNITS: dict[str, tuple[Unit, int, int]] = {  # what it measures; numerator and denominator of the factor
    "B": ("bytes", 1, 1),
    "kB": ("bytes", 10**3, 1),
    "MB": ("bytes", 10**6, 1),
    "GB": ("bytes", 10**9, 1),
    "TB": ("bytes", 10**12, 1),
    "KiB": ("bytes", 2**10, 1),
    "MiB": ("bytes", 2**20, 1),
    "GiB": ("bytes", 2**30, 1),
    "TiB": ("bytes", 2**40, 1),
    "MB/s": ("bytes/s", 10**6, 1),
    "GB/s": ("bytes/s", 10**9, 1),
    "TB/s": ("bytes/s", 10**12, 1),
    "MiB/s": ("bytes/s", 2**20, 1),
    "GiB/s": ("bytes/s", 2**30, 1),
    "TiB/s": ("bytes/s", 2**40, 1),
    "Mbit/s": ("bytes/s", 10**6, 8),
    "Gbit/s": ("bytes/s", 10**9, 8),
    "Tbit/s": ("bytes/s", 10**12, 8),
    "ns": ("seconds", 1, 10**9),
    "us": ("seconds", 1, 10**6),
    "ms": ("seconds", 1, 10**3),
    "s": ("seconds", 1, 1),
    "GFLOP/s": ("flop/s", 10**9, 1),
    "TFLOP/s": ("flop/s", 10**12, 1),
    "PFLOP/s": ("flop/s", 10**15, 1),
}


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


@record
class Pattern:
    """Dotted paths: ``*`` is one segment, ``**`` any number, ``{a,b}`` alternatives, ``[0-3]`` an index range.

    ``text`` begins with that of ``block``, the pattern of the block that the line stands in.
    """

    text: str
    span: Span = field(compare=False)
    block: Pattern | None = field(default=None, compare=False, repr=False)

    @property
    def own(self) -> str:
        """What the line itself says: the path from its block on."""
        return self.text if self.block is None else self.text.removeprefix(f"{self.block.text}.")

    def matches(self, path: str) -> bool:
        """Whether the whole of ``path`` fits. Raises ValueError where the pattern itself is malformed."""
        return compile_pattern(self.text).fullmatch(path) is not None

    def __str__(self) -> str:
        return self.text


@record
class Placed:
    """``Shard(seq) @ tp``: a placement on one axis. ``axis`` is None where ``@ axis`` is left out.

    ``stored`` is True for ``stored Shard(0) @ dp``: how a parameter is kept between its uses.
    """

    placement: Placement
    axis: Name | None
    span: Span = field(compare=False)
    dim_span: Span | None = field(default=None, compare=False)  # the dim's name or index inside Shard(...)
    stored: bool = False

    def without_stored(self) -> str:
        """The text of the placement alone."""
        return repr(self.placement) + _at(self.axis)

    def __str__(self) -> str:
        return ("stored " if self.stored else "") + self.without_stored()


@record
class Quantity:
    """``450 GB/s``: a number as it is written, and its unit, a key of ``UNITS``; a plain count has none."""

    number: str
    unit: str | None
    span: Span = field(compare=False)

    @property
    def amount(self) -> Fraction:
        """The exact amount in bytes, bytes/s, seconds or flop/s, or the count."""
        from fractions import Fraction  # noqa: PLC0415 - `check` alone computes with no quantity

        _, over, under = UNITS[self.unit] if self.unit is not None else (None, 1, 1)
        return Fraction(self.number) * over / under

    def __str__(self) -> str:
        return self.number if self.unit is None else f"{self.number} {self.unit}"


@record
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


@record
class LinkLine:
    """``link fast = 450 GB/s, 3 us``: bandwidth per rank and direction, and what a launch costs."""

    name: Name
    bandwidth: Quantity
    latency: Quantity
    span: Span = field(compare=False)

    def __str__(self) -> str:
        return f"link {self.name} = {self.bandwidth}, {self.latency}"


@record
class LimitLine:
    """``limit memory 60 GB``: the most of a resource that the plan may use on one rank."""

    resource: Name
    most: Quantity
    span: Span = field(compare=False)

    def __str__(self) -> str:
        return f"limit {self.resource} {self.most}"


@record
class Figure:
    """``400 TFLOP/s bfloat16``, ``2 TB/s`` or ``96 GB``: what a device does or has. Only a rate has a dtype."""

    quantity: Quantity
    dtype: Name | None

    @property
    def what(self) -> str:
        """What the figure is of: ``rate for bfloat16``, ``bandwidth`` or ``capacity``."""
        if self.dtype is not None:
            return f"rate for {self.dtype}"
        return "capacity" if UNITS[self.quantity.unit or "B"][0] == "bytes" else "bandwidth"

    def __str__(self) -> str:
        return str(self.quantity) if self.dtype is None else f"{self.quantity} {self.dtype}"


@record
class Device:
    """``device h100``, or ``device mine = 60 TFLOP/s float32, 2 TB/s, 96 GB``: what the ranks run on, for prices.

    A device of one's own has figures: rates of dense arithmetic by dtype, the bandwidth and the capacity of its memory.
    """

    name: Name
    span: Span = field(compare=False)
    figures: tuple[Figure, ...] = ()

    def __str__(self) -> str:
        return f"device {self.name}" + (f" = {', '.join(map(str, self.figures))}" if self.figures else "")


def _at(axis: Name | None) -> str:
    return "" if axis is None else f" @ {axis}"


def _tail(dims: tuple[Name, ...] | None, placed: tuple[Placed, ...]) -> str:
    shown = [] if dims is None else [f"[{', '.join(dims)}]"]
    return ", ".join([*shown, *map(str, placed)])


@record
class InputLine:
    """``input a, b : [batch, seq], Shard(batch) @ dp``: names the dims of inputs, places them, or both."""

    names: tuple[Name, ...]
    dims: tuple[Name, ...] | None
    placed: tuple[Placed, ...]
    span: Span = field(compare=False)

    def __str__(self) -> str:
        return f"input {', '.join(self.names)} : {_tail(self.dims, self.placed)}"


@record
class ParamLine:
    """``param PATTERN : [vocab, hidden], Shard(vocab) @ tp``: names the dims of parameters, places them, or both."""

    pattern: Pattern
    dims: tuple[Name, ...] | None
    placed: tuple[Placed, ...]
    span: Span = field(compare=False)

    def __str__(self) -> str:
        return f"param {self.pattern} : {_tail(self.dims, self.placed)}"


@record
class ValueLine:
    """``value PATTERN : Shard(seq) @ tp``: where a module's first output tensor is produced."""

    pattern: Pattern
    placed: tuple[Placed, ...]
    span: Span = field(compare=False)

    def __str__(self) -> str:
        return f"value {self.pattern} : {_tail(None, self.placed)}"


@record
class OutputLine:
    """``output logits : Shard(vocab) @ tp``: how outputs of the whole model are returned."""

    names: tuple[Name, ...]
    placed: tuple[Placed, ...]
    span: Span = field(compare=False)

    def __str__(self) -> str:
        return f"output {', '.join(self.names)} : {_tail(None, self.placed)}"


@record
class Chosen:
    """``ring @ cp``: an implementation on an axis."""

    name: Name
    axis: Name | None
    span: Span = field(compare=False)

    def __str__(self) -> str:
        return f"{self.name}{_at(self.axis)}"


@record
class StrategyLine:
    """``strategy PATTERN : all_to_all @ tp + ring @ cp``: how the op of a module runs on each axis."""

    pattern: Pattern
    ways: tuple[Chosen, ...]
    span: Span = field(compare=False)

    def __str__(self) -> str:
        return f"strategy {self.pattern} : {' + '.join(map(str, self.ways))}"


@record
class Setting:
    """``overlap = ring``."""

    key: Name
    value: Name
    span: Span = field(compare=False)

    def __str__(self) -> str:
        return f"{self.key} = {self.value}"


@record
class LowerLine:
    """``lower PATTERN : overlap = ring, gathered = again``: how modules are emitted."""

    pattern: Pattern
    settings: tuple[Setting, ...]
    span: Span = field(compare=False)

    def __str__(self) -> str:
        return f"lower {self.pattern} : {', '.join(map(str, self.settings))}"


@record
class ExpectLine:
    """``expect PATTERN : all_gather @ tp forward <= 2``: a budget of launches, or of bytes where the bound has a unit.

    ``direction`` is None where forward and backward count together.
    """

    pattern: Pattern
    collective: Name
    axis: Name | None
    direction: Name | None
    comparison: Comparison
    bound: Quantity
    span: Span = field(compare=False)

    def __str__(self) -> str:
        direction = "" if self.direction is None else f" {self.direction}"
        counted = f"{self.collective}{_at(self.axis)}{direction}"
        return f"expect {self.pattern} : {counted} {self.comparison} {self.bound}"


PlacingLine = InputLine | ParamLine | ValueLine | OutputLine

Statement = (
    MeshAxis
    | LinkLine
    | Device
    | LimitLine
    | InputLine
    | ParamLine
    | ValueLine
    | OutputLine
    | StrategyLine
    | LowerLine
    | ExpectLine
)


@record
class Spec:
    """All statements of a file and of what it includes, each kind in the order of reading.

    ``sources`` maps every file that was read, the root first, to its text. ``notes`` are what a reader of its plans
    should know.
    """

    file: str = field(compare=False)
    axes: tuple[MeshAxis, ...] = ()
    links: tuple[LinkLine, ...] = ()
    device: Device | None = None
    limits: tuple[LimitLine, ...] = ()
    inputs: tuple[InputLine, ...] = ()
    params: tuple[ParamLine, ...] = ()
    values: tuple[ValueLine, ...] = ()
    outputs: tuple[OutputLine, ...] = ()
    strategies: tuple[StrategyLine, ...] = ()
    lowers: tuple[LowerLine, ...] = ()
    expects: tuple[ExpectLine, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)
    notes: tuple[Diagnostic, ...] = field(default=(), compare=False)

    @property
    def statements(self) -> tuple[Statement, ...]:
        """Every statement, kind by kind."""
        device = () if self.device is None else (self.device,)
        setting = (*self.axes, *self.links, *device, *self.limits)
        return (*setting, *self.placing, *self.strategies, *self.lowers, *self.expects)

    @property
    def placing(self) -> tuple[PlacingLine, ...]:
        """The statements that place something or name its dims."""
        return (*self.inputs, *self.params, *self.values, *self.outputs)

    def axis_of(self, placed: Placed | Chosen | ExpectLine) -> str | None:
        """The axis that ``placed`` speaks of; None where it is left out and the spec has not exactly one."""
        if placed.axis is not None:
            return str(placed.axis)
        return str(self.axes[0].name) if len(self.axes) == 1 else None

    def __str__(self) -> str:
        return "".join(f"{statement}\n" for statement in self.statements)
