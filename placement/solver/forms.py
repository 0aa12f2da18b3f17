"""What is alike in a program: ops and values of one form have the same options, prices and conversions.

Models repeat their layers, and so do their problems. The factors of a value are numbered in the order of its dims,
those of an op in the order of its operands and results; what is equal in these numbers is equal but for the names of
its factors. A form is such an equality class, and has a small integer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from placement.graph.ir import Node, Value
from placement.graph.segments import Factor, Factors, flattened
from placement.rules import Strategy
from placement.types import Type

if TYPE_CHECKING:
    from placement.rules import Context
    from placement.solver.bind import Bound
    from placement.solver.keeping import Keeping
    from placement.solver.mesh import Edge

Numbers = Mapping[Factor, int]


class Forms:
    """The forms of one program's ops and values, on whatever axes of its mesh."""

    def __init__(self, bound: Bound, keeping: Keeping) -> None:
        self.bound = bound
        self.keeping = keeping
        self.alike = keeping.alike
        self.intern = self.alike.intern
        self.edges: dict[object, list[tuple[tuple[int, int], Edge]]] = {}  # see `pricing`
        self._numbers: dict[Node | Value, Numbers] = {}
        self._flat: dict[Value, tuple[Factor, ...]] = {}
        self._values: dict[Value, int] = {}
        self._nodes: dict[Node, int] = {}
        self._offered: dict[tuple[Node, Context], tuple[tuple[Strategy, ...], int]] = {}
        self._first: dict[object, Node] = {}
        self._bytes: dict[Value, int] = {}

    def nbytes(self, value: Value) -> int:
        """The full value's bytes."""
        if value not in self._bytes:
            self._bytes[value] = prod(self.alike.shape(value)) * value.dtype.itemsize
        return self._bytes[value]

    # -- numbers --------------------------------------------------------------------------------

    def factors(self, value: Value) -> tuple[Factor, ...]:
        """The factors of a value, dim by dim, those inside of sums after these."""
        if value not in self._flat:
            self._flat[value] = tuple(factor for dim in self.bound.dims.of(value) for factor in flattened(dim))
        return self._flat[value]

    def numbers(self, owner: Node | Value) -> Numbers:
        """The number of each factor of an op or a value."""
        if owner not in self._numbers:
            values = (*owner.operands, *owner.results) if isinstance(owner, Node) else (owner,)
            found: dict[Factor, int] = {}
            for value in values:
                for factor in self.factors(value):
                    found.setdefault(factor, len(found))
            self._numbers[owner] = found
        return self._numbers[owner]

    def seen(self, owner: Node | Value, value: Value) -> tuple[int, ...]:
        """The owner's numbers of the value's factors."""
        numbers = self.numbers(owner)
        return tuple([numbers[factor] for factor in self.factors(value)])

    def kinds(self, owner: Node | Value, kinds: Iterable[Type]) -> tuple[object, ...]:
        """Types in the numbers of their owner."""
        numbers = self.numbers(owner)
        return tuple([(t.kind, t.stored, *[numbers[f] for f in t.over]) if t.over else t.kind for t in kinds])  # type: ignore[index]

    # -- forms ----------------------------------------------------------------------------------

    def of_value(self, value: Value) -> int:
        """Equal for values of equal sizes in equal factors."""
        if value not in self._values:
            dims = self.bound.dims.of(value)
            key = (self.nbytes(value), value.requires_grad, self._sizes(value), tuple(map(_nesting, dims)))
            self._values[value] = self.intern(key)
        return self._values[value]

    def of_node(self, node: Node) -> int:
        """Equal for ops that do the same, whose factors meet alike, and that keep the same for the backward."""
        if node not in self._nodes:
            values = (*node.operands, *node.results)
            met = tuple((self.seen(node, v), tuple(map(_nesting, self.bound.dims.of(v)))) for v in values)
            key = (self.alike.of(node), met, self._sizes(node), self.keeping.likeness(node))
            self._nodes[node] = self.intern(key)
        return self._nodes[node]

    def offered(
        self, node: Node, context: Context, asked: Callable[[], object], make: Callable[[], tuple[Strategy, ...]]
    ) -> tuple[tuple[Strategy, ...], int]:
        """What ``make`` gives, once, and its form: equal for ops of one form with the same strategies.

        Of ops of one form for which ``asked`` is equal the first is made, and the others are as that one.
        """
        key = node, context
        if key not in self._offered:
            sizes = tuple([(factor.size, factor.piece) for factor in self.numbers(node)])
            first = self._first.setdefault((self.of_node(node), context, sizes, asked()), node)
            if first is node:
                found = make()
                form = tuple(
                    [(*self.kinds(node, (*s.operands, *s.results)), s.implementation, s.collectives) for s in found]
                )
                self._offered[key] = found, self.intern(form)
            else:
                known, number = self._offered[first, context]
                self._offered[key] = self._as_own(known, first, node), number
        return self._offered[key]

    def _as_own(self, offered: tuple[Strategy, ...], first: Node, node: Node) -> tuple[Strategy, ...]:
        """The strategies of the first op of a form with the factors of another."""
        names = matching(tuple(self.numbers(first)), tuple(self.numbers(node)))
        types: dict[Type, Type] = {}

        def own(kinds: tuple[Type, ...]) -> tuple[Type, ...]:
            for kind in kinds:
                if kind not in types:
                    types[kind] = renamed(kind, names)
            return tuple([types[kind] for kind in kinds])

        return tuple(
            [Strategy(own(s.operands), own(s.results), s.implementation, s.collectives, s.code) for s in offered]
        )

    def _sizes(self, owner: Node | Value) -> tuple[int, ...]:
        return tuple([self.alike.size(factor.size) for factor in self.numbers(owner)])


def _nesting(factors: Factors) -> object:
    """How the factors of a dim lie: their number, and of sums what is in each segment."""
    inside = tuple((i, *map(_nesting, f.segments)) for i, f in enumerate(factors) if f.segments)
    return (len(factors), inside) if inside else len(factors)


def renamed(kind: Type, names: Mapping[Factor, Factor]) -> Type:
    """The type with the factors of an alike value."""
    return Type(kind.kind, tuple(names[f] for f in kind.over), stored=kind.stored) if kind.over else kind  # type: ignore[index]


def matching(form: Sequence[Factor], own: Sequence[Factor]) -> dict[Factor, Factor]:
    """The factors of an alike value by those of the first one of its form."""
    return dict(zip(form, own, strict=True))
