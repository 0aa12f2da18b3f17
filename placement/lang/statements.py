"""One statement's text → its frozen dataclass: lark's LALR parser, and what a grammar cannot say.

lark is imported, and the grammar compiled, when the first statement is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from placement.lang.diagnostics import Diagnostics, did_you_mean
from placement.lang.patterns import PatternError, expand, normalize
from placement.lang.source import Source
from placement.lang.spec import (
    Device,
    InputLine,
    MeshAxis,
    Name,
    OutputLine,
    ParamLine,
    Pattern,
    Placed,
    Span,
    Statement,
    ValueLine,
)
from placement.lang.split import KEYWORDS, Raw
from placement.types import Auto, Order, Partial, Placement, Replicate, Shard

if TYPE_CHECKING:
    from lark import Lark, Token, Tree
    from lark.exceptions import UnexpectedInput

    Node = Tree[Token]

PLACEMENTS = ("Replicate", "Partial", "Shard", "auto")
_ORDERS: dict[str, Order] = {"contiguous": "contiguous", "zigzag": "zigzag"}
_WHOLE_NUMBER = re.compile(r"[0-9]{1,9}")  # longer ones are slips, and int() refuses very long ones
_FOUND = re.compile(r"\w[\w.]*|\"[^\"\n\r]*\"|.", re.DOTALL)
_PUNCTUATION = frozenset('{}()[]:,=@*.+-"')

_EXPECTED = {  # terminals in the words of a message, in the order in which a message lists them
    "$END": "the end of the line",
    "NAME": "a name",
    "ITEM": "a name",
    "DIM": "a dim's name",
    "NUMBER": "a number",
    "PATH": "a path",
    "KIND": "a placement",
    "STRING": "a file name in double quotes",
    "LSQB": "'['",
    "LPAR": "'('",
    "EQUAL": "'='",
    "OVER": "'over'",
    "COLON": "':'",
    "COMMA": "','",
    "AT": "'@'",
    "RPAR": "')'",
    "RSQB": "']'",
}


@dataclass(frozen=True, slots=True)
class Within:
    """The header of a block: ``within PATTERN``, the pattern joined with those of the blocks around it."""

    pattern: Pattern


@dataclass(frozen=True, slots=True)
class Include:
    """``include "file"``."""

    name: Name


Parsed = Statement | Within | Include


@lru_cache(maxsize=1)
def parser() -> Lark:
    """The LALR parser, one start rule per statement."""
    from lark import Lark  # noqa: PLC0415 - 0.05 s that a run without a spec need not pay

    return Lark(grammar(), parser="lalr", lexer="contextual", start=list(KEYWORDS))


def grammar() -> str:
    """The text of the grammar: beside this module in a wheel, in the checkout's ``grammar/`` otherwise."""
    here = Path(__file__).resolve()
    inside, outside = here.with_name("placement.lark"), here.parents[2] / "grammar" / "placement.lark"
    return (inside if inside.is_file() else outside).read_text(encoding="utf-8")


def parse_statement(raw: Raw, source: Source, within: Pattern | None, found: Diagnostics) -> Parsed | None:
    """The statement, its path joined to the pattern ``within``; None where a fault was added to ``found``."""
    from lark.exceptions import UnexpectedInput  # noqa: PLC0415 - as above

    text = source.text[raw.start : raw.end]
    try:
        tree = parser().parse(text, start=raw.keyword)
    except UnexpectedInput as fault:
        _unexpected(fault, text, raw, source, found)
        return None
    faults = len(found)
    made = _Builder(raw, source, within, found).build(tree)
    return made if len(found) == faults else None


