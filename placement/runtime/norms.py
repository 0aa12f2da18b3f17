"""Norms over dims that no rank has whole: the statistics are reduced, and the tensor stays where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from placement.runtime.exchange import all_reduce, replicated
from placement.runtime.means import accumulated

if TYPE_CHECKING:
    from torch import Tensor

    from placement.runtime.axis import Axis


def layer_norm(
    x: Tensor, axis: Axis, count: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """S → S: ``F.layer_norm`` over the last ``count`` dims, one of which lies in equal blocks, as weight and bias do.

    Each way two all-reduces, of the means and of the variances: a number per row, in float32 where x is narrower.
    """
    wide = x.to(accumulated(x.dtype))
    centred = wide - _mean(wide, axis, count)
    normal = centred * (_mean(centred.square(), axis, count) + eps).rsqrt()
    return _scaled(normal.to(x.dtype), weight, bias)


def rms_norm(x: Tensor, axis: Axis, count: int, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """S → S: ``F.rms_norm`` over the last ``count`` dims, one of which lies in equal blocks, as the weight does.

    Each way one all-reduce of the mean squares: a number per row, in float32 where x is narrower. Without ``eps``, what
    that dtype's next number after one is off by.
    """
    wide = x.to(accumulated(x.dtype))
    if eps is None:
        eps = torch.finfo(wide.dtype).eps
    normal = wide * (_mean(wide.square(), axis, count) + eps).rsqrt()
    return _scaled(normal.to(x.dtype), weight, None)


def _mean(x: Tensor, axis: Axis, count: int) -> Tensor:
    """Over all ranks' blocks, which are of one size; each rank goes on with it in its own way."""
    own = x.mean(tuple(range(-count, 0)), keepdim=True)
    return replicated(all_reduce(own / axis.size, axis), axis)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias
