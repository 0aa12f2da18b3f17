"""Ops that move no data, or only rearrange it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placement.graph.ir import Node, Size, Value
from placement.graph.signature import Dim, Regrouping, Signature
from placement.rules.core import arguments, aten, elementwise, rule
from placement.rules.lengths import chosen, differences, extended, joined, part, replaced


def _letters(value: Value) -> tuple[Dim, ...]:
    return tuple((f"d{i}",) for i in range(len(value.shape)))


def _regroup(node: Node) -> Regrouping:
    asked = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], tuple) else ()
    return Regrouping(node.results[0].shape, asked.index(-1) if -1 in asked else None)


def _same_elements(node: Node) -> Regrouping:
    return Regrouping(node.results[0].shape)


rule(aten.reshape, _regroup, shape="shape", code="{self}.reshape({shape*})", view=True)
rule(aten.unsqueeze, _same_elements, code="{self}.unsqueeze({dim})", view=True)


def _squeeze(node: Node) -> Signature:
    """Without the dims that are of size one; those that are not stay whole, or they might become so on a rank."""
    (source,) = node.operands
    asked = arguments(node)["dim"]
    rank = max(len(source.shape), 1)
    listed = {d % rank for d in ((asked,) if isinstance(asked, int) else asked)}
    dims = _letters(source)
    kept = tuple(d for i, (d, size) in enumerate(zip(dims, source.shape, strict=True)) if i not in listed or size != 1)
    return Signature((dims,), (kept,), frozenset(f"d{i}" for i in listed), frozenset({0}))


rule([aten.squeeze.dim, aten.squeeze.dims], _squeeze, view=True)


def _permuted(node: Node, order: Sequence[int]) -> Signature:
    (dims,) = map(_letters, node.operands)
    return Signature((dims,), (tuple(dims[i] for i in order),), linear=frozenset({0}))


def _transpose(node: Node) -> Signature:
    rank = len(node.operands[0].shape)
    order = list(range(rank))
    first, second = (arguments(node)[name] % rank for name in ("dim0", "dim1"))
    order[first], order[second] = second, first
    return _permuted(node, order)


def _permute(node: Node) -> Signature:
    rank = len(node.operands[0].shape)
    return _permuted(node, [i % rank for i in arguments(node)["dims"]])


rule([aten.transpose.int, aten.swapdims], _transpose, code="{self}.transpose({dim0}, {dim1})", view=True)
rule(aten.permute, _permute, code="{self}.permute({dims*})", view=True)
rule(aten.t, lambda node: _permuted(node, range(len(node.operands[0].shape))[::-1]), code="{self}.t()", view=True)
rule(aten.numpy_T, lambda node: _permuted(node, range(len(node.operands[0].shape))[::-1]), code="{self}.T", view=True)


def _matrix_transpose(node: Node) -> Signature:
    *leading, rows, columns = range(len(node.operands[0].shape))
    return _permuted(node, [*leading, columns, rows])


rule(aten.mT, _matrix_transpose, code="{self}.mT", view=True)


def _movedim(node: Node) -> Signature:
    rank = len(node.operands[0].shape)
    given = arguments(node)
    source, target = ([d] if isinstance(d, int) else list(d) for d in (given["source"], given["destination"]))
    placed = {t % rank: s % rank for s, t in zip(source, target, strict=True)}
    rest = iter(i for i in range(rank) if i not in placed.values())
    return _permuted(node, [placed[i] if i in placed else next(rest) for i in range(rank)])


rule(aten.movedim, _movedim, code="{self}.movedim({source}, {destination})", view=True)


def _expand(node: Node) -> Signature:
    """Dims that the result adds, or extends from one, have letters of their own."""
    (source,), (result,) = node.operands, node.results
    offset = len(result.shape) - len(source.shape)
    dims = tuple(
        () if size == 1 and result.shape[i + offset] != 1 else (f"d{i + offset}",)
        for i, size in enumerate(source.shape)
    )
    return Signature((dims,), (_letters(result),), linear=frozenset({0}))


rule(aten.expand, _expand, shape="size", code="{self}.expand({size*})", view=True)


def _partly(node: Node, dim: int, start: Size, length: Size, step: Size = 1) -> Signature:
    """A part of one dim is taken: the dim is the sum of what is before it, of it, and of what is after it."""
    (source,), (result,) = node.operands, node.results
    dim %= len(source.shape)
    before = _letters(source)
    after = tuple(("part",) if i == dim else before[i] for i in range(len(result.shape)))
    size = source.shape[dim]
    sizes: dict[str, Size] = {}
    if isinstance(size, int) and isinstance(start, int) and isinstance(length, int) and step == 1 and 0 < length < size:
        neighbours = {"before": start, "part": length, "after": size - start - length}
        sizes = {letter: extent for letter, extent in neighbours.items() if extent}
    return Signature(
        (before,),
        (after,),
        frozenset({f"d{dim}", "part"}),
        frozenset({0}),
        sizes=sizes,
        segments={f"d{dim}": tuple(sizes)} if sizes else {},
    )


def _sliced(node: Node) -> Signature:
    given = arguments(node)
    dim, start = given["dim"], given["start"] or 0
    if isinstance(start, int) and start < 0 and isinstance(size := node.operands[0].shape[dim], int):
        start = max(start + size, 0)
    return _partly(node, dim, start, node.results[0].shape[dim], given["step"])


def _narrowed(node: Node) -> Signature:
    given = arguments(node)
    dim, start = given["dim"], given["start"]
    if isinstance(start, int) and start < 0 and isinstance(size := node.operands[0].shape[dim], int):
        start += size
    return _partly(node, dim, start, given["length"])


def _replaced(node: Node, dim: int) -> Signature:
    """A part of one dim is replaced by the second operand: linear in both together, whole in that dim."""
    base, part = node.operands
    dims = _letters(base)
    dim %= len(dims)
    whole = dims[dim][0]
    if len(part.shape) < len(base.shape):  # select_scatter
        inner, blocked = (*dims[:dim], *dims[dim + 1 :]), {whole}
    else:
        inner, blocked = (*dims[:dim], ("part",), *dims[dim + 1 :]), {whole, "part"}
    return Signature((dims, inner), (dims,), blocked=frozenset(blocked), additive=frozenset({0, 1}))


rule([aten.slice_scatter, aten.select_scatter], lambda node: _replaced(node, arguments(node)["dim"]), past=replaced)

_TO_THE_END = str(2**63 - 1)  # how captured programs write a slice without an end


def _slice_code(args: Mapping[str, str]) -> str:
    """``x[:, 4:]``, or ``x[..., 4:]`` where the dim is counted from the end."""
    start = "" if args["start"] in ("0", "None") else args["start"]
    end = "" if args["end"] in (_TO_THE_END, "None") else args["end"]
    step = "" if args["step"] == "1" else f":{args['step']}"
    dim = int(args["dim"])
    before, after = (":, " * dim, "") if dim >= 0 else ("..., ", ", :" * (-dim - 1))
    return f"{args['self']}[{before}{start}:{end}{step}{after}]"


rule(aten.slice.Tensor, _sliced, along=("start", "end"), code=_slice_code, view=True, past=part)
rule(
    aten.narrow,
    _narrowed,
    along=("start", "length"),
    code="{self}.narrow({dim}, {start}, {length})",
    view=True,
    past=part,
)


def _select(node: Node) -> Signature:
    (source,) = node.operands
    dim = arguments(node)["dim"] % len(source.shape)
    dims = _letters(source)
    rest = tuple(d for i, d in enumerate(dims) if i != dim)
    letter = dims[dim][0]
    counted = isinstance(source.shape[dim], int) and source.shape[dim] != 1  # a sequence is no number of pieces
    pieces = frozenset({letter}) if counted else frozenset[str]()
    return Signature((dims,), (rest,), frozenset({letter}), frozenset({0}), pieces=pieces)


rule(aten.select.int, _select, code="{self}.select({dim}, {index})", view=True, past=chosen)


def _unbind(node: Node) -> Signature:
    (source,) = node.operands
    dim = arguments(node)["dim"] % len(source.shape)
    dims = _letters(source)
    rest = tuple(d for i, d in enumerate(dims) if i != dim)
    letter = dims[dim][0]
    counted = isinstance(source.shape[dim], int) and source.shape[dim] != 1  # a sequence is no number of pieces
    pieces = frozenset({letter}) if counted else frozenset[str]()
    return Signature((dims,), (rest,) * len(node.results), frozenset({letter}), frozenset({0}), pieces=pieces)


rule(aten.unbind, _unbind, code="{self}.unbind({dim})", view=True)


def _split(node: Node) -> Signature:
    """Equal pieces: the dim is pieces · rest, and a shard of the rest cuts every piece. Unequal ones: their sum."""
    (source,) = node.operands
    rank = len(source.shape)
    dim = arguments(node)["dim"] % rank
    lengths = {result.shape[dim] for result in node.results} if len(node.results) == len(node.outputs) else set[Size]()
    dims = list(_letters(source))
    if len(lengths) == 1:
        letter = dims[dim][0]
        dims[dim] = ("piece", letter)
        piece = _letters(source)
        sizes = {"piece": len(node.results), letter: next(iter(lengths))}
        return Signature(
            (tuple(dims),),
            (piece,) * len(node.results),
            frozenset({"piece"}),
            frozenset({0}),
            sizes=sizes,
            pieces=frozenset({"piece"}),
        )
    made = [k for k, value in enumerate(node.outputs) if value is not None]
    parts = [tuple((f"part{k}",) if i == dim else d for i, d in enumerate(dims)) for k in made]
    blocked = frozenset({dims[dim][0], *(f"part{k}" for k in made)})
    sizes: dict[str, Size] = {}
    if (pieces := _pieces(node, dim)) and isinstance(source.shape[dim], int) and len(pieces) == len(node.outputs) > 1:
        sizes = {f"part{k}": size for k, size in enumerate(pieces)}
    if not all(isinstance(size, int) and size > 0 for size in sizes.values()):
        sizes = {}
    segments = {dims[dim][0]: tuple(sizes)} if sizes else {}
    return Signature((tuple(dims),), tuple(parts), blocked, frozenset({0}), sizes=sizes, segments=segments)


def _pieces(node: Node, dim: int) -> tuple[Size, ...]:
    """The sizes of all that a dim is split into, also of what nothing uses; () where they do not follow."""
    given = arguments(node)
    listed = given.get("split_sizes", given.get("split_size"))
    if isinstance(listed, tuple | list):
        return tuple(listed)
    if len(node.results) < len(node.outputs):
        return ()
    return tuple(value.shape[dim] for value in node.results)


rule(aten.split.Tensor, _split, piece="split_size", code="{self}.split({split_size}, {dim})", view=True)


def _split_code(args: Mapping[str, str]) -> str:
    """Equal pieces by their number, which is the same on a rank; unequal ones by their sizes there."""
    listed = args.get("split_sizes", args.get("split_size", ""))
    if len(set(listed.strip("()[], ").split(", "))) == 1:
        return f"{args['self']}.chunk({args['pieces']}, {args['dim']})"
    return f"{args['self']}.split({listed}, {args['dim']})"


rule(aten.split_with_sizes, _split, pieces="split_sizes", code=_split_code, view=True)
rule(aten.split.sizes, _split, pieces="split_size", code=_split_code, view=True)
rule(aten.chunk, _split, code="{self}.chunk({pieces}, {dim})", view=True)


def _cat(node: Node) -> Signature:
    """The joined dim of the result is the sum of those of the operands; the others run together."""
    (result,) = node.results
    rank = len(result.shape)
    dim = arguments(node)["dim"] % rank
    operands = tuple(
        tuple((f"part{k}",) if i == dim else (f"d{i}",) for i in range(rank)) for k in range(len(node.operands))
    )
    parts = tuple(f"part{k}" for k in range(len(node.operands)))
    static = len(parts) > 1 and all(isinstance(v.shape[dim], int) and v.shape[dim] != 0 for v in node.operands)
    return Signature(
        operands,
        (_letters(result),),
        frozenset({f"d{dim}", *parts}),
        additive=frozenset(range(len(node.operands))),
        segments={f"d{dim}": parts} if static else {},
    )


rule(aten.cat, _cat, past=joined)


def _stack(node: Node) -> Signature:
    (result,) = node.results
    dim = arguments(node)["dim"] % len(result.shape)
    dims = _letters(result)
    rest = tuple(d for i, d in enumerate(dims) if i != dim)
    every = frozenset(range(len(node.operands)))
    return Signature((rest,) * len(node.operands), (dims,), frozenset(dims[dim]), additive=every)


rule(aten.stack, _stack)


def _pad(node: Node) -> Signature:
    """Padded dims are whole before, and others after. Linear unless it is padded with a number else than zero."""
    (source,) = node.operands
    given = arguments(node)
    before = _letters(source)
    amounts = given["pad"]  # from the last dim: before it, after it
    padded = {len(before) - 1 - i // 2 for i, amount in enumerate(amounts) if amount != 0}
    after = tuple((f"padded{i}",) if i in padded else d for i, d in enumerate(before))
    blocked = frozenset({*(f"d{i}" for i in padded), *(f"padded{i}" for i in padded)})
    linear = given.get("mode", "constant") != "constant" or given.get("value") in (None, 0, 0.0)
    return Signature((before,), (after,), blocked, frozenset({0} if linear else ()))


rule([aten.pad, aten.constant_pad_nd], _pad, past=extended)
rule(aten.flip, lambda node: elementwise(node, linear=(0,), blocked=arguments(node)["dims"]))


def _roll(node: Node) -> Signature:
    """Rolled dims are whole; without dims the tensor is rolled as one row."""
    return elementwise(node, linear=(0,), blocked=arguments(node)["dims"] or range(len(node.results[0].shape)))


rule(aten.roll, _roll)


def _repeat(node: Node) -> Signature:
    """A dim after it is copies times the dim before: a shard takes its block of every copy."""
    (source,), (result,) = node.operands, node.results
    counts = arguments(node)["repeats"]
    offset = len(counts) - len(source.shape)
    before = tuple((f"d{i + offset}",) for i in range(len(source.shape)))
    after: list[Dim] = [(f"copy{i}",) for i in range(offset)]
    sizes: dict[str, Size] = {}
    for i, count in enumerate(counts[offset:]):
        letter = f"d{i + offset}"
        after.append((letter,) if count == 1 else (f"copy{i + offset}", letter))
        sizes |= {letter: source.shape[i], f"copy{i + offset}": count}
    copies = frozenset(f"copy{i}" for i in range(len(result.shape)))
    return Signature((before,), (tuple(after),), copies, frozenset({0}), sizes=sizes)


rule(aten.repeat, _repeat, code="{self}.repeat({repeats*})")


def _repeat_interleave(node: Node) -> Signature | None:
    """A dim after it is the dim before times copies."""
    (source,), given = node.operands, arguments(node)
    if given["dim"] is None:
        return None
    dim = given["dim"] % len(source.shape)
    dims = _letters(source)
    after = tuple((*d, "copy") if i == dim else d for i, d in enumerate(dims))
    sizes = {f"d{dim}": source.shape[dim], "copy": given["repeats"]}
    return Signature((dims,), (after,), frozenset({"copy"}), frozenset({0}), sizes=sizes)


rule(aten.repeat_interleave.self_int, _repeat_interleave, code="{self}.repeat_interleave({repeats}, {dim})")


def _diff(node: Node) -> Signature:
    """Differences of neighbours along a dim that is whole, with what is put before and after it; linear in all."""
    dim = arguments(node)["dim"] % len(node.results[0].shape)

    def letters(value: Value, whole: str) -> tuple[Dim, ...]:
        return tuple((whole,) if i == dim else d for i, d in enumerate(_letters(value)))

    operands = tuple(letters(v, f"part{k}") for k, v in enumerate(node.operands))
    parts = frozenset({"after", *(f"part{k}" for k in range(len(operands)))})
    every = frozenset(range(len(operands)))
    return Signature(operands, (letters(node.results[0], "after"),), parts, additive=every)


rule(aten.diff, _diff, past=differences)
