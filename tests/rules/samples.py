"""Sample calls of every op that has a rule, with sizes that n ranks divide: batches above one, odd multiples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from placement.graph.attention import ATTENTION
from placement.graph.rows import LINEAR

aten = torch.ops.aten
DOUBLE = torch.float64


@dataclass(frozen=True)
class Sample:
    """One call. ``arguments(n)`` gives the positional arguments; at least ``least`` strategies must be offered."""

    op: Any
    arguments: Callable[[int], tuple[Any, ...]]
    least: int = 3
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(self.op).removeprefix("aten.")


SAMPLES: list[Sample] = []


def twice(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One value in two places."""
    return tensor, tensor


def sample(op: Any, arguments: Callable[[int], tuple[Any, ...]], least: int = 3, **kwargs: Any) -> None:
    SAMPLES.append(Sample(op, arguments, least, kwargs))


def x(*shape: int) -> torch.Tensor:
    """Numbers of both signs."""
    return torch.randn(shape, dtype=DOUBLE)


def u(*shape: int, low: float = 0.1, high: float = 0.9) -> torch.Tensor:
    """Numbers inside of (0, 1), where every function is defined."""
    return torch.rand(shape, dtype=DOUBLE) * (high - low) + low


def i(*shape: int, low: int = 0, high: int = 7) -> torch.Tensor:
    return torch.randint(low, high, shape)


def g(tensor: torch.Tensor) -> torch.Tensor:
    """Marked as what is differentiated; where nothing is marked, all floating-point tensors are."""
    return tensor.requires_grad_()


def c(*shape: int) -> torch.Tensor:
    """Complex numbers."""
    return torch.randn(shape, dtype=torch.complex128)


