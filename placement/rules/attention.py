"""Attention as one op: parallel in batch and heads, and in the queries where no flag depends on their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from placement.graph.ir import Node, Value
from placement.graph.signature import Dim, Signature
from placement.rules.core import Form, Implementation, arguments, aten, rule
from placement.rules.lengths import attended
from placement.rules.strategies import Context
from placement.types import R


def _attention(node: Node) -> Signature | None:
    """``b h q d, b h k d, b h k e, [mask] -> b h q e``; keys and the inner dim are needed whole.

    With grouped queries the heads of q are kv_heads · group, those of k and v kv_heads. Tensors of three dims
    have a batch where others have heads.
    """
    given = arguments(node)
    query, key = given["query"], given["key"]
    (result,) = node.results
    rank = len(result.shape)
    batch: list[Dim] = [(f"b{i}",) for i in range(rank - 3)]
    heads: Dim = ("h",)
    sizes = {}
    group: Dim = ("h",)
    if rank < 3:
        return None
    if given.get("enable_gqa") and query.shape[-3] != key.shape[-3]:
        heads, group = ("h",), ("h", "g")
        sizes = {"h": key.shape[-3], "g": query.shape[-3] // key.shape[-3]}
    operands: list[tuple[Dim, ...]] = [
        (*batch, group, ("q",), ("d",)),
        (*batch, heads, ("k",), ("d",)),
        (*batch, heads, ("k",), ("e",)),
    ]
    mask = given.get("attn_mask")
    if isinstance(mask, Value):
        operands.append(_mask(mask, rank, group))
    blocked = {"k", "d"} | ({"q"} if given["is_causal"] else set[str]())
    return Signature(
        operands=tuple(operands),
        results=((*batch, group, ("q",), ("e",)),),
        blocked=frozenset(blocked),
        linear=frozenset({2}) if not given["dropout_p"] else frozenset(),
        sizes=sizes,
    )


def _mask(mask: Value, rank: int, heads: Dim) -> tuple[Dim, ...]:
    """A mask broadcasts to [batch, heads, queries, keys]."""
    full: list[Dim] = [*((f"b{i}",) for i in range(rank - 3)), heads, ("q",), ("k",)]
    offset = rank - len(mask.shape)
    return tuple(() if size == 1 else full[i + offset] for i, size in enumerate(mask.shape))


def _flops(extent: Mapping[str, int]) -> int:
    pairs = extent["q"] * extent["k"] * extent["h"] * extent.get("g", 1)
    for letter, size in extent.items():
        pairs *= size if letter.startswith("b") else 1
    return 2 * pairs * (extent["d"] + extent["e"])


def _code(args: Mapping[str, str]) -> str:
    options = "".join(
        f", {name}={args[name]}"
        for name, default in (("attn_mask", "None"), ("is_causal", "False"), ("scale", "None"), ("enable_gqa", "False"))
        if args.get(name, default) != default
    )
    if args.get("dropout_p", "0.0") in ("0.0", "0"):
        return f"F.scaled_dot_product_attention({args['query']}, {args['key']}, {args['value']}{options})"
    return (
        f"rt.attention(self, {args['query']}, {args['key']}, {args['value']}, {args['dropout_p']}, {args['site']}"
        f"{args['query_on']}{args['longer']}{options})"
    )


def _own_queries(node: Node, context: Context) -> Iterator[Form]:
    """Each rank has some of the queries of causal attention and all the keys: it sees up to where its queries are."""
    if not arguments(node)["is_causal"]:
        return
    query, (result,) = node.operands[0], node.results
    for run in context.runs(context.dims.of(query)[-2]):
        kinds = context.shard(query, run), context.shard(result, run)
        if kinds[0] is not None and kinds[1] is not None:
            yield Form((kinds[0], R, R), (kinds[1],), (), _of_own_queries)


def _of_own_queries(args: Mapping[str, str]) -> str:
    mask = f"rt.causal_mask({args['query']}, {args['key']}, {args['axis']}{args['query_cut']})"
    return _code({**args, "attn_mask": mask, "is_causal": "False"})


rule(
    aten.scaled_dot_product_attention,
    _attention,
    flops=_flops,
    code=_code,
    implementations=(Implementation("own queries", _own_queries),),
    past=attended,
)
