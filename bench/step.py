"""A step of the emitted module beside what experts write: collectives, bytes saved, dispatch, gloo, torch.compile.

    python bench/step.py collectives                     # Qwen3 and Llama, TP and TP+SP, 2 ranks
    python bench/step.py saved --tp 4 --hidden 256 --seq 128
    python bench/step.py saved --mode tp+sp --tp 2 --model qwen3 --sites    # which line saves what
    python bench/step.py dispatch --rounds 100
    python bench/step.py gloo --hidden 256 --seq 128
    python bench/step.py compiled --model qwen3 --mode tp+sp

Every command first compares all sides in float64, in real processes, with transformers' model on one device: the loss
and every gradient (``--unchecked`` leaves that out). Steps are forward and backward, gradients final. Sides take
turns, and ratios are medians over rounds of the ratio within a round. ``collectives``, ``saved`` and ``dispatch`` run
in one process on a group whose other ranks are not there. Bytes are of unique storages that one rank keeps for the
backward, without parameters, buffers and inputs.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import click
import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist

from bench.peers import measure, sides
from bench.peers.models import FAMILIES, MODES, Case
from bench.peers.sides import OURS, Side
from tests.gloo import GlooPool

SHORT = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS", "all_to_all": "A2A"}
PEERS = (
    "expert",
    "DTensor",
    "spmd-types",
    "transformers",
    "megatron-core",
    "expert, own norms",
    "expert, lean",
    "expert, traced",
)
TARGETS = {
    "collectives": "no kind, either direction, more than the expert's",
    "saved": "of the expert's TP+SP 1.00 (0.95 with the model's own norms); of DTensor's 0.88 at tp 2, 0.78 at tp 4",
    "dispatch": "of the expert's 1.00; of DTensor's TP+SP 0.13",
    "gloo": "hidden >= 256, seq >= 128: of the expert's 1.03; of DTensor's 0.75 at hidden 256",
    "compiled": "of the compiled expert's 1.00",
}


def each(option: str, kind: Any, default: Any) -> Callable[[Any], Any]:
    """An option that may be given several times."""
    return click.option(option, multiple=True, type=kind, default=default, show_default=True)


def grid(command: Callable[..., None]) -> click.Command:
    """``command(cases, **more)`` with options for the grid."""
    options = [
        each("--model", click.Choice(list(FAMILIES)), list(FAMILIES)),
        each("--mode", click.Choice(MODES), list(MODES)),
        each("--hidden", int, [64]),
        each("--seq", int, [16]),
        each("--tp", int, [2]),
        click.option("--layers", default=4, show_default=True),
        click.option("--peer", "peers", multiple=True, type=click.Choice(PEERS), default=PEERS[:5], show_default=True),
        click.option("--unchecked", is_flag=True, help="Do not compare with one device first."),
    ]

    def run(
        *,
        model: tuple[str, ...],
        mode: tuple[Any, ...],
        hidden: tuple[int, ...],
        seq: tuple[int, ...],
        tp: tuple[int, ...],
        layers: int,
        peers: tuple[str, ...],
        unchecked: bool,
        **more: Any,
    ) -> None:
        points = itertools.product(model, hidden, seq, tp, mode)
        cases = [Case(m, h, s, n, how, layers=layers) for m, h, s, n, how in points]
        names = [OURS, *peers]
        _head(command.__name__)
        with _pools() as pool:
            if not unchecked:
                _check(cases, names, pool)
            command(cases, names, pool, **more)

    run.__doc__ = command.__doc__
    for option in reversed(options):
        run = option(run)
    for option in getattr(command, "options", ()):
        run = option(run)
    return click.command(command.__name__, help=command.__doc__)(run)


def taking(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """More options of a command."""

    def noted(command: Any) -> Any:
        command.options = options
        return command

    return noted


ROUNDS = click.option("--rounds", default=20, show_default=True)
Pools = Callable[[int], GlooPool]


class _pools:  # noqa: N801 - used as a function
    """Processes by number of ranks, ended together."""

    def __enter__(self) -> Pools:
        self.made: dict[int, GlooPool] = {}
        return lambda n: self.made.setdefault(n, GlooPool(n, timeout=600))

    def __exit__(self, *_: object) -> None:
        for pool in self.made.values():
            pool.close()


def _head(what: str) -> None:
    print(f"torch {torch.__version__}, one thread a rank; forward and backward, gradients final")
    print(f"target: {TARGETS[what]}")
    for name, package in (("spmd-types", "spmd_types"), ("megatron-core", "megatron")):
        if importlib.util.find_spec(package) is None:
            print(f"{name} is not installed: it did not run")
    print()


def _check(cases: list[Case], names: list[str], pool: Pools) -> None:
    """Print the worst error of each side, at one layer of hidden size 64: what is computed does not depend on size."""
    worst: dict[str, Any] = {}
    for family, mode, n in sorted({(case.family, case.mode, case.tp) for case in cases}):
        for found in pool(n).run(sides.errors, Case(family, tp=n, mode=mode, layers=1), names):  # pyright: ignore[reportArgumentType]
            for name, error in found.items():
                before = worst.get(name, 0.0)
                worst[name] = (
                    error if isinstance(error, str) else before if isinstance(before, str) else max(before, error)
                )
    print("float64, against one device, loss and every gradient, the largest relative error:")
    for name in tuple(names):
        error = worst.get(name, "runs without sequence parallelism only")
        print(f"  {name:20}" + (error[:57] if isinstance(error, str) else f"{error:.1e}"))
        if isinstance(error, str) or error > 1e-11:
            if name in (OURS, "expert"):
                raise SystemExit(f"{name} is wrong")
            names.remove(name)
    print()


def _title(case: Case) -> str:
    return f"{case.family:6}{case.mode:6}{case.tp:>2}{case.hidden:>5}{case.seq:>5}"


def _row(first: str, cells: Iterable[str]) -> None:
    print(f"{first:26}" + "".join(f"{cell:>13}" for cell in cells))


_COLUMNS = "model mode  tp hidd  seq"


def _alone(case: Case, names: Iterable[str]) -> Iterator[list[Side]]:
    """The sides in this process, on a fake group; a generator of one, so that the group lives as long."""
    with measure.fake_world(case.tp):
        found, failed = sides.made(case, names)
        for name, why in failed.items():
            print(f"{name} did not run: {why}"[:80])
        yield found


@grid
def collectives(cases: list[Case], names: list[str], pool: Pools) -> None:
    """Collectives of a step by kind, forward and backward."""
    del pool
    for case in cases:
        for found in _alone(case, names):
            print(_title(case))
            counts = {side.name: measure.collectives(side) for side in found}
            for name, count in counts.items():
                ratio = "" if name == OURS else _more(counts[OURS], count)
                print(f"  {name:19}{_counts(count, 'forward'):>18}{_counts(count, 'backward'):>24}  {ratio}")
    print("\nforward, backward; 'more': what the emitted module sends more of than that peer")


def _counts(counts: Counter[tuple[str, str]], phase: str) -> str:
    return " ".join(f"{n} {SHORT.get(kind, kind)}" for (when, kind), n in sorted(counts.items()) if when == phase)


def _more(own: Counter[tuple[str, str]], other: Counter[tuple[str, str]]) -> str:
    more = {key: own[key] - other[key] for key in own if own[key] > other[key]}
    return "more: " + ", ".join(f"{n} {SHORT.get(kind, kind)}" for (_, kind), n in more.items()) if more else ""


@grid
@taking(click.option("--sites", is_flag=True, help="List what each side saves, by shape and line."))
def saved(cases: list[Case], names: list[str], pool: Pools, *, sites: bool) -> None:
    """Bytes that a rank keeps for the backward."""
    del pool
    print(f"{_COLUMNS}  KiB, and placement's over each peer's")
    for case in cases:
        for found in _alone(case, names):
            kept = {side.name: measure.saved(side, side.given.values()) for side in found}
            sums = {name: sum(one.nbytes for one in all_) for name, all_ in kept.items()}
            print(_title(case) + f"  placement {sums[OURS] / 1024:.0f}")
            for name, total in sums.items():
                if name != OURS:
                    print(f"{'':28}{name:20}{total / 1024:10.0f}{sums[OURS] / total:8.2f}")
            if sites:
                for name, all_ in kept.items():
                    _sites(name, all_)


def _sites(name: str, kept: list[measure.Saved]) -> None:
    print(f"  {name}:")
    groups: Counter[tuple[Any, ...]] = Counter()
    for one in kept:
        groups[one.site, one.shape, str(one.dtype).removeprefix("torch."), one.nbytes] += 1
    for (site, shape, dtype, nbytes), n in sorted(groups.items(), key=lambda item: -item[0][3] * item[1]):
        if n * nbytes >= 1024:
            print(f"    {n:>3} x {nbytes / 1024:6.1f} KiB {dtype:7} {list(shape)!s:15} {site}")


def _ratios(times: dict[str, list[float]]) -> dict[str, tuple[float, float]]:
    """By name: median milliseconds, and the median of placement's time over it, round by round."""
    own = times[OURS]
    return {
        name: (1e3 * statistics.median(took), statistics.median(a / b for a, b in zip(own, took, strict=True)))
        for name, took in times.items()
    }


