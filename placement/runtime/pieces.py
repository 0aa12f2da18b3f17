"""Linear layers whose conversions are cut, so that products run while blocks travel: ``linears``, ``sums``.

Each function takes the operands of all ranks in this process, in a flat list, and gives the results of all of them.
Where somebody asks for a second derivative, the backward is that of the plain form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from placement.runtime._torch import autocast_dtype
from placement.runtime.axis import ALL_REDUCE, NONE, Axis, Step, joint_exchange
from placement.runtime.cuts import Cut, local_shape
from placement.runtime.main_grads import has_main_grads, sinks
from placement.runtime.overlap import GATHER, SCATTER, Overlap, Place, arriving, leaving, reducing
from placement.runtime.rows import filled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

Operands = tuple["Tensor", "Tensor | None"]


def gathered_in_pieces(
    pairs: Sequence[Operands], x: Tensor, axis: Axis, dim: int, overlap: Overlap, *, outermost: bool
) -> tuple[Tensor, ...]:
    """``all_gather_linears`` of weights and biases."""
    row = [x, *(tensor for pair in pairs for tensor in pair)]
    return _run(_Gathered, How(axis, dim % x.ndim, overlap, len(pairs), outermost), row)


def shared_in_pieces(pairs: Sequence[Operands], x: Tensor, axis: Axis, chunks: int) -> tuple[Tensor, ...]:
    """``replicated_linears`` of weights and biases."""
    return _run(_Shared, How(axis, 0, chunks, len(pairs)), [x, *(tensor for pair in pairs for tensor in pair)])


def scattered_in_pieces(
    pair: Operands, x: Tensor, axis: Axis, dim: int, overlap: Overlap, *, outermost: bool
) -> Tensor:
    """``reduce_scatter_linear`` of a weight."""
    dim %= x.ndim
    local_shape(
        tuple(x.shape), Cut(dim), axis.size, f"reduce_scatter over axis {axis.name!r}"
    )  # refused as in one piece
    return _run(_Scattered, How(axis, dim, overlap, outermost=outermost), [x, _alone(pair)])[0]


def reduced_in_pieces(pair: Operands, x: Tensor, axis: Axis, chunks: int) -> Tensor:
    """``all_reduce_linear`` of a weight."""
    return _run(_Reduced, How(axis, 0, chunks), [x, _alone(pair)])[0]


def _alone(pair: Operands) -> Tensor:
    weight, bias = pair
    if bias is not None:
        raise ValueError("a bias joins a sum once, not on every rank: add it after the sum")
    return weight


def _run(function: type[torch.autograd.Function], how: How, row: list[Tensor | None]) -> tuple[Tensor, ...]:
    """Apply ``function`` to the rows of all ranks in this process; returns this rank's results."""
    axis, x = how.axis, row[0]
    assert x is not None
    if (dtype := autocast_dtype(x)) is not None:
        row = [None if tensor is None else tensor.to(dtype) for tensor in row]

    def together(rows: list[list[Tensor | None]]) -> list[tuple[Tensor, ...]]:
        made: Any = function.apply(how, *(tensor for one in rows for tensor in one))
        return [made[start : start + how.layers] for start in range(0, len(made), how.layers)]

    shapes = [None if tensor is None else tuple(tensor.shape) for tensor in row]
    return axis.together((function.__name__, how.dim, how.overlap, x.dtype, *shapes), row, together)


class How(NamedTuple):
    """What runs: on which axis, with blocks along which dim, cut how, for so many layers.

    outermost: results have that dim outermost in memory, else they are contiguous.
    """

    axis: Axis
    dim: int
    overlap: Overlap
    layers: int = 1
    outermost: bool = False

    def first(self, x: Tensor) -> Tensor:
        """``x`` with the dim of the blocks first."""
        return x.movedim(self.dim, 0)

    def back(self, x: Tensor) -> Tensor:
        """A result in the order of dims that it has outside."""
        x = x.movedim(0, self.dim)
        return x if self.outermost else x.contiguous()


