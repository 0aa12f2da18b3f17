"""Of attention over a cut sequence: how far a side is from one device, what it sends, and what it takes.

All of it runs on a rank, whose default group is gloo's.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.peers.long_sides import MAKERS, Shape, Side, plain

_NOT_SENT = ("recv_", "wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


def wanted(shape: Shape) -> list[Tensor]:
    """The result of one device in float64 and its gradients of query, key and value."""
    parts = shape.drawn(torch.float64)
    for x in parts[:3]:
        x.requires_grad_()
    out = plain(*parts[:3])
    out.backward(parts[3])
    return [out.detach(), *(x.grad for x in parts[:3] if x.grad is not None)]


def errors(shape: Shape, name: str) -> dict[str, float | str]:
    """The largest error of a side in float32, forward and backward, relative to the largest element; or why not."""
    phase, found = "forward", {}
    want = wanted(shape)
    try:
        side = MAKERS[name]().take(shape.drawn(torch.float32))
        places = side.places(shape.seq)
        with side.around():
            out = side.attention(*side.given[:3])
            found[phase] = _apart(out.detach(), want[0][:, :, places])
            phase = "backward"
            out.backward(side.given[3])
        of_parts = zip(side.given[:3], want[1:], strict=True)
        found[phase] = max(_apart(x.grad, goal[:, :, places]) for x, goal in of_parts)
    except Exception as fault:  # noqa: BLE001 - whatever a library that is not made for CPUs raises
        found[phase] = f"{type(fault).__name__}: {(str(fault).splitlines() or [''])[0].split('. ')[0]}"
    return found


def _apart(got: Tensor | None, want: Tensor) -> float:
    if got is None or got.shape != want.shape:
        return float("inf")
    return float(((got.double() - want).abs().max() / want.abs().max()).nan_to_num(nan=float("inf")))


class _Counting(TorchDispatchMode):
    """Bytes that this rank sends to others, by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.phase = "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        name = name.split(".")[0]
        if space in ("c10d", "_c10d_functional", "c10d_functional") and name not in _NOT_SENT:
            self.sent[self.phase] += _to_others(name, args)
        return func(*args, **(kwargs or {}))


def _to_others(name: str, args: Any) -> int:
    """Bytes that leave this rank. Raises ValueError for a collective that no side has had so far."""
    n, rank = dist.get_world_size(), dist.get_rank()
    if name == "send":
        return sum(x.nbytes for x in args[0])
    if name == "all_gather_into_tensor":
        return args[0].nbytes * (n - 1)
    if name in ("alltoall_base_", "all_to_all_single"):
        x, splits = (args[1], args[4]) if name == "alltoall_base_" else (args[0], args[2])
        return x.nbytes * (n - 1) // n if not splits else x.nbytes - x.nbytes * splits[rank] // sum(splits)
    raise ValueError(f"what {name} sends is not known")


def sent(side: Side, *, back: bool) -> dict[str, int]:
    """Bytes that this rank sends, forward and backward."""
    mode = _Counting()
    with side.around(), mode:
        out = side.attention(*side.given[:3])
        mode.phase = "backward"
        if back:
            out.backward(side.given[3])
    return {phase: mode.sent[phase] for phase in ("forward", "backward")}


def _seconds(side: Side, *, back: bool) -> tuple[float, float]:
    """Of a forward, and of that with its backward."""
    for x in side.given[:3]:
        x.grad = None
    with side.around():
        dist.barrier()
        started = time.perf_counter()
        out = side.attention(*side.given[:3])
        forward = time.perf_counter() - started
        if back:
            out.backward(side.given[3])
        return forward, time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Measured:
    """Of a side on a rank: the seconds of forwards and of steps, round by round, and bytes sent by phase."""

    forward: list[float]
    step: list[float]
    sent: dict[str, int]


def measured(shape: Shape, names: dict[str, bool], rounds: int) -> dict[str, Measured]:
    """By name, of sides that take turns; two rounds come before those that count. names: whether it has a backward."""
    sides = {name: MAKERS[name]().take(shape.drawn(torch.float32)) for name in names}
    volumes = {name: sent(side, back=names[name]) for name, side in sides.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(rounds + 2):
        for name, side in sides.items():
            took = _seconds(side, back=names[name])
            if number > 1:
                times[name].append(took)
    return {name: Measured([f for f, _ in own], [s for _, s in own], volumes[name]) for name, own in times.items()}
