"""Arguments and options that commands share."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import click

from placement.lang.codes import CODES
from placement.lang.diagnostics import near

Command = TypeVar("Command", bound=Callable[..., Any])


class Target(NamedTuple):
    """What a spec is held against: the model's name, the mesh, sizes of named dims."""

    model: str | None
    mesh: dict[str, int] | None
    sizes: dict[str, int]
    verbose: bool

    def needed(self) -> str:
        """The model's name. Raises a usage error where there is none."""
        if self.model is None:
            raise click.UsageError("Missing option '--model'.")
        return self.model


class Sizes(click.ParamType[dict[str, int]]):
    """``tp=8,dp=2``."""

    name = "name=n,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        """Sizes by name; each name once, each size from 1."""
        if not isinstance(value, str):
            return value
        sizes: dict[str, int] = {}
        for item in value.split(","):
            match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([1-9][0-9]*)\s*", item)
            if not match:
                self.fail(f"{item.strip()!r} is not of the form name=number", param, ctx)
            if match[1] in sizes:
                self.fail(f"{match[1]!r} twice", param, ctx)
            sizes[match[1]] = int(match[2])
        return sizes


class Codes(click.ParamType[tuple[str, ...]]):
    """``PLC104,PLC2``: codes, or what several of them begin with."""

    name = "code,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The beginnings, each of at least one code."""
        if not isinstance(value, str):
            return value
        if not all(item.strip() for item in value.split(",")):
            self.fail(f"{value!r} names no code: write PLC104, or PLC1 for all that begin so", param, ctx)
        codes = tuple(item.strip().upper() for item in value.split(","))
        for code in codes:
            if not code.startswith("PLC") or not any(known.startswith(code) for known in CODES):
                self.fail(unknown_code(code), param, ctx)
        return codes


def unknown_code(code: str) -> str:
    """That there is no such code, and which ones are near."""
    close = near(code, CODES)
    return f"there is no diagnostic {code}" + (f"; did you mean {' or '.join(close)}?" if close else "")


def target_options(command: Command) -> Command:
    """The options of every command that takes a model; the command gets them as ``target``."""

    @functools.wraps(command)
    def folded(
        *args: Any,
        model: str | None,
        mesh: dict[str, int] | None,
        sizes: dict[str, int] | None,
        verbose: bool,
        **others: Any,
    ) -> Any:
        return command(*args, target=Target(model, mesh, sizes or {}, verbose), **others)

    options = [
        click.option("--model", metavar="NAME", help="MODULE:CALLABLE, FILE.py:CALLABLE or hf:CONFIG.json"),
        click.option("--mesh", type=Sizes(), help="Ranks on each axis: tp=8."),
        click.option("--size", "sizes", type=Sizes(), help="Sizes of dims named on input lines: batch=1,seq=4096."),
        click.option("-v", "--verbose", is_flag=True, help="Show what each stage took."),
        debug_option,
    ]
    result: Any = folded
    for option in reversed(options):
        result = option(result)
    return result


def debug_option(command: Command) -> Command:
    """``--debug``, which every command has; ``cli.run`` looks for it where a command fails."""
    return click.option(
        "--debug", is_flag=True, expose_value=False, help="Show a traceback where placement itself fails."
    )(command)


def output_option(command: Command) -> Command:
    """``-o FILE``."""
    return click.option(
        "-o", "--output", type=click.Path(dir_okay=False, writable=True), help="A file instead of stdout."
    )(command)
