"""What each op's backward needs of its forward: the table behind the memory model.

A line says it in the names of the op's own arguments:

    self                the tensor itself; kept once, whoever else keeps it or a view of it
    result, result.1    a result
    other for self      only where ``self`` (or one of several names) has a gradient
    folded self         the tensor as a stack of matrices: where no view is one, a copy is kept
    copy self           a tensor of its own, of the size and dtype of ``self``
    2 per self          a tensor of its own, with 2 bytes for each element of ``self``

An op without a line keeps what follows from its rule: what it is linear in needs the other factors, a sum needs
nothing, anything else needs the operands that have gradients. Numbers and 0-dim tensors are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from placement.graph._torch import overload_name, schema_name
from placement.graph.ir import Node, Size, Value, leaves
from placement.graph.signature import Signature
from placement.rules.attention import by_place
from placement.rules.core import arguments, lookup


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """One tensor that a backward needs.

    itemsize: 0 where ``value`` itself is kept; else a tensor of its own is, of so many bytes for each element
    of ``value``, or of those of its ``dims`` that are given, times ``times``. folded: see the module.
    """

    value: Value
    itemsize: int = 0
    dims: tuple[int, ...] | None = None
    times: Size = 1
    folded: bool = False


Line = str | Callable[[Node], Iterator[Kept]]


def _accumulated(value: Value) -> int:
    """Bytes of an element where sums of ``value`` are held."""
    return max(value.dtype.itemsize, 4)


def _rows(value: Value, normalized: int) -> tuple[int, ...]:
    return tuple(range(len(value.shape) - normalized))


def _layer_norm(node: Node) -> Iterator[Kept]:
    """The input, and the mean and the reciprocal deviation of each row. CPUs keep those of bfloat16 in bfloat16."""
    given = arguments(node)
    for name in ("input", "weight", "bias"):
        if isinstance(given[name], Value):
            yield Kept(given[name])
    source: Value = given["input"]
    yield Kept(source, 2 * _accumulated(source), _rows(source, len(given["normalized_shape"])))


def _rms_norm(node: Node) -> Iterator[Kept]:
    """The input and a number for each row; as torch composes it, in float32 at least, the normalised rows, too."""
    given = arguments(node)
    source, weight = given["input"], given["weight"]
    wide = _accumulated(source)
    if len(given["normalized_shape"]) == 1 and given["eps"] is not None:
        yield from map(Kept, (source, *_tensors(weight)))
        yield Kept(source, wide, _rows(source, 1))
        return
    if source.requires_grad:
        yield Kept(source, wide) if wide > source.dtype.itemsize else Kept(source)
        yield Kept(source, wide, _rows(source, len(given["normalized_shape"])))
        yield from map(Kept, _tensors(weight))
    if isinstance(weight, Value) and weight.requires_grad:
        yield Kept(source, wide)


def _group_norm(node: Node) -> Iterator[Kept]:
    given = arguments(node)
    for name in ("input", "weight"):
        if isinstance(given[name], Value):
            yield Kept(given[name])
    source: Value = given["input"]
    yield Kept(source, 2 * _accumulated(source), (0,), given["num_groups"])


def _attention(node: Node, *, own: bool = False) -> Iterator[Kept]:
    """The fused kernels keep what they took and gave, and one float32 for each row.

    They are not used with dropout, nor where a cap is on the scores, nor by torch for a mask that has a gradient. own:
    of a mask the rows of own queries are taken.
    """
    given = arguments(node)
    query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    (result,) = node.results
    rows, numbers = tuple(range(len(result.shape) - 1)), isinstance(mask, Value) and mask.dtype.is_floating_point
    learned = isinstance(mask, Value) and mask.requires_grad
    torchs = learned and not _by_formula(node)
    if not _by_formula(node) and not learned:
        yield from (Kept(tensor) for tensor in (query, key, value, result))
        yield Kept(result, 4, rows)
        if isinstance(mask, Value):  # of truth values each call makes numbers
            yield _of_mask(node, mask, 0 if numbers else query.dtype.itemsize, own=own)
        return
    wide = _accumulated(query)
    repeats = query.shape[-3] // key.shape[-3] if given["enable_gqa"] else 1
    yield Kept(query, wide)  # times the scale
    for tensor in (key, value):
        copied = wide > tensor.dtype.itemsize or repeats != 1 or (torchs and tensor is key)
        yield Kept(tensor, wide, times=repeats) if copied else Kept(tensor, folded=True)
    yield Kept(result, _of_scores(node, wide), rows, key.shape[-2])
    if own and learned:
        yield Kept(result, 8, rows[-1:])  # which rows of the mask these are
    if torchs:
        return
    if given.get("is_causal"):
        yield Kept(result, 1, rows[-1:], key.shape[-2])
    elif isinstance(mask, Value) and not numbers:
        yield _of_mask(node, mask, 1, own=own)
    if given.get("is_causal") or mask is not None:
        yield Kept(result, 1, rows)  # the queries that see no key


def _of_mask(node: Node, mask: Value, itemsize: int, *, own: bool) -> Kept:
    if not own or mask.shape[-2] == 1:
        return Kept(mask, itemsize)
    (result,), key = node.results, arguments(node)["key"]
    more = len(result.shape) - len(mask.shape)
    dims = tuple(dim + more for dim, size in enumerate(mask.shape[:-1]) if size != 1)
    return Kept(result, itemsize or mask.dtype.itemsize, dims, 1 if mask.shape[-1] == 1 else key.shape[-2])


def _by_formula(node: Node) -> bool:
    """Whether attention is the plain formula, whose scores exist."""
    given = arguments(node)
    return bool(given["dropout_p"]) or given.get("softcap") is not None


def _of_scores(node: Node, wide: int) -> int:
    """Bytes of a query and a key: probabilities, the same with some zeroed, which those are; and what a cap gave."""
    given = arguments(node)
    drops, capped = bool(given["dropout_p"]), given.get("softcap") is not None
    return wide * (1 + capped + (drops or (capped and _hides(node)))) + drops


def _hides(node: Node) -> bool:
    """Whether attention says itself that a query does not see all keys."""
    return by_place(node) or bool(arguments(node).get("of_key"))


def _by_own_queries(node: Node) -> Iterator[Kept]:
    return _marked_attention(node, own=True)


def _marked_attention(node: Node, *, own: bool = False) -> Iterator[Kept]:
    """As with a mask, of which numbers are made; by the formula its truths are kept, and which queries see no key."""
    given = arguments(node)
    yield from _attention(node, own=own)
    if not _hides(node) or (given.get("is_causal") and given["dropout_p"]):
        return  # the truths of the flag are as many
    (query, key, *_), (result,) = node.operands, node.results
    batch = tuple(range(max((len(mark.shape) for mark in given.get("of_key", ())), default=1) - 1))
    dims = (*batch, *((len(result.shape) - 2,) if by_place(node) else ()))
    itemsize = 1 if _by_formula(node) else query.dtype.itemsize
    yield Kept(result, itemsize, dims, key.shape[-2])
    if _by_formula(node):
        yield Kept(result, 1, tuple(range(len(result.shape) - 1)))


def _ring(node: Node) -> Iterator[Kept]:
    """What each took and gave, and of each row the logarithm of its sum; of one that drops, where it is."""
    given, (result,) = arguments(node), node.results
    if given.get("attn_mask") is not None:  # no ring
        yield from _attention(node)
        return
    yield from (Kept(tensor) for tensor in (*node.operands[:3], result))
    row = _accumulated(result) + 8 * bool(given["dropout_p"])
    yield Kept(result, row, tuple(range(len(result.shape) - 1)))


def _dropout(node: Node) -> Iterator[Kept]:
    """Which elements are dropped: a truth value each, though a hash could tell again."""
    if 0 < arguments(node)["p"] < 1:
        yield Kept(node.results[0], 1)


def _cross_entropy(node: Node) -> Iterator[Kept]:
    """The logarithms of all probabilities, and the targets: those that are probabilities only for the logits."""
    logits, target, *weight = node.operands
    yield Kept(logits, logits.dtype.itemsize)
    if logits.requires_grad or not target.dtype.is_floating_point:
        yield Kept(target)
    if arguments(node)["label_smoothing"]:
        yield Kept(target, 1)  # which of them are ignored
    yield from map(Kept, weight)


def _over_classes(node: Node) -> Iterator[Kept]:
    """For each token the logarithm of the sum, the local index and two flags; in general its own weight, too."""
    logits, target, *weight = node.operands
    general = bool(weight) or arguments(node)["label_smoothing"] != 0
    yield Kept(logits)
    yield Kept(target, (1 + general) * _accumulated(logits) + 8 + 2)


def _masked_lookup(node: Node) -> Iterator[Kept]:
    """The indices alone."""
    _, indices = node.operands
    yield Kept(indices)


def _indices(node: Node) -> Iterator[Kept]:
    yield from map(Kept, node.operands[1:])


def _pad(node: Node) -> Iterator[Kept]:
    if arguments(node).get("mode", "constant") != "constant":
        yield Kept(node.operands[0])


def _transform(node: Node) -> Iterator[Kept]:
    """A transform of complex numbers keeps nothing; of real ones its gradient is made real like them."""
    (operand,) = node.operands
    if not operand.dtype.is_complex:
        yield Kept(operand)


def _difference(node: Node) -> Iterator[Kept]:
    """The difference itself, at the size of the larger operand."""
    larger = max(node.operands, key=lambda v: len(v.shape))
    yield Kept(larger, larger.dtype.itemsize)


_PRODUCT = "{0} for {1}, {1} for {0}"

_TABLE: dict[str, Line] = {
    "exp exp2 expm1 reciprocal relu rsqrt sigmoid sqrt tan tanh": "result",
    "softmax _softmax log_softmax _log_softmax": "result",
    "add sub rsub neg ceil floor frac round sign trunc to isinf isnan isfinite": "",
    "abs gelu silu square sin cos log": "self",
    "log_sigmoid": "self, copy self",
    "sgn": "self, result",
    "copysign": "self for self, result",
    "atan2 fmax fmin logaddexp maximum minimum xlogy max.other min.other": "self, other",
    "fmod remainder": "self for other, other for other",
    "div.Tensor_mode": "self for other, other",
    "hypot": "self for self, other for other, result",
    "remainder.Scalar div.Scalar_mode div.Scalar lerp.Scalar": "",
    "clamp.Tensor": "self, min, max",
    "mul": _PRODUCT.format("self", "other"),
    "div.Tensor": "other, self for other",
    "pow.Tensor_Tensor": "self, exponent, result",
    "pow.Scalar": "exponent, result",
    "addcmul": _PRODUCT.format("tensor1", "tensor2"),
    "addcdiv": "tensor2, tensor1 for tensor2",
    "lerp.Tensor": "weight, self for weight, end for weight",
    "where": "condition",
    "masked_fill": "mask",
    "dropout": _dropout,
    "prelu": "self, weight",
    "glu": "self",
    "linear": "folded input for weight, weight for input",
    "matmul": "folded self for other, folded other for self",
    "mm": _PRODUCT.format("self", "mat2"),
    "bmm": _PRODUCT.format("self", "mat2"),
    "addmm": _PRODUCT.format("mat1", "mat2"),
    "baddbmm": _PRODUCT.format("batch1", "batch2"),
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d": "input, weight",
    "_weight_norm": "v, g, copy g",
    "avg_pool1d avg_pool2d avg_pool3d": "self",
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d": "self",
    "max_pool1d max_pool2d max_pool3d": "self, 8 per result",
    "max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices": "self, result.1",
    "polar": "result",
    "complex": "real for real, imag for imag",
    "fft_fft fft_ifft fft_rfft fft_rfft2 fft_rfftn": _transform,
    "masked_scatter": "mask",
    "scatter_reduce": "self, index, src, result",
    "fill.Scalar": "",
    "pad": _pad,
    "index": _indices,
    "embedding": "indices",
    "gather": "self, index",
    "scatter index_select": "index",
    "scatter_add": "index for src",
    "index_add": "index for source, source for source",
    "repeat_interleave.self_int": "",
    "sort.default sort.stable topk max.dim min.dim median.dim": "result.1",
    "amax amin prod std std_mean logsumexp linalg_vector_norm norm cumprod logcumsumexp": "self, result",
    "max.default min.default median.default": "self, result",
    "var var_mean nansum": "self",
    "layer_norm": _layer_norm,
    "native_layer_norm": "input, weight, bias, result.1, result.2",
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "scaled_dot_product_attention": _attention,
    "scaled_dot_product_attention by own queries": _by_own_queries,
    "scaled_dot_product_attention by ring": _ring,
    "attention": _marked_attention,
    "attention by own queries": _by_own_queries,
    "attention by ring": _ring,
    "cross_entropy_loss": _cross_entropy,
    "cross_entropy_loss by over classes": _over_classes,
    "embedding by masked lookup": _masked_lookup,
    "nll_loss nll_loss2d nll_loss_nd": "self, target, weight",
    "mse_loss huber_loss smooth_l1_loss kl_div": "self, target",
    "binary_cross_entropy": "self, target, weight",
    "binary_cross_entropy_with_logits": "self, target, weight, pos_weight",
    "l1_loss": _difference,
}

# The order in which the dims of a result lie in memory, where an op does not lay them out as torch's meta tensors
# say: the fused kernels give attention's heads inside of its tokens, so that a transpose back is no copy.
LAYOUTS: dict[str, tuple[int, ...]] = {
    "scaled_dot_product_attention": (0, 2, 1, 3),
    "scaled_dot_product_attention by own queries": (0, 2, 1, 3),
    "scaled_dot_product_attention by ring": (0, 2, 1, 3),
    "attention": (0, 2, 1, 3),
    "attention by own queries": (0, 2, 1, 3),
    "attention by ring": (0, 2, 1, 3),
}

_ENTRY = re.compile(r"(?:(?P<how>folded|copy|(?P<bytes>\d+) per) )?(?P<name>[\w.]+)(?: for (?P<asking>.+))?")


@cache
def _lines() -> dict[str, Line]:
    lines: dict[str, Line] = {}
    for names, line in _TABLE.items():
        plain, by, implementation = names.partition(" by ")
        lines.update({name + by + implementation: line for name in plain.split()})
    return lines


def _op_key(node: Node) -> tuple[str, str]:
    """``("aten", "add.Tensor")``."""
    namespace, name = schema_name(node.op)
    return namespace, f"{name}.{overload_name(node.op)}"


def kept(node: Node, implementation: str = "") -> tuple[Kept, ...]:
    """What the backward of ``node`` needs, in the table's order; nothing where no result has a gradient."""
    if not any(v.requires_grad for v in node.results):
        return ()
    found = lookup(node)
    line: Line | None = found.saves if found else None
    namespace, name = _op_key(node)
    if line is None and namespace in ("aten", "placement"):
        plain = name.partition(".")[0]
        lines = _lines()
        line = lines.get(f"{plain} by {implementation}")
        line = lines.get(name, lines.get(plain)) if line is None else line
    if line is None:
        return tuple(_by_rule(node))
    return tuple(line(node) if callable(line) else _read(node, line))


