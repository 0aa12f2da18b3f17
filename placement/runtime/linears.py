"""Linear layers that read one input, and the conversion of that input, as one function with one backward.

The input arrives in blocks and is gathered, or is the same on every rank. Its backward does what an expert writes by
hand: of a gathered input only the own block was kept, and it is gathered again while the gradient of the input is
computed, one sum over all layers; that gradient is summed over the ranks while the weights' gradients are computed.
The results are those of the conversion followed by each layer, to rounding.

Where somebody watches a layer (a hook, a wrapper) or has put another module in its place, the layers are called one by
one after the conversion.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from placement.runtime._torch import autocast_dtype, eager, hooked
from placement.runtime.axis import ALL_REDUCE, NONE, Axis, Step, joint_exchange
from placement.runtime.exchange import cut_steps
from placement.runtime.module import Module

if TYPE_CHECKING:
    from collections.abc import Sequence

Operands = tuple[Tensor, Tensor | None]
Layer = nn.Module | Tensor | Operands


class Linear(Module):
    """A linear layer. What it multiplies with is what an emitted class says in ``operands``."""

    def operands(self) -> Operands:
        """The weight [out, in] and the bias [out] or None, as they are used on this rank."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """The plain form: [..., in] -> [..., out]."""
        return F.linear(input, *self.operands())


@eager
def all_gather_linears(
    layers: Sequence[Layer],
    x: Tensor,
    axis: Axis,
    dim: int,
    outer: int = 1,
    segments: tuple[int, ...] = (),
    *,
    kept: bool = False,
) -> tuple[Tensor, ...]:
    """S → R of ``x``, then each of ``layers``: modules, or weights [out, in], with biases or not.

    Dual: a reduce-scatter of the gradient that all layers together have for ``x``. Volume 1 + 1, and 1 more in the
    backward unless the gathered input is ``kept`` or no weight has a gradient.
    """
    return _run(layers, x, axis, *cut_steps("all_gather", "reduce_scatter", dim, outer, segments), kept=kept)


@eager
def replicated_linears(layers: Sequence[Layer], x: Tensor, axis: Axis) -> tuple[Tensor, ...]:
    """I → R of ``x``, then each of ``layers``: modules, or weights [out, in], with biases or not.

    Dual: an all-reduce of the gradient that all layers together have for ``x``. Volume 0 + 2.
    """
    return _run(layers, x, axis, NONE, ALL_REDUCE, kept=True)


class _How(NamedTuple):
    """What runs: the conversion of the input, and how many layers read it. ``kept``: its result is, not the input."""

    axis: Axis
    forward: Step
    backward: Step
    kept: bool
    layers: int


def _run(
    layers: Sequence[Layer], x: Tensor, axis: Axis, forward: Step, backward: Step, *, kept: bool
) -> tuple[Tensor, ...]:
    if axis.size == 1 or _any_watched(layers):
        x = axis.exchange(forward, backward, x)
        return tuple(layer(x) if isinstance(layer, nn.Module) else F.linear(x, *_operands(layer)) for layer in layers)
    row: list[Tensor | None] = [x]
    for layer in layers:
        row += _operands(layer)
    if (dtype := autocast_dtype(x)) is not None:
        row = [None if tensor is None else tensor.to(dtype) for tensor in row]
    how = _How(axis, forward, backward, kept, len(layers))
    if len(axis.held) == 1:  # nobody to meet
        return _Linears.apply(how, *row)  # pyright: ignore[reportReturnType]

    def together(rows: list[list[Tensor | None]]) -> list[tuple[Tensor, ...]]:
        made: Any = _Linears.apply(how, *(tensor for one in rows for tensor in one))
        return [made[start : start + how.layers] for start in range(0, len(made), how.layers)]

    shapes = [None if tensor is None else tuple(tensor.shape) for tensor in row]
    return axis.together(("linears", forward, backward, x.dtype, *shapes), row, together)


def _operands(layer: Layer) -> Operands:
    if isinstance(layer, Tensor):
        return layer, None
    return layer if isinstance(layer, tuple) else layer.operands()  # pyright: ignore[reportCallIssue]


def _any_watched(layers: Sequence[Layer]) -> bool:
    """Whether calling some layer does more than its product."""
    for layer in layers:
        if isinstance(layer, Tensor | tuple):
            continue
        if (
            not isinstance(layer, Linear)
            or hooked(layer)
            or getattr(layer.forward, "__func__", None) is not Linear.forward
        ):
            return True
    return False


class _Linears(torch.autograd.Function):
    """For all ranks in this process: of each its input, then its weights and biases; of each the results.

    Ranks in one process have the same operands with a gradient. Lists are flat: of all operands, of all results.
    """

    @staticmethod
    def forward(ctx: Any, how: _How, *operands: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.how = how
        width = 1 + 2 * how.layers
        inputs: Any = operands[::width]
        wholes = how.axis.move(how.forward, inputs)
        needs = ctx.needs_input_grad[1:]
        # The input is for the weights' gradients, and the weights are for the input's.
        weighed, reaches = any(needs[1:width:2]), needs[0]
        saved: list[Tensor | None] = []
        results: list[Tensor] = []
        for rank, whole in enumerate(wholes):
            saved.append(None if not weighed else whole if how.kept else inputs[rank])
            for at in range(rank * width + 1, (rank + 1) * width, 2):
                weight: Any = operands[at]
                results.append(F.linear(whole, weight, operands[at + 1]))
                saved.append(weight if reaches else None)
        ctx.save_for_backward(*saved)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Communication behind arithmetic that does not need it; where autograd follows, functions of its own."""
        how: _How = ctx.how
        axis, layers, saved = how.axis, how.layers, ctx.saved_tensors
        needs: tuple[bool, ...] = ctx.needs_input_grad[1:]
        found: list[Tensor | None] = [None] * len(needs)
        live = range(layers)
        for grad in grads:  # not ``in``, which compares: a tensor is slow to say that it is not None
            if grad is None:
                grads, live = _filled(grads, layers)
                break
        if not live:
            return (None, *found)
        flat = [None if grad is None else _rows(grad) for grad in grads]
        follows = torch.is_grad_enabled()
        wholes: Any = None
        arriving = leaving = None
        if any(needs[1 + 2 * layer] for layer in live):
            wholes = saved[:: 1 + layers]
            if follows and not how.kept:
                wholes = joint_exchange(axis, how.forward, how.backward, wholes)
            elif not how.kept:
                arriving = axis.start(how.forward, wholes)
        inputs: Sequence[Tensor] = ()
        if needs[0]:
            shape = grads[live[0]].shape[:-1]  # pyright: ignore[reportOptionalMemberAccess] - it is live
            terms = _of_inputs(flat, saved, layers, live, shape, follows=follows)
            if follows:
                inputs = joint_exchange(axis, how.backward, how.forward, terms)
            else:
                leaving = axis.start(how.backward, terms, own=True)
        if arriving is not None:
            wholes = axis.finish(arriving)
        _of_operands(found, flat, wholes, needs, layers, live)
        if leaving is not None:
            inputs = axis.finish(leaving)
        for rank, gradient in enumerate(inputs):
            found[rank * (1 + 2 * layers)] = gradient
        return (None, *found)


