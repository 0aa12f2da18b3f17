"""What an op makes of a dim that is longer than it was given: which part of its result is still right.

Where a call's length of a dim is not divisible, the program runs at a longer one. A ``Fact`` says of a value of that
run where the ones of the given length are in it, and what is known of the elements past it. ``Step`` finds the facts of
a node's results. That mostly follows from the signature: a letter of operands and results keeps what is past the length
past it, and a sum over a letter is right if zeros are there. ``Rule.past`` says it of ops that look along the dim, and
``Rule.bounds`` of which numbers an op gives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import sympy
import torch

from placement.graph._torch import is_overload
from placement.graph.ir import Node, Size, Value, leaves, substitute
from placement.graph.signature import Dim, Regrouping, Signature
from placement.rules.bounds import NO, Range, number, whatever
from placement.rules.core import Rule, arguments, lookup

Region = frozenset[int]
"""The elements past the length in these dims, and before it in all others."""


@dataclass(frozen=True, slots=True)
class Place:
    """A dim of ``outer · (length + more) · inner``."""

    outer: Size = 1
    more: int = 0
    inner: Size = 1

    @property
    def alone(self) -> bool:
        """Whether nothing else is in the dim."""
        return self.outer == self.inner == 1


@dataclass(frozen=True, slots=True)
class Fact:
    """A value of the longer run: its dims that are longer, and what is known of its elements, region by region."""

    places: Mapping[int, Place] = field(default_factory=dict)
    ranges: Mapping[Region, Range] = field(default_factory=dict)

    @property
    def regions(self) -> Iterator[Region]:
        """All there are, first that of the elements that the value has at the given length."""
        dims = sorted(self.places)
        return (frozenset(r) for n in range(len(dims) + 1) for r in itertools.combinations(dims, n))


NOTHING = Fact()


class StuckError(Exception):
    """The results would not be those of the given length.

    ``wants``: of which value to have which constant past it. ``tells``: they would be if the op was told the length.
    """

    def __init__(
        self, why: str, wants: tuple[Value, ...] = (), constants: tuple[float, ...] = (), *, tells: bool = False
    ) -> None:
        super().__init__(why)
        self.wants, self.constants, self.tells = wants, constants, tells


def pointwise(node: Node) -> bool:
    """Whether torch says that the op treats every element by itself."""
    return is_overload(node.op) and torch.Tag.pointwise in node.op.tags


Past = Callable[["Step"], list[Fact]]


class Sizes:
    """Sizes over one symbol, the length; and between which lengths a run is the model's own."""

    def __init__(self, symbol: sympy.Symbol) -> None:
        self.symbol = symbol
        self.least = 1  # of a given length
        self.most: int | None = None  # of a padded one
        self._depends: dict[sympy.Basic, bool] = {}

    def depends(self, size: Any) -> bool:
        """Whether a size is another one where the length is."""
        if not isinstance(size, sympy.Basic):
            return False
        if size not in self._depends:
            self._depends[size] = self.symbol in size.free_symbols
        return self._depends[size]

    def more(self, size: Any) -> int | None:
        """What ``size`` has more than the length; None where it is none."""
        rest = size - self.symbol if self.depends(size) else None
        return int(rest) if isinstance(rest, sympy.Integer) else None

    def at_least(self, length: int) -> None:
        """Shorter ones given would not be right."""
        self.least = max(self.least, length)

    def at_most(self, length: float) -> None:
        """Longer ones padded have no place in the program."""
        self.most = int(length) if self.most is None else min(self.most, int(length))


