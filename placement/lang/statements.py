"""One statement's text → its frozen dataclass: the tables of the grammar, and what a grammar cannot say."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

from placement.lang import expected
from placement.lang.diagnostics import Diagnostics, did_you_mean
from placement.lang.lalr import Node, Token, UnexpectedTokenError
from placement.lang.lalr import parse as parse_tokens
from placement.lang.patterns import PatternError, expand, normalize
from placement.lang.source import Source
from placement.lang.spec import (
    DIRECTIONS,
    UNITS,
    Chosen,
    Comparison,
    Device,
    ExpectLine,
    Figure,
    InputLine,
    LimitLine,
    LinkLine,
    LowerLine,
    MeshAxis,
    Name,
    OutputLine,
    ParamLine,
    Pattern,
    Placed,
    Quantity,
    Setting,
    Span,
    Statement,
    StrategyLine,
    Unit,
    ValueLine,
)
from placement.lang.split import Raw
from placement.types import Auto, Order, Partial, Placement, Replicate, Shard

PLACEMENTS = ("Replicate", "Partial", "Shard", "auto")
ORDERS: dict[str, Order] = {"contiguous": "contiguous", "zigzag": "zigzag"}
COMPARISONS: dict[str, Comparison] = {"<=": "<=", "<": "<", "==": "==", ">=": ">=", ">": ">"}

_LONGEST = 9  # digits; longer ones are slips, and int() refuses very long ones
_QUANTITY = r"(?P<number>[0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?P<unit>(?:[^\W\d]\w*)?(?:\s*/\w*)?)"
_FIGURES: dict[Unit, str] = {"flop/s": "a rate", "bytes/s": "a bandwidth", "bytes": "a capacity"}
_EXAMPLES: dict[tuple[Unit, ...], str] = {
    ("bytes",): "60 GB",
    ("bytes/s",): "450 GB/s",
    ("seconds",): "3 us",
    tuple(_FIGURES): "60 TFLOP/s float32, 2 TB/s, 96 GB",
}


class Within(NamedTuple):
    """The header of a block: ``within PATTERN``, the pattern joined with those of the blocks around it."""

    pattern: Pattern


class Include(NamedTuple):
    """``include "file"``."""

    name: Name


Parsed = Statement | Within | Include


def grammar() -> str:
    """The text of the grammar: beside this module in a wheel, in the checkout's ``grammar/`` otherwise."""
    from pathlib import Path  # noqa: PLC0415 - only tools read it

    here = Path(__file__).resolve()
    inside, outside = here.with_name("placement.lark"), here.parents[2] / "grammar" / "placement.lark"
    return (inside if inside.is_file() else outside).read_text(encoding="utf-8")


def parse_statement(raw: Raw, source: Source, within: Pattern | None, found: Diagnostics) -> Parsed | None:
    """The statement, its path joined to the pattern ``within``; None where a fault was added to ``found``."""
    text = source.text[raw.start : raw.end]
    try:
        tree = parse_tokens(text, raw.keyword)
    except UnexpectedTokenError as fault:
        expected.report(fault, text, raw, source, found)
        return None
    faults = len(found)
    made = _Builder(raw, source, within, found).build(tree)
    return made if len(found) == faults else None


