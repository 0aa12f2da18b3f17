"""The Pygments lexer of ``.plc``, found by Pygments under the names ``placement`` and ``plc``."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from pygments.lexer import RegexLexer, bygroups
from pygments.token import Comment, Error, Keyword, Name, Number, Operator, Punctuation, String, Whitespace

from placement.editor.tokens import RULES, Kind, Rule

TOKENS: dict[Kind | None, Any] = {
    None: Whitespace,
    Kind.COMMENT: Comment.Single,
    Kind.KEYWORD: Keyword,
    Kind.MODIFIER: Keyword.Reserved,
    Kind.PLACEMENT: Keyword.Type,
    Kind.COLLECTIVE: Name.Builtin,
    Kind.CONSTANT: Name.Constant,
    Kind.AXIS: Name.Label,
    Kind.SETTING: Name.Attribute,
    Kind.NAME: Name,
    Kind.NUMBER: Number,
    Kind.UNIT: Keyword.Pseudo,
    Kind.STRING: String.Double,
    Kind.WILDCARD: Operator.Word,
    Kind.OPERATOR: Operator,
    Kind.PUNCTUATION: Punctuation,
    Kind.ERROR: Error,
}
"""The Pygments token of each kind; no two kinds share one."""


def _state(rule: Rule) -> tuple[str, Any]:
    return rule.pattern, bygroups(*(TOKENS[kind] for kind in rule.kinds))


class PlacementLexer(RegexLexer):
    """Colours specs in documentation, notebooks and pagers."""

    name = "placement"
    aliases: ClassVar = ["placement", "plc"]
    filenames: ClassVar = ["*.plc"]
    mimetypes: ClassVar = ["text/x-placement"]
    flags = re.MULTILINE
    # Blanks come last: a rule may begin with those that a line begins with.
    tokens: ClassVar = {"root": [*map(_state, RULES[:-1]), (r"\n|[^\S\n]+", Whitespace), _state(RULES[-1])]}
