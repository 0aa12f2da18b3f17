"""Looking up rows, and the masked lookup in a table whose rows are sharded."""

from __future__ import annotations

from collections.abc import Iterator

from placement.graph.ir import Node
from placement.graph.signature import Dim, Signature
from placement.rules.core import Form, Implementation, arguments, aten, rule
from placement.rules.strategies import Context
from placement.types import P, R


def _embedding(node: Node) -> Signature:
    """``v h, * -> * h``: rows are needed whole, each lookup stands alone, linear in the table."""
    table, indices = node.operands
    star: tuple[Dim, ...] = tuple((f"i{k}",) for k in range(len(indices.shape)))
    return Signature(((("v",), ("h",)), star), ((*star, ("h",)),), frozenset({"v"}), frozenset({0}))


def _masked(node: Node, context: Context) -> Iterator[Form]:
    """Each rank looks up the rows that it has and gives zeros for the others: a partial sum."""
    table = node.operands[0]
    for run in context.runs(context.dims.of(table)[0]):
        kind = context.shard(table, run)
        if kind is not None:
            yield Form((kind, R), (P,), code="rt.masked_embedding({indices}, {weight}, {axis}{weight_cut}, padding_idx={padding_idx})")


def _padding(args: dict[str, str]) -> str:
    padding = args.get("padding_idx", "-1")
    option = "" if padding == "-1" else f", padding_idx={padding}"
    return f"F.embedding({args['indices']}, {args['weight']}{option})"


rule(aten.embedding, _embedding, code=_padding, implementations=(Implementation("masked lookup", _masked),))  # type: ignore[arg-type]


def _gather(node: Node) -> Signature:
    """Along the gathered dim the source is needed whole; the others run together where their sizes agree."""
    source, index = node.operands
    dim = arguments(node)["dim"] % len(source.shape)
    rank = len(source.shape)
    same = [source.shape[i] == index.shape[i] for i in range(rank)]
    dims = tuple((f"d{i}",) if i != dim and same[i] else (f"s{i}",) for i in range(rank))
    indices = tuple((f"d{i}",) for i in range(rank))
    blocked = {f"s{i}" for i in range(rank) if i == dim or not same[i]} | {f"d{i}" for i in range(rank) if not same[i] and i != dim}
    return Signature((dims, indices), (indices,), frozenset(blocked), frozenset({0}))


rule(aten.gather, _gather)


def _index_select(node: Node) -> Signature:
    source, _ = node.operands
    dim = arguments(node)["dim"] % len(source.shape)
    before = tuple((f"d{i}",) for i in range(len(source.shape)))
    after = tuple(("i",) if i == dim else d for i, d in enumerate(before))
    return Signature((before, (("i",),)), (after,), frozenset({f"d{dim}"}), frozenset({0}))


rule(aten.index_select, _index_select)
