"""How factors are found: a union-find whose nodes may also be replaced by a product.

A part that ops take apart in unequal pieces stays a part of products, and has segments beside that: it is their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod

import sympy

from placement.graph.ir import Node, Size, Value
from placement.graph.signature import Dim, Regrouping, Signature

Structure = Signature | Regrouping | None
SignatureOf = Callable[[Node], Structure]


class MismatchError(ValueError):
    """Two dims that an op aligns cannot be the same product of factors."""


# -- sizes as monomials: comparing and dividing them is what inference does all day ----------------

Monomial = tuple[int, tuple[sympy.Expr, ...]]


def _monomial(size: Size, cache: dict[Size, Monomial]) -> Monomial:
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


def _quotient(left: Monomial, right: Monomial) -> Monomial | None:
    """Left / right where that is whole; nothing is a multiple of an empty dim."""
    if not right[0] or left[0] % right[0]:
        return None
    rest = list(left[1])
    for atom in right[1]:
        if atom not in rest:
            return None
        rest.remove(atom)
    return left[0] // right[0], tuple(rest)


def size_of(monomial: Monomial) -> Size:
    """The monomial as sizes are written."""
    return monomial[0] if not monomial[1] else sympy.Mul(monomial[0], *monomial[1])


_ONE: Monomial = (1, ())


@dataclass(slots=True)
class Part:
    """A factor while it is being inferred; ``became`` is what replaced it, ``segments`` what a sum consists of."""

    id: int
    size: Monomial
    became: tuple[Part, ...] | None = None
    piece: bool = False
    segments: list[list[Part]] | None = None


def _length(parts: Iterable[Part]) -> int:
    """The size of a product of ints."""
    return prod(part.size[0] for part in parts)


def _in_common(products: Sequence[Sequence[Part]]) -> bool:
    """Whether some part is in all of the products."""
    first, *others = ({part.id for part in product} for product in products)
    return bool(first.intersection(*others))


@dataclass(slots=True)
class Inference:
    """The parts of a program's values, letters and names while its ops are visited in order; then ``join``."""

    signature_of: SignatureOf
    count: int = 0
    cache: dict[Size, Monomial] = field(default_factory=dict)
    values: dict[Value, list[list[Part]]] = field(default_factory=dict)
    letters: dict[Node, dict[str, list[Part]]] = field(default_factory=dict)
    opaque: set[Node] = field(default_factory=set)
    signatures: dict[Node, Structure] = field(default_factory=dict)
    joins: list[Node] = field(default_factory=list)  # ops whose results are sums of their operands' dims

    # -- parts ----------------------------------------------------------------------------------

    def _fresh(self, size: Monomial) -> list[Part]:
        if size == _ONE:
            return []
        self.count += 1
        return [Part(self.count, size)]

    def dims(self, shape: Sequence[Size]) -> list[list[Part]]:
        """A part of its own for each dim."""
        return [self._fresh(_monomial(s, self.cache)) for s in shape]

    def resolve(self, parts: Iterable[Part]) -> list[Part]:
        """What the parts have become."""
        result: list[Part] = []
        for part in parts:
            if part.became is None:
                result.append(part)
            else:
                part.became = tuple(self.resolve(part.became))
                result += part.became
        return result

    def _split(self, part: Part, first: Monomial, second: Monomial) -> list[Part]:
        parts = self._fresh(first) + (self._alike(part, first, second) or self._fresh(second))
        part.became = tuple(parts)
        return parts

    def unify(self, left: Sequence[Part], right: Sequence[Part]) -> None:
        """Make two products the same; raises MismatchError where their borders do not fit."""
        a = [p for p in self.resolve(left) if p.size != _ONE]
        b = [p for p in self.resolve(right) if p.size != _ONE]
        while a and b:
            p, q = a[0], b[0]
            if p is q:
                a, b = a[1:], b[1:]
            elif p.size == q.size:
                self._merge(p, q)
                a, b = self.resolve(a[1:]), self.resolve(b[1:])
            elif (rest := _quotient(p.size, q.size)) is not None:
                self._cut_as(p, q, rest)
                a, b = self.resolve(a), self.resolve(b)
            elif (rest := _quotient(q.size, p.size)) is not None:
                self._cut_as(q, p, rest)
                a, b = self.resolve(a), self.resolve(b)
            else:
                raise MismatchError(f"{size_of(p.size)} against {size_of(q.size)}")
        if a or b:
            raise MismatchError("one has more elements than the other")

    def _cut_as(self, whole: Part, first: Part, rest: Monomial) -> None:
        whole.became = (first, *(self._alike(whole, first.size, rest) or self._fresh(rest)))

    def _merge(self, kept: Part, gone: Part) -> None:
        if kept.segments is None or gone.segments is None:
            kept.segments = kept.segments or gone.segments
        else:
            self._same_segments(kept, gone)
        gone.became = (kept,)
        kept.piece |= gone.piece

    # -- sums -------------------------------------------------------------------------------------

    def leaves(self, part: Part) -> list[list[Part]]:
        """The segments of a sum, none of them a sum alone."""
        found: list[list[Part]] = []
        for segment in map(self.resolve, part.segments or ()):
            inner = self.leaves(segment[0]) if len(segment) == 1 else []
            found += inner or [segment]
        return found

    def _borders(self, part: Part) -> list[int]:
        """Where the segments of a sum begin, but for the first."""
        return list(accumulate(_length(segment) for segment in self.leaves(part)))[:-1]

    def _refine(self, part: Part, border: int) -> None:
        """Have a segment begin at ``border``; raises MismatchError where that cuts a product."""
        begin = 0
        for segment in self.leaves(part) or [[part]]:
            end = begin + _length(segment)
            if begin < border < end:
                if len(segment) > 1:
                    raise MismatchError(f"{size_of(part.size)} cut at {border}")
                segment[0].segments = [self._fresh((border - begin, ())), self._fresh((end - border, ()))]
            begin = end

    def _apart_in(self, parts: Sequence[Part], lengths: Sequence[int]) -> list[list[Part]]:
        """The parts of each of the neighbours, of these lengths, that a dim is the sum of.

        Raises MismatchError where the dim is a product, or one of its segments would be cut across.
        """
        whole = [p for p in self.resolve(parts) if p.size != _ONE]
        if len(whole) != 1 or whole[0].size != (sum(lengths), ()):
            raise MismatchError("a product is no sum")
        for border in list(accumulate(lengths))[:-1]:
            self._refine(whole[0], border)
        rest = iter(self.leaves(whole[0]))
        found: list[list[Part]] = []
        for length in lengths:
            own = [next(rest)]
            while sum(map(_length, own)) < length:
                own.append(next(rest))
            found.append(own[0] if len(own) == 1 else self._fresh((length, ())))
            if len(own) > 1:
                found[-1][0].segments = own
        return found

    def _same_segments(self, left: Part, right: Part) -> None:
        """Make the segments of two sums the same; where they do not fit, the first keeps what it has."""
        try:
            for one, other in ((left, right), (right, left)):
                for border in self._borders(other):
                    self._refine(one, border)
            for one, other in zip(self.leaves(left), self.leaves(right), strict=True):
                self.unify(one, other)
        except MismatchError:
            return

    def _alike(self, part: Part, count: Monomial, size: Monomial) -> list[Part] | None:
        """What all segments of a sum become where it is taken for ``count`` equal pieces of ``size``."""
        segments = self.leaves(part)
        if count != (len(segments), ()) or any((_length(segment), ()) != size for segment in segments):
            return None
        try:
            for other in segments[1:]:
                self.unify(segments[0], other)
        except MismatchError:
            return None
        return self.resolve(segments[0])

    def join(self) -> None:
        """Dims that were put side by side and have a part in common make a sum, or are the pieces of what they made.

        Without a part in common no shard cuts them all, and nothing is gained.
        """
        waiting = self.joins
        while waiting:
            rest = [node for node in waiting if not self._joined(node)]
            if len(rest) == len(waiting):
                return
            waiting = rest

    def _joined(self, node: Node) -> bool:
        signature, letters = self.signatures[node], self.letters[node]
        assert isinstance(signature, Signature)
        for name, names in signature.segments.items():
            own = [self.resolve(letters[part]) for part in names]
            whole = [p for p in self.resolve(letters[name]) if p.size != _ONE]
            if len(whole) == 1:
                known = self.leaves(whole[0])
                if not _in_common(known or own):
                    return False
                if known:
                    self._same_segments(whole[0], Part(0, whole[0].size, segments=own))
                else:
                    whole[0].segments = own
            elif whole and whole[0].size == (len(own), ()) and len(set(map(_length, own))) == 1:
                self._unify_all(whole[1:], own)
        return True

    def _unify_all(self, like: Sequence[Part], others: Iterable[Sequence[Part]]) -> None:
        """Make products the same as far as they fit."""
        for other in others:
            try:
                self.unify(like, other)
            except MismatchError:
                return

    # -- regrouping -----------------------------------------------------------------------------

    def _regroup(
        self, dims: Sequence[Sequence[Part]], shape: Sequence[Monomial], inferred: int | None
    ) -> list[list[Part]]:
        """The parts of ``dims`` under new borders; raises MismatchError where a border cuts across a part."""
        queue = [p for dim in dims for p in self.resolve(dim)]
        result: list[list[Part]] = []
        for index, size in enumerate(shape):
            dim: list[Part] = []
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
                    first, *others = self._split(part, need, rest)
                    dim.append(first)
                    queue[:0] = others
                    need = _ONE
                else:
                    raise MismatchError(f"{size_of(part.size)} cut at {size_of(need)}")
            result.append(dim)
        return result

    def _unit(self, queue: list[Part]) -> list[Part]:
        """An inferred count that happens to be one is a factor too: one KV head on two ranks is one head too few."""
        if not queue:
            return []
        follower = queue[0]
        self.count += 2
        unit = Part(self.count - 1, _ONE)
        copy = Part(self.count, follower.size, piece=follower.piece, segments=follower.segments)
        follower.became = (unit, copy)
        queue[:1] = [copy]
        return [unit]

    # -- nodes ----------------------------------------------------------------------------------

    def visit(self, node: Node) -> None:
        """Unify what the node aligns, and give its results their parts."""
        signature = self.signatures[node] = self.signature_of(node)
        if isinstance(signature, Regrouping):
            self._visit_regrouping(node, signature)
        elif signature is None:
            self.opaque.add(node)
            for result in node.results:
                self.values[result] = self.dims(result.shape)
        else:
            self._visit_signature(node, signature)

    def _visit_regrouping(self, node: Node, signature: Regrouping) -> None:
        (result,) = node.results
        shape = [_monomial(s, self.cache) for s in signature.shape]
        try:
            self.values[result] = self._regroup(self.values[node.operands[0]], shape, signature.inferred)
        except MismatchError:
            self.opaque.add(node)
            self.values[result] = self.dims(result.shape)

    def _visit_signature(self, node: Node, signature: Signature) -> None:
        letters: dict[str, list[Part]] = {}
        unlike: set[str] = set()
        for operand, dims in zip(node.operands, signature.operands, strict=True):
            for dim, parts in zip(dims, self.values[operand], strict=True):
                for letter, own in self._apart(node, dim, parts, signature).items():
                    if letter not in letters:
                        letters[letter] = own
                        continue
                    try:
                        self.unify(letters[letter], own)
                    except MismatchError:
                        unlike.add(letter)
        for whole, names in signature.segments.items():
            if whole in letters:
                letters |= self._segments_of(letters[whole], names, signature)
            else:
                self.joins.append(node)
        for result, dims in zip(node.results, signature.results, strict=True):
            made: list[list[Part]] = []
            for dim, size in zip(dims, result.shape, strict=True):
                for letter in dim:
                    if letter not in letters:
                        own = size if len(dim) == 1 else signature.sizes[letter]
                        letters[letter] = self._fresh(_monomial(own, self.cache))
                made.append([p for letter in dim for p in letters[letter]])
            self.values[result] = made
        for letter in signature.pieces:
            for part in self.resolve(letters[letter]):
                part.piece = True
        # Dims that cannot be the same product run together only as a whole: nothing cuts their letter.
        self.letters[node] = {letter: parts for letter, parts in letters.items() if letter not in unlike}

    def _segments_of(self, whole: Sequence[Part], names: Sequence[str], signature: Signature) -> dict[str, list[Part]]:
        """The parts of the letters that lie side by side in a dim; none where the op needs the dim whole."""
        try:
            parts = self._apart_in(whole, [int(signature.sizes[name]) for name in names])
        except MismatchError:
            return {}
        return dict(zip(names, parts, strict=True))

    def _apart(self, node: Node, dim: Dim, parts: list[Part], signature: Signature) -> dict[str, list[Part]]:
        if len(dim) <= 1:
            return dict.fromkeys(dim, parts)
        sizes = [_monomial(signature.sizes[letter], self.cache) for letter in dim]
        try:
            return dict(zip(dim, self._regroup([parts], sizes, None), strict=True))
        except MismatchError:
            self.opaque.add(node)
            return {letter: self._fresh(size) for letter, size in zip(dim, sizes, strict=True)}
