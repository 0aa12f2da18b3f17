"""Real decoders as the solver gets them: Llama, Qwen3 and GPT-2 at sizes that are used, without weights."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from torch import nn

from placement.graph.capture import capture
from placement.graph.ir import Graph
from placement.lang import parse
from placement.solver.bind import Bound, bind

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FAMILIES = ("llama", "qwen3", "gpt2")
SIZES = {"batch": 8, "seq": 4096}
MESHES = {1: {"tp": 8}, 2: {"dp": 2, "tp": 4}}
_TEXT = ("input_ids", "labels")
_WIDTHS = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}


def _model(family: str, layers: int) -> nn.Module:
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=2048, n_head=32, n_layer=layers, use_cache=False, loss_type="ForCausalLM"
        )
        config.vocab_size = 50304
        return transformers.GPT2LMHeadModel(config)
    sizes = {**_WIDTHS, "num_hidden_layers": layers, "vocab_size": 32000, "use_cache": False}
    if family == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=64))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


@functools.cache
def captured(family: str, layers: int) -> Graph:
    """The graph of a decoder in bfloat16."""
    with torch.device("meta"):
        model = _model(family, layers)
        example = {name: torch.empty(4, 64, dtype=torch.int64) for name in _TEXT}
    return capture(model.to(torch.bfloat16).train(), example, dict.fromkeys(_TEXT, ("batch", "seq")))


def spec_of(family: str, axes: int, kind: str = "sp") -> str:
    """The example's spec on one axis or two.

    kind: ``sp``; ``tp``; ``weights``, which has no word on activations; ``free``, which has none on weights either;
    ``zero``, where dp stores the weights in blocks.
    """
    path = EXAMPLES / family / (f"{family}_tp.plc" if kind == "tp" else f"{family}.plc")
    text = path.read_text(encoding="utf-8")
    if kind in ("weights", "free"):
        text = re.sub(r"(?m)^ *value.*\n", "", text)
    if kind == "free":
        text = re.sub(r"(?m)^within(.*\n)+?}\n|^param.*\n", "", text)
        text = re.sub(r"(?m)^output.*\n", "output logits : auto\n", text)
    if axes == 2:
        text = text.replace("mesh tp", "mesh dp over ib\nmesh tp over nvlink", 1)
        text = text.replace("[batch, seq]", "[batch, seq], Shard(batch) @ dp", 1)
        text = re.sub(r"(output logits +:) Sh", r"\1 Shard(batch) @ dp, Sh", text)
    if kind == "zero":
        text = re.sub(r"(?m)^( *param .*?)( *#.*)?$", r"\1, stored Shard(0) @ dp", text)
    return f"device h100\n{text}"


def bound(family: str, layers: int, axes: int, kind: str = "sp") -> Bound:
    """A decoder bound to its spec on 8 ranks."""
    return on(family, layers, spec_of(family, axes, kind), MESHES[axes], SIZES)


def slow_inside(family: str) -> Bound:
    """One layer on 16 ranks whose slow link is the inner axis': what is sent there is best cut by the other first."""
    text = spec_of(family, 2, "weights").replace("over ib", "over nvlink").replace("tp over nvlink", "tp over ib")
    return on(family, 1, text, {"dp": 2, "tp": 8}, {"batch": 64, "seq": 1024})


def on(family: str, layers: int, spec: str, mesh: Mapping[str, int], sizes: Mapping[str, int]) -> Bound:
    """A decoder bound to a spec on a mesh."""
    return bind(captured(family, layers), parse(spec), mesh, device_type="cuda", sizes=sizes)
