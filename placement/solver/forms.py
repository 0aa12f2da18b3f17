"""What is alike in a program: ops and values of one form have the same options, prices and conversions.

Models repeat their layers, and so do their problems. The factors of a value are numbered in the order of its dims,
those of an op in the order of its operands and results; what is equal in these numbers is equal but for the names of
its factors. A form is such an equality class, and has a small integer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, overload

from placement.graph.ir import Node, Value
from placement.graph.segments import Factor, Factors, flattened
from placement.rules import Strategy
from placement.solver.sums import Sums
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
        self.sums = Sums(bound)
        self.keeping = keeping
        self.alike = keeping.alike
        self.intern = self.alike.intern
        self.edges: dict[object, list[tuple[tuple[int, int], Edge]]] = {}  # see `pricing`
        self._numbers: dict[Node | Value, Numbers] = {}
        self._flat: dict[Value, tuple[Factor, ...]] = {}
        self._values: dict[Value, int] = {}
        self._nodes: dict[Node, int] = {}
        self.known: dict[Context, dict[Node, Offered]] = {}  # what ops may choose from on an axis, see `uses`
        self._first: dict[object, tuple[Node, Offered]] = {}
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
            sizes = tuple([self.alike.size(factor.size) for factor in self.numbers(value)])
            nestings = tuple([_nesting(factors) for factors in dims])
            orders = self._orders(value) if self.bound.mesh.zigzag else ()
            key = (self.nbytes(value), self.sums.likeness(value), value.requires_grad, sizes, nestings, orders)
            self._values[value] = self.intern(key)
        return self._values[value]

    def _orders(self, value: Value) -> tuple[object, ...]:
        """What axes cut in zigzag order of the value, in the numbers of its factors."""
        numbers, ordered = self.numbers(value), self.bound.mesh.zigzag
        runs = ((axis, run) for axis, run in ordered if all(factor in numbers for factor in run))
        return tuple(sorted((axis, *[numbers[f] for f in run]) for axis, run in runs))  # type: ignore[index]

    def of_node(self, node: Node) -> int:
        """Equal for ops that do the same, whose factors meet alike, and that keep the same for the backward."""
        if node not in self._nodes:
            met = tuple([(self.seen(node, v), self.of_value(v)) for v in (*node.operands, *node.results)])
            key = self.alike.of(node), met, self.keeping.likeness(node), self.sums.of_op(node)
            self._nodes[node] = self.intern(key)
        return self._nodes[node]

    def offered(
        self, node: Node, context: Context, asked: Callable[[], object], make: Callable[[], tuple[Strategy, ...]]
    ) -> Offered:
        """What ``make`` gives, and its form: equal for ops of one form with the same strategies.

        Of ops of one form for which ``asked`` is equal the first is made, and the others are as that one.
        """
        sizes = tuple([(factor.size, factor.piece) for factor in self.numbers(node)])
        key = self.of_node(node), context, sizes, asked()
        if key not in self._first:
            made = make()
            form = tuple(
                [(*self.kinds(node, (*s.operands, *s.results)), s.implementation, s.collectives) for s in made]
            )
            self._first[key] = node, (made, self.intern(form))
            return self._first[key][1]
        first, (made, form) = self._first[key]
        return AsOwn(made, tuple(self.numbers(first)), tuple(self.numbers(node))), form


class AsOwn(Sequence[Strategy]):
    """The strategies of the first op of a form with the factors of another: named when somebody looks."""

    __slots__ = ("_form", "_made", "_own", "_strategies", "_types")

    def __init__(self, strategies: Sequence[Strategy], form: Sequence[Factor], own: Sequence[Factor]) -> None:
        self._strategies, self._form, self._own = strategies, form, own
        self._made: dict[int, Strategy] = {}
        self._types: dict[Type, Type] = {}

    def __len__(self) -> int:
        return len(self._strategies)

    @overload
    def __getitem__(self, index: int) -> Strategy: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Strategy]: ...
    def __getitem__(self, index: int | slice) -> Strategy | Sequence[Strategy]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        if index not in self._made:
            s = self._strategies[index]
            own = self._named(s.operands), self._named(s.results)
            names = matching(self._form, self._own) if s.whole else {}
            whole = tuple(names[factor] for factor in s.whole)
            self._made[index] = Strategy(*own, s.implementation, s.collectives, s.code, whole, s.met)
        return self._made[index]

    def types(self, place: int) -> list[Type]:
        """The type of the operand or result at ``place`` in each strategy."""
        count = len(self._strategies[0].operands) if self._strategies else 0
        found = [s.operands[place] if place < count else s.results[place - count] for s in self._strategies]
        return list(self._named(found))

    def _named(self, kinds: Sequence[Type]) -> tuple[Type, ...]:
        missing = [kind for kind in kinds if kind not in self._types]
        if missing:
            names = matching(self._form, self._own)
            self._types.update((kind, renamed(kind, names)) for kind in missing)
        return tuple([self._types[kind] for kind in kinds])


Offered = tuple[Sequence[Strategy], int]
"""Strategies, and their form: equal where they are equal in the numbers of their ops' factors."""


def _nesting(factors: Factors) -> object:
    """How the factors of a dim lie: their number, and of sums what is in each segment."""
    inside = tuple([(i, *map(_nesting, f.segments)) for i, f in enumerate(factors) if f.segments])
    return (len(factors), inside) if inside else len(factors)


def renamed(kind: Type, names: Mapping[Factor, Factor]) -> Type:
    """The type with the factors of an alike value."""
    return Type(kind.kind, tuple(names[f] for f in kind.over), stored=kind.stored) if kind.over else kind  # type: ignore[index]


def matching(form: Sequence[Factor], own: Sequence[Factor]) -> dict[Factor, Factor]:
    """The factors of an alike value by those of the first one of its form."""
    return dict(zip(form, own, strict=True))
