"""One rank's block of a tensor that lies elsewhere, read without the rest of it."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from placement.runtime.cuts import places

if TYPE_CHECKING:
    from collections.abc import Sequence

    from placement.runtime.axis import Axis
    from placement.runtime.cuts import Cut

_RUNS = 64  # side by side in one dim, up to which each is read by itself


class Sliced(Protocol):
    """A tensor that is read piece by piece, such as one in a file. A ``Tensor`` is one as well."""

    @property
    def shape(self) -> Sequence[int]:
        """Its size in each dim."""
        ...

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        """A rectangle of it, a slice of step 1 for each dim."""
        ...


def own_block(full: Sliced, layout: Sequence[tuple[Axis, Cut]], whole: Sequence[int]) -> Tensor:
    """This rank's block where ``layout`` cuts a tensor of shape ``whole``, the outermost cut first.

    Nothing else is read, but for what lies between where a block is in very many places of a dim. Of a ``full`` that is
    shorter it is what there is of the block.
    """
    held = [torch.arange(size) for size in whole]
    for axis, cut in layout:
        dim = cut.dim % len(held)
        held[dim] = held[dim][places(len(held[dim]), cut, axis.size, axis.rank)]
    held = [index[index < size] for index, size in zip(held, full.shape, strict=True)]
    runs = [_runs(index) for index in held]
    rectangles = tuple(
        [slice(0, 0)] if not len(index) else own if len(own) <= _RUNS else [slice(int(index[0]), int(index[-1]) + 1)]
        for index, own in zip(held, runs, strict=True)
    )
    made = _joined(full, rectangles)
    for dim, (index, own) in enumerate(zip(held, runs, strict=True)):
        if len(own) > _RUNS:
            made = made.index_select(dim, (index - index[0]).to(made.device))
    return made


def _joined(full: Sliced, runs: Sequence[Sequence[slice]]) -> Tensor:
    """The rectangles of every choice of one run for each dim, put together."""
    pieces = [full[index] for index in product(*runs)]
    for dim in reversed(range(len(runs))):
        count = len(runs[dim])
        pieces = [
            torch.cat(pieces[at : at + count], dim) if count > 1 else pieces[at] for at in range(0, len(pieces), count)
        ]
    return pieces[0]


def _runs(index: Tensor) -> list[slice]:
    """The stretches of neighbours in ascending indices."""
    ends = (torch.nonzero(index.diff() != 1).flatten() + 1).tolist()
    return (
        [slice(int(index[a]), int(index[b - 1]) + 1) for a, b in zip([0, *ends], [*ends, len(index)], strict=True)]
        if len(index)
        else []
    )
