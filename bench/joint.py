"""What it costs to plan axis by axis instead of all axes at once: python bench/joint.py --layers 2.

Times are in microseconds of a training step, dp = 2 over ib and tp = 4 over nvlink, h100, 8 sequences of 4096 tokens.
"dp first": the optimum for dp alone, then that for tp with dp as it is; "tp first" the other way round. The specs:
``spec_of`` in tests/solver/models.py, and ``auto``, which leaves the parameters to the solver.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from placement.solver.bind import Bound
from placement.solver.eliminate import Infeasible
from placement.solver.joint import one_by_one, optimum
from tests.solver.models import FAMILIES, MESHES, SIZES, on, spec_of

_ROW = "{:>6} {:>8} {:>14} {:>14} {:>10} {:>10}"


def main() -> None:
    """Print one row per model and spec."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--models", default=",".join(FAMILIES))
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--specs", default="sp,tp,weights,free,auto")
    asked = options.parse_args()
    print(_ROW.format("model", "spec", "joint us", "bound us", "dp first", "tp first"))
    for family, kind in product(asked.models.split(","), asked.specs.split(",")):
        text = spec_of(family, 2, "free" if kind == "auto" else kind)
        text += "param ** : auto\n" if kind == "auto" else ""
        of = on(family, asked.layers, text, MESHES[2], SIZES)
        _, found = optimum(of)
        more = [_more(of, order, found.cost[0]) for order in ((0, 1), (1, 0))]
        print(
            _ROW.format(family, kind, *(f"{part[0] / 1e6:.1f}" for part in (found.cost, found.bound)), *more),
            flush=True,
        )


def _more(of: Bound, order: tuple[int, ...], least: int) -> str:
    try:
        _, found = one_by_one(of, order)
    except Infeasible:
        return "no plan"
    return f"+{100 * (found.cost[0] / least - 1):.2f} %"


if __name__ == "__main__":
    main()
