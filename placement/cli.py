"""The command line: ``placement init | check | fmt | explain | emit | verify``.

Nothing heavy is imported until a command needs it: ``--help``, ``fmt`` and ``check`` without a model start at once.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import sys

import click

from placement import __version__
from placement.commands.shared import AT_FAULT, FINE, INTERRUPTED, OUR_BUG
from placement.lang.diagnostics import Diagnostic, PlacementError
from placement.lang.render import render
from placement.terminal import colored, width

_COMMANDS = {  # where each is
    "check": "check",
    "emit": "explain",
    "explain": "explain",
    "fmt": "fmt",
    "init": "init",
    "lsp": "lsp",
    "verify": "verify",
}
_FULL = (errno.ENOSPC, errno.EDQUOT)  # what is asked for cannot be written


def main() -> None:
    """Run the command line and exit: 0 fine, 1 spec or model at fault, 2 usage, 3 our own bug."""
    code = run()
    gc.freeze()  # the end of Python looks at every object for cycles: a second, after a model
    sys.exit(code)


def run(args: list[str] | None = None) -> int:
    """Run one command and return its exit code; everything that is wrong is told on stderr."""
    try:
        result = cli.main(args=args, prog_name="placement", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as error:
        cause = error.__cause__ or error  # click makes an Abort of a KeyboardInterrupt
        click.echo(" ".join(["\ninterrupted", *getattr(cause, "__notes__", ())]), err=True)
        return INTERRUPTED
    except PlacementError as error:
        click.echo(render(error.diagnostics, error.sources, color=colored(sys.stderr), width=width()), err=True)
        return AT_FAULT
    except BrokenPipeError:  # `placement explain ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    except OSError as error:
        if error.errno not in _FULL:
            return _bug(error, args)
        click.echo(f"error: {error.strerror}", err=True)
        return AT_FAULT
    except Exception as error:  # noqa: BLE001 - whatever reaches this line is a bug of ours
        return _bug(error, args)
    return result if isinstance(result, int) else FINE


def _bug(error: Exception, args: list[str] | None) -> int:
    debug = "--debug" in (sys.argv[1:] if args is None else args) or bool(os.environ.get("PLACEMENT_DEBUG"))
    if debug:
        import traceback  # noqa: PLC0415 - only a failing run needs it

        click.echo("".join(traceback.format_exception(error)), err=True)
    hint = "this is a bug in placement: please report it with the spec and the model"
    hint += "" if debug else "; --debug adds the traceback"
    text = " ".join(str(error).split())
    message = f"internal error: {type(error).__name__}" + (f": {text}" if text else "")
    found = Diagnostic("PLC901", message if len(message) < 400 else f"{message[:400]}...", hint=hint)
    click.echo(render([found], {}, color=colored(sys.stderr), width=width()), err=True)
    return OUR_BUG


class _Group(click.Group):
    """Loads a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # Which names are near an unknown one, click asks those that are loaded.
        for name in [cmd_name] if cmd_name in _COMMANDS else _COMMANDS:
            module = importlib.import_module(f"placement.commands.{_COMMANDS[name]}")
            self.commands[name] = getattr(module, name)
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(__version__, prog_name="placement", message="%(prog)s %(version)s")
def cli() -> None:
    """Placements as types, collectives as conversions.

    A spec (.plc) says how some values of a model lie on a mesh; placement finds the rest.
    """


if __name__ == "__main__":
    main()