def _unexpected(fault: UnexpectedInput, text: str, raw: Raw, source: Source, found: Diagnostics) -> None:
    """Say what was expected at the place where the parser stopped, and what stands there."""
    at = fault.pos_in_stream
    token = getattr(fault, "token", None)
    if at is None or (token is not None and token.type == "$END"):
        at = len(text)
    match = _FOUND.match(text, at)
    end = match.end() if match else at
    span = source.span(raw.start + at, raw.start + end)
    there = match.group() if match else ""
    accepted = {name for name in fault.interactive_parser.accepts() if name in _EXPECTED}
    if "$END" in accepted and there in KEYWORDS:
        found.error("PLC009", "a statement starts on a line of its own", span, hint="begin a new line here")
    elif there and not (there[0].isalnum() or there[0] in _PUNCTUATION or there[0] == "_"):
        hint = "strings stand in double quotes" if there == "'" else None
        found.error("PLC004", f"unexpected character {there!r}", span, hint=hint)
    else:
        expected = _listed(words for name, words in _EXPECTED.items() if name in accepted)
        code = "PLC013" if accepted == {"NUMBER"} else "PLC003"
        shown = f"found {_quoted(there)}" if there else "found the end of the statement"
        found.error(code, f"expected {expected}, {shown}", span)


def _listed(words: Iterator[str]) -> str:
    unique = list(dict.fromkeys(words))
    return unique[0] if len(unique) == 1 else f"{', '.join(unique[:-1])} or {unique[-1]}"


def _quoted(token: str) -> str:
    return token if token.startswith('"') and len(token) > 1 else f"'{token}'"


