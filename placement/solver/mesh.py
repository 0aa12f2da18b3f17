"""The axes of a mesh together: how they divide values, what they cost, and what converts a value on several.

One axis converts at a time, or several at once where they do the same: partial sums over two axes are one sum
over the ranks of both. Such a group of axes has the names of its axes, ``dp_tp``, and the slowest of their links.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from math import lcm, prod

import sympy

from placement.graph.factors import Dims
from placement.graph.ir import Size, Value, evaluate
from placement.graph.segments import Factors, extent, flattened, pattern
from placement.solver.cost import Device, Link, Machine
from placement.types import Action, Conversion, Joint, Type, conversion

Axes = tuple[int, ...]
"""Axes by their position in the mesh, ascending."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis: its name and how many ranks it has."""

    name: str
    n: int


@dataclass(frozen=True, slots=True)
class Edge:
    """A direct conversion between two types of a value, done by ``axes`` together."""

    axes: Axes
    target: Joint
    conversion: Conversion


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value is cut: the dim, the size of what stands before the run in it, and its segments' sizes in ratio.

    Segments are those of what is after ``outer``; there are none where the run lies in no sum. In ``zigzag`` order a
    rank has an early and a late chunk.
    """

    dim: int
    outer: Size
    segments: tuple[int, ...] = ()
    zigzag: bool = False

    @property
    def whole(self) -> bool:
        """Whether a block lies in one piece."""
        return self.outer == 1 and not self.segments and not self.zigzag


@dataclass(frozen=True, eq=False)
class Mesh:
    """Axes in mesh order, outermost first, each with the link between its ranks.

    zigzag: the runs of factors that an axis cuts in zigzag order. Every value has one order there, so types say nothing
    of it.
    """

    axes: tuple[Axis, ...]
    device: Device
    links: tuple[Link, ...]
    zigzag: frozenset[tuple[int, tuple[object, ...]]] = frozenset()
    _machines: dict[Axes, Machine] = field(default_factory=dict[Axes, Machine], init=False, repr=False)
    _times: dict[tuple[Axes, Action, int], int] = field(
        default_factory=dict[tuple["Axes", Action, int], int], init=False, repr=False
    )

    def __str__(self) -> str:
        return ", ".join(f"{axis.name} = {axis.n}" for axis in self.axes)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Ranks by axis name."""
        return {axis.name: axis.n for axis in self.axes}

    @cached_property
    def groups(self) -> tuple[Axes, ...]:
        """Sets of two or more axes that have ranks to join."""
        real = [index for index, axis in enumerate(self.axes) if axis.n > 1]
        return tuple(found for count in range(2, len(real) + 1) for found in combinations(real, count))

    def name(self, axes: Axes) -> str:
        """``tp``, or ``dp_tp`` for a group."""
        return "_".join(self.axes[index].name for index in axes)

    def ranks(self, axes: Iterable[int]) -> int:
        """How many ranks these axes have together."""
        return prod(self.axes[index].n for index in axes)

    def machine(self, axes: Axes) -> Machine:
        """What ``axes`` cost together."""
        if axes not in self._machines:
            links = [self.links[index] for index in axes]
            slowest = min(links, key=lambda link: link.bandwidth)
            link = Link(slowest.name, slowest.bandwidth, max(link.latency for link in links))
            self._machines[axes] = Machine(self.device, link, self.ranks(axes))
        return self._machines[axes]

    # -- how values are divided -------------------------------------------------------------------

    def parts(self, joint: Joint, without: Axes = ()) -> int:
        """Into how many blocks a value of this type is cut, by axes other than ``without``."""
        return prod(
            axis.n for index, (axis, kind) in enumerate(zip(self.axes, joint, strict=True))
            if kind.over and index not in without
        )  # fmt: skip

    def shape(
        self, dims: Dims, value: Value, joint: Joint, whole: Sequence[Size], without: Axes = ()
    ) -> tuple[Size, ...]:
        """The shape of one block of a value of shape ``whole``; a dynamic size stays a division."""
        sizes = list(whole)
        for index, kind in enumerate(joint):
            if kind.over and index not in without:
                place = dims.locate(value, kind.over)  # type: ignore[arg-type]
                assert place is not None
                sizes[place[0]] = divided(sizes[place[0]], self.axes[index].n)
        return tuple(sizes)

    def place(self, dims: Dims, value: Value, joint: Joint, axes: Axes, others: Axes | None = None) -> Place:
        """Where ``axes`` cut a value; sizes are those where ``others`` have cut it too, all if nothing is said."""
        run = joint[axes[0]].over
        found = dims.locate(value, run)  # type: ignore[arg-type]
        assert found is not None

        def left(factors: Factors) -> Size:
            size, inside = extent(factors), set(flattened(factors))
            for index, kind in enumerate(joint):
                among = index not in axes if others is None else index in others
                if among and kind.over and not kind.stored and set(kind.over) <= inside:
                    size = divided(size, self.axes[index].n)
            return size

        lengths: list[int] = []
        for before, size in dims.segments(value, run):  # type: ignore[arg-type]
            count = int(left(before))
            lengths += [size // count] * count
        times, segments = pattern(lengths) if lengths else (1, ())
        return Place(found[0], left(found[1]) * times, segments, self.ordered(joint, axes))

    def ordered(self, joint: Joint, axes: Axes) -> bool:
        """Whether one of ``axes`` cuts a value in zigzag order."""
        kinds = ((index, joint[index]) for index in axes)
        return any((index, kind.over) in self.zigzag and not kind.stored for index, kind in kinds)

    def divisor(self, joint: Joint, run: tuple[object, ...]) -> int:
        """What the size of a run must be a multiple of where a value is of this type."""
        found = blocks = 1
        for index, (axis, kind) in enumerate(zip(self.axes, joint, strict=True)):
            if kind.over == run and not kind.stored:
                blocks *= axis.n
                found = lcm(found, 2 * blocks if (index, run) in self.zigzag else blocks)
        return found

    def fits(self, joint: Joint, hints: Mapping[sympy.Symbol, int]) -> bool:
        """Whether all axes can cut a value so together: the same run evenly, other runs apart.

        A stored shard is of a whole dim, and cuts what the other axes leave of it.
        """
        cuts: dict[tuple[object, ...], int] = {}
        for axis, kind in zip(self.axes, joint, strict=True):
            if kind.over and not kind.stored:
                cuts[kind.over] = cuts.get(kind.over, 1) * axis.n
        for kind in joint:
            if kind.stored:
                dim = set(flattened(kind.over))  # type: ignore[arg-type]
                within = prod(n for run, n in cuts.items() if dim >= set(run))
                within *= prod(a.n for a, k in zip(self.axes, joint, strict=True) if k.stored and k.over == kind.over)
                if _extent(kind.over, hints) % within:
                    return False
        if len(cuts) < 2 and sum(1 for kind in joint if kind.over and not kind.stored) < 2:
            return True
        factors = [factor for run in cuts for factor in run]
        if any(factor.segments for factor in factors):  # type: ignore[attr-defined]
            factors = [factor for run in cuts for factor in dict.fromkeys(flattened(run))]  # type: ignore[arg-type]
        if len(set(factors)) < len(factors):
            return False
        return all(_extent(run, hints) % self.divisor(joint, run) == 0 for run in cuts)

    def inner(self, joint: Joint, axis: int) -> bool:
        """Whether an axis further in cuts the blocks that this axis makes."""
        run, order = joint[axis].over, joint.order
        return bool(run) and any(joint[other].over == run for other in order[order.index(axis) + 1 :])

    # -- conversions --------------------------------------------------------------------------------

    def edges(self, source: Joint, kinds: Sequence[Sequence[Type]], *, gradient: bool) -> Iterator[Edge]:
        """Every direct conversion of ``source`` to a type of ``kinds``, which lists those of each axis.

        Of axes that cut one run only the innermost converts. A group converts where its axes do the same and
        something is sent: blocks in one order, the ranks'.
        """
        for index, wanted in enumerate(kinds):
            for kind in wanted:
                found = conversion(source[index], kind, gradient=gradient)
                target = source.replaced((index,), kind)
                if found is not None and not self.inner(source, index) and not self.inner(target, index):
                    yield Edge((index,), target, found)
        for group in self.groups:
            own = source[group[0]]
            if any(source[index] != own for index in group):
                continue
            for kind in (kind for kind in kinds[group[0]] if all(kind in kinds[index] for index in group)):
                found = conversion(own, kind, gradient=gradient)
                if found is None or not (found.forward.communicates or found.backward.communicates):
                    continue
                if own.over and kind.over:
                    continue
                target = source.replaced(group, kind)
                if self.ordered(source, group) or self.ordered(target, group):
                    continue
                if self._whole(source, group) and self._whole(target, group):
                    yield Edge(group, target, found)

    def _whole(self, joint: Joint, group: Axes) -> bool:
        """Whether no axis outside the group lies inside of what it cuts."""
        run = joint[group[0]].over
        inside = (joint[index].over for index in range(group[0] + 1, len(joint)) if index not in group)
        return not run or run not in inside

    def sent(self, edge: Edge, source: Joint, nbytes: int) -> int:
        """The bytes that a conversion counts: of the value as the other axes leave it."""
        return nbytes // self.parts(source, edge.axes)

    def collective(self, axes: Axes, action: Action, nbytes: int) -> int:
        """Picoseconds of one action, of ``nbytes`` as ``sent`` gives them; a graph asks for it again and again."""
        key = axes, action, nbytes
        if key not in self._times:
            self._times[key] = self.machine(axes).collective(action, nbytes)
        return self._times[key]


def divided(size: Size, n: int) -> Size:
    """The size of one of ``n`` blocks."""
    if n == 1 or isinstance(size, int):
        return size // n if n > 1 else size
    return sympy.floor(size / n)


def _extent(run: tuple[object, ...], hints: Mapping[sympy.Symbol, int]) -> int:
    return prod(evaluate(factor.size, hints) for factor in run)  # type: ignore[attr-defined]
