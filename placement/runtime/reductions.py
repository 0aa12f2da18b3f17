"""The sum of replicated parameters' gradients, made part of the emitted module.

A parameter used I → R has a gradient that is one term per rank. At each call of the program one autograd function,
the first of the call and so the last of its backward, takes all such parameters and gives a token. A second one for
each bucket of parameters takes the token and hands out aliases; where the first of them is used it is placed in the
order of the backward. Its backward receives what this backward contributed, once, as soon as the last contribution is
there. It flattens the contributions per dtype and starts their sum over the axis, one collective, behind the rest of
the backward. The first function waits for the sums and returns them. So gradients are final when ``backward`` returns,
``torch.autograd.grad`` sees the same, a gradient that has been summed is never summed again, and nothing hangs on
Parameter objects that ``.to()`` or a wrapper could swap.

Buckets are summed in the order in which they are listed, on every rank: one that is complete waits for those before it.

Under ``no_sync`` the contributions wait here instead and join the next backward outside. ``.grad`` gets
zeros meanwhile: it never holds numbers that are not summed, and a ``zero_grad`` in between shows. What
waits belongs to ``.grad``: ``torch.autograd.grad``, which leaves that alone, neither adds to it nor takes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from placement.runtime._torch import (
    accumulates,
    add_each,
    after_backward,
    applied,
    backward_pass,
    members_to,
    place_here,
    version,
)
from placement.runtime.axis import ALL_REDUCE, NONE, Axis, Pending, joint_exchange
from placement.runtime.main_grads import gradient, has_main_grads, main_grad, sink

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from placement.runtime.program import Program

# a parameter's name, its gradient, and whether that goes to a leaf's .grad
_Arriving = tuple[str, "Tensor | None", bool]
# (axis, id of the parameter) -> the parameter, its alias in the running call, and its bucket
Aliases = dict[tuple[str, int], tuple["Tensor", "Tensor", "Lent"]]
_Grads = list["Tensor | None"]


@dataclass(slots=True)
class _Waiting:
    """What one parameter's ``no_sync`` backwards contributed, and its gradient as the last of them left that."""

    total: Tensor
    grad: Tensor | None = None
    version: int = 0

    def zeroed(self, parameter: Tensor) -> bool:
        """Whether the user has zeroed the gradient since."""
        now = gradient(parameter)
        if now is None:
            return True
        touched = now is not self.grad or version(now) != self.version
        return touched and not bool(now.any())


class _Found(NamedTuple):
    """What the names of hooked parameters stood for in a call, and what follows from it.

    held: modules' members that lead there, to be the same again. owners, own: where modules hold parameters, and those.
    trains: whether they have gradients. names, used, keys: by bucket, the parameters to be summed, and by what their
    aliases are found.
    """

    held: list[tuple[dict[str, Any], str, nn.Module]]
    owners: list[tuple[dict[str, Any], str]]
    own: list[Tensor]
    trains: list[bool]
    names: tuple[tuple[str, ...], ...]
    keys: list[list[tuple[str, int]]]
    used: list[list[Tensor]]

    def again(self) -> bool:
        """Whether all of it still holds."""
        for members, name, module in self.held:
            if members.get(name) is not module:
                return False
        for (members, name), parameter, trains in zip(self.owners, self.own, self.trains, strict=True):
            if members.get(name) is not parameter or parameter.requires_grad is not trains:
                return False
        return True