class _Builder:
    """Builds one statement from its tree. Faults go to ``found``; what is at fault is left out."""

    def __init__(self, raw: Raw, source: Source, within: Pattern | None, found: Diagnostics) -> None:
        self.raw = raw
        self.source = source
        self.within = within
        self.found = found
        self.span = source.span(raw.start, raw.end)

    def build(self, tree: Node) -> Parsed:
        return _MAKERS[self.raw.keyword](self, tree)

    # -- tokens ----------------------------------------------------------------------------------

    def _span(self, token: Token) -> Span:
        start = self.raw.start + token.start
        return self.source.span(start, start + len(token.text))

    def _word(self, token: Token) -> Name:
        return Name(unicodedata.normalize("NFC", token.text), self._span(token))

    def _name(self, tree: Node) -> Name:
        return self._word(tree.token)

    def _number(self, token: Token, what: str, least: int, hint: str | None = None) -> int | None:
        if _is_number(token.text) and int(token.text) >= least:
            return int(token.text)
        message = f"{what} is a whole number from {least}, not '{token.text}'"
        self.found.error("PLC013", message, self._span(token), hint=hint)
        return None

    def _quantity(self, tree: Node, units: tuple[Unit, ...], what: str) -> Quantity:
        """An amount that is measured in one of ``units``; without any, a whole number without a unit, or bytes."""
        token = tree.token
        span = self._span(token)
        match = re.fullmatch(_QUANTITY, token.text)
        if match is None:
            self.found.error("PLC013", f"{what} is a number, not '{token.text}'", span)
            return Quantity(token.text, None, span)
        number, name = match["number"], match["unit"]
        start = self.raw.start + token.start
        place = self.source.span(start + match.start("unit"), start + match.end("unit")) if name else span
        if name and name not in UNITS:
            self.found.error("PLC011", f"unknown unit '{name}'", place, hint=_near_unit(name, units))
        elif not units and not name and "." in number:
            self.found.error("PLC013", f"a count is a whole number, not '{number}'", span)
        elif not units and name and UNITS[name][0] != "bytes":
            hint = "write a count of launches such as 2, or bytes such as 2 MiB"
            self.found.error("PLC011", f"{what} is a count or in bytes, not in {UNITS[name][0]}", place, hint=hint)
        elif units and (not name or UNITS[name][0] not in units):
            shown = f", not in {UNITS[name][0]}" if name else ""
            message = f"{what} is in {expected.listed(units)}{shown}"
            self.found.error("PLC011", message, place, hint=f"for example {_EXAMPLES[units]}")
        elif units and not number.strip("0."):
            self.found.error("PLC013", f"{what} is more than zero", span)
        return Quantity(number, name or None, span)

    # -- statements ------------------------------------------------------------------------------

    def mesh(self, tree: Node) -> MeshAxis:
        name, number, link = map(_node, tree.children)
        size = None if number is None else self._number(number.token, "the size of an axis", 1)
        return MeshAxis(
            self._name(_present(name)),
            size,
            self._axis(link),
            self.span,
            None if number is None else self._span(number.token),
        )

    def link(self, tree: Node) -> LinkLine:
        name, bandwidth, latency = (_present(child) for child in tree.children)
        if (_measured(bandwidth), _measured(latency)) == ("seconds", "bytes/s"):
            span = _joined(self._span(bandwidth.token), self._span(latency.token))
            hint = f"write link {name.token.text} = {latency.token.text}, {bandwidth.token.text}"
            self.found.error("PLC011", "the bandwidth of a link comes before its latency", span, hint=hint)
            bandwidth, latency = latency, bandwidth
        return LinkLine(
            self._name(name),
            self._quantity(bandwidth, ("bytes/s",), "the bandwidth of a link"),
            self._quantity(latency, ("seconds",), "the latency of a link"),
            self.span,
        )

    def device(self, tree: Node) -> Device:
        name = self._name(_present(tree.children[0]))
        return Device(name, self.span, tuple(map(self._figure, tree.named("figure"))))

    def limit(self, tree: Node) -> LimitLine:
        name, most = (_present(child) for child in tree.children)
        return LimitLine(self._name(name), self._quantity(most, ("bytes",), "a limit"), self.span)

    def input(self, tree: Node) -> InputLine:
        return InputLine(self._items(tree), self._dims(tree), self._placements(tree), self.span)

    def param(self, tree: Node) -> ParamLine:
        return ParamLine(self._pattern(tree), self._dims(tree), self._placements(tree), self.span)

    def value(self, tree: Node) -> ValueLine:
        return ValueLine(self._pattern(tree), self._placements(tree), self.span)

    def output(self, tree: Node) -> OutputLine:
        return OutputLine(self._items(tree), self._placements(tree), self.span)

    def strategy(self, tree: Node) -> StrategyLine:
        return StrategyLine(self._pattern(tree), tuple(map(self._way, tree.named("way"))), self.span)

    def lower(self, tree: Node) -> LowerLine:
        return LowerLine(self._pattern(tree), tuple(map(self._setting, tree.named("setting"))), self.span)

    def expect(self, tree: Node) -> ExpectLine:
        _, collective, axis, direction, comparison, bound = tree.children
        way = None if direction is None else self._word(_leaf(direction))
        if way is not None and way not in DIRECTIONS:
            hint = did_you_mean(way, DIRECTIONS)
            self.found.error("PLC003", f"expected 'forward' or 'backward', found '{way}'", way.span, hint=hint)
        return ExpectLine(
            self._pattern(tree),
            self._name(_present(collective)),
            self._axis(_node(axis)),
            way,
            COMPARISONS[_leaf(comparison).text],
            self._quantity(_present(bound), (), "a budget"),
            self.span,
        )

    def within_(self, tree: Node) -> Within:
        return Within(self._pattern(tree))

    def include(self, tree: Node) -> Include:
        token = tree.token
        return Include(Name(token.text[1:-1], self._span(token)))

    # -- parts of statements ---------------------------------------------------------------------

    def _axis(self, tree: Node | None) -> Name | None:
        return None if tree is None else self._name(tree)

    def _items(self, tree: Node) -> tuple[Name, ...]:
        return tuple(map(self._name, tree.named("item")))

    def _dims(self, tree: Node) -> tuple[Name, ...] | None:
        for dims in tree.named("dims"):
            return tuple(map(self._name, dims.named("dim")))
        return None

    def _figure(self, tree: Node) -> Figure:
        """A rate with its dtype, a bandwidth or a capacity: the unit says which."""
        amount, dtype = _present(tree.children[0]), tree.children[1]
        at = None if dtype is None else self._word(_leaf(dtype))
        measured = _measured(amount)
        if measured not in _FIGURES:
            return Figure(self._quantity(amount, tuple(_FIGURES), "a figure of a device"), at)
        made = self._quantity(amount, (measured,), _FIGURES[measured])
        if measured == "flop/s" and at is None:
            end = self.raw.start + amount.token.start + len(amount.token.text)
            hint = f"a rate is that of a dtype: {made} float32"
            self.found.error("PLC003", f"expected a dtype after '{made}'", self.source.span(end, end), hint=hint)
        elif measured != "flop/s" and at is not None:
            message = f"expected the end of the line or ',', found '{at}'"
            self.found.error("PLC003", message, at.span, hint=f"{_FIGURES[measured]} has no dtype")
        return Figure(made, at)

    def _setting(self, tree: Node) -> Setting:
        key, value = self._name(_present(tree.children[0])), self._word(_leaf(tree.children[1]))
        return Setting(key, value, _joined(key.span, value.span))

    def _way(self, tree: Node) -> Chosen:
        name, axis = self._name(_present(tree.children[0])), self._axis(_node(tree.children[1]))
        return Chosen(name, axis, name.span if axis is None else _joined(name.span, axis.span))

    def _pattern(self, tree: Node) -> Pattern:
        token = tree.named("pattern")[0].token
        text = normalize(token.text)
        span = self._span(token)
        start = self.raw.start + token.start
        try:
            expand(token.text)
        except PatternError as fault:
            self.found.error("PLC012", str(fault), self.source.span(start + fault.start, start + fault.end))
        else:
            if self.within is not None:
                text = f"{self.within}.{text}"
                try:
                    expand(text)
                except PatternError as fault:
                    self.found.error("PLC012", f"{fault}, once joined with its block", span)
        return Pattern(text, span, self.within)

    def _placements(self, tree: Node) -> tuple[Placed, ...]:
        made = [self._placed(placed) for placed in tree.named("placed")]
        return tuple(placed for placed in made if placed is not None)

    def _placed(self, tree: Node) -> Placed | None:
        stored, kind, arguments, axis = tree.children
        kind, arguments = _leaf(kind), _node(arguments)
        given = [] if arguments is None else [argument.token for argument in arguments.named("argument")]
        placement = self._placement(kind, given, called=arguments is not None)
        if placement is None:
            return None
        name = self._axis(_node(axis))
        first = self._span(kind if stored is None else _leaf(stored))
        if name is not None:
            last = name.span
        else:
            last = self._span(kind if arguments is None else _leaf(arguments.children[-1]))
        dim_span = self._span(given[0]) if given else None
        return Placed(placement, name, _joined(first, last), dim_span, stored=stored is not None)

    def _placement(self, kind: Token, given: list[Token], *, called: bool) -> Placement | None:
        if kind.text not in PLACEMENTS:
            hint = did_you_mean(kind.text, PLACEMENTS) or f"the placements are {', '.join(PLACEMENTS)}"
            self.found.error("PLC017", f"unknown placement '{kind.text}'", self._span(kind), hint=hint)
            return None
        if kind.text == "Shard":
            return self._shard(kind, given)
        if called:
            hint = f"write {kind.text}"
            self.found.error("PLC018", f"{kind.text} takes no arguments", self._span(kind), hint=hint)
            return None
        return {"Replicate": Replicate(), "Partial": Partial(), "auto": Auto()}[kind.text]

    def _shard(self, kind: Token, given: list[Token]) -> Shard | None:
        if not 1 <= len(given) <= len(("dim", "order")):
            hint = "write Shard(seq), Shard(0) or Shard(seq, zigzag)"
            self.found.error("PLC018", "Shard takes a dim and, after it, an order", self._span(kind), hint=hint)
            return None
        dim: str | int | None = self._word(given[0]).text
        if given[0].kind == "NUMBER":
            dim = self._number(given[0], "the index of a dim", 0, "count dims from the first, or give them names")
        order: Order | None = "contiguous"
        if len(given) > 1:
            order = ORDERS.get(given[1].text)
            if order is None:
                hint = did_you_mean(given[1].text, ORDERS)
                hint = hint or f"the orders are {' and '.join(ORDERS)}; an axis is named as in {kind.text}({dim}) @ tp"
                self.found.error("PLC018", f"unknown order '{given[1].text}'", self._span(given[1]), hint=hint)
        return None if dim is None or order is None else Shard(dim, order)


