"""Attention as one op: parallel in batch and heads, and in the queries where no flag depends on their place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from math import prod

from placement.graph.attention import ATTENTION, bounds
from placement.graph.ir import Node, Value, evaluate
from placement.graph.segments import Factor, flattened
from placement.graph.signature import Dim, Signature
from placement.rules.core import Collective, Form, Implementation, Way, arguments, aten, rule
from placement.rules.lengths import attended
from placement.rules.strategies import Context
from placement.types import Action, R


def _attention(node: Node) -> Signature | None:
    """``b h q d, b h k d, b h k e, [mask] -> b h q e``; keys and the inner dim are needed whole.

    With grouped queries the heads of q are kv_heads · group, those of k and v kv_heads. Tensors of three dims
    have a batch where others have heads. Marks are ``[b] q`` and ``[b] k``; where a query's place or mark matters
    queries are needed whole, too.
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
    for name, tokens in (("of_query", "q"), ("of_key", "k")):
        operands += [(*batch[: len(mark.shape) - 1], (tokens,)) for mark in given.get(name, ())]
    return Signature(
        operands=tuple(operands),
        results=((*batch, group, ("q",), ("e",)),),
        blocked=frozenset({"k", "d"} | ({"q"} if by_place(node) else set[str]())),
        linear=frozenset({2}) if not given["dropout_p"] else frozenset(),
        sizes=sizes,
    )


def by_place(node: Node) -> bool:
    """Whether what a query sees depends on which one it is, and no mask says it."""
    return bool(arguments(node).get("of_query")) or bounds(node) != (None, None)


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


_NAMES = ("attn_mask", "is_causal", "scale", "enable_gqa")
_SEEN = ("left", "right", "compare", "of_query", "of_key", "spare")
_LEFT_OUT = {
    **dict.fromkeys(("attn_mask", "scale", "left", "right", "softcap"), "None"),
    **dict.fromkeys(("is_causal", "enable_gqa"), "False"),
    **dict.fromkeys(("compare", "of_query", "of_key"), "()"),
    "spare": "",
}


def _options(args: Mapping[str, str], names: Iterable[str]) -> str:
    """``, name=text`` of those that say something."""
    given = ((name, args.get(name, _LEFT_OUT[name])) for name in names)
    return "".join(f", {name}={text}" for name, text in given if text != _LEFT_OUT[name])


def _code(args: Mapping[str, str]) -> str:
    args = _bounds(args) if args.get("spare") else args
    if seen := _options(args, _SEEN):
        seen += _options(args, ("attn_mask",))
        args = {**args, "attn_mask": f"rt.visible({args['query']}, {args['key']}{seen})"}
    return _call(args)


def _call(args: Mapping[str, str]) -> str:
    """Attention with all that is hidden in its mask."""
    call = f"{args['query']}, {args['key']}, {args['value']}"
    if args.get("softcap", "None") != "None":
        options = f"{args['softcap']}{_dropping(args)}{_options(args, ('attn_mask', 'scale', 'enable_gqa'))}"
        return f"rt.capped_attention({call}, {options})"
    if not _drops(args):
        return f"F.scaled_dot_product_attention({call}{_options(args, _NAMES)})"
    return (
        f"rt.attention(self, {call}, {args['dropout_p']}, {args['site']}"
        f"{args['query_on']}{args['longer']}{_options(args, _NAMES)})"
    )


def _drops(args: Mapping[str, str]) -> bool:
    return args.get("dropout_p", "0.0") not in ("0.0", "0")


def _dropping(args: Mapping[str, str]) -> str:
    """``, dropping=…`` where probabilities are dropped."""
    call = f"self, {args.get('dropout_p')}, {args['site']}{args['query_on']}{args['longer']}"
    return f", dropping=rt.drops({call})" if _drops(args) else ""


def _own_queries(node: Node, context: Context) -> Iterator[Form]:
    """Each rank has some of the queries, of which it knows the places, and all the keys, marks and rows of a mask."""
    if not by_place(node) and not _of_pairs(node, context):
        return
    query, (result,) = node.operands[0], node.results
    for run in context.runs(context.dims.of(query)[-2]):
        kinds = context.shard(query, run), context.shard(result, run)
        if kinds[0] is not None and kinds[1] is not None:
            yield Form((kinds[0], *(R,) * (len(node.operands) - 1)), (kinds[1],), (), _of_own_queries)


