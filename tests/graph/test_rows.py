"""Products of rows that become linear layers, what does not, and that they run with conversions as other layers do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import placement
from placement import runtime as rt
from placement.graph.capture import capture
from placement.graph.rows import LINEAR
from tests.cases.toys import close, gradients


class Rows(nn.Module):
    """``x`` [batch, seq, 8] times a weight [in, out], as rows."""

    def __init__(self, size_in: int = 8, size_out: int = 16, how: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size_in, size_out))
        self.bias = nn.Parameter(torch.randn(size_out))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 4) if self.how == "cut" else x.view(-1, x.size(-1))
        weight = self.weight * 2 if self.how == "made" else self.weight
        y = rows.mm(weight) if self.how == "no bias" else torch.addmm(self.bias, rows, weight)
        if self.how == "rows read":
            y = y + y.mean(0)
        if self.how == "split elsewhere":
            return y.view(x.size(1), x.size(0), -1)
        return y.view(*x.shape[:-1], -1)


@pytest.mark.parametrize(
    ("how", "linear"),
    [("", True), ("no bias", True), ("cut", False), ("made", False), ("rows read", False), ("split elsewhere", False)],
)
def test_a_product_of_rows_is_a_linear_layer_where_dims_are_merged_for_it_alone(how: str, linear: bool) -> None:
    model = Rows(4 if how == "cut" else 8, 16, how)
    graph = capture(model, {"x": torch.randn(2, 4, 8)}, {"x": ("batch", "seq", "hidden")})
    ops = [node.op for node in graph.nodes]
    assert (LINEAR in ops) == linear
    assert (torch.ops.aten.mm.default in ops) != linear
    assert (torch.ops.aten.reshape.default in ops) != linear


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), Rows(8, 16), Rows(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


SPEC = """
mesh tp
input x : [batch, seq, hidden]
param up.weight : Shard(1)
param up.bias : Shard(0)
param down.weight : Shard(0)
value norm : Shard(seq)
output output : Shard(seq)
"""
CALLS = {
    "": ("rt.all_gather_linears([self.up], ", "rt.reduce_scatter_linear(self.weight.t(), "),
    "ring": ("rt.all_gather_linears([self.up], ", 'overlap="ring"'),
}


@pytest.mark.parametrize("how", CALLS)
def test_such_layers_run_with_conversions(how: str) -> None:
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(2, 4, 8, dtype=torch.float64)
    spec = f"{SPEC}lower ** : overlap = {how or 'async'}\n"
    program = placement.compile(model, rt.simulate(tp=2), spec, example={"x": x})
    for call in CALLS[how]:
        assert call in program.source
    want, got = model(x), program(x)
    close(got, want)
    want.pow(3).sum().backward()
    got.pow(3).sum().backward()
    close(program.full_gradients(), gradients(model))
