"""Asks the process that has the model, one spec at a time; a newer text of a spec takes the older one's place."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import PurePath
from typing import Any, Self, cast

from placement.editor.knowledge import Answer, Known, Request
from placement.lang.diagnostics import Diagnostic

LENGTH = 8  # of a message's length, as in ``worker``


@dataclass(frozen=True, slots=True)
class Settings:
    """What the editor says of the model that its specs are for. ``timeout`` is in seconds, loading included."""

    model: str | None = None
    mesh: Mapping[str, int] | None = None
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    files: tuple[str, ...] = ("*",)
    timeout: float = 300.0

    @classmethod
    def of(cls, options: object) -> Self:
        """The settings in ``initializationOptions``. Raises ValueError with what is wrong in them."""
        if options is None:
            return cls()
        if not isinstance(options, Mapping):
            raise ValueError("initializationOptions is no object")  # noqa: TRY004 - one kind of error for all of them
        given = cast("Mapping[str, Any]", options)
        if unknown := sorted(set(given) - {"model", "mesh", "sizes", "files", "timeout"}):
            raise ValueError(f"unknown setting '{unknown[0]}': there are model, mesh, sizes, files, timeout")
        model, files, timeout = given.get("model"), given.get("files", "*"), given.get("timeout", 300)
        if not isinstance(model, str | None):
            raise ValueError("'model' is a name: MODULE:CALLABLE, FILE.py:CALLABLE or hf:CONFIG.json")  # noqa: TRY004
        if not isinstance(timeout, int | float) or timeout <= 0:
            raise ValueError("'timeout' is a number of seconds")
        globs = [files] if isinstance(files, str) else files
        if not isinstance(globs, list | tuple) or not all(isinstance(glob, str) for glob in cast("list[Any]", globs)):
            raise ValueError("'files' is a glob or a list of globs")
        mesh = None if given.get("mesh") is None else _sizes("mesh", given["mesh"])
        sizes = _sizes("sizes", given.get("sizes") or {})
        return cls(model or None, mesh, sizes, tuple(cast("list[str]", globs)), float(timeout))

    def speaks_of(self, file: str, folder: str) -> bool:
        """Whether there is a model, and it is the one of a spec. Globs are seen from ``folder``."""
        path = PurePath(file)
        inside = path.relative_to(folder) if folder and path.is_relative_to(folder) else path
        return self.model is not None and any(fnmatch(inside.as_posix(), glob) for glob in self.files)


def _sizes(name: str, given: object) -> dict[str, int]:
    entries: Mapping[Any, Any] = cast("Mapping[Any, Any]", given) if isinstance(given, Mapping) else {"": ""}
    for key, value in entries.items():
        if not (isinstance(key, str) and type(value) is int and value > 0):
            raise ValueError(f"'{name}' is an object of whole numbers such as {{\"tp\": 4}}")
    return dict(entries)


class Planner:
    """Holds the process; ``done(file, version, answer)`` is called in the event loop for each newest request."""

    def __init__(self, settings: Settings, folder: str, done: Callable[[str, int, Answer], None]) -> None:
        self.settings = settings
        self.folder = folder
        self._done = done
        self._waiting: dict[str, tuple[int, Request]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    def ask(self, version: int, request: Request) -> None:
        """Have a spec planned; what was asked of it before and has not begun is dropped."""
        self._waiting.pop(request.file, None)
        self._waiting[request.file] = version, request
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def forget(self, file: str) -> None:
        """A spec was closed."""
        self._waiting.pop(file, None)

    def stop(self) -> None:
        """End the process: for good, or until something is asked again, which then meets the model as it is now."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()

    async def _run(self) -> None:
        while self._waiting:
            file = next(iter(self._waiting))
            version, request = self._waiting.pop(file)
            answer = await self._answer(request)
            if file not in self._waiting:
                self._done(file, version, answer)

    async def _answer(self, request: Request) -> Answer:
        try:
            async with asyncio.timeout(self.settings.timeout):
                return await self._exchange(request)
        except TimeoutError:
            self._end()
            text = f"{self.settings.model} was not planned in {self.settings.timeout:g} s"
            return Answer((Diagnostic("PLC404", text, hint="the setting 'timeout' gives it longer"),), Known())
        except (asyncio.IncompleteReadError, ConnectionError, OSError):
            code = await self._process.wait() if self._process is not None else None
            self._end()
            text = f"the process that has {self.settings.model} ended" + ("" if code is None else f" with code {code}")
            return Answer((Diagnostic("PLC404", text),), Known())

    async def _exchange(self, request: Request) -> Answer:
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        packed = pickle.dumps(request)
        process.stdin.write(len(packed).to_bytes(LENGTH, "big") + packed)
        await process.stdin.drain()
        head = await process.stdout.readexactly(LENGTH)
        packed = await process.stdout.readexactly(int.from_bytes(head, "big"))
        return pickle.loads(packed)  # noqa: S301 - from the process that we started

    async def _start(self) -> asyncio.subprocess.Process:
        settings = {"model": self.settings.model, "mesh": self.settings.mesh, "sizes": self.settings.sizes}
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # the folder's modules are for the model, not for what the worker itself imports
            "-m",
            "placement.editor.worker",
            json.dumps(settings),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=self.folder or None,
        )
