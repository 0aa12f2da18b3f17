"""The solver against a MILP on real decoders: python bench/oracle.py --layers 1,2,8 --axes 1,2.

Times are in microseconds of a training step, seconds are of one core of this machine. "bound" is what the search has
proven, "oracle" the optimum of the whole joint problem by HiGHS. The exit status is 1 where a plan is not the best.
The specs: ``spec_of`` in tests/solver/models.py.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path
from time import process_time

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from placement.solver.bind import Bound
from placement.solver.builder import Builder
from placement.solver.joint import optimum
from tests.solver.flows import Least, least_time
from tests.solver.models import FAMILIES, bound

_NAMES = (
    "model",
    "layers",
    "spec",
    "axes",
    "cost us",
    "bound us",
    "oracle us",
    "above",
    "solve s",
    "MILP s",
    "columns",
)
_ROW = "{:>6} {:>6} {:>8} {:>4} {:>13} {:>13} {:>13} {:>9} {:>8} {:>8} {:>9}"


def main() -> int:
    """Print one row per model, number of layers, spec and number of axes. Returns how many plans are not the best."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--models", default=",".join(FAMILIES))
    options.add_argument("--layers", default="1,2,8")
    options.add_argument("--specs", default="sp,tp,weights,free,zero", help="zero is of two axes only")
    options.add_argument("--axes", default="1,2")
    options.add_argument("--seconds", type=float, default=600, help="that HiGHS may take for one row")
    options.add_argument("--differ", action="store_true", help="list the variables that the oracle chose otherwise")
    asked = options.parse_args()
    print(_ROW.format(*_NAMES))
    worse = 0
    rows = product(*(text.split(",") for text in (asked.models, asked.layers, asked.specs, asked.axes)))
    for family, layers, kind, axes in rows:
        if (kind, axes) != ("zero", "1"):
            of = bound(family, int(layers), int(axes), kind)
            worse += _compare(of, [family, layers, kind, axes], asked.seconds, differ=asked.differ)
    return worse


def _compare(of: Bound, row: list[str], seconds: float, *, differ: bool) -> bool:
    """Print a row. Returns whether the oracle has a better plan."""
    started = process_time()
    builder, found = optimum(of)
    solved = process_time() - started
    row += [f"{part[0] / 1e6:.3f}" for part in (found.cost, found.bound)]
    whole = Builder(of)
    try:
        least = least_time(whole, seconds)
    except TimeoutError as error:
        print(_ROW.format(*row, "-", "-", f"{solved:.2f}", "-", "-"), error, flush=True)
        return False
    more = found.cost[0] - least.time
    row += [f"{least.time / 1e6:.3f}", f"{100 * more / least.time:.4f}%" if more else "equal"]
    took = process_time() - started - solved
    print(_ROW.format(*row, f"{solved:.2f}", f"{took:.2f}", least.columns), flush=True)
    if more and differ:
        ours = {n: combos[i] for n, combos, i in zip(builder.names, builder.combos, found.choice, strict=True)}
        _tell(whole, ours, least)
    return bool(more)


def _tell(whole: Builder, ours: dict[str, tuple[int, ...]], least: Least) -> None:
    for name, combos, choices, index in zip(whole.names, whole.combos, whole.choices, least.choice, strict=True):
        if combos[index] != ours[name]:
            print(f"  {name}: {choices[combos.index(ours[name])]} in the plan, {choices[index]} in the oracle's")


if __name__ == "__main__":
    sys.exit(bool(main()))
