"""A mean whose terms lie on several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from placement.runtime.axis import ALL_REDUCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from placement.runtime.axis import Axis


def mean(
    x: Tensor,
    axis: Axis,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """S → P: ``x.mean(dim)`` where one of the reduced dims (all, if none is given) is sharded.

    The local sum over the global count, which one all-reduce of 8 bytes finds: blocks may be of unequal size or
    empty. Where all are empty the result is NaN, as on one device. Dual: each rank's block gets the
    cotangent over the count; nothing is sent backward.

    Raises:
        RuntimeError: ``x`` is of integers and no ``dtype`` is given.
    """
    out = dtype or x.dtype
    if not (out.is_floating_point or out.is_complex):
        raise RuntimeError(f"mean of {out}: a mean is a floating-point or complex number")
    dims = tuple(range(x.ndim)) if dim is None or dim == () else (dim,) if isinstance(dim, int) else tuple(dim)
    total = x.sum(dims, keepdim=keepdim, dtype=accumulated(out)) if x.ndim else x.to(accumulated(out))
    terms = 1
    for d in dims:
        terms *= x.shape[d]
    # Filled on the device: a tensor made of a Python number would be copied there, and waited for.
    count = global_count(torch.full((), terms, device=x.device), axis)
    return (total / count).to(out)


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which terms of ``dtype`` are summed, as torch does: float32 for narrower ones."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def global_count(count: Tensor, axis: Axis) -> Tensor:
    """The sum of the ranks' counts: one all-reduce of 8 bytes."""
    return axis.run(ALL_REDUCE, count)