@dataclass(frozen=True, slots=True)
class Step:
    """One node, and the facts of its operands. ``found`` has those of values of which something is to be said.

    ``tells``: the length is told to ops that would rather have a constant past it.
    """

    node: Node
    found: Mapping[Value, Fact]
    sizes: Sizes
    tells: bool = False
    rule: Rule | None = field(init=False)
    given: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", lookup(self.node))
        object.__setattr__(self, "given", arguments(self.node))

    def facts(self) -> list[Fact]:
        """Of each result. Raises StuckError."""
        rule = self.rule
        made = rule.past(self) if rule and rule.past else self.follow()
        for value, fact in zip(self.node.results, made, strict=True):
            for dim, size in enumerate(value.shape):
                if self.sizes.depends(size) != (dim in fact.places):
                    raise StuckError(f"makes a dim of {size} elements of it")
        return made

    # -- what handlers ask --------------------------------------------------------------------------

    def fact(self, value: Value) -> Fact:
        """What is known of a value."""
        return self.found.get(value, NOTHING)

    def place(self, value: Value, dim: int) -> Place | None:
        """Of a dim that is longer; None where it is not. Raises StuckError where it is only a part of the dim."""
        found = self.fact(value).places.get(dim)
        if found is not None and not found.alone:
            raise StuckError("takes it apart where it is merged with another dim")
        return found

    def range(self, value: Value, region: Region = frozenset()) -> Range:
        """Between which numbers the elements in a region are."""
        return self.fact(value).ranges.get(region, whatever(value.dtype))

    @property
    def blocked(self) -> frozenset[str]:
        """Letters that the op needs whole."""
        structure = self.rule.signature(self.node) if self.rule else None
        return structure.blocked if isinstance(structure, Signature) else frozenset()

    # -- what follows from signatures ---------------------------------------------------------------

    def follow(self, passed: frozenset[str] = frozenset()) -> list[Fact]:
        """By the signature. ``passed``: letters of which the caller knows that the op may look along them."""
        structure = self.rule.signature(self.node) if self.rule else None
        if structure is None:
            raise StuckError("has no rule that says what it does along it")
        self._check_numbers()
        if isinstance(structure, Regrouping):
            return [regrouped(self.node.operands[0], self.fact(self.node.operands[0]), structure, self.sizes)]
        letters = self._letters(structure)
        self._check_letters(structure, letters, passed)
        return [self._result(structure, letters, k) for k in range(len(self.node.results))]

    def _check_numbers(self) -> None:
        """The length may be an argument where it is a size, and not where it is a number to compute with."""
        rule = self.rule
        known = {rule.shape, rule.piece, rule.pieces, *rule.along} if rule else set[str | None]()
        for name, value in self.given.items():
            if name not in known and any(map(self.sizes.depends, leaves(value))):
                raise StuckError("computes with the length as a number")

    def _letters(self, signature: Signature) -> dict[str, Place]:
        """Which letters are longer."""
        letters: dict[str, Place] = {}
        for value, dims in zip(self.node.operands, signature.operands, strict=True):
            for dim, place in self.fact(value).places.items():
                letter, own = self._letter(dims[dim], place, signature)
                if letters.setdefault(letter, own) != own:
                    raise StuckError("meets two lengths")
        for value, dims in zip(self.node.operands, signature.operands, strict=True):
            for dim, inside in enumerate(dims):
                if any(letter in letters for letter in inside) and dim not in self.fact(value).places:
                    raise StuckError("meets two lengths")
        return letters

    def _letter(self, dim: Dim, place: Place, signature: Signature) -> tuple[str, Place]:
        """Which letter of a dim is longer, and what that is of."""
        if len(dim) == 1:
            return dim[0], place
        longer = [letter for letter in dim if self.sizes.depends(signature.sizes.get(letter))]
        if len(longer) != 1:
            raise StuckError("takes it apart")
        whole = self._around(dim, longer[0], Place(), signature)
        if (whole.outer, whole.inner) != (place.outer, place.inner):
            raise StuckError("takes it apart")
        return longer[0], Place(more=place.more)

    def _around(self, dim: Dim, letter: str, place: Place, signature: Signature) -> Place:
        """The place of a dim of which a letter has ``place``."""
        at = dim.index(letter)
        outer, inner = place.outer, place.inner
        for other in dim[:at]:
            outer *= signature.sizes[other]
        for other in dim[at + 1 :]:
            inner *= signature.sizes[other]
        return Place(outer, place.more, inner)

    def _check_letters(self, signature: Signature, letters: Mapping[str, Place], passed: frozenset[str]) -> None:
        for letter in letters:
            if letter in passed:
                continue
            if letter in signature.blocked:
                raise StuckError("looks along all of it")
            if letter in signature.contracted:
                self._check_sum(signature, letter)

    def _check_sum(self, signature: Signature, letter: str) -> None:
        """A sum over products is right if a factor is zero past the length."""
        having: list[Value] = []
        for index in sorted(signature.linear):
            for dim, inside in enumerate(signature.operands[index]):
                if letter in inside:
                    having.append(self.node.operands[index])
                    if self.range(having[-1], frozenset({dim})) == NO:
                        return
        raise StuckError("sums over what is past its end", tuple(having), (0,))

    def _result(self, signature: Signature, letters: Mapping[str, Place], k: int) -> Fact:
        value, dims = self.node.results[k], signature.results[k]
        places: dict[int, Place] = {}
        for dim, inside in enumerate(dims):
            longer = [letter for letter in inside if letter in letters]
            if longer:
                places[dim] = self._around(inside, longer[0], letters[longer[0]], signature)
            elif self.sizes.depends(value.shape[dim]):
                more = self.sizes.more(value.shape[dim])
                if more is None or not (self.rule and self.rule.shape):
                    raise StuckError(f"makes a dim of {value.shape[dim]} elements of it")
                places[dim] = Place(more=more)
        fact = Fact(places)
        ranges = {r: self._range(signature, dims, r) for r in fact.regions} if len(self.node.results) == 1 else {}
        return Fact(places, {r: known for r, known in ranges.items() if known != whatever(value.dtype)})

    def _range(self, signature: Signature, dims: tuple[Dim, ...], region: Region) -> Range:
        """Of a result, from those of the operands in the same region."""
        (result,) = self.node.results
        inside = {letter for dim in region for letter in dims[dim]}
        operands = [
            self.range(v, frozenset(d for d in self.fact(v).places if inside.intersection(own[d])))
            for v, own in zip(self.node.operands, signature.operands, strict=True)
        ]
        rule = self.rule
        assert rule is not None
        if rule.view:
            return operands[0]
        constants = [x.constant for x in operands]
        if any(c is not None for c in constants) and pointwise(self.node):
            # What is no position's own, as a padding of zeros, must not be divided by: others are tried at 1.
            made = self._computed([1 if c is None else c for c in constants])
            if None not in constants:
                return made
        if rule.bounds is None:
            return whatever(result.dtype)
        return rule.bounds(self.node, self._by_name(iter(operands)))

    def _by_name(self, operands: Iterator[Range]) -> dict[str, Range]:
        found: dict[str, Range] = {}
        for name, value in self.given.items():
            if isinstance(value, Value):
                found[name] = next(operands)
            elif isinstance(value, int | float):
                found[name] = number(value)
        return found

    def _computed(self, numbers: list[float]) -> Range:
        """The number that an op gives for numbers. Raises StuckError where it is none."""
        given = iter(numbers)

        def one(leaf: Any) -> Any:
            return torch.tensor(next(given), dtype=leaf.dtype) if isinstance(leaf, Value) else leaf

        args = substitute(self.node.args, one)
        kwargs = {name: substitute(value, one) for name, value in self.node.kwargs.items()}
        made = float(self.node.op(*args, **kwargs))
        if math.isnan(made) or made == math.inf:
            raise StuckError("gives no number for what it is padded with")
        return number(made)


