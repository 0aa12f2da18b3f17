"""How long compilation takes, stage by stage: the demo's model, and an 8B shape on the meta device.

    python bench/compile.py            # both, a few seconds after imports
    python bench/compile.py demo       # one of them

The demo model is compiled to a module with its weights; the large shape is planned and emitted without any.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

import placement
from placement.api import read
from placement.emit.source import write

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def demo() -> Mapping[str, float]:
    """Four layers of Qwen3 on four simulated ranks, as ``make demo`` compiles them."""
    model, example = importlib.import_module("examples.qwen3.model").build(layers=4)
    program = placement.compile(model, placement.simulate(tp=4), EXAMPLES / "qwen3" / "qwen3.plc", example=example)
    return program.plan.stages  # type: ignore[union-attr]


def llama8b() -> Mapping[str, float]:
    """Thirty-two layers of Llama-8B's shape: 4096 tokens in bfloat16 on eight ranks."""
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    ids = {name: torch.empty(1, 4096, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}
    spec = read("device h100\n" + (EXAMPLES / "llama" / "llama.plc").read_text(encoding="utf-8"))
    plan = placement.plan(model, {"tp": 8}, spec, example=ids)
    started = time.perf_counter()
    source = write(plan, spec.file)
    compile(source.text, "<emitted>", "exec")
    return {**plan.stages, "emit": time.perf_counter() - started}


CASES: dict[str, Callable[[], Mapping[str, float]]] = {"demo": demo, "llama8b": llama8b}


def main(names: list[str]) -> None:
    """Print a table for each named case."""
    chosen: dict[str, Any] = {name: CASES[name] for name in names or CASES}
    for name, case in chosen.items():
        started, worked = time.perf_counter(), time.process_time()
        stages = case()
        whole, worked = time.perf_counter() - started, time.process_time() - worked
        print(f"{name}: {(case.__doc__ or '').strip()}")
        for stage, seconds in stages.items():
            print(f"  {stage:12s} {seconds:8.3f} s")
        print(f"  {'compile':12s} {sum(stages.values()):8.3f} s")
        print(f"  of {whole:.3f} s, {worked:.3f} s of processor time, with the imports and the model\n")


if __name__ == "__main__":
    main(sys.argv[1:])
