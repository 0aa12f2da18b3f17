"""Ops that treat every element by itself, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from placement.graph.ir import Node, Value
from placement.graph.signature import Signature
from placement.rules.core import arguments, aten, elementwise, rule

_NONLINEAR = [
    aten.abs, aten.acos, aten.acosh, aten.asin, aten.asinh, aten.atan, aten.atanh, aten.bitwise_not, aten.ceil,
    aten.celu, aten.clamp, aten.clamp_max, aten.clamp_min, aten.cos, aten.cosh, aten.digamma, aten.elu, aten.erf,
    aten.erfc, aten.erfinv, aten.exp, aten.exp2, aten.expm1, aten.floor, aten.frac, aten.gelu, aten.hardshrink,
    aten.hardsigmoid, aten.hardswish, aten.hardtanh, aten.isfinite, aten.isinf, aten.isnan, aten.leaky_relu,
    aten.lgamma, aten.log, aten.log10, aten.log1p, aten.log2, aten.log_sigmoid, aten.logical_not, aten.logit,
    aten.mish, aten.nan_to_num, aten.reciprocal, aten.relu, aten.relu6, aten.round, aten.rsqrt, aten.selu, aten.sgn,
    aten.sigmoid, aten.sign, aten.silu, aten.sin, aten.sinc, aten.sinh, aten.softplus, aten.softshrink, aten.sqrt,
    aten.square, aten.tan, aten.tanh, aten.threshold, aten.trunc,
    # of two tensors, or of a tensor and a number
    aten.atan2, aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor, aten.copysign, aten.div.Scalar_mode,
    aten.div.Tensor_mode, aten.floor_divide, aten.fmax, aten.fmin, aten.fmod, aten.hypot, aten.lerp, aten.logaddexp,
    aten.logical_and, aten.logical_or, aten.logical_xor, aten.max.other, aten.maximum, aten.min.other, aten.minimum,
    aten.remainder, aten.xlogy,
    # of nothing but the shape, or a number
    aten.fill, aten.full_like, aten.isin.Tensor_Scalar, aten.ones_like, aten.zeros_like,
]  # fmt: skip
rule(_NONLINEAR, elementwise)

_SIGNS = {
    aten.__and__: "&", aten.__or__: "|", aten.__xor__: "^", aten.eq: "==", aten.ne: "!=", aten.lt: "<", aten.le: "<=",
    aten.gt: ">", aten.ge: ">=",
}  # fmt: skip
for _op, _sign in _SIGNS.items():
    rule(_op, elementwise, code=f"{{self}} {_sign} {{other}}")
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


rule(aten.neg, _linear_in_first, code="-{self}")
rule(aten.mul, _product, code="{self} * {other}")
rule([aten.div.Tensor, aten.div.Scalar], _linear_in_first, code="{self} / {other}")
rule(aten.add, _sum, code=_sum_code("+"))
rule(aten.sub, _sum, code=_sum_code("-"))
rule(aten.rsub, _sum)
rule(aten.detach, _linear_in_first, code="{self}.detach()")


def _addcmul(node: Node) -> Signature:
    """``self + value · tensor1 · tensor2``: linear in the first two together."""
    return elementwise(node, additive=(0, 1))


rule([aten.addcmul, aten.addcdiv], _addcmul)


def _cast(node: Node) -> Signature:
    """Between floating types a cast is linear up to rounding; to integers it is not linear at all."""
    to = node.results[0].dtype
    return elementwise(node, linear=(0,) if to.is_floating_point or to.is_complex else ())


rule(aten.to.dtype, _cast, code="{self}.to({dtype})")


def _where(node: Node) -> Signature:
    """Linear in both branches together; in one alone where the other is zero."""
    given = arguments(node)
    branches = given["self"], given["other"]
    if all(isinstance(branch, Value) for branch in branches):
        return elementwise(node, additive=(1, 2))
    zero = any(not isinstance(branch, Value) and branch == 0 for branch in branches)
    return elementwise(node, linear=(1,) if zero and len(node.operands) == 2 else ())


rule([aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar], _where)


def _masked_fill(node: Node) -> Signature:
    """Filling with zero is a product with a mask; filling with a number else adds it once per rank."""
    value = arguments(node)["value"]
    if isinstance(value, Value):
        return elementwise(node, additive=(0, 2))
    return elementwise(node, linear=(0,) if value == 0 else ())


rule(aten.masked_fill, _masked_fill, code="{self}.masked_fill({mask}, {value})")
rule([aten.tril, aten.triu], lambda node: elementwise(node, linear=(0,), blocked=(-1, -2)))
rule(aten.dropout, elementwise, code="rt.dropout(self, {input}, {p}, {site}{input_on})")


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
