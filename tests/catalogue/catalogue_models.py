"""A small Llama by hand, for specs with mistakes: what it is called like is what people remember."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Grouped-query attention without biases."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, kv_heads * self.size, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer with its norms before."""

    def __init__(self, width: int, inner: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.self_attn = Attention(width, heads, kv_heads)
        self.mlp = MLP(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and a norm; ``dropout`` is never called, and ``meter`` returns no tensor."""

    def __init__(self, vocab: int, width: int, inner: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, inner, heads, kv_heads) for _ in range(2))
        self.norm = nn.RMSNorm(width)
        self.dropout = nn.Dropout(0.1)
        self.meter = Meter()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        self.meter(x)
        return self.norm(x)


class Meter(nn.Module):
    """Looks at a tensor and returns a number."""

    def forward(self, x: Tensor) -> int:
        return x.dim()


class Llama(nn.Module):
    """A decoder with a head, and the loss of the next token."""

    def __init__(self, vocab: int, width: int, inner: int, heads: int, kv_heads: int, *, tied: bool) -> None:
        super().__init__()
        self.model = Decoder(vocab, width, inner, heads, kv_heads)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.lm_head(self.model(input_ids))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def llama(
    *, vocab: int = 256, inner: int = 96, heads: int = 4, kv_heads: int = 2, seq: int = 32, tied: bool = False
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model on the meta device, and the keyword arguments of one call."""
    with torch.device("meta"):
        model = Llama(vocab, 32, inner, heads, kv_heads, tied=tied)
        ids, labels = (torch.zeros(2, seq, dtype=torch.int64) for _ in range(2))
    return model, {"input_ids": ids, "labels": labels}
