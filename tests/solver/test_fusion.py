"""Ops of a plan that are joined to torch's own: where they are, where not, and that the results are the same."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import placement
from placement import runtime as rt
from placement.solver.fusion import fused
from placement.solver.memory import memory
from tests.cases.toys import close, gradients

HIDDEN = 16


class Norm(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.how = how
        self.wide = {"wide": torch.float32, "wider": torch.float64}.get(how)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.wide) if self.wide else x
        variance = y.pow(3 if self.how == "cubes" else 2).mean(-2 if self.how == "other dim" else -1, keepdim=True)
        if self.how == "cubes":
            variance = variance.abs()
        y = y * torch.rsqrt(variance + 1e-6)
        if self.how == "read":
            return self.weight * y + variance
        return self.weight * y.to(x.dtype) if self.how != "right" else y.to(x.dtype) * self.weight


class Attention(nn.Module):
    """Grouped queries: ``heads`` of them on ``kv`` of keys and values."""

    def __init__(self, heads: int = 8, kv: int = 4, how: str = "") -> None:
        super().__init__()
        self.norm = Norm(how)
        self.heads, self.kv, self.how = heads, kv, how
        self.q = nn.Linear(HIDDEN, heads * 2)
        self.k = nn.Linear(HIDDEN, kv * 2, bias=False)  # one would have a gradient of zeros
        self.v = nn.Linear(HIDDEN, kv * 2)
        self.o = nn.Linear(heads * 2, HIDDEN)

    def repeated(self, x: Tensor) -> Tensor:
        b, h, s, d = x.shape
        return x[:, :, None].expand(b, h, self.heads // self.kv, s, d).reshape(b, self.heads, s, d)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (p(x).unflatten(-1, (-1, 2)).transpose(1, 2) for p in (self.q, self.k, self.v))
        k = self.repeated(k)
        y = F.scaled_dot_product_attention(q, k, self.repeated(v), is_causal=True).transpose(1, 2)
        y = y + k.mean() if self.how == "keys read" else y
        return self.o(y.flatten(-2))


TP = """
mesh tp
input x : [batch, seq, hidden]
param {q,k,v}.* : Shard(out)
param o.weight : Shard(in)
"""
SP = TP + "value norm : Shard(seq)\noutput output : Shard(seq)\n"


def compiled(spec: str, n: int = 2, dtype: torch.dtype = torch.float64, **how):
    torch.manual_seed(0)
    model = Attention(**how).to(dtype)
    x = torch.randn(2, 4, HIDDEN, dtype=dtype)
    return model, placement.compile(model, placement.simulate(tp=n), spec, example={"x": x}), x


def equal(model: nn.Module, program, x: Tensor) -> None:
    """Outputs, and every parameter's gradient of their sum of cubes."""
    want, got = model(x), program(x)
    close(got, want)
    want.pow(3).sum().backward()
    got.pow(3).sum().backward()
    close(program.full_gradients(), gradients(model))


def ops(program) -> Counter[str]:
    return Counter(str(node.op).split(".")[1] for node in fused(program.plan).graph.nodes)


@pytest.mark.parametrize("spec", [TP, SP], ids=["tp", "sp"])
@pytest.mark.parametrize("how", ["", "right"])
def test_a_norm_grouped_heads_and_biases_are_one_op_each(spec: str, how: str) -> None:
    model, program, x = compiled(spec, how=how)
    found = ops(program)
    assert (found["rms_norm"], found["linear"], found["add"]) == (1, 4, 1)  # the row bias comes after the sum
    assert not {"rsqrt", "pow", "expand", "to"} & found.keys()
    assert "enable_gqa=True" in program.source
    equal(model, program, x)


def test_a_norm_that_is_computed_in_float32_is_one_op() -> None:
    model, program, x = compiled(TP, how="wide", dtype=torch.bfloat16)
    assert ops(program)["rms_norm"] == 1
    assert not {"rsqrt", "to"} & ops(program).keys()
    torch.testing.assert_close(program(x), model(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("how", ["cubes", "other dim", "read", "wider"])
def test_what_is_another_norm_stays(how: str) -> None:
    dtype = torch.float32 if how == "wider" else torch.float64
    model, program, x = compiled(TP, how=how, dtype=dtype)
    assert ops(program)["rms_norm"] == 0
    torch.testing.assert_close(program(x), model(x))


def test_a_norm_over_a_cut_dim_stays() -> None:
    """The mean is then a sum over ranks."""
    spec = "mesh tp\ninput x : [batch, seq, hidden], Shard(hidden)\nparam weight : Shard(0)\n"
    spec += "output output : Shard(hidden)\n"
    torch.manual_seed(0)
    model, x = Norm("").double(), torch.randn(2, 4, HIDDEN, dtype=torch.float64)
    program = placement.compile(model, placement.simulate(tp=2), spec, example={"x": x})
    assert ops(program)["rms_norm"] == 0
    close(program(x), model(x))


def test_layers_that_are_no_modules_run_together_with_their_biases() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(8, HIDDEN)) for _ in range(2))
            self.c = nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.a, self.c) * torch.tanh(F.linear(x, self.b))

    spec = "mesh tp\ninput x : [batch, seq, hidden], Shard(seq)\nparam * : Shard(0)\noutput output : Shard(2)\n"
    torch.manual_seed(0)
    model, x = Both().double(), torch.randn(2, 4, HIDDEN, dtype=torch.float64, requires_grad=True)
    program = placement.compile(model, placement.simulate(tp=2), spec, example={"x": x})
    assert "rt.all_gather_linears([(self.a, self.c), self.b], x, self.tp, 1)" in program.source
    equal(model, program, x)


