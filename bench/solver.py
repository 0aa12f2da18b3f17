"""How long planning takes as models and meshes grow: Llama-70B's shape, 8 and 80 layers, on one, two and three axes.

    python bench/solver.py                         # the whole table: some minutes
    python bench/solver.py --layers 8 --axes 1,2   # some of its rows
    python bench/solver.py --json                  # one object a row, then the ratios

Weights are on the meta device. Every row has a process of its own, so that its peak of memory is its own and nothing
is known from the row before; imports and the making of the model are not timed. Before the first row of so many
layers, in a process of its own too, ``torch.export`` takes the same model with the same example, the same dims dynamic
and no option that it does not need: capture adds the reading to that, and saves the tracing of layers that are alike.
Seconds are those of the clock; under "cpu" stand those of the processor, which are what to compare on a machine that
does other things at the same time. Targets are printed beside what was found; nothing fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import multiprocessing
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

from placement.api import read
from placement.graph.capture import capture
from placement.lang.spec import Spec
from placement.solver.bind import bind
from placement.solver.build import plan
from placement.undisturbed import undisturbed

SIZES = {"batch": 8, "seq": 4096}
MESHES = {
    1: {"tp": (8, "nvlink")},
    2: {"dp": (2, "ib"), "tp": (8, "nvlink")},
    3: {"dp": (2, "ib"), "cp": (2, "ib"), "tp": (8, "nvlink")},
}
CUTS = {"dp": "Shard(batch) @ dp", "cp": "Shard(seq) @ cp", "tp": "Shard(vocab) @ tp"}
PINS = """
param model.embed_tokens.weight : [vocab, hidden], Shard(vocab) @ tp
within model.layers.* {
  param self_attn.{q,k,v}_proj.weight    : Shard(out) @ tp
  param self_attn.o_proj.weight          : Shard(in) @ tp
  param mlp.{gate,up}_proj.weight        : Shard(out) @ tp
  param mlp.down_proj.weight             : Shard(in) @ tp
  value {input,post_attention}_layernorm : Shard(seq) @ tp
}
value model.norm     : Shard(seq) @ tp
param lm_head.weight : [vocab, hidden], Shard(vocab) @ tp
"""

BEYOND = {1: 2.0, 2: 10.0, 3: 30.0}  # the targets: seconds beyond capture, by the number of axes
EXPORT, PEAK = 1.3, 2000.0  # capture over torch.export; MB of one process


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of the clock and of the processor."""

    clock: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Row:
    """What one process measured. beyond: bind, solve and plan. peak: MB. cost: microseconds. gap: per cent."""

    layers: int
    axes: int
    nodes: int
    capture: Timed
    export: Timed
    bind: float
    solve: float
    plan: float
    beyond: Timed
    peak: float
    cost: float
    gap: float


