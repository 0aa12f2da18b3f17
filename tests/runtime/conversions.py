"""Every conversion as a test case, and the ways that tensors can lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from placement import runtime as rt
from tests.reference import Shard, Type, dual, to_ranks

Convert = Callable[[Tensor, rt.Axis], Tensor]


@dataclass(frozen=True)
class Case:
    """``convert`` takes a value of type ``source`` to ``target``; ``shape`` is the global one."""

    name: str
    convert: Convert
    source: Type
    target: Type
    shape: tuple[int, ...]


def cases(n: int) -> list[Case]:
    """Every row of the table, on several dims, outer sizes and odd shapes."""
    found = [
        Case("all_reduce", rt.all_reduce, "P", "I", (3, 5)),
        Case("all_reduce scalar", rt.all_reduce, "P", "I", ()),
        Case("replicated", rt.replicated, "I", "R", (3, 5)),
        Case("invariant", rt.invariant, "R", "I", (3, 5)),
        Case("partial of I", lambda x, a: rt.partial(x, a, of="I"), "I", "P", (3, 5)),
        Case("partial of R", lambda x, a: rt.partial(x, a, of="R"), "R", "P", (3, 5)),
    ]
    places: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = [
        (dim, outer, (), shape) for dim, outer, shape in _places(n)
    ]
    zigzag = [(1, 1, (), (2, 4 * n, 3)), (0, 1, (), (2 * n,)), (-1, 2, (1, 2), (2, 12 * n))]
    for dim, outer, segments, shape in [*places, (1, 2, (2, 1), (2, 6 * n)), (0, 1, (1, 3, 2), (6 * n, 2)), *zigzag]:
        shard = Shard(dim, outer, segments, zigzag=(dim, outer, segments, shape) in zigzag)
        at = f"dim {dim} outer {outer} {segments or ''}{'zigzag' * shard.zigzag} of {shape}"
        found += [
            Case(f"all_gather to R, {at}", _with(rt.all_gather, shard, to="R"), shard, "R", shape),
            Case(f"all_gather to I, {at}", _with(rt.all_gather, shard, to="I"), shard, "I", shape),
            Case(f"reduce_scatter, {at}", _with(rt.reduce_scatter, shard), "P", shard, shape),
            Case(f"split of I, {at}", _with(rt.split, shard, of="I"), "I", shard, shape),
            Case(f"split of R, {at}", _with(rt.split, shard, of="R"), "R", shard, shape),
            Case(f"pad, {at}", _with(rt.pad, shard), shard, "P", shape),
        ]
    moves: list[tuple[Shard, Shard, tuple[int, ...]]] = [
        (Shard(0), Shard(1), (n, 2 * n, 3)),
        (Shard(1), Shard(0), (2 * n, 3 * n)),
        (Shard(2), Shard(0, 2), (4 * n, 3, n)),
        (Shard(1, 3), Shard(2), (2, 3 * n, n)),
        # two factors of one merged dim: (a, b) with a = 2n, b = 3n
        (Shard(0), Shard(0, 2 * n), (6 * n * n, 2)),
        (Shard(1, 2 * n), Shard(1), (2, 6 * n * n)),
        (Shard(1, 1, (2, 1)), Shard(0), (n, 3 * n)),
        (Shard(1), Shard(0, 2, (1, 2)), (6 * n, n)),
        # two factors of every segment: (a, b) in the one and (a, 2, b) in the other, with a = b = n
        (Shard(0, 1, (1, 2)), Shard(0, 3 * n), (3 * n * n, 2)),
        (Shard(1, 3 * n), Shard(1, 1, (1, 2)), (2, 3 * n * n)),
        (Shard(1, zigzag=True), Shard(2), (2, 2 * n, n)),
        (Shard(2), Shard(1, 3, zigzag=True), (2, 6 * n, n)),
        (Shard(0, zigzag=True), Shard(0, n), (2 * n * n, 2)),
    ]
    for one, other, shape in moves:
        name = f"all_to_all{' zigzag' * (one.zigzag or other.zigzag)} ({one.dim}, {one.outer}{one.segments or ''}) to "
        name += f"({other.dim}, {other.outer}"
        found.append(Case(f"{name}{other.segments or ''}) of {shape}", _swap(one, other), one, other, shape))
    return found


def _places(n: int) -> list[tuple[int, int, tuple[int, ...]]]:
    return [
        (0, 1, (3 * n, 5)), (1, 1, (3, n, 2)), (-1, 1, (2, 3, 2 * n)), (0, 3, (6 * n, 2)), (1, 2, (3, 2 * n, 1)),
        (0, 1, (n,)), (1, 1, (0, n)),
    ]  # fmt: skip


def _with(function: Callable[..., Tensor], at: Shard, **kwargs: str) -> Convert:
    return lambda x, axis: function(x, axis, at.dim, at.outer, at.segments, zigzag=at.zigzag, **kwargs)


def _swap(one: Shard, other: Shard) -> Convert:
    return lambda x, axis: rt.all_to_all(
        x,
        axis,
        one.dim,
        other.dim,
        one.outer,
        other.outer,
        one.segments,
        other.segments,
        zigzag=one.zigzag,
        to_zigzag=other.zigzag,
    )


def values(case: Case, n: int, seed: int = 0) -> tuple[Tensor, list[Tensor], Tensor, list[Tensor]]:
    """A global value and its rank parts, a global cotangent and its rank parts."""
    g = torch.Generator().manual_seed(seed)
    x, cotangent = (torch.randn(case.shape, generator=g, dtype=torch.float64) for _ in range(2))
    return x, to_ranks(x, case.source, n, seed), cotangent, to_ranks(cotangent, dual(case.target), n, seed + 1)


def spread(x: Tensor, how: str) -> tuple[Tensor, Tensor]:
    """``x`` in a larger base tensor, laid out ``how``: (base, a view of base equal to x)."""
    if how == "dense" or x.ndim == 0:
        base = x.clone()
        return base, base
    if how == "transposed":
        base = x.movedim(0, -1).contiguous()
        return base, base.movedim(-1, 0)
    if how == "sliced":
        base = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), 77.0)
        base[..., 1::2] = x
        return base, base[..., 1::2]
    assert how == "neighbours"
    base = torch.stack([x, torch.full_like(x, 77.0)], 0)
    return base, base[0]


LAYOUTS = ("dense", "transposed", "sliced", "neighbours")
