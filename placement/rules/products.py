"""Products of matrices: parallel in the free dims, contracted over the shared one, linear in each factor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from placement.graph.ir import Node, Size, op_name
from placement.graph.rows import LINEAR
from placement.graph.signature import Dim, Signature
from placement.rules.core import Code, Form, Implementation, arguments, aten, rule
from placement.rules.strategies import Context


def twice_all(extent: Mapping[str, int]) -> int:
    """A multiplication and an addition for every combination of letters."""
    return 2 * math.prod(extent.values())


def _linear(node: Node) -> Signature | None:
    """``* k, n k, [n] -> * n``, or with a weight ``k n``. A bias joins the sum once."""
    source, weight = node.operands[:2]
    if len(weight.shape) != 2 or not source.shape:
        return None
    star: tuple[Dim, ...] = tuple((f"b{i}",) for i in range(len(source.shape) - 1))
    own: tuple[Dim, ...] = (("k",), ("n",)) if node.op is LINEAR else (("n",), ("k",))
    operands: tuple[tuple[Dim, ...], ...] = ((*star, ("k",)), own)
    if len(node.operands) == 2:
        return Signature(operands, ((*star, ("n",)),), linear=frozenset({0, 1}))
    return Signature((*operands, (("n",),)), ((*star, ("n",)),), additive=frozenset({0, 2}))


def _linear_code(args: Mapping[str, str]) -> str:
    bias = "" if args.get("bias", "None") == "None" else f", {args['bias']}"
    return f"F.linear({args['input']}, {args['weight']}{bias})"


def _rows_code(args: Mapping[str, str]) -> str:
    return _linear_code({**args, "weight": f"{args['weight']}.t()"})


rule(aten.linear, _linear, flops=twice_all, code=_linear_code, layer=True)
rule(LINEAR, _linear, flops=twice_all, code=_rows_code, layer=True)
rule(aten.mm, "m k, k n -> m n", linear=(0, 1), flops=twice_all, code="{self} @ {mat2}")
rule(aten.bmm, "b m k, b k n -> b m n", linear=(0, 1), flops=twice_all, code="{self} @ {mat2}")
rule(aten.mv, "m k, k -> m", linear=(0, 1), flops=twice_all, code="{self} @ {vec}")
rule(aten.dot, "k, k -> ", linear=(0, 1), flops=twice_all)
rule(aten.outer, "m, n -> m n", linear=(0, 1), flops=twice_all)
rule(aten.baddbmm, "b m n, b m k, b k n -> b m n", additive=(0, 1), flops=twice_all)


def _addmm(node: Node) -> Signature:
    """``[m] n, m k, k n -> m n``: the first operand broadcasts and joins the sum once."""
    bias = node.operands[0].shape
    full: tuple[Dim, ...] = (("m",), ("n",))
    shape = node.results[0].shape
    offset = 2 - len(bias)
    joins = tuple(() if s == 1 and shape[i + offset] != 1 else full[i + offset] for i, s in enumerate(bias))
    return Signature((joins, (("m",), ("k",)), (("k",), ("n",))), (full,), additive=frozenset({0, 1}))


rule(aten.addmm, _addmm, flops=twice_all)


def _matmul(node: Node) -> Signature:
    """``matmul``: leading dims broadcast, a vector has no ``m`` or no ``n``."""
    left, right = node.operands
    rows: tuple[Dim, ...] = (("m",),) if len(left.shape) > 1 else ()
    columns: tuple[Dim, ...] = (("n",),) if len(right.shape) > 1 else ()
    (result,) = node.results
    rank = len(result.shape) - len(rows) - len(columns)

    def leading(shape: tuple[object, ...]) -> list[Dim]:
        offset = rank - max(len(shape) - 2, 0)
        return [
            () if s == 1 and result.shape[i + offset] != 1 else (f"b{i + offset}",) for i, s in enumerate(shape[:-2])
        ]

    batch = [(f"b{i}",) for i in range(rank)]
    return Signature(
        operands=((*leading(left.shape), *rows, ("k",)), (*leading(right.shape), ("k",), *columns)),
        results=((*batch, *rows, *columns),),
        linear=frozenset({0, 1}),
    )


rule(aten.matmul, _matmul, flops=twice_all, code="{self} @ {other}")


def _einsum(node: Node) -> Signature | None:
    """The equation itself; None where an operand has a letter twice, which takes a diagonal."""
    inputs, arrow, output = arguments(node)["equation"].replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow:  # letters that stand once, in order
        letters = sorted(letter for letter in inputs if letter.isalpha() and inputs.count(letter) == 1)
        output = "..." * ("..." in inputs) + "".join(letters)
    ranks = [len(v.shape) - len(term.replace("...", "")) for v, term in zip(node.operands, terms, strict=True)]
    most = max((rank for rank, term in zip(ranks, terms, strict=True) if "..." in term), default=0)
    operands = [_term(term, rank) for term, rank in zip(terms, ranks, strict=True)]
    if any(len(set(dims)) < len(dims) for dims in operands):
        return None
    extent = {
        letter: size
        for value, dims in zip(node.operands, operands, strict=True)
        for letter, size in zip(dims, value.shape, strict=True)
        if size != 1
    }
    return Signature(
        tuple(
            tuple(
                () if size == 1 and letter in extent else (letter,) for letter, size in zip(dims, v.shape, strict=True)
            )
            for v, dims in zip(node.operands, operands, strict=True)
        ),
        (tuple((letter,) for letter in _term(output, most)),),
        linear=frozenset(range(len(operands))),
    )


def _term(term: str, rank: int) -> tuple[str, ...]:
    """The letters of one term; the dims of its ellipsis, of which there are ``rank``, align from the right."""
    before, _, after = term.partition("...") if "..." in term else (term, "", "")
    ellipsis = tuple(f"*{i}" for i in range(rank - 1, -1, -1)) if "..." in term else ()
    return (*before, *ellipsis, *after)


rule(aten.einsum, _einsum, flops=twice_all, code="torch.einsum({equation}, {tensors})")


def _convolution(node: Node) -> Signature | None:
    """Parallel in batch and output channels, contracted over input channels; positions are needed whole.

    With groups, channels are groups times channels of a group. Those are whole: the op is told the number of groups.
    """
    source, weight = node.operands[:2]
    groups = arguments(node)["groups"]
    spatial = len(weight.shape) - 2
    if len(source.shape) != len(weight.shape) or not all(isinstance(s, int) for s in (groups, *weight.shape[:2])):
        return None  # without a batch dim
    before = tuple((f"x{i}",) for i in range(spatial))
    kernel = tuple((f"k{i}",) for i in range(spatial))
    after = tuple((f"y{i}",) for i in range(spatial))
    whole = {letter for dims in (before, kernel, after) for (letter,) in dims}
    inner: Dim = ("i",)
    outer: Dim = ("o",)
    sizes: dict[str, Size] = {}
    if groups != 1:
        inner, outer, whole = ("g", "i"), ("g", "o"), whole | {"g", "i", "o"}
        sizes = {"g": groups, "i": _per_group(source.shape[1], groups), "o": _per_group(weight.shape[0], groups)}
    operands = [(("b",), inner, *before), (outer, ("i",), *kernel)]
    bias = len(node.operands) > 2
    return Signature(
        operands=(*operands, *([(outer,)] if bias else [])),
        results=((("b",), outer, *after),),
        blocked=frozenset(whole),
        linear=frozenset() if bias else frozenset({0, 1}),
        additive=frozenset({0, 2}) if bias else frozenset(),
        sizes=sizes,
    )


def _per_group(channels: Size, groups: int) -> Size:
    assert isinstance(channels, int)
    return channels // groups


def _own_groups(node: Node, context: Context) -> Iterator[Form]:
    """Each rank has some of the groups, and their part of every operand: nothing is sent."""
    if arguments(node)["groups"] == 1:
        return
    for run in context.runs(context.dims.letters[node].get("g", ())):
        kinds = [context.shard(value, run) for value in (*node.operands, *node.results)]
        given = tuple(kind for kind in kinds if kind is not None)
        if len(given) == len(kinds):
            yield Form(given[:-1], given[-1:], code=_convolution_code(node))


def _convolution_code(node: Node) -> Code:
    name = op_name(node.op).split(".")[1]

    def code(args: Mapping[str, str]) -> str:
        bias = args.get("bias", "None")
        rest = f"{args['stride']}, {args['padding']}, {args['dilation']}, {args['groups']} // {args['axis']}.size"
        return f"torch.{name}({args['input']}, {args['weight']}, {bias}, {rest})"

    return code


def _convolution_flops(extent: Mapping[str, int]) -> int:
    """An upper estimate: as many outputs as input positions."""
    spatial = [size for letter, size in extent.items() if letter[0] in "xk"]
    channels = extent["o"] * extent.get("i", 1) * extent.get("g", 1)
    return 2 * extent["b"] * channels * math.prod(spatial)


rule(
    [aten.conv1d, aten.conv2d, aten.conv3d],
    _convolution,
    flops=_convolution_flops,
    implementations=(Implementation("own groups", _own_groups),),
)


def _transposed(node: Node) -> Signature | None:
    """A convolution backwards: the weight has its input channels first. With groups only the batch is parallel."""
    source, weight = node.operands[:2]
    if len(source.shape) != len(weight.shape):
        return None
    spatial = range(len(weight.shape) - 2)
    kept = arguments(node)["groups"] == 1
    inner, outer, own = ("i",), ("o",), ("o",) if kept else ("p",)
    operands = [(("b",), inner, *((f"x{i}",) for i in spatial)), (inner, own, *((f"k{i}",) for i in spatial))]
    whole = {f"{letter}{i}" for letter in "xky" for i in spatial} | (set() if kept else {"i", "o", "p"})
    bias = len(node.operands) > 2
    return Signature(
        operands=(*operands, *([(outer,)] if bias else [])),
        results=((("b",), outer, *((f"y{i}",) for i in spatial)),),
        blocked=frozenset(whole),
        linear=frozenset() if bias else frozenset({0, 1}),
        additive=frozenset({0, 2}) if bias else frozenset(),
    )


rule([aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d], _transposed, flops=_convolution_flops)
