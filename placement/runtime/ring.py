"""Attention over a sequence of which every rank has a block: queries stay, keys and values go round.

Step by step a rank meets the keys and values of every other rank, which come from the rank before and go on to the
next while it computes. What it has seen so far of a query is the weighted value and the logarithm of the weights' sum:
two such results make one (online softmax). The backward goes round once more with the keys and values, recomputes each
block's weights from the sums that were kept, and has the gradients of keys and values travel behind them until they
are home. A rank keeps its own query, key, value, result and sums; nothing of size [queries, keys] exists but the blocks
that the plain formula makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from placement.runtime._torch import Flash, autocast_dtype, eager, flash_attention
from placement.runtime.attention import capped
from placement.runtime.axis import SEND_RECV, Axis
from placement.runtime.cuts import Cut
from placement.runtime.means import accumulated
from placement.runtime.rng import Dropping
from placement.runtime.visible import Pairs, Sees, pairs


class _Hidden(NamedTuple):
    """What a block of queries does not have of a block of keys.

    mask: which it sees, None for all. dropped: which probabilities are zeroed, None for none.
    """

    causal: bool = False
    mask: Tensor | None = None
    dropped: Tensor | None = None


class _How(NamedTuple):
    """What runs, but for the tensors that have gradients."""

    axis: Axis
    cut: Cut
    sees: Sees
    scale: float
    dropping: Dropping | None = None
    softcap: float | None = None

    @property
    def width(self) -> int:
        """How many tensors a rank gives: query, key, value, and the places of its rows where some are dropped."""
        return 3 if self.dropping is None else 4

    def parts(self, row: Sequence[Tensor], at: int, step: int) -> Iterator[tuple[Pairs, _Hidden]]:
        """What rank ``at`` of this process computes in a step, with the keys that come ``step`` ranks before it.

        row: the rank's tensors.
        """
        axis, tokens = self.axis, row[0].shape[2]
        rank, marked = axis.held[at], bool(self.sees.of_key)
        found = pairs(
            tokens * axis.size,
            self.cut,
            axis.size,
            rank,
            (rank - step) % axis.size,
            self.sees.bounds,
            self.sees.spare,
            apart=marked or self.dropping is not None,
        )
        for pair in found:
            if not marked and self.dropping is None and pair.how != "some":
                yield pair, _Hidden(pair.how == "causal")
                continue
            hidden = self._hidden(pair, row)
            if hidden is not None:
                yield pair, hidden

    def _hidden(self, pair: Pairs, row: Sequence[Tensor]) -> _Hidden | None:
        """None where nothing is seen, as far as that can be told without waiting for a device."""
        places = [
            torch.arange(first, first + stop - start, device=row[0].device)
            for first, (start, stop) in zip(pair.at, (pair.queries, pair.keys), strict=True)
        ]
        mask = self.sees.mask(*places, bounded=pair.how != "all")
        if mask is not None and mask.device.type == "cpu":
            if not mask.any():
                return None
            mask = None if mask.all() else mask
        if self.dropping is None:
            return _Hidden(mask=mask)
        count = row[1].shape[2] * self.axis.size - self.dropping.spare.get(3, 0)
        rows = row[3][:, :, slice(*pair.queries)]
        return _Hidden(mask=mask, dropped=self.dropping.mask(rows, places[1], count))


class _Kernel:
    """One block of queries with one block of keys: the result alone, and its share of the gradients.

    Tensors are [batch, heads, tokens, size]; there may be fewer heads of keys and values, each for a group of queries.
    """

    def __init__(self, row: Sequence[Tensor], how: _How) -> None:
        query, key, value = row[:3]
        plain = how.dropping is not None or how.softcap is not None
        self.flash = None if plain else flash_attention(query, key, value)
        self.scale, self.softcap = how.scale, how.softcap
        self.factor = how.dropping.factor if how.dropping is not None else 1.0
        self.dtype = accumulated(query.dtype)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, hidden: _Hidden) -> tuple[Tensor, Tensor]:
        """The weighted values, and for each query the logarithm of its weights' sum: in the dtype of sums.

        Of a query that sees none of the keys these are 0 and minus infinity.
        """
        flash = self._fused(hidden)
        if flash is not None:
            mask = _numbers(hidden.mask, query)
            result, total = flash.forward(query, key, value, hidden.causal, mask, self.scale)
            result, total = result.to(self.dtype), total.to(self.dtype)
            if hidden.mask is not None:
                total = total.masked_fill(~hidden.mask.any(-1), -torch.inf)
            return result, total
        scores = self._unhidden(self._scores(query, key), query, key, hidden)
        total = scores.logsumexp(-1)
        weights = self._kept(scores.sub_(_finite(total).unsqueeze(-1)).exp_(), hidden)
        result = weights @ value.to(self.dtype)
        return result.reshape(*query.shape[:-1], value.shape[-1]), total.reshape(query.shape[:-1])

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, total: Tensor, hidden: _Hidden
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, where ``result`` and ``total`` are of all the keys."""
        flash = self._fused(hidden)
        if flash is not None:
            mask = _numbers(hidden.mask, query)
            return flash.backward(grad, query, key, value, result, total, hidden.causal, mask, self.scale)
        scores = self._scores(query, key)
        slope = None if self.softcap is None else (scores / self.softcap).square_().neg_().add_(1)
        scores = self._unhidden(scores, query, key, hidden)
        weights = scores.sub_(self._rows(total.unsqueeze(-1), key)).exp_()
        wide = self._rows(grad.to(self.dtype), key)
        mean = (wide * self._rows(result.to(self.dtype), key)).sum(-1, keepdim=True)
        of_scores = self._kept(wide @ value.to(self.dtype).transpose(-2, -1), hidden).sub_(mean).mul_(weights)
        of_scores = of_scores if slope is None else of_scores.mul_(slope)
        of_value = self._kept(weights, hidden).transpose(-2, -1) @ wide
        of_query = (of_scores @ key.to(self.dtype)).mul_(self.scale).view(query.shape)
        of_key = of_scores.transpose(-2, -1) @ self._rows(query.to(self.dtype) * self.scale, key)
        return of_query, of_key, of_value

    def _fused(self, hidden: _Hidden) -> Flash | None:
        """The fused kernel, where there is one that takes such a mask."""
        return self.flash if self.flash is not None and (hidden.mask is None or self.flash.masks) else None

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        rows = self._rows(query.to(self.dtype) * self.scale, key)
        return capped(rows @ key.to(self.dtype).transpose(-2, -1), self.softcap)

    @staticmethod
    def _unhidden(scores: Tensor, query: Tensor, key: Tensor, hidden: _Hidden) -> Tensor:
        """Minus infinity where a query does not see a key, in place."""
        unseen = ~hidden.mask if hidden.mask is not None else None
        if hidden.causal:
            unseen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=scores.device).triu_(1)
        if unseen is not None:
            unseen = unseen.unsqueeze(2) if unseen.ndim == 4 else unseen
            scores.unflatten(2, (-1, query.shape[2])).masked_fill_(unseen, -torch.inf)
        return scores

    def _kept(self, x: Tensor, hidden: _Hidden) -> Tensor:
        """``x`` with what belongs to dropped probabilities zeroed, in place."""
        if hidden.dropped is None:
            return x
        dropped = hidden.dropped
        return x.mul_(self.factor).masked_fill_(dropped.view(x.shape) if dropped.ndim else dropped, 0)

    @staticmethod
    def _rows(x: Tensor, key: Tensor) -> Tensor:
        """The queries of a group one head after the other, as rows beside the key that they share."""
        return x.reshape(x.shape[0], key.shape[1], -1, x.shape[-1])