class Reducer:
    """One rank's hooked parameters of one axis in their buckets, and what they have waiting."""

    def __init__(self, axis: Axis, buckets: Iterable[Iterable[str]], program: Program) -> None:
        self.axis = axis
        self.buckets = tuple(map(tuple, buckets))
        self.program = program
        self.lookup = program.tensor
        self.deferred = False
        self._found: _Found | None = None
        self._waiting: dict[str, _Waiting] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_found": None}  # a copy of the program has parameters of its own

    def open(self, aliases: Aliases) -> None:
        """Put an alias of each hooked parameter into ``aliases``, for one call of the program."""
        if self.axis.size == 1 or not torch.is_grad_enabled():
            return
        found = self._found
        if found is None or not found.again():
            found = self._find()
        if not found.names:
            return
        if len(self.axis.held) == 1:  # nobody to meet
            (lent,) = _lent([(self, found.names, found.used)])
        else:
            what = ("the sum of", *found.names)
            lent = self.axis.together(what, (self, found.names, found.used), _lent)
        for keys, parameters, bucket in zip(found.keys, found.used, lent, strict=True):
            for key, parameter, alias in zip(keys, parameters, bucket.aliases, strict=True):
                aliases[key] = parameter, alias, bucket

    def _find(self) -> _Found:
        """What the names stand for now; kept for the next call where only modules' own members were met."""
        held: dict[tuple[int, str], tuple[dict[str, Any], str, nn.Module]] = {}
        owners: list[tuple[dict[str, Any], str]] = []
        own: list[Tensor] = []
        known: set[int] = set()  # a tied parameter has several names
        found: list[dict[str, Tensor]] = []
        plain = True
        for names in self.buckets:
            bucket: dict[str, Tensor] = {}
            for name in names:
                path, _, attribute = name.rpartition(".")
                owner = members_to(self.program, path, held)
                parameter: Any = None if owner is None else owner.get(attribute)
                if owner is None or parameter is None:  # a module has its own names for members
                    plain, parameter = False, self.lookup(name)
                else:
                    owners.append((owner, attribute))
                    own.append(parameter)
                # A wrapper's DTensor is unwrapped later, in the module's own call, and summed there.
                if parameter.requires_grad and not isinstance(parameter, DTensor) and id(parameter) not in known:
                    known.add(id(parameter))
                    bucket[name] = parameter
            if bucket:
                found.append(bucket)
        axis = self.axis.name
        made = _Found(
            list(held.values()),
            owners,
            own,
            [parameter.requires_grad for parameter in own],
            tuple(map(tuple, found)),
            [[(axis, id(parameter)) for parameter in bucket.values()] for bucket in found],
            [list(bucket.values()) for bucket in found],
        )
        self._found = made if plain else None
        return made

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

    def _defer(self, name: str, grad: Tensor) -> Tensor | None:
        """Keep a contribution for later; returns what ``.grad`` gets meanwhile."""
        kept, main = self._waiting.get(name), main_grad(self.lookup(name))
        dtype = grad.dtype if main is None else main.dtype
        total = grad.detach().to(dtype, copy=True)
        self._waiting[name] = _Waiting(total if kept is None else total.add_(kept.total.to(total)))
        return None if main is not None else grad.new_zeros(()).expand(grad.shape)

    def _mark(self) -> None:
        """Note each gradient as a deferring backward left it."""
        for name, kept in self._waiting.items():
            kept.grad = gradient(self.lookup(name))
            kept.version = 0 if kept.grad is None else version(kept.grad)

    def _due(self, name: str, grad: Tensor | None) -> Tensor | None:
        """This backward's contribution with what has waited."""
        kept = self._waiting.pop(name, None)
        if kept is None:
            return grad
        parameter = self.lookup(name)
        total = kept.total.to(parameter) if main_grad(parameter) is None else kept.total
        return total if grad is None else grad + total

    def _drop_zeroed(self, names: Iterable[str]) -> None:
        for name in list(names):
            if name in self._waiting and self._waiting[name].zeroed(self.lookup(name)):
                del self._waiting[name]


class Lent:
    """One rank's aliases of the parameters of one bucket, in a call of the program."""

    __slots__ = ("aliases", "used")

    def __init__(self, aliases: Sequence[Tensor]) -> None:
        self.aliases = aliases
        self.used = False

    def use(self) -> None:
        """Note that the first of them is used here: what is used first has its sum started last.

        The engine runs what comes last in a forward first, so the bucket's function runs as soon as it can.
        """
        self.used = True
        place_here(self.aliases[0])


_Row = tuple[Reducer, tuple[tuple[str, ...], ...], list[list["Tensor"]]]


def _lent(rows: list[_Row]) -> list[list[Lent]]:
    """Aliases for the parameters of every rank in this process, by bucket."""
    names = rows[0][1]
    call = _Call(rows[0][0].axis, [reducer for reducer, _, _ in rows], names)
    token = applied(_Sums, call, *(p for _, _, buckets in rows for bucket in buckets for p in bucket))
    lent: list[list[Lent]] = [[] for _ in rows]
    for at, bucket in enumerate(names):
        flat: Any = applied(_Start, call, at, token, [p for _, _, buckets in rows for p in buckets[at]])
        for own, aliases in zip(lent, _rows(flat, len(bucket)), strict=True):
            own.append(Lent(aliases))
    return lent


