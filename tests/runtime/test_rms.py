"""The norm that keeps less, against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from placement import runtime as rt

SHAPES = [(6,), (3, 6), (2, 3, 6), (0, 6)]


def values(shape: tuple[int, ...], weighted: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, g = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
    weight = torch.rand(shape[-1:], generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    return x.requires_grad_(), weight if weighted else None, g


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradients(shape: tuple[int, ...], weighted: bool, dtype: torch.dtype) -> None:
    x, weight, g = values(shape, weighted, dtype)
    found = []
    for norm in (lambda: rt.lean_rms_norm(x, weight, 1e-3), lambda: F.rms_norm(x, shape[-1:], weight, 1e-3)):
        y = norm()
        found.append((y, *torch.autograd.grad(y, [x, weight] if weight is not None else [x], g)))
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want)


def test_frozen_weights_and_inputs_have_no_gradient() -> None:
    x, weight, g = values((3, 6), True, torch.float64)
    assert weight is not None
    rt.lean_rms_norm(x.detach(), weight, 1e-3).backward(g)
    assert x.grad is None
    rt.lean_rms_norm(x, weight.detach(), 1e-3).backward(g)
    assert x.grad is not None


def test_the_second_derivative() -> None:
    x, weight, g = values((3, 6), True, torch.float64)
    found = []
    for norm in (lambda: rt.lean_rms_norm(x, weight, 1e-3), lambda: F.rms_norm(x, (6,), weight, 1e-3)):
        (first,) = torch.autograd.grad(norm(), [x], g, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [x, weight]))  # type: ignore[list-item]
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_what_is_kept() -> None:
    x, weight, _ = values((2, 3, 6), True, torch.float64)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rt.lean_rms_norm(x, weight, 1e-3)
    assert [tuple(t.shape) for t in kept] == [(2, 3, 6), (6,), (2, 3, 1)]
