"""Looking up rows, and the masked lookup in a table whose rows are sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch

from placement.graph.ir import Node, Value
from placement.graph.padded import EMBEDDING
from placement.graph.signature import Dim, Signature
from placement.rules.core import Form, Implementation, arguments, aten, rule
from placement.rules.lengths import embedded, looked_up
from placement.rules.strategies import Context
from placement.types import P, R


def _embedding(node: Node) -> Signature:
    """``v h, * -> * h``: rows are needed whole, each lookup stands alone, linear in the table."""
    _, indices = node.operands
    star: tuple[Dim, ...] = tuple((f"i{k}",) for k in range(len(indices.shape)))
    blocked = {"v"}
    if arguments(node)["scale_grad_by_freq"]:  # the gradient counts how often a row occurs in all indices
        blocked |= {letter for (letter,) in star}
    return Signature(((("v",), ("h",)), star), ((*star, ("h",)),), frozenset(blocked), frozenset({0}))


def _masked(node: Node, context: Context) -> Iterator[Form]:
    """Each rank looks up the rows that it has and gives zeros for the others: a partial sum."""
    if arguments(node)["scale_grad_by_freq"]:
        return
    table = node.operands[0]
    for run in context.runs(context.dims.of(table)[0]):
        kind = context.shard(table, run)
        if kind is not None:
            yield Form((kind, R), (P,), code=_masked_code)


def _padding(args: Mapping[str, str]) -> str:
    padding = args.get("padding_idx", "-1")
    return "" if padding == "-1" else f", padding_idx={padding}"


def _masked_code(args: Mapping[str, str]) -> str:
    rows = f", rows={args['size']}" if "size" in args else ""
    given = f"{args['indices']}, {args['weight']}, {args['axis']}{args['weight_cut']}{_padding(args)}{rows}"
    return f"rt.masked_embedding({given})"


def _lookup_code(args: Mapping[str, str]) -> str:
    option = _padding(args) + (", scale_grad_by_freq=True" if args.get("scale_grad_by_freq") == "True" else "")
    table = f"{args['weight']}[:{args['size']}]" if "size" in args else args["weight"]
    return f"F.embedding({args['indices']}, {table}{option})"


_MASKED = Implementation("masked lookup", _masked)

rule(
    [aten.embedding, EMBEDDING],
    _embedding,
    code=_lookup_code,
    implementations=(_MASKED,),
    padded=EMBEDDING,
    past=embedded,
)


def _aligned(node: Node, source: Value, index: Value) -> tuple[tuple[Dim, ...], tuple[Dim, ...], frozenset[str]]:
    """The dims of ``source`` and ``index`` and what is blocked: they run together where their sizes agree."""
    rank = len(source.shape)
    if not rank:
        return (), (), frozenset()
    dim = arguments(node)["dim"] % rank
    together = [i != dim and a == b for i, (a, b) in enumerate(zip(source.shape, index.shape, strict=True))]
    dims = tuple((f"d{i}",) if together[i] else (f"s{i}",) for i in range(rank))
    indices = tuple((f"d{i}",) for i in range(rank))
    blocked = {f"s{i}" for i in range(rank) if not together[i]}
    return dims, indices, frozenset(blocked)


def _gather(node: Node) -> Signature | None:
    """Along the gathered dim the source is needed whole, and each index stands alone."""
    source, index = node.operands
    if len(source.shape) != len(index.shape):
        return None
    dims, indices, blocked = _aligned(node, source, index)
    dim = arguments(node)["dim"] % max(len(source.shape), 1)
    uneven = {f"d{i}" for i, d in enumerate(dims) if d[0].startswith("s") and i != dim}
    return Signature((dims, indices), (indices,), blocked | uneven, frozenset({0}))


rule(aten.gather, _gather, past=looked_up)


def _scatter(node: Node) -> Signature | None:
    """The reverse: what is written stays in its row; linear in the source and what is written together.

    Numbers that are added may come from any rank; of those that replace others, one rank has to know all.
    """
    values = node.operands
    if len({len(v.shape) for v in values}) != 1 or (len(values) == 3 and values[1].shape != values[2].shape):
        return None
    dims, indices, blocked = _aligned(node, values[0], values[1])
    dim = arguments(node)["dim"] % max(len(dims), 1)
    adds = node.op is aten.scatter_add.default
    whole = blocked | {f"d{i}" for i, d in enumerate(dims) if d[0].startswith("s") and not (adds and i == dim)}
    together = frozenset({0, 2}) if len(values) == 3 else frozenset[int]()
    return Signature((dims, *((indices,) * (len(values) - 1))), (dims,), whole, additive=together)


rule([aten.scatter.src, aten.scatter.value, aten.scatter_add], _scatter)


def _scatter_reduce(node: Node) -> Signature | None:
    """As above, but one rank has to know all that meet in a place; of sums only is it linear."""
    found = _scatter(node)
    linear = arguments(node)["reduce"] == "sum" and arguments(node)["include_self"]
    return found if found is None or linear else dataclasses.replace(found, additive=frozenset())


rule(aten.scatter_reduce.two, _scatter_reduce)


def _masked_scatter(node: Node) -> Signature | None:
    """Elements of a source, in order, take the places that a mask tells: who comes first has to be known.

    A mask of rows, of size one in the last dim, takes whole rows of the source: then the last dim is parallel.
    """
    target, mask, source = node.operands
    rank, size = len(target.shape), target.shape[-1] if target.shape else 1
    rows = len(mask.shape) > 0 and mask.shape[-1] == 1 and len(source.shape) > 1 and source.shape[-1] == size != 1
    dims = tuple((f"d{i}",) for i in range(rank))
    offset = rank - len(mask.shape)
    where = tuple(
        () if s == 1 and target.shape[i + offset] != 1 else dims[i + offset] for i, s in enumerate(mask.shape)
    )
    given = tuple((f"s{i}",) for i in range(len(source.shape)))
    if rows:
        given = (*given[:-1], dims[-1])
    whole = {letter for dims_ in (dims, given) for (letter,) in dims_} - ({f"d{rank - 1}"} if rows else set())
    return Signature((dims, where, given), (dims,), frozenset(whole), additive=frozenset({0, 2}))


rule(aten.masked_scatter, _masked_scatter)


def _index_select(node: Node) -> Signature:
    """Whole along the dim that is selected from, and each index stands alone."""
    source, index = node.operands
    dim = arguments(node)["dim"] % max(len(source.shape), 1)
    before = tuple((f"d{i}",) for i in range(len(source.shape)))
    indices: tuple[Dim, ...] = (("i",),) if index.shape else ()
    after = tuple(("i",) if i == dim else d for i, d in enumerate(before))
    return Signature((before, indices), (after,), frozenset({f"d{dim}"}), frozenset({0}))


rule(aten.index_select, _index_select, past=looked_up)


def _index_add(node: Node) -> Signature:
    """Rows of any rank are added to whole dims; linear in the source and what is added together."""
    source, _, added = node.operands
    rank = len(source.shape)
    dim = arguments(node)["dim"] % max(rank, 1)
    dims = tuple((f"d{i}",) for i in range(rank))
    rows = tuple(("i",) if i == dim else (f"d{i}",) for i in range(len(added.shape)))
    return Signature((dims, (("i",),), rows), (dims,), frozenset({f"d{dim}"}), additive=frozenset({0, 2}))


rule(aten.index_add, _index_add)


def _index(node: Node) -> Signature | None:
    """``x[i, :, j]``: indices broadcast and each of their places stands alone; dims without an index are parallel.

    The broadcast dims stand where the indices are, or in front where these are not side by side.
    """
    source, listed = node.operands[0], node.args[1]
    if any(v is not None and not _counts(v) for v in listed):
        return None  # a mask: how much it selects depends on the data
    at = [i for i, v in enumerate(listed) if v is not None]
    indices = [listed[i] for i in at]
    rank = max(len(v.shape) for v in indices)
    place = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    dims = tuple((f"d{i}",) for i in range(len(source.shape)))
    kept = [d for i, d in enumerate(dims) if i not in at]
    star: list[Dim] = [(f"i{k}",) for k in range(rank)]
    extent = node.results[0].shape[place : place + rank]

    def letters(index: Value) -> tuple[Dim, ...]:
        offset = rank - len(index.shape)
        return tuple(() if s == 1 and extent[k + offset] != 1 else star[k + offset] for k, s in enumerate(index.shape))

    return Signature(
        operands=(dims, *map(letters, indices)),
        results=((*kept[:place], *star, *kept[place:]),),
        blocked=frozenset(f"d{i}" for i in at),
        linear=frozenset({0}),
    )


def _counts(index: Value) -> bool:
    return index.dtype in (torch.int64, torch.int32)


rule(aten.index.Tensor, _index, past=looked_up)


def _one_hot(node: Node) -> Signature | None:
    """A new last dim of classes, of a number that is given."""
    (source,) = node.operands
    if arguments(node)["num_classes"] == -1:
        return None
    dims = tuple((f"d{i}",) for i in range(len(source.shape)))
    return Signature((dims,), ((*dims, ("c",)),), frozenset({"c"}))


rule(aten.one_hot, _one_hot)


def _found_in(node: Node) -> Signature | None:
    """Each element by itself, in a list that is needed whole."""
    first, second = node.operands if len(node.operands) == 2 else (None, None)
    if first is None or second is None:
        return None
    backwards = node.op is aten.searchsorted.Tensor  # the list comes first
    listed, elements = (first, second) if backwards else (second, first)
    if len(listed.shape) != 1 and node.op is not aten.isin.Tensor_Tensor:
        return None  # a list for each row
    dims = tuple((f"d{i}",) for i in range(len(elements.shape)))
    inside = tuple((f"s{i}",) for i in range(len(listed.shape)))
    operands = (inside, dims) if backwards else (dims, inside)
    return Signature(operands, (dims,), frozenset(letter for (letter,) in inside))


rule([aten.bucketize.Tensor, aten.isin.Tensor_Tensor, aten.searchsorted.Tensor], _found_in)
