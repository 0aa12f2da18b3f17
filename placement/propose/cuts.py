"""What could be cut together: parameters that share a factor, told from the graph alone.

A product's columns and the next product's rows are the same factor, so are the heads of q, k, v and of the output
projection. Cutting one of them and not the other means a collective between the two; that is what makes them one
candidate. Alike layers have alike candidates, which are one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from placement.graph.factors import Factor, Factors
from placement.graph.ir import Node, Parameter, Size, Value
from placement.graph.signature import Signature
from placement.rules import lookup
from placement.solver.bind import Bound, Pin, leading, parameter_dims
from placement.types import S


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters at one place of alike layers, and the dim of theirs that is cut.

    wild: their path with ``*`` for layer numbers. names: their canonical names. spoken: what a user calls the dim.
    """

    wild: str
    dim: int
    spoken: str | int
    names: tuple[str, ...]
    pins: Mapping[Value, Pin]
    nbytes: int  # of all of them together, on one rank before the cut
    role: str  # what the cut means for each rank


@dataclass(frozen=True, slots=True)
class Cut:
    """Groups that share a factor: a candidate to be tried as a whole."""

    groups: tuple[Group, ...]

    @property
    def pins(self) -> dict[Value, Pin]:
        """The pins of all groups."""
        return {value: pin for group in self.groups for value, pin in group.pins.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all groups before the cut."""
        return sum(group.nbytes for group in self.groups)

    def without(self, left_out: Iterable[Group]) -> Cut:
        """The cut of the other groups."""
        gone = {(group.wild, group.dim) for group in left_out}
        return Cut(tuple(group for group in self.groups if (group.wild, group.dim) not in gone))


def wild(name: str) -> str:
    """``layers.*.mlp.up.weight`` for ``layers.3.mlp.up.weight``."""
    return ".".join("*" if segment.isdigit() else segment for segment in name.split("."))


def placeable(bound: Bound) -> list[Parameter]:
    """The parameters that a spec would place: no buffers, no scalars."""
    return [p for p in bound.graph.parameters if not p.is_buffer and p.value.shape]


def cuts(bound: Bound) -> tuple[Cut, ...]:
    """Every candidate, in the order of its first parameter."""
    by_factor: dict[Factor, list[tuple[Parameter, int, Factors]]] = defaultdict(list)
    for parameter in placeable(bound):
        for dim, factors in enumerate(bound.dims.of(parameter.value)):
            run = leading(bound.contexts[0], factors)
            if run is not None and bound.dims.locate(parameter.value, run) is not None:
                by_factor[run[0]].append((parameter, dim, run))
    alike: dict[tuple[tuple[str, int, tuple[Size, ...]], ...], list[tuple[Parameter, int, Factors]]] = defaultdict(list)
    for members in by_factor.values():
        key = {(wild(p.name), dim, p.value.shape): None for p, dim, _ in members}
        alike[tuple(key)] += members
    roles = Roles(bound)
    return tuple(Cut(tuple(_groups(bound, members, roles))) for members in alike.values())


def _groups(bound: Bound, members: Iterable[tuple[Parameter, int, Factors]], roles: Roles) -> Iterator[Group]:
    places: dict[tuple[str, int], list[tuple[Parameter, Factors]]] = defaultdict(list)
    for parameter, dim, run in members:
        places[wild(parameter.name), dim].append((parameter, run))
    for (path, dim), found in places.items():
        first, run = found[0]
        own = parameter_dims(bound.graph.modules, first)
        yield Group(
            wild=path,
            dim=dim,
            spoken=own[dim] if dim < len(own) else dim,
            names=tuple(p.name for p, _ in found),
            pins={p.value: Pin(((S(*run),),)) for p, run in found},
            nbytes=sum(bytes_of(p) for p, _ in found),
            role=roles.of(first.value, dim, run),
        )


def bytes_of(parameter: Parameter) -> int:
    """Bytes of a parameter on one device."""
    count = parameter.value.dtype.itemsize
    for size in parameter.value.shape:
        assert isinstance(size, int)
        count *= size
    return count


class Roles:
    """What cutting a dim of a parameter means, read off the first op that uses it."""

    def __init__(self, bound: Bound) -> None:
        self.bound = bound
        self.users: dict[Value, Node] = {}
        for node in bound.graph.nodes:
            for operand in node.operands:
                self.users.setdefault(operand, node)
        self.heads = frozenset(self._heads())

    def of(self, value: Value, dim: int, run: Factors) -> str:
        """A phrase: what each rank does with its block."""
        node, signature = self._product(value)
        if node is None or not isinstance(signature, Signature):
            return "own block"
        letters = signature.operands[node.operands.index(value)][dim] if value in node.operands else ()
        heads = " of whole heads" if set(run) & self.heads else ""
        if set(letters) & signature.contracted:
            return f"rows{heads}: leaves partial sums"
        if set(letters) & signature.blocked:
            return "own rows of the table" if len(value.shape) > 1 else "own elements"
        return f"columns{heads}" if len(value.shape) > 1 else "goes with the columns"

    def _product(self, value: Value) -> tuple[Node | None, Signature | object | None]:
        """The op that uses the parameter, past views of it."""
        node = self.users.get(value)
        while node is not None:
            found = lookup(node)
            if found is None or not found.view or len(node.operands) != 1:
                return node, self.bound.dims.signature(node)
            node = self.users.get(node.results[0])
        return None, None

    def _heads(self) -> Iterator[Factor]:
        """Factors that attention runs over independently: its rule's own letters say which."""
        for node in self.bound.graph.nodes:
            if "attention" in str(node.op):
                letters = self.bound.dims.letters.get(node, {})
                yield from (f for letter in ("h", "g") for f in letters.get(letter, ()))
