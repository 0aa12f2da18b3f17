"""What an expert writes by hand for a Qwen3 or a Llama: products and collectives in functions with their own backward.

Under TP+SP the residual is [seq, batch, hidden] in memory, so that gathers and scatters over the sequence move no
extra copy; attention's output is batch-outermost, and the products there read and write it in place. ``Native`` is
how products and collectives are joined; ``decoder.py`` is the model around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Shapes in comments: t tokens as two dims, [seq, batch] or [batch, seq]; k in, m out, of a rank.


class Native:
    """Collectives of ``torch.distributed``: asynchronous where there is something to do meanwhile."""

    def __init__(self, group: dist.ProcessGroup, *, sp: bool) -> None:
        self.group, self.sp = group, sp
        self.size, self.rank = group.size(), group.rank()
        self.seq_first = sp

    def columns(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """Products with blocks of rows of ``weights``, of one gathered (or replicated) ``x``."""
        return (_GatherProducts if self.sp else _CopyProducts).apply(self, x, *weights)

    def row(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product with a block of columns of ``weight``, summed over ranks."""
        return (_ProductScatter if self.sp else _ProductReduce).apply(self, x, weight)

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """Rows of a table whose rows are cut."""
        return _Embed.apply(self, ids, table)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean cross entropy over tokens of ``target`` that are not -100; the classes are cut."""
        return _Loss.apply(self, logits, target)

    def gather(self, x: Tensor) -> tuple[Tensor, Any]:
        """Begin to join all ranks' blocks along dim 0; ``arrived`` gives them."""
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        return out, dist.all_gather_single(out, x, group=self.group, async_op=True)

    def scatter(self, x: Tensor) -> tuple[Tensor, Any]:
        """Begin to sum, each rank keeping its block along dim 0."""
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        return out, dist.reduce_scatter_single(out, x, group=self.group, async_op=True)

    def reduce(self, x: Tensor) -> tuple[Tensor, Any]:
        """Begin to sum ``x``, which is written."""
        return x, dist.all_reduce(x, group=self.group, async_op=True)

    def largest(self, x: Tensor) -> Tensor:
        """The largest of the ranks' ``x``, which is written."""
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def arrived(self, pending: tuple[Tensor, Any]) -> Tensor:
        """What was begun, done."""
        pending[1].wait()
        return pending[0]

    def gathered(self, x: Tensor) -> Tensor:
        """All ranks' blocks along dim 0."""
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        dist.all_gather_single(out, x, group=self.group)
        return out

    def scattered(self, x: Tensor) -> Tensor:
        """This rank's block along dim 0 of the sum."""
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        dist.reduce_scatter_single(out, x, group=self.group)
        return out

    def reduced(self, x: Tensor) -> Tensor:
        """The sum, in place of ``x``."""
        dist.all_reduce(x, group=self.group)
        return x

    def product(self, x: Tensor, w: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
        """``out (+)= x @ w``, for x and out of any memory order of their first two dims."""
        return _product(x, w, out, add=add)

    def weight_grad(self, dy: Tensor, x: Tensor) -> Tensor:
        """Dy [t, m], x [t, k] -> [m, k]."""
        return _weight_grad(dy, x)

    def input_grad(self, dys: tuple[Tensor, ...], weights: Sequence[Tensor], like: Sequence[int]) -> Tensor:
        """The sum of dy @ weight, of shape ``like``."""
        out = dys[0].new_empty(like)
        for i, (dy, w) in enumerate(zip(dys, weights, strict=True)):
            self.product(dy, w, out, add=i > 0)
        return out

    def reduce_replicated(self, parameters: list[Tensor]) -> None:
        """Sum the gradients of parameters that ranks used differently: one flat all-reduce."""
        if not parameters:
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.view(-1) for g in grads])
        dist.all_reduce(flat, group=self.group)
        for parameter, total in zip(parameters, flat.split([g.numel() for g in grads]), strict=True):
            parameter.grad = total.view_as(parameter)


def _each(x: Tensor) -> bool:
    """Whether ``x`` [seq, batch, k] is batch-outermost in memory: then products go sequence by sequence."""
    return x.dim() == 3 and not x.is_contiguous() and x.transpose(0, 1).is_contiguous()


