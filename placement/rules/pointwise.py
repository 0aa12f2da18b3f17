"""Ops that treat every element by itself, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from placement.graph.ir import Node, Value
from placement.graph.signature import Signature
from placement.rules import bounds
from placement.rules.core import arguments, aten, elementwise, rule
from placement.rules.lengths import before, dropped, lower

_NONLINEAR = [
    aten.abs, aten.acos, aten.acosh, aten.asin, aten.asinh, aten.atan, aten.atanh, aten.ceil,
    aten.celu, aten.clamp, aten.clamp_max, aten.clamp_min, aten.cos, aten.cosh, aten.digamma, aten.elu, aten.erf,
    aten.erfc, aten.erfinv, aten.exp, aten.exp2, aten.expm1, aten.floor, aten.frac, aten.gelu, aten.hardshrink,
    aten.hardsigmoid, aten.hardswish, aten.hardtanh, aten.isfinite, aten.isinf, aten.isnan, aten.leaky_relu,
    aten.lgamma, aten.log, aten.log10, aten.log1p, aten.log2, aten.log_sigmoid, aten.logit,
    aten.mish, aten.nan_to_num, aten.reciprocal, aten.relu, aten.relu6, aten.round, aten.rsqrt, aten.selu, aten.sgn,
    aten.sigmoid, aten.sign, aten.silu, aten.sin, aten.sinc, aten.sinh, aten.softplus, aten.softshrink, aten.sqrt,
    aten.square, aten.tan, aten.threshold, aten.trunc,
    # of two tensors, or of a tensor and a number
    aten.atan2, aten.bitwise_xor, aten.copysign, aten.div.Scalar_mode,
    aten.div.Tensor_mode, aten.floor_divide, aten.fmax, aten.fmin, aten.fmod, aten.hypot, aten.lerp, aten.logaddexp,
    aten.logical_xor, aten.max.other, aten.maximum, aten.min.other, aten.minimum,
    aten.remainder, aten.xlogy,
    # of nothing but the shape, or a number
    aten.fill, aten.isin.Tensor_Scalar,
]  # fmt: skip
rule(_NONLINEAR, elementwise)
rule([aten.tanh], elementwise, finite=True)
rule([aten.logical_not, aten.bitwise_not], elementwise, bounds=bounds.negated)
rule([aten.logical_and, aten.bitwise_and], elementwise, bounds=bounds.both)
rule([aten.logical_or, aten.bitwise_or], elementwise, bounds=bounds.one_of)
rule(aten.ones_like, elementwise, bounds=bounds.made_of("1"))
rule(aten.zeros_like, elementwise, bounds=bounds.made_of("0"))
rule(aten.full_like, elementwise, bounds=bounds.made_of("fill_value"))

_SIGNS = {
    aten.__and__: "&", aten.__or__: "|", aten.__xor__: "^", aten.eq: "==", aten.ne: "!=", aten.lt: "<", aten.le: "<=",
    aten.gt: ">", aten.ge: ">=",
}  # fmt: skip
_BITS = {"&": bounds.both, "|": bounds.one_of, "^": None}
for _op, _sign in _SIGNS.items():
    _of = _BITS[_sign] if _sign in _BITS else bounds.compared(_sign)
    rule(_op, elementwise, code=f"{{self}} {_sign} {{other}}", bounds=_of)
rule(aten.pow, elementwise, code="{self} ** {exponent}")


def _linear_in_first(node: Node) -> Signature:
    return elementwise(node, linear=(0,))


def _product(node: Node) -> Signature:
    return elementwise(node, linear=range(len(node.operands)))


def _sum(node: Node) -> Signature:
    """A sum of tensors is linear in all of them; of a tensor and a number in none (each rank would add the number)."""
    return elementwise(node, additive=(0, 1) if len(node.operands) == 2 else ())


def _sum_code(sign: str) -> Callable[[Mapping[str, str]], str]:
    def code(args: Mapping[str, str]) -> str:
        other = args["other"] if args.get("alpha", "1") == "1" else f"{args['alpha']} * {args['other']}"
        return f"{args['self']} {sign} {other}"

    return code


rule(aten.neg, _linear_in_first, code="-{self}", finite=True, bounds=bounds.opposite)
rule(aten.mul, _product, code="{self} * {other}", finite=True, bounds=bounds.product)
rule([aten.div.Tensor, aten.div.Scalar], _linear_in_first, code="{self} / {other}", finite=(0,))
rule(aten.add, _sum, code=_sum_code("+"), finite=True, bounds=bounds.total)
rule(aten.sub, _sum, code=_sum_code("-"), finite=True, bounds=bounds.difference)
rule(aten.rsub, _sum)
rule(aten.detach, _linear_in_first, code="{self}.detach()", finite=True, bounds=bounds.same)


def _addcmul(node: Node) -> Signature:
    """``self + value · tensor1 · tensor2``: linear in the first two together."""
    return elementwise(node, additive=(0, 1))


rule([aten.addcmul, aten.addcdiv], _addcmul)


def _cast(node: Node) -> Signature:
    """Between floating types a cast is linear up to rounding; to integers it is not linear at all."""
    to = node.results[0].dtype
    return elementwise(node, linear=(0,) if to.is_floating_point or to.is_complex else ())


rule(aten.to.dtype, _cast, code="{self}.to({dtype})", finite=True, bounds=bounds.cast)


def _where(node: Node) -> Signature:
    """Linear in both branches together; in one alone where the other is zero."""
    given = arguments(node)
    branches = given["self"], given["other"]
    if all(isinstance(branch, Value) for branch in branches):
        return elementwise(node, additive=(1, 2))
    zero = any(not isinstance(branch, Value) and branch == 0 for branch in branches)
    return elementwise(node, linear=(1,) if zero and len(node.operands) == 2 else ())


rule(
    [aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar],
    _where,
    bounds=bounds.chosen,
)


def _masked_fill(node: Node) -> Signature:
    """Filling with zero is a product with a mask; filling with a number else adds it once per rank."""
    value = arguments(node)["value"]
    if isinstance(value, Value):
        return elementwise(node, additive=(0, 2))
    return elementwise(node, linear=(0,) if value == 0 else ())


rule(aten.masked_fill, _masked_fill, code="{self}.masked_fill({mask}, {value})", bounds=bounds.filled)


def _triangle(node: Node) -> Signature:
    return elementwise(node, linear=(0,), blocked=(-1, -2))


rule(aten.tril, _triangle, past=lower)
rule(aten.triu, _triangle, past=before)
rule(aten.dropout, elementwise, code="rt.dropout(self, {input}, {p}, {site}{input_on}{longer})", past=dropped)


def _prelu(node: Node) -> Signature:
    """One weight, or one for each channel: channels are dim 1."""
    source, weight = node.operands
    rank = len(source.shape)
    dims = tuple((f"d{i}",) for i in range(rank))
    channels = dims[1] if weight.shape and weight.shape[0] != 1 else ()
    return Signature((dims, (channels,) * len(weight.shape)), (dims,))


rule(aten.prelu, _prelu)


def _glu(node: Node) -> Signature:
    """Two halves of a dim, the second of which gates the first: a shard takes its part of both."""
    (source,), (result,) = node.operands, node.results
    dim = arguments(node)["dim"] % len(source.shape)
    dims = tuple((f"d{i}",) for i in range(len(source.shape)))
    before = tuple(("half", *d) if i == dim else d for i, d in enumerate(dims))
    sizes = {"half": 2, f"d{dim}": result.shape[dim]}
    half = frozenset({"half"})
    return Signature((before,), (dims,), half, sizes=sizes, pieces=half)


rule(aten.glu, _glu)
