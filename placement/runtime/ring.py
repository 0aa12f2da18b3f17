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
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from placement.runtime._torch import autocast_dtype, eager, flash_attention
from placement.runtime.axis import SEND_RECV, Axis
from placement.runtime.cuts import Cut, spans
from placement.runtime.means import accumulated


class _Pairs(NamedTuple):
    """Own queries ``start`` to ``stop`` with a rank's keys up to ``seen``; causal where their places are equal."""

    start: int
    stop: int
    seen: int
    causal: bool = False


class _How(NamedTuple):
    """What runs, but for the tensors. pairs: what a rank computes with another one's keys, by both ranks."""

    axis: Axis
    cut: Cut
    causal: bool
    scale: float

    def pairs(self, queries: int, keys: int, rank: int, other: int) -> Sequence[_Pairs]:
        if not self.causal:
            return (_Pairs(0, queries, keys),)
        return _visible(queries * self.axis.size, self.cut, self.axis.size, rank, other)


class _Kernel:
    """One block of queries with one block of keys: the result alone, and its share of the gradients.

    Tensors are [batch, heads, tokens, size]; there may be fewer heads of keys and values, each for a group of queries.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        self.flash = flash_attention(query, key, value)
        self.scale = scale
        self.dtype = accumulated(query.dtype)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        """The weighted values, and for each query the logarithm of its weights' sum: in the dtype of sums."""
        if self.flash is not None:
            result, total = self.flash.forward(query, key, value, causal, self.scale)
            return result.to(self.dtype), total.to(self.dtype)
        scores = self._scores(query, key, causal=causal)
        total = scores.logsumexp(-1)
        result = (scores - total.unsqueeze(-1)).exp_() @ value.to(self.dtype)
        return result.reshape(*query.shape[:-1], value.shape[-1]), total.reshape(query.shape[:-1])

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, total: Tensor, *, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, where ``result`` and ``total`` are of all the keys."""
        if self.flash is not None:
            return self.flash.backward(grad, query, key, value, result, total, causal, self.scale)
        weights = (self._scores(query, key, causal=causal) - self._rows(total.unsqueeze(-1), key)).exp_()
        wide = self._rows(grad.to(self.dtype), key)
        of_value = weights.transpose(-2, -1) @ wide
        mean = (wide * self._rows(result.to(self.dtype), key)).sum(-1, keepdim=True)
        of_scores = (wide @ value.to(self.dtype).transpose(-2, -1)).sub_(mean).mul_(weights)
        of_query = (of_scores @ key.to(self.dtype)).mul_(self.scale).view(query.shape)
        of_key = of_scores.transpose(-2, -1) @ self._rows(query.to(self.dtype) * self.scale, key)
        return of_query, of_key, of_value

    def _scores(self, query: Tensor, key: Tensor, *, causal: bool) -> Tensor:
        rows = self._rows(query.to(self.dtype) * self.scale, key)
        scores = rows @ key.to(self.dtype).transpose(-2, -1)
        if causal:
            hidden = torch.ones(scores.shape[-1], scores.shape[-1], dtype=torch.bool, device=scores.device).triu_(1)
            scores.unflatten(2, (-1, scores.shape[-1])).masked_fill_(hidden, -torch.inf)
        return scores

    @staticmethod
    def _rows(x: Tensor, key: Tensor) -> Tensor:
        """The queries of a group one head after the other, as rows beside the key that they share."""
        return x.reshape(x.shape[0], key.shape[1], -1, x.shape[-1])


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
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """S, S, S → S: ``F.scaled_dot_product_attention`` of which each rank has the tokens that the cut gives it.

    Queries are [..., heads, tokens / n, size], keys and values [..., kv heads, tokens / n, size], with as many heads
    unless ``enable_gqa``; ``dim`` is that of the tokens. Dual: the gradients, cut alike. In n - 1 steps each, forward
    the keys and values go round, backward they do again, and the gradients of both, in float32 at least. Blocks that
    a causal query does not see are passed on and not computed: in ``zigzag`` order every rank has equally many left.
    There is no second derivative.

    Raises:
        ValueError: shapes that do not go together, or ``is_causal`` with unequally many queries and keys.
    """
    _check(query, key, value, dim, is_causal=is_causal, enable_gqa=enable_gqa)
    if (dtype := autocast_dtype(query)) is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if axis.size == 1:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    how = _How(axis, Cut(0, outer, segments, zigzag), is_causal, scale)
    shape = (*query.shape[:-1], value.shape[-1])
    row = [x.reshape(-1, *x.shape[-3:]) for x in (query, key, value)]

    def together(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
        made: Any = _Ring.apply(how, *(x for one in rows for x in one))
        return made

    what = ("ring attention", how.cut, is_causal, scale, query.dtype, *(tuple(x.shape) for x in row))
    return axis.together(what, row, together).reshape(shape)


def _check(query: Tensor, key: Tensor, value: Tensor, dim: int, *, is_causal: bool, enable_gqa: bool) -> None:
    shapes = f"queries {list(query.shape)}, keys {list(key.shape)}, values {list(value.shape)}"
    if min(query.ndim, key.ndim, value.ndim) < 3 or dim % query.ndim != query.ndim - 2:
        raise ValueError(f"ring attention along dim {dim} of {shapes}: tokens are the last dim but one")
    heads, kv = query.shape[-3], key.shape[-3]
    grouped = enable_gqa and kv > 0 and heads % kv == 0
    if query.shape[:-3] != key.shape[:-3] or key.shape[:-1] != value.shape[:-1] or not (heads == kv or grouped):
        raise ValueError(f"ring attention of {shapes}: batches, heads or keys differ")
    if query.shape[-1] != key.shape[-1] or not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"ring attention of {shapes}: sizes or dtypes differ")
    if is_causal and query.shape[-2] != key.shape[-2]:
        raise ValueError(f"causal ring attention of {shapes}: there must be as many queries as keys")


@lru_cache(maxsize=4096)
def _visible(size: int, cut: Cut, n: int, rank: int, other: int) -> tuple[_Pairs, ...]:
    """The pairs of own queries and another rank's keys that are legal, where both are cut alike.

    Spans of two ranks are apart and ascend: a span of queries sees all of the first spans of keys, nothing of the rest.
    """
    own, theirs = spans(size, cut, n, rank), spans(size, cut, n, other)
    length = size // n
    if rank == other:
        return (_Pairs(0, length, length, causal=True),) if length else ()
    found: list[_Pairs] = []
    start = 0
    seen_by = [(stop - begin, sum(b - a for a, b in theirs if a < begin)) for begin, stop in own]
    for seen, group in groupby(seen_by, key=lambda one: one[1]):
        stop = start + sum(count for count, _ in group)
        if seen and stop > start:
            found.append(_Pairs(start, stop, seen))
        start = stop
    return tuple(found)


class _Ring(torch.autograd.Function):
    """For all ranks in this process: of each its query, key and value, and of each its result."""

    @staticmethod
    def forward(ctx: Any, how: _How, *operands: Tensor) -> tuple[Tensor, ...]:
        axis = how.axis
        rows = [operands[at : at + 3] for at in range(0, len(operands), 3)]
        query, key, value = rows[0]
        kernel = _Kernel(query, key, value, how.scale)
        packs: Sequence[Tensor] = [_packed(key, value) for _, key, value in rows]
        seen: list[tuple[Tensor, Tensor]] = []
        for step in range(axis.size):
            coming = axis.start(SEND_RECV, packs) if step < axis.size - 1 else None
            for at, (query, own, values) in enumerate(rows):
                key, value = _unpacked(packs[at], own, values)
                pairs = how.pairs(query.shape[2], key.shape[2], axis.held[at], (axis.held[at] - step) % axis.size)
                if not step:
                    seen.append(_first(kernel, query, key, value, pairs))
                    continue
                for pair in pairs:
                    part = query[:, :, pair.start : pair.stop], key[:, :, : pair.seen], value[:, :, : pair.seen]
                    _join(seen[at], pair, kernel.forward(*part, causal=pair.causal))
            packs = packs if coming is None else axis.finish(coming)
        results = [result.to(query.dtype) for (result, _), (query, _, _) in zip(seen, rows, strict=True)]
        ctx.how = how
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *results, *(total for _, total in seen))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        count = len(grads)
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return (None,) * (1 + 3 * count)
        rows = [saved[at : at + 3] for at in range(0, 3 * count, 3)]
        results, totals = saved[3 * count : 4 * count], saved[4 * count :]
        given = [torch.zeros_like(o) if grad is None else grad for grad, o in zip(grads, results, strict=True)]
        needs = ctx.needs_input_grad[1:]
        follows = torch.is_grad_enabled()
        with torch.no_grad():
            back = _Backward(ctx.how, rows, results, totals, given).run(of_keys=needs[1] or needs[2])
        found: Any = [gradient for row in back for gradient in row]
        if follows:  # somebody may ask for a second derivative, which must not be nothing
            found = _Once.apply(len(found), *found, *rows[0], *given)
        return (None, *(gradient if need else None for gradient, need in zip(found, needs, strict=True)))


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
        query, key, value = rows[0]
        self.kernel = _Kernel(query, key, value, how.scale)
        self.of_queries = [torch.zeros_like(row[0], dtype=self.kernel.dtype) for row in rows]

    def run(self, *, of_keys: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The gradients of each rank's query, key and value; those of keys and values are left out unless asked for."""
        axis = self.how.axis
        packs: Sequence[Tensor] = [_packed(key, value) for _, key, value in self.rows]
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
        query, key, value = self.rows[at]
        of_query = self.of_queries[at].to(query.dtype)
        if own is self.of_queries[at]:
            return of_query, key, value  # the last two are not asked for
        of_key, of_value = _unpacked(own, key, value)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype)

    def _shares(self, at: int, pack: Tensor, step: int) -> Tensor:
        """What the own queries add to the gradients of the keys and values that are here, packed as these are."""
        axis = self.how.axis
        query, own, values = self.rows[at]
        key, value = _unpacked(pack, own, values)
        shares = torch.zeros_like(pack, dtype=self.kernel.dtype)
        of_key, of_value = _unpacked(shares, own, values)
        pairs = self.how.pairs(query.shape[2], key.shape[2], axis.held[at], (axis.held[at] - step) % axis.size)
        for start, stop, seen, causal in pairs:
            tokens, keys = slice(start, stop), slice(seen)
            added = self.kernel.backward(
                self.grads[at][:, :, tokens],
                query[:, :, tokens],
                key[:, :, keys],
                value[:, :, keys],
                self.results[at][:, :, tokens],
                self.totals[at][:, :, tokens],
                causal=causal,
            )
            self.of_queries[at][:, :, tokens] += added[0]
            of_key[:, :, keys] += added[1]
            of_value[:, :, keys] += added[2]
        return shares


