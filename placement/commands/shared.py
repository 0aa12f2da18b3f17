"""Steps that commands have in common, and how commands end."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

import click

from placement.commands.options import Target
from placement.lang.diagnostics import Diagnostic, PlacementError, near
from placement.lang.render import printable
from placement.terminal import Status, show
from placement.undisturbed import undisturbed

if TYPE_CHECKING:
    from placement.lang.spec import Spec
    from placement.models import Built
    from placement.solver.plan import Plan

FINE, AT_FAULT, USAGE, OUR_BUG, INTERRUPTED = 0, 1, 2, 3, 130
STDIN = "-"
STDIN_NAME = "<stdin>"


class Failed(click.ClickException):
    """Something outside of the spec went wrong, and not through a bug of ours."""

    exit_code = AT_FAULT

    def show(self, file: Any = None) -> None:
        """As diagnostics are shown: lower case, without click's capital."""
        click.echo(f"error: {printable(self.format_message())}", err=True, file=file)


def checked_spec(path: str) -> tuple[Spec, tuple[Diagnostic, ...]]:
    """The spec of a file, or of stdin for ``-``, and what is no error in it.

    Raises PlacementError for errors that show without a model.
    """
    from placement.lang.check import check  # noqa: PLC0415 - the parser takes a moment, --help needs none
    from placement.lang.parser import load, read_include  # noqa: PLC0415 - as above

    if path == STDIN:
        content = sys.stdin.buffer.read()
        spec = load(STDIN_NAME, read=lambda name: content if name == STDIN_NAME else read_include(name))
    else:
        spec = load(path)
    found = check(spec)
    if any(d.severity == "error" for d in found):
        raise PlacementError(found, spec.sources)
    return spec, found


def read_spec(path: str) -> Spec:
    """The spec of a file, or of stdin for ``-``. Raises PlacementError for errors that show without a model."""
    return checked_spec(path)[0]


def load_model(spec: Spec, name: str, sizes: Mapping[str, int], *, meta: bool = True, **defaults: int) -> Built:
    """The model and its example, at the sizes asked for; ``defaults`` are the sizes of a transformers example.

    With ``meta`` the model has no weights where that can be asked for.
    Raises PlacementError where the model fails, and usage errors where a name or a size is unknown.
    """
    dims = {str(n): tuple(map(str, line.dims)) for line in spec.inputs if line.dims is not None for n in line.names}
    known = list(dict.fromkeys(dim for named in dims.values() for dim in named))
    for size in sizes:
        if size not in known:
            close = near(size, known)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known) or 'none'}"
            raise click.BadParameter(f"no input line of {spec.file} names a dim {size!r}: {hint}", param_hint="--size")
    from placement import models  # noqa: PLC0415 - needs torch

    try:
        with of_the_model(name):
            built = models.build(name, sizes, meta=meta, **defaults)
    except models.ModelNameError as error:
        raise click.BadParameter(str(error), param_hint="--model") from error
    except (PlacementError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise _failed(name, error) from error
    return models.Built(built.model, models.resized(built.example, dims, sizes)) if sizes else built


@contextmanager
def of_the_model(name: str) -> Generator[None]:
    """Around code of the model: what it prints is no part of an answer, and where it exits it has failed."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        raise _failed(name, error) from error


def _failed(name: str, error: BaseException) -> PlacementError:
    text = f"{name} failed: {type(error).__name__}: {error}"
    hint = "keep what a script does, such as parsing arguments, behind: if __name__ == '__main__'"
    hint = hint if isinstance(error, SystemExit) else None
    return PlacementError([Diagnostic("PLC404", text, model_line=_last_line(error), hint=hint)])


def _last_line(error: BaseException) -> str | None:
    """Where it was raised: the text that is no Python, else the last line that is neither ours nor the importer's."""
    if isinstance(error, SyntaxError) and error.filename is not None and error.lineno is not None:
        return f"{error.filename}:{error.lineno}"
    ours = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
    place, trace = None, error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((ours, "<frozen ")):
            place = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


@undisturbed()
def make_plan(spec: Spec, target: Target, status: Status) -> tuple[Plan, Built]:
    """The plan for the target, and the model that it is for. Raises PlacementError."""
    built = load_model(spec, target.needed(), target.sizes)
    from placement import api  # noqa: PLC0415 - needs torch

    status.say("compiling")
    sizes = target.sizes or None
    with of_the_model(target.needed()):
        plan = api.plan(built.model, target.mesh, spec, example=built.example, sizes=sizes, say=status.say)
    return plan, built


def show_stages(plan: Plan, target: Target) -> None:
    """What each stage took, on stderr, where it is asked for."""
    if target.verbose:
        show([f"stages: {', '.join(f'{name} {seconds:.2f}s' for name, seconds in plan.stages.items())}"], err=True)


def write(text: str, output: str | None) -> None:
    """Text to a file or stdout, with one final line end. Raises Failed."""
    if output is None:
        click.echo(text.rstrip("\n"))
        return
    try:
        with open(output, "w", encoding="utf-8") as stream:
            stream.write(text.rstrip("\n") + "\n")
    except OSError as error:
        raise Failed(f"{output}: {error.strerror}") from error