def test_heads_that_are_cut_through_a_group_stay_repeated() -> None:
    """Four ranks and two heads of keys: each rank has two queries of one of them."""
    model, program, x = compiled(TP.replace("{q,k,v}.*", "q.*"), n=4, kv=2)
    assert "enable_gqa" not in program.source
    close(program(x), model(x))


def test_keys_that_others_read_stay_repeated() -> None:
    model, program, x = compiled(TP, how="keys read")
    assert "enable_gqa" not in program.source
    close(program(x), model(x))


def test_a_line_of_the_spec_keeps_them_as_written() -> None:
    _, program, _ = compiled(TP)
    model, written, x = compiled(TP + "lower ** : ops = written\n")
    assert fused(written.plan) is written.plan
    assert "rms_norm" not in written.source
    close(written(x), model(x))
    assert memory(program.plan).rank.saved_bytes < memory(written.plan).rank.saved_bytes
    assert sum(map(sum, fused(program.plan).work.values())) == sum(map(sum, program.plan.work.values()))


@pytest.mark.parametrize(
    ("lines", "code", "text"),
    [
        ("lower nowhere.* : ops = written\n", "PLC104", "matches no module"),
        ("lower ** : ops = written\nlower norm : ops = fused\n", "PLC304", "the ops of 'norm' is 'fused' here"),
        ("lower norm : overlap = ring, gathered = kept\n", "PLC304", "and in pieces (ring) nothing is"),
        ("lower * : overlap = chunks, gathered = kept\n", "PLC304", "and in pieces (chunks) nothing is"),
    ],
)
def test_lines_that_set_nothing_or_two_things_are_refused(lines: str, code: str, text: str) -> None:
    with pytest.raises(placement.PlacementError) as caught:
        compiled(TP + lines)
    (fault,) = caught.value.diagnostics
    assert fault.code == code
    assert text in fault.message


def test_a_norm_whose_mean_is_wider_stays() -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True, dtype=torch.float32) + 1e-6)

    x = torch.randn(2, 4, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    program = placement.compile(
        Wide(), placement.simulate(tp=1), "mesh tp\ninput x : [batch, seq, hidden]\n", example={"x": x}
    )
    assert program(x).dtype == Wide()(x).dtype == torch.float32


@pytest.mark.parametrize("how", ["heads in the batch", "one query head"])
def test_heads_that_are_repeated_for_something_else_stay(how: str) -> None:
    class Other(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            b, h, s, d = k.shape
            wide = k[:, :, None].expand(b, h, 2, s, d)
            if how == "one query head":
                return F.scaled_dot_product_attention(
                    q[:, :1], wide.reshape(b, 2 * h, s, d), wide.reshape(b, 2 * h, s, d)
                )
            return F.scaled_dot_product_attention(*(x.reshape(b * h, 2, s, d) for x in (q, wide, wide)))

    torch.manual_seed(0)
    given = {"q": torch.randn(2, 8, 3, 2), "k": torch.randn(2, 4, 3, 2)}
    program = placement.compile(Other(), placement.simulate(tp=1), "mesh tp\n", example=given)
    assert "enable_gqa" not in program.source
    close(program(**given), Other()(**given), rtol=1e-5)


def test_a_norm_over_two_dims_is_over_both() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4, HIDDEN) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return F.rms_norm(x, (4, HIDDEN), self.weight, 1e-3)

    torch.manual_seed(0)
    model, x = Two().double(), torch.randn(2, 4, HIDDEN, dtype=torch.float64)
    spec = "mesh tp\ninput x : [batch, seq, hidden], Shard(batch)\n"
    equal(model, placement.compile(model, placement.simulate(tp=2), spec, example={"x": x}), x)


def test_what_is_gathered_for_layers_is_kept_where_a_line_says_so() -> None:
    again, kept = (compiled(SP + line) for line in ("", "lower ** : gathered = kept\n"))
    assert "kept=True" not in again[1].source
    assert "kept=True)" in kept[1].source
    sent = []
    for model, program, x in (again, kept):
        with rt.record() as log:
            equal(model, program, x)
        sent.append(sum(event.kind == "all_gather" and event.phase == "backward" for event in log))
    assert sent[0] == sent[1] + 1  # of the one input that q, k and v share


def test_layers_stay_modules_where_their_parameters_are_summed_over_another_axis() -> None:
    """What a weight and a bias are converted by stands in the layer, after the conversion of what all layers read."""
    spec = "mesh dp\nmesh tp\ninput x : [batch, seq, hidden], Shard(batch) @ dp\n"
    spec += "param {q,k,v}.* : Shard(out) @ tp\nparam o.weight : Shard(in) @ tp\n"
    spec += "value norm : Shard(seq) @ tp\noutput output : Shard(batch) @ dp\n"
    torch.manual_seed(0)
    model, x = Attention().double(), torch.randn(2, 4, HIDDEN, dtype=torch.float64)
    program = placement.compile(model, placement.simulate(dp=2, tp=2), spec, example={"x": x})
    assert "_linears([self.q, self.k, self.v], " in program.source
    equal(model, program, x)
