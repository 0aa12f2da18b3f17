"""In-place ops as functional ones: what is written, in the dtype of what was written to, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import placement
from tests.cases.toys import close, gradients

Body = Callable[[Tensor], Tensor]


class Written(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.up, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.up(x))


def truths(x: Tensor) -> Tensor:
    m = x > 0
    m &= x < 1
    m |= x < -1
    m ^= x < -0.5
    return x * m


def integers(x: Tensor) -> Tensor:
    i = torch.arange(4)
    i += 1
    i <<= 1
    i >>= torch.arange(4)
    i |= 1
    return x * i


def narrower(x: Tensor) -> Tensor:
    """In place, a float32 stays one."""
    y = torch.ones(4, dtype=torch.float32)
    y *= x.detach()[0]
    return x * (y.double() - 0.5) * 1e6


def cast(x: Tensor) -> Tensor:
    """What a cast gives is a copy, and the tensor itself is as it was."""
    y = x.float()
    y += x
    return y.double() * x


def of_a_mask(x: Tensor) -> Tensor:
    m = torch.ones(4, 4, dtype=torch.bool).tril()[None]
    m &= torch.arange(4) != 2
    return x @ m[0].double()


@pytest.mark.parametrize("body", [truths, integers, narrower, cast, of_a_mask])
def test_what_is_written(body: Body) -> None:
    torch.manual_seed(0)
    model, x = Written(body).double(), torch.randn(4, 4, dtype=torch.float64)
    program = placement.compile(
        model, placement.simulate(tp=1), "mesh tp\ninput x : [batch, width]\n", example={"x": x}
    )
    want, got = model(x), program(x=x)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    want.square().sum().backward()
    got.square().sum().backward()
    close(program.full_gradients(), gradients(model))


def read_later(x: Tensor) -> Tensor:
    y = x.view(torch.int64)
    y &= 1
    return x


def not_cast(x: Tensor) -> Tensor:
    y = x.detach().to(torch.float64)
    y += 1
    return x * y


@pytest.mark.parametrize("body", [read_later, not_cast])
def test_what_would_change_something_else_is_refused(body: Body) -> None:
    """The same numbers as another dtype, or a cast to the dtype that there is: no copies."""
    given = {"x": torch.randn(4, 4, dtype=torch.float64)}
    with pytest.raises(placement.PlacementError) as caught:
        placement.plan(Written(body).double(), {"tp": 2}, "mesh tp\ninput x : [batch, width]\n", example=given)
    assert [d.code for d in caught.value.diagnostics] == ["PLC407"]
