"""A small decoder written by hand, its specs, and its comparison with one device.

Grouped heads, norms per head, layer norms with biases, biases everywhere, a tied head. It keeps float64 as it
is, so nothing needs lifting.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import placement
from placement import api
from placement import runtime as rt
from placement.graph.capture import capture
from placement.graph.ir import Graph

VOCAB, HIDDEN, HEADS, HEAD, WIDTH = 16, 24, 4, 6, 40
BATCH, SEQ = 3, 8


class Attention(nn.Module):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.q = nn.Linear(HIDDEN, HEADS * HEAD)
        self.k = nn.Linear(HIDDEN, kv_heads * HEAD, bias=False)
        self.v = nn.Linear(HIDDEN, kv_heads * HEAD, bias=False)
        self.o = nn.Linear(HEADS * HEAD, HIDDEN)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD, eps=1e-6), nn.RMSNorm(HEAD, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = self.q_norm(self.q(x).view(batch, seq, HEADS, HEAD)).transpose(1, 2)
        k = self.k_norm(self.k(x).view(batch, seq, self.kv_heads, HEAD)).transpose(1, 2)
        v = self.v(x).view(batch, seq, self.kv_heads, HEAD).transpose(1, 2)
        k, v = (
            t[:, :, None]
            .expand(batch, self.kv_heads, HEADS // self.kv_heads, seq, HEAD)
            .reshape(batch, HEADS, seq, HEAD)
            for t in (k, v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(batch, seq, HEADS * HEAD))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Block(nn.Module):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.mlp = Attention(kv_heads), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Toy(nn.Module):
    def __init__(self, layers: int = 1, kv_heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block(kv_heads) for _ in range(layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor, extra: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(ids)
        if extra is not None:
            x = x + extra
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return {"logits": logits, "loss": F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))}


WEIGHTS = """
mesh tp
input ids, labels : [batch, seq]
within blocks.* {
  param attention.{q,k,v}.weight : Shard(out)
  param attention.q.bias : Shard(out)
  param attention.o.weight : Shard(in)
  param mlp.up.{weight,bias} : Shard(out)
  param mlp.down.weight : Shard(in)
}
"""
NORMS = "value {blocks.*.{norm1,norm2},norm} : "
SP = WEIGHTS + NORMS + "Shard(seq)\n"
TP = WEIGHTS + NORMS + "Replicate\n"


def drawn(model: nn.Module, dtype: torch.dtype = torch.float64) -> Any:
    """The model with every parameter drawn at random, the same in every process."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=draw))
    return model.to(dtype)


def batch(seed: int = 0, size: int = BATCH, seq: int = SEQ) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randint(VOCAB, (size, seq), generator=draw) for name in ("ids", "labels")}


@functools.cache
def _captured(**config: Any) -> Graph:
    dims = ("batch", "seq")
    return capture(drawn(Toy(**config)), batch(), {"ids": dims, "labels": dims})


def pair(mesh: Any, spec: str, **config: Any) -> tuple[Any, Any]:
    """A toy and its compiled form. One graph serves all meshes and specs: capture depends on neither."""
    model = drawn(Toy(**config))
    with mock.patch.object(api, "capture", return_value=_captured(**config)):
        return model, placement.compile(model, mesh, spec, example=batch())


def ranks(program: Any) -> list[Any]:
    """The programs of the ranks in this process."""
    return program.programs if isinstance(program, rt.Simulated) else [program]


def whole(x: Any) -> Any:
    """A tensor as one device has it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


def close(got: Any, want: Any, rtol: float = 1e-11) -> None:
    """Tensors, or dicts of them, within ``rtol`` of the largest element of what is wanted."""
    if isinstance(want, dict):
        assert set(got) == set(want)
        for name, expected in want.items():
            try:
                close(got[name], expected, rtol)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
        return
    if want is None or got is None:
        assert got is want
        return
    got = whole(got).detach()
    assert got.shape == want.shape
    error = (got - want.detach()).abs().max() / want.detach().abs().max().clamp(min=1e-300)
    assert error <= rtol, f"relative error {error:.2e}"


def step(model: Any, **inputs: Any) -> Any:
    """Forward and backward of the loss."""
    out = model(**inputs)
    whole(out["loss"]).backward()
    return out
