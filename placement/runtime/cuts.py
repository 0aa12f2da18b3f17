"""Where a shard lies in a tensor: cutting one out, and joining all of them again. No communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from placement.runtime.errors import SizeError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """A dim viewed as (outer, rest); the ranks' blocks are of ``rest``.

    ``Cut(0)`` is torch's ``chunk`` along dim 0. A merged batch·seq dim sharded on seq has ``outer`` =
    batch; a fused q|k|v weight sharded by head has ``outer`` = 3.
    """

    dim: int
    outer: int = 1

    def __post_init__(self) -> None:
        if self.outer < 1:
            raise ValueError(f"a cut has an outer size of at least 1, not {self.outer}")


def _dim(shape: torch.Size, cut: Cut) -> int:
    if not -len(shape) <= cut.dim < len(shape):
        raise SizeError(f"no dim {cut.dim} in a tensor of shape {list(shape)}")
    return cut.dim % len(shape)


def local_shape(shape: tuple[int, ...], cut: Cut, n: int, what: str) -> tuple[int, ...]:
    """The shape of one of ``n`` equal blocks; ``what`` names the value and the axis in the error.

    Raises:
        SizeError: the dim is not ``outer · n · whole``.
    """
    dim = _dim(torch.Size(shape), cut)
    size = shape[dim]
    if size % (cut.outer * n):
        into = f"{n} equal blocks" if cut.outer == 1 else f"{n} equal blocks in each of {cut.outer} parts"
        raise SizeError(f"{what}: dim {dim} of shape {list(shape)} has size {size}, which does not make {into}")
    return (*shape[:dim], size // n, *shape[dim + 1 :])


def block(x: Tensor, cut: Cut, n: int, rank: int, what: str = "split") -> Tensor:
    """Block ``rank`` of ``n`` of ``x``, contiguous; a view of ``x`` where that is contiguous."""
    shape = local_shape(tuple(x.shape), cut, n, what)
    return _opened(x, cut, n).select(_dim(x.shape, cut) + 1, rank).reshape(shape).contiguous()


def blocks(x: Tensor, cut: Cut, n: int, what: str = "split") -> Tensor:
    """All ``n`` blocks of ``x``, stacked: [n, *block], contiguous; may share memory with ``x``."""
    shape = local_shape(tuple(x.shape), cut, n, what)
    return _opened(x, cut, n).movedim(_dim(x.shape, cut) + 1, 0).reshape(n, *shape).contiguous()


def joined(stack: Tensor, cut: Cut, what: str = "join") -> Tensor:
    """The full tensor of stacked blocks [n, *block], contiguous; the inverse of ``blocks``."""
    n, shape = stack.shape[0], stack.shape[1:]
    dim = _dim(shape, cut)
    if shape[dim] % cut.outer:
        raise SizeError(f"{what}: a block of shape {list(shape)} does not make {cut.outer} equal parts of dim {dim}")
    parts = stack.unflatten(dim + 1, (cut.outer, shape[dim] // cut.outer))
    full = (*shape[:dim], n * shape[dim], *shape[dim + 1 :])
    return parts.movedim(0, dim + 1).reshape(full).contiguous()


def padded(x: Tensor, cut: Cut, n: int, rank: int) -> Tensor:
    """Zeros of the full shape with ``x`` as block ``rank`` of ``n``."""
    dim = _dim(x.shape, cut)
    if x.shape[dim] % cut.outer:
        raise SizeError(f"pad: a block of shape {list(x.shape)} does not make {cut.outer} equal parts of dim {dim}")
    full = x.new_zeros((*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :]))
    window = _opened(full, cut, n).select(dim + 1, rank)
    window.copy_(x.reshape(window.shape))
    return full


def _opened(x: Tensor, cut: Cut, n: int) -> Tensor:
    """``x`` viewed with its cut dim as (outer, n, rest of the block)."""
    dim = _dim(x.shape, cut)
    return x.unflatten(dim, (cut.outer, n, x.shape[dim] // (cut.outer * n)))
