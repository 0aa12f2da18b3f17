"""Norms over a dim that no rank has whole: statistics are reduced each way, and the tensor is never gathered."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import placement
from placement import runtime as rt
from tests.parity.axes import explained
from tests.parity.measure import Measured, gradients


class Normed(nn.Module):
    """A norm between a column and a row product."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 12), norm, nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x))).square().sum()


SPEC = """
mesh tp
input x : [batch, seq, hidden]
param up.*        : Shard(out) @ tp
param norm.*      : Shard(0) @ tp
param down.weight : Shard(in) @ tp
"""
NORMS = {
    "layer norm": (lambda: nn.LayerNorm(12), 2),
    "without a bias": (lambda: nn.LayerNorm(12, bias=False), 2),
    "rms norm": (lambda: nn.RMSNorm(12), 1),
}


@pytest.mark.parametrize("name", NORMS)
def test_statistics_are_reduced(name: str) -> None:
    make, launches = NORMS[name]
    model = Normed(make()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    program = placement.compile(model, placement.simulate(tp=4), SPEC, example={"x": x})
    with rt.record() as log:
        program(x=x).backward()
    model(x=x).backward()
    found = Measured()
    found.note("gradient", program.full_gradients(), gradients(model))
    assert not found.problems()
    explained(log, program.plan)
    rows = [event for event in log if event.bytes == 2 * 5 * 8]
    assert [event.kind for event in rows] == ["all_reduce"] * 2 * launches
    assert not any(event.kind == "all_gather" for event in log)