def _timed(case: Case, times: dict[str, list[float]]) -> None:
    for name, (took, ratio) in _ratios(times).items():
        if name == OURS:
            print(f"{_title(case)}  placement {took:.2f} ms")
        else:
            print(f"{'':28}{name:20}{took:10.2f}{ratio:8.2f}", flush=True)


@grid
@taking(ROUNDS)
def dispatch(cases: list[Case], names: list[str], pool: Pools, *, rounds: int) -> None:
    """Time of a step whose collectives send nothing: what Python and torch cost."""
    del pool
    torch.set_num_threads(1)
    print(f"{_COLUMNS}  ms, and placement's over each peer's")
    for case in cases:
        for found in _alone(case, names):
            _timed(
                case, measure.seconds(found, rounds, clock=time.thread_time)
            )  # what others do meanwhile is not in it


def _on_ranks(case: Case, names: list[str], rounds: int) -> dict[str, list[float]]:
    quiet()
    found, _ = sides.made(case, names)
    return measure.seconds(found, rounds, meet=dist.barrier)


def _compiled_on_ranks(case: Case, names: list[str], rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """As above, under torch.compile without its caches; and the seconds of each side's first step."""
    quiet()
    torch._dynamo.reset()  # noqa: SLF001
    torch._inductor.config.force_disable_caches = True  # noqa: SLF001
    found, _ = sides.made(case, names, compiling=torch.compile)
    torch.compile(torch.nn.Linear(8, 8))(torch.ones(1, 8)).sum().backward()  # what the first of all compiles pays alone
    first: dict[str, float] = {}
    for side in found:
        dist.barrier()
        started = time.perf_counter()
        side.step()
        first[side.name] = time.perf_counter() - started
    return measure.seconds(found, rounds, meet=dist.barrier), first


def _slowest(every: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {name: list(map(max, *(of[name] for of in every))) for name in every[0]}


@grid
@taking(ROUNDS)
def gloo(cases: list[Case], names: list[str], pool: Pools, *, rounds: int) -> None:
    """Time of a step in real processes: of the slowest rank, each time."""
    print(f"{_COLUMNS}  ms, and placement's over each peer's")
    for case in cases:
        _timed(case, _slowest(pool(case.tp).run(_on_ranks, case, names, rounds)))


@grid
@taking(ROUNDS)
def compiled(cases: list[Case], names: list[str], pool: Pools, *, rounds: int) -> None:
    """As gloo, the emitted module and a traceable expert under torch.compile; minutes. Peers are left out."""
    del names
    print(f"{_COLUMNS}  ms, and placement's over each peer's")
    for case in cases:
        every = pool(case.tp).run(_compiled_on_ranks, case, [OURS, "expert, traced"], rounds)
        _timed(case, _slowest([times for times, _ in every]))
        firsts = {name: max(first[name] for _, first in every) for name in every[0][1]}
        print(f"{'':28}first step: " + ", ".join(f"{name} {took:.0f} s" for name, took in firsts.items()))


def quiet() -> None:
    """No warnings, no bars of other libraries."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


@click.group(help=(__doc__ or "").split("\n", 1)[0])
def main() -> None:
    """Choose a table."""
    os.environ["PYTHONWARNINGS"] = "ignore"  # of the ranks' processes
    quiet()


for _command in (collectives, saved, dispatch, gloo, compiled):
    main.add_command(_command)

if __name__ == "__main__":
    main()
