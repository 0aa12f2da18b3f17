"""The command line: ``placement check | explain | emit | verify``.

Nothing heavy is imported until a command needs it: ``--help`` and ``check`` without a model start at once.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from placement import __version__
from placement.lang.codes import CODES
from placement.lang.diagnostics import Diagnostic, PlacementError, near, render
from placement.terminal import PLAIN_WIDTH, Status, colored, show, width

if TYPE_CHECKING:
    from types import TracebackType

    from placement.lang.spec import Spec
    from placement.models import Built
    from placement.solver.plan import Plan

FINE, AT_FAULT, USAGE, OUR_BUG, INTERRUPTED = 0, 1, 2, 3, 130
_VERIFY_SIZES = {"batch": 2, "seq": 32}  # of a transformers example; explain prices a long sequence instead

Command = TypeVar("Command", bound=Callable[..., Any])


def main() -> None:
    """Run the command line and exit: 0 fine, 1 spec or model at fault, 2 usage, 3 our own bug."""
    sys.exit(run())


def run(args: list[str] | None = None) -> int:
    """Run one command and return its exit code; everything that is wrong is told on stderr."""
    try:
        result = cli.main(args=args, prog_name="placement", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("\ninterrupted", err=True)
        return INTERRUPTED
    except PlacementError as error:
        click.echo(render(error.diagnostics, error.sources, color=colored(sys.stderr), width=width()), err=True)
        return AT_FAULT
    except BrokenPipeError:  # `placement explain ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
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


class _Failed(click.ClickException):
    """Something outside of the spec went wrong, and not through a bug of ours."""

    exit_code = AT_FAULT

    def show(self, file: Any = None) -> None:
        """As diagnostics are shown: lower case, without click's capital."""
        click.echo(f"error: {self.format_message()}", err=True, file=file)


# -- arguments --------------------------------------------------------------------------------------


class _Sizes(click.ParamType[dict[str, int]]):
    """``tp=8,dp=2``."""

    name = "name=n,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
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


