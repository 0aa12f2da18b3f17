"""Writes placement/lang/tables.py: the LALR tables of placement.lark, computed by lark.

Run it after every change of the grammar: ``python grammar/make_tables.py``. A test compares the file with
what this script would write. The package itself runs without lark, whose import alone takes 0.1 s.
"""

# ruff: noqa: INP001 - a script beside the grammars, not a package

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

from lark import Lark
from lark.lexer import PatternStr
from lark.parsers.lalr_analysis import Shift

from placement.lang.split import KEYWORDS

GRAMMAR = Path(__file__).with_name("placement.lark")
TABLES = Path(__file__).parents[1] / "placement" / "lang" / "tables.py"

_HEAD = '''\
"""The LALR tables of grammar/placement.lark. Written by ``python grammar/make_tables.py``, not by hand."""

# fmt: off
# ruff: noqa: Q000 - the quotes are those of repr()

from __future__ import annotations
'''


def build() -> Lark:
    """The parser as lark builds it; the tests compare ours with it."""
    return Lark(GRAMMAR.read_text(encoding="utf-8"), parser="lalr", lexer="contextual", start=list(KEYWORDS))


def tables() -> str:
    """The text of tables.py, the same in every process."""
    lark = build()
    parser: Any = lark.parser
    table = parser.parser._parse_table  # noqa: SLF001 - lark keeps its tables to itself
    rules: list[Any] = []  # in the order in which the states below meet them
    number, order = _numbers(table)
    states: list[str] = []
    for state in order:
        row: list[str] = []
        for symbol, (action, argument) in sorted(table.states[state].items()):
            if action is Shift:
                row.append(f"{symbol!r}: {number[argument]}")
            else:
                if argument not in rules:
                    rules.append(argument)
                row.append(f"{symbol!r}: {~rules.index(argument)}")
        states.append("{" + ", ".join(row) + "}")
    literals = {t.name: t.pattern.value for t in lark.terminals if isinstance(t.pattern, PatternStr)}
    by_priority = sorted(lark.terminals, key=lambda t: (-t.priority, t.name))
    regexes = {t.name: t.pattern.value for t in by_priority if t.name not in literals}
    skipped = "|".join(regexes.pop(name) for name in sorted(lark.ignore_tokens))
    starts = {keyword: (number[table.start_states[keyword]], number[table.end_states[keyword]]) for keyword in KEYWORDS}
    return "\n".join(
        [
            _HEAD,
            "# Blanks and comments, which may stand between any two tokens.",
            f"SKIPPED = {f'(?:{skipped})*'!r}\n",
            "# Terminals: those that are a regular expression, the first that fits counts; those that are one text.",
            *_dict("REGEXES: dict[str, str]", {name: repr(regex) for name, regex in regexes.items()}),
            *_dict("LITERALS: dict[str, str]", {literals[name]: repr(name) for name in sorted(literals)}),
            "# A rule's name, how many symbols it takes off the stack, and which of them its node keeps;",
            "# None is an optional part that is left out.",
            *_list("RULES: tuple[tuple[str, int, tuple[int | None, ...]], ...]", [repr(_rule(rule)) for rule in rules]),
            "# By statement: the state to begin in, and the one that accepts.",
            *_dict("STARTS: dict[str, tuple[int, int]]", {keyword: repr(pair) for keyword, pair in starts.items()}),
            "# By state and symbol: the state to go to, or ~r for reducing by rule r.",
            *_list("STATES: tuple[dict[str, int], ...]", states),
        ]
    )


def _numbers(table: Any) -> tuple[dict[int, int], list[int]]:
    """Numbers in the order of a breadth-first walk: lark's own depend on the hash seed."""
    order = [table.start_states[keyword] for keyword in KEYWORDS]
    seen = set(order)
    for state in order:
        for _, (action, argument) in sorted(table.states[state].items()):
            if action is Shift and argument not in seen:
                seen.add(argument)
                order.append(argument)
    return {state: i for i, state in enumerate(order)}, order


def _rule(rule: Any) -> tuple[str, int, tuple[int | None, ...]]:
    """As lark builds a node: anonymous tokens are dropped, an optional part that is left out is None."""
    size = len(rule.expansion)
    flags = rule.options.empty_indices or [False] * size
    kept: list[int | None] = []
    position = 0
    for left_out in flags:
        if left_out:
            kept.append(None)
            continue
        symbol = rule.expansion[position]
        if not (symbol.is_term and symbol.filter_out):
            kept.append(position)
        position += 1
    return str(rule.origin.name), size, tuple(kept)


def _dict(name: str, items: dict[str, str]) -> list[str]:
    return [f"{name} = {{", *(f"    {key!r}: {value}," for key, value in items.items()), "}\n"]


def _list(name: str, items: list[str]) -> list[str]:
    lines: list[str] = []
    for item in items:
        lines += textwrap.wrap(f"    {item},", 118, subsequent_indent="     ", break_on_hyphens=False)
    return [f"{name} = (", *lines, ")\n"]


if __name__ == "__main__":
    sys.path.insert(0, str(TABLES.parents[2]))
    TABLES.write_text(tables(), encoding="utf-8")
