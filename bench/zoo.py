"""The families of ``tests/zoo`` as a table: what came out, ops without rules, collectives of a layer, seconds.

    python bench/zoo.py > docs/zoo.md  # all, some ten minutes on two cores: the page of the documentation
    python bench/zoo.py llama t5       # the rows of some of them

Every family that compiles is compared with one device in float64, for each of its specs on 2 and on 4 ranks: outputs,
input gradients and every parameter gradient. Collectives are those that two layers have more than one.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import placement
from placement import PlacementError
from placement.graph.precision import lifted
from placement.rules.skeleton import without_rules
from placement.solver.plan import Plan
from tests.zoo.families import Family
from tests.zoo.parity import measured, one_capture
from tests.zoo.table import GROUPS

HEAD = """\
# Families of models

What the compiler makes of the models of transformers that people bring: small random models of each family, in
float64, compared with one device. *Equal* means that every output, every input gradient and every parameter gradient
agrees to 1e-11, on 2 and on 4 ranks, and that what is sent is what the plan says. `TP` places the products of a layer
by `out` and `in` and the vocabulary's table; `TP+SP` adds that norms keep a part of the sequence. A family that is
refused stands with the words of its diagnostic.

`python bench/zoo.py` prints this page; `tests/zoo` compares most of the families at each run of the tests.
Collectives are those that a further layer adds, forward / backward (of an encoder and a decoder, a layer of each; of
layers that alternate, their mean): AR all-reduce, AG all-gather, RS reduce-scatter, A2A all-to-all. Reductions of
parameters' gradients that are done once for all layers are not among them.
"""
SHORT = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS", "all_to_all": "A2A"}
SIZES = (2, 4)


@dataclass(frozen=True)
class Row:
    """One family. layer: collectives by mode; unknown: ops without rules; seconds: of one compilation."""

    name: str
    result: str
    layer: dict[str, str]
    unknown: tuple[str, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        unknown = ", ".join(self.unknown) or "none"
        cells = (self.name, self.result, unknown, self.layer.get("tp", ""), self.layer.get("sp", ""))
        return f"| {' | '.join(cells)} |"


def _plan(family: Family, mode: str, layers: int) -> Plan:
    with lifted(torch.float64):
        return placement.plan(family.build(layers), {"tp": SIZES[0]}, family.spec(mode), example=family.inputs())


def _launches(plan: Plan) -> Counter[tuple[str, str]]:
    return Counter((one.phase, one.action.value) for one in plan.launches())


def _each(more: Counter[tuple[str, str]], unit: int) -> str:
    """``2 AR / 2 AR``: forward and backward."""

    def phase(name: str) -> str:
        counts = [(SHORT[action], Fraction(n, unit)) for (at, action), n in sorted(more.items()) if at == name and n]
        return " + ".join(f"{float(n):g} {action}" for action, n in counts) or "none"

    return f"{phase('forward')} / {phase('backward')}"


def row(family: Family) -> Row:
    """Plans, and a comparison with one device for every mode and size."""
    model = family.build()
    with one_capture():
        try:
            plans = {mode: _plan(family, mode, 1) for mode in family.modes()}
        except PlacementError as error:
            first = error.diagnostics[0]
            return Row(family.name, f"{first.code}: {first.message}", {})
        found = [
            f"{mode.upper()} at {n}: {text}"
            for mode in plans
            for n in SIZES
            for text in measured(family, model, mode, n)
        ]
    with one_capture():
        two = {mode: _plan(family, mode, 2) for mode in plans if family.unit}
    layer = {mode: _each(_more(_launches(two[mode]), _launches(plans[mode])), family.unit) for mode in two}
    notes = without_rules(plans["tp"].graph, plans["tp"].bound.dims)
    result = "; ".join(found) or f"equal for {' and '.join('TP' if m == 'tp' else 'TP+SP' for m in plans)}"
    unknown = tuple(note.message.split("'")[1] for note in notes)
    return Row(family.name, result, layer, unknown, sum(plans["tp"].stages.values()))


def _more(two: Counter[tuple[str, str]], one: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    return Counter({key: two[key] - one[key] for key in {*two, *one}})


def table(names: Iterable[str] = ()) -> Iterator[str]:
    """The lines of the page, group by group; last what compilation took."""
    wanted, seconds = set(names), dict[str, float]()
    for title, group in GROUPS.items():
        rows = [family for family in group if not wanted or family.name in wanted]
        if rows:
            yield f"\n**{title[0].upper()}{title[1:]}**\n"
            yield "| family | result on 2 and 4 ranks | ops without a rule | TP: a layer, forward / backward | TP+SP |"
            yield "|---|---|---|---|---|"
        for family in rows:
            made = row(family)
            if made.seconds:
                seconds[family.name] = made.seconds
            yield str(made)
    if seconds:
        slowest = max(seconds, key=lambda name: seconds[name])
        median = statistics.median(seconds.values())
        most = f"{seconds[slowest]:.1f} ({slowest})"
        yield f"\nSeconds to a plan: median {median:.1f}, most {most}, {time.strftime('%Y-%m-%d')}."


def main() -> None:
    """Print the table of the families named on the command line, of all where none is."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if not sys.argv[1:]:
        print(HEAD, end="")
    for line in table(sys.argv[1:]):
        print(line, flush=True)


if __name__ == "__main__":
    main()
