"""``placement explain`` and ``placement emit``: what a spec leads to, told and as a program."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from placement.commands.options import Target, output_option, target_options, unknown_code
from placement.commands.shared import FINE, make_plan, read_spec, show_stages, write
from placement.lang.codes import CODES
from placement.terminal import PLAIN_WIDTH, Status, colored, width


@click.command()
@click.argument("spec")
@target_options
@click.option("--format", "form", type=click.Choice(["text", "json", "html", "dot"]), default="text", show_default=True)
@output_option
def explain(spec: str, target: Target, form: str, output: str | None) -> int:
    """Say which collectives SPEC leads to, where, how much they send, and why.

    SPEC may also be a diagnostic's code, such as PLC204: its page is shown.
    """
    if re.fullmatch(r"PLC\d{3}", spec) and not Path(spec).exists():
        click.echo(_page(spec).rstrip())
        return FINE
    read = read_spec(spec)
    target.needed()
    with Status("loading the model") as status:
        plan, _ = make_plan(read, target, status)
        status.say("explaining")
        from placement import report  # noqa: PLC0415 - needs torch

        if form == "text":
            to_terminal = output is None
            color, columns = to_terminal and colored(sys.stdout), width() if to_terminal else PLAIN_WIDTH
            text = report.explain_text(plan, columns, color=color, verbose=target.verbose)
        else:
            text = {"json": report.to_json, "html": report.to_html, "dot": report.to_dot}[form](plan)
    write(text, output)
    if form != "text":
        show_stages(plan, target)
    return FINE


@click.command()
@click.argument("spec")
@target_options
@output_option
def emit(spec: str, target: Target, output: str | None) -> int:
    """Write the distributed program as Python that needs torch and placement.runtime."""
    read = read_spec(spec)
    target.needed()
    with Status("loading the model") as status:
        plan, _ = make_plan(read, target, status)
        status.say("emitting")
        from placement.emit.source import write as write_source  # noqa: PLC0415 - needs torch

        source = write_source(plan, read.file)
    write(source.text, output)
    if output is not None:
        count = source.text.count("\n")
        click.echo(f"{output}: {count} lines, root class {source.root}", err=True)
    show_stages(plan, target)
    return FINE


def _page(code: str) -> str:
    """The page of a diagnostic: inside an installed package, beside the package in a checkout."""
    if code not in CODES:
        raise click.UsageError(unknown_code(code))
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "lang" / "pages", package.parent / "docs" / "diagnostics"):
        if (folder / f"{code}.md").is_file():
            return (folder / f"{code}.md").read_text(encoding="utf-8")
    return f"{code}: {CODES[code].title}"
