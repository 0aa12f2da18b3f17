"""Texts drawn from the grammar itself: a walk through the rules that lark reads from grammar/placement.lark.

A statement or a rule that the grammar gains is drawn as well; a terminal of its own needs a line in ``WORDS`` once
its regular expression says too little of what is meant.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise

from lark import Lark
from lark.grammar import NonTerminal

from placement.lang import PlacementError, parse
from placement.lang.split import KEYWORDS
from placement.lang.statements import grammar

_NAMES = ("tp", "dp", "seq", "out", "mesh", "value", "over", "stored", "auto", "Shard", "_x1", "é", "in", "within")
WORDS: dict[str, tuple[str, ...]] = {
    "NAME": _NAMES,
    "DIM": _NAMES,
    "ITEM": ("input_ids", "labels", "past.0.1", "pixel-values", "0", "mesh"),
    "KIND": ("Shard", "Shard", "Shard", "Replicate", "auto", "Partial"),
    "NUMBER": ("0", "1", "2", "12"),
    "PATH": (
        *("a", "model.layers.*.self_attn.{q, k,v}_proj.weight", "{a.b,\tc{1,2}}.d", "layers.[0-31].mlp", "**.h_*"),
        *("[0-3]", "[0-3].a", "a-b.0", "{mesh,value}", "{ a }", "model.a_very_long_name_of_a_module.and_another_one.w"),
    ),
    "STRING": ('"common.plc"', '"a # b\t.plc"', '" { "'),
    "COLLECTIVE": ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"),
    "DIRECTION": ("forward", "backward"),
    "COMPARISON": ("<=", "<", "==", ">=", ">"),
    "SETTING": ("ring", "again", "float32", "kept", "none", "chunks(4)"),
    "QUANTITY": ("2", "0", "12", "60 GB", "1.5GB", "512  MiB"),
    "DTYPE": ("float32", "float32", "bfloat16", "float64", "float8_e4m3fn"),
    "device/QUANTITY": ("400 TFLOP/s", "60TFLOP/s", "1.5  PFLOP/s", "2 TB/s", "96GB", "141  GB"),
    "link/QUANTITY": ("450 GB/s", "450GB/s", "3 us", "1.5  ms", "50 GB /s"),
    "lower/NAME": ("overlap", "gathered", "ops", "reduce"),
    "limit/NAME": ("memory",),
    "strategy/NAME": ("ring", "ulysses", "cp"),
}
_BETWEEN = (" ", " ", " ", "  ", "\t")
_CARRIED = ("", " ", " ", "\n", "\n    ", '  # a comment } { "\n', "\r\n  # alone\n\n ", " # one\n # two\n")
_COMMENTS = ("# a comment", "#", '#! { ( [ " ', "# é 漢字 \t", "  # indented", "                        # far", "#\\")
_LATER = 5  # rules within rules until the shortest way out is taken


@cache
def _rules() -> tuple[dict[str, list[list[str]]], dict[str, str], dict[str, int]]:
    """What each rule may stand for, what each fixed terminal is, and how deep each symbol is at least."""
    lark = Lark(grammar(), parser="lalr", start=list(KEYWORDS))
    rules: dict[str, list[list[str]]] = {}
    for rule in lark.rules:
        if isinstance(rule.origin, NonTerminal):
            rules.setdefault(str(rule.origin.name), []).append([str(symbol.name) for symbol in rule.expansion])
    fixed = {t.name: t.pattern.value for t in lark.terminals if t.pattern.type == "str"}
    fixed |= {t.name: t.pattern.value.removesuffix(r"\b") for t in lark.terminals if t.name.startswith("_")}
    depth: dict[str, int] = {}
    for _ in range(len(rules)):
        for name, options in rules.items():
            known = [max((depth.get(s, 99) for s in o if s in rules), default=0) + 1 for o in options]
            depth[name] = min(known)
    return rules, fixed, depth


class Writer:
    """Draws texts; the same seed draws the same ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def statement(self, keyword: str) -> str:
        """A statement that parses by itself, in any spelling."""
        while True:
            text = self._spelt(self._symbols(keyword, keyword, 0))
            try:
                parse(f"{text} {{\n}}" if keyword == "within" else text, read=lambda _: "")
            except PlacementError:
                continue
            return text

    def _symbols(self, symbol: str, keyword: str, depth: int) -> list[str]:
        rules, fixed, least = _rules()
        if symbol not in rules:
            words = WORDS.get(f"{keyword}/{symbol}") or WORDS.get(symbol)
            return [self.random.choice(words) if words else fixed.get(symbol) or self._unknown(symbol)]
        options = rules[symbol]
        if depth > _LATER:
            options = [min(options, key=lambda o: max((least.get(s, 0) for s in o), default=0))]
        return [word for s in self.random.choice(options) for word in self._symbols(s, keyword, depth + 1)]

    @staticmethod
    def _unknown(terminal: str) -> str:
        raise AssertionError(f"WORDS has none for the terminal {terminal}")

    def _spelt(self, words: list[str]) -> str:
        """The words with blanks, and where a statement may be carried over with line ends and comments, between."""
        text, open_brackets = words[0], 0
        for before, word in pairwise(words):
            open_brackets += (before in "([") - (before in ")]")
            tight = before in "([])@,:=+" or word in "([])@,:=+"
            if (open_brackets or before in ",:=@+") and self.random.random() < 0.25:
                text += self.random.choice(_CARRIED if tight else _CARRIED[1:])
            elif not (tight and self.random.random() < 0.4):
                text += self.random.choice(_BETWEEN)
            text += word
        return text

    def text(self, pool: dict[str, list[str]], size: int) -> str:
        """A file of about ``size`` statements out of ``pool``, with blocks, comments and blank lines between."""
        pieces: list[str] = []
        depth = 0
        for _ in range(size):
            pieces.append(self._blank())
            if depth and self.random.random() < 0.3:
                depth -= 1
                pieces.append("}" + self._end())
            inside = ("param", "value", "within")
            keyword = self.random.choice(inside if depth else KEYWORDS)
            if keyword == "device" and any(piece.startswith("device") for piece in pieces):
                continue
            pieces.append(self.random.choice(pool[keyword]))
            if keyword == "within":
                depth += 1
                pieces.append(self.random.choice((" {", " # c\n{", "\n\n  {", " # c\n  # d\n {")))
            pieces.append(self._end())
        return "".join([*pieces, *["}\n"] * depth, self._blank()])

    def _end(self) -> str:
        comment = self.random.choice(_COMMENTS) if self.random.random() < 0.3 else ""
        return self.random.choice(("", " ", "   ")) + comment + self.random.choice(("\n", "\n", "\r\n", "\r"))

    def _blank(self) -> str:
        lines = [self.random.choice(("", "", "  ", *_COMMENTS)) for _ in range(self.random.choice((0, 0, 0, 1, 2, 3)))]
        return "".join(f"{line}\n" for line in lines) + self.random.choice(("", "  ", "\t"))
