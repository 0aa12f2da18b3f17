"""Attention as one op: parallel in batch and heads, and in the queries where no flag depends on their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod

from placement.graph.ir import Node, Value, evaluate
from placement.graph.segments import Factor
from placement.graph.signature import Dim, Signature
from placement.rules.core import Collective, Form, Implementation, Way, arguments, aten, rule
from placement.rules.lengths import attended
from placement.rules.strategies import Context
from placement.types import Action, R


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


def _ring(node: Node, context: Context) -> Iterator[Form]:
    """Each rank has some of the queries, and keys and values of the same tokens: the latter go round."""
    if _unfit_for_ring(node):
        return
    (query, key, value), (result,) = node.operands, node.results
    groups = context.repeated(key) & context.repeated(value) & set(context.dims.of(key)[-3])
    own = (*sorted(groups, key=lambda factor: factor.id), *context.dims.of(value)[-1])
    code = partial(_goes_round, repeated=_once(groups, context))
    for run in context.runs(context.dims.of(query)[-2]):
        kinds = [context.shard(one, run) for one in (query, key, value, result)]
        along = {place[0] for one in (query, key, value) if (place := context.dims.locate(one, run)) is not None}
        if along == {len(query.shape) - 2} and all(kind is not None for kind in kinds):
            operands = tuple(kind for kind in kinds[:3] if kind is not None)
            yield Form(operands, operands[:1], _sent_round(node, groups, context), code, own, met=(1, 2))


def _unfit_for_ring(node: Node) -> str:
    """Why no keys and values can go round, whatever the axis; '' where they can."""
    given = arguments(node)
    query, key, value = given["query"], given["key"], given["value"]
    if given["attn_mask"] is not None:
        return "the only mask of a ring is the causal one, and here is another"
    if given["dropout_p"]:
        return "a ring drops no probabilities, and here some are"
    if query.shape[:-3] != key.shape[:-3] or key.shape[:-1] != value.shape[:-1] or query.shape[-2] != key.shape[-2]:
        return "in a ring queries, keys and values are of the same tokens"
    return ""


def _once(groups: frozenset[Factor], context: Context) -> int:
    return prod(evaluate(factor.size, context.hints) for factor in groups)


def _sent_round(node: Node, groups: frozenset[Factor], context: Context) -> tuple[Collective, ...]:
    """Keys and values n - 1 times each way; backward what they gather of their gradients follows them, as often.

    All of it runs behind the work, but for the last step of the gradients, which brings them home. Heads that are
    repeated for the queries of a group are sent once.
    """
    _, key, value = node.operands
    count = sum(prod(evaluate(size, context.hints) for size in one.shape) for one in (key, value))
    count //= _once(groups, context)
    narrow, wide = count * key.dtype.itemsize, count * max(key.dtype.itemsize, 4)
    found = [Collective(Action.SEND_RECV, narrow, "forward", 1, but=1, behind=True)]
    if node.results[0].requires_grad:
        found.append(Collective(Action.SEND_RECV, narrow, "backward", 1, but=1, behind=True))
    if key.requires_grad or value.requires_grad:
        found.append(Collective(Action.SEND_RECV, wide, "backward", 1, but=2, behind=True))
        found.append(Collective(Action.SEND_RECV, wide, "backward", 1))
    return tuple(found)


def _goes_round(args: Mapping[str, str], *, repeated: int) -> str:
    key, value, gqa = args["key"], args["value"], args.get("enable_gqa", "False")
    if repeated > 1 and gqa == "False":
        key, value, gqa = (f"{key}[..., ::{repeated}, :, :]", f"{value}[..., ::{repeated}, :, :]", "True")
    options = "".join(
        f", {name}={text}"
        for name, text, default in (
            ("is_causal", args.get("is_causal", "False"), "False"),
            ("scale", args.get("scale", "None"), "None"),
            ("enable_gqa", gqa, "False"),
        )
        if text != default
    )
    return f"rt.ring_attention({args['query']}, {key}, {value}, {args['axis']}{args['query_cut']}{options})"


def _no_gather(node: Node, context: Context) -> str:
    mask = arguments(node)["attn_mask"]
    if isinstance(mask, Value) and mask.shape[-2:].count(1) == 0:
        return "its mask is of one sequence twice: where its queries are cut, its keys are as well"
    return _no_cut("queries", node.operands[0], -2, context)


def _no_ring(node: Node, context: Context) -> str:
    return _unfit_for_ring(node) or _no_cut("queries", node.operands[0], -2, context)


def _no_all_to_all(node: Node, context: Context) -> str:
    return _no_cut("heads", node.operands[0], -3, context)


def _no_cut(what: str, query: Value, dim: int, context: Context) -> str:
    size = evaluate(query.shape[dim], context.hints)
    if size % context.n:
        return f"the axis of {context.n} does not divide the {size} {what}"
    return f"the {size} {what} cannot be cut on this axis"


rule(
    aten.scaled_dot_product_attention,
    _attention,
    flops=_flops,
    code=_code,
    implementations=(Implementation("own queries", _own_queries), Implementation("ring", _ring, joined=True)),
    past=attended,
    ways=(
        Way("gather", ("q",), _no_gather, ("", "own queries")),
        Way("all_to_all", ("h", "g"), _no_all_to_all),
        Way("ring", ("q",), _no_ring, ("ring",)),
    ),
)
