"""Stored parameters in unusual uses: nested blocks on two axes, views, frozen weights, a hook on another axis.

What is sent is what the plan says, and all is as on one device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import placement
from placement import runtime as rt
from placement.runtime import gathers
from tests.cases.toys import close, gradients

BATCH, SEQ, SIZE, WIDTH = 4, 5, 12, 20


class Uses(nn.Module):
    """A weight in some use, and a layer after it that is called twice; ``frozen`` has no gradient."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(SIZE, WIDTH))
        self.down = nn.Linear(WIDTH, SIZE)
        self.frozen = nn.Linear(SIZE, 28, bias=False).requires_grad_(requires_grad=False)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        once = self.down(torch.tanh(self.use(torch.tanh(x), self.w)))
        twice = self.down(torch.tanh(self.use(once, self.w)))
        return (once + self.frozen(twice).tanh().sum(-1, keepdim=True)).square().mean()


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as it is": torch.matmul,
    "a view of a view": lambda x, w: x @ w.t().t(),
    "a copy": lambda x, w: x @ (2 * w),
    "both ways": lambda x, w: torch.tanh(x @ w) @ w.t() @ w,
}
HEAD = """
mesh dp
mesh tp
input x : [batch, seq, size]{}
"""
NESTED = HEAD.format("") + "param w : Shard(1) @ tp, stored Shard(1) @ dp\n"
NESTED += "param down.bias : stored Shard(0) @ dp, stored Shard(0) @ tp\n"
DATA = HEAD.format(", Shard(batch) @ dp") + "param {w,frozen.weight} : stored Shard(0) @ dp\n"
HOOKED = HEAD.format(", Shard(batch) @ tp") + "param down.bias : stored Shard(0) @ dp\nparam w : Shard(0) @ dp\n"


def compare(model: Uses, spec: str, *, counted: bool = True) -> Any:
    x = torch.randn(BATCH, SEQ, SIZE, dtype=torch.float64)
    program = placement.compile(model, rt.simulate(dp=2, tp=2), spec, example={"x": x})
    want = model(x)
    want.backward()
    with rt.record() as log:
        got = program(x=x)
        got.backward()
    close(got, want)
    close(program.full_gradients(), gradients(model))
    if counted:
        seen = Counter((e.phase, e.kind, e.axis, e.bytes) for e in log)
        assert seen == Counter((e.phase, e.action.value, e.axis, e.nbytes) for e in program.plan.launches())
    return program


@pytest.mark.parametrize("use", USES, ids=str)
def test_the_backward_gathers_as_often_as_the_plan_says(use: str) -> None:
    torch.manual_seed(0)
    compare(Uses(USES[use]).double(), DATA)


@pytest.mark.parametrize("spec", [NESTED, HOOKED], ids=["blocks in blocks", "a hook on the other axis"])
def test_nested_blocks_and_hooks_on_another_axis(spec: str) -> None:
    torch.manual_seed(0)
    compare(Uses().double(), spec)


def test_a_frozen_weight_is_not_kept_whole() -> None:
    torch.manual_seed(0)
    model, kept = Uses().double(), []
    pack = gathers._pack

    def watching(x: Tensor) -> Any:
        saved = pack(x)
        if saved is x:
            kept.append(x.untyped_storage().nbytes())
        return saved

    with mock.patch.object(gathers, "_pack", watching):
        compare(model, DATA)
    whole = model.frozen.weight.numel() * 8
    assert whole not in kept
