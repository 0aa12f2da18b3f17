"""The root mean square norm of rows that a rank has whole, keeping for its backward no more than it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from placement.runtime._torch import applied, root_mean_square

if TYPE_CHECKING:
    from torch import Tensor


def lean_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """I → I, R → R, S → S: ``F.rms_norm`` of ``x`` [..., size] over its last dim, with a weight [size] or none.

    Computed in float32 at least. Where torch composes it, its backward keeps the normalised rows as well; this one
    keeps ``x`` and a number for each row. Accelerators have a kernel that does as much.
    """
    if not x.is_cpu or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        if x.ndim < 3 or x.is_contiguous():
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        # The kernel would copy what lies with dim 1 outermost.
        return F.rms_norm(x.transpose(0, 1), (x.shape[-1],), weight, eps).transpose(0, 1)
    return applied(_RMSNorm, x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x²) + eps), n = x r and h = g · weight: dx = r (h - n · mean(h n)), dweight = Σ g n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        lies = x.is_contiguous() or x.ndim < 3
        result, root = root_mean_square(x if lies else x.transpose(0, 1), weight, eps)
        if not lies:  # as [batch, tokens, ...] that lie with their tokens outermost
            result, root = result.transpose(0, 1), root.transpose(0, 1)
        ctx.save_for_backward(x, weight, root)
        ctx.eps = eps
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, root = ctx.saved_tensors
        needs: tuple[bool, ...] = ctx.needs_input_grad
        if torch.is_grad_enabled():  # somebody asks for a second derivative: autograd knows the way
            needed = [t for t, need in zip((x, weight), needs, strict=False) if need]
            plain = F.rms_norm(x, (x.shape[-1],), weight, ctx.eps)
            found = iter(torch.autograd.grad(plain, needed, grad, create_graph=True))
            return (*(next(found) if need else None for need in needs[:2]), None)
        dtype = root.dtype  # compared before a call of ``to``, which takes its time to find that nothing is to do
        wide, grad = x if x.dtype is dtype else x.to(dtype), grad if grad.dtype is dtype else grad.to(dtype)
        normal = wide * root
        of_weight = of_x = None
        if weight is not None and needs[1]:
            of_weight = grad * normal
            if x.ndim > 1:  # no dims are joined first, which would copy rows that lie in another order
                of_weight = of_weight.sum(tuple(range(x.ndim - 1)))
            of_weight = of_weight if weight.dtype is dtype else of_weight.to(weight.dtype)
        if needs[0]:
            grad = grad if weight is None else grad * weight
            total = (grad * normal).sum(-1, keepdim=True)  # over the size it is the mean, at fewer launches
            of_x = torch.addcmul(grad, normal, total, value=-1 / max(x.shape[-1], 1), out=normal).mul_(root)
            of_x = of_x if x.dtype is dtype else of_x.to(x.dtype)
        return of_x, of_weight, None
