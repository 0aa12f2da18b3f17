"""One table of token rules. The Pygments lexer and the TextMate grammar are both made from it.

Colouring is forgiving: it goes by words and marks, not by the grammar, so a line that is being typed keeps its
colours. A rule is a regular expression that Python's ``re`` and Oniguruma (TextMate's) read alike, on one line
of text; the first rule that matches at a place wins, and what no rule takes is an error token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from placement.editor.words import COLLECTIVES, CONSTANTS, DTYPES, MODIFIERS, PLACEMENTS, STATEMENTS, UNITS


class Kind(Enum):
    """What a stretch of text is. The value is its TextMate scope, without the language's suffix."""

    COMMENT = "comment.line.number-sign"
    KEYWORD = "keyword.control"
    MODIFIER = "keyword.other"
    PLACEMENT = "support.type"
    COLLECTIVE = "support.function"
    CONSTANT = "constant.language"
    AXIS = "entity.name.type"
    SETTING = "variable.parameter"
    NAME = "variable.other"
    NUMBER = "constant.numeric"
    UNIT = "keyword.other.unit"
    STRING = "string.quoted.double"
    WILDCARD = "keyword.operator.wildcard"
    OPERATOR = "keyword.operator"
    PUNCTUATION = "punctuation.separator"
    ERROR = "invalid.illegal"


@dataclass(frozen=True, slots=True)
class Rule:
    """``pattern`` and the kind of each of its groups, None for blanks; the groups cover the whole match."""

    pattern: str
    kinds: tuple[Kind | None, ...]


def _any(words: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(words, key=lambda word: (-len(word), word))))


def _word(words: Iterable[str]) -> str:
    """One of the words where it is a word of its own, no part of a path or of a longer word."""
    return rf"(?<![\w.*\-])({_any(words)})(?![\w.*\-])"


_NAME = r"[^\W\d][\w\-]*"
_NUMBER = r"(?<![\w.*\-])([+\-]?\d+(?:\.\d+)?)"
_ENDS = r"(?![\w/.*\-])"
# As placement.lang.split tells a statement from a line carried on: after its keyword comes no mark of a list.
_AT_START = rf"^([ \t]*)({_any(STATEMENTS)})(?=[ \t]+[^\s,:\])=@]|[ \t]*(?:#|$))"

RULES: tuple[Rule, ...] = (
    Rule(r"(#.*)", (Kind.COMMENT,)),
    Rule(_AT_START, (None, Kind.KEYWORD)),
    Rule(r'("[^"]*"?)', (Kind.STRING,)),
    Rule(rf"(@)([ \t]*)({_NAME})", (Kind.OPERATOR, None, Kind.AXIS)),
    Rule(rf"{_NUMBER}([ \t]*)({_any(UNITS)}){_ENDS}", (Kind.NUMBER, None, Kind.UNIT)),
    Rule(rf"(?<=FLOP/s)([ \t]+)({_any(DTYPES)}){_ENDS}", (None, Kind.CONSTANT)),
    Rule(r"(\[\d+-\d+\])", (Kind.WILDCARD,)),
    Rule(_word(MODIFIERS), (Kind.MODIFIER,)),
    Rule(_word(PLACEMENTS), (Kind.PLACEMENT,)),
    Rule(_word(COLLECTIVES), (Kind.COLLECTIVE,)),
    Rule(_word(CONSTANTS), (Kind.CONSTANT,)),
    Rule(rf"({_NAME})(?=[ \t]*=(?!=))", (Kind.SETTING,)),
    Rule(r"(?<![\w.*\-])([+\-]?\d+(?:\.\d+)?(?:[eE][+\-]?\d+)?)(?![\w.*\-])", (Kind.NUMBER,)),
    Rule(r"([\w\-]+)", (Kind.NAME,)),
    Rule(r"(\*+)", (Kind.WILDCARD,)),
    Rule(r"([<>]=?|==|=|\+|@(?=[ \t]*(?:#|$)))", (Kind.OPERATOR,)),  # an axis may stand on the next line
    Rule(r"([:,.()\[\]{}])", (Kind.PUNCTUATION,)),
    Rule(r"(\S)", (Kind.ERROR,)),
)
