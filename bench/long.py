"""Attention over a cut sequence: which way costs least and where that flips, what is sent, kept and computed.

    python bench/long.py ways                    # prices of a layer by gather, all_to_all and ring
    python bench/long.py flips                   # the length from which on another way costs least
    python bench/long.py volumes                 # what a plan says is sent, and what is sent
    python bench/long.py memory                  # bytes kept on a rank, and the largest tensor made
    python bench/long.py balance                 # pairs of query and key on a rank
    python bench/long.py peers --rounds 30       # beside other libraries, in real processes

Only ``peers`` measures time. Prices are the cost model's, of a decoder layer of Llama in bfloat16 on h100, one
sequence, 32 heads of 128, in which every rank works on its own tokens; ``whole`` is attention that every rank does all
of. What a command claims it checks: it fails where that is not so.
"""

from __future__ import annotations

import itertools
import logging
import os
import statistics
import sys
import textwrap
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import click
import torch

from bench.peers import long_layer, long_measure
from bench.peers.long_layer import WAYS, Sent
from bench.peers.long_measure import Measured
from bench.peers.long_sides import MAKERS, OURS, Shape
from tests.gloo import GlooPool

EQUAL = 1e-5  # in float32


def each(option: str, kind: Any, default: Any) -> Callable[[Any], Any]:
    """An option that may be given several times."""
    return click.option(option, multiple=True, type=kind, default=default, show_default=True)


KV = each("--kv", int, [1, 8, 32])
RANKS = each("--ranks", int, [2, 4, 8])
LINK = each("--link", str, ["nvlink", "ib"])


@click.command()
@KV
@LINK
@RANKS
@each("--seq", int, [4096, 32768, 131072])
def ways(kv: tuple[int, ...], link: tuple[str, ...], ranks: tuple[int, ...], seq: tuple[int, ...]) -> None:
    """Prices of a step of one layer by each way, and what a plan takes where no line insists."""
    print("ms of a step of one layer, forward and backward, by the cost model\n")
    print(f"{'KV heads':>8}{'link':>8}{'ranks':>7}{'tokens':>8}{''.join(f'{way:>11}' for way in WAYS)}  taken")
    rows: list[str] = []
    for heads in kv:
        graph = long_layer.large(heads)
        for over, n, tokens in itertools.product(link, ranks, seq):
            costs, chosen = long_layer.compared(graph, n, over, tokens)
            cells = "".join(f"{costs[way] / 1e9:11.3f}" for way in WAYS)
            told = chosen if chosen in WAYS else f"{chosen}, {costs[chosen] / 1e9:.3f}"
            print(f"{heads:8}{over:>8}{n:7}{tokens:8}{cells}  {told}", flush=True)
            rows.append(chosen)
    whole = rows.count(long_layer.WHOLE)
    print(f"\nin {len(rows) - whole} rows what is taken costs as much as the cheapest that a line insists on,")
    print(f"in {whole} attention is done whole on every rank and costs less than by any of them")


@click.command()
@KV
@LINK
@RANKS
def flips(kv: tuple[int, ...], link: tuple[str, ...], ranks: tuple[int, ...]) -> None:
    """What a plan takes by the number of tokens, in powers of two from 1k to 1M."""
    print("what is taken from how many tokens on, of 1k to 1M in powers of two\n")
    print(f"{'KV heads':>8}{'link':>8}{'ranks':>7}  taken")
    for heads in kv:
        graph = long_layer.large(heads)
        for over, n in itertools.product(link, ranks):
            told: list[tuple[str, int]] = []
            for tokens in (2**power for power in range(10, 21)):
                chosen = long_layer.taken(long_layer.priced(graph, n, over, tokens))
                if not told or told[-1][0] != chosen:
                    told.append((chosen, tokens))
            cells = ", ".join(f"{chosen} from {tokens // 1024}k" for chosen, tokens in told)
            print(f"{heads:8}{over:>8}{n:7}  {cells}", flush=True)


