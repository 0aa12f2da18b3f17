"""Cross entropy over classes: as it is, over sharded classes, and over sharded tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from placement.graph.ir import Node, numel
from placement.graph.signature import Dim, Signature
from placement.rules.core import Collective, Form, Implementation, arguments, aten, rule
from placement.rules.strategies import Context
from placement.types import Action, I, P, R

REDUCTIONS = ("none", "mean", "sum")
_MEAN = REDUCTIONS.index("mean")


def _dims(node: Node) -> tuple[tuple[Dim, ...], tuple[Dim, ...]] | None:
    """The letters of logits and target: ``c`` are classes, the rest are tokens. Targets must be class indices."""
    logits, target = node.operands[:2]
    if target.dtype.is_floating_point:
        return None
    rank = len(logits.shape)
    classes = 0 if rank == 1 else 1
    tokens = tuple((f"t{i}",) for i in range(rank) if i != classes)
    full = tuple(("c",) if i == classes else (f"t{i}",) for i in range(rank))
    return full, tokens


def _cross_entropy(node: Node) -> Signature | None:
    """Token by token without reduction, a sum over tokens with ``sum``; a mean needs the global count."""
    dims = _dims(node)
    if dims is None:
        return None
    logits, tokens = dims
    reduction = arguments(node)["reduction"]
    blocked = {"c"} | ({letter for (letter,) in tokens} if reduction == _MEAN else set[str]())
    weight: tuple[tuple[Dim, ...], ...] = ((("c",),),) if len(node.operands) > 2 else ()  # noqa: PLR2004
    return Signature((logits, tokens, *weight), (tokens if reduction == 0 else (),), frozenset(blocked))


def _over_classes(node: Node, context: Context) -> Iterator[Form]:
    """Each rank has some classes: the maximum, the sum of exponentials and the target's logit are reduced."""
    dims = _dims(node)
    if dims is None or arguments(node)["weight"] is not None:
        return
    logits, target = node.operands
    (result,) = node.results
    at = dims[0].index(("c",))
    itemsize = logits.dtype.itemsize
    tokens = numel(target.shape, context.hints) * itemsize
    smoothing = arguments(node)["label_smoothing"]
    joined = tokens * (3 if smoothing else 2)
    collectives = (Collective(Action.ALL_REDUCE, tokens, "forward"), Collective(Action.ALL_REDUCE, joined, "forward"))
    for run in context.runs(context.dims.of(logits)[at]):
        kind = context.shard(logits, run)
        if kind is not None:
            yield Form((kind, R), (I if result.requires_grad else R,), collectives, _call("rt.class_parallel_cross_entropy"))


def _over_tokens(node: Node, context: Context) -> Iterator[Form]:
    """Each rank has some tokens: the local sum over the global count of tokens that count."""
    dims = _dims(node)
    if dims is None or arguments(node)["reduction"] != _MEAN:
        return
    logits, target = node.operands[:2]
    count = (Collective(Action.ALL_REDUCE, logits.dtype.itemsize, "forward"),)
    rest = (R,) * (len(node.operands) - 2)
    for dim in range(len(target.shape)):
        for run in context.runs(context.dims.of(target)[dim]):
            kinds = context.shard(logits, run), context.shard(target, run)
            if kinds[0] is not None and kinds[1] is not None:
                yield Form((kinds[0], kinds[1], *rest), (P,), count, _call("rt.token_parallel_cross_entropy"))


def _options(args: Mapping[str, str]) -> str:
    named = {"weight": "None", "ignore_index": "-100", "label_smoothing": "0.0"}
    options = "".join(f", {k}={args[k]}" for k, default in named.items() if args.get(k, default) != default)
    reduction = REDUCTIONS[int(args.get("reduction", "1"))]
    return options + (f", reduction={reduction!r}" if reduction != "mean" else "")


def _call(name: str) -> object:
    def code(args: Mapping[str, str]) -> str:
        return f"{name}({args['self']}, {args['target']}, {args['axis']}{args['self_cut']}{_options(args)})"

    return code


rule(
    aten.cross_entropy_loss,
    _cross_entropy,
    code=lambda args: f"F.cross_entropy({args['self']}, {args['target']}{_options(args)})",
    implementations=(Implementation("over classes", _over_classes), Implementation("over tokens", _over_tokens)),
)
