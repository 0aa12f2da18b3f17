"""All ranks of a mesh in this process.

Every rank runs the same code in a thread of its own, and the threads hand a baton: one runs at a
time, in a fixed order, so a run is deterministic and needs no locks. At a collective a rank deposits
its tensor and waits; the last one to arrive does the joint action for all and the others pick up
their results. A differentiable action is one autograd function with every rank's tensor, so the graph
joins all ranks and a backward pass needs neither threads nor waiting.
"""

from __future__ import annotations

import contextvars
import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from placement.runtime._torch import ThreadState, eager
from placement.runtime.axis import Axis, Step
from placement.runtime.errors import MeshError, RankError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

T = TypeVar("T")
U = TypeVar("U")


def simulate(device: torch.device | str = "cpu", /, **sizes: int) -> SimulatedMesh:
    """A mesh of ranks in this process: ``simulate(tp=4)``, ``simulate("cuda", dp=2, tp=2)``."""
    return SimulatedMesh(sizes, torch.device(device))


class SimulatedMesh:
    """Axes by name with their sizes, and ranks in row-major order: the last axis varies fastest."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        if not sizes or any(size < 1 for size in sizes.values()):
            raise MeshError(f"a mesh needs axes of size 1 or more, not {dict(sizes)}")
        self.sizes = dict(sizes)
        self.device = device

    def __repr__(self) -> str:
        return f"simulate({', '.join(f'{name}={size}' for name, size in self.sizes.items())})"

    @property
    def ranks(self) -> list[dict[str, int]]:
        """Each rank's coordinate on every axis."""
        return [dict(zip(self.sizes, at, strict=True)) for at in itertools.product(*map(range, self.sizes.values()))]

    def axes(self, rank: int, reduce_dtype: torch.dtype | None = None) -> dict[str, Axis]:
        """The axes as rank ``rank`` sees them."""
        return {name: SimulatedAxis(self, name, rank, (name,), reduce_dtype) for name in self.sizes}

    def axes_and_groups(
        self, rank: int, groups: Mapping[str, tuple[str, ...]], reduce_dtype: torch.dtype | None = None
    ) -> tuple[dict[str, Axis], dict[str, Axis]]:
        """The axes, and groups of axes that do things together, as rank ``rank`` sees them."""
        made = {name: SimulatedAxis(self, name, rank, axes, reduce_dtype) for name, axes in groups.items()}
        return self.axes(rank, reduce_dtype), dict(made)

    def run(self, body: Callable[[dict[str, Axis]], T]) -> list[T]:
        """Call ``body(axes)`` on every rank; returns what each returned.

        Raises:
            RankError: the ranks do not reach the same collectives.
            Exception: what a rank raised, with a note of its rank. The other ranks are cancelled.
        """
        count = math.prod(self.sizes.values())
        return each([partial(body, self.axes(rank)) for rank in range(count)])


class SimulatedAxis(Axis):
    """An axis of a ``SimulatedMesh``, or several of them as one: the other ranks are other threads."""

    def __init__(
        self, mesh: SimulatedMesh, name: str, rank: int, axes: tuple[str, ...], reduce_dtype: torch.dtype | None
    ) -> None:
        at, here = mesh.ranks[rank], dict.fromkeys(axes, 0)
        self.group = tuple(r for r, other in enumerate(mesh.ranks) if {**other, **here} == {**at, **here})
        super().__init__(name, len(self.group), self.group.index(rank), mesh.device, reduce_dtype)
        self.held = range(self.size)
        self.recorded = 0 in self.group
        self.world_rank = rank

    @eager
    def together(self, what: Hashable, payload: T, action: Callable[[list[T]], Sequence[U]]) -> U:  # noqa: D102
        if self.size == 1:
            return action([payload])[0]
        world = _worlds.current
        if world is None:
            raise RankError(
                f"{_described(what)} on simulated axis {self.name!r} outside of a run of all its ranks; "
                "recomputation in a backward pass (torch checkpoint) is such a place"
            )
        return world.meet(self, what, payload, action)

    def _transport(
        self,
        step: Step,
        sent: Sequence[Tensor],
        *,
        own: bool,  # noqa: ARG002
        later: bool,  # noqa: ARG002
    ) -> tuple[Sequence[Tensor], None]:
        return self._moved(step, sent), None

    def _moved(self, step: Step, sent: Sequence[Tensor]) -> list[Tensor]:
        if step.kind == "all_reduce":
            total = _sum(sent) if step.op == "sum" else torch.stack(list(sent)).amax(0)
            return [total.clone() for _ in sent]
        if step.kind == "all_gather":
            return [torch.cat(list(sent)) for _ in sent]
        if step.kind == "reduce_scatter":
            parts = [x.chunk(self.size) for x in sent]
            return [_sum([of[rank] for of in parts]) for rank in self.held]
        if step.kind == "send_recv":
            return [sent[rank - 1].clone() for rank in self.held]
        return [torch.stack([x[rank] for x in sent]) for rank in self.held]


