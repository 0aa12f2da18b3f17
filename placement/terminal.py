"""What commands show: how wide, in colour or not, and a line on the terminal while something takes long."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any, Self

import click

from placement.lang.render import printable

PLAIN_WIDTH = 80  # of files and pipes
_NARROWEST = 60
_PATIENCE = 2.0  # seconds until a status line appears


def width() -> int:
    """Columns to write for: the terminal's, 80 where there is none."""
    if sys.stdout is None or not sys.stdout.isatty():  # None: it is closed
        return PLAIN_WIDTH
    import shutil  # noqa: PLC0415 - only a terminal needs it, and it takes its time

    return max(shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns, _NARROWEST)


def colored(stream: Any) -> bool:
    """Whether to write ANSI styles to ``stream``: to a terminal whose user does not object."""
    return stream is not None and bool(stream.isatty()) and not os.environ.get("NO_COLOR")


def show(lines: Iterable[str], *, err: bool = False) -> None:
    """Write paragraphs wrapped to the width; paths stay whole."""
    import textwrap  # noqa: PLC0415 - --help and fmt show none

    for line in lines:
        options: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}
        for part in textwrap.wrap(printable(line), width(), subsequent_indent="  ", **options):
            click.echo(part, err=err)


class Status:
    """One line on a terminal's stderr that says what takes long; it is gone when the work is done."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = False
        self._started = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def say(self, what: str) -> None:
        """Another stage has begun."""
        self._what = what

    def __enter__(self) -> Self:
        if sys.stderr is not None and sys.stderr.isatty():
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt):  # the note is what `cli.run` tells
            error.add_note(f"while {self._what}, after {time.monotonic() - self._started:.0f} s: there is no result")
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _watch(self) -> None:
        if self._done.wait(_PATIENCE):
            return
        while not self._done.wait(0.25):
            text = f"{self._what} ... {time.monotonic() - self._started:.0f} s"
            sys.stderr.write(f"\r\x1b[K{text[: width() - 1]}")
            sys.stderr.flush()
            self._shown = True
