"""Processes that talk over gloo, forked where torch is imported already, and kept alive between tests.

    pool = GlooPool(2)
    pool.run(function, *args)     # [function(*args) on rank 0, on rank 1]

Functions are pickled by name, so they stand at the top level of an importable module. They may use
``torch.distributed`` at once.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# After one rank has failed, how long the others have to report the same before they are ended.
_GRACE = 3.0


@functools.cache
def warm_context() -> ForkServerContext:
    """Starts processes as forks of one that has imported ``tests.warm``: importing torch anew takes seconds each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.warm"])
    with contextlib.chdir(ROOT):  # where the server looks for the module
        forkserver.ensure_running()
    return context


class RankFailure(Exception):
    """An exception in a rank, with its traceback as text."""


class RankEnded(RuntimeError):
    """A rank's process ended before it answered."""


class GlooPool:
    """``n`` processes of one gloo group. A failure that leaves ranks waiting ends all; the next run starts new ones."""

    def __init__(self, n: int, timeout: float = 120.0) -> None:
        self.n = n
        self.timeout = timeout
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on every rank; returns what each returned.

        Raises:
            Exception: what the first failing rank raised, from a ``RankFailure`` with its traceback.
            TimeoutError: a rank did not answer in time.
        """
        if not self._processes:
            self._start()
        job = pickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(job)
        answers = self._collect()
        failed = {rank: answer for rank, answer in answers.items() if not answer[0]}
        if len(answers) < self.n or any(isinstance(error, RankEnded) for _, error, _ in answers.values()):
            self.close()
        if failed:
            rank, (_, error, text) = min(failed.items())
            error.add_note(f"in gloo rank {rank}")
            raise error from RankFailure(f"in gloo rank {rank}\n{text}")
        if len(answers) < self.n:
            late = sorted(set(range(self.n)) - set(answers))
            raise TimeoutError(f"ranks {late} did not answer in {self.timeout} s")
        return [answers[rank][1] for rank in range(self.n)]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        context = warm_context()
        for rank in range(self.n):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.n, store, self.timeout), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self) -> dict[int, tuple[bool, Any, str]]:
        """The answers by rank; those that come in time, or soon after a failure."""
        answers: dict[int, tuple[bool, Any, str]] = {}
        deadline = time.monotonic() + self.timeout
        while len(answers) < self.n:
            left = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(left, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # pyright: ignore[reportArgumentType]
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())  # pyright: ignore[reportAttributeAccessIssue]
                except EOFError:
                    answers[rank] = (False, RankEnded("the process ended"), "")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return answers


def _serve(pipe: Connection, rank: int, n: int, store: str, timeout: float) -> None:
    """A rank's process: join the group, then answer jobs until the pipe closes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, n),
        rank=rank,
        world_size=n,
        timeout=dt.timedelta(seconds=timeout),
    )
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            function, args = pickle.loads(job)
            answer = pickle.dumps((True, function(*args), ""))
        except BaseException as error:  # noqa: BLE001 - handed to the caller's process
            answer = _failure(error)
        pipe.send_bytes(answer)


def _failure(error: BaseException) -> bytes:
    text = traceback.format_exc()
    try:
        # Some exceptions pickle but do not load: try both.
        answer = pickle.dumps((False, error, text))
        pickle.loads(answer)
    except Exception:  # noqa: BLE001 - whatever a class's pickling raises
        answer = pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}"), text))
    return answer
