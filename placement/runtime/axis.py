"""One mesh axis, and the actions that its ranks can do together.

An axis moves tensors between ranks. What it moves them between is its subclass: processes of a
``DeviceMesh`` here, threads of one process in ``simulate``. The geometry of every action (which
block goes where) is written once, in ``Axis.move``; a subclass only transports contiguous buffers.

Two ways to use an axis. ``run`` is an action without autograd. ``exchange`` is differentiable: an
action and the one that its backward does. Code with a backward of its own uses ``together``, which
hands one function the payloads of all ranks held by this process: there, one autograd function takes the
tensors of all of them, and uses ``move`` both ways.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from placement.runtime import trace
from placement.runtime._torch import Group, TracedGroup, Waited, applied, flattened
from placement.runtime.cuts import Cut, block, blocks, check_dim, in_rows, joined, of_rows, padded, places
from placement.runtime.errors import MeshError, SizeError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
U = TypeVar("U")

COMMUNICATING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
LOCAL = ("none", "split", "keep", "pad")
_CUTTING = ("all_gather", "reduce_scatter", "all_to_all", "split", "pad")


@dataclass(frozen=True, slots=True)
class Step:
    """An action with its geometry. ``cut`` is the shard's; an all-to-all goes from ``cut`` ``to`` another.

    ``outer`` sizes are those of the full value, also where an all-to-all goes between two factors of one dim.
    ``op`` is what an all-reduce does with the ranks' values: ``max`` has no dual, it is for ``run`` only. A send_recv
    gives each rank what the rank before it had.
    """

    kind: str
    cut: Cut | None = None
    to: Cut | None = None
    op: Literal["sum", "max"] = "sum"

    def __post_init__(self) -> None:
        if self.kind not in COMMUNICATING + LOCAL:
            raise ValueError(f"no action {self.kind!r}")
        if (self.cut is not None) != (self.kind in _CUTTING) or (self.to is not None) != (self.kind == "all_to_all"):
            raise ValueError(f"{self.kind} with cut {self.cut} to {self.to}")
        if self.op != "sum" and self.kind != "all_reduce":
            raise ValueError(f"{self.kind} of a {self.op}")

    @property
    def where(self) -> Cut:
        """``cut``, of a step that has one."""
        if self.cut is None:
            raise ValueError(f"{self.kind} has no cut")
        return self.cut


NONE = Step("none")
ALL_REDUCE = Step("all_reduce")
MAXIMUM = Step("all_reduce", op="max")
KEEP = Step("keep")
SEND_RECV = Step("send_recv")


class Pending(NamedTuple):
    """A step that has been started. ``sent`` is held until it is finished: the transport reads it."""

    step: Step
    sent: Sequence[Tensor]
    received: Sequence[Tensor]
    work: Waited | None
    dtype: torch.dtype


class Axis(ABC):
    """The ranks of one mesh axis, seen from one of them.

    ``held`` lists the ranks whose tensors ``move`` takes: the own one on a mesh, all when simulated.
    ``recorded``: whether ``record`` lists what the group does; of simulated groups those that rank 0 is in.
    ``reduce_dtype`` is the dtype in which floating-point tensors are summed (None: their own).
    """

    def __init__(
        self, name: str, size: int, rank: int, device: torch.device, reduce_dtype: torch.dtype | None = None
    ) -> None:
        self.name = name
        self.size = size
        self.rank = rank
        self.device = device
        self.reduce_dtype = reduce_dtype
        self.held: Sequence[int] = (rank,)
        self.recorded = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, rank {self.rank} of {self.size})"

    def summing(self, dtype: torch.dtype) -> Axis:
        """This axis with sums done in ``dtype``."""
        other = copy.copy(self)
        other.reduce_dtype = dtype
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self  # an axis is a place, not a value: copies of a module live on the same one

    def run(self, step: Step, x: Tensor, *, own: bool = False) -> Tensor:
        """Do ``step`` with this rank's ``x``; no autograd. ``x`` is not written, unless it is the caller's ``own``.

        Raises:
            SizeError: the axis does not divide the dim that is cut.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._run(step, x, own=own)
        return self._run(step, x, own=own)

    def _run(self, step: Step, x: Tensor, *, own: bool) -> Tensor:
        if step.kind in LOCAL:
            return _local(step, x, self.size, self.rank, self.name)
        if len(self.held) == 1:  # nobody to meet
            return self.move(step, (x,), own=own)[0]
        return self.together((step, *_signature(x)), x, lambda xs: self.move(step, xs, own=own))

    def exchange(self, forward: Step, backward: Step, x: Tensor) -> Tensor:
        """Do ``forward`` with this rank's ``x``; its gradient comes back through ``backward``."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return self.run(forward, x)
        if len(self.held) == 1:
            return joint_exchange(self, forward, backward, (x,))[0]
        key = (forward, backward, *_signature(x))
        return self.together(key, x, lambda xs: joint_exchange(self, forward, backward, xs))

    def exchange_again(self, forward: Step, backward: Step, x: Tensor) -> Tensor:
        """``exchange`` in a graph of torch.compile, whose result is not kept but made again in the backward."""
        return checkpoint(self.exchange, forward, backward, x, use_reentrant=False)  # pyright: ignore[reportReturnType]

    @abstractmethod
    def together(self, what: Hashable, payload: T, action: Callable[[list[T]], Sequence[U]]) -> U:
        """Call ``action`` once with the payloads of the ranks in this process; returns this rank's result.

        ``what`` must be equal on all ranks. It names the meeting in errors.
        """

    @abstractmethod
    def _transport(
        self, step: Step, sent: Sequence[Tensor], *, own: bool, later: bool
    ) -> tuple[Sequence[Tensor], Waited | None]:
        """Move one contiguous buffer per held rank; results are fresh and contiguous.

        all_reduce: the sum or the maximum. all_gather: all buffers, one after the other along dim 0. reduce_scatter:
        of n blocks that lie so, the sum of the own one. all_to_all: from [n, *block], the own block of every rank,
        stacked. send_recv: the buffer of the rank before, the last one's for the first. The results are whole when the
        work returned has been waited for; without one, at once. ``own``: the buffers may be written.
        """

    def move(self, step: Step, xs: Sequence[Tensor], *, own: bool = False) -> Sequence[Tensor]:
        """``run`` for one tensor per rank in ``held``, of all ranks in this process at once."""
        return self.finish(self.start(step, xs, own=own, later=False))

    def start(self, step: Step, xs: Sequence[Tensor], *, own: bool = False, later: bool = True) -> Pending:
        """``move`` in the background: what is returned is for ``finish``, once.

        With ``own`` the tensors are this call's: they may be written.
        """
        dtype = xs[0].dtype
        if step.kind == "none" or self.size == 1:
            return Pending(NONE, (), xs, None, dtype)
        if step.kind in LOCAL:
            moved = [_local(step, x, self.size, rank, self.name) for rank, x in zip(self.held, xs, strict=True)]
            return Pending(NONE, (), moved, None, dtype)
        wire = dtype if self.reduce_dtype is None else self.wire(step, dtype)
        sent: list[Tensor] = []
        for rank, x in zip(self.held, xs, strict=True):
            converted = x if wire is dtype else x.to(wire)
            if step.cut is not None:
                converted = _packed(step, converted, self, rank)
            sent.append(_dense(converted))
        if trace.watched() and self.recorded and not torch.compiler.is_compiling():
            parts = self.size if step.kind in ("all_gather", "all_to_all", "send_recv") else 1
            trace.note(step.kind, self.name, parts * sent[0].numel() * sent[0].element_size())
        # What had to be copied to be sent is nobody else's.
        received, work = self._transport(step, sent, own=own or sent[0] is not xs[0], later=later)
        return Pending(step, sent, received, work, dtype)

    def finish(self, pending: Pending) -> Sequence[Tensor]:
        """The results of what was started."""
        step, _, received, work, dtype = pending
        if work is not None:
            work.wait()
        if torch.compiler.is_compiling() and step.kind != "none":
            received = [TracedGroup.arrived(y) for y in received]
        if step.cut is not None and step.kind != "reduce_scatter":
            received = [_unpacked(step, y, self.size, rank) for rank, y in zip(self.held, received, strict=True)]
        return received if received[0].dtype is dtype else [y.to(dtype) for y in received]

    def wire(self, step: Step, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor of ``dtype`` is sent."""
        if self.reduce_dtype is None or not dtype.is_floating_point or step.op != "sum":
            return dtype
        return self.reduce_dtype if step.kind in ("all_reduce", "reduce_scatter") else dtype


