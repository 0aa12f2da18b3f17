"""The program on real processes, one for each rank, started here and never waited for without end."""

from __future__ import annotations

import datetime as dt
import faulthandler
import math
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from placement.lang.diagnostics import Diagnostic, PlacementError
from placement.verify import sides
from placement.verify.compare import Parts
from placement.verify.sides import Task
from placement.verify.training import Objective

__all__ = ["ProcessFailure", "on_processes"]

_TICK = 0.05
_GRACE = 2.0  # after one rank has failed, how long the others have to report what they saw
_DUMPING = 5.0  # ranks that hang write their tracebacks this long before they are ended
_START = 120.0  # how long importing torch may take at least: a busy machine is no fault of the ranks


class ProcessFailure(RuntimeError):
    """A rank's process raised, ended or hung. The message names the ranks and has their tracebacks."""


@dataclass(frozen=True, slots=True)
class _Job:
    """What a rank is told besides the task, which it reads from ``task.pkl`` in ``folder``."""

    folder: str
    sizes: Mapping[str, int]
    backend: str
    timeout: float


def on_processes(
    task: Task,
    sizes: Mapping[str, int],
    backend: str,
    objective: Objective,
    *,
    timeout: float,
    say: Callable[[str], None],
) -> list[Parts]:
    """Each rank's tensors, in rank order, from processes that this call starts and ends.

    Raises:
        PlacementError: the model or the example does not pickle.
        ProcessFailure: a rank raised or ended, or no rank got any further for ``timeout`` seconds.
    """
    n = math.prod(sizes.values())
    with tempfile.TemporaryDirectory(prefix="placement-verify-") as folder:
        try:
            (Path(folder) / "task.pkl").write_bytes(pickle.dumps((task, objective)))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            message = f"the model cannot be sent to processes: {error}"
            hint = "classes and functions that the model holds must be at the top level of a module"
            raise PlacementError([Diagnostic("PLC404", message, hint=hint)]) from error
        job = _Job(folder, dict(sizes), backend, timeout)
        context: Any = mp.get_context("spawn")
        processes = [context.Process(target=_rank, args=(rank, n, job), daemon=True) for rank in range(n)]
        for process in processes:
            process.start()
        try:
            _wait(processes, Path(folder), timeout, say)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [pickle.loads((Path(folder) / f"{rank}.parts").read_bytes()) for rank in range(n)]  # noqa: S301 - written by our own ranks


def _wait(processes: list[Any], folder: Path, timeout: float, say: Callable[[str], None]) -> None:
    """Until all are done. Raises ProcessFailure as soon as one has failed, or when none gets any further."""
    stages: list[str] = []
    since = time.monotonic()
    while any(process.exitcode is None for process in processes):
        if any(process.exitcode not in (None, 0) for process in processes):
            end = time.monotonic() + _GRACE
            while time.monotonic() < end and any(process.exitcode is None for process in processes):
                time.sleep(_TICK)
            break
        now = [_stage(folder, rank) for rank in range(len(processes))]
        if now != stages:
            stages, since = now, time.monotonic()
            say(f"{len(processes)} processes: {now[0]}")
        started = all((folder / f"{rank}.stage").exists() for rank in range(len(processes)))
        if time.monotonic() - since > (timeout if started else max(timeout, _START)):
            _hung(processes, folder, timeout)
        time.sleep(_TICK)
    if any(process.exitcode for process in processes):
        raise ProcessFailure(_ended(processes, folder))


def _ended(processes: list[Any], folder: Path) -> str:
    """What each failed rank had to say: first those that were ended, since others only report lost connections."""
    failed = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}
    killed = {rank: code for rank, code in failed.items() if not (folder / f"{rank}.error").exists()}
    lines = [
        f"rank {rank} of {len(processes)} {_how(code)} while {_stage(folder, rank)}" for rank, code in killed.items()
    ]
    raised = [rank for rank in failed if rank not in killed]
    for rank in raised if not killed else ():
        text = (folder / f"{rank}.error").read_text(encoding="utf-8")
        lines.append(f"rank {rank} of {len(processes)} failed while {_stage(folder, rank)}:\n{text.rstrip()}")
        if len(raised) > 1:
            others = ", ".join(str(r) for r in raised if r != rank)
            lines.append(f"so did ranks {others}" if len(raised) > 2 else f"so did rank {others}")
        break
    return "\n".join(lines)


def _how(code: int) -> str:
    if code < 0:
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"
    return f"exited with status {code}"


def _hung(processes: list[Any], folder: Path, timeout: float) -> None:
    """Have the ranks that still run write where they are, and raise."""
    hanging = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    if hasattr(signal, "SIGUSR1"):
        for rank in hanging:
            if (folder / f"{rank}.trace").exists():  # the handler is installed: the signal does not end it
                os.kill(processes[rank].pid, signal.SIGUSR1)
    end = time.monotonic() + _DUMPING
    while time.monotonic() < end and not all(_size(folder / f"{rank}.trace") for rank in hanging):
        time.sleep(_TICK)
    time.sleep(10 * _TICK)  # what has begun to be written is complete by then
    lines = [f"no progress for {timeout:g} s: ranks {', '.join(map(str, hanging))} of {len(processes)} still run"]
    for rank in hanging:
        trace = folder / f"{rank}.trace"
        text = trace.read_text(encoding="utf-8").rstrip() if _size(trace) else "(no traceback)"
        lines.append(f"rank {rank}, {_stage(folder, rank)}:\n{text}")
    raise ProcessFailure("\n".join(lines))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _stage(folder: Path, rank: int) -> str:
    try:
        return (folder / f"{rank}.stage").read_text(encoding="utf-8") or "starting"
    except OSError:
        return "starting"


# -- in a rank's process ----------------------------------------------------------------------------


def _rank(rank: int, n: int, job: _Job) -> None:
    folder = Path(job.folder)
    trace = (folder / f"{rank}.trace").open("w", encoding="utf-8")
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=trace)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it ends the ranks
    try:
        _run(rank, n, job, folder, lambda text: _note(folder / f"{rank}.stage", text))
    except BaseException:  # noqa: BLE001 - the parent reports it, whatever it is
        _note(folder / f"{rank}.error", traceback.format_exc())
        os._exit(1)  # without handlers, which may wait for the other ranks


def _note(path: Path, text: str) -> None:
    """Written whole or not at all: the parent may read at any time."""
    new = path.with_suffix(path.suffix + "~")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def _run(rank: int, n: int, job: _Job, folder: Path, say: Callable[[str], None]) -> None:
    say("starting")
    kind = "cuda" if job.backend == "nccl" else "cpu"
    torch.set_num_threads(1)  # n processes share the cores
    if kind == "cuda":
        torch.cuda.set_device(rank)
    task: Task
    objective: Objective
    task, objective = pickle.loads((folder / "task.pkl").read_bytes())  # noqa: S301 - written by the parent
    store = dist.FileStore(str(folder / "store"), n)
    limit = dt.timedelta(seconds=job.timeout + _START)  # the parent, which sees all ranks, tells more of a hang
    say("joining the others")
    dist.init_process_group(job.backend, store=store, rank=rank, world_size=n, timeout=limit)
    mesh = init_device_mesh(kind, tuple(job.sizes.values()), mesh_dim_names=tuple(job.sizes))
    say("compiling")
    made = sides.emitted(task, kind)
    say("training")
    parts = sides.on_this_rank(task, made, mesh, objective)
    (folder / f"{rank}.parts").write_bytes(pickle.dumps(parts))
    dist.barrier()  # no process leaves while another still reads from it
    dist.destroy_process_group()
