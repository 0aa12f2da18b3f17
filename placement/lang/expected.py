"""What to say where a statement does not go on as the grammar has it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from placement.lang.diagnostics import Diagnostics
from placement.lang.lalr import END, UnexpectedTokenError
from placement.lang.source import Source
from placement.lang.split import KEYWORDS, Raw

_FOUND = r"(?s)\w[\w.]*|\"[^\"\n\r]*\"|."  # compiled by the first fault
_PUNCTUATION = frozenset('{}()[]:,=@*.+-"<>/')

_EXPECTED = {  # terminals in the words of a message, in the order in which a message lists them
    END: "the end of the line",
    "NAME": "a name",
    "ITEM": "a name",
    "DIM": "a dim's name",
    "NUMBER": "a number",
    "QUANTITY": "a number",
    "PATH": "a path",
    "KIND": "a placement",
    "COLLECTIVE": "a collective",
    "SETTING": "a word or a number",
    "DTYPE": "a dtype",
    "STRING": "a file name in double quotes",
    "DIRECTION": "'forward' or 'backward'",
    "COMPARISON": "a comparison such as '<='",
    "LSQB": "'['",
    "LPAR": "'('",
    "EQUAL": "'='",
    "_OVER": "'over'",
    "COLON": "':'",
    "COMMA": "','",
    "AT": "'@'",
    "PLUS": "'+'",
    "RPAR": "')'",
    "RSQB": "']'",
}


_STRAY = {"'": "strings stand in double quotes", ";": "a statement ends with its line"}


def report(fault: UnexpectedTokenError, text: str, raw: Raw, source: Source, found: Diagnostics) -> None:
    """Say what was expected at the place where the parser stopped in ``text``, and what stands there."""
    match = re.compile(_FOUND).match(text, fault.start)
    end = match.end() if match else fault.start
    span = source.span(raw.start + fault.start, raw.start + end)
    there = match.group() if match else ""
    accepted = {name for name in fault.accepted if name in _EXPECTED}
    if END in accepted and there in KEYWORDS:
        found.error("PLC009", "a statement starts on a line of its own", span, hint="begin a new line here")
    elif there and not (there[0].isalnum() or there[0] in _PUNCTUATION or there[0] == "_"):
        hint = _STRAY.get(there) or _decomposed(text, fault.start)
        found.error("PLC004", f"unexpected character {there!r}", span, hint=hint)
    else:
        expected = listed(words for name, words in _EXPECTED.items() if name in accepted)
        hint = _slip(raw.keyword, text, fault.start, there, accepted)
        code = "PLC013" if accepted in ({"NUMBER"}, {"QUANTITY"}) else "PLC003"
        shown = f"found {_quoted(there)}" if there else "found the end of the statement"
        found.error(code, f"expected {expected}, {shown}", span, hint=hint)


def _slip(keyword: str, text: str, at: int, there: str, accepted: set[str]) -> str | None:
    """How to write what was probably meant, for slips that people bring along from elsewhere."""
    before = text[:at].rstrip()
    places = accepted >= {END, "AT"}  # after a placement
    slips: list[tuple[bool, str]] = [
        (text.startswith("//", at), "a comment begins with '#'"),
        (there.startswith('"'), "names stand without quotes"),
        (there == "=" and {"COMMA", "RPAR"} <= accepted, "write the dim alone, as in Shard(seq) or Shard(0)"),
        (there == "-" and {"COMMA", "RPAR"} <= accepted, "a name has letters, digits and '_'"),
        (there == "=" and places, "write a placement and its axis as in Shard(seq) @ tp"),
        (there.isidentifier() and places, "an axis stands after '@', as in Shard(seq) @ tp"),
        (
            there in "([" and before.endswith("@"),
            "each axis has a placement of its own: Shard(seq) @ tp, auto @ dp",
        ),
        (keyword == "mesh" and there in "(,", "a line declares one axis, as in: mesh tp = 8"),
        (there == "," and "PLUS" in accepted, "what is said of several axes is joined by '+'"),
        (there == "[" and "KIND" in accepted, _where_dims(keyword)),
        (there == "[" and "COLON" in accepted, "an index range is written [0-3]"),
    ]
    return next((hint for found, hint in slips if found and there), None)


def _decomposed(text: str, at: int) -> str | None:
    """A mark of its own behind a letter that is one character with it in the normal form NFC."""
    pair = text[max(at - 1, 0) : at + 1]
    composed = unicodedata.normalize("NFC", pair)
    return f"write '{composed}' as one character (Unicode's form NFC)" if len(composed) < len(pair) else None


def _where_dims(keyword: str) -> str:
    if keyword in ("input", "param"):
        return "the list of dims comes first, the placements after it"
    return "dims are named on input and param lines"


def listed(words: Iterable[str]) -> str:
    """``a, b or c``."""
    unique = list(dict.fromkeys(words))
    return unique[0] if len(unique) == 1 else f"{', '.join(unique[:-1])} or {unique[-1]}"


def _quoted(token: str) -> str:
    return token if token.startswith('"') and len(token) > 1 else f"'{token}'"