def _rows(flat: Sequence[Any], width: int) -> list[Sequence[Any]]:
    if len(flat) == width:
        return [flat]
    return [flat[start : start + width] for start in range(0, len(flat), width)]


class _Sum(NamedTuple):
    """The sum of gradients of one dtype, by their place in the bucket: on its way, or done where autograd follows."""

    shapes: Sequence[torch.Size]
    places: Sequence[int]
    flats: Pending | Sequence[Tensor]


class _Started(NamedTuple):
    """What one backward contributed to one bucket. now: what parameters get at once, by rank."""

    bucket: int
    sums: list[_Sum]
    now: list[_Grads] | None


class _Running:
    """One backward: sums that have been started, and by bucket what has arrived and waits for its turn."""

    __slots__ = ("arrived", "started", "turn")

    def __init__(self) -> None:
        self.started: list[_Started] = []
        self.arrived: dict[int, list[Sequence[Tensor | None]]] = {}
        self.turn = 0


class _Call:
    """A call of the program, for all ranks in this process: what its backwards do. It holds no part of their graph."""

    def __init__(self, axis: Axis, reducers: list[Reducer], names: tuple[tuple[str, ...], ...]) -> None:
        self.axis, self.reducers, self.names = axis, reducers, names
        self.width = sum(map(len, names))
        self.mains = False  # whether parameters have a main_grad
        self._running: dict[int, _Running] = {}  # a graph may have several backwards, one after or inside the other

    def by_bucket(self, row: Sequence[Any]) -> list[Sequence[Any]]:
        """One rank's row of all parameters in pieces."""
        found: list[Sequence[Any]] = []
        start = 0
        for names in self.names:
            found.append(row[start : start + len(names)])
            start += len(names)
        return found

    @property
    def settles(self) -> bool:
        """Whether contributions wait, or are to."""
        return any(reducer.settles for reducer in self.reducers)

    def arrive(self, bucket: int, grads: Sequence[Tensor | None], sums: Any) -> None:
        """Take all that this backward contributes to a bucket, and start the sums whose turn it is."""
        task = backward_pass()
        running = self._running.get(task)
        if running is None:
            running = self._running[task] = _Running()
        running.arrived[bucket] = _rows(grads, len(self.names[bucket]))
        while running.turn in running.arrived:
            running.started.append(self._start(running.turn, running.arrived.pop(running.turn), sums))
            running.turn += 1

    def finished(self, sums: Any) -> Sequence[Tensor | None]:
        """Gradients of all ranks' parameters, when this backward has contributed all."""
        running = self._running.pop(backward_pass())
        started = running.started
        for bucket in range(running.turn, len(self.names)):
            rows = running.arrived.get(bucket)
            if rows is None and self.settles:  # what waits for it joins, though this backward reaches no part of it
                rows = [[None] * len(self.names[bucket]) for _ in self.reducers]
            if rows is not None:
                started.append(self._start(bucket, rows, sums))
        if len(self.names) == 1:
            return self._handed_on([grad for row in self._summed(started[0]) for grad in row], sums)
        found: list[list[_Grads]] = [[[None] * len(names) for names in self.names] for _ in self.reducers]
        for one in started:
            for own, row in zip(found, self._summed(one), strict=True):
                own[one.bucket] = row
        return self._handed_on([grad for own in found for row in own for grad in row], sums)

    def _handed_on(self, grads: _Grads, sums: Any) -> _Grads:
        """Those of ``grads`` that are for ``.grad``: what is for a ``main_grad`` is added there, as it was summed."""
        if not self.mains:
            return grads
        into: list[Tensor] = []
        added: list[Tensor] = []
        for at, (node, _) in enumerate(sums.next_functions):
            grad, main = grads[at], sink(node)
            if grad is not None and main is not None:
                into.append(main)
                added.append(grad)
                grads[at] = None
        if into:
            add_each(into, added)
        return grads

    def _start(self, bucket: int, rows: Sequence[Sequence[Tensor | None]], sums: Any) -> _Started:
        """Start the sums of the columns of ``rows``, one per rank: one flat tensor and one collective per dtype."""
        now: list[_Grads] | None = None
        if self.settles:
            into = _rows([accumulates(node) for node, _ in sums.next_functions], self.width)
            settled = [
                reducer.settle(zip(self.names[bucket], row, self.by_bucket(leaves)[bucket], strict=True))
                for reducer, row, leaves in zip(self.reducers, rows, into, strict=True)
            ]
            now, rows = [at_once for at_once, _ in settled], [due for _, due in settled]
        return _Started(bucket, [self._sent(*alike) for alike in _alike(rows)], now)

    def _sent(self, places: Sequence[int], rows: list[Sequence[Tensor]]) -> _Sum:
        shapes = [x.shape for x in rows[0]]
        flats = [torch.cat([x if x.ndim == 1 else x.reshape(-1) for x in row]) for row in rows]
        if torch.is_grad_enabled():
            return _Sum(shapes, places, joint_exchange(self.axis, ALL_REDUCE, NONE, flats))
        return _Sum(shapes, places, self.axis.start(ALL_REDUCE, flats, own=True))

    def _summed(self, one: _Started) -> list[_Grads]:
        """Each rank's gradients of a bucket, when they have been summed."""
        width = len(self.names[one.bucket])
        rows: list[_Grads] = one.now or []
        for shapes, places, flats in one.sums:
            if isinstance(flats, Pending):
                # What is for a main_grad stays in the dtype of the sum, and autograd casts the rest.
                flats = self.axis.finish(flats._replace(dtype=flats.received[0].dtype) if self.mains else flats)
            pieces = [_pieces(total, shapes) for total in flats]
            if not rows and len(places) == width:
                return pieces
            rows = rows or [[None] * width for _ in self.reducers]
            for row, own in zip(rows, pieces, strict=True):
                for at, piece in zip(places, own, strict=True):
                    row[at] = piece if row[at] is None else row[at]
        return rows or [[None] * width for _ in self.reducers]


