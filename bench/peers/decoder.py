"""A decoder written around whatever joins products and collectives: ``expert.Native`` or ``spmd.Typed``."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bench.peers.models import Case, block, shifted

Norms = Literal["torch", "model", "lean"]


class _Rotary(torch.autograd.Function):
    """Rotary positions of queries and keys [t, heads, channels]; saves nothing of them."""

    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return tuple(_turned(x, cos, sin, 1) for x in xs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(_turned(grad, *ctx.saved_tensors, -1) for grad in grads))


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """``cos`` and ``sin`` of the angles of half of the channels."""
    first, second = x.unflatten(-1, (2, -1)).unbind(-2)
    out = x * cos
    one, two = out.unflatten(-1, (2, -1)).unbind(-2)
    one.addcmul_(second, sin, value=-sign)
    two.addcmul_(first, sin, value=sign)
    return out


class Decoder(nn.Module):
    """This rank's part of ``case``, with the names of transformers' parameters, dots as double underscores.

    Args:
        case: sizes and mode.
        model: transformers' own, whose weights these are parts of.
        ops: products and collectives.
        norms: torch's ``rms_norm``, or what transformers writes. ``lean``: functions that save their inputs and little
            else, here and between gate and up.
    """

    def __init__(self, case: Case, model: Any, ops: Any, norms: Norms = "torch") -> None:
        super().__init__()
        self.case, self.ops = case, ops
        self.norm = {"torch": _norm, "model": _written_norm, "lean": _LeanNorm.apply}[norms]
        self.gated = _gated if norms != "lean" else _LeanGate.apply
        for name, whole in model.state_dict().items():
            part = block(name, whole, ops.size, ops.rank).clone()
            self.register_parameter(name.replace(".", "__"), nn.Parameter(part))
        channels = case.hidden // 8
        frequencies = model.model.rotary_emb.inv_freq.to(model.lm_head.weight.dtype)
        angles = torch.outer(torch.arange(case.seq).to(frequencies), frequencies)
        shape = (-1, 1, 1, channels) if ops.seq_first else (1, -1, 1, channels)
        cos = torch.cat((angles.cos(),) * 2, -1).view(shape)
        half = (*shape[:-1], channels // 2)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", angles.sin().view(half), persistent=False)
        self.layers = [
            {
                name.removeprefix(f"model__layers__{i}__"): p
                for name, p in self.named_parameters()
                if name.startswith(f"model__layers__{i}__")
            }
            for i in range(case.layers)
        ]
        own = [name for name, _ in self.named_parameters() if "norm" in name]
        if not ops.sp:
            own = [name for name in own if "q_norm" in name or "k_norm" in name]
        self.replicated = [getattr(self, name) for name in own]

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss, and this rank's logits [batch, seq, classes / n]."""
        ops, target = self.ops, shifted(labels)
        if ops.seq_first:
            input_ids, target = input_ids.t(), target.t()
        x = ops.embed(input_ids, self.model__embed_tokens__weight)
        for layer in self.layers:
            x = x + self.attention(self.norm(x, layer["input_layernorm__weight"]), layer)
            x = x + self.mlp(self.norm(x, layer["post_attention_layernorm__weight"]), layer)
        (logits,) = ops.columns(self.norm(x, self.model__norm__weight), self.lm_head__weight)
        loss = ops.loss(logits, target)
        return loss, logits.transpose(0, 1) if ops.seq_first else logits

    def attention(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        """x: normed, this rank's part."""
        ops, channels = self.ops, self.case.hidden // 8
        made = ops.columns(x, *(w[f"self_attn__{name}_proj__weight"] for name in "qkv"))
        q, k, v = (y.unflatten(-1, (-1, channels)) for y in made)
        if self.case.family == "qwen3":
            q, k = self.norm(q, w["self_attn__q_norm__weight"]), self.norm(k, w["self_attn__k_norm__weight"])
        q, k = _Rotary.apply(self.cos, self.sin, q, k)
        order = (1, 2, 0, 3) if ops.seq_first else (0, 2, 1, 3)
        q, k, v = (y.permute(order) for y in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return ops.row(out.permute((2, 0, 1, 3) if ops.seq_first else order).flatten(2), w["self_attn__o_proj__weight"])

    def mlp(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        """x: normed, this rank's part."""
        gate, up = self.ops.columns(x, w["mlp__gate_proj__weight"], w["mlp__up_proj__weight"])
        return self.ops.row(self.gated(gate, up), w["mlp__down_proj__weight"])

    def finish(self) -> None:
        """After ``backward``: sum what ranks have terms of."""
        self.ops.reduce_replicated(self.replicated)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def _written_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class _LeanNorm(torch.autograd.Function):
    """``rms_norm`` that saves x and a number per row, as torch's does on CUDA."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True).add_(1e-6))
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        dw = (dy * normed).flatten(0, -2).sum(0)
        dn = dy * weight
        return dn.addcmul_(normed, (dn * normed).mean(-1, keepdim=True), value=-1).mul_(scale), dw


class _LeanGate(torch.autograd.Function):
    """``silu(gate) * up`` that saves only the two."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