def _first(
    kernel: _Kernel, query: Tensor, key: Tensor, value: Tensor, pairs: Sequence[_Pairs]
) -> tuple[Tensor, Tensor]:
    """What the own keys give, which every query sees some of: so no sum is ever empty where two are joined."""
    for pair in pairs:
        result, total = kernel.forward(query, key, value, causal=pair.causal)
        return result, total
    shape = query.shape[:-1]
    return query.new_zeros(*shape, value.shape[-1], dtype=kernel.dtype), query.new_zeros(shape, dtype=kernel.dtype)


def _join(seen: tuple[Tensor, Tensor], pair: _Pairs, more: tuple[Tensor, Tensor]) -> None:
    """Add what further keys give to what some queries have seen, in place."""
    result, total = (x[:, :, pair.start : pair.stop] for x in seen)
    joined = torch.logaddexp(total, more[1])
    result.mul_((total - joined).exp_().unsqueeze(-1)).add_(more[0] * (more[1] - joined).exp_().unsqueeze(-1))
    total.copy_(joined)


def _packed(key: Tensor, value: Tensor) -> Tensor:
    return torch.cat((key.flatten(), value.flatten()))


def _unpacked(pack: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Views of what was packed, shaped as the own key and value are."""
    return pack[: key.numel()].view(key.shape), pack[key.numel() :].view(value.shape)
