"""``placement explain`` and ``placement emit``: what a spec leads to, told and as a program."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import click

from placement.commands.options import Target, output_option, target_options, unknown_code
from placement.commands.shared import FINE, Failed, make_plan, read_spec, show_stages, write
from placement.lang.codes import CODES
from placement.lang.render import printable
from placement.terminal import PLAIN_WIDTH, Status, colored, width

_FORMS = ("text", "json", "html", "dot", "chrome")


@click.command()
@click.argument("spec")
@target_options
@click.option(
    "--why", metavar="NAME", help="Why a value, parameter or output lies as it does, and what else would cost."
)
@click.option("--against", metavar="OTHER", help="What changes from OTHER: a spec, or an explanation saved as JSON.")
@click.option("--time", "timed", is_flag=True, help="How long each module takes, by the cost model.")
@click.option("--memory", is_flag=True, help="What one rank holds in memory, and what one device would.")
@click.option("--format", "form", type=click.Choice(_FORMS), default="text", show_default=True)
@output_option
def explain(
    spec: str,
    target: Target,
    why: str | None,
    against: str | None,
    timed: bool,
    memory: bool,
    form: str,
    output: str | None,
) -> int:
    """Say which collectives SPEC leads to, where, how much they send, and why.

    SPEC may also be a diagnostic's code, such as PLC204: its page is shown.
    --format chrome is --time for Perfetto.
    """
    if re.fullmatch(r"(?i:PLC)\d{3}", spec) and not os.path.exists(spec):
        click.echo(_page(spec.upper()).rstrip())
        return FINE
    read = read_spec(spec)
    target.needed()
    with Status("loading the model") as status:
        from placement.report.subjects import UnknownNameError  # noqa: PLC0415 - needs torch
        from placement.report.views import ViewError, check_view, view  # noqa: PLC0415 - as above

        try:
            question = check_view(form, why=why is not None, against=against is not None, time=timed, memory=memory)
        except ViewError as error:
            raise click.UsageError(str(error)) from error
        other = None if against is None else _other(against, target, status)
        plan, _ = make_plan(read, target, status)
        status.say("explaining")
        to_terminal = output is None
        look: dict[str, Any] = {"width": width() if to_terminal else PLAIN_WIDTH, "verbose": target.verbose}
        look |= {"color": to_terminal and colored(sys.stdout), "say": status.say}
        asked: dict[str, Any] = {"why": why, "against": other, "time": timed, "memory": memory}
        try:
            text = view(plan, form, name=read.file, sources=read.sources, **asked, **look)
        except UnknownNameError as error:
            raise click.BadParameter(str(error), param_hint="--why") from error
    write(text, output)
    if form != "text" or question:
        show_stages(plan, target)
    return FINE


def _other(path: str, target: Target, status: Status) -> tuple[str, Mapping[str, Any]]:
    """The name and the explanation of what is compared with: of a spec, or as it was saved."""
    from placement.report import explain_data  # noqa: PLC0415 - needs torch
    from placement.report.against import SavedPlanError, saved  # noqa: PLC0415 - as above

    try:
        found = saved(path)
    except SavedPlanError as error:
        raise click.BadParameter(str(error), param_hint="--against") from error
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}") from error
    if found is not None:
        return path, found
    other = read_spec(path)
    plan, _ = make_plan(other, target, status)
    return other.file, explain_data(plan)


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
        click.echo(f"{printable(output)}: {count} lines, root class {source.root}", err=True)
    show_stages(plan, target)
    return FINE


def _page(code: str) -> str:
    """The page of a diagnostic: inside an installed package, beside the package in a checkout."""
    if code not in CODES:
        raise click.UsageError(unknown_code(code))
    package = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    for folder in (("lang", "pages"), (os.pardir, "docs", "diagnostics")):
        page = os.path.join(package, *folder, f"{code}.md")
        if os.path.isfile(page):
            with open(page, encoding="utf-8") as stream:
                return stream.read()
    return f"{code}: {CODES[code].title}"
