"""From a rule to strategies: every combination of types by which one op can run on one axis.

For an op with a signature, always: everything invariant, everything replicated. Then, for each letter
that is not blocked and each run of factors that the axis divides: operands that have the letter sharded,
the others replicated, the result sharded, or partial where the letter is contracted. Then one operand
partial where the op is linear in it, and all operands partial where it is additive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import sympy
import torch

from placement.graph.factors import Dims, Factor, Factors
from placement.graph.ir import Node, Size, Value, evaluate
from placement.graph.signature import Regrouping, Signature
from placement.rules.core import Collective, Code, lookup
from placement.types import I, P, R, S, Type


@dataclass(frozen=True, slots=True)
class Strategy:
    """The types an op takes and gives on one axis; ``implementation`` is '' for its plain form."""

    operands: tuple[Type, ...]
    results: tuple[Type, ...]
    implementation: str = ""
    collectives: tuple[Collective, ...] = ()
    code: Code | None = None

    def __repr__(self) -> str:
        name = f" by {self.implementation}" if self.implementation else ""
        return f"{', '.join(map(repr, self.operands))} -> {', '.join(map(repr, self.results))}{name}"


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """One axis of ``n`` ranks over a graph's dims: which runs of factors a shard on it may cut.

    hints: the size of each symbol in the example. dynamic: the symbols that may be cut at all.
    """

    dims: Dims
    n: int
    hints: Mapping[sympy.Symbol, int]
    dynamic: frozenset[sympy.Symbol]

    def divides(self, size: Size) -> bool:
        """Whether the axis cuts ``size`` into equal blocks of whole elements."""
        if isinstance(size, int):
            return size % self.n == 0
        return size.free_symbols <= self.dynamic and size.is_Symbol and evaluate(size, self.hints) % self.n == 0

    def runs(self, factors: Factors) -> Iterator[Factors]:
        """What a shard may cut of a product: a factor that the axis divides, or the shortest such run of factors.

        A run has at least two factors and starts at one that the axis does not divide: four ranks cut
        two KV heads with two query heads each through kv_heads · group.
        """
        for start, factor in enumerate(factors):
            if factor.piece or factor.size == 1:
                continue
            if self.divides(factor.size):
                yield (factor,)
                continue
            run = self._run(factors, start)
            if run:
                yield run

    def _run(self, factors: Factors, start: int) -> Factors | None:
        product = 1
        for end in range(start, len(factors)):
            size = factors[end].size
            if not isinstance(size, int):
                return None
            product *= size
            if end > start and product % self.n == 0:
                return factors[start : end + 1]
        return None

    def shard(self, value: Value, run: Factors) -> Type | None:
        """The type of ``value`` cut over ``run``, None where the value has it not, or twice, or apart."""
        return S(*run) if self.dims.locate(value, run) is not None else None

    def types(self, value: Value) -> tuple[Type, ...]:
        """Every type that the value may have, the unsharded first."""
        shards = [
            S(*run) for dim in self.dims.of(value) for run in self.runs(dim) if self.dims.locate(value, run) is not None
        ]
        unsharded = (I, R, P) if value.requires_grad else (R, P) if _sums(value) else (R,)
        return (*unsharded, *dict.fromkeys(shards))


def _sums(value: Value) -> bool:
    return value.dtype is not torch.bool


def strategies(node: Node, context: Context) -> tuple[Strategy, ...]:
    """Every strategy of a node, the unsharded first, in a fixed order without repetition."""
    found = lookup(node)
    signature = found.signature(node) if found else None
    result: dict[tuple[tuple[Type, ...], tuple[Type, ...], str], Strategy] = {}

    def offer(strategy: Strategy) -> None:
        result.setdefault((strategy.operands, strategy.results, strategy.implementation), strategy)

    for plain in _unsharded(node):
        offer(plain)
    if signature is not None:
        for plain in _sharded(node, signature, context):
            offer(plain)
    for implementation in found.implementations if found else ():
        for form in implementation.forms(node, context):
            offer(Strategy(form.operands, form.results, implementation.name, form.collectives, form.code))
    return tuple(result.values())


def _unsharded(node: Node) -> Iterator[Strategy]:
    if any(v.requires_grad for v in (*node.operands, *node.results)):
        yield Strategy(
            tuple(I if v.requires_grad else R for v in node.operands), tuple(I if v.requires_grad else R for v in node.results)
        )
    yield Strategy((R,) * len(node.operands), (R,) * len(node.results))


def _sharded(node: Node, signature: Signature | Regrouping, context: Context) -> Iterator[Strategy]:
    if isinstance(signature, Regrouping):
        yield from _regrouped(node, context)
        return
    if node not in context.dims.opaque:
        yield from _cut(node, signature, context)
    for index in sorted(signature.linear):
        yield Strategy(tuple(P if i == index else R for i in range(len(node.operands))), (P,) * len(node.results))
    if signature.additive:
        yield Strategy((P,) * len(node.operands), (P,) * len(node.results))


def _regrouped(node: Node, context: Context) -> Iterator[Strategy]:
    (result,) = node.results
    source = node.operands[0]
    yield Strategy((P, *(R for _ in node.operands[1:])), (P,))
    if node in context.dims.opaque:
        return
    for kind in context.types(source):
        if kind.over:
            run: tuple[Factor, ...] = kind.over  # type: ignore[assignment]
            if context.shard(result, run):
                yield Strategy((kind,), (kind,))


def _cut(node: Node, signature: Signature, context: Context) -> Iterator[Strategy]:
    letters = context.dims.letters[node]
    for letter in signature.letters:
        if letter in signature.blocked:
            continue
        for run in context.runs(letters.get(letter, ())):
            strategy = _cut_letter(node, signature, context, letter, run)
            if strategy:
                yield strategy


def _cut_letter(node: Node, signature: Signature, context: Context, letter: str, run: Factors) -> Strategy | None:
    operands = []
    for value, dims in zip(node.operands, signature.operands, strict=True):
        has = any(letter in dim for dim in dims)
        kind = context.shard(value, run) if has else R
        if kind is None:
            return None
        operands.append(kind)
    if all(kind == R for kind in operands):
        return None  # a letter of results only: nothing to cut
    results = []
    for value, dims in zip(node.results, signature.results, strict=True):
        has = any(letter in dim for dim in dims)
        kind = context.shard(value, run) if has else (P if letter in signature.contracted else None)
        if kind is None:
            return None
        results.append(kind)
    return Strategy(tuple(operands), tuple(results))
