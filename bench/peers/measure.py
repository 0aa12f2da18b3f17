"""What one step sends and saves, counted in one process on a fake group; and what it takes."""

from __future__ import annotations

import linecache
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from bench.peers.sides import Side

# What a collective is called by, in the two families of ops that torch has for them.
KINDS = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
}
_NOT_SENT = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


@contextmanager
def fake_world(n: int) -> Iterator[None]:
    """A group of ``n`` ranks of which only this one, the first, is there: collectives send nothing."""
    dist.init_process_group("fake", rank=0, world_size=n, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Counting(TorchDispatchMode):
    """Counts collectives by (phase, kind)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.phase = "forward"

    def turn(self) -> None:
        """From here on it is the backward."""
        self.phase = "backward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        space, _, name = func.name().partition("::")
        name = name.split(".")[0]
        if space in ("c10d", "_c10d_functional", "c10d_functional", "_dtensor") and name not in _NOT_SENT:
            self.counts[self.phase, KINDS.get(name, name)] += 1
        return func(*args, **(kwargs or {}))


def collectives(side: Side) -> Counter[tuple[str, str]]:
    """How many of a kind a step sends, by (phase, kind); a reduction after the backward counts as backward's."""
    mode = _Counting()
    with mode:
        side.step(mode.turn)
    return mode.counts


@dataclass(frozen=True, slots=True)
class Saved:
    """One storage kept for the backward: the tensor's shape, the storage's bytes, and who saved it first."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    site: str


def saved(side: Side, given: Iterable[Tensor]) -> list[Saved]:
    """The storages that a forward keeps; parameters, buffers and the inputs ``given`` are left out."""
    known = {_local(p).untyped_storage().data_ptr() for p in side.parameters.values()}
    known |= {_local(b).untyped_storage().data_ptr() for b in side.module.buffers()}
    known |= {x.untyped_storage().data_ptr() for x in given}
    found: dict[int, Saved] = {}
    alive: list[Tensor] = []  # so that no memory is used twice

    def pack(x: Tensor) -> Tensor:
        own = _local(x)
        storage = own.untyped_storage()
        alive.append(own)
        if storage.data_ptr() not in known and storage.data_ptr() not in found:
            found[storage.data_ptr()] = Saved(tuple(own.shape), own.dtype, storage.nbytes(), _site())
        return x

    with side.around(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        side.forward()
    return list(found.values())


def _local(x: Tensor) -> Tensor:
    x = x.detach()
    if isinstance(x, DTensor):
        x = x._local_tensor  # noqa: SLF001 - without a function in the graph
    return x.elem if isinstance(x, AsyncCollectiveTensor) else x


def _site() -> str:
    """The line of a model or of emitted text that runs now."""
    frame = sys._getframe(2)  # noqa: SLF001
    while frame is not None and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    if frame is None:
        return ""
    path = frame.f_code.co_filename
    return f"{Path(path).name}:{frame.f_lineno} {linecache.getline(path, frame.f_lineno).strip()}"


def seconds(
    sides: Iterable[Side],
    rounds: int,
    *,
    meet: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Times of steps that take turns, after two that are not counted; ``meet`` comes before each."""
    found: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(rounds + 2):
        for side in sides:
            meet()
            started = clock()
            side.step()
            took = clock() - started
            if number > 1:
                found[side.name].append(took)
    return found
