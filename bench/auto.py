"""A Llama-70B shape with no parameter placed, on eight devices: python bench/auto.py --limit 120GB.

Prints the explanation of the plan that the solver chooses: meta device, bfloat16, one sequence of 4096 tokens in each
step, every rank an H200. ``--axis dp`` divides a batch of eight sequences instead.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import process_time

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import placement
from bench.solver import llama70b
from placement.report.text import explain_text

SPEC = """
device h200
mesh {axis} = 8 over nvlink
input input_ids, labels : [batch, seq]{data}
param ** : auto
output logits : auto
"""


def main() -> None:
    """Print the plan, and what it took to find it."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--layers", type=int, default=80)
    options.add_argument("--limit", help="of memory on one rank, as a spec says it: 120GB")
    options.add_argument("--axis", choices=("tp", "dp"), default="tp")
    asked = options.parse_args()
    text = SPEC.format(axis=asked.axis, data=", Shard(batch)" if asked.axis == "dp" else "")
    if asked.limit:
        text += f"limit memory {asked.limit.replace('GB', ' GB')}\n"
    model, given = llama70b(asked.layers)
    example = {name: ids.repeat(4, 1) for name, ids in given.items()}  # eight sequences, one a rank where they are cut
    sizes = {"batch": 1 if asked.axis == "tp" else 8, "seq": 4096}
    started = process_time()
    print(text.strip(), "\n")
    try:
        plan = placement.plan(model, None, text, example=example, sizes=sizes)
    except placement.PlacementError as error:
        sys.exit(str(error))
    print(explain_text(plan))
    print(f"{process_time() - started:.1f} s of CPU, of which the solver {plan.stages['solve']:.1f} s by the clock")


if __name__ == "__main__":
    main()