# -- regrouping ---------------------------------------------------------------------------------------


def regrouped(source: Value, fact: Fact, structure: Regrouping, sizes: Sizes) -> Fact:
    """The same elements under another shape: dims in the one that make dims of the other."""
    places: dict[int, Place] = {}
    moved: dict[int, int] = {}
    for before, after in _groups(source.shape, structure.shape):
        longer = [dim for dim in before if dim in fact.places]
        if not longer:
            continue
        if len(longer) > 1:
            raise StuckError("merges it with itself")
        (dim,) = longer
        place = fact.places[dim]
        outer = _product(source.shape[d] for d in before if d < dim) * place.outer
        for new in after:
            size = structure.shape[new]
            if sizes.depends(size):
                unit = sizes.symbol + place.more
                inner = _quotient(size, outer * unit)
                if inner is None:
                    raise StuckError(f"cuts it in {size} elements")
                places[new], moved[dim] = Place(outer, place.more, inner), new
                break
            outer = _quotient(outer, size)
            if outer is None:
                raise StuckError("cuts it in parts")
        else:
            raise StuckError("cuts it in parts")
    ranges = {frozenset(moved[d] for d in region): known for region, known in fact.ranges.items()}
    return Fact(places, ranges)


def _groups(before: tuple[Size, ...], after: tuple[Size, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Dims of one shape, and those of the other that have the same elements."""
    symbols = {s for size in (*before, *after) if isinstance(size, sympy.Basic) for s in size.free_symbols}
    primes = dict(zip(sorted(symbols, key=str), (1000003, 1000033, 1000037, 1000039, 1000081), strict=False))

    def at(size: Size) -> int:
        return int(size.xreplace(primes)) if isinstance(size, sympy.Basic) else size  # type: ignore[arg-type]

    left, right = ([d for d, size in enumerate(shape) if size != 1] for shape in (before, after))
    while left and right:
        mine, its = [left.pop(0)], [right.pop(0)]
        have, want = at(before[mine[0]]), at(after[its[0]])
        while have != want:
            if have < want and left:
                mine.append(left.pop(0))
                have *= at(before[mine[-1]])
            elif want < have and right:
                its.append(right.pop(0))
                want *= at(after[its[-1]])
            else:
                raise StuckError("regroups it")
        yield mine, its
    if left or right:
        raise StuckError("regroups it")


def _product(sizes: Iterator[Size]) -> Any:
    made: Any = 1
    for size in sizes:
        made *= size
    return made


@cache
def _quotient(over: Any, under: Any) -> Any:
    """The size that times ``under`` is ``over``; None where there is none."""
    found: Any = sympy.cancel(sympy.sympify(over) / sympy.sympify(under))
    if not found.is_polynomial(*found.free_symbols) or not all(
        c.is_Integer for c in found.as_coefficients_dict().values()
    ):
        return None
    return int(found) if found.is_Integer else found