def _common(command: Command) -> Command:
    """The options that every command has."""
    options = [
        click.option("--model", metavar="NAME", help="MODULE:CALLABLE, FILE.py:CALLABLE or hf:CONFIG.json"),
        click.option("--mesh", type=_Sizes(), help="Ranks on each axis: tp=8."),
        click.option("--size", "sizes", type=_Sizes(), help="Sizes of dims named on input lines: batch=1,seq=4096."),
        click.option("-v", "--verbose", is_flag=True, help="Show what each stage took."),
        click.option("--debug", is_flag=True, help="Show a traceback where placement itself fails."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(__version__, prog_name="placement", message="%(prog)s %(version)s")
def cli() -> None:
    """Placements as types, collectives as conversions.

    A spec (.plc) says how some values of a model lie on a mesh; placement finds the rest.
    """


@cli.command()
@click.argument("spec")
@_common
def check(
    spec: str, model: str | None, mesh: dict[str, int] | None, sizes: dict[str, int] | None, verbose: bool, debug: bool
) -> int:
    """Find what is wrong in SPEC, alone or with a model."""
    del debug
    read = _read(spec)
    if model is None:
        if mesh or sizes:
            raise click.UsageError("--mesh and --size need --model: without one only the text is checked")
        show([f"{spec}: {len(read.statements)} statements, nothing wrong; --model holds them against a model"])
        return FINE
    with Status("loading the model") as status:
        built = _load(read, model, sizes or {}, meta=True)
        plan = _plan(read, built, mesh, sizes, status)
    show(_fine(plan, type(built.model).__name__, spec))
    _stages(plan, verbose)
    return FINE


@cli.command()
@click.argument("spec")
@_common
@click.option("--format", "form", type=click.Choice(["text", "json", "html", "dot"]), default="text", show_default=True)
@click.option("-o", "--output", type=click.Path(dir_okay=False, writable=True), help="A file instead of stdout.")
def explain(
    spec: str,
    model: str | None,
    mesh: dict[str, int] | None,
    sizes: dict[str, int] | None,
    verbose: bool,
    debug: bool,
    form: str,
    output: str | None,
) -> int:
    """Say which collectives SPEC leads to, where, how much they send, and why.

    SPEC may also be a diagnostic's code, such as PLC204: its page is shown.
    """
    del debug
    if re.fullmatch(r"PLC\d{3}", spec) and not Path(spec).exists():
        click.echo(_page(spec).rstrip())
        return FINE
    read = _read(spec)
    name = _needed(model)
    with Status("loading the model") as status:
        plan = _plan(read, _load(read, name, sizes or {}, meta=True), mesh, sizes, status)
        status.say("explaining")
        from placement import report  # noqa: PLC0415 - needs torch

        if form == "text":
            to_terminal = output is None
            color, columns = to_terminal and colored(sys.stdout), width() if to_terminal else PLAIN_WIDTH
            text = report.explain_text(plan, columns, color=color, verbose=verbose)
        else:
            text = {"json": report.to_json, "html": report.to_html, "dot": report.to_dot}[form](plan)
    _write(text, output)
    if form != "text":
        _stages(plan, verbose)
    return FINE


@cli.command()
@click.argument("spec")
@_common
@click.option("-o", "--output", type=click.Path(dir_okay=False, writable=True), help="A file instead of stdout.")
def emit(
    spec: str,
    model: str | None,
    mesh: dict[str, int] | None,
    sizes: dict[str, int] | None,
    verbose: bool,
    debug: bool,
    output: str | None,
) -> int:
    """Write the distributed program as Python that needs torch and placement.runtime."""
    del debug
    read = _read(spec)
    name = _needed(model)
    with Status("loading the model") as status:
        plan = _plan(read, _load(read, name, sizes or {}, meta=True), mesh, sizes, status)
        status.say("emitting")
        from placement.emit.source import write  # noqa: PLC0415 - needs torch

        source = write(plan, read.file)
    _write(source.text, output)
    if output is not None:
        count = source.text.count("\n")
        click.echo(f"{output}: {count} lines, root class {source.root}", err=True)
    _stages(plan, verbose)
    return FINE


@cli.command()
@click.argument("spec")
@_common
@click.option("--backend", type=click.Choice(["simulated", "gloo", "nccl"]), default="simulated", show_default=True)
@click.option("--dtype", type=click.Choice(["float64", "float32", "bfloat16"]), default="float64", show_default=True)
@click.option("--batch", type=click.IntRange(1), help="Short for --size batch=N.")
@click.option("--seq", type=click.IntRange(1), help="Short for --size seq=N.")
@click.option("--steps", type=click.IntRange(0), default=5, show_default=True, help="AdamW steps.")
@click.option("--tolerance", type=click.FloatRange(0, min_open=True), help="Largest relative error that passes.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds without progress until processes are ended.",
)
def verify(
    spec: str,
    model: str | None,
    mesh: dict[str, int] | None,
    sizes: dict[str, int] | None,
    verbose: bool,
    debug: bool,
    backend: str,
    dtype: str,
    batch: int | None,
    seq: int | None,
    steps: int,
    tolerance: float | None,
    timeout: float,
) -> int:
    """Compare the program on n ranks with the model on one device."""
    del debug
    read = _read(spec)
    wanted = {**(sizes or {}), **{k: v for k, v in (("batch", batch), ("seq", seq)) if v is not None}}
    with Status("loading the model") as status:
        started = time.perf_counter()
        built = _load(read, _needed(model), wanted, meta=False)
        import torch  # noqa: PLC0415 - a second of start-up

        from placement.runtime.errors import MeshError, SizeError, StateError  # noqa: PLC0415
        from placement.verify import ProcessFailure  # noqa: PLC0415
        from placement.verify import verify as compare  # noqa: PLC0415

        try:
            parity = compare(
                built.model,
                mesh,
                read,
                example=built.example,
                backend=backend,
                dtype=getattr(torch, dtype),
                steps=steps,
                tolerance=tolerance,
                timeout=timeout,
                progress=status.say,
            )
        except (ProcessFailure, MeshError, SizeError, StateError) as error:
            raise _Failed(str(error)) from error
        except ValueError as error:
            if backend == "nccl" and "nccl" in str(error):
                raise click.UsageError(str(error)) from error
            raise
    click.echo(str(parity))
    if verbose:
        click.echo(f"took {time.perf_counter() - started:.1f} s", err=True)
    return FINE if parity.ok else AT_FAULT


# -- what commands share ----------------------------------------------------------------------------


def _read(path: str) -> Spec:
    """The spec, free of faults that show without a model. Raises PlacementError."""
    from placement.lang import check as check_spec  # noqa: PLC0415 - lark takes a moment, --help needs none
    from placement.lang import load  # noqa: PLC0415

    spec = load(path)
    if faults := check_spec(spec):
        raise PlacementError(faults, spec.sources)
    return spec


def _needed(model: str | None) -> str:
    if model is None:
        raise click.UsageError("Missing option '--model'.")
    return model


def _load(spec: Spec, name: str, sizes: Mapping[str, int], *, meta: bool) -> Built:
    """The model and its example, at the sizes asked for."""
    dims = {str(n): tuple(map(str, line.dims)) for line in spec.inputs if line.dims is not None for n in line.names}
    known = list(dict.fromkeys(dim for named in dims.values() for dim in named))
    for size in sizes:
        if size not in known:
            close = near(size, known)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known) or 'none'}"
            raise click.BadParameter(f"no input line of {spec.file} names a dim {size!r}: {hint}", param_hint="--size")
    from placement import models  # noqa: PLC0415 - needs torch

    try:
        defaults = {} if meta else _VERIFY_SIZES
        built = models.build(name, sizes, meta=meta, **defaults)
    except models.ModelNameError as error:
        raise click.BadParameter(str(error), param_hint="--model") from error
    except (PlacementError, KeyboardInterrupt):
        raise
    except Exception as error:
        where = _last_line(error.__traceback__)
        text = f"{name} failed: {type(error).__name__}: {error}"
        raise PlacementError([Diagnostic("PLC404", text, model_line=where)]) from error
    return models.Built(built.model, models.resized(built.example, dims, sizes)) if sizes else built


