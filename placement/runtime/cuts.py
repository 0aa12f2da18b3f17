"""Where a shard lies in a tensor: cutting one out, and joining all of them again. No communication."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from placement.runtime.errors import SizeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from placement.runtime.axis import Axis


@dataclass(frozen=True, slots=True, repr=False)
class Cut:
    """A dim viewed as (outer, rest); the ranks' blocks are of ``rest``, or of each of its segments.

    ``Cut(0)`` is torch's ``chunk`` along dim 0. A merged batch·seq dim sharded on seq has ``outer`` =
    batch; a fused q|k|v weight of equal parts sharded by head has ``outer`` = 3, and one whose q is twice as long as
    k and v ``segments`` = (2, 1, 1): their sizes in ratio, the same for the full value and for a block.

    In ``zigzag`` order each of n ranks has chunks r and 2n-1-r of 2n, one after the other.
    """

    dim: int
    outer: int = 1
    segments: tuple[int, ...] = ()
    zigzag: bool = False

    def __post_init__(self) -> None:
        if self.outer < 1 or any(size < 1 for size in self.segments):
            raise ValueError(f"a cut has an outer size and segments of at least 1, not {self.outer}, {self.segments}")

    def __repr__(self) -> str:
        segments = f", segments={self.segments}" if self.segments else ""
        return f"Cut(dim={self.dim}, outer={self.outer}{segments}{', zigzag=True' * self.zigzag})"

    @property
    def parts(self) -> int:
        """What the size of a block must be a multiple of."""
        return self.outer * (sum(self.segments) or 1) * self.chunks

    @property
    def chunks(self) -> int:
        """How many pieces of each segment, apart from each other, make a block."""
        return 2 if self.zigzag else 1

    def along(self, dim: int) -> Cut:
        """This cut of another dim."""
        return Cut(dim, self.outer, self.segments, self.zigzag)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each segment begins in one ``rest``, in the unit of ``segments``."""
        return (0, *accumulate(self.segments))[:-1] if self.segments else (0,)


def check_dim(shape: torch.Size, cut: Cut) -> None:
    """Refuse a cut of a dim that ``shape`` lacks."""
    if not -len(shape) <= cut.dim < len(shape):
        raise SizeError(f"no dim {cut.dim} in a tensor of shape {list(shape)}")


def _dim(shape: torch.Size, cut: Cut) -> int:
    check_dim(shape, cut)
    return cut.dim % len(shape)


