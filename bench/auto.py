"""A Llama-70B shape with no parameter placed, on eight devices: python bench/auto.py --limit 120GB.

Prints the explanation of the plan that the solver chooses: meta device, bfloat16, one sequence of 4096 tokens in each
step, every rank an H200. ``--axis dp`` divides a batch of eight sequences instead.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import process_time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import placement
from placement.report.text import explain_text

SPEC = """
device h200
mesh {axis} = 8 over nvlink
input input_ids, labels : [batch, seq]{data}
param ** : auto
output logits : auto
"""


def model(layers: int) -> LlamaForCausalLM:
    """The shape of Llama 70B without its numbers."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


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
    ids = torch.zeros(2 if asked.axis == "tp" else 8, 64, dtype=torch.int64, device="meta")
    example = {"input_ids": ids, "labels": ids.clone()}
    sizes = {"batch": 1 if asked.axis == "tp" else 8, "seq": 4096}
    started = process_time()
    print(text.strip(), "\n")
    try:
        plan = placement.plan(model(asked.layers), None, text, example=example, sizes=sizes)
    except placement.PlacementError as error:
        sys.exit(str(error))
    print(explain_text(plan))
    print(f"{process_time() - started:.1f} s of CPU, of which the solver {plan.stages['solve']:.1f} s by the clock")


if __name__ == "__main__":
    main()