def b(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.4


# -- pointwise ------------------------------------------------------------------------------------

for _name in """
    abs acos asin asinh atan atanh ceil celu cos cosh digamma elu erf erfc erfinv exp exp2 expm1 floor frac gelu
    hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lgamma log log10 log1p log2
    log_sigmoid logical_not logit mish nan_to_num reciprocal relu relu6 round rsqrt selu sgn sigmoid sign silu
    sin sinc sinh softplus softshrink sqrt square tan tanh trunc ones_like zeros_like
""".split():  # noqa: SIM905 - words read best as text
    sample(getattr(aten, _name).default, lambda n: (u(n, 3 * n, 2),), least=4)
sample(aten.acosh.default, lambda n: (u(n, 3 * n) + 1.0,), least=4)
sample(aten.gelu.default, lambda n: (x(n, 3 * n),), least=4, approximate="tanh")
sample(aten.leaky_relu.default, lambda n: (x(n, 3 * n), 0.2), least=4)
sample(aten.bitwise_not.default, lambda n: (i(n, 3 * n),), least=3)
sample(aten.threshold.default, lambda n: (x(n, 3 * n), 0.3, 7.0), least=4)
sample(aten.full_like.default, lambda n: (x(n, 3 * n), 2.5), least=4)
sample(aten.fill.Scalar, lambda n: (x(n, 3 * n), 2.5), least=4)
sample(aten.isin.Tensor_Scalar, lambda n: (i(n, 3 * n), 2), least=3)
sample(aten.clamp.default, lambda n: (x(n, 3 * n), -0.5, 0.5), least=4)
sample(aten.clamp.Tensor, lambda n: (x(n, 3 * n), x(3 * n) - 3), least=4)
sample(aten.clamp_min.default, lambda n: (x(n, 3 * n), -0.5), least=4)
sample(aten.clamp_max.default, lambda n: (x(n, 3 * n), 0.5), least=4)
sample(aten.neg.default, lambda n: (x(n, 3 * n),), least=5)
sample(aten.detach.default, lambda n: (x(n, 3 * n),), least=5)

_PAIRS = {  # operands of one shape, a row, a column, one that both extend
    "same": lambda n, make: (make(n, 3 * n), make(n, 3 * n)),
    "row": lambda n, make: (make(2, n, 3 * n), make(3 * n)),
    "column": lambda n, make: (make(n, 1), make(n, 3 * n)),
    "both": lambda n, make: (make(n, 1), make(1, 3 * n)),
    "scalar": lambda n, make: (make(n, 3 * n), make()),
}
for _name in """
    atan2 copysign fmax fmin fmod hypot logaddexp maximum minimum remainder xlogy eq ne lt le gt ge
""".split():  # noqa: SIM905 - words read best as text
    _packet = getattr(aten, _name)
    _op = _packet.Tensor if "Tensor" in _packet.overloads() else _packet.default
    for _pair in _PAIRS.values():
        sample(_op, lambda n, pair=_pair: pair(n, u))
for _name in """
    bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ logical_and logical_or logical_xor
""".split():  # noqa: SIM905 - words read best as text
    _packet = getattr(aten, _name)
    _op = _packet.Tensor if "Tensor" in _packet.overloads() else _packet.default
    for _make in (b, i):
        sample(_op, lambda n, make=_make: _PAIRS["same"](n, make), least=3)
        sample(_op, lambda n, make=_make: _PAIRS["both"](n, make), least=3)
sample(aten.max.other, lambda n: _PAIRS["row"](n, x), least=4)
sample(aten.min.other, lambda n: _PAIRS["row"](n, x), least=4)
sample(aten.eq.Scalar, lambda n: (i(n, 3 * n), 2), least=3)
sample(aten.ge.Scalar, lambda n: (x(n, 3 * n), 0.5), least=4)
sample(aten.remainder.Scalar, lambda n: (i(n, 3 * n), 2))
sample(aten.floor_divide.default, lambda n: (i(n, 3 * n), i(3 * n, low=1)))
sample(aten.div.Tensor_mode, lambda n: _PAIRS["row"](n, u), rounding_mode="floor")
sample(aten.div.Scalar_mode, lambda n: (x(n, 3 * n), 2), rounding_mode="trunc")
sample(aten.lerp.Scalar, lambda n: (x(n, 3 * n), x(n, 3 * n), 0.3), least=4)
sample(aten.lerp.Tensor, lambda n: (x(n, 3 * n), x(n, 3 * n), x(3 * n)), least=4)

for _pair in _PAIRS.values():
    sample(aten.mul.Tensor, lambda n, pair=_pair: pair(n, x), least=5)
    sample(aten.add.Tensor, lambda n, pair=_pair: pair(n, x), least=4)
    sample(aten.sub.Tensor, lambda n, pair=_pair: pair(n, x), least=4, alpha=3)
    sample(aten.div.Tensor, lambda n, pair=_pair: pair(n, u), least=4)
sample(aten.add.Tensor, lambda n: (x(n, 3 * n), x(n, 3 * n)), least=5, alpha=-2)
sample(aten.add.Tensor, lambda n: (i(n, 3 * n), x(3 * n)), least=4)  # integers have no gradient
sample(aten.add.Tensor, lambda n: (x(n, 3 * n), b(n, 3 * n)), least=4)  # a truth value is no sum
sample(aten.add.Tensor, lambda n: (x(3 * n), 2.0), least=3)
sample(aten.add.Scalar, lambda n: (x(n, 3 * n), 2.0), least=4)
sample(aten.sub.Scalar, lambda n: (x(n, 3 * n), 2.0), least=4)
sample(aten.rsub.Scalar, lambda n: (x(n, 3 * n), 2.0), least=4)
sample(aten.rsub.Tensor, lambda n: (x(n, 3 * n), x(3 * n)), least=5)
sample(aten.mul.Scalar, lambda n: (x(n, 3 * n), -2.0), least=5)
sample(aten.mul.Tensor, lambda n: (x(n, 3 * n), 0.125), least=5)
sample(aten.mul.Tensor, lambda n: (x(n, 3 * n), b(3 * n)), least=5)
sample(aten.mul.Tensor, lambda n: twice(x(n, 3 * n)), least=5)  # one value in two places
sample(aten.div.Scalar, lambda n: (x(n, 3 * n), 3.0), least=5)
sample(aten.div.Tensor, lambda n: (i(n, 3 * n), 3.0), least=4)
sample(aten.pow.Tensor_Scalar, lambda n: (x(n, 3 * n), 2), least=4)
sample(aten.pow.Tensor_Tensor, lambda n: (u(n, 3 * n), x(3 * n)), least=4)
sample(aten.pow.Scalar, lambda n: (2.0, x(n, 3 * n)), least=4)
sample(aten.addcmul.default, lambda n: (x(n, 3 * n), x(n, 1), x(3 * n)), least=5, value=0.5)
sample(aten.addcdiv.default, lambda n: (x(n, 3 * n), x(n, 3 * n), u(3 * n)), least=5)
sample(aten.to.dtype, lambda n: (x(n, 3 * n), torch.float32), least=5)
sample(aten.to.dtype, lambda n: (x(n, 3 * n), torch.int64), least=4)
sample(aten.to.dtype, lambda n: (b(n, 3 * n), torch.float64), least=3)
sample(aten.to.dtype, lambda n: (i(n, 3 * n), torch.float64), least=4)
sample(aten.where.self, lambda n: (b(n, 3 * n), x(n, 3 * n), x(3 * n)), least=5)
sample(aten.where.self, lambda n: (b(n, 1), x(n, 3 * n), x()), least=5)
sample(aten.where.ScalarOther, lambda n: (b(n, 3 * n), x(n, 3 * n), 0.0), least=5)
sample(aten.where.ScalarOther, lambda n: (b(n, 3 * n), x(n, 3 * n), 1.0), least=4)
sample(aten.where.ScalarSelf, lambda n: (b(n, 3 * n), 0, x(n, 3 * n)), least=5)
sample(aten.where.Scalar, lambda n: (b(n, 3 * n), 0.0, 1.0), least=3)
sample(aten.masked_fill.Scalar, lambda n: (x(n, 3 * n), b(3 * n), 0.0), least=5)
sample(aten.masked_fill.Scalar, lambda n: (x(n, 3 * n), b(n, 1), float("-inf")), least=4)
sample(aten.masked_fill.Scalar, lambda n: (x(n, 3 * n), b(n, 3 * n), -1e4), least=4)
sample(aten.masked_fill.Tensor, lambda n: (x(n, 3 * n), b(n, 3 * n), x()), least=5)
sample(aten.tril.default, lambda n: (x(n, 3 * n, 3 * n),), least=4)
sample(aten.triu.default, lambda n: (x(n, 3 * n, 3 * n), 1), least=4)
sample(aten.dropout.default, lambda n: (x(n, 3 * n), 0.5, False), least=4)
sample(aten.prelu.default, lambda n: (x(2, 3 * n, n), x(3 * n)), least=4)
sample(aten.prelu.default, lambda n: (x(2, 3 * n, n), x(1)), least=4)
sample(aten.glu.default, lambda n: (x(n, 6 * n),), least=4)
sample(aten.glu.default, lambda n: (x(2 * n, 3 * n), 0), least=4)

# -- products -------------------------------------------------------------------------------------

sample(aten.linear.default, lambda n: (x(2, n, 3 * n), x(5 * n, 3 * n)), least=7)
sample(aten.linear.default, lambda n: (x(3 * n), x(5 * n, 3 * n)), least=6)
sample(aten.linear.default, lambda n: (x(2, n, 3 * n), x(5 * n, 3 * n), x(5 * n)), least=6)
sample(LINEAR, lambda n: (x(2, n, 3 * n), x(3 * n, 5 * n)), least=7)
sample(LINEAR, lambda n: (x(2, n, 3 * n), x(3 * n, 5 * n), x(5 * n)), least=6)
sample(aten.mm.default, lambda n: (x(n, 3 * n), x(3 * n, 5 * n)), least=7)
sample(aten.mm.default, lambda n: twice(x(3 * n, 3 * n)), least=4)  # one factor in both dims
sample(aten.bmm.default, lambda n: (x(n, 5, 3 * n), x(n, 3 * n, 5 * n)), least=7)
sample(aten.mv.default, lambda n: (x(n, 3 * n), x(3 * n)), least=6)
sample(aten.dot.default, lambda n: (x(3 * n), x(3 * n)), least=5)
sample(aten.outer.default, lambda n: (x(n), x(3 * n)), least=6)
sample(aten.baddbmm.default, lambda n: (x(n, 1, 3 * n), x(n, 5, 3 * n), x(n, 3 * n, 3 * n)), least=5, beta=0.5, alpha=2)
sample(aten.addmm.default, lambda n: (x(5 * n), x(n, 3 * n), x(3 * n, 5 * n)), least=6, alpha=0.5)
sample(aten.addmm.default, lambda n: (x(n, 1), x(n, 3 * n), x(3 * n, 5 * n)), least=6, beta=2)
sample(aten.matmul.default, lambda n: (x(n, 3, 5, 3 * n), x(3 * n, n)), least=6)
sample(aten.einsum.default, lambda n: ("bsw,whd->bshd", [x(2 * n, 3, n), x(n, 2 * n, 3)]), least=6)
sample(aten.einsum.default, lambda n: ("...ij, ...jk", [x(n, 1, 3, n), x(3, n, 2 * n)]), least=6)
sample(aten.einsum.default, lambda n: ("ab,bc,cd->da", [x(n, 2 * n), x(2 * n, 3), x(3, n)]), least=6)
sample(aten.einsum.default, lambda n: ("ab->", [x(n, 2 * n)]), least=2)
sample(aten.matmul.default, lambda n: (x(n, 1, 5, 3 * n), x(n, 3 * n, 3)), least=5)
sample(aten.matmul.default, lambda n: (x(n, 5, 3 * n), x(3 * n)), least=6)
sample(aten.matmul.default, lambda n: (x(3 * n), x(n, 3 * n, 5)), least=6)
sample(aten.matmul.default, lambda n: (x(3 * n), x(3 * n)), least=5)
sample(aten.conv1d.default, lambda n: (x(n, 3 * n, 9), x(5 * n, 3 * n, 3), x(5 * n), (2,), (1,)), least=6)
sample(aten.conv1d.default, lambda n: (x(n, 3 * n, 9), x(3 * n, 1, 3), None, (1,), (2,), (1,), 3 * n), least=3)
sample(aten.conv1d.default, lambda n: (x(n, 6 * n, 7), x(4 * n, 3, 3), x(4 * n), (1,), (1,), (1,), 2 * n), least=4)
sample(
    aten.conv2d.default,
    lambda n: (x(2, 3 * n, 5, 4), x(3 * n, 1, 3, 3), x(3 * n), [1, 1], [1, 1], [1, 1], 3 * n),
    least=4,
)
sample(aten.conv_transpose1d.default, lambda n: (x(n, 3 * n, 4), x(3 * n, 5 * n, 3), x(5 * n), (2,)), least=6)
sample(aten.conv_transpose1d.default, lambda n: (x(n, 3 * n, 4), x(3 * n, 2, 3), None, [1], [0], [0], n), least=3)
sample(aten.conv_transpose2d.input, lambda n: (x(n, n, 4, 3), x(n, 3 * n, 2, 3)), least=7)
sample(aten.conv_transpose3d.input, lambda n: (x(1, n, 2, 2, 2), x(n, n, 2, 2, 2)), least=5)
sample(aten.conv2d.default, lambda n: (x(n, 3 * n, 4, 5), x(n, 3 * n, 2, 3)), least=7)
sample(aten.conv3d.default, lambda n: (x(n, n, 3, 3, 3), x(n, n, 2, 2, 2), x(n)), least=6)

# -- views and rearrangements -----------------------------------------------------------------------

sample(aten.reshape.default, lambda n: (x(n, 3, 5 * n), (3 * n, 5 * n)), least=5)
sample(aten.reshape.default, lambda n: (x(3 * n, 5 * n), (n, 3, -1)), least=4)
sample(aten.reshape.default, lambda n: (x(3, 4 * n), (3, 2 * n, 2)), least=4)
sample(aten.reshape.default, lambda n: (x(n, 1, 3 * n), (n, 3 * n)), least=5)
sample(aten.reshape.default, lambda n: (b(n, 3 * n), (3 * n * n,)), least=2)
sample(aten.unsqueeze.default, lambda n: (x(n, 3 * n), 1), least=5)
sample(aten.unsqueeze.default, lambda n: (x(n, 3 * n), -1), least=5)
sample(aten.squeeze.dim, lambda n: (x(n, 1, 3 * n), 1), least=5)
sample(aten.squeeze.dim, lambda n: (x(n, 1, 3 * n), 0), least=4)
sample(aten.squeeze.dims, lambda n: (x(n, 1, 3 * n, 1), (1, -1)), least=5)
sample(aten.transpose.int, lambda n: (x(n, 3, 5 * n), 0, -1), least=5)
sample(aten.swapdims.default, lambda n: (x(n, 3, 5 * n), 1, 2), least=5)
sample(aten.permute.default, lambda n: (x(n, 3, 5 * n), (2, 0, -2)), least=5)
sample(aten.t.default, lambda n: (x(n, 3 * n),), least=5)
sample(aten.t.default, lambda n: (x(n),), least=4)
sample(aten.numpy_T.default, lambda n: (x(n, 3 * n),), least=5)
sample(aten.mT.default, lambda n: (x(2, n, 3 * n),), least=5)
sample(aten.movedim.int, lambda n: (x(n, 3, 5 * n), 0, -1), least=5)
sample(aten.movedim.intlist, lambda n: (x(n, 3, 5 * n, 2), (0, 3), (2, 0)), least=5)
sample(aten.expand.default, lambda n: (x(n, 1, 3 * n), (-1, 5, -1)), least=5)
sample(aten.expand.default, lambda n: (x(1, 3 * n), (n, 5, 3 * n)), least=4)
sample(aten.expand.default, lambda n: (b(1, 3 * n), (n, 3 * n)), least=2)
sample(aten.slice.Tensor, lambda n: (x(n, 3 * n), 1, 1, 3), least=4)
sample(aten.slice.Tensor, lambda n: (x(n, 3 * n), -1, None, -1), least=4)
sample(aten.slice.Tensor, lambda n: (x(3 * n, n), 0, None, None, 2), least=4)
sample(aten.narrow.default, lambda n: (x(n, 3 * n), 1, 1, n), least=4)
sample(aten.slice_scatter.default, lambda n: (x(n, 3 * n), x(n, 2), 1, 1, 3), least=3)
sample(aten.select_scatter.default, lambda n: (x(2 * n, 3, n), x(2 * n, n), 1, -1), least=3)
sample(aten.select.int, lambda n: (x(n, 3, 5 * n), 1, -1), least=5)
sample(aten.select.int, lambda n: (x(n, 1, 5 * n), 1, 0), least=5)
sample(aten.unbind.int, lambda n: (x(n, 3, 5 * n), -2), least=5)
sample(aten.split.Tensor, lambda n: (x(n, 6 * n), 2 * n, 1), least=5)
sample(aten.split.Tensor, lambda n: (x(n, 3 * n), 2 * n, -1), least=4)
sample(aten.split.sizes, lambda n: (x(n, 6 * n), (2 * n, 2 * n, 2 * n), -1), least=5)
sample(aten.split_with_sizes.default, lambda n: (x(n, 5 * n), (3 * n, 2 * n), 1), least=4)
sample(aten.chunk.default, lambda n: (x(n, 6 * n), 3, -1), least=5)
sample(aten.chunk.default, lambda n: (x(n, 5), 3, 1), least=4)
sample(aten.cat.default, lambda n: ((x(n, 3 * n), x(n, 2 * n)), -1), least=4)
sample(aten.cat.default, lambda n: ((x(n, 3 * n), x(n, 3 * n), x(n, 3 * n)), 0), least=4)
sample(aten.cat.default, lambda n: (twice(x(n, 3 * n)), 1), least=4)
sample(aten.stack.default, lambda n: ((x(n, 3 * n), x(n, 3 * n)), 1), least=5)
sample(aten.stack.default, lambda n: ((x(n, 3 * n), x(n, 3 * n)), -1), least=5)
sample(aten.pad.default, lambda n: (x(n, 3 * n), (1, 2)), least=4)
sample(aten.pad.default, lambda n: (x(n, 3 * n), (-1, 1), "constant", 7.0), least=3)  # a shift: the size stays
sample(aten.pad.default, lambda n: (x(2, n, 3 * n), (1, 1), "reflect"), least=4)
sample(aten.constant_pad_nd.default, lambda n: (x(n, 2 * n, 3 * n), (0, 0, 1, 0)), least=5)
sample(aten.flip.default, lambda n: (x(n, 3 * n), (-1,)), least=4)
sample(aten.roll.default, lambda n: (x(n, 3 * n), (1,), (1,)), least=4)
sample(aten.roll.default, lambda n: (x(n, 3 * n), (1,)), least=3)
sample(aten.repeat.default, lambda n: (x(n, 3 * n), (1, 2)), least=5)
sample(aten.repeat.default, lambda n: (x(n, 3 * n), (5, 3, 1)), least=5)
sample(aten.repeat_interleave.self_int, lambda n: (x(n, 3 * n), 2, -1), least=5)
sample(aten.repeat_interleave.self_int, lambda n: (x(n, 3 * n), 2), least=2)
sample(aten.diff.default, lambda n: (x(n, 3 * n),), least=4)
sample(aten.diff.default, lambda n: (i(n, 3 * n), 1, -1, i(n, 1)), least=3)

# -- reductions -----------------------------------------------------------------------------------

for _keep in (False, True):
    sample(aten.sum.dim_IntList, lambda n, k=_keep: (x(n, 3, 5 * n), (-1,), k), least=5)
    sample(aten.mean.dim, lambda n, k=_keep: (x(n, 3, 5 * n), (0, -1), k), least=5)
    for _name in ["amax", "amin", "var.dim", "std.dim", "var_mean.dim", "std_mean.dim"]:
        _packet, _, _overload = _name.partition(".")
        _op = getattr(getattr(aten, _packet), _overload or "default")
        sample(_op, lambda n, k=_keep: (x(n, 3, 5 * n), (-1,)), least=3, keepdim=_keep)
    for _op in (aten.max.dim, aten.min.dim, aten.median.dim, aten.prod.dim_int, aten.any.dim, aten.all.dim):
        sample(_op, lambda n, k=_keep: (x(n, 3, 5 * n), -1, k), least=3)
    sample(aten.argmax.default, lambda n, k=_keep: (x(n, 3, 5 * n), 0, k), least=3)
    sample(aten.argmin.default, lambda n, k=_keep: (x(n, 3, 5 * n), -1, k), least=3)
    sample(aten.logsumexp.default, lambda n, k=_keep: (x(n, 3, 5 * n), (1, 2), k), least=3)
    sample(aten.linalg_vector_norm.default, lambda n, k=_keep: (x(n, 3, 5 * n), 2, (-1,), k), least=3)
    sample(aten.norm.ScalarOpt_dim, lambda n, k=_keep: (x(n, 3, 5 * n), 2, (-1,), k), least=3)
sample(aten.norm.ScalarOpt_dim_dtype, lambda n: (x(n, 3 * n), 2, (-1,), False), least=3, dtype=DOUBLE)
sample(aten.norm.ScalarOpt_dtype, lambda n: (x(n, 3 * n), 2), least=2, dtype=DOUBLE)
sample(aten.norm.Scalar, lambda n: (x(n, 3 * n),), least=2)
sample(aten.amax.default, lambda n: (x(n, 3 * n),), least=2)
sample(aten.sum.default, lambda n: (x(n, 3 * n),), least=5)
sample(aten.sum.default, lambda n: (b(n, 3 * n),), least=3)
sample(aten.sum.default, lambda n: (x(),), least=3)
sample(aten.sum.dim_IntList, lambda n: (x(n, 3 * n), None), least=5)
sample(aten.sum.dim_IntList, lambda n: (x(n, 3 * n), ()), least=5)
sample(aten.sum.dim_IntList, lambda n: (i(n, 3 * n), (0,)), least=4, dtype=DOUBLE)
sample(aten.mean.default, lambda n: (x(n, 3 * n),), least=5)
sample(aten.nansum.default, lambda n: (x(n, 3 * n), (1,)), least=4)
sample(aten.count_nonzero.default, lambda n: (i(n, 3 * n), 1), least=3)
sample(aten.count_nonzero.dim_IntList, lambda n: (b(n, 3 * n), (0, 1)), least=3)
for _op in (
    aten.max.default,
    aten.min.default,
    aten.median.default,
    aten.prod.default,
    aten.any.default,
    aten.all.default,
):
    sample(_op, lambda n: (x(n, 3 * n),), least=1)
sample(aten.any.dims, lambda n: (b(2, n, 3 * n), (0, 1)), least=2)
for _op in (aten.var, aten.std, aten.var_mean, aten.std_mean):
    sample(_op.correction, lambda n: (x(n, 3 * n), (-1,)), least=3, correction=1)
    sample(_op.default, lambda n: (x(n, 3 * n),), least=2)
sample(aten.softmax.int, lambda n: (x(n, 3, 5 * n), -1), least=3)
sample(aten.softmax.int, lambda n: (x(n, 3, 5 * n), 0, torch.float32), least=3)
sample(aten._softmax.default, lambda n: (x(n, 3 * n), 1, False), least=3)
sample(aten.log_softmax.int, lambda n: (x(n, 3, 5 * n), 1), least=4)
sample(aten._log_softmax.default, lambda n: (x(n, 3 * n), 0, False), least=3)
sample(aten.cumsum.default, lambda n: (x(n, 3 * n), -1), least=4)
sample(aten.cumsum.default, lambda n: (i(n, 3 * n), 0), least=3)
sample(aten.cumprod.default, lambda n: (u(n, 3 * n), -1), least=3)
sample(aten.logcumsumexp.default, lambda n: (x(n, 3 * n), -1), least=3)
sample(aten.sort.default, lambda n: (x(n, 3 * n), -1, True), least=3)
sample(aten.sort.stable, lambda n: (i(n, 3 * n),), least=2, stable=True, dim=0)
sample(aten.argsort.default, lambda n: (x(n, 3 * n), 0), least=3)
sample(aten.topk.default, lambda n: (x(n, 3 * n), 2), least=3)
sample(aten.layer_norm.default, lambda n: (x(n, 3, 5 * n), (5 * n,), x(5 * n), x(5 * n)), least=3)
sample(aten.layer_norm.default, lambda n: (x(n, 3, 5 * n), (3, 5 * n)), least=3)
sample(aten.rms_norm.default, lambda n: (x(n, 3 * n, 5), (5,), x(5), 1e-6), least=4)
sample(aten.rms_norm.default, lambda n: (x(2, 3, 5 * n), (3, 5 * n), x(3, 5 * n)), least=3)
sample(aten.rms_norm.default, lambda n: (x(n, 3 * n, 5), (5,)), least=4)
sample(aten.native_layer_norm.default, lambda n: (x(n, 3 * n, 5), (5,), x(5), x(5), 1e-5), least=4)
sample(aten.group_norm.default, lambda n: (x(n, 6 * n, 5), 3, x(6 * n), x(6 * n)), least=3)

sample(aten._weight_norm.default, lambda n: (x(3 * n, n, 2), x(3 * n, 1, 1), 0), least=4)
sample(aten._weight_norm.default, lambda n: (x(n, 3, 5 * n), x(1, 1, 5 * n), 2), least=4)

# -- positions, complex numbers, spectra ------------------------------------------------------------

for _dims in (1, 2, 3):
    _at = (5, 4, 3)[:_dims]
    for _name in ("avg_pool", "max_pool"):
        _op = getattr(aten, f"{_name}{_dims}d").default
        sample(_op, lambda n, at=_at: (x(n, 3 * n, *at), [2] * len(at)), least=4)
    _op = getattr(aten, f"adaptive_avg_pool{_dims}d").default
    sample(_op, lambda n, at=_at: (x(n, 3 * n, *at), [2] * len(at)), least=5)
    _op = getattr(aten, f"upsample_nearest{_dims}d").vec
    sample(_op, lambda n, at=_at: (x(n, 3 * n, *at), [7] * len(at), None), least=5)
sample(aten.max_pool1d_with_indices.default, lambda n: (x(n, 3 * n, 6), [2]), least=4)
sample(aten.max_pool2d_with_indices.default, lambda n: (x(3 * n, 6, 6), [2, 3]), least=3)
sample(aten.max_pool3d_with_indices.default, lambda n: (x(1, n, 4, 4, 4), [2, 2, 2]), least=3)
sample(aten.upsample_linear1d.vec, lambda n: (x(n, 3 * n, 4), [7], False, None), least=5)
sample(aten.upsample_bilinear2d.vec, lambda n: (x(n, 3 * n, 4, 3), None, True, [2.0, 2.0]), least=5)
sample(aten.upsample_bicubic2d.default, lambda n: (x(n, 3 * n, 4, 3), [5, 7], False), least=5)
sample(aten.upsample_trilinear3d.vec, lambda n: (x(n, n, 2, 3, 2), [3, 4, 3], False, None), least=5)
sample(aten.im2col.default, lambda n: (x(n, 3 * n, 5, 4), [3, 2], [1, 1], [1, 0], [1, 1]), least=5)
sample(aten.col2im.default, lambda n: (x(n, 6 * 3 * n, 15), [5, 4], [3, 2], [1, 1], [1, 0], [1, 1]), least=5)
sample(aten.unfold.default, lambda n: (x(n, 7, 3 * n), 1, 3, 2), least=5)
sample(aten.pixel_shuffle.default, lambda n: (x(n, 4 * n, 3 * n, n), 2), least=7)

for _name in ("real", "imag", "_conj", "_conj_physical", "conj", "conj_physical", "resolve_conj", "view_as_real"):
    sample(getattr(aten, _name).default, lambda n: (c(n, 3 * n),), least=5)
sample(aten.angle.default, lambda n: (c(n, 3 * n),), least=4)
sample(aten.polar.default, lambda n: (x(n, 3 * n), x(3 * n)), least=4)
sample(aten.complex.default, lambda n: (x(n, 3 * n), x(3 * n)), least=5)
sample(aten.view_as_complex.default, lambda n: (x(n, 3 * n, 2),), least=5)
sample(aten.mul.Tensor, lambda n: (c(n, 3 * n), c(3 * n)), least=6)
for _name in ("fft", "ifft", "rfft", "irfft"):
    sample(getattr(aten, f"fft_{_name}").default, lambda n: (x(n, 3 * n, 5), None, 1), least=4)
    for _more in "2n":
        sample(getattr(aten, f"fft_{_name}{_more}").default, lambda n: (x(n, 3, 5),), least=3)
sample(aten.fft_fftn.default, lambda n: (x(n, 3 * n, 5), (4,)), least=5)

# -- indexing -------------------------------------------------------------------------------------

sample(aten.embedding.default, lambda n: (x(5 * n, 3 * n), i(n, 3, high=5 * n)), least=5)
sample(aten.embedding.default, lambda n: (x(5 * n, 3 * n), i(2, n, high=5 * n), 2), least=5)
sample(aten.embedding.default, lambda n: (x(5 * n, 3 * n), i(3 * n, high=5 * n), -1, True), least=4)
sample(aten.gather.default, lambda n: (x(n, 3 * n), 1, i(n, 5 * n, high=3 * n)), least=5)
sample(aten.gather.default, lambda n: (x(3 * n, 5 * n), -1, i(2 * n, 5 * n, high=5 * n)), least=4)
sample(
    aten.scatter.src,
    lambda n: (x(n, 3 * n), 1, torch.stack([torch.randperm(3 * n) for _ in range(n)]), x(n, 3 * n)),
    least=4,
)
sample(aten.scatter.value, lambda n: (x(n, 3 * n), 1, i(n, 2, high=3 * n), 5.0), least=3)
sample(aten.scatter_add.default, lambda n: (x(n, 3 * n), -1, i(n, 5 * n, high=3 * n), x(n, 5 * n)), least=5)
sample(aten.index_select.default, lambda n: (x(n, 3 * n), -1, i(5 * n, high=3 * n)), least=5)
sample(aten.index_add.default, lambda n: (x(n, 3 * n), 1, i(5 * n, high=3 * n), x(n, 5 * n)), least=5, alpha=2)
sample(aten.index.Tensor, lambda n: (x(n, 3 * n), [i(5 * n, high=n)]), least=5)
sample(aten.index.Tensor, lambda n: (x(3, n, 5 * n), [None, i(3 * n, 1, high=n), i(1, n, high=5 * n)]), least=5)
sample(aten.index.Tensor, lambda n: (x(5 * n, n, 3), [i(n, high=5 * n), None, i(n, high=3)]), least=5)
sample(aten.index.Tensor, lambda n: (b(n, 3 * n), [i(n, 1, 1, 1, high=n), i(1, 1, 1, 3 * n, high=3 * n)]), least=3)
sample(aten.index.Tensor, lambda n: (x(n, 3 * n), [b(n)]), least=1)
sample(aten.masked_scatter.default, lambda n: (x(3, n, 2 * n), b(3, n, 1), x(4 * n, 2 * n)), least=4)
sample(aten.masked_scatter.default, lambda n: (x(n, 3 * n), b(3 * n), x(4 * n * n)), least=3)
for _reduce in ("sum", "prod", "mean", "amax"):
    sample(aten.scatter_reduce.two, lambda n, r=_reduce: (x(n, 5), 1, i(n, 7, high=5), x(n, 7), r), least=3)
sample(
    aten.scatter_reduce.two,
    lambda n: (x(n, 5), 1, i(n, 7, high=5), x(n, 7), "mean"),
    least=3,
    include_self=False,
)
sample(aten.bucketize.Tensor, lambda n: (x(n, 3 * n), torch.tensor([-0.5, 0.0, 0.7], dtype=DOUBLE)), least=3)
sample(aten.searchsorted.Tensor, lambda n: (torch.tensor([-0.5, 0.0, 0.7], dtype=DOUBLE), x(n, 3 * n)), least=3)
sample(aten.isin.Tensor_Tensor, lambda n: (i(n, 3 * n), i(2, n)), least=3)
sample(aten.one_hot.default, lambda n: (i(n, 3 * n, high=5), 5), least=3)

# -- attention and losses ---------------------------------------------------------------------------

_ATTENTION = aten.scaled_dot_product_attention.default
sample(_ATTENTION, lambda n: (x(n, n, 3 * n, 2), x(n, n, 5, 2), x(n, n, 5, 3 * n)), least=7)
sample(_ATTENTION, lambda n: (x(n, n, 3 * n, 2), x(n, n, 3 * n, 2), x(n, n, 3 * n, 3), None, 0.0, True), least=5)
sample(_ATTENTION, lambda n: (x(n, n, 3 * n, 2), x(n, n, 5, 2), x(n, n, 5, 2), x(n, 1, 3 * n, 5)), least=6)
sample(_ATTENTION, lambda n: (x(n, n, 3, 2), x(n, n, 5, 2), x(n, n, 5, 2), b(3, 5) | (torch.arange(5) == 0)), least=5)
sample(_ATTENTION, lambda n: (x(2, 3 * n, 3, 2), x(2, n, 5, 2), x(2, n, 5, 2)), least=3, enable_gqa=True, scale=0.3)
sample(_ATTENTION, lambda n: (x(n, 3 * n, 2), x(n, 5, 2), x(n, 5, 2)), least=5)


def _seen(n: int) -> tuple[Any, ...]:
    """Queries, keys and values, and two marks of each token of both; a third of keys alone."""
    marks = (i(n, 3 * n, high=3), i(3 * n, high=2))
    return x(n, n, 3 * n, 2), x(n, n, 3 * n, 2), x(n, n, 3 * n, 3), marks, (*marks, torch.arange(3 * n) != 1)


sample(ATTENTION, lambda n: (*_seen(n)[:3], (), ()), least=6, compare=(), left=2, right=1)
sample(ATTENTION, lambda n: (*_seen(n)[:3], (), (i(n, 3 * n, high=2),)), least=6, compare=())
sample(ATTENTION, _seen, least=6, compare=("==", ">="), right=0)
sample(ATTENTION, _seen, least=6, compare=("!=", "<"))
sample(
    ATTENTION,
    lambda n: (x(2, 3 * n, 3, 2), x(2, n, 5, 2), x(2, n, 5, 2), (), (b(2, 5),)),
    least=3,
    compare=(),
    right=3,
    enable_gqa=True,
    scale=0.3,
)

for _reduction in range(3):
    _least = {0: 3, 1: 3, 2: 3}[_reduction]
    _all = {"reduction": _reduction}
    sample(
        aten.cross_entropy_loss.default,
        lambda n: (x(3 * n, 2 * n), _classes(3 * n, classes=2 * n)),
        least=_least,
        **_all,
    )
    sample(
        aten.cross_entropy_loss.default, lambda n: (g(x(n, 2 * n, 3)), _classes(n, 3, classes=2 * n), u(2 * n)), **_all
    )
    sample(aten.cross_entropy_loss.default, lambda n: (x(3 * n, 2 * n), u(3 * n, 2 * n)), least=2, **_all)
    sample(aten.nll_loss_nd.default, lambda n: (x(3 * n, 4), _classes(3 * n, classes=4)), least=3, **_all)
    sample(aten.nll_loss.default, lambda n: (g(x(3 * n, 4)), _classes(3 * n, classes=4), u(4)), least=3, **_all)
    sample(aten.nll_loss2d.default, lambda n: (x(n, 4, 3 * n, 2), _classes(n, 3 * n, 2, classes=4)), least=3, **_all)
    for _name in ["mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss"]:
        sample(getattr(aten, _name).default, lambda n: (x(n, 3 * n), x(n, 3 * n)), least=4, **_all)
    sample(aten.kl_div.default, lambda n: (u(n, 3 * n).log(), u(n, 3 * n)), least=4, **_all)
    sample(aten.kl_div.default, lambda n: (u(n, 3 * n).log(), u(n, 3 * n).log()), least=4, log_target=True, **_all)
    sample(aten.binary_cross_entropy.default, lambda n: (g(u(n, 3 * n)), u(n, 3 * n), u(3 * n)), least=4, **_all)
    _with_logits = aten.binary_cross_entropy_with_logits.default
    sample(_with_logits, lambda n: (g(x(n, 3 * n)), u(n, 3 * n), None, u(3 * n)), least=4, **_all)
sample(aten.cross_entropy_loss.default, lambda n: (x(2 * n), i(high=2 * n)), least=2)
_SMOOTH = {"ignore_index": -100, "label_smoothing": 0.2}
sample(aten.cross_entropy_loss.default, lambda n: (x(3 * n, 2 * n), _classes(3 * n, classes=2 * n)), least=3, **_SMOOTH)


def _classes(*shape: int, classes: int) -> torch.Tensor:
    """Class indices, the first half of which is ignored: ranks have unequal counts, some none."""
    target = torch.randint(0, classes, shape)
    target.view(-1)[: target.numel() // 2] = -100
    return target
