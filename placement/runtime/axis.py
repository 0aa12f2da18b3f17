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

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist

from placement.runtime import trace
from placement.runtime._torch import eager, flattened
from placement.runtime.cuts import Cut, block, blocks, joined, padded, places
from placement.runtime.errors import MeshError, SizeError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
U = TypeVar("U")

COMMUNICATING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LOCAL = ("none", "split", "keep", "pad")
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_CUTTING = ("all_gather", "reduce_scatter", "all_to_all", "split", "pad")


@dataclass(frozen=True, slots=True)
class Step:
    """An action with its geometry. ``cut`` is the shard's; an all-to-all goes from ``cut`` ``to`` another.

    ``outer`` sizes are those of the full value, also where an all-to-all goes between two factors of one dim.
    ``op`` is what an all-reduce does with the ranks' values: ``max`` has no dual, it is for ``run`` only.
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self  # an axis is a place, not a value: copies of a module live on the same one

    @eager
    def run(self, step: Step, x: Tensor) -> Tensor:
        """Do ``step`` with this rank's ``x``; no autograd. ``x`` is not written.

        Raises:
            SizeError: the axis does not divide the dim that is cut.
        """
        with torch.no_grad():
            if step.kind in LOCAL:
                return _local(step, x, self.size, self.rank, self.name)
            return self.together((step, *_signature(x)), x, lambda xs: self.move(step, xs))

    @eager
    def exchange(self, forward: Step, backward: Step, x: Tensor) -> Tensor:
        """Do ``forward`` with this rank's ``x``; its gradient comes back through ``backward``."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return self.run(forward, x)
        key = (forward, backward, *_signature(x))
        return self.together(key, x, lambda xs: joint_exchange(self, forward, backward, xs))

    @abstractmethod
    def together(self, what: Hashable, payload: T, action: Callable[[list[T]], Sequence[U]]) -> U:
        """Call ``action`` once with the payloads of the ranks in this process; returns this rank's result.

        ``what`` must be equal on all ranks. It names the meeting in errors.
        """

    @abstractmethod
    def _transport(self, step: Step, sent: list[Tensor]) -> list[Tensor]:
        """Move one contiguous buffer per held rank; results are fresh and contiguous.

        all_reduce: the sum or the maximum. all_gather: [n, *sent]. reduce_scatter, all_to_all: from [n, *block],
        the sum of the own block; the own block of every rank, stacked.
        """

    def move(self, step: Step, xs: Sequence[Tensor]) -> list[Tensor]:
        """``run`` for one tensor per rank in ``held``, of all ranks in this process at once."""
        if self.size == 1 or step.kind in LOCAL:
            return [_local(step, x, self.size, rank, self.name) for rank, x in zip(self.held, xs, strict=True)]
        dtype = xs[0].dtype
        sums = step.kind in ("all_reduce", "reduce_scatter") and step.op == "sum" and dtype.is_floating_point
        wire = self.reduce_dtype if sums and self.reduce_dtype is not None else dtype
        sent = [_packed(step, x.to(wire), self, rank) for rank, x in zip(self.held, xs, strict=True)]
        parts = self.size if step.kind in ("all_gather", "all_to_all") else 1
        if self.recorded:
            trace.note(step.kind, self.name, parts * sent[0].numel() * sent[0].element_size())
        received = zip(self.held, self._transport(step, sent), strict=True)
        return [_unpacked(step, y, self.size, rank).to(dtype) for rank, y in received]


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
        super().__init__(name, self.mesh.size(), self.mesh.get_local_rank(), device, reduce_dtype)

    def together(self, what: Hashable, payload: T, action: Callable[[list[T]], Sequence[U]]) -> U:  # noqa: ARG002, D102
        return action([payload])[0]

    def _transport(self, step: Step, sent: list[Tensor]) -> list[Tensor]:
        (x,) = sent
        if step.kind == "all_reduce":
            out = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(out, _OPS[step.op], group=self.group)
        elif step.kind == "all_gather":
            out = x.new_empty((self.size, *x.shape))
            # Stacking wants a dim to stack on, which a scalar lacks.
            dist.all_gather_single(out.view(-1), x.view(-1), group=self.group)
        elif step.kind == "reduce_scatter":
            out = x.new_empty(x.shape[1:])
            dist.reduce_scatter_single(out.view(-1), x.view(-1), group=self.group)
        else:
            out = torch.empty_like(x)
            dist.all_to_all_single(out, x, group=self.group)
        return [out]


def _signature(x: Tensor) -> tuple[Hashable, ...]:
    return tuple(x.shape), x.dtype


def _dense(x: Tensor) -> Tensor:
    """What torch.distributed can be given: contiguous, no lazy conjugation or negation."""
    return x.resolve_conj().resolve_neg().contiguous()


def _packed(step: Step, x: Tensor, axis: Axis, rank: int) -> Tensor:
    """The buffer that ``step`` sends of ``x``."""
    if step.kind == "reduce_scatter":
        return _dense(blocks(x, step.where, axis.size, f"reduce_scatter over axis {axis.name!r}"))
    if step.kind == "all_to_all":
        if _across_segments(step):
            own, theirs = step.where, step.to or step.where
            return _dense(torch.stack([x.index_select(own.dim, at) for at in _met(own, theirs, x, axis.size, rank)]))
        _, to = _local_cuts(step, axis.size)
        return _dense(blocks(x, to, axis.size, f"all_to_all over axis {axis.name!r}"))
    return _dense(x)


def _unpacked(step: Step, y: Tensor, n: int, rank: int) -> Tensor:
    """The result that ``step`` makes of a received buffer."""
    if step.kind == "all_gather":
        return joined(y, step.where, "all_gather")
    if step.kind == "all_to_all" and _across_segments(step):
        theirs, own = step.where, step.to or step.where
        out = torch.cat(y.unbind(), own.dim)  # of the right shape; every element is overwritten
        for part, at in zip(y, _met(own, theirs, out, n, rank), strict=True):
            out.index_copy_(own.dim, at, part)
        return out
    if step.kind == "all_to_all":
        cut, _ = _local_cuts(step, n)
        return joined(y, cut, "all_to_all")
    return y


def _across_segments(step: Step) -> bool:
    """Whether an all-to-all goes between two cuts of one dim of which one has segments."""
    cut, to = step.where, step.to or step.where
    return cut.dim == to.dim and bool(cut.segments or to.segments)


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
        ys = axis.move(forward, xs)
        ctx.axis, ctx.steps, ctx.like = axis, (forward, backward), (ys[0].shape, ys[0].dtype, ys[0].device)
        return tuple(y.view_as(y) if y is x else y for x, y in zip(xs, ys, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        forward, backward = ctx.steps
        if all(grad is None for grad in grads):
            return (None, None, None, *grads)
        shape, dtype, device = ctx.like
        dense = [torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad for grad in grads]
        # Through the joint function again: the dual of the dual is the forward, so second derivatives hold.
        return (None, None, None, *joint_exchange(ctx.axis, backward, forward, dense))


def joint_exchange(axis: Axis, forward: Step, backward: Step, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """``exchange`` for one tensor per rank in ``axis.held``."""
    return _Exchange.apply(axis, forward, backward, *xs)  # pyright: ignore[reportReturnType]
