"""The explanation as one HTML page that needs nothing else: no script or style from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from placement.report.facts import facts
from placement.report.fold import blocks, causes, layer_sums, summed
from placement.report.text import proof
from placement.report.units import plural, show_bytes, show_time

if TYPE_CHECKING:
    from placement.solver.plan import Plan

_TEMPLATE = Path(__file__).with_name("page.html.j2")


def to_html(plan: Plan) -> str:
    """The page. Every table can be sorted by any column; light or dark as the reader's system is."""
    import jinja2  # noqa: PLC0415 - no other format needs it

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(bytes=show_bytes, time=show_time, causes=causes)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    found = facts(plan)
    return template.render(
        facts=found, blocks=blocks(found), hooks=summed(found), sums=layer_sums, proof=proof(found), plural=plural
    )
