"""The root mean square norm of rows that a rank has whole, keeping for its backward no more than it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from placement.runtime.means import accumulated

if TYPE_CHECKING:
    from torch import Tensor


def lean_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """I → I, R → R, S → S: ``F.rms_norm`` of ``x`` [..., size] over its last dim, with a weight [size] or none.

    Computed in float32 at least. Where torch composes it, its backward keeps the normalised rows as well; this one
    keeps ``x`` and a number for each row. Accelerators have a kernel that does as much.
    """
    if x.device.type != "cpu" or not torch.is_grad_enabled():
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return _RMSNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]


class _RMSNorm(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x²) + eps), n = x r and h = g · weight: dx = r (h - n · mean(h n)), dweight = Σ g n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        dtype = accumulated(x.dtype)
        wide = x if x.dtype is dtype else x.to(dtype)
        root = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, root)
        ctx.eps = eps
        result = wide * root
        if weight is not None:
            result.mul_(weight)
        return result if result.dtype is x.dtype else result.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, root = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody asks for a second derivative: autograd knows the way
            needed = [t for t, needs in zip((x, weight), ctx.needs_input_grad, strict=False) if needs]
            plain = F.rms_norm(x, (x.shape[-1],), weight, ctx.eps)
            found = iter(torch.autograd.grad(plain, needed, grad, create_graph=True))
            return (*(next(found) if needs else None for needs in ctx.needs_input_grad[:2]), None)
        wide, grad = x.to(root.dtype), grad.to(root.dtype)
        normal = wide * root
        of_weight = of_x = None
        if weight is not None and ctx.needs_input_grad[1]:
            of_weight = (grad * normal).flatten(0, -2).sum(0).to(weight.dtype) if x.ndim > 1 else grad * normal
        if ctx.needs_input_grad[0]:
            grad = grad if weight is None else grad * weight
            mean = (grad * normal).mean(-1, keepdim=True)
            of_x = normal.mul_(mean).neg_().add_(grad).mul_(root).to(x.dtype)
        return of_x, of_weight, None
