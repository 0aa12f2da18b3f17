"""A small Llama from transformers with random weights: grouped-query attention, rotary positions, SwiGLU."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 256


def build(
    *,
    batch: int = 4,
    seq: int = 64,
    layers: int = 2,
    heads: int = 8,
    kv_heads: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    """The model and the keyword arguments of one call, the same ones every time.

    Args:
        batch: sequences in the example.
        seq: tokens of each sequence.
        layers: decoder layers.
        heads: query heads, of 8 channels each.
        kv_heads: key and value heads; must divide ``heads``.
        dtype: of the parameters.
        device: where the model lives; ``meta`` makes one without weights.

    Returns:
        The model in training mode, and ``input_ids`` and ``labels``, both [batch, seq] int64.
    """
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8 * heads,
        intermediate_size=24 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=1024,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype).train()
    draw = torch.Generator().manual_seed(1)
    input_ids = torch.randint(0, VOCAB, (batch, seq), generator=draw)
    labels = torch.randint(0, VOCAB, (batch, seq), generator=draw)
    return model, {"input_ids": input_ids.to(device), "labels": labels.to(device)}
