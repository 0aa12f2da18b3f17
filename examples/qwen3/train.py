"""A Qwen3 under tensor and sequence parallelism: compile, explain, verify, then train beside one device.

Run it as ``python examples/qwen3/train.py``. It needs no GPU and no network: the ranks are processes on
this machine that talk over gloo, and the text is the help that comes with every Python.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def interrupted(*_: object) -> None:
    """Ctrl-C: leave by way of every ``finally``, without a traceback."""
    print("\ninterrupted", file=sys.stderr)
    sys.exit(130)


if __name__ == "__main__":
    # Before torch is imported, which takes seconds. The processes started below come by here as `__mp_main__`
    # and leave the signal to their parent.
    signal.signal(signal.SIGINT, interrupted)

import model as qwen3
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import placement

SPEC = os.path.relpath(Path(__file__).with_name("qwen3.plc"))  # relative: the explanation names its lines
BATCH, SEQ = 8, 128
AGREE = 1e-3  # in float32, rounding grows from step to step; a wrong gradient shows at once


def heading(text: str) -> None:
    """A line that begins a part of the demo."""
    print(f"\n== {text} ", "=" * max(0, 74 - len(text)), sep="", flush=True)


def batches(steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """The bytes of Python's own help on its syntax, cut at random; the same batches in every process."""
    from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte that only training reads

    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(2)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - SEQ, (BATCH, 1), generator=draw)
        input_ids = text[starts + torch.arange(SEQ)]
        yield {"input_ids": input_ids, "labels": input_ids.clone()}  # the model shifts the labels itself


def train(model: torch.nn.Module, steps: int, report: Callable[[float], None]) -> None:
    """An ordinary training loop. It does not know whether its model is distributed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in batches(steps):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        report(loss.item())


def train_rank(rank: int, ranks: int, rendezvous: str, steps: int, losses: Any) -> None:
    """One process of the distributed run; the first one sends its losses to the parent."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    model, example = qwen3.build(batch=BATCH, seq=SEQ)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    compiled = placement.compile(model, mesh, SPEC, example=example)
    train(compiled, steps, losses.put if rank == 0 else lambda _: None)
    dist.barrier()  # no process leaves while another still reads from it
    dist.destroy_process_group()


def train_ranks(ranks: int, steps: int) -> Iterator[float]:
    """Train on ``ranks`` processes and yield each step's loss as it comes.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a process failed; the message is its traceback.
    """
    losses: Any = mp.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory() as folder:
        with ignoring_interrupts():
            arguments = (ranks, str(Path(folder) / "rendezvous"), steps, losses)
            context = mp.spawn(train_rank, args=arguments, nprocs=ranks, join=False)
        try:
            done = False
            while not done:
                done = context.join(timeout=0.02)
                with contextlib.suppress(queue.Empty):
                    while True:
                        yield losses.get(timeout=0.1)
        finally:
            for process in context.processes:
                process.terminate()
                process.join()


@contextlib.contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Processes started inside leave Ctrl-C to this one, which ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def progress(text: str) -> None:
    """Show ``text`` in place of the last progress, where someone is watching."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="", flush=True)


def compare(ranks: int, steps: int) -> bool:
    """Train on one device, then on ``ranks`` processes, and print both columns of losses; whether they agree."""
    heading(f"train {steps} steps on one device and on {ranks} processes")
    model, _ = qwen3.build(batch=BATCH, seq=SEQ)
    expected: list[float] = []

    def record(loss: float) -> None:
        expected.append(loss)
        progress(f"one device: step {len(expected)} of {steps}")

    started = time.perf_counter()
    train(model, steps, record)
    progress("")
    print(f"one device took {time.perf_counter() - started:.1f} s; {ranks} processes start and compile ...", flush=True)

    started = time.perf_counter()
    worst = 0.0
    print(f"\nstep  one device  {ranks} processes  difference", flush=True)
    for step, (one, many) in enumerate(zip(expected, train_ranks(ranks, steps), strict=True), start=1):
        worst = max(worst, abs(one - many))
        print(f"{step:4}  {one:10.6f}  {many:11.6f}  {abs(one - many):10.1e}", flush=True)
    took = time.perf_counter() - started
    print(f"\nlargest difference {worst:.1e}, in float32: {'the losses agree' if worst <= AGREE else 'THEY DIFFER'}")
    print(f"{ranks} processes took {took:.1f} s, start-up included")
    return worst <= AGREE


def main() -> int:
    """Run the demo; 1 where the compiled program disagrees with one device."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=4, help="processes on the mesh axis tp (default 4)")
    parser.add_argument("--steps", type=int, default=30, help="training steps (default 30)")
    options = parser.parse_args()

    torch.set_num_threads(1)  # a model this small is slower on more, and each rank has one too
    started = time.perf_counter()
    mesh = placement.simulate(tp=options.ranks)
    heading(f"compile {Path(SPEC).name} for tp = {options.ranks}")
    model, example = qwen3.build(batch=BATCH, seq=SEQ)
    progress("compiling ...")
    compiled = placement.compile(model, mesh, SPEC, example=example)
    progress("")
    print(compiled.explain().rstrip())

    heading("verify every layer, gradient and step against one device, in float64")
    model, example = qwen3.build(batch=2, seq=32, dtype=torch.float64)
    parity = placement.verify(model, mesh, SPEC, example=example, progress=lambda text: progress(f"{text} ..."))
    progress("")
    print(parity)

    agree = compare(options.ranks, options.steps)
    print(f"the demo took {time.perf_counter() - started:.0f} s")
    return 0 if parity.ok and agree else 1


if __name__ == "__main__":
    sys.exit(main())
