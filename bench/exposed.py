"""How much communication a step waits for, by how the collectives beside linear layers are cut.

    python bench/exposed.py
    python bench/exposed.py --ranks 4 --link ib --seq 8192 --layers 8

Nothing is measured: it is the cost model's reckoning (placement/solver/waiting.py has the formulas) of a Llama of 70B
parameters in bfloat16 on h100, one sequence, hidden 8192, 64 heads and 8 of keys. `tp` keeps the residual whole on
every rank, `tp+sp` a part of the sequence. What other work hides is left out of "waited for"; the share is that of the
step. `by price` is what is emitted where no line says another way: for each collective the cheapest, told below.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

from placement.api import read
from placement.graph.capture import capture
from placement.solver.bind import bind
from placement.solver.build import plan
from placement.solver.plan import Plan
from placement.solver.waiting import exposed

WAYS = ("none", "async", "ring", "chunks(4)", "chunks(8)", "by price")
NORMS = {"tp": "Replicate", "tp+sp": "Shard(seq)"}
SPEC = """
device h100
mesh tp = {ranks} over {link}
input input_ids, labels : [batch, seq]
param model.embed_tokens.weight : [vocab, hidden], Shard(vocab)
within model.layers.* {{
  param self_attn.{{q,k,v}}_proj.weight    : Shard(out)
  param self_attn.o_proj.weight            : Shard(in)
  param mlp.{{gate,up}}_proj.weight        : Shard(out)
  param mlp.down_proj.weight               : Shard(in)
  value {{input,post_attention}}_layernorm : {norm}
}}
value model.norm     : {norm}
param lm_head.weight : [vocab, hidden], Shard(vocab)
output logits        : Shard(vocab)
"""


def planned(mode: str, args: argparse.Namespace) -> Plan:
    """The plan of the model in a mode."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=args.layers, vocab_size=128256, use_cache=False)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    given = {name: torch.empty(1, args.seq, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}
    graph = capture(model, given, dict.fromkeys(given, ("batch", "seq")))
    spec = SPEC.format(ranks=args.ranks, link=args.link, norm=NORMS[mode])
    return plan(bind(graph, read(spec), {}))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--link", default="nvlink")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    print(f"{args.layers} layers, {args.seq} tokens, {args.ranks} x h100 over {args.link}\n")
    print(f"{'mode':8}{'overlap':12}{'forward ms':>12}{'backward ms':>13}{'step ms':>10}{'waited for':>12}")
    for mode in NORMS:
        made = planned(mode, args)
        rest = sum(one.time for inside in made.inside.values() for one in inside)
        for way in WAYS:
            found = [exposed(made, step, step.overlap if way == "by price" else way) for step in made.steps]
            forward, backward = (sum(times) / 1e9 for times in zip(*found, strict=True))
            step = made.compute / 1e9 + forward + backward + rest / 1e9
            share = (forward + backward + rest / 1e9) / step
            print(f"{mode:8}{way:12}{forward:12.2f}{backward:13.2f}{step:10.2f}{share:12.1%}")
        print(f"{mode:8}{', '.join(chosen(made))}")
        print(f"{mode:8}head's weight gradient at the end of the backward: {deferred(made) / 1e9:+.2f} ms\n")


def deferred(made: Plan) -> int:
    """Picoseconds more that are waited for if the head's weight gradient is put off.

    The sum of its input's gradient then has no work of the layer to run behind.
    """
    step = next(s for s in made.steps for node in s.layers if node.module == "lm_head")
    behind = sum(made.work[node][1] for node in step.layers) // 2
    again = max(0, step.times[0] * step.again - behind)
    return again + step.times[1] - exposed(made, step, "async")[1]


def chosen(made: Plan) -> list[str]:
    """How many collectives beside which layers are cut how."""
    beside = ((s.overlap, "+".join(n.module.rpartition(".")[2] for n in s.beside)) for s in made.steps if s.beside)
    return [f"{layers} {overlap} x {count}" for (overlap, layers), count in Counter(beside).items()]


if __name__ == "__main__":
    main()