@click.command()
@each("--kv", int, [1, 2, 8])
@click.option("--ranks", default=4, show_default=True)
@click.option("--seq", default=256, show_default=True)
def volumes(kv: tuple[int, ...], ranks: int, seq: int) -> None:
    """Bytes that a plan says are sent beside those that are, of a small layer on a simulated mesh."""
    print(f"{ranks} ranks, {seq} tokens, 8 heads of 8, float32; bytes are those of full values\n")
    print(f"{'KV heads':>8}  {'way':11}{'phase':9}{'collective':15}{'count':>6}{'planned':>9}{'sent':>9}{'of K, V':>9}")
    for heads, way in itertools.product(kv, WAYS):
        said, sent, whole = long_layer.volume(way, heads, ranks, seq)
        if said != sent:
            raise AssertionError(f"{way}, {heads} KV heads: planned {said}, sent {sent}")
        for phase, kind in sorted({key[:2] for key in said}, key=lambda key: (key[0] != "forward", key[1])):
            count, planned = _sums(said, phase, kind)
            row = f"{heads:8}  {way:11}{phase:9}{kind:15}{count:6}{planned:9}{_sums(sent, phase, kind)[1]:9}"
            print(row + (f"{planned / whole:9.2f}" if kind != "all_reduce" else ""))
    print("\nequal launch by launch; the all_reduce is that of the weights' gradients")


def _sums(counts: Sent, phase: str, kind: str) -> tuple[int, int]:
    own = [(n, n * size) for (when, what, size), n in counts.items() if (when, what) == (phase, kind)]
    return sum(n for n, _ in own), sum(size for _, size in own)


@click.command()
@RANKS
@click.option("--kv", default=8, show_default=True, help="Of 8 heads; fewer than ranks are repeated by all_to_all.")
@click.option("--seq", default=512, show_default=True)
@click.option("--long", "longer", default=8192, show_default=True, help="Tokens of the largest tensor's table.")
def memory(ranks: tuple[int, ...], kv: int, seq: int, longer: int) -> None:
    """Bytes that a rank keeps of a layer, of which 1/n are to be left; and the largest tensor that is made."""
    print(f"KiB kept on a rank for the backward of a layer, {seq} tokens, {kv} KV heads of 8\n")
    print(f"{'way':12}{'ranks':>6}{'KiB':>10}{'of one':>9}{'times n':>9}")
    for way in ("ring", "all_to_all"):
        one = long_layer.kept(way, kv, 1, seq)
        for n in (1, *ranks):
            found = long_layer.kept(way, kv, n, seq)
            print(f"{way:12}{n:6}{found / 1024:10.1f}{found / one:9.4f}{n * found / one:9.3f}")
            if abs(n * found / one - 1) > 0.05 and kv % n == 0:
                raise AssertionError(f"{way} on {n} ranks keeps {found} of {one} bytes")
    print("\nby all_to_all attention's result is kept twice, cut by heads and by tokens")
    n = max(ranks)
    print(f"\nlargest tensor of a step, {longer} tokens, 2 heads of 16, {n} ranks; of {longer} squared\n")
    print(f"{'way':12}{'kernel':9}{'op':36}{'shape':18}{'of it':>5}")
    for way, fused in (("ring", True), ("ring", False), ("gather", True), ("one device", False)):
        seen = long_layer.largest(way, n, longer, fused=fused)
        shape = " x ".join(map(str, seen.shape))
        kernel = "fused" if fused else "formula"
        print(f"{way:12}{kernel:9}{seen.op[:35]:36}{shape:18}{seen.elements / longer**2:5.3f}", flush=True)
        if way == "ring" and seen.elements >= longer**2 / n:
            raise AssertionError(f"a ring made {shape}")


@click.command()
@RANKS
@click.option("--seq", default=8192, show_default=True)
def balance(ranks: tuple[int, ...], seq: int) -> None:
    """Pairs of query and key that causal attention has on a rank, by the order of blocks."""
    print(f"pairs of query and key of causal attention on a rank, {seq} tokens\n")
    print(f"{'ranks':>5}  {'order':12}{'fewest':>12}{'most':>12}{'most / fewest':>15}")
    for n in ranks:
        for name, order in (("contiguous", "Shard(seq)"), ("zigzag", long_layer.ZIGZAG)):
            least, most = long_layer.pairs(n, seq, order)
            print(f"{n:5}  {name:12}{least:12}{most:12}{most / least:15.3f}")
            if name == "zigzag" and most > 1.02 * least:
                raise AssertionError(f"{n} ranks have {least} to {most} pairs")


