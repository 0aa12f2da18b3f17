"""Products with weights, of tensors [batch, tokens, size] in either order of memory.

*Turned* is a tensor [batch, tokens, size] that lies in memory as [tokens, batch, size]. Blocks of tokens that lie so
are sent and received as they are, one after the other. Products read one order and write the other at no cost, so
that nothing is copied on the way.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from placement.runtime.axis import Step
from placement.runtime.cuts import Cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# What gathers, and what sums, blocks of tokens that lie turned.
TURNED = Step("all_gather", Cut(0)), Step("reduce_scatter", Cut(0))
# Of more sequences than this one order is copied to the other for a sum over both, instead of adding up one by one.
_SEQUENCES = 8


def outermost(x: Tensor, dim: int) -> Tensor:
    """``x`` with ``dim`` outermost in memory: itself if it lies so, else a copy."""
    return x.movedim(dim, 0).contiguous().movedim(0, dim)


def turns(x: Tensor, dim: int, outer: int, segments: tuple[int, ...]) -> bool:
    """Whether blocks along ``dim`` can lie turned: of whole tokens."""
    return dim == 1 and outer == 1 and not segments and x.ndim == 3


def is_turned(x: Tensor) -> bool:
    """Whether the rows of ``x`` [batch, tokens, size] lie in memory as those of [tokens, batch, size]."""
    if x.is_contiguous():
        return x.shape[0] == 1 or x.shape[1] == 1
    batch, _, size = x.shape
    return x.stride() == (size, batch * size, 1) or x.transpose(0, 1).is_contiguous()


def rows(x: Tensor) -> Tensor:
    """[..., size] as [rows, size]."""
    if x.ndim == 2:
        return x
    size = x.shape[-1]
    return x.reshape(-1, size) if size else x.reshape(prod(x.shape[:-1]), 0)


def as_sent(x: Tensor) -> Tensor | None:
    """[batch, tokens, size] as [tokens · batch, size], None where that would copy and what can do without follows."""
    if is_turned(x) or torch.is_grad_enabled():
        return rows(x.transpose(0, 1))
    return None


def from_turned(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` [tokens, batch, in] times ``weight`` [in, out], as a contiguous [batch, tokens, out]."""
    tokens, batch, _ = x.shape
    if batch == 1 or torch.is_grad_enabled():
        return F.linear(x, weight.t(), bias).transpose(0, 1).contiguous()
    out = x.new_empty((batch, tokens, weight.shape[1]))
    weights = weight.expand(batch, -1, -1)
    if bias is None:
        return torch.bmm(x.transpose(0, 1), weights, out=out)
    return torch.baddbmm(bias, x.transpose(0, 1), weights, out=out)


def to_turned(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` [batch, tokens, in], in any order, times ``weight`` [in, out], as a contiguous [tokens, batch, out]."""
    flat = as_sent(x)
    batch, tokens, _ = x.shape
    return (add_turned(None, x, weight) if flat is None else flat.mm(weight)).view(tokens, batch, -1)


def add_turned(total: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    """``x`` [batch, tokens, in] times ``weight``, added to ``total`` [tokens · batch, out] if given: in place."""
    batch, tokens, _ = x.shape
    size = weight.shape[1]
    out = x.new_empty((tokens * batch, size)) if total is None else total
    lies, weights = out.view(tokens, batch, size).transpose(0, 1), weight.expand(batch, -1, -1)
    if total is None:
        torch.bmm(x, weights, out=lies)
    else:
        lies.baddbmm_(x, weights)
    return out


def weight_gradient(gradient: Tensor, x: Tensor, total: Tensor | None = None) -> Tensor:
    """[out, in]: the sum over rows of ``gradient`` [..., out] and ``x`` [..., in], each in its own order.

    It is added to ``total`` if given: in place.
    """
    if gradient.ndim == 3 and not torch.is_grad_enabled():
        turned, other = is_turned(gradient), is_turned(x)
        batch = x.shape[0]
        if turned != other and batch <= _SEQUENCES:
            for index in range(batch):
                total = _added(total, gradient[index], x[index])
            if total is not None:  # of no sequence there is nothing to add up
                return total
        if other if gradient.numel() < x.numel() else turned:
            gradient, x = gradient.transpose(0, 1), x.transpose(0, 1)
    return _added(total, rows(gradient), rows(x))


def _added(total: Tensor | None, gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.t().mm(x) if total is None else total.addmm_(gradient.t(), x)


def filled(grads: Sequence[Tensor | None], layers: int) -> tuple[tuple[Tensor | None, ...], list[int]]:
    """Gradients of the results of so many layers, rank by rank, and the layers that have any.

    Of these, a rank that lacks what another one has gets zeros.
    """
    found, live = list(grads), []
    for layer in range(layers):
        like = next((grad for grad in grads[layer::layers] if grad is not None), None)
        if like is not None:
            live.append(layer)
            found[layer::layers] = [torch.zeros_like(like) if grad is None else grad for grad in grads[layer::layers]]
    return tuple(found), live