def _numbers(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """What is added to the scores for a mask of truths."""
    if mask is None:
        return None
    zeros = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
    return zeros.masked_fill_(~mask, -torch.inf)


def _finite(total: Tensor) -> Tensor:
    """With 0 where nothing is seen: what is subtracted from minus infinity."""
    return total.masked_fill(total == -torch.inf, 0)


@eager
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    axis: Axis,
    dim: int,
    outer: int = 1,
    segments: tuple[int, ...] = (),
    *,
    zigzag: bool = False,
    left: int | None = None,
    right: int | None = None,
    compare: tuple[str, ...] = (),
    of_query: tuple[Tensor, ...] = (),
    of_key: tuple[Tensor, ...] = (),
    spare: int = 0,
    dropping: Dropping | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
) -> Tensor:
    """S, S, S → S: ``F.scaled_dot_product_attention`` of which each rank has the tokens that the cut gives it.

    Queries are [..., heads, tokens / n, size], keys and values [..., kv heads, tokens / n, size], with as many heads
    unless ``enable_gqa``; ``dim`` is that of the tokens. Dual: the gradients, cut alike. In n - 1 steps each, forward
    the keys and values go round, backward they do again, and the gradients of both, in float32 at least.

    What a query sees is said as in ``Sees``, with marks of all tokens; ``right=0`` is causal. Blocks that no query sees
    any of are passed on and not computed: under a causal mask in ``zigzag`` order every rank has equally many left. A
    query that sees no key gets 0. ``dropping`` drops probabilities, see ``drops``, and ``softcap`` keeps scores between
    -softcap and softcap, see ``capped_attention``: both by the plain formula. There is no second derivative.

    Raises:
        ValueError: shapes that do not go together.
    """
    _check(query, key, value, dim, enable_gqa=enable_gqa)
    if (dtype := autocast_dtype(query)) is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    sees = Sees(left, right, compare, of_query, of_key, spare)
    how = _How(axis, Cut(0, outer, segments, zigzag), sees, scale, dropping, softcap)
    shape = (*query.shape[:-1], value.shape[-1])
    row = [x.reshape(-1, *x.shape[-3:]) for x in (query, key, value)]
    if dropping is not None:
        row.append(dropping.rows(query).reshape(row[0].shape[:3]))

    def together(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
        made: Any = _Ring.apply(how, *(x for one in rows for x in one))
        return made

    said = (sees.bounds, spare, compare, None if dropping is None else dropping.p, softcap)
    what = ("ring attention", how.cut, said, scale, query.dtype, *(tuple(x.shape) for x in row))
    return axis.together(what, row, together).reshape(shape)


def _check(query: Tensor, key: Tensor, value: Tensor, dim: int, *, enable_gqa: bool) -> None:
    shapes = f"queries {list(query.shape)}, keys {list(key.shape)}, values {list(value.shape)}"
    if min(query.ndim, key.ndim, value.ndim) < 3 or dim % query.ndim != query.ndim - 2:
        raise ValueError(f"ring attention along dim {dim} of {shapes}: tokens are the last dim but one")
    heads, kv = query.shape[-3], key.shape[-3]
    grouped = enable_gqa and kv > 0 and heads % kv == 0
    if query.shape[:-3] != key.shape[:-3] or key.shape[:-1] != value.shape[:-1] or not (heads == kv or grouped):
        raise ValueError(f"ring attention of {shapes}: batches, heads or keys differ")
    if query.shape[-1] != key.shape[-1] or not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"ring attention of {shapes}: sizes or dtypes differ")
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(f"ring attention of {shapes}: there must be as many queries as keys")