def _product(x: Tensor, w: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """``out (+)= x @ w``, for x and out of any memory order of their first two dims."""
    if _each(x) or _each(out):
        for i in range(x.shape[1]):
            torch.addmm(out[:, i], x[:, i], w, out=out[:, i]) if add else torch.mm(x[:, i], w, out=out[:, i])
        return out
    flat = out.view(-1, out.shape[-1])
    if add:
        return flat.addmm_(x.reshape(-1, x.shape[-1]), w).view_as(out)
    torch.mm(x.reshape(-1, x.shape[-1]), w, out=flat)
    return out


def _weight_grad(dy: Tensor, x: Tensor) -> Tensor:
    """Dy [t, m], x [t, k] -> [m, k]."""
    if _each(dy) or _each(x):
        out = dy[:, 0].t().mm(x[:, 0])
        for i in range(1, x.shape[1]):
            out.addmm_(dy[:, i].t(), x[:, i])
        return out
    return dy.reshape(-1, dy.shape[-1]).t().mm(x.reshape(-1, x.shape[-1]))


class _GatherProducts(torch.autograd.Function):
    """[s/n, b, k] -> gathered once, not saved, and gathered again while the input's gradient is computed."""

    @staticmethod
    def forward(ctx: Any, ops: Native, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.ops = ops
        ctx.save_for_backward(x, *weights)
        whole = ops.gathered(x)
        return tuple(F.linear(whole, w) for w in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        ops: Native = ctx.ops
        x, *weights = ctx.saved_tensors
        arriving = ops.gather(x)
        dx = ops.input_grad(dys, weights, (ops.size * x.shape[0], *x.shape[1:]))
        whole = ops.arrived(arriving)
        leaving = ops.scatter(dx)
        dws = [ops.weight_grad(dy, whole) for dy in dys]
        return (None, ops.arrived(leaving), *dws)


class _CopyProducts(torch.autograd.Function):
    """[t, k] -> products; the input's gradient is summed while those of the weights are computed."""

    @staticmethod
    def forward(ctx: Any, ops: Native, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.ops = ops
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, w) for w in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        ops: Native = ctx.ops
        x, *weights = ctx.saved_tensors
        leaving = ops.reduce(ops.input_grad(dys, weights, x.shape))
        dws = [ops.weight_grad(dy, x) for dy in dys]
        return (None, ops.arrived(leaving), *dws)


class _ProductScatter(torch.autograd.Function):
    """[s, b, k] -> [s/n, b, m]."""

    @staticmethod
    def forward(ctx: Any, ops: Native, x: Tensor, weight: Tensor) -> Tensor:
        ctx.ops = ops
        ctx.save_for_backward(x, weight)
        return ops.scattered(ops.product(x, weight.t(), x.new_empty((*x.shape[:-1], weight.shape[0]))))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ops: Native = ctx.ops
        x, weight = ctx.saved_tensors
        dy = ops.gathered(grad.contiguous())
        return None, ops.product(dy, weight, torch.empty_like(x)), ops.weight_grad(dy, x)


class _ProductReduce(torch.autograd.Function):
    """[t, k] -> [t, m]."""

    @staticmethod
    def forward(ctx: Any, ops: Native, x: Tensor, weight: Tensor) -> Tensor:
        ctx.ops = ops
        ctx.save_for_backward(x, weight)
        return ops.reduced(F.linear(x, weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return None, dy.matmul(weight), ctx.ops.weight_grad(dy, x)


class _Embed(torch.autograd.Function):
    """[t] -> [t, m], of which a rank keeps its part of the sequence under TP+SP. Only the ids are saved."""

    @staticmethod
    def forward(ctx: Any, ops: Native, ids: Tensor, table: Tensor) -> Tensor:
        ctx.ops, ctx.rows = ops, table.shape[0]
        ctx.save_for_backward(ids)
        local = ids - ops.rank * table.shape[0]
        missing = (local < 0) | (local >= table.shape[0])
        found = F.embedding(local.masked_fill_(missing, 0), table).masked_fill_(missing.unsqueeze(-1), 0)
        return ops.scattered(found) if ops.sp else ops.reduced(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ops: Native = ctx.ops
        (ids,) = ctx.saved_tensors
        local = ids - ops.rank * ctx.rows
        local.masked_fill_((local < 0) | (local >= ctx.rows), -1)  # the row of no token
        dy = ops.gathered(grad.contiguous()) if ops.sp else grad
        return None, None, torch.ops.aten.embedding_dense_backward(dy, local, ctx.rows, -1, False)


class _Loss(torch.autograd.Function):
    """Logits [t, classes / n], target [t] -> scalar. Two all-reduces, one gradient written in place of the softmax."""

    @staticmethod
    def forward(ctx: Any, ops: Native, logits: Tensor, target: Tensor) -> Tensor:
        classes = logits.shape[-1]
        flat, goal = logits.view(-1, classes), target.reshape(-1)
        top = ops.largest(flat.amax(1))
        exps = flat - top.unsqueeze(1)
        local = goal - ops.rank * classes
        missing = (local < 0) | (local >= classes)
        index = local.masked_fill_(missing, 0).unsqueeze(1)
        sums = exps.new_empty((2, goal.numel()))
        sums[1] = exps.gather(1, index).squeeze(1).masked_fill_(missing, 0)
        torch.sum(exps.exp_(), 1, out=sums[0])
        sums = ops.reduced(sums)
        valid = goal >= 0
        share = valid / valid.sum()
        ctx.like = logits.shape
        ctx.save_for_backward(exps, index, share / sums[0], share.masked_fill(missing, 0).neg_())
        return ((sums[0].log() - sums[1]) * share).sum().to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exps, index, scale, hot = ctx.saved_tensors
        exps.mul_((scale * grad).unsqueeze(1)).scatter_add_(1, index, (hot * grad).unsqueeze(1))
        return None, exps.view(ctx.like), None


class Traced(Native):
    """The same for ``torch.compile``: functional collectives, and products whose memory order the compiler chooses."""

    def gather(self, x: Tensor) -> tuple[Tensor, Any]:
        """As ``Native``'s."""
        return _FUNCTIONAL.all_gather_into_tensor(x.contiguous(), self.size, self.group.group_name), None

    def scatter(self, x: Tensor) -> tuple[Tensor, Any]:
        """As ``Native``'s."""
        return _FUNCTIONAL.reduce_scatter_tensor(x.contiguous(), "sum", self.size, self.group.group_name), None

    def reduce(self, x: Tensor) -> tuple[Tensor, Any]:
        """As ``Native``'s, but nothing is written."""
        return _FUNCTIONAL.all_reduce(x.contiguous(), "sum", self.group.group_name), None

    def largest(self, x: Tensor) -> Tensor:
        """As ``Native``'s, but nothing is written."""
        return self.arrived((_FUNCTIONAL.all_reduce(x, "max", self.group.group_name), None))

    def arrived(self, pending: tuple[Tensor, Any]) -> Tensor:
        """As ``Native``'s."""
        return _FUNCTIONAL.wait_tensor(pending[0])

    def gathered(self, x: Tensor) -> Tensor:
        """As ``Native``'s."""
        return self.arrived(self.gather(x))

    def scattered(self, x: Tensor) -> Tensor:
        """As ``Native``'s."""
        return self.arrived(self.scatter(x))

    def reduced(self, x: Tensor) -> Tensor:
        """As ``Native``'s."""
        return self.arrived(self.reduce(x))

    def product(self, x: Tensor, w: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
        """As ``Native``'s, but nothing is written."""
        return out + x @ w if add else x @ w

    def weight_grad(self, dy: Tensor, x: Tensor) -> Tensor:
        """As ``Native``'s."""
        return dy.flatten(0, 1).t() @ x.flatten(0, 1)

    def input_grad(self, dys: tuple[Tensor, ...], weights: Sequence[Tensor], like: Sequence[int]) -> Tensor:
        """As ``Native``'s."""
        del like
        total = dys[0] @ weights[0]
        for dy, w in zip(dys[1:], weights[1:], strict=True):
            total = total + dy @ w
        return total


_FUNCTIONAL = torch.ops._c10d_functional  # noqa: SLF001 - torch's own name for them
