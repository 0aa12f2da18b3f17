"""A small BERT from transformers with random weights: norms after the residual, biases, a tied output layer."""

from __future__ import annotations

import torch
from transformers import BertConfig, BertForMaskedLM

VOCAB = 256
IGNORED = -100  # what transformers' losses skip


def build(
    *,
    batch: int = 4,
    seq: int = 64,
    layers: int = 2,
    heads: int = 8,
    dropout: float = 0.1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[BertForMaskedLM, dict[str, torch.Tensor]]:
    """The model and the keyword arguments of one call, the same ones every time.

    Args:
        batch: sequences in the example.
        seq: tokens of each sequence.
        layers: encoder layers.
        heads: attention heads, of 8 channels each.
        dropout: probability of the hidden states' and the attention's dropout.
        dtype: of the parameters.
        device: where the model lives; ``meta`` makes one without weights.

    Returns:
        The model in training mode, and ``input_ids`` and ``labels``, both [batch, seq] int64. About a
        quarter of the labels count, as in masked language modelling; the others are ignored.
    """
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=8 * heads,
        intermediate_size=24 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=1024,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = BertForMaskedLM(config).to(dtype).train()
    draw = torch.Generator().manual_seed(1)
    input_ids = torch.randint(0, VOCAB, (batch, seq), generator=draw)
    labels = torch.randint(0, VOCAB, (batch, seq), generator=draw)
    labels = labels.where(torch.rand(batch, seq, generator=draw) < 0.25, IGNORED)
    return model, {"input_ids": input_ids.to(device), "labels": labels.to(device)}
