"""The words of the language as editors need them, each list taken from where the language keeps it."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import get_args

from placement.lang.spec import (
    COLLECTIVES,
    DEVICES,
    DIRECTIONS,
    DTYPES,
    LINKS,
    LOWERINGS,
    PARAMETER_DIMS,
    RESOURCES,
    UNITS,
)
from placement.lang.split import KEYWORDS
from placement.lang.statements import PLACEMENTS, grammar
from placement.types import Order

STATEMENTS: tuple[str, ...] = tuple(KEYWORDS)
"""What a statement starts with."""

MODIFIERS = ("over", "stored", *DIRECTIONS)
"""Words that are no names inside a statement: the grammar spells the first two, the language lists the others."""

ORDERS: tuple[str, ...] = get_args(Order)
"""The orders of a shard."""

CONSTANTS = (*ORDERS, *LINKS)
"""Names that are known without being declared and mean one thing."""


@lru_cache(maxsize=1)
def pathed() -> tuple[str, ...]:
    """The statements that begin with a path: they speak of parts of a model, and so may stand in a block."""
    found = re.findall(r'^(\w+):\s*"\w+" pattern\b', grammar(), re.MULTILINE)
    return tuple(word for word in STATEMENTS if word in found)


__all__ = [
    "COLLECTIVES",
    "CONSTANTS",
    "DEVICES",
    "DIRECTIONS",
    "DTYPES",
    "LINKS",
    "LOWERINGS",
    "MODIFIERS",
    "ORDERS",
    "PARAMETER_DIMS",
    "PLACEMENTS",
    "RESOURCES",
    "STATEMENTS",
    "UNITS",
    "pathed",
]
