"""The explanation as HTML that needs nothing else: a page of its own, or a fragment of a notebook's."""

from __future__ import annotations

from pathlib import Path

from placement.report import balance
from placement.report.facts import facts
from placement.report.fold import blocks, causes, layer_sums, summed
from placement.report.names import told
from placement.report.text import proof
from placement.report.units import plural, show_bytes, show_time
from placement.solver.plan import Plan


def to_html(plan: Plan) -> str:
    """The page. Every table can be sorted by any column; light or dark as the reader's system is."""
    return _render(plan, "page.html.j2")


def to_fragment(plan: Plan) -> str:
    """One ``div`` for a page that has other things on it: no script, styles for itself alone, the page's colours."""
    return _render(plan, "fragment.html.j2")


def _render(plan: Plan, template: str) -> str:
    import jinja2  # noqa: PLC0415 - no other format needs it

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(bytes=show_bytes, time=show_time, causes=causes, told=told, balanced=balance.told)
    found = facts(plan)
    return environment.get_template(template).render(
        facts=found, blocks=blocks(found), hooks=summed(found), sums=layer_sums, proof=proof(found), plural=plural
    )


Plan.as_html = to_fragment  # a plan knows no reports; this is how a notebook comes by one