@click.command()
@each("--peer", click.Choice(list(MAKERS)), list(MAKERS))
@click.option("--ranks", default=2, show_default=True)
@click.option("--batch", default=1, show_default=True)
@click.option("--heads", default=8, show_default=True)
@click.option("--seq", default=2048, show_default=True)
@click.option("--size", default=64, show_default=True, help="Of a head.")
@click.option("--rounds", default=20, show_default=True)
def peers(peer: tuple[str, ...], ranks: int, batch: int, heads: int, seq: int, size: int, rounds: int) -> None:
    """Causal attention alone beside other libraries, each held to one device first; gloo, a thread each.

    A name with * is a library whose own kernel is not for CPUs, with torch's in its place.
    """
    shape = Shape(batch, heads, seq, size)
    print(f"torch {torch.__version__}, gloo, {ranks} ranks, a thread each; causal attention, float32,")
    print(f"batch {batch}, {heads} heads, {seq} tokens, size {size}; *: with torch's kernel for CPUs put in\n")
    good = _held(shape, list(dict.fromkeys((OURS, *peer))), ranks)
    with closing(GlooPool(ranks, timeout=600)) as pool:
        every: list[dict[str, Measured]] = pool.run(long_measure.measured, shape, good, rounds)
    print(f"{'ms of':32}{'forward':>8}{'ratio':>7}{'and backward':>14}{'ratio':>7}{'MiB sent':>12}")
    slowest = {name: _slowest([found[name] for found in every]) for name in good}
    for name, (forward, step) in slowest.items():
        sent = [max(found[name].sent[phase] for found in every) / 2**20 for phase in ("forward", "backward")]
        ratios = [_ratio(mine, its) for mine, its in zip(slowest[OURS], (forward, step), strict=True)]
        row = f"{name:32}{1e3 * statistics.median(forward):8.1f}{ratios[0]:7.2f}"
        if good[name]:
            print(row + f"{1e3 * statistics.median(step):14.1f}{ratios[1]:7.2f}{sent[0]:6.1f}{sent[1]:6.1f}")
        else:
            print(row + f"{'-':>14}{'-':>7}{sent[0]:6.1f}{'-':>6}")
    print(f"\nratio: of '{OURS}' over it, the median of {rounds} rounds;")
    print("MiB: what a rank sends, forward and backward")


def _held(shape: Shape, names: list[str], ranks: int) -> dict[str, bool]:
    """Those whose result is right, and whether their gradients are; of each its errors are printed."""
    good: dict[str, bool] = {}
    whys: list[str] = []
    print(f"{'against one device in float64':32}{'result':>14}{'gradients':>14}")
    for name in names:
        with closing(GlooPool(ranks, timeout=60)) as pool:  # one that fails leaves nothing to others
            every = pool.run(long_measure.errors, shape, name)
        right, cells = [False, False], ""
        for at, phase in enumerate(("forward", "backward")):
            found = [one[phase] for one in every if phase in one]
            why = next((one for one in found if isinstance(one, str)), None)
            worst = max((one for one in found if isinstance(one, float)), default=None)
            right[at] = why is None and worst is not None and worst <= EQUAL
            told = "" if worst is None else f"{worst:.1e}" if right[at] else f"{worst:.1e} wrong"
            cells += f"{'did not run' if why else told:>14}"
            whys += [f"{name}, {phase}: {why}"] if why else []
        print(f"{name:32}{cells}".rstrip(), flush=True)
        if right[0]:
            good[name] = right[1]
    print("\n" + "\n".join(textwrap.fill(why, 80, subsequent_indent="    ") for why in whys) + "\n" * bool(whys))
    if not good.get(OURS):
        raise AssertionError(f"{OURS} is wrong")
    return good


def _slowest(every: list[Measured]) -> tuple[list[float], list[float]]:
    """Seconds round by round of the rank that takes longest: forward, and with the backward."""
    rounds = [[one.forward for one in every], [one.step for one in every]]
    forward, step = ([max(took) for took in zip(*times, strict=True)] for times in rounds)
    return forward, step


def _ratio(mine: list[float], its: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, its, strict=True))


@click.group(help=(__doc__ or "").split("\n", 1)[0])
def main() -> None:
    """Choose a table."""
    os.environ["PYTHONWARNINGS"] = "ignore"  # of the ranks' processes
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


for _command in (ways, flips, volumes, memory, balance, peers):
    main.add_command(_command)

if __name__ == "__main__":
    main()
