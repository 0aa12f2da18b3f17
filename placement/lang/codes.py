"""The registry of diagnostic codes: the only place where a code is made.

``PLC0xx`` syntax, ``1xx`` names and mesh, ``2xx`` placements, ``3xx`` solving and cost, ``4xx`` capture and
rules, ``9xx`` our own bug. Every code has a page in ``docs/diagnostics``; a test holds the two together.
"""

from __future__ import annotations

from typing import NamedTuple


class Code(NamedTuple):
    """A kind of diagnostic. The title says what is wrong, in the words of its page's heading."""

    code: str
    title: str


_TITLES = {
    "PLC001": "file is not UTF-8",
    "PLC002": "unknown statement",
    "PLC003": "unexpected token",
    "PLC004": "unexpected character",
    "PLC005": "unclosed bracket",
    "PLC006": "unclosed string",
    "PLC007": "unclosed block",
    "PLC008": "'}' closes no block",
    "PLC009": "statement is not at the start of a line",
    "PLC010": "statement is not allowed inside a block",
    "PLC011": "wrong unit",
    "PLC012": "malformed path pattern",
    "PLC013": "bad number",
    "PLC014": "file cannot be read",
    "PLC015": "include cycle",
    "PLC016": "nested too deeply",
    "PLC017": "unknown placement",
    "PLC018": "wrong arguments of a placement",
    "PLC101": "unknown axis",
    "PLC102": "mesh size contradicts the spec",
    "PLC103": "unknown dim name",
    "PLC104": "pattern matches nothing",
    "PLC105": "unknown input name",
    "PLC106": "unknown output name",
    "PLC107": "wrong number of dims",
    "PLC108": "one dim name with two sizes",
    "PLC109": "unknown device",
    "PLC110": "unknown link",
    "PLC111": "no mesh axis declared",
    "PLC112": "declared twice",
    "PLC113": "axis left out on a mesh of several axes",
    "PLC114": "link that no axis uses",
    "PLC115": "unknown lowering setting",
    "PLC116": "unknown collective",
    "PLC117": "unknown resource",
    "PLC118": "dim named twice in one list",
    "PLC119": "repeated line",
    "PLC120": "wrong figures of a device",
    "PLC121": "unknown implementation",
    "PLC201": "two statements place one parameter",
    "PLC202": "two statements place one value",
    "PLC203": "size is not divisible by the axis",
    "PLC204": "dim cannot be sharded",
    "PLC205": "Partial is not possible here",
    "PLC206": "placement is not supported yet",
    "PLC207": "one statement places twice on one axis",
    "PLC208": "parameter that no line places",
    "PLC209": "'stored' on what is no parameter",
    "PLC210": "stored and used placements contradict",
    "PLC211": "order on what is no sequence",
    "PLC301": "no strategy meets the placements",
    "PLC302": "problem is too large for the exact solver",
    "PLC304": "two statements disagree on how something runs",
    "PLC305": "memory limit cannot be met",
    "PLC306": "budget is not kept",
    "PLC307": "implementation is not possible there",
    "PLC308": "lowering that changes nothing",
    "PLC401": "model could not be captured",
    "PLC402": "op without a rule",
    "PLC403": "named dim is fixed by the model",
    "PLC404": "example does not fit the model",
    "PLC405": "data on the meta device is missing",
    "PLC406": "state dict does not fit",
    "PLC407": "unsupported form of an op",
    "PLC408": "no spec was given",
    "PLC901": "internal error",
}

CODES: dict[str, Code] = {code: Code(code, title) for code, title in _TITLES.items()}
