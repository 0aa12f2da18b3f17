"""Whether a rule holds: each strategy that it offers, run on n ranks, against the op on one device.

The ranks are lists of tensors here. What a type means is written out anew, index by index and without
a collective, so that a proof owes nothing to the runtime that it may be used to judge.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from placement.graph._torch import overload_for, schema_arguments
from placement.graph.capture import capture
from placement.graph.factors import infer
from placement.graph.gradients import differentiable
from placement.graph.ir import Graph, Input, Node, Value, leaves, op_name, substitute
from placement.graph.segments import Factor
from placement.rules.core import signature_of, sizes_on_rank
from placement.rules.strategies import Context, Strategy, strategies
from placement.types import Kind, Type, dual


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One op under one strategy, on every rank: ``operands[rank]`` are the op's tensors in order."""

    node: Node
    strategy: Strategy
    context: Context
    operands: tuple[tuple[Tensor, ...], ...]

    def local_shape(self, result: int) -> tuple[int, ...]:
        """The shape of a result on one rank."""
        value, kind = self.node.results[result], self.strategy.results[result]
        cut = _cut(self.context, value, kind)
        return tuple(int(s) // self.context.n if cut and cut[0] == i else int(s) for i, s in enumerate(value.shape))


def _cut(context: Context, value: Value, kind: Type) -> tuple[int, tuple[int, ...]] | None:
    """Where ``kind`` cuts ``value``: the dim, and the lengths of what it cuts there one after the other, in ratio."""
    if kind.kind is not Kind.S:
        return None
    place = context.dims.locate(value, kind.over)  # type: ignore[arg-type]
    if place is None:
        raise ValueError(f"{value.name} has no {kind!r}")
    lengths: list[int] = []
    for before, size in context.dims.segments(value, kind.over) or (((), 1),):  # type: ignore[arg-type]
        count = math.prod(int(f.size) for f in before)
        lengths += [size // count] * count
    return place[0], tuple(lengths * math.prod(int(f.size) for f in place[1]))


Execute = Callable[[Call], Sequence[Sequence[Tensor]]]
"""Runs a call; returns what exists of the op's results, per rank."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one strategy of one op: ``fault`` is '' where it holds. ``run`` is False where it was left out."""

    op: str
    strategy: Strategy
    fault: str = ""
    run: bool = True

    def __str__(self) -> str:
        verdict = self.fault or ("holds" if self.run else "not run: it communicates")
        return f"{self.strategy!r}: {verdict}"


class UnprovenError(AssertionError):
    """A strategy whose value or gradient differs from the one-device op's."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The findings of ``prove``; true where every strategy that was run holds."""

    n: int
    findings: tuple[Finding, ...]

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The strategies that do not hold."""
        return tuple(f for f in self.findings if f.fault)

    def __bool__(self) -> bool:
        return not self.faults

    def require(self) -> Proof:
        """Itself; raises UnprovenError where a strategy does not hold."""
        if self.faults:
            raise UnprovenError(str(self))
        return self

    def __str__(self) -> str:
        lines: list[str] = []
        for finding in self.findings:
            header = f"{finding.op} on {self.n} ranks"
            lines += [header] if header not in lines else []
            lines.append(f"  {finding}")
        return "\n".join(lines)


def prove(
    op: Callable[..., Any],
    *args: Any,
    n: int = 2,
    gradients: bool = True,
    execute: Execute | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> Proof:
    """Run every strategy of an op's rule on ``n`` ranks and compare it with the op on one device.

    ``op`` is an op (an overload, a packet, what ``torch.library.custom_op`` returns), called as in ``op(*args,
    **kwargs)``; or any function or module of tensors, whose ops are proven one by one as capture finds them.
    ``args`` are small tensors, best in float64, with sizes that ``n`` divides. Compared are the values and
    the gradients of those arguments that require one; where none does, of all floating-point ones. With
    ``gradients=False`` no argument has one, and the op is proven as it is used on data.

    Strategies with collectives inside are left out unless ``execute`` runs them. Given an ``execute``, it runs all.

    >>> print(prove(torch.ops.aten.mv, torch.randn(4, 6), torch.randn(6)))  # doctest: +ELLIPSIS
    aten.mv.default on 2 ranks
      I, I -> I: holds
    ...
    """
    tensors = [leaf for leaf in leaves((args, tuple(kwargs.values()))) if isinstance(leaf, Tensor)]
    asked = gradients and any(t.requires_grad for t in tensors)
    fresh = {
        id(t): t.detach()
        .clone()
        .requires_grad_(gradients and differentiable(t.dtype) and (t.requires_grad or not asked))
        for t in tensors
    }
    args = substitute(args, lambda leaf: fresh.get(id(leaf), leaf))
    kwargs = {k: substitute(v, lambda leaf: fresh.get(id(leaf), leaf)) for k, v in kwargs.items()}
    overload = overload_for(op, args, kwargs)
    graph, env = _program(op, args, kwargs) if overload is None else _single(overload, args, kwargs)
    context = Context(infer(graph, signature_of), n, {}, frozenset())
    findings: list[Finding] = []
    for node in graph.nodes:
        generator = torch.Generator().manual_seed(seed)
        if node.operands:
            findings += _prove_node(node, env, context, execute, generator)
        env.update(_results(node, _call(node, [env[v] for v in node.operands])))
    return Proof(n, tuple(findings))


# -- what is proven: one op, or the ops of a program -----------------------------------------------


def _single(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Graph, dict[Value, Tensor]]:
    """A program of one op. A tensor that is given twice is one value."""
    made: dict[int, Value] = {}
    env: dict[Value, Tensor] = {}

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = Value(f"x{len(made)}", tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
            env[made[id(leaf)]] = leaf
        return made[id(leaf)]

    outputs = op(*args, **kwargs)
    args, kwargs = substitute(args, value), {k: substitute(v, value) for k, v in kwargs.items()}
    grad = any(v.requires_grad for v in env)
    results = tuple(
        Value(f"y{i}", tuple(t.shape), t.dtype, grad and differentiable(t.dtype)) if isinstance(t, Tensor) else None
        for i, t in enumerate(outputs if isinstance(outputs, tuple | list) else (outputs,))
    )
    inputs = tuple(Input(v, v.name) for v in env)
    node = Node("op", op, args, kwargs, results)
    return Graph(inputs, (), (node,), (), (), {}, None, None), env


class _Function(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.function(*args, **kwargs)


def _program(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Graph, dict[Value, Tensor]]:
    if isinstance(function, torch.nn.Module):
        if args and kwargs:
            raise TypeError("give a module's tensors either by position or by name")
        module, graph = function, capture(function, kwargs or args)
    else:
        module = _Function(function)
        graph = capture(module, {"args": args, "kwargs": dict(kwargs)})
    tensors = [leaf for leaf in leaves((args, tuple(kwargs.values()))) if isinstance(leaf, Tensor)]
    env = {i.value: t for i, t in zip(graph.inputs, tensors, strict=True)}
    owned = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return graph, {**env, **{p.value: owned[p.name] for p in graph.parameters}}


def _call(node: Node, operands: Sequence[Tensor], given: Mapping[str, Any] | None = None) -> tuple[Tensor, ...]:
    """The results of the op on ``operands``; ``given`` replaces arguments that hold sizes."""
    rest = iter(operands)

    def fill(tree: Any) -> Any:
        return substitute(tree, lambda leaf: next(rest) if isinstance(leaf, Value) else leaf)

    given = given or {}
    names = (name for name, _ in schema_arguments(node.op))
    args = [given.get(name, fill(a)) for name, a in zip(names, node.args, strict=False)]
    outputs = node.op(*args, **{k: given.get(k, fill(v)) for k, v in node.kwargs.items()})
    listed = outputs if isinstance(outputs, tuple | list) else (outputs,)
    return tuple(t for v, t in zip(node.outputs, listed, strict=True) if v is not None)


def _results(node: Node, outputs: Sequence[Tensor]) -> dict[Value, Tensor]:
    return {v: t.detach() for v, t in zip(node.results, outputs, strict=True)}


def run_locally(call: Call) -> list[tuple[Tensor, ...]]:
    """The op itself on each rank's tensors, with the sizes in its arguments as they are on a rank."""
    results = [call.local_shape(i) for i in range(len(call.node.results))]
    given = sizes_on_rank(call.node, call.operands[0][0].shape, results)
    return [_call(call.node, operands, given) for operands in call.operands]


# -- the comparison --------------------------------------------------------------------------------


def _prove_node(
    node: Node, env: Mapping[Value, Tensor], context: Context, execute: Execute | None, generator: torch.Generator
) -> Iterator[Finding]:
    # A value used twice has two places here: each may be given in a type of its own.
    operands = [env[v].detach().clone().requires_grad_(v.requires_grad) for v in node.operands]
    outputs = _call(node, operands)
    cotangents = [_random(t, generator) for t in outputs]
    gradients = _gradients(outputs, operands, cotangents)
    for strategy in strategies(node, context):
        if strategy.implementation and execute is None:
            yield Finding(op_name(node.op), strategy, run=False)
            continue
        place = _Place(node, strategy, context, generator)
        try:
            fault = place.compare(execute or run_locally, operands, outputs, cotangents, gradients)
        except Exception as error:  # noqa: BLE001 - whatever the op raises on local tensors is the finding
            text = str(error).strip().splitlines()
            fault = f"{type(error).__name__}: {text[0] if text else ''}"
        yield Finding(op_name(node.op), strategy, fault)


def _gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradient of each input that requires one; zeros where none reaches it."""
    reached = [(y, ct) for y, ct in zip(outputs, cotangents, strict=True) if y.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if reached and wanted:
        found = torch.autograd.grad([y for y, _ in reached], wanted, [ct for _, ct in reached], allow_unused=True)
    rest = iter(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True))
    return [next(rest) if x.requires_grad else None for x in inputs]


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """One op under one strategy, and random terms for what is partial."""

    node: Node
    strategy: Strategy
    context: Context
    generator: torch.Generator

    def compare(
        self,
        execute: Execute,
        operands: Sequence[Tensor],
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> str:
        """'' where values and gradients on the ranks are those of one device, else what differs."""
        n, kinds = self.context.n, self.strategy.operands
        given = [self.apart(x, v, kind) for x, v, kind in zip(operands, self.node.operands, kinds, strict=True)]
        ranks = tuple(
            tuple(xs[r].requires_grad_(v.requires_grad) for xs, v in zip(given, self.node.operands, strict=True))
            for r in range(n)
        )
        made = [tuple(ys) for ys in execute(Call(self.node, self.strategy, self.context, ranks))]
        for i, (value, kind) in enumerate(zip(self.node.results, self.strategy.results, strict=True)):
            fault = self.joined([ys[i].detach() for ys in made], value, kind, outputs[i].detach())
            if fault:
                return f"result {i}: {fault}"
        parts = [
            self.apart(ct, value, dual(kind)) if value.requires_grad else [ct] * n
            for ct, value, kind in zip(cotangents, self.node.results, self.strategy.results, strict=True)
        ]
        own = _gradients(
            [y for ys in made for y in ys],
            [x for xs in ranks for x in xs],
            [part[r] for r in range(n) for part in parts],
        )
        count = len(operands)
        for i, (value, kind) in enumerate(zip(self.node.operands, kinds, strict=True)):
            terms = [own[r * count + i] for r in range(n)]
            expected = gradients[i]
            if expected is None:
                continue
            # Of elements that are one and the same, only what their gradients sum to is defined.
            same = self.context.repeated(value) & set(self.strategy.whole)
            fault = self.joined([t for t in terms if t is not None], value, dual(kind), expected, same)
            if fault:
                return f"gradient of operand {i}: {fault}"
        return ""

    def apart(self, x: Tensor, value: Value, kind: Type) -> list[Tensor]:
        """The global ``x`` as one fresh tensor per rank."""
        x, n = x.detach(), self.context.n
        cut = _cut(self.context, value, kind)
        if cut:
            return [x.index_select(cut[0], _indices(x.shape[cut[0]], cut[1], n, rank)) for rank in range(n)]
        if kind.kind is not Kind.P:
            return [x.clone() for _ in range(n)]
        terms = [_random(x, self.generator) for _ in range(n - 1)]
        return [*terms, x - sum(terms[1:], terms[0].clone())]

    def joined(
        self,
        parts: Sequence[Tensor],
        value: Value,
        kind: Type,
        expected: Tensor,
        summed: frozenset[Factor] = frozenset(),
    ) -> str:
        """'' where ``parts`` are ``expected`` in the type ``kind``, ``summed`` over factors, else how they differ."""
        cut = _cut(self.context, value, kind)
        if cut:
            dim, n = cut[0], self.context.n
            local = tuple(s // n if i == dim else s for i, s in enumerate(expected.shape))
            if parts[0].shape != local:
                return f"a rank has {list(parts[0].shape)} instead of {list(local)}"
            whole = torch.zeros_like(expected)
            for rank, part in enumerate(parts):
                whole.index_copy_(dim, _indices(expected.shape[dim], cut[1], n, rank), part)
        elif kind.kind is Kind.P:
            whole = sum(parts[1:], parts[0].clone())
        else:
            whole = parts[0]
            if not all(torch.equal(part, whole) for part in parts):
                return f"ranks differ, of type {kind!r}"
        whole, expected = (self.summed(x, value, summed) for x in (whole, expected))
        return _difference(whole, expected, self.tolerance())

    def summed(self, x: Tensor, value: Value, factors: frozenset[Factor]) -> Tensor:
        """``x`` summed over these factors of the value's dims."""
        for dim in reversed(range(x.ndim)):
            own = self.context.dims.of(value)[dim]
            if factors.intersection(own):
                opened = x.unflatten(dim, [int(factor.size) for factor in own])
                x = opened.sum([dim + i for i, factor in enumerate(own) if factor in factors], keepdim=True)
        return x

    def tolerance(self) -> float:
        """How far results may be off, relative to the largest: what the narrowest dtype at the op rounds, and some."""
        values = (*self.node.operands, *self.node.results)
        dtypes = [v.dtype for v in values if differentiable(v.dtype)]
        return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0) ** 0.75


def _indices(size: int, lengths: Sequence[int], n: int, rank: int) -> Tensor:
    """Which indices of a dim of ``size``, of neighbours in the ratio of ``lengths``, are in block ``rank`` of each."""
    unit, rest = divmod(size, sum(lengths))
    if rest or any(unit * length % n for length in lengths):
        raise ValueError(f"{n} ranks cannot cut a dim of {size} in {list(lengths)}")
    starts = [0, *itertools.accumulate(unit * length for length in lengths)]
    blocks = [(start, unit * length // n) for start, length in zip(starts, lengths, strict=False)]
    return torch.tensor([i for start, b in blocks for i in range(start + rank * b, start + rank * b + b)])


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    if differentiable(like.dtype):
        return torch.randn(like.shape, generator=generator, dtype=like.dtype)
    return torch.randint(-3, 4, like.shape, generator=generator).to(like.dtype)


def _difference(found: Tensor, expected: Tensor, tolerance: float) -> str:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype}{list(found.shape)} instead of {expected.dtype}{list(expected.shape)}"
    if not differentiable(expected.dtype):
        return "" if torch.equal(found, expected) else "values differ"
    unequal = found != expected  # infinities may be equal, though their difference is no number
    if not unequal.any():
        return ""
    scale = max(1.0, expected[expected.isfinite()].abs().max().item()) if expected.isfinite().any() else 1.0
    worst = (found - expected)[unequal].abs().max().item() / scale
    return "" if worst <= tolerance else f"off by {worst:.2g}"
