"""Cross entropy over classes: as it is, over sharded classes, and over sharded tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from placement.graph.ir import Node, Size, Value, numel, op_name
from placement.graph.padded import CROSS_ENTROPY
from placement.graph.signature import Dim, Signature
from placement.rules.core import Collective, Form, Implementation, arguments, aten, rule
from placement.rules.lengths import counted
from placement.rules.reductions import COUNT
from placement.rules.strategies import Context
from placement.types import Action, I, P, R

REDUCTIONS = ("none", "mean", "sum")
_MEAN = REDUCTIONS.index("mean")
_TOKENS = "over tokens"
_COUNT = 8  # bytes of a number of tokens, or of the sum of their weights


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
    """Token by token without reduction, a sum over tokens with ``sum``; a mean needs the global count.

    Targets are class indices, or probabilities of classes.
    """
    logits = node.operands[0]
    dims = _dims(node)
    if dims is None:
        classes = 0 if len(logits.shape) == 1 else 1
        full = tuple(("c",) if i == classes else (f"t{i}",) for i in range(len(logits.shape)))
        return _by_token(node, full, full, tuple(dim for dim in full if dim != ("c",)))
    return _by_token(node, *dims, dims[1])


def _by_token(
    node: Node, logits: tuple[Dim, ...], target: tuple[Dim, ...], tokens: tuple[Dim, ...], linear: Iterable[int] = ()
) -> Signature:
    reduction = arguments(node)["reduction"]
    blocked = {"c"} | ({letter for (letter,) in tokens} if reduction == _MEAN else set[str]())
    weight: tuple[tuple[Dim, ...], ...] = ((("c",),),) if len(node.operands) > 2 else ()
    result = tokens if reduction == 0 else ()
    return Signature((logits, target, *weight), (result,), frozenset(blocked), frozenset(linear))


def _over_classes(node: Node, context: Context) -> Iterator[Form]:
    """Each rank has some classes: the maximum, then the sum of exponentials and the target's logit are reduced.

    The maximum in the logits' dtype, sums in float32 at least; with smoothing also the sum of logits.
    """
    dims = _dims(node)
    if dims is None:
        return
    logits, target = node.operands[:2]
    (result,) = node.results
    at = dims[0].index(("c",))
    itemsize = logits.dtype.itemsize
    tokens = numel(target.shape, context.hints)
    wide = torch.promote_types(logits.dtype, torch.float32)
    sums = tokens * wide.itemsize * (3 if arguments(node)["label_smoothing"] else 2)
    collectives = (
        Collective(Action.ALL_REDUCE, tokens * itemsize, "forward", like=1),
        Collective(Action.ALL_REDUCE, sums, "forward", like=1, summed=wide),
    )
    rest = (R,) * (len(node.operands) - 1)
    for run in context.runs(context.dims.of(logits)[at]):
        kind = context.shard(logits, run)
        if kind is not None:
            loss = I if result.requires_grad else R
            yield Form((kind, *rest), (loss,), collectives, _by_class)


def _over_tokens(node: Node, context: Context) -> Iterator[Form]:
    """Each rank has some tokens: the local sum over the global count of tokens that count."""
    dims = _dims(node)
    if dims is None or arguments(node)["reduction"] != _MEAN:
        return
    logits, target = node.operands[:2]
    weights = torch.float64 if len(node.operands) > 2 else None
    count = (Collective(Action.ALL_REDUCE, _COUNT, "forward", summed=weights),)
    rest = (R,) * (len(node.operands) - 2)
    for dim in range(len(target.shape)):
        for run in context.runs(context.dims.of(target)[dim]):
            kinds = context.shard(logits, run), context.shard(target, run)
            if kinds[0] is not None and kinds[1] is not None:
                yield Form((kinds[0], kinds[1], *rest), (P,), count, _by_tokens)


def _options(args: Mapping[str, str]) -> str:
    named = {"weight": "None", "ignore_index": "-100", "label_smoothing": "0.0"}
    options = "".join(f", {k}={args[k]}" for k, default in named.items() if args.get(k, default) != default)
    reduction = REDUCTIONS[int(args.get("reduction", "1"))]
    return options + (f", reduction={reduction!r}" if reduction != "mean" else "")


def _logits(args: Mapping[str, str]) -> str:
    """The logits without what they are padded with."""
    return f"rt.classes({args['self']}, {args['size']})" if "size" in args else args["self"]


def _by_class(args: Mapping[str, str]) -> str:
    tokens = f", tokens={args[_TOKENS]}" if _TOKENS in args else ""
    tokens += f", classes={args['size']}" if "size" in args else ""
    given = f"{args['self']}, {args['target']}, {args['axis']}{args['self_cut']}{_options(args)}{tokens}"
    return f"rt.class_parallel_cross_entropy({given})"


def _by_tokens(args: Mapping[str, str]) -> str:
    given = f"{_logits(args)}, {args['target']}, {args['axis']}{args['self_cut']}{_options(args)}"
    return f"rt.token_parallel_cross_entropy({given})"


rule(
    [aten.cross_entropy_loss, CROSS_ENTROPY],
    _cross_entropy,
    code=lambda args: f"F.cross_entropy({_logits(args)}, {args['target']}{_options(args)})",
    implementations=(
        Implementation("over classes", _over_classes, joins=(_TOKENS,)),
        Implementation(_TOKENS, _over_tokens, counts=True),
    ),
    padded=CROSS_ENTROPY,
    past=counted,
)


def _negative_likelihood(node: Node) -> Signature | None:
    """Of log-probabilities, in which it is linear; otherwise as the cross entropy."""
    dims = _dims(node)
    return _by_token(node, *dims, dims[1], linear=(0,)) if dims else None


rule([aten.nll_loss, aten.nll_loss2d, aten.nll_loss_nd], _negative_likelihood, past=counted)


# -- losses of every element by itself ----------------------------------------------------------------


def _elementwise_loss(node: Node) -> Signature:
    """Element by element without reduction, a sum over all with ``sum``; a mean needs the global count."""
    rank = max(len(v.shape) for v in node.operands)
    sizes: list[Size] = [1] * rank
    for value in node.operands:
        for i, size in enumerate(value.shape, rank - len(value.shape)):
            sizes[i] = size if sizes[i] == 1 else sizes[i]

    def letters(value: Value) -> tuple[Dim, ...]:
        first = rank - len(value.shape)
        return tuple(() if s == 1 and sizes[i] != 1 else (f"d{i}",) for i, s in enumerate(value.shape, first))

    reduction = arguments(node)["reduction"]
    every = tuple((f"d{i}",) for i in range(rank))
    blocked = frozenset(f"d{i}" for i in range(rank) if reduction == _MEAN)
    return Signature(tuple(map(letters, node.operands)), (every if reduction == 0 else (),), blocked)


def _over_elements(node: Node, context: Context) -> Iterator[Form]:
    """Each rank has some elements: the mean of their losses, over the global count."""
    signature = _elementwise_loss(node)
    if arguments(node)["reduction"] != _MEAN:
        return
    name = op_name(node.op).split(".")[1]
    for letter in signature.letters:
        for run in context.runs(context.dims.letters[node].get(letter, ())):
            kinds = [
                context.shard(value, run) if (letter,) in dims else R
                for value, dims in zip(node.operands, signature.operands, strict=True)
            ]
            given = tuple(kind for kind in kinds if kind is not None)
            if len(given) == len(kinds):
                yield Form(given, (P,), (COUNT,), _elementwise_code(name, mean="rt.mean"))


_OPTIONS = {
    "weight": "None", "pos_weight": "None", "beta": "1.0", "delta": "1.0", "log_target": "False",
}  # fmt: skip


def _elementwise_code(name: str, mean: str = "") -> Callable[[Mapping[str, str]], str]:
    """The call of a loss, or ``mean`` of its elements."""

    def code(args: Mapping[str, str]) -> str:
        options = "".join(f", {k}={args[k]}" for k, default in _OPTIONS.items() if args.get(k, default) != default)
        reduction = "none" if mean else REDUCTIONS[int(args["reduction"])]
        call = f"F.{name}({args['self']}, {args['target']}{options}, reduction={reduction!r})"
        return f"{mean}({call}, {args['axis']})" if mean else call

    return code


for _name in (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "kl_div", "l1_loss", "mse_loss",
    "smooth_l1_loss",
):  # fmt: skip
    rule(
        getattr(aten, _name),
        _elementwise_loss,
        code=_elementwise_code(_name),
        implementations=(Implementation("global count", _over_elements, counts=True),),
    )
