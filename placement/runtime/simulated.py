"""A program on a simulated mesh: a module of global values that holds every rank's program."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from placement.runtime._torch import eager
from placement.runtime.cuts import Cut, block, joined
from placement.runtime.lengths import spare
from placement.runtime.main_grads import zero_main_grads
from placement.runtime.outputs import mapped
from placement.runtime.program import Program, clone
from placement.runtime.simulate import each

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from placement.runtime.axis import Axis
    from placement.runtime.lengths import Lengths
    from placement.runtime.simulate import SimulatedMesh
    from placement.runtime.slices import Sliced


class Simulated(nn.Module):
    """All ranks of a program in this process.

    ``forward`` takes and returns what the one-device model does. ``parameters()`` are those of every rank
    (``rank0.…``), so an elementwise optimizer steps them all.
    """

    def __init__(self, program: Program, mesh: SimulatedMesh, reduce_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.mesh = mesh
        self.restore: Callable[[Any], Any] | None = program.restore
        self._at = [tuple(at.values()) for at in mesh.ranks]
        for rank in range(len(self._at)):
            self.add_module(
                f"rank{rank}", clone(program).bound(*mesh.axes_and_groups(rank, program.groups, reduce_dtype))
            )

    @property
    def programs(self) -> list[Program]:
        """Each rank's program, in rank order."""
        return list(self.children())  # pyright: ignore[reportReturnType]

    @eager
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Cut the inputs, run every rank, join the outputs."""
        programs = self.programs
        guard = programs[0].guard
        for program in programs:
            program.refuse_meta()
        arguments = guard.arguments(args, kwargs)
        lengths = guard.check(arguments, local=False)
        parts: dict[str, list[Tensor]] = {}
        mapped(lambda name, x: parts.update({name: self._cut(x[0], guard.layout(name))}), [arguments])

        def call(rank: int, program: Program) -> Any:
            own = mapped(lambda name, _: parts[name][rank], [arguments])
            bound = guard.signature.bind_partial()
            bound.arguments.update(own)
            return program(*bound.args, **bound.kwargs)

        results = each([partial(call, rank, program) for rank, program in enumerate(programs)])
        result = mapped(partial(self._returned, lengths), results)
        return result if self.restore is None else self.restore(result)

    def _returned(self, lengths: Lengths, name: str, xs: list[Tensor]) -> Tensor:
        """The global output of this name, without what its dims are padded with."""
        program = self.programs[0]
        whole = self._join(xs, program.layout(program.outputs.get(name)))
        for dim, size in program.lengths.get(name, {}).items():
            whole = whole.narrow(dim, 0, size)
        for dim, more in spare(name, program.uneven, lengths).items():
            whole = whole.narrow(dim, 0, whole.shape[dim] - more)
        return whole

    def _cut(self, x: Tensor, layout: tuple[tuple[Axis, Cut], ...]) -> list[Tensor]:
        """Each rank's part of a global input; ranks with the same block share one value of type I."""
        names = list(self.mesh.sizes)
        cutting = [(names.index(axis.name), axis.size, cut) for axis, cut in layout]
        sharing: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(self._at):
            sharing.setdefault(tuple(at[index] for index, _, _ in cutting), []).append(rank)
        parts: dict[int, Tensor] = {}
        for coordinates, ranks in sharing.items():
            part = x
            for (_, n, cut), coordinate in zip(cutting, coordinates, strict=True):
                part = block(part, cut, n, coordinate)
            parts.update(zip(ranks, _given(part, len(ranks)), strict=True))
        return [parts[rank] for rank in range(len(self._at))]

    def _join(self, xs: list[Tensor], layout: tuple[tuple[Axis, Any], ...]) -> Tensor:
        """The global output of the ranks' parts, axis by axis, innermost first."""
        how = {axis.name: cut for axis, cut in layout}
        parts = dict(zip(self._at, xs, strict=True))
        for name in reversed(self.mesh.sizes):
            groups: dict[tuple[int, ...], list[Tensor]] = {}
            for at, part in parts.items():  # ranks are in order, so each group is
                groups.setdefault(at[:-1], []).append(part)
            parts = {at: _joined(group, how.get(name)) for at, group in groups.items()}
        return parts[()]

    def own_inputs(self, **whole: Any) -> dict[str, Any]:
        """Inputs as they are: a simulated mesh takes those of one device."""
        return whole

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """See ``Program.no_sync``."""
        with ExitStack() as stack:
            for program in self.programs:
                stack.enter_context(program.no_sync())
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See ``Program.zero_grad``."""
        super().zero_grad(set_to_none)
        zero_main_grads(self)

    def waiting(self) -> list[str]:
        """See ``Program.waiting``."""
        return self.programs[0].waiting()

    def meta_tensors(self) -> list[str]:
        """See ``Program.meta_tensors``."""
        return self.programs[0].meta_tensors()

    def full_state_dict(self) -> dict[str, Tensor]:
        """See ``Program.full_state_dict``."""
        return each([program.full_state_dict for program in self.programs])[0]

    def full_gradients(self) -> dict[str, Tensor | None]:
        """See ``Program.full_gradients``."""
        return each([program.full_gradients for program in self.programs])[0]

    def load_full_state_dict(self, given: Mapping[str, Tensor | Sliced], *, strict: bool = True) -> None:
        """See ``Program.load_full_state_dict``."""
        each([partial(program.load_full_state_dict, given, strict=strict) for program in self.programs])


def _given(x: Tensor, n: int) -> tuple[Tensor, ...]:
    if not (x.requires_grad and torch.is_grad_enabled()):
        return (x,) * n
    return _Given.apply(x, n)  # pyright: ignore[reportReturnType]


def _joined(parts: list[Tensor], how: Any) -> Tensor:
    """One value of the parts on one axis: a cut, "P" for terms, None for one value that all ranks have."""
    if how == "P":
        return torch.stack(parts).sum(0)
    if how is not None:
        return joined(torch.stack(parts), how)
    if not (any(part.requires_grad for part in parts) and torch.is_grad_enabled()):
        return parts[0]
    return _Agreed.apply(*parts)  # pyright: ignore[reportReturnType]


class _Given(torch.autograd.Function):
    """A global value handed to n ranks as type I: each one's cotangent is the whole one, so one is taken."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for _ in range(n))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        known = [grad for grad in grads if grad is not None]
        return (_Agreed.apply(*known) if known else None), None  # of type I in its turn: for second derivatives


class _Agreed(torch.autograd.Function):
    """A value of type I that n ranks have, as one global value: each rank gets the whole cotangent."""

    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Tensor:
        ctx.n = len(xs)
        return xs[0].view_as(xs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return _Given.apply(*grads, ctx.n)  # pyright: ignore[reportReturnType]