def _last_line(trace: TracebackType | None) -> str | None:
    place = None
    while trace is not None:
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _plan(
    spec: Spec, built: Built, mesh: Mapping[str, int] | None, sizes: Mapping[str, int] | None, status: Status
) -> Plan:
    from placement import api  # noqa: PLC0415 - needs torch

    status.say("compiling")
    return api.plan(built.model, mesh, spec, example=built.example, sizes=sizes)


def _fine(plan: Plan, model: str, spec: str) -> list[str]:
    """One calm sentence on what was checked, and what a reader of the spec may not be aware of."""
    from placement.report.fold import patterns  # noqa: PLC0415 - needs torch
    from placement.report.units import plural  # noqa: PLC0415

    bound = plan.bound
    parameters = [p for p in plan.graph.parameters if not p.is_buffer]
    cut = sum(1 for p in parameters if plan.produced[p.value].over)
    counts = ", ".join(
        [
            f"{plural(len(parameters), 'parameter')} ({cut} sharded)",
            plural(len(plan.graph.nodes), "op"),
            plural(len(plan.graph.outputs), "output"),
        ]
    )
    lines = [f"{spec} fits {model} on {plan.axis.name} = {plan.axis.n}: {counts}"]
    silent = [p.name for p in parameters if bound.parameters[p.value].span is None]
    if silent:
        named = ", ".join(patterns(silent, width() - 10))
        lines.append(f"note: no line places {plural(len(silent), 'parameter')}; used replicated: {named}")
    return lines + [f"note: {note}" for note in bound.notes]


def _page(code: str) -> str:
    """The page of a diagnostic: inside an installed package, beside the package in a checkout."""
    if code not in CODES:
        close = near(code, CODES)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise click.UsageError(f"there is no diagnostic {code}{hint}")
    package = Path(__file__).resolve().parent
    for folder in (package / "lang" / "pages", package.parent / "docs" / "diagnostics"):
        if (folder / f"{code}.md").is_file():
            return (folder / f"{code}.md").read_text(encoding="utf-8")
    return f"{code}: {CODES[code].title}"


def _stages(plan: Plan, verbose: bool) -> None:
    if verbose:
        show([f"stages: {', '.join(f'{name} {seconds:.2f}s' for name, seconds in plan.stages.items())}"], err=True)


def _write(text: str, output: str | None) -> None:
    if output is None:
        click.echo(text.rstrip("\n"))
        return
    try:
        Path(output).write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    except OSError as error:
        raise _Failed(f"{output}: {error.strerror}") from error


if __name__ == "__main__":
    main()
