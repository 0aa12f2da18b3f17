"""The dtype in which sums over ranks are done, and the buckets in which gradients of parameters are summed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from placement.graph.ir import Call, Node, Value
from placement.types import Action, Kind

if TYPE_CHECKING:
    from placement.rules import Collective
    from placement.solver.bind import Bound
    from placement.solver.mesh import Axes
    from placement.solver.plan import Hook

SUMS = (Action.ALL_REDUCE, Action.REDUCE_SCATTER)
"""The actions that add up what ranks have."""

BUCKET = 25 * 2**20
"""The most bytes of gradients that are summed at once; a parameter that has more is summed by itself."""


class Sums:
    """What ``lower … reduce`` lines say of the sums of each value: its dtype, None where no line speaks of it.

    Of a value of which each rank has a term it is what they say of the op that makes it; of the gradient of a
    parameter, of the module that owns it; of the gradient of another value, of the innermost module that has all its
    readers. Of lines for a module and for one inside it the inner one holds. Numbers that are not floating point have
    none.
    """

    def __init__(self, bound: Bound) -> None:
        dtypes: dict[str, torch.dtype] = {path: getattr(torch, name) for path, name in bound.said("reduce").items()}
        self._default = bound.reduce
        self._dtypes = dtypes
        self._made: dict[Value, torch.dtype | None] = {}
        self._read: dict[Value, torch.dtype | None] = {}
        if dtypes:
            self._find(bound)

    def _find(self, bound: Bound) -> None:
        readers: dict[Value, Sequence[Call]] = {}
        for node in bound.graph.nodes:
            self._made.update(dict.fromkeys(node.results, self._inside(call.path for call in reversed(node.stack))))
            for value in node.operands:
                readers[value] = _common(readers.get(value, node.stack), node.stack)
        for output in bound.graph.outputs:
            if output.value is not None:
                readers[output.value] = ()
        self._read = {v: self._inside(call.path for call in reversed(stack)) for v, stack in readers.items()}
        for parameter in bound.graph.parameters:  # a tied one is in several modules: a line for one of them holds
            said = (self._inside(owners(name)) for name in parameter.names)
            self._read[parameter.value] = next((dtype for dtype in said if dtype is not None), None)

    def _inside(self, paths: Iterable[str]) -> torch.dtype | None:
        """What is said of the first of these modules of which anything is, the model itself being the last."""
        return next((self._dtypes[path] for path in (*paths, "") if path in self._dtypes), None)

    def said(self, value: Value, source: Kind) -> torch.dtype | None:
        """The dtype that a line asks for where a value of this kind is converted."""
        if not value.dtype.is_floating_point:
            return None
        return (self._made if source is Kind.P else self._read).get(value)

    def of_op(self, node: Node) -> torch.dtype | None:
        """The dtype that a line asks for in the module of an op."""
        return self._inside(call.path for call in reversed(node.stack)) if self._dtypes else None

    def inside(self, node: Node, sent: Collective) -> torch.dtype | None:
        """The dtype that a line asks for in a collective inside an op."""
        return None if sent.summed is None else self.of_op(node)

    def sent_inside(self, node: Node, sent: Collective, nbytes: int) -> int:
        """What a collective inside an op sends of ``nbytes``."""
        return nbytes if sent.summed is None else self._summed(nbytes, sent.summed, self.of_op(node))

    def likeness(self, value: Value) -> object:
        """What the bytes of a value's sums depend on beside its dtype."""
        return (self.said(value, Kind.P), self.said(value, Kind.I)) if self._dtypes else None

    def sent(self, value: Value, source: Kind, action: Action, nbytes: int) -> int:
        """What an action sends of ``nbytes`` of a value."""
        if action not in SUMS or not value.dtype.is_floating_point:
            return nbytes
        return self._summed(nbytes, value.dtype, self.said(value, source))

    def _summed(self, nbytes: int, own: torch.dtype, said: torch.dtype | None) -> int:
        """The bytes of a sum of what has ``nbytes`` in its own dtype."""
        return nbytes // own.itemsize * (said or self._default or own).itemsize


def _common(left: Sequence[Call], right: Sequence[Call]) -> Sequence[Call]:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return left[:count]


def owners(name: str) -> Iterable[str]:
    """The modules that a parameter lies in, innermost first."""
    path = name.rpartition(".")[0]
    while path:
        yield path
        path = path.rpartition(".")[0]


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Parameters whose gradients are summed in one collective. reduce: as of each of them."""

    axis: str
    axes: Axes
    reduce: torch.dtype | None
    nbytes: int
    hooks: tuple[Hook, ...]


def buckets(hooks: Sequence[Hook], first_use: Mapping[Hook, int]) -> tuple[Bucket, ...]:
    """The hooks of each axis and dtype in few buckets, those first whose gradients are complete first in a backward.

    That is what is used last. Inside a bucket they are in their own order.
    """
    groups: dict[tuple[str, torch.dtype | None, torch.dtype], list[Hook]] = {}
    for hook in hooks:
        groups.setdefault((hook.axis, hook.reduce, hook.parameter.value.dtype), []).append(hook)
    found: list[Bucket] = []
    for group in groups.values():
        taken: list[Hook] = []
        parts = [taken]
        for hook in sorted(group, key=first_use.__getitem__, reverse=True):
            if taken and sum(one.nbytes for one in taken) + hook.nbytes > BUCKET:
                taken = []
                parts.append(taken)
            taken.append(hook)
        place = {hook: index for index, hook in enumerate(group)}
        for part in parts:
            first, nbytes = part[0], sum(hook.nbytes for hook in part)
            inside = tuple(sorted(part, key=place.__getitem__))
            found.append(Bucket(first.axis, first.axes, first.reduce, nbytes, inside))
    return tuple(found)