class MeshAxis(Axis):
    """An axis of a ``DeviceMesh``, or several of them as one: the other ranks are other processes.

    The ranks of several axes count in mesh order, the last axis fastest.
    """

    def __init__(
        self, mesh: DeviceMesh, name: str, reduce_dtype: torch.dtype | None = None, axes: tuple[str, ...] = ()
    ) -> None:
        names = mesh.mesh_dim_names
        if names is None and mesh.ndim == 1:
            names = (name,)
        for one in axes or (name,):
            if names is None or one not in names:
                known = ", ".join(names) if names else "unnamed"
                raise MeshError(f"the mesh has no axis {one!r}: its axes are {known}")
        device = torch.device(mesh.device_type)
        if device.type != "cpu":
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self.whole = mesh
        self.mesh = flattened(mesh, axes) if axes else mesh if mesh.ndim == 1 else mesh[name]
        self.group = self.mesh.get_group()
        self._group, self._traced = Group(self.group), TracedGroup(self.group)
        super().__init__(name, self.mesh.size(), self.mesh.get_local_rank(), device, reduce_dtype)

    def together(self, what: Hashable, payload: T, action: Callable[[list[T]], Sequence[U]]) -> U:  # noqa: ARG002, D102
        return action([payload])[0]

    def move(self, step: Step, xs: Sequence[Tensor], *, own: bool = False) -> Sequence[Tensor]:
        """As ``Axis.move``; what is sent and received as it lies, and nobody watches, in few calls."""
        x = xs[0]
        if (
            torch.compiler.is_compiling()
            or self.reduce_dtype is not None
            or not _as_it_lies(step, x, self.size)
            or not x.is_contiguous()
            or x.is_neg()
            or x.is_complex()
            or trace.watched()
        ):
            return super().move(step, xs, own=own)
        return self._transport(step, xs, own=own, later=False)[0]

    def _transport(
        self, step: Step, sent: Sequence[Tensor], *, own: bool, later: bool
    ) -> tuple[Sequence[Tensor], Waited | None]:
        (x,) = sent
        if torch.compiler.is_compiling():
            return (self._in_graph(step, x),), None
        if step.kind == "all_reduce":
            out = x if own else x.clone()
            if step.op != "sum" and out.is_complex():
                raise ValueError(f"no {step.op} of complex numbers")
            work = self._group.all_reduce(_real(out), step.op, later=later)
        elif step.kind == "all_gather":
            shape = x.shape
            out = x.new_empty((self.size * shape[0], *shape[1:]))
            work = self._group.all_gather(_real(out), _real(x), later=later)
        elif step.kind == "reduce_scatter":
            shape = x.shape
            out = x.new_empty((shape[0] // self.size, *shape[1:]))
            work = self._group.reduce_scatter(_real(out), _real(x), later=later)
        elif step.kind == "send_recv":
            out = torch.empty_like(x)
            work = self._group.shift(_real(out), _real(x))
        else:
            out = torch.empty_like(x)
            work = self._group.all_to_all(_real(out), _real(x), later=later)
        if later:
            return (out,), work
        work.wait()  # some transports return before they are done
        return (out,), None

    def _in_graph(self, step: Step, x: Tensor) -> Tensor:
        """What ``_transport`` gives, as an op of a graph that torch.compile makes."""
        group, sent = self._traced, _real(x)
        if step.kind == "all_reduce":
            out = group.all_reduce(sent, step.op)
        elif step.kind == "all_gather":
            out = group.all_gather(sent)
        elif step.kind == "reduce_scatter":
            out = group.reduce_scatter(sent)
        elif step.kind == "send_recv":
            raise NotImplementedError("a graph of torch.compile has no send_recv: call it outside of one")
        else:
            out = group.all_to_all(sent)
        return torch.view_as_complex(out) if x.is_complex() else out


def _as_it_lies(step: Step, x: Tensor, n: int) -> bool:
    """Whether a contiguous ``x`` is what ``step`` sends of it, and what it receives is the result."""
    cut = step.cut
    if n == 1 or cut is None:
        return n > 1 and step.kind == "all_reduce"
    if cut.dim or cut.outer != 1 or cut.segments or cut.zigzag or not x.ndim:
        return False
    return step.kind == "all_gather" or (step.kind == "reduce_scatter" and x.shape[0] % n == 0)


def _real(x: Tensor) -> Tensor:
    """``x`` as the transport knows numbers: complex ones as pairs."""
    return torch.view_as_real(x) if x.is_complex() else x


def _signature(x: Tensor) -> tuple[Hashable, ...]:
    return tuple(x.shape), x.dtype


def _dense(x: Tensor) -> Tensor:
    """What torch.distributed can be given: contiguous, no lazy conjugation or negation."""
    if torch.compiler.is_compiling():  # ops of a graph, which do nothing where there is nothing to do
        return (x.resolve_conj() if x.is_complex() else x).resolve_neg().contiguous()
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return x if x.is_contiguous() else x.contiguous()


def _packed(step: Step, x: Tensor, axis: Axis, rank: int) -> Tensor:
    """The buffer that ``step`` sends of ``x``; one that is not dense is made so after."""
    cut = step.where
    if step.kind == "all_gather":
        check_dim(x.shape, cut)
        return x
    if step.kind == "reduce_scatter":
        return in_rows(x, cut, axis.size, f"reduce_scatter over axis {axis.name!r}")
    if _across_pieces(step):
        return torch.stack([x.index_select(cut.dim, at) for at in _met(cut, step.to or cut, x, axis.size, rank)])
    _, to = _local_cuts(step, axis.size)
    return blocks(x, to, axis.size, f"all_to_all over axis {axis.name!r}")


def _unpacked(step: Step, y: Tensor, n: int, rank: int) -> Tensor:
    """The result that ``step`` makes of a received buffer."""
    if step.kind == "all_gather":
        return of_rows(y, step.where, n, "all_gather")
    if _across_pieces(step):
        theirs, own = step.where, step.to or step.where
        out = torch.cat(y.unbind(), own.dim)  # of the right shape; every element is overwritten
        for part, at in zip(y, _met(own, theirs, out, n, rank), strict=True):
            out.index_copy_(own.dim, at, part)
        return out
    cut, _ = _local_cuts(step, n)
    return joined(y, cut, "all_to_all")


def _across_pieces(step: Step) -> bool:
    """Whether an all-to-all goes between two cuts of one dim of which one has blocks in several pieces."""
    cut, to = step.where, step.to or step.where
    return cut.dim == to.dim and bool(cut.segments or to.segments or cut.zigzag or to.zigzag)


def _met(own: Cut, theirs: Cut, x: Tensor, n: int, rank: int) -> list[Tensor]:
    """Where in the block ``x`` of ``own`` lies what is in each rank's block of ``theirs``, both of one dim.

    Raises:
        SizeError: not equally much of every rank's.
    """
    size = x.shape[own.dim] * n
    mine = places(size, own, n, rank)
    found = [torch.isin(mine, places(size, theirs, n, other)).nonzero().flatten().to(x.device) for other in range(n)]
    if len({at.numel() for at in found}) > 1:
        raise SizeError(f"all_to_all between {own} and {theirs}: {n} ranks do not have equally much of each other's")
    return found


def _local_cuts(step: Step, n: int) -> tuple[Cut, Cut]:
    """The cuts of an all-to-all in a rank's own tensor.

    Between two factors of one dim, the inner one's ``outer`` runs over the outer factor, of which a rank
    has an n-th.
    """
    cut, to = step.where, step.to or step.where
    if cut.dim != to.dim or cut.outer == to.outer:
        return cut, to
    inner = max(cut.outer, to.outer)
    if inner % (n * min(cut.outer, to.outer)):
        raise SizeError(f"all_to_all between {cut} and {to}: {n} ranks cannot each hold a part of the outer factor")
    if cut.outer > to.outer:
        return Cut(cut.dim, cut.outer // n), to
    return cut, Cut(to.dim, to.outer // n)


def _local(step: Step, x: Tensor, n: int, rank: int, name: str) -> Tensor:
    """A step that needs no other rank; on an axis of one rank that is any step."""
    if n == 1 or step.kind == "none":
        return x
    if step.kind == "keep":
        return x if rank == 0 else torch.zeros_like(x, memory_format=torch.contiguous_format)
    if step.kind == "split":
        return block(x, step.where, n, rank, f"split over axis {name!r}")
    return padded(x, step.where, n, rank)


class _Exchange(torch.autograd.Function):
    """Both directions of a conversion, for all ranks in this process: as many outputs as inputs."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, forward: Step, backward: Step, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.axis, ctx.steps = axis, (forward, backward)
        ys = axis.move(forward, xs)
        if len(ys) > 1:  # then some may get no gradient
            ctx.like = ys[0].shape, ys[0].dtype, ys[0].device
        return tuple(ys)  # of an input that is returned as it is, torch makes an alias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        forward, backward = ctx.steps
        given = [grad for grad in grads if grad is not None]
        if not given:
            return (None, None, None, *grads)
        if len(given) < len(grads):
            shape, dtype, device = ctx.like
            given = [torch.zeros(shape, dtype=dtype, device=device) if g is None else g for g in grads]
        if not torch.is_grad_enabled():
            return (None, None, None, *ctx.axis.move(backward, given))
        # Through the joint function again: the dual of the dual is the forward, so second derivatives hold.
        return (None, None, None, *joint_exchange(ctx.axis, backward, forward, given))


def joint_exchange(axis: Axis, forward: Step, backward: Step, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """``exchange`` for one tensor per rank in ``axis.held``."""
    return applied(_Exchange, axis, forward, backward, *xs)  # pyright: ignore[reportReturnType]
