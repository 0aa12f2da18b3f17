"""Ops that treat every element by itself, with broadcasting."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from placement.graph.ir import Node, Value
from placement.graph.signature import Signature
from placement.rules.core import arguments, aten, elementwise, rule

_NONLINEAR = [
    aten.abs, aten.acos, aten.asin, aten.atan, aten.bitwise_not, aten.celu, aten.ceil, aten.clamp, aten.clamp_max, aten.clamp_min, aten.cos, aten.cosh,
    aten.elu, aten.erf, aten.erfc, aten.exp, aten.exp2, aten.expm1, aten.floor, aten.frac, aten.gelu, aten.hardsigmoid, aten.hardswish,
    aten.hardtanh, aten.isinf, aten.isnan, aten.leaky_relu, aten.log, aten.log10, aten.log1p, aten.log2, aten.log_sigmoid, aten.logical_not, aten.mish,
    aten.reciprocal, aten.relu, aten.relu6, aten.round, aten.rsqrt, aten.selu, aten.sgn, aten.sigmoid, aten.sign, aten.silu, aten.sin,
    aten.sinh, aten.softplus, aten.sqrt, aten.square, aten.tan, aten.tanh, aten.trunc, aten.nan_to_num,
    # of two tensors, or a tensor and a number
    aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.maximum, aten.minimum, aten.remainder, aten.fmod, aten.floor_divide, aten.atan2,
    aten.logical_and, aten.logical_or, aten.logical_xor, aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor, aten.pow, aten.where,
    aten.addcmul, aten.addcdiv, aten.lerp, aten.ones_like, aten.zeros_like, aten.full_like,
]  # fmt: skip
rule(_NONLINEAR, elementwise)

_BITS = {aten.__and__: "&", aten.__or__: "|", aten.__xor__: "^"}
for _op, _sign in _BITS.items():
    rule(_op, elementwise, code=f"{{self}} {_sign} {{other}}")


def _linear_in_first(node: Node) -> Signature:
    return elementwise(node, linear=(0,))


def _product(node: Node) -> Signature:
    return elementwise(node, linear=range(len(node.operands)))


def _sum(node: Node) -> Signature:
    """A sum of tensors is linear in all of them; of a tensor and a number in none (each rank would add the number)."""
    return elementwise(node, additive=len(node.operands) == 2)  # noqa: PLR2004


def _sum_code(sign: str) -> object:
    def code(args: Mapping[str, str]) -> str:
        other = args["other"] if args.get("alpha", "1") == "1" else f"{args['alpha']} * {args['other']}"
        return f"{args['self']} {sign} {other}"

    return code


rule(aten.neg, _linear_in_first, code="-{self}")
rule(aten.mul, _product, code="{self} * {other}")
rule(aten.div.Tensor, _linear_in_first, code="{self} / {other}")
rule(aten.div.Scalar, _linear_in_first, code="{self} / {other}")
rule([aten.div.Tensor_mode, aten.div.Scalar_mode], elementwise)
rule(aten.add, _sum, code=_sum_code("+"))  # type: ignore[arg-type]
rule(aten.sub, _sum, code=_sum_code("-"))  # type: ignore[arg-type]
rule(aten.rsub, _sum)
rule(aten.pow, elementwise, code="{self} ** {exponent}")


def _cast(node: Node) -> Signature:
    """Between floating types a cast is linear up to rounding; to integers it is not linear at all."""
    return elementwise(node, linear=(0,) if node.results[0].dtype.is_floating_point else ())


rule(aten.to, _cast, code="{self}.to({dtype})")
rule(aten.detach, _linear_in_first, code="{self}.detach()")


def _masked_fill(node: Node) -> Signature:
    """Filling with zero is a product with a mask; filling with anything else adds it once per rank."""
    value = arguments(node)["value"]
    return elementwise(node, linear=(0,) if not isinstance(value, Value) and value == 0 else ())


rule(aten.masked_fill, _masked_fill, code="{self}.masked_fill({mask}, {value})")
rule([aten.tril, aten.triu], lambda node: elementwise(node, linear=(0,), blocked=(-1, -2)))
rule(aten.dropout, elementwise, code="self.dropout({input}, {p}, {site}{input_cut})")

COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
for _name, _sign in COMPARISONS.items():
    rule(getattr(torch.ops.aten, _name), elementwise, code=f"{{self}} {_sign} {{other}}")