def _filled(grads: Sequence[Tensor | None], layers: int) -> tuple[tuple[Tensor | None, ...], list[int]]:
    """``grads`` with zeros where a rank lacks what another one has, and the layers that have any."""
    filled, live = list(grads), []
    for layer in range(layers):
        like = next((grad for grad in grads[layer::layers] if grad is not None), None)
        if like is None:
            continue
        live.append(layer)
        filled[layer::layers] = [torch.zeros_like(like) if grad is None else grad for grad in grads[layer::layers]]
    return tuple(filled), live


def _of_inputs(
    flat: Sequence[Any], saved: Sequence[Any], layers: int, live: Sequence[int], shape: Sequence[int], *, follows: bool
) -> list[Tensor]:
    """Each rank's term of its input's gradient: one sum over the layers."""
    terms: list[Tensor] = []
    for rank in range(len(flat) // layers):
        total: Any = None
        for layer in live:
            gradient, weight = flat[rank * layers + layer], saved[rank * (1 + layers) + 1 + layer]
            if total is None:
                total = gradient.mm(weight)
            elif follows:
                total = torch.addmm(total, gradient, weight)
            else:
                total.addmm_(gradient, weight)
        terms.append(total.view(*shape, total.shape[1]))
    return terms


def _of_operands(
    found: list[Tensor | None],
    flat: Sequence[Any],
    wholes: Sequence[Tensor] | None,
    needs: Sequence[bool],
    layers: int,
    live: Sequence[int],
) -> None:
    """Put each rank's gradients of weights and biases into ``found``."""
    for rank in range(len(flat) // layers):
        rows = None if wholes is None else _rows(wholes[rank])
        for layer in live:
            gradient, at = flat[rank * layers + layer], rank * (1 + 2 * layers) + 1 + 2 * layer
            if rows is not None and needs[at]:
                found[at] = gradient.t().mm(rows)
            if needs[at + 1]:
                found[at + 1] = gradient.sum(0)


def _rows(x: Tensor) -> Tensor:
    """[..., size] as [rows, size]."""
    if x.ndim == 2:
        return x
    size = x.shape[-1]
    return x.reshape(-1, size) if size else x.reshape(prod(x.shape[:-1]), 0)