class _Builder:
    """Builds one statement from its tree. Faults go to ``found``; what is at fault is left out."""

    def __init__(self, raw: Raw, source: Source, within: Pattern | None, found: Diagnostics) -> None:
        self.raw = raw
        self.source = source
        self.within = within
        self.found = found
        self.span = source.span(raw.start, raw.end)

    def build(self, tree: Node) -> Parsed:
        makers: dict[str, Callable[[Node], Parsed]] = {
            "mesh": self._mesh,
            "device": lambda t: Device(self._name(_present(_subtree(t.children[0]))), self.span),
            "input": lambda t: InputLine(self._items(t), self._dims(t), self._placements(t), self.span),
            "param": lambda t: ParamLine(self._pattern(t), self._dims(t), self._placements(t), self.span),
            "value": lambda t: ValueLine(self._pattern(t), self._placements(t), self.span),
            "output": lambda t: OutputLine(self._items(t), self._placements(t), self.span),
            "within": lambda t: Within(self._pattern(t)),
            "include": self._include,
        }
        return makers[self.raw.keyword](tree)

    def _span(self, token: Token) -> Span:
        start = self._offset(token)
        return self.source.span(start, start + len(token))

    def _offset(self, token: Token) -> int:
        return self.raw.start + (token.start_pos or 0)

    def _name(self, tree: Node) -> Name:
        token = _token(tree)
        return Name(str(token), self._span(token))

    def _number(self, token: Token, what: str, least: int) -> int | None:
        if _WHOLE_NUMBER.fullmatch(token) and int(token) >= least:
            return int(token)
        self.found.error("PLC013", f"{what} is a whole number from {least}, not '{token}'", self._span(token))
        return None

    def _mesh(self, tree: Node) -> MeshAxis:
        name, number, link = (_subtree(child) for child in tree.children)
        size = None if number is None else self._number(_token(number), "the size of an axis", 1)
        return MeshAxis(
            self._name(_present(name)),
            size,
            None if link is None else self._name(link),
            self.span,
            None if number is None else self._span(_token(number)),
        )

    def _include(self, tree: Node) -> Include:
        token = _token(tree)
        return Include(Name(token[1:-1], self._span(token)))

    def _items(self, tree: Node) -> tuple[Name, ...]:
        return tuple(self._name(item) for item in _named(tree, "item"))

    def _dims(self, tree: Node) -> tuple[Name, ...] | None:
        for dims in _named(tree, "dims"):
            return tuple(self._name(dim) for dim in _named(dims, "dim"))
        return None

    def _pattern(self, tree: Node) -> Pattern:
        token = _token(next(_named(tree, "pattern")))
        text = normalize(token)
        start, end = self._offset(token), self._offset(token) + len(token)
        try:
            expand(token)
        except PatternError as fault:
            self.found.error("PLC012", str(fault), self.source.span(start + fault.start, start + fault.end))
        else:
            if self.within is not None:
                text = f"{self.within}.{text}"
                try:
                    expand(text)
                except PatternError as fault:
                    self.found.error("PLC012", f"{fault}, once joined with its block", self.source.span(start, end))
        return Pattern(text, self.source.span(start, end))

    def _placements(self, tree: Node) -> tuple[Placed, ...]:
        made = [self._placed(placed) for placed in _named(tree, "placed")]
        return tuple(placed for placed in made if placed is not None)

    def _placed(self, tree: Node) -> Placed | None:
        children: list[Token | Node | None] = list(tree.children)  # lark's stub leaves out the None of `[...]`
        if children[0] is not None:
            self.found.error("PLC011", "'stored' is not supported yet", self._span(_leaf(children[0])))
            return None
        kind, arguments, axis = _leaf(children[1]), _subtree(children[2]), _subtree(children[3])
        given = [] if arguments is None else [_token(argument) for argument in _named(arguments, "argument")]
        placement = self._placement(kind, given, called=arguments is not None)
        if placement is None:
            return None
        name = None if axis is None else self._name(axis)
        first = self._span(kind)
        last = first if arguments is None else self._span(_leaf(arguments.children[-1]))
        last = last if name is None else name.span
        span = Span(first.file, first.line, first.column, last.end_line, last.end_column)
        return Placed(placement, name, span, self._span(given[0]) if given else None)

    def _placement(self, kind: Token, given: list[Token], *, called: bool) -> Placement | None:
        if kind not in PLACEMENTS:
            hint = did_you_mean(kind, PLACEMENTS) or f"the placements are {', '.join(PLACEMENTS)}"
            self.found.error("PLC017", f"unknown placement '{kind}'", self._span(kind), hint=hint)
            return None
        if kind == "Shard":
            return self._shard(kind, given)
        if called:
            self.found.error("PLC018", f"{kind} takes no arguments", self._span(kind))
            return None
        return {"Replicate": Replicate(), "Partial": Partial(), "auto": Auto()}[kind]

    def _shard(self, kind: Token, given: list[Token]) -> Shard | None:
        if not 1 <= len(given) <= len(("dim", "order")):
            hint = "write Shard(seq), Shard(0) or Shard(seq, zigzag)"
            self.found.error("PLC018", "Shard takes a dim and, after it, an order", self._span(kind), hint=hint)
            return None
        dim: str | int | None = str(given[0])
        if given[0].type == "NUMBER":
            dim = self._number(given[0], "the index of a dim", 0)
        order: Order | None = "contiguous"
        if len(given) > 1:
            order = _ORDERS.get(given[1])
            if order is None:
                hint = did_you_mean(given[1], _ORDERS) or "the orders are contiguous and zigzag"
                self.found.error("PLC018", f"unknown order '{given[1]}'", self._span(given[1]), hint=hint)
        return None if dim is None or order is None else Shard(dim, order)


def _named(tree: Node, rule: str) -> Iterator[Node]:
    """The subtrees of one rule, in order."""
    return (child for child in map(_subtree, tree.children) if child is not None and child.data == rule)


def _subtree(child: Token | Node | None) -> Node | None:
    """The child where it is a tree; tokens and what was left out are None."""
    return None if child is None or isinstance(child, str) else child


def _present(tree: Node | None) -> Node:
    if tree is None:
        raise AssertionError("the grammar makes this child always present")
    return tree


def _leaf(child: Token | Node | None) -> Token:
    if not isinstance(child, str):
        raise AssertionError(f"{child!r} is no token: the grammar and this module disagree")  # noqa: TRY004
    return child


def _token(tree: Node) -> Token:
    """The token of a rule that is one token."""
    return _leaf(tree.children[0])
