"""From a rule to strategies: every combination of types by which one op can run on one axis.

For an op with a signature, always: everything invariant, everything replicated. Then, for each letter
that is not blocked and each run of factors that the axis divides: operands that have the letter sharded,
the others replicated, the result sharded, or partial where the letter is contracted. Then one operand
partial where the op is linear in it, and those operands partial in which it is linear together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import sympy
import torch

from placement.graph.factors import Dims, Factors
from placement.graph.ir import Node, Size, Value, evaluate
from placement.graph.segments import Factor, holds, shared, side_by_side
from placement.graph.signature import Regrouping, Signature
from placement.rules.core import Code, Collective, Way, lookup
from placement.types import I, Joint, P, R, S, Type


@dataclass(frozen=True, slots=True)
class Strategy:
    """The types an op takes and gives on one axis; ``implementation`` is '' for its plain form."""

    operands: tuple[Type, ...]
    results: tuple[Type, ...]
    implementation: str = ""
    collectives: tuple[Collective, ...] = ()
    code: Code | None = None
    whole: tuple[Factor, ...] = ()  # as in a form
    met: tuple[int, ...] = ()

    def __repr__(self) -> str:
        name = f" by {self.implementation}" if self.implementation else ""
        return f"{', '.join(map(repr, self.operands))} -> {', '.join(map(repr, self.results))}{name}"


@dataclass(frozen=True, slots=True)
class JointStrategy:
    """How an op runs on all axes of a mesh: a strategy on each.

    Each axis sees the op on the blocks that the other axes leave, which is the same op. ``leading`` are the axes whose
    implementation is the one that is called; it is told of other axes that run another.
    """

    parts: tuple[Strategy, ...]
    operands: tuple[Joint, ...]
    results: tuple[Joint, ...]
    leading: tuple[int, ...] = ()

    @property
    def implementation(self) -> str:
        """The one that is called, '' for the plain form."""
        return self.parts[self.leading[0]].implementation if self.leading else ""

    @property
    def code(self) -> Code | None:
        """The template of the call, None for the op's own."""
        return self.parts[self.leading[0]].code if self.leading else None

    def groups(self) -> dict[str, tuple[int, ...]]:
        """The axes that run each implementation, together."""
        found: dict[str, tuple[int, ...]] = {}
        for index, part in enumerate(self.parts):
            if part.implementation:
                found[part.implementation] = (*found.get(part.implementation, ()), index)
        return found

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


def joint_strategy(node: Node, parts: tuple[Strategy, ...]) -> JointStrategy | None:
    """The strategies of all axes together, None where their implementations do not go together."""
    operands = tuple(Joint(part.operands[i] for part in parts) for i in range(len(node.operands)))
    results = tuple(Joint(part.results[i] for part in parts) for i in range(len(node.results)))
    plain = JointStrategy(parts, operands, results)
    groups = plain.groups()
    if not groups:
        return plain
    found = lookup(node)
    known = {one.name: one for one in (found.implementations if found else ())}
    for name, axes in groups.items():
        alike = len({parts[index].operands for index in axes}) == 1
        if not alike and not known[name].counts:
            return None
        whole = parts[axes[0]].whole
        if whole and any(factor in whole for joint in operands for factor in joint.over):
            return None
        # What goes round are blocks of all ranks: no other axis cuts what they are compared with further.
        run = set(parts[axes[0]].operands[0].over) if parts[axes[0]].met else set[Factor]()
        others = (part for index, part in enumerate(parts) if index not in axes)
        if run and any(run.intersection(kind.over) for part in others for kind in part.operands):
            return None
    for name, axes in groups.items():
        if all(other == name or other in known[name].joins for other in groups):
            return JointStrategy(parts, operands, results, axes)
    return None


