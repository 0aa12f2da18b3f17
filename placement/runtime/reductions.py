"""The sum of replicated parameters' gradients, made part of the emitted module.

A parameter used I → R has a gradient that is one term per rank. At each call of the program one
autograd function takes all such parameters and hands out aliases; its backward therefore receives
exactly what this backward contributed, once, after every use of every parameter. It flattens the
contributions per dtype, sums each flat tensor over the axis in one collective, and returns the sums. So
gradients are final when ``backward`` returns, ``torch.autograd.grad`` sees the same, a gradient that
has been summed is never summed again, and nothing hangs on Parameter objects that ``.to()`` or a
wrapper could swap.

Under ``no_sync`` the contributions wait here instead and join the next backward outside. ``.grad`` gets
zeros meanwhile: it never holds numbers that are not summed, and a ``zero_grad`` in between shows. What
waits belongs to ``.grad``: ``torch.autograd.grad``, which leaves that alone, neither adds to it nor takes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from placement.runtime._torch import accumulates, after_backward, parameter_at, version
from placement.runtime.axis import ALL_REDUCE, NONE, Axis, joint_exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

# a parameter's name, its gradient, and whether that goes to a leaf's .grad
_Arriving = tuple[str, "Tensor | None", bool]
# (axis, id of the parameter) -> the parameter and its alias in the running call
Aliases = dict[tuple[str, int], tuple["Tensor", "Tensor"]]


@dataclass(slots=True)
class _Waiting:
    """What one parameter's ``no_sync`` backwards contributed, and ``.grad`` as the last of them left it."""

    total: Tensor
    grad: Tensor | None = None
    version: int = 0

    def zeroed(self, parameter: Tensor) -> bool:
        """Whether the user has zeroed the gradient since."""
        now = parameter.grad
        if now is None:
            return True
        touched = now is not self.grad or version(now) != self.version
        return touched and not bool(now.any())


class Reducer:
    """One rank's hooked parameters of one axis, and what they have waiting."""

    def __init__(self, axis: Axis, names: Iterable[str], lookup: Callable[[str], Tensor]) -> None:
        self.axis = axis
        self.names = tuple(names)
        self.lookup = lookup
        self.deferred = False
        self._waiting: dict[str, _Waiting] = {}
        self._paths = [(name, *name.split(".")) for name in self.names]

    def open(self, aliases: Aliases) -> None:
        """Put an alias of each hooked parameter into ``aliases``, for one call of the program."""
        if self.axis.size == 1 or not torch.is_grad_enabled():
            return
        parameters: dict[str, Tensor] = {}
        members: dict[str, Any] = {}
        for name, first, *rest in self._paths:
            if first not in members:
                members[first] = self.lookup(first)
            parameter = parameter_at(members[first], rest) if rest else members[first]
            if parameter is None:
                parameter = self.lookup(name)
            # A wrapper's DTensor is unwrapped later, in the module's own call, and summed there.
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameters[name] = parameter
        if not parameters:
            return
        row = (self, tuple(parameters), tuple(parameters.values()))
        made = self.axis.together(("the sum of", *parameters), row, _joint_aliases)
        axis = self.axis.name
        for parameter, alias in zip(row[2], made, strict=True):
            aliases[axis, id(parameter)] = (parameter, alias)

    @property
    def settles(self) -> bool:
        """Whether contributions wait, or are to."""
        return self.deferred or bool(self._waiting)

    def waiting(self) -> list[str]:
        """Names of parameters whose gradients lack what ``no_sync`` backwards contributed."""
        self._drop_zeroed(self._waiting)
        return list(self._waiting)

    def settle(self, grads: Iterable[_Arriving]) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Of what one backward contributed: what parameters get at once, and what is to be summed for them."""
        now: list[Tensor | None] = []
        due: list[Tensor | None] = []
        for name, grad, leaf in grads:
            if leaf:
                self._drop_zeroed([name])
            waits = leaf and self.deferred
            now.append(self._defer(name, grad) if waits and grad is not None else None)
            due.append(None if waits else self._due(name, grad) if leaf else grad)
        if self.deferred:
            after_backward(self._mark)
        return now, due

    def _defer(self, name: str, grad: Tensor) -> Tensor:
        """Keep a contribution for later; returns what ``.grad`` gets meanwhile."""
        kept = self._waiting.get(name)
        total = grad.detach().clone() if kept is None else kept.total.to(grad) + grad.detach()
        self._waiting[name] = _Waiting(total)
        return grad.new_zeros(()).expand(grad.shape)

    def _mark(self) -> None:
        """Note each ``.grad`` as a deferring backward left it."""
        for name, kept in self._waiting.items():
            kept.grad = self.lookup(name).grad
            kept.version = 0 if kept.grad is None else version(kept.grad)

    def _due(self, name: str, grad: Tensor | None) -> Tensor | None:
        """This backward's contribution with what has waited."""
        kept = self._waiting.pop(name, None)
        if kept is None:
            return grad
        return kept.total.to(self.lookup(name)) if grad is None else grad + kept.total.to(grad)

    def _drop_zeroed(self, names: Iterable[str]) -> None:
        for name in list(names):
            if name in self._waiting and self._waiting[name].zeroed(self.lookup(name)):
                del self._waiting[name]


