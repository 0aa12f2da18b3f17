"""Ops that need one or more dims whole, and sums and means over dims."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from placement.graph.ir import Node, evaluate
from placement.graph.signature import Dim, Signature
from placement.rules.core import Collective, Form, Implementation, Regrouping, arguments, aten, elementwise, lookup, rule
from placement.rules.strategies import Context
from placement.types import Action, P, R, Type


def reduced_dims(node: Node) -> tuple[int, ...]:
    """The dims of operand 0 that the node reduces, all where none is given."""
    rank = len(node.operands[0].shape)
    dim = arguments(node).get("dim")
    dims: Sequence[int] = range(rank) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    return tuple(sorted(d % rank for d in dims))


def _reduction(node: Node, *, blocked: bool) -> Signature:
    (source,) = node.operands
    dims = reduced_dims(node)
    letters = tuple((f"d{i}",) for i in range(len(source.shape)))
    keep = len(node.results[0].shape) == len(source.shape) and bool(dims)
    after: tuple[Dim, ...] = tuple(() if i in dims else letter for i, letter in enumerate(letters) if keep or i not in dims)
    whole = frozenset(f"d{i}" for i in dims) if blocked else frozenset[str]()
    return Signature((letters,), (after,) * len(node.results), whole, frozenset() if _nonlinear(node) else frozenset({0}))


def _nonlinear(node: Node) -> bool:
    return node.op not in (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)


def _global_count(node: Node, context: Context) -> Iterator[Form]:
    """A mean over a sharded dim: the local sum over the global count, which the ranks agree on in one launch."""
    (source,), (result,) = node.operands, node.results
    for dim in reduced_dims(node):
        for run in context.runs(context.dims.of(source)[dim]):
            kind = context.shard(source, run)
            if kind is not None:
                count = Collective(Action.ALL_REDUCE, 8, "forward")
                code = "rt.mean({self}, {axis}, {dim}, keepdim={keepdim}, dtype={dtype})"
                if node.op is aten.mean.default:
                    code = "rt.mean({self}, {axis}, dtype={dtype})"
                yield Form((kind,), (P,), (count,), code)
    del result


rule([aten.sum.default, aten.sum.dim_IntList], lambda node: _reduction(node, blocked=False))
rule(
    [aten.mean.default, aten.mean.dim],
    lambda node: _reduction(node, blocked=True),
    implementations=(Implementation("global count", _global_count),),
)
rule(
    [
        aten.amax, aten.amin, aten.max.dim, aten.min.dim, aten.var.correction, aten.std.correction, aten.logsumexp, aten.prod.dim_int,
        aten.any.dim, aten.all.dim, aten.any.default, aten.all.default, aten.argmax, aten.argmin, aten.max.default, aten.min.default,
        aten.linalg_vector_norm, aten.norm.ScalarOpt_dim,
    ],
    lambda node: _reduction(node, blocked=True),
)  # fmt: skip


def _along(*names: str, linear: Iterable[int] = ()) -> object:
    def signature(node: Node) -> Signature:
        given = arguments(node)
        return elementwise(node, linear=linear, blocked=[given[name] for name in names])

    return signature


rule([aten.softmax.int, aten._softmax, aten.log_softmax.int, aten._log_softmax], _along("dim"))  # type: ignore[arg-type]  # noqa: SLF001
rule([aten.cumsum], _along("dim", linear=(0,)))  # type: ignore[arg-type]
rule([aten.cumprod, aten.logcumsumexp], _along("dim"))  # type: ignore[arg-type]
rule(aten.sort.default, _along("dim"))  # type: ignore[arg-type]


def _norm(node: Node) -> Signature:
    """Normalised dims are whole; a weight and a bias run along them."""
    given = arguments(node)
    source = node.operands[0]
    count = len(given["normalized_shape"])
    rank = len(source.shape)
    dims = tuple((f"d{i}",) for i in range(rank))
    inner = dims[rank - count :]
    return Signature(
        operands=(dims, *(inner for _ in node.operands[1:])),
        results=(dims,),
        blocked=frozenset(letter for (letter,) in inner),
    )


rule(
    aten.layer_norm, _norm, code="F.layer_norm({input}, {normalized_shape}, {weight}, {bias}, {eps})"
)
rule(aten.rms_norm, _norm, code="F.rms_norm({input}, {normalized_shape}, {weight}, {eps})")

__all__ = ["R", "Regrouping", "Type", "evaluate", "lookup", "reduced_dims"]
