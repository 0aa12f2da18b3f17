"""Dims as ordered products of factors, inferred over the whole graph.

Ops unify the factors of the dims that they align; a view that cuts a dim cuts its factor everywhere
(``q_proj.out`` becomes kv_heads · group · head_dim). So ``Shard(seq)`` means the same factor before and
after any transpose or reshape. Inference is a union-find whose nodes may also be replaced by a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import sympy

from placement.graph.ir import Graph, Node, Size, Value
from placement.graph.signature import Dim, Regrouping, Signature

SignatureOf = Callable[[Node], Signature | Regrouping | None]


@dataclass(frozen=True, slots=True)
class Factor:
    """A part of dims. ``piece``: it counts equal pieces that an op takes apart, so no shard cuts it first."""

    id: int
    size: Size
    name: str
    piece: bool = False

    def __hash__(self) -> int:
        return self.id  # types over factors are keys everywhere: no need to hash an expression for each

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__


Factors = tuple[Factor, ...]


_Structure = Signature | Regrouping | None
_Places = dict[Factor, tuple[int, int] | None]


@dataclass(frozen=True, slots=True, eq=False)
class Dims:
    """The factors of every dim of every value, of every letter of every node, and of every name."""

    values: Mapping[Value, tuple[Factors, ...]]
    letters: Mapping[Node, Mapping[str, Factors]]
    names: Mapping[str, Factors]
    opaque: frozenset[Node]  # nodes that no factor passes through: their regrouping cuts across factors
    signatures: Mapping[Node, _Structure]
    _places: dict[Value, _Places] = field(default_factory=dict, init=False, repr=False)

    def signature(self, node: Node) -> _Structure:
        """The index structure of ``node``, None where no rule knows it."""
        return self.signatures[node]

    def of(self, value: Value) -> tuple[Factors, ...]:
        """The factors of each dim of ``value``, outermost first."""
        return self.values[value]

    def locate(self, value: Value, run: Factors) -> tuple[int, Factors] | None:
        """The dim of ``value`` that holds ``run`` side by side and the factors before it in that dim.

        None where there is no such dim or a factor of the run occurs twice in the value.
        """
        places = self._places.get(value)
        if places is None:
            places = self._places[value] = _places(self.values[value])
        first = places.get(run[0])
        if first is None:
            return None
        dim, start = first
        for offset, factor in enumerate(run):
            if places.get(factor) != (dim, start + offset):
                return None
        return dim, self.values[value][dim][:start]

    def describe(self, value: Value) -> str:
        """``batch | seq | heads·head_dim``."""
        return " | ".join("·".join(map(str, f)) or "1" for f in self.values[value]) or "scalar"


def _places(dims: Sequence[Factors]) -> _Places:
    """Where each factor stands: its dim and its position there, None for one that occurs twice."""
    places: _Places = {}
    for dim, factors in enumerate(dims):
        for position, factor in enumerate(factors):
            places[factor] = None if factor in places else (dim, position)
    return places


class MismatchError(ValueError):
    """Two dims that an op aligns cannot be the same product of factors."""


# -- sizes as monomials: comparing and dividing them is what inference does all day ----------------

_Monomial = tuple[int, tuple[sympy.Expr, ...]]


def _monomial(size: Size, cache: dict[Size, _Monomial]) -> _Monomial:
    if isinstance(size, int):
        return size, ()
    if size not in cache:
        coefficient, rest = size.as_coeff_Mul()
        atoms: list[sympy.Expr] = []
        for base, power in rest.as_powers_dict().items():
            if isinstance(power, sympy.Integer) and power > 0:
                atoms += [base] * int(power)
            elif base != 1:
                atoms.append(base**power)
        whole = coefficient.is_Integer and coefficient > 0
        cache[size] = (int(coefficient), tuple(sorted(atoms, key=str))) if whole else (1, (size,))
    return cache[size]


def _quotient(left: _Monomial, right: _Monomial) -> _Monomial | None:
    """Left / right where that is whole."""
    if left[0] % right[0]:
        return None
    rest = list(left[1])
    for atom in right[1]:
        if atom not in rest:
            return None
        rest.remove(atom)
    return left[0] // right[0], tuple(rest)


def _size(monomial: _Monomial) -> Size:
    return monomial[0] if not monomial[1] else sympy.Mul(monomial[0], *monomial[1])


_ONE: _Monomial = (1, ())


@dataclass(slots=True)
class _Part:
    """A factor while it is being inferred; ``became`` is what replaced it."""

    id: int
    size: _Monomial
    became: tuple[_Part, ...] | None = None
    piece: bool = False
    names: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Inference:
    signature_of: SignatureOf
    count: int = 0
    cache: dict[Size, _Monomial] = field(default_factory=dict)
    values: dict[Value, list[list[_Part]]] = field(default_factory=dict)
    letters: dict[Node, dict[str, list[_Part]]] = field(default_factory=dict)
    opaque: set[Node] = field(default_factory=set)
    signatures: dict[Node, _Structure] = field(default_factory=dict)

    # -- parts ----------------------------------------------------------------------------------

    def fresh(self, size: _Monomial) -> list[_Part]:
        if size == _ONE:
            return []
        self.count += 1
        return [_Part(self.count, size)]

    def dims(self, shape: Sequence[Size]) -> list[list[_Part]]:
        return [self.fresh(_monomial(s, self.cache)) for s in shape]

    def resolve(self, parts: Iterable[_Part]) -> list[_Part]:
        result: list[_Part] = []
        for part in parts:
            if part.became is None:
                result.append(part)
            else:
                part.became = tuple(self.resolve(part.became))
                result += part.became
        return result

    def split(self, part: _Part, first: _Monomial, second: _Monomial) -> list[_Part]:
        parts = self.fresh(first) + self.fresh(second)
        part.became = tuple(parts)
        return parts

    def unify(self, left: Sequence[_Part], right: Sequence[_Part]) -> None:
        """Make two products the same; raises MismatchError where their borders do not fit."""
        a = [p for p in self.resolve(left) if p.size != _ONE]
        b = [p for p in self.resolve(right) if p.size != _ONE]
        while a and b:
            p, q = a[0], b[0]
            if p is q:
                a, b = a[1:], b[1:]
            elif p.size == q.size:
                q.became = (p,)
                p.piece |= q.piece
                a, b = self.resolve(a[1:]), self.resolve(b[1:])
            elif (rest := _quotient(p.size, q.size)) is not None:
                self._cut_as(p, q, rest)
                a, b = self.resolve(a), self.resolve(b)
            elif (rest := _quotient(q.size, p.size)) is not None:
                self._cut_as(q, p, rest)
                a, b = self.resolve(a), self.resolve(b)
            else:
                raise MismatchError(f"{_size(p.size)} against {_size(q.size)}")
        if a or b:
            raise MismatchError("one has more elements than the other")

    def _cut_as(self, whole: _Part, first: _Part, rest: _Monomial) -> None:
        (second,) = self.fresh(rest)
        whole.became = (first, second)

    # -- regrouping -----------------------------------------------------------------------------

    def regroup(
        self, dims: Sequence[Sequence[_Part]], shape: Sequence[_Monomial], inferred: int | None
    ) -> list[list[_Part]]:
        """The parts of ``dims`` under new borders; raises MismatchError where a border cuts across a part."""
        queue = [p for dim in dims for p in self.resolve(dim)]
        result: list[list[_Part]] = []
        for index, size in enumerate(shape):
            dim: list[_Part] = []
            need = size
            if size == _ONE and index == inferred:
                dim = self._unit(queue)
            while need != _ONE:
                queue = [p for p in self.resolve(queue) if p.size != _ONE or p in dim]
                if not queue:
                    raise MismatchError("the view has more elements than its source")
                part = queue.pop(0)
                if (rest := _quotient(need, part.size)) is not None:
                    dim.append(part)
                    need = rest
                elif (rest := _quotient(part.size, need)) is not None:
                    first, second = self.split(part, need, rest)
                    dim.append(first)
                    queue.insert(0, second)
                    need = _ONE
                else:
                    raise MismatchError(f"{_size(part.size)} cut at {_size(need)}")
            result.append(dim)
        return result

    def _unit(self, queue: list[_Part]) -> list[_Part]:
        """An inferred count that happens to be one is a factor too: one KV head on two ranks is one head too few."""
        if not queue:
            return []
        follower = queue[0]
        self.count += 2
        unit, copy = _Part(self.count - 1, _ONE), _Part(self.count, follower.size, piece=follower.piece)
        follower.became = (unit, copy)
        queue[:1] = [copy]
        return [unit]

    # -- nodes ----------------------------------------------------------------------------------

    def visit(self, node: Node) -> None:
        signature = self.signatures[node] = self.signature_of(node)
        if isinstance(signature, Regrouping):
            self.visit_regrouping(node, signature)
        elif signature is None:
            self.opaque.add(node)
            for result in node.results:
                self.values[result] = self.dims(result.shape)
        else:
            self.visit_signature(node, signature)

    def visit_regrouping(self, node: Node, signature: Regrouping) -> None:
        (result,) = node.results
        shape = [_monomial(s, self.cache) for s in signature.shape]
        try:
            self.values[result] = self.regroup(self.values[node.operands[0]], shape, signature.inferred)
        except MismatchError:
            self.opaque.add(node)
            self.values[result] = self.dims(result.shape)

    def visit_signature(self, node: Node, signature: Signature) -> None:
        letters: dict[str, list[_Part]] = {}
        unlike: set[str] = set()
        for operand, dims in zip(node.operands, signature.operands, strict=True):
            for dim, parts in zip(dims, self.values[operand], strict=True):
                for letter, own in self.apart(node, dim, parts, signature).items():
                    if letter not in letters:
                        letters[letter] = own
                        continue
                    try:
                        self.unify(letters[letter], own)
                    except MismatchError:
                        unlike.add(letter)
        for result, dims in zip(node.results, signature.results, strict=True):
            made: list[list[_Part]] = []
            for dim, size in zip(dims, result.shape, strict=True):
                for letter in dim:
                    if letter not in letters:
                        own = size if len(dim) == 1 else signature.sizes[letter]
                        letters[letter] = self.fresh(_monomial(own, self.cache))
                made.append([p for letter in dim for p in letters[letter]])
            self.values[result] = made
        for letter in signature.pieces:
            for part in self.resolve(letters[letter]):
                part.piece = True
        # Dims that cannot be the same product run together only as a whole: nothing cuts their letter.
        self.letters[node] = {letter: parts for letter, parts in letters.items() if letter not in unlike}

    def apart(self, node: Node, dim: Dim, parts: list[_Part], signature: Signature) -> dict[str, list[_Part]]:
        if len(dim) <= 1:
            return dict.fromkeys(dim, parts)
        sizes = [_monomial(signature.sizes[letter], self.cache) for letter in dim]
        try:
            return dict(zip(dim, self.regroup([parts], sizes, None), strict=True))
        except MismatchError:
            self.opaque.add(node)
            return {letter: self.fresh(size) for letter, size in zip(dim, sizes, strict=True)}


@dataclass(frozen=True, slots=True)
class NamedDims:
    """A statement that names the dims of a value; ``where`` goes into the error."""

    value: Value
    names: tuple[str, ...]
    where: object = None


class NameClashError(ValueError):
    """One name for dims that cannot be the same."""

    def __init__(self, name: str, value: Value, where: object) -> None:
        super().__init__(f"dim '{name}' of {value.name} does not fit an earlier dim of that name")
        self.name, self.value, self.where = name, value, where


def infer(graph: Graph, signature_of: SignatureOf, named: Sequence[NamedDims] = ()) -> Dims:
    """The factors of every value of ``graph``. Raises NameClashError where one name is given to unequal dims."""
    work = _Inference(signature_of)
    for item in (*graph.inputs, *graph.parameters):
        work.values[item.value] = work.dims(item.value.shape)
    for node in graph.nodes:
        work.visit(node)
    names: dict[str, list[_Part]] = {}
    for statement in named:
        for name, parts in zip(statement.names, work.values[statement.value], strict=True):
            try:
                if name in names:
                    work.unify(names[name], parts)
                names.setdefault(name, parts)
            except MismatchError as error:
                raise NameClashError(name, statement.value, statement.where) from error
    return _freeze(work, names)


def _freeze(work: _Inference, names: Mapping[str, list[_Part]]) -> Dims:
    label: dict[int, str] = {}
    for name, parts in names.items():
        resolved = work.resolve(parts)
        for index, part in enumerate(resolved):
            label.setdefault(part.id, name if len(resolved) == 1 else f"{name}.{index}")
    made: dict[int, Factor] = {}
    # What an op takes apart counts pieces of a dim only where the dim goes on after it.
    counting = {
        part.id for dims in work.values.values() for dim in dims for part in work.resolve(dim)[:-1] if part.piece
    }

    def freeze(parts: Iterable[_Part]) -> Factors:
        result = []
        for part in work.resolve(parts):
            if part.id not in made:
                made[part.id] = Factor(
                    part.id, _size(part.size), label.get(part.id, f"f{part.id}"), part.id in counting
                )
            result.append(made[part.id])
        return tuple(result)

    return Dims(
        values={value: tuple(map(freeze, dims)) for value, dims in work.values.items()},
        letters={node: {k: freeze(v) for k, v in letters.items()} for node, letters in work.letters.items()},
        names={name: freeze(parts) for name, parts in names.items()},
        opaque=frozenset(work.opaque),
        signatures=work.signatures,
    )
