"""``placement init``: a first spec for a model."""

from __future__ import annotations

import os

import click

from placement.commands.options import Sizes, debug_option, output_option
from placement.commands.shared import FINE, Failed, load_model, of_the_model, write
from placement.lang.render import printable
from placement.terminal import Status

_RANKS = 2  # where no mesh is given


@click.command()
@click.option("--model", required=True, metavar="NAME", help="MODULE:CALLABLE, FILE.py:CALLABLE or hf:CONFIG.json")
@click.option("--mesh", type=Sizes(), help=f"The axis and its ranks; tp={_RANKS} where it is left out.")
@click.option("--size", "sizes", type=Sizes(), help="Sizes to price: batch=1,seq=4096.")
@click.option("--force", is_flag=True, help="Replace the file that -o names.")
@output_option
@debug_option
def init(model: str, mesh: dict[str, int] | None, sizes: dict[str, int] | None, force: bool, output: str | None) -> int:
    """Write a first spec for a model: every line is priced and confirmed by a plan."""
    axes = mesh or {"tp": _RANKS}
    if len(axes) > 1:
        raise click.BadParameter("a mesh of several axes is not supported yet", param_hint="--mesh")
    if output is not None and os.path.exists(output) and not force:
        raise Failed(f"{output} exists: name another file, or replace it with --force")
    ((axis, ranks),) = axes.items()
    with Status("loading the model") as status:
        from placement.lang.spec import Spec  # noqa: PLC0415 - --help needs no language

        built = load_model(Spec("init.plc"), model, {})
        from placement.propose import scaffold  # noqa: PLC0415 - needs torch

        status.say("trying placements")
        with of_the_model(model):
            made = scaffold(built.model, axis, ranks, example=built.example, sizes=sizes)
    write(made.text, output)
    if output is not None:
        told = f"{output} is written; next: placement check {output} --model {model} --mesh {axis}={ranks}"
        click.echo(printable(told), err=True)
    return FINE