@cache
def _entries(line: str) -> tuple[re.Match[str], ...]:
    found = [(entry, _ENTRY.fullmatch(entry)) for entry in line.split(", ") if entry]
    if wrong := [entry for entry, match in found if match is None]:
        raise ValueError(f"{wrong[0]!r} says nothing of what is kept")
    return tuple(match for _, match in found if match is not None)


def _read(node: Node, line: str) -> Iterator[Kept]:
    entries = _entries(line)
    given = arguments(node) if entries else {}
    for match in entries:
        asking = (match["asking"] or "").split()
        if asking and not any(v.requires_grad for name in asking for v in _tensors(given.get(name))):
            continue
        how, name = match["how"], match["name"]
        values = _results(node, name) if name.startswith("result") else _tensors(given.get(name))
        for value in values:
            itemsize = int(match["bytes"] or 0) or (value.dtype.itemsize if how == "copy" else 0)
            yield Kept(value, itemsize, folded=how == "folded")


def _tensors(argument: object) -> Iterator[Value]:
    return (leaf for leaf in leaves(argument) if isinstance(leaf, Value))


def _results(node: Node, name: str) -> Iterator[Value]:
    value = node.outputs[int(name.partition(".")[2] or 0)]
    return iter(() if value is None else (value,))


def _by_rule(node: Node) -> Iterator[Kept]:
    """What follows from the index structure; all operands of an op that has none."""
    found = lookup(node)
    signature = found.signature(node) if found else None
    if found is not None and found.view:
        return
    if not isinstance(signature, Signature):
        yield from map(Kept, node.operands)
        return
    if len(signature.additive) == len(node.operands):
        return
    for index, value in enumerate(node.operands):
        others = [v for i, v in enumerate(node.operands) if i != index]
        if any(v.requires_grad for v in others) if signature.linear else value.requires_grad:
            yield Kept(value)