def local_shape(shape: tuple[int, ...], cut: Cut, n: int, what: str) -> tuple[int, ...]:
    """The shape of one of ``n`` equal blocks; ``what`` names the value and the axis in the error.

    Raises:
        SizeError: the dim is not ``outer · n · whole``, in each of its segments.
    """
    dim = _dim(torch.Size(shape), cut)
    size = shape[dim]
    if size % (cut.parts * n):
        into = f"{n} equal blocks" if cut.outer == 1 else f"{n} equal blocks in each of {cut.outer} parts"
        into += f" in each of the segments {' : '.join(map(str, cut.segments))}" if cut.segments else ""
        into += " of two chunks, as the zigzag order has them" if cut.zigzag else ""
        raise SizeError(f"{what}: dim {dim} of shape {list(shape)} has size {size}, which does not make {into}")
    return (*shape[:dim], size // n, *shape[dim + 1 :])


def whole_shape(local: Sequence[int], layout: Iterable[tuple[Axis, Cut]]) -> list[int]:
    """The shape of what equal blocks of shape ``local`` make together, where ``layout`` cuts it."""
    shape = list(local)
    for axis, cut in layout:
        shape[cut.dim] *= axis.size
    return shape


def block(x: Tensor, cut: Cut, n: int, rank: int, what: str = "split") -> Tensor:
    """Block ``rank`` of ``n`` of ``x``, contiguous; a view of ``x`` where that is contiguous and in one segment."""
    shape, dim = local_shape(tuple(x.shape), cut, n, what), _dim(x.shape, cut)
    if cut.parts == 1:
        return x.narrow(dim, rank * shape[dim], shape[dim]).contiguous()
    parts = [w.select(dim + 1, at) for w in _windows(x, cut, n) for at in _chunks(cut, n, rank)]
    return _side_by_side(parts, dim + 1).reshape(shape).contiguous()


def blocks(x: Tensor, cut: Cut, n: int, what: str = "split") -> Tensor:
    """All ``n`` blocks of ``x``, stacked: [n, *block], contiguous; may share memory with ``x``."""
    shape, dim = local_shape(tuple(x.shape), cut, n, what), _dim(x.shape, cut)
    if cut.parts == 1:  # the usual one, in few calls
        opened = x.reshape(*shape[:dim], n, *shape[dim:])
        return (opened.transpose(0, 1) if dim == 1 else opened.movedim(dim, 0)).contiguous()
    windows = [w.movedim(dim + 1, 0) for w in _windows(x, cut, n)]
    parts = [half for w in windows for half in ((w[:n], w[n:].flip(0)) if cut.zigzag else (w,))]
    return _side_by_side(parts, dim + 2).reshape(n, *shape).contiguous()


def joined(stack: Tensor, cut: Cut, what: str = "join") -> Tensor:
    """The full tensor of stacked blocks [n, *block], contiguous; the inverse of ``blocks``."""
    n, shape = stack.shape[0], stack.shape[1:]
    dim = _dim(shape, cut)
    if cut.parts == 1:  # the usual one, in one call
        return torch.cat(stack.unbind(), dim)
    _check_block(shape, dim, cut, what)
    opened = stack.unflatten(dim + 1, (cut.outer, shape[dim] // cut.outer))
    parts = [part.movedim(0, dim + 1).flatten(dim + 1, dim + 2) for part in _in_order(opened, dim + 2, cut)]
    full = (*shape[:dim], n * shape[dim], *shape[dim + 1 :])
    return _side_by_side(parts, dim + 1).reshape(full).contiguous()


def in_rows(x: Tensor, cut: Cut, n: int, what: str) -> Tensor:
    """All ``n`` blocks of ``x``, one after the other along dim 0; may share memory with ``x``."""
    if cut.dim == 0 and cut.parts == 1 and x.ndim and x.shape[0] % n == 0:
        return x  # as they are
    return blocks(x, cut, n, what).flatten(0, 1)


def of_rows(x: Tensor, cut: Cut, n: int, what: str) -> Tensor:
    """The full tensor of blocks that lie one after the other along dim 0; the inverse of ``in_rows``."""
    if cut.dim == 0 and cut.parts == 1:
        return x
    return joined(x.reshape(n, x.shape[0] // n, *x.shape[1:]), cut, what)


def padded(x: Tensor, cut: Cut, n: int, rank: int) -> Tensor:
    """Zeros of the full shape with ``x`` as block ``rank`` of ``n``."""
    dim = _dim(x.shape, cut)
    _check_block(x.shape, dim, cut, "pad")
    full = x.new_zeros((*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :]))
    opened = x.unflatten(dim, (cut.outer, x.shape[dim] // cut.outer))
    for window, part in zip(_windows(full, cut, n), _segments(opened, dim + 1, cut), strict=True):
        size = part.shape[dim + 1] // cut.chunks
        for index, at in enumerate(_chunks(cut, n, rank)):
            window.select(dim + 1, at).copy_(part.narrow(dim + 1, index * size, size))
    return full


def places(size: int, cut: Cut, n: int, rank: int) -> Tensor:
    """Where the elements of block ``rank`` lie along the whole dim, which has ``size`` elements. int64 [size / n]."""
    return block(torch.arange(size), cut.along(0), n, rank)


def _check_block(shape: torch.Size, dim: int, cut: Cut, what: str) -> None:
    if shape[dim] % cut.parts:
        into = f"{cut.outer} equal parts"
        into += f" of segments {' : '.join(map(str, cut.segments))}" if cut.segments else ""
        into += " of two chunks" if cut.zigzag else ""
        raise SizeError(f"{what}: a block of shape {list(shape)} does not make {into} of dim {dim}")


def _segments(x: Tensor, dim: int, cut: Cut) -> Sequence[Tensor]:
    """Views of the segments of one ``rest``, which is ``dim`` of ``x``."""
    if not cut.segments:
        return (x,)
    unit = x.shape[dim] // sum(cut.segments)
    return [x.narrow(dim, unit * at, unit * size) for at, size in zip(cut.starts, cut.segments, strict=True)]


def _chunks(cut: Cut, n: int, rank: int) -> tuple[int, ...]:
    """Which pieces of a window are the rank's."""
    return (rank, 2 * n - 1 - rank) if cut.zigzag else (rank,)


def _windows(x: Tensor, cut: Cut, n: int) -> list[Tensor]:
    """Views of ``x``, one for each segment, with the cut dim as (outer, pieces, what is in a piece of the segment)."""
    dim, pieces = _dim(x.shape, cut), n * cut.chunks
    opened = x.unflatten(dim, (cut.outer, x.shape[dim] // cut.outer))
    parts = _segments(opened, dim + 1, cut)
    return [part.unflatten(dim + 1, (pieces, part.shape[dim + 1] // pieces)) for part in parts]


def _in_order(stack: Tensor, dim: int, cut: Cut) -> list[Tensor]:
    """Of stacked blocks the segments, whose ``dim`` it is, each stacked in the order of its pieces in the whole."""
    found = _segments(stack, dim, cut)
    if not cut.zigzag:
        return list(found)
    half = [part.shape[dim] // 2 for part in found]
    return [
        torch.cat((part.narrow(dim, 0, size), part.narrow(dim, size, size).flip(0)))
        for part, size in zip(found, half, strict=True)
    ]


def _side_by_side(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


def spans(size: int, cut: Cut, n: int, rank: int) -> tuple[tuple[int, int], ...]:
    """``places`` as (start, stop) of what lies side by side, ascending: as many of every rank.

    Raises:
        SizeError: the dim is not ``outer · n · whole``, in each of its segments.
    """
    local_shape((size,), cut.along(0), n, "spans")
    rest = size // cut.outer
    unit = rest // (sum(cut.segments) or 1)
    found: list[tuple[int, int]] = []
    for window in range(cut.outer):
        for start, length in zip(cut.starts, cut.segments or (1,), strict=True):
            piece = unit * length // (n * cut.chunks)
            begins = [window * rest + unit * start + at * piece for at in _chunks(cut, n, rank)]
            found += [(begin, begin + piece) for begin in begins]
    return tuple(found)