def _sum(xs: Sequence[Tensor]) -> Tensor:
    """The sum in the dtype of the terms, rank by rank as a ring does; a fused sum would round once only."""
    return reduce(torch.add, xs[1:], xs[0].clone())


def each(bodies: Sequence[Callable[[], T]]) -> list[T]:
    """Run one body per rank as the ranks of one simulated mesh; returns their results."""
    if _worlds.current is not None:
        raise RankError("a simulated rank cannot run a simulated mesh of its own")
    if len(bodies) == 1:
        return [bodies[0]()]
    return _World(len(bodies)).run(bodies)


class _Worlds(threading.local):
    """The run that this thread is a rank of."""

    current: _World | None = None


_worlds = _Worlds()


class _Cancelled(BaseException):
    """Unwinds the other ranks when one has failed; no ``except Exception`` may stop it."""


@dataclass
class _Meeting:
    """A collective that some ranks of a group have reached."""

    what: Hashable
    payloads: dict[int, Any] = field(default_factory=dict)


class _World:
    """One run: a thread per rank, and the baton that lets one of them run at a time."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.turns = [threading.Semaphore(0) for _ in range(n)]
        self.finished = threading.Event()
        self.ready = set(range(n))
        self.done: set[int] = set()
        self.meetings: dict[tuple[str, tuple[int, ...]], _Meeting] = {}
        self.results: dict[int, Any] = {}
        self.failure: BaseException | None = None

    def run(self, bodies: Sequence[Callable[[], T]]) -> list[T]:
        state = ThreadState.capture()
        returned: dict[int, T] = {}

        def rank(r: int, body: Callable[[], T]) -> None:
            self.turns[r].acquire()
            _worlds.current = self
            try:
                if self.failure is None:
                    with state.applied():
                        returned[r] = body()
            except _Cancelled:
                pass  # the failure that cancelled this rank is the one to report
            except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
                error.add_note(f"in simulated rank {r}")
                self._fail(error)
            finally:
                _worlds.current = None
                self.ready.discard(r)
                self.done.add(r)
                self._pass_on(r)

        # A context can be entered once at a time, so each thread has a copy.
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(rank, r, body), daemon=True)
            for r, body in enumerate(bodies)
        ]
        for thread in threads:
            thread.start()
        self.turns[0].release()
        try:
            self.finished.wait()
        except BaseException as error:  # an interrupt: the ranks stop at their next collective
            self.failure = error
            raise
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        return [returned[r] for r in range(self.n)]

    def meet(self, axis: SimulatedAxis, what: Hashable, payload: T, action: Callable[[list[T]], Sequence[U]]) -> U:
        """Deposit, wait for the group, return this rank's result."""
        r, group = axis.world_rank, axis.group
        meeting = self.meetings.setdefault((axis.name, group), _Meeting(what))
        if meeting.what != what:
            other = next(iter(meeting.payloads))
            raise RankError(
                f"ranks reach different collectives on axis {axis.name!r}: rank {other} is at "
                f"{_described(meeting.what)}, rank {r} at {_described(what)}"
            )
        meeting.payloads[r] = payload
        if len(meeting.payloads) == len(group):
            del self.meetings[axis.name, group]
            results = action([meeting.payloads[member] for member in group])
            self.results.update(zip(group, results, strict=True))
            self.ready.update(group)
        else:
            self.ready.discard(r)
            self._pass_on(r)
            self.turns[r].acquire()
            if self.failure is not None:
                raise _Cancelled
        return self.results.pop(r)

    def _pass_on(self, r: int) -> None:
        """Hand the baton to the next rank that can run; without one, end the run or report why not."""
        if not self.ready and len(self.done) < self.n:
            self._fail(RankError(self._stuck()))
        if self.ready:
            self.turns[min(self.ready, key=lambda other: (other - r) % self.n)].release()
        else:
            self.finished.set()

    def _fail(self, error: BaseException) -> None:
        """Keep the first failure and wake every rank to be cancelled."""
        if self.failure is None:
            self.failure = error
        self.ready = set(range(self.n)) - self.done

    def _stuck(self) -> str:
        waits = [
            f"rank {r} waits at {_described(meeting.what)} on axis {axis!r}"
            for (axis, _), meeting in self.meetings.items()
            for r in meeting.payloads
        ]
        ended = [f"rank {r} has finished" for r in sorted(self.done)]
        return "ranks wait for each other: " + ", ".join(waits + ended)


def _described(what: Hashable) -> str:
    """A meeting's name for an error: ``all_gather Cut(dim=0, outer=1) of float32[2, 3]``."""
    if not isinstance(what, tuple):
        return str(what)
    words = [part for part in what if not isinstance(part, Step)]
    steps = [part for part in what if isinstance(part, Step)]
    shown = [" ".join(str(x) for x in (step.kind, step.cut, step.to) if x is not None) for step in steps]
    if len(words) == 2 and isinstance(words[1], torch.dtype):
        words = ["of", f"{str(words[1]).removeprefix('torch.')}{list(words[0])}"]
    return " ".join([" / ".join(shown), *map(str, words)]).strip()
