"""Which rank has an index, and the lookup in a table whose rows are sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from placement.runtime._torch import applied, demand
from placement.runtime.cuts import Cut, places

if TYPE_CHECKING:
    from placement.runtime.axis import Axis


def masked_embedding(
    indices: Tensor,
    weight: Tensor,
    axis: Axis,
    dim: int = 0,
    outer: int = 1,
    segments: tuple[int, ...] = (),
    padding_idx: int = -1,
    rows: int | None = None,
    *,
    zigzag: bool = False,
    outermost: bool = False,
) -> Tensor:
    """R, S → P: rows [*indices, hidden] of a table whose rows are sharded; a rank gives zeros for rows it lacks.

    Before, each rank holds all indices and its block [vocab / n, hidden] of the table; after, a term of the
    result. Nothing is sent. The gradient is that of the own rows; as in ``aten.embedding`` the row
    ``padding_idx`` gets none, and -1 is no row. Of a table that was padded to n equal blocks ``rows`` are some. Of
    indices [batch, tokens] the result has the tokens ``outermost`` in memory if asked to.

    Raises:
        IndexError: an index is not in [0, vocab), on every rank (on an accelerator, an assertion there).
    """
    if dim != 0:
        raise ValueError(f"rows are dim 0 of a table, not {dim}")
    check_range(indices, weight.shape[0] * axis.size if rows is None else rows, "index")
    if outer == 1 and not segments and not zigzag:
        return applied(_Rows, indices, weight, axis.rank, padding_idx, outermost)  # pyright: ignore[reportReturnType]
    if outermost:
        given = indices.t(), weight, axis, dim, outer, segments, padding_idx, rows
        return masked_embedding(*given, zigzag=zigzag).transpose(0, 1)
    cut = Cut(dim, outer, segments, zigzag)
    row, mine = located(indices, weight.shape[0], axis, cut)
    padding, has = located(torch.tensor(padding_idx), weight.shape[0], axis, cut)
    found = F.embedding(row, weight, int(padding) if has else None)
    # In place: a lookup's result is not needed for its backward.
    return found.masked_fill_(~mine.unsqueeze(-1), 0)


class _Rows(torch.autograd.Function):
    """Rows of the block ``rank`` of a table, zeros for others. Of the forward only the indices are kept."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, rank: int, padding_idx: int, outermost: bool) -> Tensor:
        ctx.rank, ctx.rows, ctx.padding_idx, ctx.outermost = rank, weight.shape[0], padding_idx, outermost
        ctx.save_for_backward(indices)
        row, missing = within(indices.t() if outermost else indices, ctx.rows, rank)
        found = F.embedding(row, weight).masked_fill_(missing.unsqueeze(-1), 0)
        return found.transpose(0, 1) if outermost else found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (indices,) = ctx.saved_tensors
        if ctx.outermost:
            indices, grad = indices.t(), grad.transpose(0, 1)
        row, missing = within(indices, ctx.rows, ctx.rank)
        if ctx.padding_idx >= 0:
            missing = missing | (indices == ctx.padding_idx)
        if torch.is_grad_enabled():  # a second derivative looks rows up
            grad = grad.masked_fill(missing.unsqueeze(-1), 0)
        else:
            row = row.masked_fill(missing, -1)  # which is no row
        of_table = torch.ops.aten.embedding_dense_backward(grad, row, ctx.rows, -1, False)
        return None, of_table, None, None, None


def within(indices: Tensor, size: int, rank: int) -> tuple[Tensor, Tensor]:
    """Where global ``indices`` lie in block ``rank`` of ``size``: (some local index, whether it lies elsewhere)."""
    local = indices - rank * size
    row = local.clamp(0, size - 1)
    return row, row != local


def located(indices: Tensor, size: int, axis: Axis, cut: Cut) -> tuple[Tensor, Tensor]:
    """Where global ``indices`` lie in this rank's block of ``size``: (local index, whether it is here).

    The local index of what is elsewhere is 0, so that it can be used and its result dropped.
    """
    inside = (indices >= 0) & (indices < size * axis.size)
    if cut.segments or cut.zigzag:
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


def check_range(indices: Tensor, size: int, what: str, ignored: Tensor | None = None) -> None:
    """Refuse indices outside of [0, size), but for those ``ignored``; on an accelerator without waiting for it."""
    if indices.is_meta or indices.numel() == 0:
        return
    known = indices if ignored is None else indices.masked_fill(ignored, 0)
    low, high = known.aminmax()
    if indices.device.type != "cpu" or torch.compiler.is_compiling():
        demand((low >= 0) & (high < size), f"{what} out of range: there are {size}")
    elif int(low) < 0 or int(high) >= size:
        wrong = known[(known < 0) | (known >= size)]
        raise IndexError(f"{what} {int(wrong[0])} is out of range: there are {size}")
