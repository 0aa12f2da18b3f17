"""One statement's text → its tree, by the LALR tables that lark made of grammar/placement.lark.

Running the tables takes a page; lark itself would take longer to import than a file takes to check. Trees
are those that lark builds: tokens without a name of their own are dropped, rules with a leading underscore are
part of their parent, and an optional part that is left out is None.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from placement.lang.tables import LITERALS, REGEXES, RULES, SKIPPED, STARTS, STATES

END = "$END"

_SKIPPED = re.compile(SKIPPED)


class Token(NamedTuple):
    """A terminal: its name in the grammar, its text and the offset of that."""

    kind: str
    text: str
    start: int


class Node(NamedTuple):
    """A rule with what it is made of."""

    rule: str
    children: list[Token | Node | None]

    def named(self, rule: str) -> list[Node]:
        """The nodes of one rule among the children, in order."""
        return [child for child in self.children if isinstance(child, Node) and child.rule == rule]

    @property
    def token(self) -> Token:
        """The token of a rule that is one token."""
        token = self.children[0]
        assert isinstance(token, Token), f"{self.rule} is no token: the grammar and its reader disagree"
        return token


class UnexpectedTokenError(Exception):
    """The text does not go on as the grammar has it: ``start`` is where, ``accepted`` names what could stand there."""

    def __init__(self, start: int, accepted: frozenset[str]) -> None:
        super().__init__(start, accepted)
        self.start = start
        self.accepted = accepted


def parse(text: str, statement: str) -> Node:
    """The tree of a statement, whose first word is ``statement``. Raises UnexpectedTokenError."""
    first, final = STARTS[statement]
    states = [first]
    values: list[Token | Node] = []
    at = 0
    while True:
        at = _skip(text, at)
        token = _token(text, at, states[-1])
        if token is None:
            raise UnexpectedTokenError(at, _accepted(states))
        while (action := STATES[states[-1]][token.kind]) < 0:
            rule, size, kept = RULES[~action]
            node = _node(rule, values[len(values) - size :], kept)
            del states[len(states) - size :], values[len(values) - size :]
            states.append(STATES[states[-1]][rule])
            values.append(node)
            if token.kind == END and states[-1] == final:
                return node
            if token.kind not in STATES[states[-1]]:  # a reduction that only the end of another rule would allow
                raise UnexpectedTokenError(at, _accepted(states))
        states.append(action)
        values.append(token)
        at += len(token.text)


def _skip(text: str, at: int) -> int:
    match = _SKIPPED.match(text, at)
    return at if match is None else match.end()


def _token(text: str, at: int, state: int) -> Token | None:
    """The token at an offset, of those that the state takes; None where none fits."""
    if at == len(text):
        return Token(END, "", at) if END in STATES[state] else None
    regexes, literals = _lexer(state)
    for kind, regex in regexes:
        match = regex.match(text, at)
        if match is not None:
            return Token(literals.get(match.group(), kind), match.group(), at)
    for literal, kind in literals.items():
        if text.startswith(literal, at):
            return Token(kind, literal, at)
    return None


@cache
def _lexer(state: int) -> tuple[list[tuple[str, re.Pattern[str]]], dict[str, str]]:
    """The terminals that a state takes: the regular expressions, which come first, and the fixed texts."""
    row = STATES[state]
    regexes = [(kind, re.compile(regex)) for kind, regex in REGEXES.items() if kind in row]
    return regexes, {literal: kind for literal, kind in LITERALS.items() if kind in row}


def _accepted(states: list[int]) -> frozenset[str]:
    """The terminals that could stand next: those that lead to a shift, or to the end, after all reductions."""
    return frozenset(kind for kind in STATES[states[-1]] if kind.isupper() and _shifts(kind, states))


def _shifts(kind: str, states: list[int]) -> bool:
    states = list(states)
    while (action := STATES[states[-1]].get(kind)) is not None and action < 0:
        rule, size, _ = RULES[~action]
        del states[len(states) - size :]
        states.append(STATES[states[-1]][rule])
        if kind == END and any(states[-1] == final for _, final in STARTS.values()):
            return True
    return action is not None


def _node(rule: str, values: list[Token | Node], kept: tuple[int | None, ...]) -> Node:
    children: list[Token | Node | None] | None = None
    for index in kept:
        value = None if index is None else values[index]
        if isinstance(value, Node) and value.rule.startswith("_"):
            # The list of the first one is taken over, not copied: else a long list would take quadratic time.
            children = value.children if children is None else [*children, *value.children]
        else:
            children = [] if children is None else children
            children.append(value)
    return Node(rule, children or [])
