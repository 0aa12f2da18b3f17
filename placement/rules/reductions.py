"""Ops that need one or more dims whole, and sums and means over dims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch

from placement.graph.ir import Node, numel
from placement.graph.signature import Dim, Signature
from placement.rules.core import Collective, Form, Implementation, arguments, aten, elementwise, rule
from placement.rules.lengths import before, masked_softmax, running
from placement.rules.strategies import Context
from placement.types import Action, P

COUNT = Collective(Action.ALL_REDUCE, 8, "forward")
"""How many terms the ranks have together: one number, agreed on before a global mean."""


def reduced_dims(node: Node) -> tuple[int, ...]:
    """The dims of operand 0 that the node reduces, all where none is given."""
    rank = len(node.operands[0].shape)
    dim = arguments(node).get("dim")
    if isinstance(dim, int):
        dim = (dim,)
    listed: Sequence[int] = dim or range(rank)
    return tuple(sorted(d % rank for d in listed)) if rank else ()


def _reduction(node: Node, *, blocked: bool, linear: bool = False) -> Signature:
    """Reduced dims are contracted, or whole where they are ``blocked``; kept, they have size one."""
    (source,) = node.operands
    dims = reduced_dims(node)
    letters = tuple((f"d{i}",) for i in range(len(source.shape)))
    keep = len(node.results[0].shape) == len(source.shape)
    after: tuple[Dim, ...] = tuple(() if i in dims else d for i, d in enumerate(letters) if keep or i not in dims)
    whole = frozenset(f"d{i}" for i in dims if blocked)
    return Signature((letters,), (after,) * len(node.results), whole, frozenset({0}) if linear else frozenset())


def _global_count(node: Node, context: Context) -> Iterator[Form]:
    """A mean over a sharded dim: the local sum over the global count, which the ranks agree on in one launch."""
    (source,) = node.operands
    code = "rt.mean({self}, {axis}, {dim}, keepdim={keepdim}, dtype={dtype})"
    if node.op is aten.mean.default:
        code = "rt.mean({self}, {axis}, dtype={dtype})"
    for dim in reduced_dims(node):
        for run in context.runs(context.dims.of(source)[dim]):
            kind = context.shard(source, run)
            if kind is not None:
                yield Form((kind,), (P,), (COUNT,), code)


rule(
    [aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.default, aten.count_nonzero.dim_IntList, aten.nansum],
    lambda node: _reduction(node, blocked=False, linear=node.op in (aten.sum.default, aten.sum.dim_IntList)),
)
rule(
    [aten.mean.default, aten.mean.dim],
    lambda node: _reduction(node, blocked=True, linear=True),
    implementations=(Implementation("global count", _global_count, counts=True),),
)
rule(
    [
        aten.all, aten.amax, aten.amin, aten.any, aten.argmax, aten.argmin, aten.linalg_vector_norm, aten.logsumexp,
        aten.max.default, aten.max.dim, aten.median, aten.min.default, aten.min.dim, aten.norm.Scalar,
        aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype, aten.norm.ScalarOpt_dtype, aten.prod, aten.std,
        aten.std_mean, aten.var, aten.var_mean,
    ],
    lambda node: _reduction(node, blocked=True),
)  # fmt: skip


def along(*, linear: Iterable[int] = ()) -> Callable[[Node], Signature]:
    """Of the shape of operand 0, whole along ``dim``."""

    def signature(node: Node) -> Signature:
        return elementwise(node, linear=linear, blocked=(arguments(node)["dim"],))

    return signature


rule([aten.softmax.int, aten._softmax], along(), past=masked_softmax)  # noqa: SLF001 - aten's names
rule([aten.log_softmax.int, aten._log_softmax], along())  # noqa: SLF001 - aten's names
rule(aten.cumsum, along(linear=(0,)), past=running)
rule([aten.cumprod, aten.logcumsumexp], along(), past=before)
rule([aten.argsort, aten.sort.default, aten.sort.stable], along())


def _topk(node: Node) -> Signature:
    """The dim is whole before, and shorter after."""
    (source,) = node.operands
    rank = len(source.shape)
    dim = arguments(node)["dim"] % max(rank, 1)
    before = tuple((f"d{i}",) for i in range(rank))
    after = tuple(("k",) if i == dim else d for i, d in enumerate(before))
    return Signature((before,), (after, after), frozenset({f"d{dim}", "k"}))


rule(aten.topk, _topk)


def _norm(node: Node) -> Signature:
    """Normalised dims are whole; a weight and a bias run along them. Statistics have them at size one."""
    count = len(arguments(node)["normalized_shape"])
    rank = len(node.operands[0].shape)
    dims = tuple((f"d{i}",) for i in range(rank))
    inner = dims[rank - count :]
    statistics: tuple[Dim, ...] = (*dims[: rank - count], *((),) * count)
    return Signature(
        operands=(dims, *(inner for _ in node.operands[1:])),
        results=(dims, *(statistics for _ in node.results[1:])),
        blocked=frozenset(letter for (letter,) in inner),
    )


def _statistics(code: str, launches: int) -> Implementation:
    """Each rank has a part of the normalised dims, and of weight and bias: a number per row is reduced each way."""

    def forms(node: Node, context: Context) -> Iterator[Form]:
        source, count = node.operands[0], len(arguments(node)["normalized_shape"])
        wide = torch.promote_types(source.dtype, torch.float32)
        rows = numel(source.shape[: len(source.shape) - count], context.hints) * wide.itemsize
        phases = ("forward", "backward") if node.results[0].requires_grad else ("forward",)
        one = partial(Collective, Action.ALL_REDUCE, rows, like=0, summed=wide)
        sent = tuple(one(phase=phase) for phase in phases for _ in range(launches))
        for dim in context.dims.of(source)[len(source.shape) - count :]:
            for run in context.runs(dim):
                kinds = [context.shard(value, run) for value in (*node.operands, *node.results)]
                given = tuple(kind for kind in kinds if kind is not None)
                if len(given) == len(kinds):
                    yield Form(given[:-1], given[-1:], sent, code.replace("COUNT", str(count)))

    return Implementation("reduced statistics", forms)


rule(
    aten.layer_norm,
    _norm,
    code="F.layer_norm({input}, {normalized_shape}, {weight}, {bias}, {eps})",
    implementations=(_statistics("rt.layer_norm({input}, {axis}, COUNT, {weight}, {bias}, {eps})", 2),),
)


def _rms_code(args: Mapping[str, str]) -> str:
    if args["eps"] == "None" or not args["normalized_shape"].endswith(",)"):  # of several dims
        return f"F.rms_norm({args['input']}, {args['normalized_shape']}, {args['weight']}, {args['eps']})"
    return f"rt.lean_rms_norm({args['input']}, {args['weight']}, {args['eps']})"


rule(
    aten.rms_norm,
    _norm,
    code=_rms_code,
    implementations=(_statistics("rt.rms_norm({input}, {axis}, COUNT, {weight}, {eps})", 1),),
)
rule(aten.native_layer_norm, _norm)


def _group_norm(node: Node) -> Signature:
    """Parallel in the batch: the op is told the global number of groups."""
    dims = tuple((f"d{i}",) for i in range(len(node.operands[0].shape)))
    whole = frozenset(letter for (letter,) in dims[1:])
    return Signature((dims, *((dims[1],) for _ in node.operands[1:])), (dims,), whole)


rule(aten.group_norm, _group_norm)


def _weight_norm(node: Node) -> Signature:
    """A direction of length one times a length, for each index of one dim; the others are needed whole."""
    rank, dim = len(node.operands[0].shape), arguments(node)["dim"]
    dims = tuple((f"d{i}",) for i in range(rank))
    lengths: tuple[Dim, ...] = tuple(d if i == dim % rank else () for i, d in enumerate(dims))
    whole = frozenset(letter for i, (letter,) in enumerate(dims) if i != dim % rank)
    return Signature((dims, lengths), (dims,), whole, frozenset({1}))


rule(aten._weight_norm, _weight_norm)  # noqa: SLF001 - aten's name
