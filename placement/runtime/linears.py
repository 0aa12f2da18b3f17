"""Linear layers that read one input, and the conversion of that input, as one function with one backward.

The input arrives in blocks and is gathered, or is the same on every rank. Its backward does what an expert writes by
hand: of a gathered input only the own block was kept, and it is gathered again while the gradient of the input is
computed, one sum over all layers; that gradient is summed over the ranks while the weights' gradients are computed.
The results are those of the conversion followed by each layer, to rounding. Blocks of tokens [batch, tokens, size] are
sent and received as [tokens, batch, size], see ``rows``.

Where somebody watches a layer (a hook, a wrapper) or has put another module in its place, the layers are called one by
one after the conversion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from placement.runtime._torch import applied, autocast_dtype, hooked
from placement.runtime.axis import ALL_REDUCE, NONE, Axis, Step, joint_exchange
from placement.runtime.exchange import cut_steps
from placement.runtime.main_grads import has_main_grads, sinks
from placement.runtime.module import Module
from placement.runtime.overlap import Overlap, cuts
from placement.runtime.pieces import gathered_in_pieces, shared_in_pieces
from placement.runtime.rows import TURNED, add_turned, as_sent, filled, from_turned, rows, turns, weight_gradient

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


def all_gather_linears(
    layers: Sequence[Layer],
    x: Tensor,
    axis: Axis,
    dim: int,
    outer: int = 1,
    segments: tuple[int, ...] = (),
    *,
    zigzag: bool = False,
    kept: bool = False,
    outermost: bool = False,
    overlap: Overlap = "async",
) -> tuple[Tensor, ...]:
    """S → R of ``x``, then each of ``layers``: modules, or weights [out, in], with biases or not.

    Results are contiguous, or have ``dim`` ``outermost`` in memory; ``dim`` is then 1 of 3. ``overlap``: what runs
    while blocks travel, see ``overlap``; in a ring or in chunks no gathered input is ``kept``.

    Dual: a reduce-scatter of the gradient that all layers together have for ``x``. Volume 1 + 1, and 1 more in the
    backward unless the gathered input is ``kept`` or no weight has a gradient.
    """
    pairs = None if axis.size == 1 else unwatched(layers)
    if pairs is None:
        steps = cut_steps("all_gather", "reduce_scatter", dim, outer, segments, zigzag)
        again = torch.compiler.is_compiling() and not kept
        return _one_by_one(layers, axis.exchange_again(*steps, x) if again else axis.exchange(*steps, x))
    if cuts(overlap):
        if outer != 1 or segments or zigzag or kept or dim in (-1, x.ndim - 1):
            where = f"outer {outer}, segments {segments}, zigzag {zigzag}, kept {kept}"
            raise ValueError(f"blocks along dim {dim} with {where}: in one piece")
        return gathered_in_pieces(pairs, x, axis, dim, overlap, outermost=outermost)
    turned = turns(x, dim, outer, segments) and not zigzag
    steps = TURNED if turned else cut_steps("all_gather", "reduce_scatter", dim, outer, segments, zigzag)
    return _run(pairs, x, axis, *steps, kept, turned, outermost, later=overlap != "none")


def replicated_linears(
    layers: Sequence[Layer], x: Tensor, axis: Axis, *, overlap: Overlap = "async"
) -> tuple[Tensor, ...]:
    """I → R of ``x``, then each of ``layers``: modules, or weights [out, in], with biases or not.

    Dual: an all-reduce of the gradient that all layers together have for ``x``. Volume 0 + 2.
    """
    pairs = None if axis.size == 1 else unwatched(layers)
    if pairs is None:
        return _one_by_one(layers, axis.exchange(NONE, ALL_REDUCE, x))
    if isinstance(overlap, int):
        return shared_in_pieces(pairs, x, axis, overlap)
    return _run(pairs, x, axis, NONE, ALL_REDUCE, later=overlap != "none")


class _How(NamedTuple):
    """What runs: the conversion of the input, and how many layers read it. ``kept``: its result is, not the input.

    turned: tokens are converted as [tokens, batch, size]. outermost: results lie so too. each: how many operands a
    layer has, 2 where some have a bias. later: whether something is done while communication runs.
    """

    axis: Axis
    forward: Step
    backward: Step
    kept: bool
    turned: bool
    outermost: bool
    layers: int
    each: int
    later: bool

    @property
    def width(self) -> int:
        """How many tensors a rank has: the input, and the operands of each layer."""
        return 1 + self.layers * self.each


def _one_by_one(layers: Sequence[Layer], x: Tensor) -> tuple[Tensor, ...]:
    return tuple(layer(x) if isinstance(layer, nn.Module) else F.linear(x, *operands(layer)) for layer in layers)


def _run(
    pairs: Sequence[Operands],
    x: Tensor,
    axis: Axis,
    forward: Step,
    backward: Step,
    kept: bool = True,
    turned: bool = False,
    outermost: bool = False,
    *,
    later: bool,
) -> tuple[Tensor, ...]:
    each = 1
    row: list[Tensor | None] = [x]
    for weight, bias in pairs:
        row.append(weight)
        each = each if bias is None else 2
    if each == 2:
        row[1:] = (tensor for pair in pairs for tensor in pair)
    if (dtype := autocast_dtype(x)) is not None:
        row = [None if tensor is None else tensor.to(dtype) for tensor in row]
    how = _How(axis, forward, backward, kept, turned, outermost, len(pairs), each, later)
    if len(axis.held) == 1:  # nobody to meet
        return applied(_Linears, how, *row)  # pyright: ignore[reportReturnType]

    def together(rows: list[list[Tensor | None]]) -> list[tuple[Tensor, ...]]:
        made: Any = applied(_Linears, how, *(tensor for one in rows for tensor in one))
        return [made[start : start + how.layers] for start in range(0, len(made), how.layers)]

    shapes = [None if tensor is None else tuple(tensor.shape) for tensor in row]
    return axis.together(("linears", forward, backward, x.dtype, *shapes), row, together)


def operands(layer: Layer) -> Operands:
    """The weight and the bias of a layer."""
    if isinstance(layer, Linear):
        return layer.operands()
    return layer if isinstance(layer, tuple) else (layer, None)  # pyright: ignore[reportReturnType] - no other module


def unwatched(layers: Sequence[Layer]) -> list[Operands] | None:
    """What layers multiply with; None where calling one does more than that.

    A graph of torch.compile is asked no such questions.
    """
    if torch.compiler.is_compiling():
        return None
    found: list[Operands] = []
    for layer in layers:
        if isinstance(layer, Linear):
            if type(layer).forward is not Linear.forward or "forward" in layer.__dict__ or hooked(layer):
                return None
            found.append(layer.operands())
        elif isinstance(layer, nn.Module):
            return None
        else:
            found.append(operands(layer))
    return found


class _Linears(torch.autograd.Function):
    """For all ranks in this process: of each its input, then its weights and biases; of each the results.

    Ranks in one process have the same operands with a gradient. Lists are flat: of all operands, of all results.
    """

    @staticmethod
    def forward(ctx: Any, how: _How, *operands: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.how = how
        axis, step, _, kept, turned, outermost, layers, each, _ = how
        width = 1 + each * layers
        inputs: Any = operands[::width]
        blocks = [x.transpose(0, 1) for x in inputs] if turned else inputs
        wholes = blocks if step is NONE else axis.move(step, blocks)
        needs = ctx.needs_input_grad
        # The input is for the weights' gradients, and the weights are for the input's.
        weighed, reaches = any(needs[2 : 1 + width : each]), needs[1]
        saved: list[Tensor | None] = []
        results: list[Tensor] = []
        for rank, whole in enumerate(wholes):
            saved.append(None if not weighed else whole if kept else inputs[rank])
            for at in range(rank * width + 1, (rank + 1) * width, each):
                weight: Any = operands[at]
                bias = None if each == 1 else operands[at + 1]
                if not turned:
                    results.append(F.linear(whole, weight, bias))
                elif outermost:
                    results.append(F.linear(whole, weight, bias).transpose(0, 1))
                else:
                    results.append(from_turned(whole, weight.t(), bias))
                saved.append(weight if reaches else None)
        ctx.save_for_backward(*saved)
        ctx.places = None
        if weighed and has_main_grads(operands[1:width:each]):  # ranks in one process are alike
            ctx.places = [at for at, tensor in enumerate(operands) if tensor is not None]
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
                grads, live = filled(grads, layers)
                break
        if not live:
            return (None, *found)
        flat = [None if grad is None else as_sent(grad) if how.turned else rows(grad) for grad in grads]
        follows = torch.is_grad_enabled()
        wholes: Any = None
        arriving = leaving = None
        if any(needs[1 + how.each * layer] for layer in live):
            wholes = saved[:: 1 + layers]
            if how.turned and not how.kept:
                wholes = [x.transpose(0, 1) for x in wholes]
            if follows and not how.kept:
                wholes = joint_exchange(axis, how.forward, how.backward, wholes)
            elif not how.kept:
                arriving = axis.start(how.forward, wholes, later=how.later)
        inputs: Sequence[Tensor] = ()
        if needs[0]:
            if follows:
                inputs = joint_exchange(axis, how.backward, how.forward, _terms(how, grads, flat, saved, live))
            else:
                leaving = axis.start(how.backward, _terms(how, grads, flat, saved, live), own=True, later=how.later)
        if arriving is not None:
            wholes = axis.finish(arriving)
        mains: dict[int, Tensor] = {}
        if ctx.places is not None:
            mains = sinks(ctx.next_functions, ctx.places, grads[live[0]].dtype)  # pyright: ignore[reportOptionalMemberAccess] - it is live
        _of_operands(how, found, grads, flat, wholes, needs, live, mains)
        if leaving is not None:
            inputs = axis.finish(leaving)
        for rank, gradient in enumerate(inputs):
            found[rank * how.width] = gradient.transpose(0, 1) if how.turned else gradient
        return (None, *found)


def _terms(
    how: _How, grads: Sequence[Any], flat: Sequence[Any], saved: Sequence[Any], live: Sequence[int]
) -> list[Tensor]:
    """Each rank's term of its input's gradient, as it is sent: one sum over the layers."""
    layers = how.layers
    like = grads[live[0]].shape[:-1]
    like = (like[1], like[0]) if how.turned else like
    terms: list[Tensor] = []
    for rank in range(len(grads) // layers):
        total: Any = None
        for layer in live:
            at, weight = rank * layers + layer, saved[rank * (1 + layers) + 1 + layer]
            if flat[at] is None:
                total = add_turned(total, grads[at], weight)
            elif total is None:
                total = flat[at].mm(weight)
            elif torch.is_grad_enabled():  # somebody asks for a second derivative
                total = torch.addmm(total, flat[at], weight)
            else:
                total.addmm_(flat[at], weight)
        terms.append(total.view(*like, total.shape[1]))
    return terms


def _of_operands(
    how: _How,
    found: list[Tensor | None],
    grads: Sequence[Any],
    flat: Sequence[Any],
    wholes: Sequence[Tensor] | None,
    needs: Sequence[bool],
    live: Sequence[int],
    mains: Mapping[int, Tensor],
) -> None:
    """Put each rank's gradients of weights and biases into ``found``, or add a weight's to what ``mains`` has there."""
    layers = how.layers
    for rank in range(len(grads) // layers):
        whole = None if wholes is None else rows(wholes[rank])
        for layer in live:
            gradient, at = rank * layers + layer, rank * how.width + 1 + how.each * layer
            lies = flat[gradient]
            if whole is not None and needs[at]:
                into = mains.get(at)
                if lies is None:
                    made = weight_gradient(grads[gradient], wholes[rank].transpose(0, 1), into)  # pyright: ignore[reportOptionalSubscript] - as above
                else:
                    made = lies.t().mm(whole) if into is None else into.addmm_(lies.t(), whole)
                found[at] = made if into is None else None
            if how.each == 2 and needs[at + 1]:
                found[at + 1] = grads[gradient].sum((0, 1)) if lies is None else lies.sum(0)