class _Ring(torch.autograd.Function):
    """For all ranks in this process: of each its query, key and value, and of each its result."""

    @staticmethod
    def forward(ctx: Any, how: _How, *operands: Tensor) -> tuple[Tensor, ...]:
        axis = how.axis
        rows = [operands[at : at + how.width] for at in range(0, len(operands), how.width)]
        kernel = _Kernel(rows[0], how)
        packs: Sequence[Tensor] = [_packed(*row[1:3]) for row in rows]
        seen: list[tuple[Tensor, Tensor] | None] = [None] * len(rows)
        for step in range(axis.size):
            coming = axis.start(SEND_RECV, packs) if step < axis.size - 1 else None
            for at, row in enumerate(rows):
                key, value = _unpacked(packs[at], *row[1:3])
                for pair, hidden in how.parts(row, at, step):
                    keys = slice(*pair.keys)
                    part = row[0][:, :, slice(*pair.queries)], key[:, :, keys], value[:, :, keys]
                    seen[at] = _join(seen[at], pair, kernel.forward(*part, hidden), row[0])
            packs = packs if coming is None else axis.finish(coming)
        found = [one or _nothing(row[0], row[2], kernel.dtype) for one, row in zip(seen, rows, strict=True)]
        # Heads inside of tokens, as the fused kernels have them: joining heads is no copy then.
        laid = [result.transpose(1, 2).contiguous().transpose(1, 2) for result, _ in found]
        results = [result.to(row[0].dtype) for result, row in zip(laid, rows, strict=True)]
        ctx.how = how
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *results, *(_finite(total) for _, total in found))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        count, each = len(grads), ctx.how.width
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return (None,) * (1 + each * count)
        rows = [saved[at : at + each] for at in range(0, each * count, each)]
        results, totals = saved[each * count : -count], saved[-count:]
        given = [torch.zeros_like(o) if grad is None else grad for grad, o in zip(grads, results, strict=True)]
        needs = ctx.needs_input_grad[1:]
        follows = torch.is_grad_enabled()
        with torch.no_grad():
            back = _Backward(ctx.how, rows, results, totals, given).run(of_keys=needs[1] or needs[2])
        found: Any = [gradient for row in back for gradient in row]
        if follows:  # somebody may ask for a second derivative, which must not be nothing
            found = _Once.apply(len(found), *found, *rows[0][:3], *given)
        of_rows = [found[3 * at + i] if i < 3 else None for at in range(count) for i in range(each)]
        return (None, *(gradient if need else None for gradient, need in zip(of_rows, needs, strict=True)))


