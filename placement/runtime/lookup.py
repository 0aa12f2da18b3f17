"""Which rank has an index, and the lookup in a table whose rows are sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from placement.runtime._torch import demand, eager
from placement.runtime.cuts import Cut, places

if TYPE_CHECKING:
    from placement.runtime.axis import Axis


@eager
def masked_embedding(
    indices: Tensor,
    weight: Tensor,
    axis: Axis,
    dim: int = 0,
    outer: int = 1,
    segments: tuple[int, ...] = (),
    padding_idx: int = -1,
    rows: int | None = None,
) -> Tensor:
    """R, S → P: rows [*indices, hidden] of a table whose rows are sharded; a rank gives zeros for rows it lacks.

    Before, each rank holds all indices and its block [vocab / n, hidden] of the table; after, a term of the
    result. Nothing is sent. The gradient is that of the own rows; as in ``aten.embedding`` the row
    ``padding_idx`` gets none, and -1 is no row. Of a table that was padded to n equal blocks ``rows`` are some.

    Raises:
        IndexError: an index is not in [0, vocab), on every rank (on an accelerator, an assertion there).
    """
    if dim != 0:
        raise ValueError(f"rows are dim 0 of a table, not {dim}")
    check_range(indices, weight.shape[0] * axis.size if rows is None else rows, "index")
    cut = Cut(dim, outer, segments)
    row, mine = located(indices, weight.shape[0], axis, cut)
    padding, has = located(torch.tensor(padding_idx), weight.shape[0], axis, cut)
    found = F.embedding(row, weight, int(padding) if has else None)
    # In place: a lookup's result is not needed for its backward.
    return found.masked_fill_(~mine.unsqueeze(-1), 0)


def located(indices: Tensor, size: int, axis: Axis, cut: Cut) -> tuple[Tensor, Tensor]:
    """Where global ``indices`` lie in this rank's block of ``size``: (local index, whether it is here).

    The local index of what is elsewhere is 0, so that it can be used and its result dropped.
    """
    inside = (indices >= 0) & (indices < size * axis.size)
    if cut.segments:
        local = torch.full((size * axis.size,), -1, device=indices.device)
        own = places(size * axis.size, cut, axis.size, axis.rank).to(indices.device)
        local[own] = torch.arange(size, device=indices.device)
        found = local[torch.where(inside, indices, 0)]
        mine = inside & (found >= 0)
        return torch.where(mine, found, 0), mine
    part = size // cut.outer
    group = part * axis.size
    local = indices % group - axis.rank * part
    mine = (local >= 0) & (local < part) & inside
    return torch.where(mine, indices // group * part + local, 0), mine


def check_range(indices: Tensor, size: int, what: str, allowed: int | None = None) -> None:
    """Refuse indices outside of [0, size) that are not ``allowed``; on an accelerator without waiting for it."""
    if indices.is_meta or indices.numel() == 0:
        return
    wrong = (indices < 0) | (indices >= size)
    if allowed is not None:
        wrong &= indices != allowed
    if indices.device.type != "cpu":
        demand(~wrong.any(), f"{what} out of range: there are {size}")
    elif bool(wrong.any()):
        raise IndexError(f"{what} {int(indices[wrong][0])} is out of range: there are {size}")
