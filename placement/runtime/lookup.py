"""Which rank has an index, and the lookup in a table whose rows are sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from placement.runtime._torch import demand, eager

if TYPE_CHECKING:
    from placement.runtime.axis import Axis


@eager
def masked_embedding(
    indices: Tensor, weight: Tensor, axis: Axis, dim: int = 0, outer: int = 1, padding_idx: int = -1
) -> Tensor:
    """R, S → P: rows [*indices, hidden] of a table whose rows are sharded; a rank gives zeros for rows it lacks.

    Before, each rank holds all indices and its block [vocab / n, hidden] of the table; after, a term of the
    result. Nothing is sent. The gradient is that of the own rows; as in ``aten.embedding`` the row
    ``padding_idx`` gets none, and -1 is no row.

    Raises:
        IndexError: an index is not in [0, vocab), on every rank (on an accelerator, an assertion there).
    """
    if dim != 0:
        raise ValueError(f"rows are dim 0 of a table, not {dim}")
    check_range(indices, weight.shape[0] * axis.size, "index")
    row, mine = located(indices, weight.shape[0], axis, outer)
    padding, has = located(torch.tensor(padding_idx), weight.shape[0], axis, outer)
    rows = F.embedding(row, weight, int(padding) if has else None)
    # In place: a lookup's result is not needed for its backward.
    return rows.masked_fill_(~mine.unsqueeze(-1), 0)


def located(indices: Tensor, size: int, axis: Axis, outer: int = 1) -> tuple[Tensor, Tensor]:
    """Where global ``indices`` lie in this rank's block of ``size``: (local index, whether it is here).

    The local index of what is elsewhere is 0, so that it can be used and its result dropped.
    """
    part = size // outer
    group = part * axis.size
    local = indices % group - axis.rank * part
    mine = (local >= 0) & (local < part) & (indices >= 0) & (indices < size * axis.size)
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