def _put(window: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Write ``x`` [blocks · rows, ..., in] times ``weight`` [out, in] into ``window`` [blocks, rows, ..., out]."""
    if window.is_contiguous():
        flat, into = x.reshape(-1, x.shape[-1]), window.view(-1, window.shape[-1])
        if bias is None:
            torch.mm(flat, weight.t(), out=into)
        else:
            torch.addmm(bias, flat, weight.t(), out=into)
    else:
        window.copy_(F.linear(x, weight, bias).view(window.shape))


def _add(total: Tensor | None, gradient: Tensor, x: Tensor) -> Tensor:
    """Add to ``total`` the gradient of a weight by some rows: ``gradient`` [..., out], ``x`` [..., in]."""
    gradient, x = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
    return gradient.t().mm(x) if total is None else total.addmm_(gradient.t(), x)


def _kept(ctx: Any, operands: Sequence[Tensor | None]) -> None:
    """Keep the operands; and which are tensors, where a parameter among them may have its gradients added up itself."""
    ctx.save_for_backward(*operands)
    ctx.places = [at for at, one in enumerate(operands) if one is not None] if has_main_grads(operands) else None


def _mains(ctx: Any, dtype: torch.dtype) -> Mapping[int, Tensor]:
    """By operand, what its gradient is added to instead of being handed on."""
    return {} if ctx.places is None else sinks(ctx.next_functions, ctx.places, dtype)


def _differentiable(
    plain: Callable[[list[Any]], Sequence[Tensor]], operands: Sequence[Any], needs: Sequence[bool], grads: Sequence[Any]
) -> list[Tensor | None]:
    """Gradients that have gradients of their own: those of the ``plain`` form of the ``operands``."""
    wanted = [operand for operand, one in zip(operands, needs, strict=True) if one]
    made = plain(list(operands))
    pairs = [(out, grad) for out, grad in zip(made, grads, strict=True) if grad is not None]
    outs, given = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outs, wanted, given, create_graph=True, allow_unused=True))
    return [next(found) if one else None for one in needs]


class _Gathered(torch.autograd.Function):
    """S → R of an input, cut, and the layers that read it: of each rank the input, then weights and biases.

    Of the input the own block is kept.
    """

    @staticmethod
    def forward(ctx: Any, how: How, *operands: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.how = how
        n, width = how.axis.size, 1 + 2 * how.layers
        inputs: Any = operands[::width]
        blocks = [how.first(x) for x in inputs]
        layers = [
            [(operands[at], operands[at + 1]) for at in range(r * width + 1, (r + 1) * width, 2)]
            for r in range(len(inputs))
        ]
        results: list[list[Any]] = [[] for _ in blocks]
        for rank, block in enumerate(blocks):
            for weight, _ in layers[rank]:
                results[rank].append(block.new_empty((n * block.shape[0], *block.shape[1:-1], weight.shape[0])))  # pyright: ignore[reportOptionalMemberAccess]
        for places, at in arriving(how.axis, how.overlap, blocks):
            for rank, (place, x) in enumerate(zip(places, at, strict=True)):
                for result, (weight, bias) in zip(results[rank], layers[rank], strict=True):
                    _put(place.of(result, n), x, weight, bias)  # pyright: ignore[reportArgumentType]
        _kept(ctx, operands)
        return tuple(how.back(result) for row in results for result in row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        how: How = ctx.how
        operands, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        n, layers, width = how.axis.size, how.layers, 1 + 2 * how.layers
        given, live = filled(grads, layers)
        found: list[Any] = [None] * len(needs)
        if not live:
            return (None, *found)
        if torch.is_grad_enabled():
            return (None, *_differentiable(lambda row: _plain_gathered(how, row), operands, needs, given))
        ranks = range(len(operands) // width)
        moved: list[Any] = [None if grad is None else how.first(grad) for grad in given]
        blocks = [how.first(operands[rank * width]) for rank in ranks]

        def terms(places: list[Place]) -> list[Tensor]:
            made = []
            for rank, place in zip(ranks, places, strict=True):
                total: Any = None
                for layer in live:
                    gradient = place.of(moved[rank * layers + layer], n)
                    weight = operands[rank * width + 1 + 2 * layer]
                    flat = gradient.reshape(-1, gradient.shape[-1])
                    total = flat.mm(weight) if total is None else total.addmm_(flat, weight)
                made.append(total.view(place.blocks * place.rows, *blocks[rank].shape[1:]))
            return made

        if needs[0]:
            for rank, total in enumerate(leaving(how.axis, how.overlap, blocks[0].shape[0], terms)):
                found[rank * width] = total.movedim(0, how.dim)
        if any(needs[1 + 2 * layer] for layer in live):
            mains = {at: main for at, main in _mains(ctx, moved[live[0]].dtype).items() if at % width % 2}  # of weights
            found = [mains.get(to, gradient) for to, gradient in enumerate(found)]
            for places, at in arriving(how.axis, how.overlap, blocks):
                for rank, (place, x) in enumerate(zip(places, at, strict=True)):
                    for layer in (layer for layer in live if needs[1 + 2 * layer]):
                        to = rank * width + 1 + 2 * layer
                        found[to] = _add(found[to], place.of(moved[rank * layers + layer], n), x)
            found = [None if to in mains else gradient for to, gradient in enumerate(found)]
        for rank in ranks:
            for layer in (layer for layer in live if needs[2 + 2 * layer]):
                found[rank * width + 2 + 2 * layer] = moved[rank * layers + layer].flatten(0, -2).sum(0)
        return (None, *found)


def _plain_gathered(how: How, operands: list[Any]) -> list[Tensor]:
    """What ``_Gathered`` computes, by functions that are differentiable."""
    width = 1 + 2 * how.layers
    back = Step("reduce_scatter", Cut(0))
    wholes = joint_exchange(how.axis, GATHER, back, [how.first(x) for x in operands[::width]])
    return [
        F.linear(whole, operands[at], operands[at + 1]).movedim(0, how.dim)
        for rank, whole in enumerate(wholes)
        for at in range(rank * width + 1, (rank + 1) * width, 2)
    ]


class _Scattered(torch.autograd.Function):
    """A layer without a bias, and P → S of its result, cut. Of each rank in this process the input and the weight."""

    @staticmethod
    def forward(ctx: Any, how: How, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.how = how
        n = how.axis.size
        inputs, weights = [how.first(x) for x in operands[::2]], operands[1::2]

        def terms(places: list[Place]) -> list[Tensor]:
            pairs = zip(places, inputs, weights, strict=True)
            return [F.linear(place.of(x, n).flatten(0, 1), weight).contiguous() for place, x, weight in pairs]

        results = leaving(how.axis, how.overlap, inputs[0].shape[0] // n, terms)
        _kept(ctx, operands)
        return tuple(map(how.back, results))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        how: How = ctx.how
        operands, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        n, found = how.axis.size, [None] * len(operands)
        given, live = filled(grads, 1)
        if not live:
            return (None, *found)
        if torch.is_grad_enabled():
            return (None, *_differentiable(lambda row: _plain_scattered(how, row), operands, needs, given))
        inputs, weights = [how.first(x) for x in operands[::2]], operands[1::2]
        into = [x.new_empty(x.shape) if needs[0] else None for x in inputs]
        mains = _mains(ctx, given[0].dtype)  # pyright: ignore[reportOptionalMemberAccess] - as below
        totals = [mains.get(2 * rank + 1) for rank in range(len(inputs))]
        blocks = [how.first(grad) for grad in given]  # pyright: ignore[reportArgumentType]
        for places, at in arriving(how.axis, how.overlap, blocks):
            for rank, (place, gradient) in enumerate(zip(places, at, strict=True)):
                if (to := into[rank]) is not None:
                    _put(place.of(to, n), gradient, weights[rank].t())
                if needs[1]:
                    totals[rank] = _add(totals[rank], gradient, place.of(inputs[rank], n))
        totals = [None if 2 * rank + 1 in mains else total for rank, total in enumerate(totals)]
        of_inputs = (None if x is None else x.movedim(0, how.dim) for x in into)
        return (None, *(gradient for pair in zip(of_inputs, totals, strict=True) for gradient in pair))


def _plain_scattered(how: How, operands: list[Any]) -> list[Tensor]:
    """What ``_Scattered`` computes, by functions that are differentiable."""
    terms = [F.linear(how.first(x), weight) for x, weight in zip(operands[::2], operands[1::2], strict=True)]
    made = joint_exchange(how.axis, SCATTER, GATHER, terms)
    return [total.movedim(0, how.dim) for total in made]


class _Reduced(torch.autograd.Function):
    """A layer without a bias, and P → I of its result, cut. Of each rank in this process the input and the weight."""

    @staticmethod
    def forward(ctx: Any, how: How, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.how = how
        assert isinstance(how.overlap, int)
        inputs, weights = [x.reshape(-1, x.shape[-1]) for x in operands[::2]], operands[1::2]

        def terms(rows: slice) -> list[Tensor]:
            return [x[rows].mm(weight.t()) for x, weight in zip(inputs, weights, strict=True)]

        results = reducing(how.axis, how.overlap, inputs[0].shape[0], terms)()
        _kept(ctx, operands)
        return tuple(y.view(*operands[0].shape[:-1], -1) for y in results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        operands, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        found: list[Tensor | None] = [None] * len(operands)
        if torch.is_grad_enabled():
            return (None, *_differentiable(lambda row: _plain_reduced(ctx.how, row), operands, needs, grads))
        for rank, grad in enumerate(grads):  # nothing is sent: a rank needs no other
            if grad is not None and needs[0]:
                found[2 * rank] = grad @ operands[2 * rank + 1]
            if grad is not None and needs[1]:
                into = _mains(ctx, grad.dtype).get(2 * rank + 1)
                made = _add(into, grad, operands[2 * rank])
                found[2 * rank + 1] = made if into is None else None
        return (None, *found)


def _plain_reduced(how: How, operands: list[Any]) -> Sequence[Tensor]:
    """What ``_Reduced`` computes, by functions that are differentiable."""
    terms = [F.linear(x, weight) for x, weight in zip(operands[::2], operands[1::2], strict=True)]
    return joint_exchange(how.axis, ALL_REDUCE, NONE, terms)


class _Shared(torch.autograd.Function):
    """I → R of an input, and the layers that read it; the sum of the input's gradient is cut. As ``_Gathered``."""

    @staticmethod
    def forward(ctx: Any, how: How, *operands: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.how = how
        _kept(ctx, operands)
        width = 1 + 2 * how.layers
        return tuple(
            F.linear(operands[rank], operands[at], operands[at + 1])  # pyright: ignore[reportArgumentType]
            for rank in range(0, len(operands), width)
            for at in range(rank + 1, rank + width, 2)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        how: How = ctx.how
        assert isinstance(how.overlap, int)
        operands, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        layers, width = how.layers, 1 + 2 * how.layers
        given, live = filled(grads, layers)
        found: list[Any] = [None] * len(needs)
        if not live:
            return (None, *found)
        if torch.is_grad_enabled():
            return (None, *_differentiable(lambda row: _plain_shared(how, row), operands, needs, given))
        flat: list[Any] = [None if grad is None else grad.reshape(-1, grad.shape[-1]) for grad in given]
        ranks = range(len(operands) // width)
        inputs = [operands[rank * width].reshape(-1, operands[0].shape[-1]) for rank in ranks]

        def terms(rows: slice) -> list[Tensor]:
            made = []
            for rank in ranks:
                total: Any = None
                for layer in live:
                    gradient, weight = flat[rank * layers + layer][rows], operands[rank * width + 1 + 2 * layer]
                    total = gradient.mm(weight) if total is None else total.addmm_(gradient, weight)
                made.append(total)
            return made

        mains = _mains(ctx, flat[live[0]].dtype)
        summed = reducing(how.axis, how.overlap, inputs[0].shape[0], terms) if needs[0] else None
        for rank in ranks:
            for layer in live:
                gradient, to = flat[rank * layers + layer], rank * width + 1 + 2 * layer
                if needs[1 + 2 * layer]:
                    made = _add(mains.get(to), gradient, inputs[rank])
                    found[to] = None if to in mains else made
                if needs[2 + 2 * layer]:
                    found[to + 1] = gradient.sum(0)
        if summed is not None:
            for rank, total in enumerate(summed()):
                found[rank * width] = total.view(operands[0].shape)
        return (None, *found)


def _plain_shared(how: How, operands: list[Any]) -> list[Tensor]:
    """What ``_Shared`` computes, by functions that are differentiable."""
    width = 1 + 2 * how.layers
    shared = joint_exchange(how.axis, NONE, ALL_REDUCE, operands[::width])
    return [
        F.linear(whole, operands[at], operands[at + 1])
        for rank, whole in enumerate(shared)
        for at in range(rank * width + 1, (rank + 1) * width, 2)
    ]
