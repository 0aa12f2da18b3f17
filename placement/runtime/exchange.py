"""The conversions as differentiable functions: one per row of the algebra's table.

Each takes this rank's part of a value on one axis of n ranks and returns this rank's part of the same
value, typed otherwise. A docstring is the specification: the arrow, what each rank holds before and
after, the dual (what happens to the gradient), and the volume in units of (n-1)/n of the full value's
bytes, forward + backward. ``dim``, ``outer``, ``segments`` and ``zigzag`` say where the shard lies, see ``Cut``.

Inputs are never written. Results are contiguous, and fresh except where nothing is communicated. With ``outermost``
they have ``dim`` outermost in memory instead, which is how a transport joins blocks: of an input that lies so nothing
is copied.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import torch

from placement.runtime.axis import ALL_REDUCE, KEEP, NONE, Step
from placement.runtime.cuts import Cut

if TYPE_CHECKING:
    from torch import Tensor

    from placement.runtime.axis import Axis


def cut_steps(
    forward: str, backward: str, dim: int, outer: int, segments: tuple[int, ...], zigzag: bool = False
) -> tuple[Step, Step]:
    """Two actions of one cut: made once, for they are asked for at every call."""
    if torch.compiler.is_compiling():  # once as well
        return _cut_steps(forward, backward, dim, outer, segments, zigzag)
    return _known_steps(forward, backward, dim, outer, segments, zigzag)


def _cut_steps(
    forward: str, backward: str, dim: int, outer: int, segments: tuple[int, ...], zigzag: bool
) -> tuple[Step, Step]:
    cut = Cut(dim, outer, segments, zigzag)
    return Step(forward, cut), Step(backward, cut)


_known_steps = lru_cache(maxsize=1024)(_cut_steps)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """P → I: sum over the ranks.

    Before, each rank holds a term; after, each holds the sum. Dual: I → R, nothing (every rank's term
    has the sum's gradient). Volume 2 + 0. After a row-parallel linear, when what follows is
    the same work on every rank.
    """
    return axis.exchange(ALL_REDUCE, NONE, x)


def all_gather(
    x: Tensor,
    axis: Axis,
    dim: int,
    outer: int = 1,
    segments: tuple[int, ...] = (),
    to: Literal["R", "I"] = "R",
    *,
    zigzag: bool = False,
    outermost: bool = False,
) -> Tensor:
    """S → R or S → I: join the ranks' blocks along ``dim``.

    Before, each rank holds its block; after, each holds the full value. To R (each rank will use it
    differently), the dual is P → S, a reduce-scatter: volume 1 + 1. To I (every rank does the
    same work with it), the dual is I → S, a split: volume 1 + 0. Entering a tensor-parallel region; before a
    replicated head.
    """
    back = "reduce_scatter" if to == "R" else "split"
    if outermost:
        steps = cut_steps("all_gather", back, 0, outer, segments, zigzag)
        return axis.exchange(*steps, x.movedim(dim, 0)).movedim(0, dim)
    return axis.exchange(*cut_steps("all_gather", back, dim, outer, segments, zigzag), x)


def reduce_scatter(
    x: Tensor,
    axis: Axis,
    dim: int,
    outer: int = 1,
    segments: tuple[int, ...] = (),
    *,
    zigzag: bool = False,
    outermost: bool = False,
) -> Tensor:
    """P → S: sum over the ranks, each keeps its block along ``dim``.

    Before, each rank holds a term of the full shape; after, its block of the sum. Dual: S → R, an
    all-gather. Volume 1 + 1. Leaving a tensor-parallel region under sequence parallelism.

    Raises:
        SizeError: the axis does not divide the dim.
    """
    if outermost:
        steps = cut_steps("reduce_scatter", "all_gather", 0, outer, segments, zigzag)
        return axis.exchange(*steps, x.movedim(dim, 0)).movedim(0, dim)
    return axis.exchange(*cut_steps("reduce_scatter", "all_gather", dim, outer, segments, zigzag), x)


def all_to_all(
    x: Tensor,
    axis: Axis,
    dim: int,
    to_dim: int,
    outer: int = 1,
    to_outer: int = 1,
    segments: tuple[int, ...] = (),
    to_segments: tuple[int, ...] = (),
    *,
    zigzag: bool = False,
    to_zigzag: bool = False,
) -> Tensor:
    """S(f) → S(g): exchange blocks of one factor for blocks of another.

    Before, each rank holds its block along ``dim`` (the full ``to_dim``); after, its block along
    ``to_dim`` (the full ``dim``). The outer sizes and segments are those of the full value. Dual: the
    all-to-all back. Volume 1/n + 1/n. Between sharding by sequence and by head around attention.

    Raises:
        SizeError: the axis does not divide ``to_dim``.
    """
    cut, to = Cut(dim, outer, segments, zigzag), Cut(to_dim, to_outer, to_segments, to_zigzag)
    return axis.exchange(Step("all_to_all", cut, to), Step("all_to_all", to, cut), x)


def split(
    x: Tensor,
    axis: Axis,
    dim: int,
    outer: int = 1,
    segments: tuple[int, ...] = (),
    of: Literal["I", "R"] = "I",
    *,
    zigzag: bool = False,
) -> Tensor:
    """I → S or R → S: keep the own block along ``dim``.

    Before, each rank holds the full value; after, its block. Of I, the dual is S → I, an all-gather:
    volume 0 + 1. Of R, the dual is S → P, zeros around the block: volume 0 + 0. After work that every
    rank did alike, such as an embedding.

    Raises:
        SizeError: the axis does not divide the dim.
    """
    return axis.exchange(*cut_steps("split", "all_gather" if of == "I" else "pad", dim, outer, segments, zigzag), x)


def replicated(x: Tensor, axis: Axis) -> Tensor:
    """I → R: nothing happens to the value; each rank may now use it differently.

    Dual: P → I, an all-reduce of the gradient. Volume 0 + 2. Entering a tensor-parallel region; on
    a parameter it is the reduction of a replicated weight's gradient.
    """
    return axis.exchange(NONE, ALL_REDUCE, x)


def invariant(x: Tensor, axis: Axis) -> Tensor:
    """R → I: nothing happens to the value; every rank now does the same work with it.

    Dual: I → P, the gradient stays on the first rank and is zero on the others. Volume 0 + 0.
    """
    return axis.exchange(NONE, KEEP, x)


def partial(x: Tensor, axis: Axis, of: Literal["I", "R"] = "I") -> Tensor:
    """I → P or R → P: the first rank keeps the value, the others take zeros.

    Before, each rank holds the value; after, a term of it. Of I, the dual is R → I, nothing; of R, it
    is R → P again. Volume 0 + 0. A bias that joins a partial sum: it must enter once.
    """
    return axis.exchange(KEEP, NONE if of == "I" else KEEP, x)


def pad(
    x: Tensor, axis: Axis, dim: int, outer: int = 1, segments: tuple[int, ...] = (), *, zigzag: bool = False
) -> Tensor:
    """S → P: zeros in place of the other ranks' blocks along ``dim``.

    Before, each rank holds its block; after, a term of the full shape. Dual: R → S, a split. Volume
    0 + 0. A sharded value that joins a partial sum.
    """
    return axis.exchange(*cut_steps("pad", "split", dim, outer, segments, zigzag), x)
