"""What the language can say and this version cannot compile: refused here, so that no other stage meets it.

Each entry goes when the compiler learns it. Parsing, checking and formatting know nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from placement.lang.diagnostics import Diagnostics
from placement.lang.spec import Placed, Spec
from placement.types import Auto

_PLACEMENT = "PLC206"


def refuse(spec: Spec, found: Diagnostics) -> None:
    """Report everything in ``spec`` that is not supported yet: one diagnostic for each, at the smallest place."""
    for placed, message, hint in _placements(spec):
        found.error(_PLACEMENT, message, placed.span, hint=hint)


def _placements(spec: Spec) -> Iterator[tuple[Placed, str, str]]:
    for placed in (placed for line in spec.inputs for placed in line.placed):
        if isinstance(placed.placement, Auto):
            message = "an input left to the solver is not supported yet"
            yield placed, message, "place it Replicate or Shard(dim)"
