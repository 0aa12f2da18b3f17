"""Cross entropy where no rank has all classes, and where no rank has all tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from placement.runtime._torch import applied
from placement.runtime.axis import ALL_REDUCE, MAXIMUM
from placement.runtime.cuts import Cut, block, places
from placement.runtime.lookup import check_range, located, within
from placement.runtime.means import accumulated, global_count

if TYPE_CHECKING:
    from placement.runtime.axis import Axis

Reduction = Literal["mean", "sum", "none"]


def class_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: Axis,
    dim: int,
    outer: int = 1,
    segments: tuple[int, ...] = (),
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    tokens: Axis | None = None,
    classes: int | None = None,
    *,
    zigzag: bool = False,
) -> Tensor:
    """S, R → I: ``F.cross_entropy`` of logits whose class dim ``dim`` is sharded; the full logits never exist.

    Logits are [classes / n], or [N, classes / n, *tokens]; the target is whole, and so is a ``weight``
    [classes]. Sends two all-reduces forward: the maximum per token, in the logits' dtype, then one of the
    stacked sums per token (of exponentials, of the target's logit, with label smoothing of logits), in float32
    where logits are narrower. Backward is local: (softmax - one-hot) times the cotangent.

    Where ranks of another axis have other ``tokens``, the mean is a term of that over all tokens of all ranks, P there.
    Of logits that were padded to n equal blocks only the first ``classes`` count; the gradient of the rest is 0.

    Raises:
        IndexError: a target is neither a class nor ``ignore_index``, on every rank (on an accelerator, an
            assertion there).
        RuntimeError: a second derivative is asked for.
    """
    shape = (*logits.shape[:dim], *logits.shape[dim + 1 :])
    if target.shape != shape:
        raise ValueError(f"target of shape {list(target.shape)} for logits of shape {list(logits.shape)} on this rank")
    size = logits.shape[dim]
    every = size * axis.size if classes is None else classes
    ignored = target == ignore_index
    check_range(target, every, "target", ignored)
    if target.dtype != torch.int64:
        target = target.long()
    blocks = outer == 1 and not segments and not zigzag  # one after the other
    if weight is None and label_smoothing == 0 and blocks and every == size * axis.size:
        count = None
        if reduction == "mean":
            count = target.numel() - ignored.sum()
            count = count if tokens is None else global_count(count, tokens)
        summed = reduction != "none"
        return applied(_Plain, logits, target, axis, dim, ignored, count, summed)  # pyright: ignore[reportReturnType]
    weight = None if weight is None else weight.to(accumulated(logits.dtype))
    losses: Tensor = _ClassParallel.apply(  # pyright: ignore[reportAssignmentType]
        logits, target, axis, Cut(dim, outer, segments, zigzag), weight, ignore_index, label_smoothing, every
    )
    if reduction == "mean":
        counted = _counted(target, weight, ignore_index)
        losses = losses.sum() / (counted if tokens is None else global_count(counted, tokens))
    elif reduction == "sum":
        losses = losses.sum()
    return losses.to(logits.dtype)


def token_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: Axis,
    dim: int = 0,
    outer: int = 1,
    segments: tuple[int, ...] = (),
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    *,
    zigzag: bool = False,
) -> Tensor:
    """S, S → P: ``F.cross_entropy`` where ranks have different tokens; a term of the global mean.

    Logits and target are cut along one token dim, in any blocks (where they lie does not matter). A mean
    is the local sum over the global number of tokens that count (or of their weights), which one all-reduce of
    8 bytes finds: a rank without such a token gives 0, and where no rank has any the result is NaN, as on one
    device. With ``sum`` nothing is sent; ``none`` gives the own tokens' losses, S.
    """
    del dim, outer, segments, zigzag
    losses = F.cross_entropy(logits, target, weight, None, ignore_index, None, "none", label_smoothing)
    if reduction == "none":
        return losses
    # Summed before it is rounded: a float16 sum over tokens overflows where their mean does not.
    total = losses.sum(dtype=accumulated(losses.dtype))
    if reduction == "mean":
        total = total / global_count(_counted(target, weight, ignore_index), axis)
    return total.to(losses.dtype)


def _counted(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The number of tokens that are not ignored, or the sum of their weights, as a scalar tensor."""
    valid = target != ignore_index
    if weight is None:
        return valid.sum()
    return weight.detach().double()[torch.where(valid, target, 0)].masked_fill(~valid, 0).sum()


class _Plain(torch.autograd.Function):
    """The usual loss in few calls: blocks of classes one after the other, all alike. Reduced over tokens if ``summed``.

    Each rank has its own function, as below.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        axis: Axis,
        dim: int,
        ignored: Tensor,
        count: Tensor | None,
        summed: bool,
    ) -> Tensor:
        dtype, wide = logits.dtype, accumulated(logits.dtype)
        index, missing = within(target, logits.shape[dim], axis.rank)
        index = index.unsqueeze(dim)
        top = axis.run(MAXIMUM, logits.amax(dim), own=True)
        if dtype is not wide:
            top = top.to(wide)
        shifted = logits - top.unsqueeze(dim)
        own = shifted.gather(dim, index).squeeze(dim).masked_fill_(missing, 0)
        sums = torch.stack((own, shifted.exp_().sum(dim)))
        own, total = axis.run(ALL_REDUCE, sums, own=True).unbind()
        log = total.log()
        ctx.save_for_backward(logits, top.add_(log), index, missing, ignored, count)
        ctx.dim, ctx.wide = dim, wide
        losses = (log - own).masked_fill_(ignored, 0)
        if summed:
            losses = losses.sum()
            if count is not None:
                losses = losses / count
        return losses if dtype is wide else losses.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, lse, index, missing, ignored, count = ctx.saved_tensors
        dim = ctx.dim
        if grad.dtype is not ctx.wide:
            grad = grad.to(ctx.wide)
        if count is not None:
            grad = grad / count
        # Filled, not multiplied: where every token is ignored the cotangent of the mean is infinite.
        grad = grad.expand(ignored.shape).masked_fill(ignored, 0).unsqueeze(dim)
        out = (logits - lse.unsqueeze(dim)).exp_().mul_(grad)
        out.scatter_add_(dim, index, grad.masked_fill(missing.unsqueeze(dim), 0).neg_())
        return out if out.dtype is logits.dtype else out.to(logits.dtype), *(None,) * 6


class _ClassParallel(torch.autograd.Function):
    """Losses per token in the accumulation dtype, 0 where ignored.

    Each rank has its own function, simulated or not: only the forward communicates, and ranks share no gradient.
    With smoothing e over C classes of weights w, a token of target t has the loss
    (1 - e) w[t] nll[t] + e/C · sum over classes of w[c] nll[c], where nll[c] = log(sum) - shifted[c].
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        axis: Axis,
        cut: Cut,
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
        classes: int,
    ) -> Tensor:
        dim, size = cut.dim, logits.shape[cut.dim]
        index, mine = located(target, size, axis, cut)
        padding = _padding(logits, axis, cut, classes)
        if padding is not None:
            logits = logits.masked_fill(padding, -torch.inf)
        top = axis.run(MAXIMUM, logits.amax(dim)).to(accumulated(logits.dtype))
        shifted = logits - top.unsqueeze(dim)
        own = shifted.gather(dim, index.unsqueeze(dim)).squeeze(dim).masked_fill(~mine, 0)
        local_weight = None
        if weight is not None:
            local_weight = _along(block(weight, cut.along(0), axis.size, axis.rank), shifted, dim)
        sums = [own]
        if smoothing:
            own_shifted = shifted if padding is None else shifted.masked_fill(padding, 0)
            sums.append((own_shifted if local_weight is None else own_shifted * local_weight).sum(dim))
        sums.append(shifted.exp_().sum(dim))
        own, *every, total = axis.run(ALL_REDUCE, torch.stack(sums)).unbind()

        log = total.log()
        valid = target != ignore_index
        own_weight = torch.ones_like(log) if weight is None else weight[torch.where(valid, target, 0)]
        share = smoothing / classes  # e/C
        all_weights = classes if weight is None else weight.sum()
        losses = (1 - smoothing) * own_weight * (log - own)
        if smoothing:
            losses = losses + share * (all_weights * log - every[0])
        ctx.save_for_backward(logits, top + log, index, mine, valid, own_weight, local_weight, padding)
        ctx.dim, ctx.smoothing, ctx.share = dim, smoothing, share
        ctx.all_weights = all_weights
        return losses.masked_fill(~valid, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, lse, index, mine, valid, own_weight, local_weight, padding = ctx.saved_tensors
        dim = ctx.dim
        # Filled, not multiplied: where every token is ignored the cotangent of the mean is infinite.
        grad = grad.masked_fill(~valid, 0)
        hot = grad * own_weight * (1 - ctx.smoothing)
        out = (logits - lse.unsqueeze(dim)).exp_().mul_((hot + grad * (ctx.share * ctx.all_weights)).unsqueeze(dim))
        out.scatter_add_(dim, index.unsqueeze(dim), -hot.masked_fill(~mine, 0).unsqueeze(dim))
        if ctx.smoothing:
            flat = ctx.share * grad.unsqueeze(dim)
            out -= flat if local_weight is None else flat * local_weight
        if padding is not None:
            out.masked_fill_(padding, 0)
        return (out.to(logits.dtype), *(None,) * 7)


def _padding(logits: Tensor, axis: Axis, cut: Cut, classes: int) -> Tensor | None:
    """Which of this rank's classes are none, to broadcast over its logits; None where all are some."""
    size = logits.shape[cut.dim]
    if size * axis.size == classes:
        return None
    own = places(size * axis.size, cut, axis.size, axis.rank).to(logits.device) >= classes
    return _along(own, logits, cut.dim)


def classes(logits: Tensor, size: int) -> Tensor:
    """The first ``size`` classes of whole logits [classes] or [N, classes, *tokens]."""
    return logits.narrow(min(logits.ndim - 1, 1), 0, size)


def _along(vector: Tensor, like: Tensor, dim: int) -> Tensor:
    """``vector`` shaped to broadcast along dim ``dim`` of ``like``."""
    return vector.view([-1 if d == dim else 1 for d in range(like.ndim)])
