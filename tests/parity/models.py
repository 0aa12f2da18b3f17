"""The four transformers models of the parity tests: small, of odd sizes, every weight drawn at random.

Defaults of ones and zeros in norms and biases would hide a gradient summed twice or a bias added n times, so
all parameters are drawn anew. Sizes are no powers of two; heads and the vocabulary divide by 4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FAMILIES = ("qwen3", "llama", "gpt2", "bert")
MODES = {"sp": "", "tp": "_tp"}
VOCAB, HIDDEN, HEADS, KV_HEADS, LAYERS = 88, 48, 8, 4, 2

_SHARED = {"hidden_size": HIDDEN, "intermediate_size": 72, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
_DECODER = {**_SHARED, "vocab_size": VOCAB, "num_key_value_heads": KV_HEADS, "use_cache": False}


def _qwen3(**more: Any) -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**_DECODER, "head_dim": 10, **more}))


def _llama(**more: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_DECODER, **more}))


def _gpt2(**more: Any) -> nn.Module:
    sizes = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCAB, "n_positions": 64}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    rest = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False, "loss_type": "ForCausalLM"}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **still, **rest, **more}))


def _bert(**more: Any) -> nn.Module:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "use_cache": False}
    config = transformers.BertConfig(**{**_SHARED, "vocab_size": VOCAB, "max_position_embeddings": 64, **still, **more})
    return transformers.BertForMaskedLM(config)


_BUILD = {"qwen3": _qwen3, "llama": _llama, "gpt2": _gpt2, "bert": _bert}


def build(family: str, dtype: torch.dtype = torch.float64, **config: Any) -> nn.Module:
    """The model in training mode, the same weights in every process."""
    model = _BUILD[family](**config).to(dtype).train()
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return model


def spec(family: str, mode: str = "sp", *, embeds: bool = False) -> str:
    """The example's own spec; with ``embeds``, for a call with ``inputs_embeds`` instead of ``input_ids``."""
    text = (EXAMPLES / family / f"{family}{MODES[mode]}.plc").read_text(encoding="utf-8")
    if not embeds:
        return text
    line = "input input_ids, labels : [batch, seq]"
    assert line in text
    return text.replace(line, "input inputs_embeds : [batch, seq, hidden]\ninput labels : [batch, seq]")


def inputs(batch: int = 3, seq: int = 12, *, embeds: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """One call's arguments, the same in every process; a few labels are ignored, unequally over the sequence."""
    draw = torch.Generator().manual_seed(1000 * seed + 10 * batch + seq)
    labels = torch.randint(0, VOCAB, (batch, seq), generator=draw)
    labels[0, : seq // 3] = -100
    if embeds:
        x = torch.randn(batch, seq, HIDDEN, generator=draw, dtype=torch.float64)
        return {"inputs_embeds": x.requires_grad_(), "labels": labels}
    return {"input_ids": torch.randint(0, VOCAB, (batch, seq), generator=draw), "labels": labels}
