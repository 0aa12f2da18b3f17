"""``placement fmt``: the one layout of specs."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator

import click

from placement.commands.options import debug_option
from placement.commands.shared import AT_FAULT, FINE, STDIN, STDIN_NAME, Failed
from placement.lang.diagnostics import Diagnostic, PlacementError
from placement.lang.render import printable, render
from placement.terminal import colored, width


class _Outcome:
    """What became of the files."""

    def __init__(self) -> None:
        self.changed: list[str] = []
        self.kept = 0
        self.faults: list[Diagnostic] = []
        self.sources: dict[str, str] = {}


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--check", "only_check", is_flag=True, help="Write nothing; exit with 1 if a file would change.")
@click.option("--diff", is_flag=True, help="Write nothing; show what would change.")
@debug_option
def fmt(paths: tuple[str, ...], only_check: bool, diff: bool) -> int:
    """Lay out specs the one way.

    PATH is a spec, a folder with specs below it, or - for stdin to stdout. A file that does not parse stays as it is.
    """
    if STDIN in paths and len(paths) > 1:
        raise click.UsageError("- stands alone: the result of stdin goes to stdout")
    outcome = _Outcome()
    for path in _files(paths):
        try:
            _one(path, outcome, only_check=only_check, diff=diff)
        except PlacementError as error:
            outcome.faults += error.diagnostics
            outcome.sources |= error.sources
    if outcome.faults:
        text = render(outcome.faults, outcome.sources, color=colored(sys.stderr), width=width())
        click.echo(text, err=True)
    if paths != (STDIN,) or only_check:
        _tell(outcome, written=not (only_check or diff))
    return AT_FAULT if outcome.faults or (only_check and outcome.changed) else FINE


def _files(paths: tuple[str, ...]) -> Iterator[str]:
    """The files that the arguments name, each once. Hidden folders are left out, such as those of tools."""
    seen: set[str] = set()
    for path in paths:
        for file in _below(path) if os.path.isdir(path) else [path]:
            identity = os.path.realpath(file)
            if identity not in seen:
                seen.add(identity)
                yield file


def _below(folder: str) -> list[str]:
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [os.path.join(place, name) for name in sorted(files) if name.endswith(".plc")]
    return found


def _one(path: str, outcome: _Outcome, *, only_check: bool, diff: bool) -> None:
    """Format one file. Raises PlacementError where it cannot be read or does not parse."""
    from placement.lang.format import format_text  # noqa: PLC0415 - --help needs no parser

    file = STDIN_NAME if path == STDIN else path
    content = _content(path, file)
    before = content.decode("utf-8-sig")
    after = format_text(before, file)
    changed = after.encode() != content
    if changed:
        outcome.changed.append(file)
    else:
        outcome.kept += 1
    if diff:
        click.echo(_diff(before, after, file), nl=False)
    elif path == STDIN and not only_check:
        sys.stdout.buffer.write(after.encode())
        sys.stdout.buffer.flush()
    elif changed and not only_check:
        _replace(path, after)


def _content(path: str, file: str) -> bytes:
    """The bytes of a file that are UTF-8. Raises PlacementError where it cannot be read, or is not."""
    from placement.lang.parser import load, read_file  # noqa: PLC0415 - --help needs no parser

    try:
        content = sys.stdin.buffer.read() if path == STDIN else read_file(path)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        load(path)  # fails as well, and says why as a diagnostic
        raise
    try:
        content.decode()
    except UnicodeDecodeError:
        load(file, read=lambda _: content)
        raise
    return content


def _diff(before: str, after: str, file: str) -> str:
    import difflib  # noqa: PLC0415 - only this option needs it

    lines = difflib.unified_diff(_kept(before), _kept(after), file, f"{file} (formatted)")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _kept(text: str) -> list[str]:
    """Lines with their ends: what only LF ends, for all else is a difference to show."""
    return [line for line in text.replace("\n", "\n\0").split("\0") if line]


def _replace(path: str, text: str) -> None:
    """Put the text in the place of a file at once, so that no reader and no crash meets half of it. Raises Failed."""
    target = os.path.realpath(path)  # a link stays a link
    temporary = None
    try:
        status = os.stat(target)
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device, which a file would take the place of
            raise Failed(f"{path}: not a regular file")
        if not os.access(target, os.W_OK):
            raise PermissionError(13, "Permission denied")
        folder, name = os.path.split(target)
        beside = os.path.join(folder, f".{name[:200]}.{os.getpid()}.tmp")
        with open(beside, "xb", opener=_for_the_owner) as stream:
            temporary = beside
            stream.write(text.encode())
        os.chmod(temporary, stat.S_IMODE(status.st_mode))
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}") from error
    finally:
        if temporary is not None:
            os.unlink(temporary)


def _for_the_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _tell(outcome: _Outcome, *, written: bool) -> None:
    for file in outcome.changed:
        click.echo(f"{'formatted' if written else 'would format'} {printable(file)}", err=True)
    if not outcome.changed and not outcome.faults:
        click.echo("nothing to format" if outcome.kept else "no .plc files there", err=True)