@dataclass(slots=True)
class _Known:
    """What a context has found out: a graph asks the same few questions for every layer."""

    divides: dict[Size, bool] = field(default_factory=dict)
    runs: dict[Factors, tuple[Factors, ...]] = field(default_factory=dict)
    shards: dict[Factors, Type] = field(default_factory=dict)
    strategies: dict[Node, tuple[Strategy, ...]] = field(default_factory=dict)
    repeated: dict[Value, frozenset[Factor]] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """One axis of ``n`` ranks over a graph's dims: which runs of factors a shard on it may cut.

    On an axis of one rank all types are the same: there values are I, and R where they have no gradient.

    hints: the size of each symbol in the example. dynamic: the symbols that may be cut at all.
    """

    dims: Dims
    n: int
    hints: Mapping[sympy.Symbol, int]
    dynamic: frozenset[sympy.Symbol]
    known: _Known = field(default_factory=_Known, init=False, repr=False)

    def divides(self, size: Size) -> bool:
        """Whether the axis cuts ``size`` into equal blocks of whole elements."""
        if isinstance(size, int):
            return size % self.n == 0
        known = self.known.divides
        if size not in known:
            symbol = size.is_Symbol and size in self.dynamic
            known[size] = symbol and evaluate(size, self.hints) % self.n == 0
        return known[size]

    def runs(self, factors: Factors) -> tuple[Factors, ...]:
        """What a shard may cut of a product: a factor that the axis divides, or the shortest such run of factors.

        A run has at least two factors and starts at one that the axis does not divide: four ranks cut
        two KV heads with two query heads each through kv_heads · group. Of a sum whose segments have a factor in
        common it is what every segment has: a cut of the sum itself would run across them.
        """
        known = self.known.runs
        if factors not in known:
            known[factors] = tuple(self._runs(factors))
        return known[factors]

    def _runs(self, factors: Factors) -> Iterator[Factors]:
        for start, factor in enumerate(factors):
            if factor.piece or factor.size == 1:
                continue
            if shared(factor):
                yield from self.runs_in_all(factor.segments)
                continue
            if self.divides(factor.size):
                yield (factor,)
                continue
            run = self._run(factors, start)
            if run:
                yield run

    def runs_in_all(self, segments: Sequence[Factors]) -> tuple[Factors, ...]:
        """What a shard may cut of every one of these products."""
        return tuple(run for run in self.runs(segments[0]) if all(holds(segment, run) for segment in segments))

    def _run(self, factors: Factors, start: int) -> Factors | None:
        product = 1
        for end in range(start, len(factors)):
            size = factors[end].size
            if not isinstance(size, int) or shared(factors[end]):
                return None
            product *= size
            if end > start and product % self.n == 0:
                return factors[start : end + 1]
        return None

    def shard(self, value: Value, run: Factors) -> Type | None:
        """The type of ``value`` cut over ``run``, None where the value has it not, or twice, or apart."""
        if self.dims.locate(value, run) is None:
            return None
        known = self.known.shards
        if run not in known:
            known[run] = S(*run)
        return known[run]

    def repeated(self, value: Value) -> frozenset[Factor]:
        """The factors along which the value is one and the same, as where heads are repeated for those of a group."""
        if self.known.repeated is None:
            self.known.repeated = _repeated(self.dims)
        return self.known.repeated.get(value, frozenset())

    def types(self, value: Value) -> tuple[Type, ...]:
        """Every type that the value may have, the unsharded first."""
        if self.n == 1:
            return (I,) if value.requires_grad else (R,)
        found = (self.shard(value, run) for dim in self.dims.of(value) for run in self.runs(dim))
        unsharded = (I, R, P) if value.requires_grad else (R, P) if _sums(value) else (R,)
        return (*unsharded, *dict.fromkeys(kind for kind in found if kind))


def runs_as(way: Way, node: Node, strategy: Strategy, context: Context) -> bool:
    """Whether the strategy is what a way means."""
    run, letters = strategy.operands[0].over, context.dims.letters.get(node, {})
    inside = {factor for letter in way.letters for factor in letters.get(letter, ())}
    return strategy.implementation in way.implementations and bool(run) and inside.issuperset(run)


def _repeated(dims: Dims) -> dict[Value, frozenset[Factor]]:
    """What expansions repeat, carried along through views."""
    found: dict[Value, frozenset[Factor]] = {}
    for node in dims.signatures:
        rule = lookup(node)
        if rule is None or not rule.view or len(node.operands) != 1 or len(node.results) != 1:
            continue
        (source,), (result,) = node.operands, node.results
        made = dims.of(result)
        factors = {f for one in made for f in one} & found.get(source, frozenset())
        if node.op is torch.ops.aten.expand.default:
            offset = len(result.shape) - len(source.shape)
            for index, size in enumerate(result.shape):
                if size != 1 and (index < offset or source.shape[index - offset] == 1):
                    factors.update(made[index])
        if factors:
            found[result] = frozenset(factors)
    return found


def _sums(value: Value) -> bool:
    return value.dtype is not torch.bool


def strategies(node: Node, context: Context) -> tuple[Strategy, ...]:
    """Every strategy of a node, the unsharded first, in a fixed order without repetition."""
    known = context.known.strategies
    if node not in known:
        known[node] = _strategies(node, context)
    return known[node]


