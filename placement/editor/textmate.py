"""The TextMate grammar of ``.plc``: what ``editors/vscode/syntaxes/placement.tmLanguage.json`` holds."""

from __future__ import annotations

import json
from typing import Any

from placement.editor.tokens import RULES, Kind, Rule

SCOPE = "source.placement"


def grammar() -> dict[str, Any]:
    """The grammar as data. Only the file made of it is read by editors; a test holds the two together."""
    return {
        "name": "placement",
        "scopeName": SCOPE,
        "fileTypes": ["plc"],
        "patterns": [_pattern(rule) for rule in RULES],
    }


def text() -> str:
    """The file's text."""
    return json.dumps(grammar(), indent=2) + "\n"


def _pattern(rule: Rule) -> dict[str, Any]:
    if len(rule.kinds) == 1:
        (kind,) = rule.kinds
        return {"match": rule.pattern, "name": _scope(kind)}
    named = ((i, kind) for i, kind in enumerate(rule.kinds, 1) if kind is not None)
    return {"match": rule.pattern, "captures": {str(i): {"name": _scope(kind)} for i, kind in named}}


def _scope(kind: Kind | None) -> str:
    assert kind is not None, "a rule of blanks alone colours nothing"
    return f"{kind.value}.placement"
