"""A linear layer of whose result each rank has a term, and the sum of the terms, as one function with one backward.

The term is this function's own: it is summed in place, or lies as it is sent. Its backward gathers the gradient once,
for the gradients of input and weight. The results are those of the layer followed by the conversion, to rounding. Where
somebody watches the layer, or has put another module in its place, it is called and the conversion after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from placement.runtime._torch import applied, autocast_dtype, in_backward
from placement.runtime.axis import ALL_REDUCE, NONE, Axis, Step, joint_exchange
from placement.runtime.exchange import all_reduce, cut_steps, reduce_scatter
from placement.runtime.linears import Layer, Operands, operands, unwatched
from placement.runtime.main_grads import has_main_grads, sinks
from placement.runtime.overlap import Overlap, cuts
from placement.runtime.pieces import reduced_in_pieces, scattered_in_pieces
from placement.runtime.rows import TURNED, from_turned, is_turned, to_turned, turns, weight_gradient

if TYPE_CHECKING:
    from collections.abc import Sequence


def reduce_scatter_linear(
    layer: Layer,
    x: Tensor,
    axis: Axis,
    dim: int,
    outer: int = 1,
    segments: tuple[int, ...] = (),
    *,
    zigzag: bool = False,
    outermost: bool = False,
    overlap: Overlap = "async",
) -> Tensor:
    """``layer``, a module or a weight [out, in], of ``x``, then P → S of its result.

    The result is contiguous, or has ``dim`` ``outermost`` in memory; ``dim`` is then 1 of 3. Dual: an all-gather.
    Volume 1 + 1. ``overlap``: as in ``all_gather_linears``; in one piece nothing runs beside it.

    Raises:
        SizeError: the axis does not divide the dim.
    """
    pairs = None if axis.size == 1 else unwatched((layer,))
    if pairs is None:
        return reduce_scatter(_called(layer, x), axis, dim, outer, segments, zigzag=zigzag)
    if cuts(overlap) and not _recomputed(pairs[0], x):
        if outer != 1 or segments or zigzag or dim in (-1, x.ndim - 1):
            where = f"outer {outer}, segments {segments}, zigzag {zigzag}"
            raise ValueError(f"blocks along dim {dim} with {where}: in one piece")
        return scattered_in_pieces(pairs[0], x, axis, dim, overlap, outermost=outermost)
    turned = turns(x, dim, outer, segments) and not zigzag
    forward, backward = cut_steps("reduce_scatter", "all_gather", dim, outer, segments, zigzag)
    if turned:
        backward, forward = TURNED
    return _run(pairs[0], x, _How(axis, forward, backward, turned, outermost))


def all_reduce_linear(layer: Layer, x: Tensor, axis: Axis, *, overlap: Overlap = "async") -> Tensor:
    """``layer``, a module or a weight [out, in], of ``x``, then P → I of its result.

    Dual: nothing. Volume 2 + 0.
    """
    pairs = None if axis.size == 1 else unwatched((layer,))
    if pairs is None:
        return all_reduce(_called(layer, x), axis)
    if isinstance(overlap, int) and not _recomputed(pairs[0], x):
        return reduced_in_pieces(pairs[0], x, axis, overlap)
    return _run(pairs[0], x, _How(axis, ALL_REDUCE, NONE))


class _How(NamedTuple):
    """What runs: the conversion of the result. turned: of tokens as [tokens, batch, size]. outermost: they stay so."""

    axis: Axis
    forward: Step
    backward: Step
    turned: bool = False
    outermost: bool = False


def _called(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) if isinstance(layer, nn.Module) else F.linear(x, *operands(layer))


def _run(pair: Operands, x: Tensor, how: _How) -> Tensor:
    weight, bias = pair
    axis = how.axis
    if bias is not None:
        raise ValueError("a bias joins a sum once, not on every rank: add it after the sum")
    if (dtype := autocast_dtype(x)) is not None:
        x, weight = x.to(dtype), weight.to(dtype)
    if how.forward is not NONE and in_backward():
        return _again(x, weight, how)
    if len(axis.held) == 1:  # nobody to meet
        return applied(_Summed, how, x, weight)[0]  # pyright: ignore[reportOptionalSubscript, reportIndexIssue]

    def together(pairs: list[tuple[Tensor, Tensor]]) -> Sequence[Tensor]:
        return applied(_Summed, how, *(tensor for pair in pairs for tensor in pair))  # pyright: ignore[reportReturnType]

    what = ("linear", how.forward, how.backward, x.dtype, tuple(x.shape), tuple(weight.shape))
    return axis.together(what, (x, weight), together)


def _recomputed(pair: Operands, x: Tensor) -> bool:
    """Whether a checkpoint recomputes, and the form in one piece keeps what pieces have kept: it sums nothing again."""
    return in_backward() and x.requires_grad and pair[0].requires_grad


def _again(x: Tensor, weight: Tensor, how: _How) -> Tensor:
    """The same while a checkpoint recomputes, which ends with what is kept: before a sum that nobody needs."""
    y = _run((weight, None), x, how._replace(forward=NONE, backward=NONE, outermost=True))
    if not how.turned:
        return how.axis.exchange(how.forward, how.backward, y)
    y = how.axis.exchange(how.forward, how.backward, y.transpose(0, 1)).transpose(0, 1)
    return y if how.outermost else y.contiguous()


class _Summed(torch.autograd.Function):
    """For all ranks in this process: of each its input and weight; of each the result."""

    @staticmethod
    def forward(ctx: Any, how: _How, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.how = how
        # The input is for the weight's gradient, and the weight is for the input's.
        reaches, weighed = ctx.needs_input_grad[1:3]
        xs, weights = tensors[::2], tensors[1::2]
        ctx.save_for_backward(*(xs if weighed else ()), *(weights if reaches else ()))
        ctx.mains = weighed and has_main_grads(weights)
        ctx.order = how.turned and is_turned(xs[0])
        if how.turned:
            terms = [to_turned(x, weight.t()) for x, weight in zip(xs, weights, strict=True)]
        else:
            terms = [F.linear(x, weight) for x, weight in zip(xs, weights, strict=True)]
        results = how.axis.move(how.forward, terms, own=True)
        if how.turned:
            results = [y.transpose(0, 1) for y in results]
            if not how.outermost:
                results = [y.contiguous() for y in results]
        if len(results) > 1:  # then some may get no gradient
            ctx.like = results[0].shape, results[0].dtype, results[0].device
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        how: _How = ctx.how
        found: list[Tensor | None] = [None] * (2 * len(grads))
        given = [grad for grad in grads if grad is not None]
        if not given:
            return (None, *found)
        if len(given) < len(grads):
            shape, dtype, device = ctx.like
            given = [torch.zeros(shape, dtype=dtype, device=device) if g is None else g for g in grads]
        reaches, weighed = ctx.needs_input_grad[1:3]
        saved = ctx.saved_tensors
        xs, weights = saved[: len(grads)], saved[-len(grads) :]
        follows = torch.is_grad_enabled()
        mains = sinks(ctx.next_functions, range(len(found)), given[0].dtype) if ctx.mains else {}
        if how.turned:
            given = [grad.transpose(0, 1) for grad in given]
        move = (
            joint_exchange(how.axis, how.backward, how.forward, given)
            if follows
            else how.axis.move(how.backward, given)
        )
        for rank, whole in enumerate(move):
            if reaches:
                found[2 * rank] = _of_input(how, whole, weights[rank], as_sent=ctx.order or follows)
            if weighed:
                into = mains.get(2 * rank + 1)
                gradient = weight_gradient(whole.transpose(0, 1) if how.turned else whole, xs[rank], into)
                found[2 * rank + 1] = gradient if into is None else None
        return (None, *found)


def _of_input(how: _How, whole: Tensor, weight: Tensor, *, as_sent: bool) -> Tensor:
    """The input's gradient, in the input's order of memory."""
    if not how.turned:
        return whole @ weight
    return (whole @ weight).transpose(0, 1) if as_sent else from_turned(whole, weight)