def llama70b(layers: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The model, in bfloat16 without weights, and an example."""
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.zeros(2, 64, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids.clone()}


def text(axes: int) -> str:
    """The spec: data divided on dp and cp, weights on tp, norms in blocks of the sequence on tp too."""
    mesh = MESHES[axes]
    lines = ["device h100", *(f"mesh {name} over {link}" for name, (_, link) in mesh.items())]
    data = [CUTS[name] for name in mesh if name != "tp"]
    lines.append(", ".join(["input input_ids, labels : [batch, seq]", *data]))
    return "\n".join(lines) + PINS + "output logits : " + ", ".join(CUTS[name] for name in mesh) + "\n"


def dims(spec: Spec) -> dict[str, tuple[str, ...]]:
    """The names of the inputs' dims, which are dynamic."""
    return {str(name): tuple(map(str, line.dims or ())) for line in spec.inputs for name in line.names}


@contextmanager
def timed(found: list[Timed]) -> Iterator[None]:
    """Append what the block took."""
    clock, cpu = time.perf_counter(), time.process_time()
    yield
    found.append(Timed(time.perf_counter() - clock, time.process_time() - cpu))


def exported(layers: int) -> Timed:
    """What ``torch.export`` alone takes."""
    model, example = llama70b(layers)
    auto = torch.export.Dim.AUTO
    dynamic = {name: dict.fromkeys(range(len(names)), auto) for name, names in dims(read(text(1))).items()}
    logging.disable(logging.WARNING)
    found: list[Timed] = []
    with warnings.catch_warnings(), timed(found):
        warnings.simplefilter("ignore")
        torch.export.export(model, (), example, dynamic_shapes=dynamic, strict=False)
    return found[0]


@undisturbed()
def planned(layers: int, axes: int, export: Timed) -> Row:
    """One row of the table: the stages of ``placement.plan`` as that runs them."""
    model, example = llama70b(layers)
    spec = read(text(axes))
    found: list[Timed] = []
    with timed(found):
        graph = capture(model, example, dims(spec))
    with timed(found):
        bound = bind(graph, spec, {name: n for name, (n, _) in MESHES[axes].items()}, sizes=SIZES)
    with timed(found):
        made = plan(bound)
    captured, bound_in, planned_in = found
    cost, least = made.cost[0], made.lower_bound[0]
    return Row(
        layers=layers,
        axes=axes,
        nodes=len(graph.nodes),
        capture=captured,
        export=export,
        bind=bound_in.clock,
        solve=made.stages["solve"],
        plan=made.stages["plan"],
        beyond=Timed(bound_in.clock + planned_in.clock, bound_in.cpu + planned_in.cpu),
        peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,  # of KiB, so a little more than MB
        cost=cost / 1e6,
        gap=100 * (cost - least) / least,
    )


def alone(task: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(task, *arguments).result()


COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "axes": lambda row: str(row.axes),
    "layers": lambda row: str(row.layers),
    "nodes": lambda row: str(row.nodes),
    "export s": lambda row: f"{row.export.clock:.1f}",
    "cpu": lambda row: f"{row.export.cpu:.1f}",
    "capture s": lambda row: f"{row.capture.clock:.1f}",
    "cpu ": lambda row: f"{row.capture.cpu:.1f}",
    "bind s": lambda row: f"{row.bind:.2f}",
    "solve s": lambda row: f"{row.solve:.2f}",
    "plan s": lambda row: f"{row.plan:.2f}",
    "all three": lambda row: f"{row.beyond.clock:.2f}",
    "cpu  ": lambda row: f"{row.beyond.cpu:.2f}",
    "peak MB": lambda row: f"{row.peak:.0f}",
    "cost us": lambda row: f"{row.cost:.0f}",
    "gap %": lambda row: f"{row.gap:.2g}",
}


def line(cells: Sequence[str]) -> str:
    """One line of the table."""
    return " ".join(cell.strip().rjust(max(len(name), 6)) for name, cell in zip(COLUMNS, cells, strict=True))


def ratios(rows: Sequence[Row]) -> dict[int, tuple[int, int, float, float]]:
    """By the number of axes, the fewest and the most layers, and how much longer planning takes: clock, processor."""
    found: dict[int, tuple[int, int, float, float]] = {}
    for axes in dict.fromkeys(row.axes for row in rows):
        own = sorted((row for row in rows if row.axes == axes), key=lambda row: row.layers)
        few, many = own[0], own[-1]
        if many.layers > few.layers:
            clock, cpu = many.beyond.clock / few.beyond.clock, many.beyond.cpu / few.beyond.cpu
            found[axes] = few.layers, many.layers, clock, cpu
    return found


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """The ratios, and the targets beside the most that was found."""
    for axes, (few, many, clock, cpu) in ratios(rows).items():
        yield f"ratio   {axes} axes, {many} layers over {few}: {clock:.1f} of the clock, {cpu:.1f} of the processor"
    for axes in dict.fromkeys(row.axes for row in rows):
        worst = max((row for row in rows if row.axes == axes), key=lambda row: row.beyond.cpu).beyond
        yield (
            f"target  {axes} axes, beyond capture: under {BEYOND[axes]:.0f} s; "
            f"found {worst.clock:.1f} s of the clock, {worst.cpu:.1f} s of the processor"
        )
    for axes, (few, many, _, cpu) in ratios(rows).items():
        yield f"target  {axes} axes, growth from {few} to {many} layers: at most {many / few:.0f}; found {cpu:.1f}"
    yield f"target  peak: under {PEAK:.0f} MB; found {max(row.peak for row in rows):.0f} MB"
    slowest = max(row.capture.cpu / row.export.cpu for row in rows)
    yield f"target  capture over torch.export: at most {EXPORT}; found {slowest:.2f} of the processor"


def main() -> None:
    """Print one row per number of axes and of layers, as they come."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layers", default="8,80")
    options.add_argument("--axes", default="1,2,3", help="how many: tp; dp and tp; dp, cp and tp")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    if not chosen.json:
        print(line(list(COLUMNS)), flush=True)
    rows: list[Row] = []
    exports: dict[int, Timed] = {}  # the same on any number of axes
    for axes in map(int, chosen.axes.split(",")):
        for layers in map(int, chosen.layers.split(",")):
            if layers not in exports:
                exports[layers] = alone(exported, layers)
            row: Row = alone(planned, layers, axes, exports[layers])
            rows.append(row)
            data = json.dumps(dataclasses.asdict(row))
            print(data if chosen.json else line([cell(row) for cell in COLUMNS.values()]), flush=True)
    if chosen.json:
        print(json.dumps({"ratios": ratios(rows)}))
    else:
        print("", *summary(rows), sep="\n")


if __name__ == "__main__":
    main()
