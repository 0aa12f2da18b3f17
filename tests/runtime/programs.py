"""A hand-written program as the compiler emits them, and the one-device model it stands for.

Small, but with one of everything: a tied embedding and head used by invariant data, a norm under sequence
sharding, a fused gate|up weight cut inside each half, a per-head scale on sharded heads, a row-parallel weight and its
bias, a parameter that the loss does not reach, a frozen one, and buffers of both kinds.
"""

# ruff: noqa: RUF012 - class attributes as emitted code has them

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from placement import runtime as rt

VOCAB, HIDDEN, WIDTH, HEADS, BATCH, SEQ = 16, 8, 24, 4, 3, 8


class OneDevice(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embed = nn.Module()
        self.embed.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN, dtype=dtype))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.randn(HIDDEN, dtype=dtype))
        self.mlp = nn.Module()
        self.mlp.gate_up = nn.Parameter(torch.randn(2 * WIDTH, HIDDEN, dtype=dtype) / 4)
        self.mlp.scale = nn.Parameter(torch.randn(WIDTH // HEADS, dtype=dtype))
        self.mlp.down = nn.Parameter(torch.randn(HIDDEN, WIDTH, dtype=dtype) / 4)
        self.mlp.bias = nn.Parameter(torch.randn(HIDDEN, dtype=dtype))
        self.unused = nn.Parameter(torch.randn(5, dtype=dtype))
        self.frozen = nn.Parameter(torch.randn(HIDDEN, dtype=dtype), requires_grad=False)
        self.register_buffer("shift", torch.randn(HIDDEN, dtype=dtype))
        self.register_buffer("hidden_shift", torch.randn(HIDDEN, dtype=dtype), persistent=False)
        self.lm_head = nn.Module()
        self.lm_head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor, extra: Tensor | None = None) -> dict[str, Tensor]:
        h = F.embedding(input_ids, self.embed.weight)
        if extra is not None:
            h = h + extra
        h = h * self.frozen + self.shift + self.hidden_shift
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm.weight
        gate, up = F.linear(h, self.mlp.gate_up).chunk(2, -1)
        act = (F.silu(gate) * up).unflatten(-1, (HEADS, WIDTH // HEADS)) * self.mlp.scale
        h = F.linear(act.flatten(-2), self.mlp.down) + self.mlp.bias
        logits = F.linear(h, self.lm_head.weight)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "act": act}


class Weight(rt.Module):
    pass


class Norm(rt.Module):
    def forward(self, x: Tensor) -> Tensor:
        weight = rt.summed(self, "weight", self.tp)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


class Mlp(rt.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = rt.all_gather(x, self.tp, 1, to="R")
        gate, up = F.linear(hidden, self.gate_up).chunk(2, -1)
        scale = rt.summed(self, "scale", self.tp)
        act = (F.silu(gate) * up).unflatten(-1, (-1, WIDTH // HEADS)) * scale
        out = rt.reduce_scatter(F.linear(act.flatten(-2), self.down), self.tp, 1)
        return out + rt.summed(self, "bias", self.tp), act


class Net(rt.Program):
    inputs = {
        "input_ids": (("batch", "seq"), None, "int"),
        "labels": (("batch", "seq"), None, "int"),
        "extra": (("batch", "seq", HIDDEN), None, "float"),
    }
    outputs = {"loss": None, "logits": None, "act": rt.Cut(2)}
    hooks = {"tp": (("norm.weight", "mlp.scale", "mlp.bias", "unused"),)}

    def forward(self, input_ids: Tensor, labels: Tensor, extra: Tensor | None = None) -> Any:
        h = F.embedding(input_ids, self.embed.weight)
        if extra is not None:
            h = h + extra
        h = h * self.frozen + self.shift + self.hidden_shift
        h = rt.split(h, self.tp, 1, of="I")
        h, act = self.mlp(self.norm(h))
        h = rt.all_gather(h, self.tp, 1, to="I")
        logits = F.linear(h, self.lm_head.weight)
        rt.summed(self, "unused", self.tp)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return rt.Output(loss=loss, logits=logits, act=act)


class Net2(Net):
    axes = {"tp": 2}
    divides = {"seq": 2}


class Net4(Net):
    axes = {"tp": 4}
    divides = {"seq": 4}


class Net1(Net):
    axes = {"tp": 1}


NETS = {1: Net1, 2: Net2, 4: Net4}


def build(n: int, dtype: torch.dtype = torch.float64) -> Net:
    """The program for ``n`` ranks, not yet on a mesh."""
    return NETS[n](
        embed=Weight(weight=rt.param(VOCAB, HIDDEN, dtype=dtype)),
        norm=Norm(weight=rt.param(HIDDEN, dtype=dtype)),
        mlp=Mlp(
            gate_up=rt.param(2 * WIDTH, HIDDEN, dtype=dtype, cut=rt.Cut(0, 2)),
            scale=rt.param(WIDTH // HEADS, dtype=dtype),
            down=rt.param(HIDDEN, WIDTH, dtype=dtype, cut=rt.Cut(1)),
            bias=rt.param(HIDDEN, dtype=dtype),
        ),
        unused=rt.param(5, dtype=dtype),
        frozen=rt.param(HIDDEN, dtype=dtype, trainable=False),
        shift=rt.buffer(HIDDEN, dtype=dtype),
        hidden_shift=rt.buffer(HIDDEN, dtype=dtype, persistent=False),
        lm_head=Weight(weight=rt.tied("embed.weight")),
    )


def one_device(dtype: torch.dtype = torch.float64) -> OneDevice:
    """The model, with the same weights in every process."""
    torch.manual_seed(7)
    return OneDevice(dtype)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Its parameters and all buffers by name."""
    return {**model.state_dict(), **dict(model.named_buffers())}


def batch(seed: int = 0, batch: int = BATCH, seq: int = SEQ) -> dict[str, Tensor]:
    """Inputs, the same in every process."""
    g = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(VOCAB, (batch, seq), generator=g),
        "labels": torch.randint(VOCAB, (batch, seq), generator=g),
    }


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """One-device gradients by name, tied names included."""
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


def assert_same(got: dict[str, Any], want: dict[str, Any], rtol: float = 1e-11) -> None:
    """Same names; values within ``rtol`` of the largest element, or None in both."""
    assert set(got) == set(want)
    for name, expected in want.items():
        if expected is None:
            assert got[name] is None, name
            continue
        assert got[name] is not None, name
        error = (got[name] - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
        assert error <= rtol, f"{name}: relative error {error:.2e}"
