"""The oracle: what a list of rank tensors and a type mean as one global tensor, and back.

Independent of the package: blocks are found by indexing element by element along the dim, so it shares no
way of thinking with ``placement.runtime.cuts``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """Block ``r`` of the dim viewed as (outer, rest), or of each of the segments of rest, whose sizes are in ratio.

    In ``zigzag`` it is chunks r and 2n-1-r of 2n.
    """

    dim: int
    outer: int = 1
    segments: tuple[int, ...] = ()
    zigzag: bool = False


Type = Literal["I", "R", "P"] | Shard
DUAL: dict[Type, Type] = {"I": "I", "R": "P", "P": "R"}


def dual(of: Type) -> Type:
    """The type of the cotangent."""
    return DUAL.get(of, of)


def indices(size: int, of: Shard, n: int, rank: int) -> Tensor:
    """Which indices of a dim of ``size`` rank ``rank`` holds, in its own order."""
    ratio = of.segments or (1,)
    unit = size // (of.outer * sum(ratio))
    assert size == of.outer * sum(ratio) * unit
    mine: list[int] = []
    start = 0
    for _ in range(of.outer):
        for length in ratio:
            chunks = 2 * n if of.zigzag else n
            assert length * unit % chunks == 0
            owned = {rank, 2 * n - 1 - rank} if of.zigzag else {rank}
            mine += [start + i for i in range(length * unit) if i * chunks // (length * unit) in owned]
            start += length * unit
    return torch.tensor(mine, dtype=torch.long)


def to_ranks(x: Tensor, of: Type, n: int, seed: int = 0) -> list[Tensor]:
    """The global ``x`` as ``n`` rank tensors; a P gets random terms that sum to it."""
    if of in ("I", "R"):
        return [x.clone() for _ in range(n)]
    if isinstance(of, Shard):
        dim = of.dim % x.ndim
        return [x.index_select(dim, indices(x.shape[dim], of, n, rank)) for rank in range(n)]
    generator = torch.Generator().manual_seed(seed)
    terms = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(n - 1)]
    return [*terms, x - sum(terms, torch.zeros_like(x))]


def to_global(xs: list[Tensor], of: Type) -> Tensor:
    """The global tensor of rank tensors; replicas must be bit-equal."""
    if of in ("I", "R"):
        for rank, x in enumerate(xs):
            assert torch.equal(x, xs[0]), f"rank {rank} differs from rank 0"
        return xs[0].clone()
    if isinstance(of, Shard):
        dim, n = of.dim % xs[0].ndim, len(xs)
        shape = list(xs[0].shape)
        shape[dim] *= n
        out = xs[0].new_full(shape, -12345)
        for rank, x in enumerate(xs):
            out.index_copy_(dim, indices(shape[dim], of, n, rank), x)
        return out
    return sum(xs[1:], xs[0].clone())