def _of_pairs(node: Node, context: Context) -> bool:
    """Whether a mask is of one sequence twice: no rank's queries alone can be cut of it."""
    mask = arguments(node).get("attn_mask")
    if not isinstance(mask, Value) or len(mask.shape) < 2:
        return False
    queries, keys = (set(flattened(context.dims.of(mask)[dim])) for dim in (-2, -1))
    return bool(queries & keys)


def _of_own_queries(args: Mapping[str, str]) -> str:
    seen = _options(_bounds(args), (*_SEEN, "attn_mask"))
    mask = f"rt.visible({args['query']}, {args['key']}, {args['axis']}{args['query_cut']}{seen})"
    return _call({**args, "attn_mask": mask, "is_causal": "False"})


def _bounds(args: Mapping[str, str]) -> Mapping[str, str]:
    """With the bound that the causal flag is."""
    return {**args, "right": "0", "is_causal": "False"} if args.get("is_causal", "False") != "False" else args


def _ring(node: Node, context: Context) -> Iterator[Form]:
    """Each rank has some of the queries, and keys and values of the same tokens: the latter go round. Marks are whole.

    What a rank sees of a block that comes by it tells from the places of both and from the marks.
    """
    if _unfit_for_ring(node):
        return
    (query, key, value, *marks), (result,) = node.operands, node.results
    groups = _groups(key, value, context)
    own = (*groups, *context.dims.of(value)[-1])
    code = partial(_goes_round, repeated=_once(groups, context))
    for run in context.runs(context.dims.of(query)[-2]):
        kinds = [context.shard(one, run) for one in (query, key, value, result)]
        along = {place[0] for one in (query, key, value) if (place := context.dims.locate(one, run)) is not None}
        if along == {len(query.shape) - 2} and all(kind is not None for kind in kinds):
            operands = (*(kind for kind in kinds[:3] if kind is not None), *(R for _ in marks))
            yield Form(operands, operands[:1], _sent_round(node, groups, context), code, own, met=(1, 2))


def _unfit_for_ring(node: Node) -> str:
    """Why no keys and values can go round, whatever the axis; '' where they can."""
    given = arguments(node)
    query, key, value = given["query"], given["key"], given["value"]
    if given.get("attn_mask") is not None:
        return "its mask is a tensor [queries, keys], of which no rank has what it needs"
    if query.shape[:-3] != key.shape[:-3] or key.shape[:-1] != value.shape[:-1] or query.shape[-2] != key.shape[-2]:
        return "in a ring queries, keys and values are of the same tokens"
    return ""


def _groups(key: Value, value: Value, context: Context) -> tuple[Factor, ...]:
    """The factors by which each head of keys and values stands several times in a row, for those of a group.

    Heads that are repeated as a whole row of them stand apart, and are no groups.
    """
    repeated = context.repeated(key) & context.repeated(value)
    heads = context.dims.of(key)[-3]
    count = next((at for at, factor in enumerate(reversed(heads)) if factor not in repeated), len(heads))
    return heads[len(heads) - count :]


def _once(groups: tuple[Factor, ...], context: Context) -> int:
    return prod(evaluate(factor.size, context.hints) for factor in groups)


def _sent_round(node: Node, groups: tuple[Factor, ...], context: Context) -> tuple[Collective, ...]:
    """Keys and values n - 1 times each way; backward what they gather of their gradients follows them, as often.

    All of it runs behind the work, but for the last step of the gradients, which brings them home. Heads that are
    repeated for the queries of a group are sent once.
    """
    _, key, value = node.operands[:3]
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
    key, value = args["key"], args["value"]
    args = {**_bounds(args)}
    if repeated > 1 and args.get("enable_gqa", "False") == "False":
        key, value, args["enable_gqa"] = f"{key}[..., ::{repeated}, :, :]", f"{value}[..., ::{repeated}, :, :]", "True"
    options = _dropping(args) + _options(args, (*_SEEN, "scale", "enable_gqa", "softcap"))
    return f"rt.ring_attention({args['query']}, {key}, {value}, {args['axis']}{args['query_cut']}{options})"


def _no_gather(node: Node, context: Context) -> str:
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
    (aten.scaled_dot_product_attention, ATTENTION),
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