_MAKERS: dict[str, Callable[[_Builder, Node], Parsed]] = {
    "mesh": _Builder.mesh,
    "link": _Builder.link,
    "device": _Builder.device,
    "limit": _Builder.limit,
    "input": _Builder.input,
    "param": _Builder.param,
    "value": _Builder.value,
    "output": _Builder.output,
    "strategy": _Builder.strategy,
    "lower": _Builder.lower,
    "expect": _Builder.expect,
    "within": _Builder.within_,
    "include": _Builder.include,
}


def _near_unit(name: str, measured: tuple[Unit, ...]) -> str:
    """What an unknown unit may have been meant to be, among those of what may be measured; a budget's are bytes."""
    bits = re.fullmatch(r"([KMGT])b(?:/s|ps)", name)
    if bits is not None:
        return f"write {bits[1]}bit/s for bits, {bits[1]}B/s for bytes"
    fitting = [unit for unit, (of, _, _) in UNITS.items() if of in (measured or ("bytes",))]
    begun = [unit for unit in fitting if unit.casefold().startswith(name.casefold())][:2]
    near = f"did you mean {' or '.join(map(repr, begun))}?" if begun else None
    return did_you_mean(name, fitting) or near or f"the units are {', '.join(fitting)}"


def _is_number(text: str) -> bool:
    return len(text) <= _LONGEST and text.isascii() and text.isdigit()


def _measured(quantity: Node) -> Unit | None:
    """What a quantity measures; None where that is not known."""
    match = re.fullmatch(_QUANTITY, quantity.token.text)
    return UNITS[match["unit"]][0] if match is not None and match["unit"] in UNITS else None


def _joined(first: Span, last: Span) -> Span:
    return Span(first.file, first.line, first.column, last.end_line, last.end_column)


# What the grammar makes always present, or of one kind; else it and this module disagree.


def _node(child: Token | Node | None) -> Node | None:
    assert not isinstance(child, Token), f"{child!r} is no rule"
    return child


def _present(child: Token | Node | None) -> Node:
    assert isinstance(child, Node), f"{child!r} is no rule"
    return child


def _leaf(child: Token | Node | None) -> Token:
    assert isinstance(child, Token), f"{child!r} is no token"
    return child
