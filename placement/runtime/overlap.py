"""Products with weights that run while the blocks they take, or the sums they make, are on their way.

Two ways to cut a collective. A *ring* passes blocks from rank to rank: each is multiplied while the next arrives, or
added up while the next is made. *Chunks* are a pipeline: the whole collective for a part of every block at a time. The
results are those of the collective in one piece, to rounding; a ring adds up in another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from placement.runtime.axis import ALL_REDUCE, SEND_RECV, Axis, Step
from placement.runtime.cuts import Cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

Overlap = Literal["none", "async", "ring"] | int
"""What a collective runs beside: nothing; in one piece, what does not need it; the products, in a ring or in chunks."""

GATHER, SCATTER = Step("all_gather", Cut(0)), Step("reduce_scatter", Cut(0))


def cuts(overlap: Overlap) -> bool:
    """Whether the collective is cut."""
    return overlap == "ring" or isinstance(overlap, int)


class Place(NamedTuple):
    """Of a whole that n blocks make: in each of ``blocks`` from ``block`` on, so many ``rows`` from ``row`` on."""

    block: int
    blocks: int
    row: int
    rows: int

    def of(self, whole: Tensor, n: int) -> Tensor:
        """A view [blocks, rows, ...] of what lies there."""
        opened = whole.unflatten(0, (n, whole.shape[0] // n))
        return opened[self.block : self.block + self.blocks, self.row : self.row + self.rows]


def _sizes(rows: int, chunks: int) -> list[int]:
    """Of chunks of ``rows`` rows, none of them empty unless all are; the first ones may be longer by one."""
    chunks = max(1, min(rows, chunks))
    least, more = divmod(rows, chunks)
    return [least + (index < more) for index in range(chunks)]


def arriving(axis: Axis, overlap: Overlap, blocks: Sequence[Tensor]) -> Iterator[tuple[list[Place], Sequence[Tensor]]]:
    """Gather ``blocks`` [rows, ...], one per held rank: for each rank where what has arrived lies, and what it is.

    The next is on its way while one is used. Tensors are [blocks · rows, ...], contiguous.
    """
    n, rows, held = axis.size, blocks[0].shape[0], axis.held
    if overlap == "ring":
        at: Sequence[Tensor] = [x.contiguous() for x in blocks]
        for step in range(n):
            pending = axis.start(SEND_RECV, at) if step < n - 1 else None
            yield [Place((rank - step) % n, 1, 0, rows) for rank in held], at
            if pending is not None:
                at = axis.finish(pending)
        return
    assert isinstance(overlap, int)
    sizes = _sizes(rows, overlap)
    parts = [x.split(sizes) for x in blocks]
    row, pending = 0, axis.start(GATHER, [part[0] for part in parts])
    for index, size in enumerate(sizes):
        at = axis.finish(pending)
        if index + 1 < len(sizes):
            pending = axis.start(GATHER, [part[index + 1] for part in parts])
        yield [Place(0, n, row, size)] * len(held), at
        row += size


def leaving(
    axis: Axis, overlap: Overlap, rows: int, terms: Callable[[list[Place]], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """Sum over the ranks what ``terms`` makes; of each held rank its own block of ``rows`` rows.

    ``terms`` is asked for a place per held rank, and gives fresh contiguous tensors [blocks · rows, ...]; one is made
    while the one before is on its way.
    """
    n, held = axis.size, axis.held
    if overlap == "ring":
        totals: Sequence[Tensor] = ()
        dtype = pending = None
        for step in range(n):
            made = terms([Place((rank - 1 - step) % n, 1, 0, rows) for rank in held])
            dtype = made[0].dtype
            made = [term.to(axis.wire(SCATTER, dtype)) for term in made]
            if pending is not None:
                made = [total.add_(term) for total, term in zip(axis.finish(pending), made, strict=True)]
            totals = made
            pending = axis.start(SEND_RECV, totals) if step < n - 1 else None
        return [total.to(dtype) for total in totals]
    assert isinstance(overlap, int)
    row, going = 0, []
    for size in _sizes(rows, overlap):
        going.append(axis.start(SCATTER, terms([Place(0, n, row, size)] * len(held)), own=True))
        row += size
    parts = [axis.finish(one) for one in going]
    return [torch.cat(of_rank) for of_rank in zip(*parts, strict=True)]


def reducing(
    axis: Axis, chunks: int, rows: int, terms: Callable[[slice], Sequence[Tensor]]
) -> Callable[[], Sequence[Tensor]]:
    """Sum over the ranks what ``terms`` makes of so many ``rows``; all of it for every rank.

    ``terms`` is asked for some rows of each held rank, and gives fresh contiguous tensors [those, ...]. What is
    returned waits for the sums, and is to be called once.
    """
    row, going = 0, []
    for size in _sizes(rows, chunks):
        going.append(axis.start(ALL_REDUCE, terms(slice(row, row + size)), own=True))
        row += size

    def finish() -> list[Tensor]:
        parts = [axis.finish(one) for one in going]
        return [torch.cat(of_rank) for of_rank in zip(*parts, strict=True)]

    return finish