class _Sums(torch.autograd.Function):
    """Parameters rank by rank, and of them a token for ``_Start``; backward waits for the sums."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *parameters: Tensor) -> Tensor:
        ctx.call = call
        call.mains = has_main_grads(parameters)
        return parameters[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # noqa: ARG004
        return None, *ctx.call.finished(ctx)


class _Start(torch.autograd.Function):
    """Aliases of a bucket's parameters, rank by rank; backward starts the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, bucket: int, token: Tensor, parameters: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.bucket, ctx.token = call, bucket, token.detach()
        # In a list they are no operands: their gradients leave through the token's function.
        return tuple([parameter.detach() for parameter in parameters])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.call.arrive(ctx.bucket, grads, ctx.next_functions[0][0])
        return None, None, ctx.token, None


def _alike(rows: Sequence[Sequence[Tensor | None]]) -> list[tuple[Sequence[int], list[Sequence[Tensor]]]]:
    """The columns of ``rows``, one per rank, that are summed in one tensor: those of one dtype, and their places.

    Ranks in one process may differ in what they got: one without a contribution adds zeros.
    """
    if len(rows) == 1:  # the usual case, at little cost
        row: Any = rows[0]
        kinds = {None if grad is None else grad.dtype for grad in row}
        if len(kinds) == 1 and None not in kinds and len({grad.device for grad in row}) == 1:
            return [(range(len(row)), [row])]
    groups: dict[tuple[torch.dtype, torch.device], dict[int, list[Tensor]]] = {}
    for index, column in enumerate(zip(*rows, strict=True)):
        like = next((grad for grad in column if grad is not None), None)
        if like is not None:
            full = [torch.zeros_like(like) if grad is None else grad for grad in column]
            groups.setdefault((like.dtype, like.device), {})[index] = full
    return [(list(group), list(map(list, zip(*group.values(), strict=True)))) for group in groups.values()]


def _pieces(total: Tensor, shapes: Sequence[torch.Size]) -> _Grads:
    """A flat sum in pieces of these shapes."""
    pieces = torch.split_with_sizes(total, [shape.numel() for shape in shapes])
    return [piece if len(shape) == 1 else piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