class _Once(torch.autograd.Function):
    """The first ``count`` tensors, which depend on the others in a way that nobody can differentiate."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004 - autograd's own
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:  # noqa: ARG004 # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError("ring attention has no second derivative")


class _Backward:
    """The way back of all ranks in this process."""

    def __init__(
        self,
        how: _How,
        rows: Sequence[tuple[Tensor, ...]],
        results: Sequence[Tensor],
        totals: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> None:
        self.how, self.rows, self.results, self.totals, self.grads = how, rows, results, totals, grads
        self.kernel = _Kernel(rows[0], how)
        self.of_queries = [torch.zeros_like(row[0], dtype=self.kernel.dtype) for row in rows]

    def run(self, *, of_keys: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The gradients of each rank's query, key and value; those of keys and values are left out unless asked for."""
        axis = self.how.axis
        packs: Sequence[Tensor] = [_packed(*row[1:3]) for row in self.rows]
        own: list[Tensor] = []
        leaving = None
        for step in range(axis.size):
            coming = axis.start(SEND_RECV, packs) if step < axis.size - 1 else None
            shares = [self._shares(at, packs[at], step) for at in range(len(packs))]
            if not of_keys:
                pass
            elif not step:
                own = shares
            else:
                if leaving is not None:
                    shares = [s.add_(so_far) for s, so_far in zip(shares, axis.finish(leaving), strict=True)]
                leaving = axis.start(SEND_RECV, shares, own=True)
            packs = packs if coming is None else axis.finish(coming)
        if leaving is not None:
            own = [mine.add_(theirs) for mine, theirs in zip(own, axis.finish(leaving), strict=True)]
        return [self._of(at, own[at] if of_keys else self.of_queries[at]) for at in range(len(packs))]

    def _of(self, at: int, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.rows[at][:3]
        of_query = self.of_queries[at].to(query.dtype)
        if own is self.of_queries[at]:
            return of_query, key, value  # the last two are not asked for
        of_key, of_value = _unpacked(own, key, value)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype)

    def _shares(self, at: int, pack: Tensor, step: int) -> Tensor:
        """What the own queries add to the gradients of the keys and values that are here, packed as these are."""
        query, own, values = self.rows[at][:3]
        key, value = _unpacked(pack, own, values)
        shares = torch.zeros_like(pack, dtype=self.kernel.dtype)
        of_key, of_value = _unpacked(shares, own, values)
        for pair, hidden in self.how.parts(self.rows[at], at, step):
            tokens, keys = slice(*pair.queries), slice(*pair.keys)
            added = self.kernel.backward(
                self.grads[at][:, :, tokens],
                query[:, :, tokens],
                key[:, :, keys],
                value[:, :, keys],
                self.results[at][:, :, tokens],
                self.totals[at][:, :, tokens],
                hidden,
            )
            self.of_queries[at][:, :, tokens] += added[0]
            of_key[:, :, keys] += added[1]
            of_value[:, :, keys] += added[2]
        return shares


def _nothing(query: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What is seen of no key."""
    batch, heads, tokens, _ = query.shape
    result = query.new_zeros(batch, tokens, heads, value.shape[-1], dtype=dtype).transpose(1, 2)
    return result, query.new_full(query.shape[:-1], -torch.inf, dtype=dtype)


def _join(
    seen: tuple[Tensor, Tensor] | None, pair: Pairs, more: tuple[Tensor, Tensor], query: Tensor
) -> tuple[Tensor, Tensor]:
    """What further keys give, added to what some queries have seen, in place; None: nothing yet."""
    if seen is None:
        if pair.queries == (0, query.shape[2]):
            return more
        seen = _nothing(query, more[0], more[0].dtype)
    result, total = (x[:, :, slice(*pair.queries)] for x in seen)
    joined = torch.logaddexp(total, more[1])
    base = _finite(joined)
    result.mul_((total - base).exp_().unsqueeze(-1)).add_(more[0] * (more[1] - base).exp_().unsqueeze(-1))
    total.copy_(joined)
    return seen


def _packed(key: Tensor, value: Tensor) -> Tensor:
    return torch.cat((key.flatten(), value.flatten()))


def _unpacked(pack: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Views of what was packed, shaped as the own key and value are."""
    return pack[: key.numel()].view(key.shape), pack[key.numel() :].view(value.shape)
