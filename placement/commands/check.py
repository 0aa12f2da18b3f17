"""``placement check``: what is wrong in specs, alone or with a model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import click

from placement.commands.options import Codes, Target, target_options
from placement.commands.shared import AT_FAULT, FINE, checked_spec, make_plan, show_stages
from placement.lang.diagnostics import Diagnostic, PlacementError
from placement.lang.render import FORMS, Form, render
from placement.terminal import Status, colored, show, width

if TYPE_CHECKING:
    from placement.lang.spec import Spec
    from placement.models import Built
    from placement.solver.plan import Plan


class _Findings:
    """What was found in all specs. Codes that are not asked for are only counted."""

    def __init__(self, select: tuple[str, ...], ignore: tuple[str, ...]) -> None:
        self.select = select
        self.ignore = ignore
        self.found: dict[Diagnostic, None] = {}
        self.sources: dict[str, str] = {}

    def add(self, diagnostics: Iterable[Diagnostic], sources: Mapping[str, str]) -> int:
        """Keep what is asked for; return how many were not."""
        self.sources.update(sources)
        left_out = 0
        for diagnostic in diagnostics:
            code = diagnostic.code
            if code.startswith(self.ignore) or not code.startswith(self.select or "PLC"):
                left_out += 1
            else:
                self.found[diagnostic] = None
        return left_out

    @property
    def errors(self) -> bool:
        """Whether a fault is among what is asked for."""
        return any(d.severity == "error" for d in self.found)


@click.command()
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
@target_options
@click.option("--select", type=Codes(), multiple=True, help="Report only these codes: PLC104,PLC2.")
@click.option("--ignore", type=Codes(), multiple=True, help="Leave these codes out.")
@click.option("--format", "form", type=click.Choice(FORMS), default="full", show_default=True)
def check(
    specs: tuple[str, ...],
    target: Target,
    select: tuple[tuple[str, ...], ...],
    ignore: tuple[tuple[str, ...], ...],
    form: Form,
) -> int:
    """Find what is wrong in specs, alone or with a model.

    SPEC may be - for stdin. Faults lead to exit code 1, notes do not.
    """
    if target.model is None and (target.mesh or target.sizes):
        raise click.UsageError("--mesh and --size need --model: without one only the text is checked")
    findings = _Findings(sum(select, ()), sum(ignore, ()))
    told = [_check(spec, target, findings) for spec in dict.fromkeys(specs)]
    if form == "full":
        show(sentence for sentence in told if sentence is not None)
        if findings.found:
            _show_full(findings)
    elif form == "json" or findings.found:
        click.echo(render(findings.found, findings.sources, form=form))
    return AT_FAULT if findings.errors else FINE


def _show_full(findings: _Findings) -> None:
    """Faults go to stderr; what is none belongs to the answer."""
    stream = sys.stderr if findings.errors else sys.stdout
    text = render(findings.found, findings.sources, color=colored(stream), width=width())
    click.echo(text, file=stream)


def _check(path: str, target: Target, findings: _Findings) -> str | None:
    """Check one spec; return the sentence on what was checked, None where faults say it all."""
    before = len(findings.found)
    try:
        spec, warnings = checked_spec(path)
        findings.add(warnings, spec.sources)
        if target.model is not None:
            return _check_with_model(spec, path, target, findings)
    except PlacementError as error:
        left_out = findings.add(error.diagnostics, error.sources)
        if len(findings.found) > before:
            return None
        return f"{path}: faults left out: {left_out}; nothing is checked that lies behind them"
    wrong = "nothing wrong" if len(findings.found) == before else "no faults"
    return f"{path}: {len(spec.statements)} statements, {wrong}; --model holds them against a model"


def _check_with_model(spec: Spec, path: str, target: Target, findings: _Findings) -> str:
    with Status("loading the model") as status:
        plan, built = make_plan(spec, target, status)
        from placement.report.findings import findings as of_plan  # noqa: PLC0415 - needs torch

        findings.add(of_plan(plan, path), spec.sources)
    show_stages(plan, target)
    return _fits(plan, built, path)


def _fits(plan: Plan, built: Built, path: str) -> str:
    """One calm sentence on what was checked."""
    from placement.report.units import plural  # noqa: PLC0415 - needs torch

    parameters = [p for p in plan.graph.parameters if not p.is_buffer]
    cut = sum(1 for p in parameters if plan.produced[p.value].over)
    counts = [
        f"{plural(len(parameters), 'parameter')} ({cut} sharded)",
        plural(len(plan.graph.nodes), "op"),
        plural(len(plan.graph.outputs), "output"),
    ]
    model = type(built.model).__name__
    return f"{path} fits {model} on {plan.mesh}: {', '.join(counts)}"
