"""A small Qwen3 from transformers with random weights: q and k norms, grouped-query attention, SwiGLU."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB = 256  # bytes


def build(
    *,
    batch: int = 4,
    seq: int = 64,
    layers: int = 4,
    heads: int = 8,
    kv_heads: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Qwen3ForCausalLM, dict[str, torch.Tensor]]:
    """The model and the keyword arguments of one call, the same ones every time.

    Args:
        batch: sequences in the example.
        seq: tokens of each sequence.
        layers: decoder layers.
        heads: query heads, of 16 channels each.
        kv_heads: key and value heads; must divide ``heads``.
        dtype: of the parameters.
        device: where the model lives; ``meta`` makes one without weights.

    Returns:
        The model in training mode, and ``input_ids`` and ``labels``, both [batch, seq] int64.
    """
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16 * heads,
        intermediate_size=32 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=1024,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(dtype).train()
    draw = torch.Generator().manual_seed(1)
    # Two tensors, though a language model's labels are its inputs: torch.export merges one passed twice.
    input_ids = torch.randint(0, VOCAB, (batch, seq), generator=draw)
    labels = torch.randint(0, VOCAB, (batch, seq), generator=draw)
    return model, {"input_ids": input_ids.to(device), "labels": labels.to(device)}