def _strategies(node: Node, context: Context) -> tuple[Strategy, ...]:
    found = lookup(node)
    operands = node.operands
    result: dict[tuple[tuple[Type, ...], tuple[Type, ...], str], Strategy] = {}
    for plain in _plain(node, operands, context):
        result.setdefault((plain.operands, plain.results, ""), plain)
    for implementation in found.implementations if found and context.n > 1 else ():
        for form in implementation.forms(node, context):
            found_by = implementation.name, form.collectives, form.code, form.whole, form.met
            strategy = Strategy(form.operands, form.results, *found_by)
            result.setdefault((form.operands, form.results, implementation.name), strategy)
    return tuple(result.values())


def _plain(node: Node, operands: tuple[Value, ...], context: Context) -> Iterator[Strategy]:
    yield from _unsharded(node, operands) if context.n > 1 else islice(_unsharded(node, operands), 1)
    signature = context.dims.signature(node) if context.n > 1 else None
    if isinstance(signature, Regrouping):
        yield from _regrouped(node, operands, context)
    elif signature is not None:
        if node not in context.dims.opaque:
            yield from _cut(node, operands, signature, context)
            yield from _cut_in_segments(node, operands, signature, context)
        yield from _partial(node, operands, signature)


def _unsharded(node: Node, operands: tuple[Value, ...]) -> Iterator[Strategy]:
    results = node.results
    if any(v.requires_grad for v in (*operands, *results)):
        yield Strategy(
            tuple(I if v.requires_grad else R for v in operands), tuple(I if v.requires_grad else R for v in results)
        )
    yield Strategy((R,) * len(operands), (R,) * len(results))


def _partial(node: Node, operands: tuple[Value, ...], signature: Signature) -> Iterator[Strategy]:
    """Terms in, terms out. A truth value is not a sum of terms."""
    if not all(map(_sums, node.results)):
        return
    groups = [frozenset({index}) for index in sorted(signature.linear)]
    for group in (*groups, signature.additive):
        if group and all(_sums(operands[index]) for index in group):
            yield Strategy(tuple(P if i in group else R for i in range(len(operands))), (P,) * len(node.results))


def _regrouped(node: Node, operands: tuple[Value, ...], context: Context) -> Iterator[Strategy]:
    (source,), (result,) = operands, node.results
    if _sums(source):
        yield Strategy((P,), (P,))
    if node in context.dims.opaque:
        return
    for kind in context.types(source):
        if kind.over and context.shard(result, kind.over):  # type: ignore[arg-type]
            yield Strategy((kind,), (kind,))


def _cut(node: Node, operands: tuple[Value, ...], signature: Signature, context: Context) -> Iterator[Strategy]:
    letters = context.dims.letters[node]
    contracted = signature.contracted
    inside = [frozenset(letter for dim in dims for letter in dim) for dims in (*signature.operands, *signature.results)]
    given, made = inside[: len(operands)], inside[len(operands) :]
    for letter in signature.letters:
        if letter in signature.blocked or not any(letter in dims for dims in given):
            continue  # a letter of results only: nothing to cut
        sums = letter in contracted
        others = [P if sums and i in signature.additive else R for i in range(len(operands))]
        for run in context.runs(letters.get(letter, ())):
            before = _types(operands, letter, run, given, others, context)
            after = _types(node.results, letter, run, made, [P if sums else None] * len(made), context)
            if before and after:
                yield Strategy(before, after)


def _cut_in_segments(
    node: Node, operands: tuple[Value, ...], signature: Signature, context: Context
) -> Iterator[Strategy]:
    """A dim that is a sum on one side of the op and apart on the other: what cuts all segments cuts both sides."""
    letters = context.dims.letters[node]
    for whole, parts in signature.segments.items():
        segments = side_by_side(letters.get(whole, ()), [letters.get(part, ()) for part in parts])
        if segments is None:
            continue
        one = {whole, *parts}
        inside = [
            frozenset({whole}) if any(one & set(dim) for dim in dims) else frozenset[str]()
            for dims in (*signature.operands, *signature.results)
        ]
        given, made = inside[: len(operands)], inside[len(operands) :]
        for run in context.runs_in_all(segments):
            before = _types(operands, whole, run, given, [R] * len(operands), context)
            after = _types(node.results, whole, run, made, [None] * len(made), context)
            if before and after:
                yield Strategy(before, after)


def _types(
    values: Sequence[Value],
    letter: str,
    run: Factors,
    inside: Sequence[frozenset[str]],
    otherwise: Sequence[Type | None],
    context: Context,
) -> tuple[Type, ...] | None:
    """What has the letter is cut; what only joins a contracted sum is partial, or it would join once per rank."""
    kinds: list[Type] = []
    for value, letters, other in zip(values, inside, otherwise, strict=True):
        kind = context.shard(value, run) if letter in letters else other
        if kind is None or (kind is P and not _sums(value)):
            return None
        kinds.append(kind)
    return tuple(kinds)
