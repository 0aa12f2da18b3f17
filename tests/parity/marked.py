"""Attention whose mask a model writes out, from positions and from marks of tokens that are inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, SEQ, WIDTH, HEADS, INNER = 2, 24, 10, 12, 4
KV = {"multi-head": 12, "grouped": 4, "multi-query": 1}


def causal(at: Tensor, _: Tensor, __: Tensor) -> Tensor:
    return at[:, None] >= at[None]


def everything(at: Tensor, _: Tensor, __: Tensor) -> Tensor:
    return (at[:, None] >= 0) & (at[None] >= 0)


def packed(at: Tensor, documents: Tensor, _: Tensor) -> Tensor:
    return causal(at, documents, documents) & (documents[:, None, :, None] == documents[:, None, None, :])


def window(at: Tensor, _: Tensor, __: Tensor) -> Tensor:
    return causal(at, at, at) & (at[:, None] - at[None] < 5)


def padded(at: Tensor, _: Tensor, kept: Tensor) -> Tensor:
    return causal(at, at, at) & kept.bool()[:, None, None]


MASKS = {"causal": causal, "bidirectional": everything, "packed": packed, "window": window, "padded": padded}


class Attention(nn.Module):
    """Queries, keys and values with biases, and what comes out of them projected."""

    def __init__(self, mask: str, kv: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.mask, self.dropout = MASKS[mask], dropout
        self.q, self.out = nn.Linear(WIDTH, HEADS * INNER), nn.Linear(HEADS * INNER, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, kv * INNER), nn.Linear(WIDTH, kv * INNER)

    def forward(self, x: Tensor, documents: Tensor, kept: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, INNER)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mask = self.mask(torch.arange(x.shape[1]), documents, kept)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A loss in which every token has its own share."""

    def __init__(self, mask: str, kv: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = Attention(mask, kv, dropout)

    def forward(self, x: Tensor, documents: Tensor, kept: Tensor) -> dict[str, Tensor]:
        y = self.attention(x, documents, kept)
        return {"y": y, "loss": (y * torch.arange(1, x.shape[1] + 1)[:, None]).square().sum()}


def inputs() -> dict[str, Tensor]:
    """Documents that end inside of blocks, one longer than a block; of one row the first queries see nothing."""
    at, generator = torch.arange(SEQ), torch.Generator().manual_seed(1)
    ends = torch.tensor([[2, 5, SEQ], [13, 15, SEQ]])
    return {
        "x": torch.randn(BATCH, SEQ, WIDTH, generator=generator, dtype=torch.float64).requires_grad_(),
        "documents": (at[None, :, None] >= ends[:, None]).sum(-1),
        "kept": torch.stack((at >= 7, at < 11)).long(),
    }


NAMES = ("batch", "seq", "width")
ORDERS = ("", ", zigzag")


def spec(way: str, order: str = "") -> str:
    """Only the tokens are placed; a launch costs next to nothing."""
    return (
        "mesh cp over quick\nlink quick = 10 GB/s, 1 ns\n"
        f"input x : [batch, seq, width], Shard(seq{order}) @ cp\n"
        f"input documents, kept : [batch, seq], Shard(seq{order}) @ cp\n"
        f"strategy attention : {way} @ cp\n"
    )
