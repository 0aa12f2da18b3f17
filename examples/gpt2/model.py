"""A small GPT-2 from transformers with random weights: fused q|k|v, biases, learned positions, a tied LM head."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB = 256


def build(
    *,
    batch: int = 4,
    seq: int = 64,
    layers: int = 2,
    heads: int = 8,
    dropout: float = 0.1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[GPT2LMHeadModel, dict[str, torch.Tensor]]:
    """The model and the keyword arguments of one call, the same ones every time.

    Args:
        batch: sequences in the example.
        seq: tokens of each sequence.
        layers: decoder layers.
        heads: attention heads, of 8 channels each.
        dropout: probability of the embedding's, the attention's and the residual's dropout.
        dtype: of the parameters.
        device: where the model lives; ``meta`` makes one without weights.

    Returns:
        The model in training mode, and ``input_ids`` and ``labels``, both [batch, seq] int64.
    """
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=8 * heads,
        n_layer=layers,
        n_head=heads,
        n_positions=1024,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,  # the default lies outside so small a vocabulary
        eos_token_id=0,
        use_cache=False,
        loss_type="ForCausalLM",  # what it falls back to, with a warning
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT2LMHeadModel(config).to(dtype).train()
    draw = torch.Generator().manual_seed(1)
    input_ids = torch.randint(0, VOCAB, (batch, seq), generator=draw)
    labels = torch.randint(0, VOCAB, (batch, seq), generator=draw)
    return model, {"input_ids": input_ids.to(device), "labels": labels.to(device)}
