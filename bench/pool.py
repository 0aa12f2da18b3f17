"""What a pool of buffers for gathered inputs would save: a step with the allocator's tensors beside one with kept ones.

    python bench/pool.py --hidden 512 --seq 512

The emitted program has no such pool. Here a crude one is put in from outside: of every shape two tensors take turns for
what layers gather and are done with before the next but one. Both sides run the same program in two gloo processes.
Times are the processor's, the system's share for page faults included, which are all that a pool is to save.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from bench.peers import measure, sides
from bench.peers.models import Case
from placement.runtime import linears, sums
from placement.runtime.axis import MeshAxis
from tests.gloo import GlooPool

POOLED = "with a pool"


class Pool:
    """Two tensors of a kind, in turns, for what is gathered inside of the runtime's linear layers."""

    def __init__(self) -> None:
        self.kept: dict[object, list[Tensor]] = {}
        self.inside = 0

    @contextmanager
    def used(self) -> Iterator[None]:
        """Gathers take their results from here."""
        plain = MeshAxis._transport  # noqa: SLF001 - there is no public way to do what is not wanted

        def transport(axis: MeshAxis, step: Any, sent: Sequence[Tensor], *, own: bool, later: bool) -> Any:
            if not self.inside or step.kind != "all_gather":
                return plain(axis, step, sent, own=own, later=later)
            out = self.next(axis.size, sent[0])
            work = axis._group.all_gather(out, sent[0], later=later)  # noqa: SLF001 - as above
            if not later:
                work.wait()
            return (out,), work if later else None

        places = [(linears._Linears, "forward"), (linears._Linears, "backward"), (sums._Summed, "backward")]  # noqa: SLF001
        patched = [mock.patch.object(MeshAxis, "_transport", transport)]
        patched += [mock.patch.object(home, name, self.noting(getattr(home, name))) for home, name in places]
        for one in patched:
            one.start()
        try:
            yield
        finally:
            for one in patched:
                one.stop()

    def noting(self, function: Callable[..., Any]) -> Any:
        """The function, inside of which gathers are pooled."""

        def called(*args: Any) -> Any:
            self.inside += 1
            try:
                return function(*args)
            finally:
                self.inside -= 1

        return staticmethod(called)

    def next(self, n: int, x: Tensor) -> Tensor:
        """One for ``n`` blocks like ``x``."""
        shape = (n * x.shape[0], *x.shape[1:])
        pair = self.kept.setdefault((shape, x.dtype), [x.new_empty(shape), x.new_empty(shape)])
        pair.reverse()
        return pair[0]


def faults(side: sides.Side) -> int:
    """The page faults of a step, the median of some."""
    counts: list[int] = []
    for _ in range(9):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        side.step()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return int(statistics.median(counts))


def on_rank(case: Case, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of each step by side, and the page faults of one."""
    (plain,), _ = sides.made(case, [sides.OURS])
    pooled = dataclasses.replace(plain, name=POOLED, around=Pool().used)
    gradients: list[list[Tensor]] = []
    for side in (plain, pooled, pooled):
        side.step()
        gradients.append([p.grad.clone() for p in side.parameters.values() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(gradients[0], gradients[-1], strict=True)), "the pool is wrong"
    took = measure.seconds([plain, pooled], rounds, meet=dist.barrier, clock=time.process_time)
    return took, {side.name: faults(side) for side in (plain, pooled)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    pool = GlooPool(2, timeout=600)
    try:
        (took, pages), (other, _) = pool.run(on_rank, Case("qwen3", args.hidden, args.seq, 2, "tp+sp"), args.rounds)
    finally:
        pool.close()
    slowest = {name: list(map(max, took[name], other[name])) for name in took}
    for name, each in slowest.items():
        print(f"{name:12} {1e3 * statistics.median(each):8.1f} ms {pages[name]:6} page faults")
    ratios = sorted(b / a for a, b in zip(slowest[sides.OURS], slowest[POOLED], strict=True))
    quarter = len(ratios) // 4
    print(f"ratio {statistics.median(ratios):.3f}, quartiles {ratios[quarter]:.3f} and {ratios[-1 - quarter]:.3f}")


if __name__ == "__main__":
    main()