_Row = tuple[Reducer, tuple[str, ...], tuple["Tensor", ...]]


def _joint_aliases(rows: list[_Row]) -> list[tuple[Tensor, ...]]:
    """Aliases for the parameters of every rank in this process, from one autograd function."""
    names = rows[0][1]
    flat = _Sum.apply([reducer for reducer, _, _ in rows], names, *(p for _, _, ps in rows for p in ps))
    return _rows(flat, len(names))  # pyright: ignore[reportArgumentType]


def _rows(flat: Sequence[Any], width: int) -> list[tuple[Any, ...]]:
    return [tuple(flat[start : start + width]) for start in range(0, len(flat), width)]


class _Sum(torch.autograd.Function):
    """Identity forward; backward sums the gradients over the axis. Parameters rank by rank."""

    @staticmethod
    def forward(ctx: Any, reducers: list[Reducer], names: tuple[str, ...], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.reducers, ctx.names = reducers, names
        return parameters  # of inputs that are returned torch makes aliases

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        reducers: list[Reducer] = ctx.reducers
        width = len(ctx.names)
        if not any(reducer.settles for reducer in reducers):
            sums = _summed(reducers[0].axis, _rows(grads, width))
            return (None, None, *(total for row in sums for total in row))
        leaves = _rows([accumulates(node) for node, _ in ctx.next_functions], width)
        settled = [
            reducer.settle(zip(ctx.names, row, into, strict=True))
            for reducer, row, into in zip(reducers, _rows(grads, width), leaves, strict=True)
        ]
        sums = _summed(reducers[0].axis, [due for _, due in settled])
        pairs = [pair for (now, _), row in zip(settled, sums, strict=True) for pair in zip(now, row, strict=True)]
        return (None, None, *(total if now is None else now for now, total in pairs))


def _summed(axis: Axis, rows: Sequence[Sequence[Tensor | None]]) -> list[list[Tensor | None]]:
    """Sum the columns of ``rows`` over the axis: one flat tensor and one collective per dtype."""
    # Simulated ranks may differ in what they got; a rank without a contribution adds zeros.
    groups: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}
    for index in range(len(rows[0])):
        for row in rows:
            if (grad := row[index]) is not None:
                groups.setdefault((grad.dtype, grad.device), {})[index] = grad
                break
    sums: list[list[Tensor | None]] = [[None] * len(row) for row in rows]
    follows = torch.is_grad_enabled()
    for like in groups.values():
        flats = [torch.cat([_flat(row[index], grad) for index, grad in like.items()]) for row in rows]
        summing = joint_exchange(axis, ALL_REDUCE, NONE, flats) if follows else axis.move(ALL_REDUCE, flats, own=True)
        sizes = [grad.numel() for grad in like.values()]
        for total, into in zip(summing, sums, strict=True):
            for (index, grad), piece in zip(like.items(), total.split(sizes), strict=True):
                into[index] = piece if grad.ndim == 1 else piece.view(grad.shape)
    return sums


def _flat(grad: Tensor | None, like: Tensor) -> Tensor:
    if grad is None:
        return torch.zeros_like(like).view(-1)
    return grad if grad.ndim == 1 else grad.reshape(-1)
