"""The models that all peers run, in one set of sizes, and what one step gives: loss, gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

Mode = Literal["tp", "tp+sp"]
MODES: tuple[Mode, ...] = ("tp", "tp+sp")
FAMILIES = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}

_SPEC = """\
mesh tp
input input_ids, labels : [batch, seq]
param model.embed_tokens.weight : [vocab, hidden], Shard(vocab) @ tp
within model.layers.* {{
  param self_attn.{{q,k,v}}_proj.weight    : Shard(out) @ tp
  param self_attn.o_proj.weight          : Shard(in) @ tp
  param mlp.{{gate,up}}_proj.weight        : Shard(out) @ tp
  param mlp.down_proj.weight             : Shard(in) @ tp
  value {{input,post_attention}}_layernorm : {between} @ tp
}}
value model.norm     : {between} @ tp
param lm_head.weight : [vocab, hidden], Shard(vocab) @ tp
output logits        : Shard(vocab) @ tp
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One point of the grid.

    Args:
        family: ``qwen3`` or ``llama``.
        hidden: channels of the residual; 8 heads, 4 of keys and values; 3 times as many between the MLP's products.
        seq: tokens of each of ``batch`` sequences.
        tp: ranks.
        mode: what lies between the parallel regions: the whole sequence (``tp``) or a part of it (``tp+sp``).
    """

    family: str = "qwen3"
    hidden: int = 64
    seq: int = 16
    tp: int = 2
    mode: Mode = "tp+sp"
    layers: int = 4
    batch: int = 2
    vocab: int = 1024

    @property
    def spec(self) -> str:
        """The case as a spec of placement."""
        return _SPEC.format(between="Shard(seq)" if self.mode == "tp+sp" else "Replicate")

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Transformers' own model, with the same random weights every time."""
        config, model = FAMILIES[self.family]
        made = config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=self.hidden // 8,
            max_position_embeddings=max(self.seq, 64),
            use_cache=False,
        )
        built = model(made)
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():  # the same ones whatever the default dtype; norms not ones, which would hide a product
            for name, parameter in built.named_parameters():
                drawn = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
                parameter.copy_(1 + drawn / 10 if "norm" in name else drawn / 50)
        return built.to(dtype).train()

    def inputs(self) -> dict[str, Tensor]:
        """``input_ids`` and ``labels``, both [batch, seq] int64; some labels are ignored."""
        draw = torch.Generator().manual_seed(1)
        ids, labels = (torch.randint(0, self.vocab, (self.batch, self.seq), generator=draw) for _ in range(2))
        labels[0, 1:3] = -100
        return {"input_ids": ids, "labels": labels}


def shifted(labels: Tensor) -> Tensor:
    """The target of each token: the next one's label, and -100 for the last."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


def block(name: str, whole: Tensor, n: int, rank: int) -> Tensor:
    """This rank's part of the parameter ``name``: rows, columns or all of it."""
    parts = name.split(".")
    if any("norm" in part for part in parts):
        return whole
    return whole.chunk(n, 1 if parts[-2] in ("o_proj", "down_proj") else 0)[rank].contiguous()


def named(module: nn.Module) -> dict[str, Any]:
    """Parameters by the names that transformers gives them."""
    return {name.removeprefix("_orig_mod."): p for name, p in module.named_parameters()}
