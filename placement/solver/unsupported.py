"""What the language can say and this version cannot compile: refused here, so that no other stage meets it.

Each entry goes when the compiler learns it. Parsing, checking and formatting know nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from placement.lang.diagnostics import Diagnostics
from placement.lang.spec import Placed, Span, Spec
from placement.types import Auto, Shard

_PLACEMENT, _STATEMENT = "PLC206", "PLC303"
_LOWERED = ("gathered", "ops")


def refuse(spec: Spec, found: Diagnostics) -> None:
    """Report everything in ``spec`` that is not supported yet: one diagnostic for each, at the smallest place."""
    for placed, message, hint in _placements(spec):
        found.error(_PLACEMENT, message, placed.span, hint=hint)
    for span, what, meaning in _statements(spec):
        notes = [f"without the line the plan {meaning}"]
        found.error(_STATEMENT, f"{what} is not supported yet", span, notes=notes)


def _placements(spec: Spec) -> Iterator[tuple[Placed, str, str]]:
    lines = (*spec.inputs, *spec.params, *spec.values, *spec.outputs)
    for placed in (placed for line in lines for placed in line.placed):
        if isinstance(placed.placement, Shard) and placed.placement.order != "contiguous":
            order, plain = placed.placement.order, Shard(placed.placement.dim)
            yield placed, f"the {order} order is not supported yet", f"{plain!r} gives the same result"
    for placed in (placed for line in spec.inputs for placed in line.placed):
        if isinstance(placed.placement, Auto):
            message = "an input left to the solver is not supported yet"
            yield placed, message, "place it Replicate or Shard(dim)"


def _statements(spec: Spec) -> Iterator[tuple[Span, str, str]]:
    """The place, what is missing, and what happens without the line."""
    for line in spec.strategies:
        yield line.name.span, f"choosing the implementation '{line.name}'", "has the implementation that costs least"
    for line in spec.lowers:
        for setting in (s for s in line.settings if str(s.key) not in _LOWERED):
            yield setting.span, f"setting '{setting}'", "is emitted in the one form there is"
