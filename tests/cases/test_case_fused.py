"""Weights that are several in one, and views across what an axis cannot cut (C15, C17)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import placement
from placement import PlacementError
from placement import runtime as rt
from tests.cases.toys import drawn
from tests.parity.test_fused import HIDDEN, checked, example

Q, KV, HEAD = 4, 2, 3


class Fused(nn.Module):
    """Attention with one projection and a gated MLP with one; ``sized`` says how they come apart."""

    def __init__(self, width: int, *, sized: bool) -> None:
        super().__init__()
        self.width, self.sized = width, sized
        self.qkv, self.o = nn.Linear(HIDDEN, (Q + 2 * KV) * HEAD), nn.Linear(Q * HEAD, HIDDEN)
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * width), nn.Linear(width, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)
        if self.sized:
            parts = y.split([Q * HEAD, KV * HEAD, KV * HEAD], -1)
        else:
            parts = (y[..., : Q * HEAD], *y[..., Q * HEAD :].chunk(2, -1))
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))
        y = self.gate_up(x)
        gate, up = y.split([self.width, self.width], -1) if self.sized else y.chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


SPEC = """
mesh tp
device h100
input x : [batch, seq, hidden]
param {qkv,gate_up}.{weight,bias} : Shard(out)
param {o,down}.weight : Shard(in)
"""


def refusal(model: nn.Module, spec: str, n: int, **given: Any) -> tuple[str, str]:
    """The message, and the hint, which also has an edit of the spec that was found to be legal, with its price."""
    with pytest.raises(PlacementError) as caught:
        placement.compile(model, rt.simulate(tp=n), spec, **given)
    hint = caught.value.diagnostics[0].hint or ""
    assert "leaving the line out costs" in hint
    return caught.value.diagnostics[0].message, hint


@pytest.mark.parametrize("sized", [True, False], ids=["split", "chunk"])
def test_C17_each_block_of_a_fused_weight_is_cut(sized: bool) -> None:
    """A cut of the rows as they are would give one rank the queries, and the other keys, values and a query."""
    model = drawn(Fused(6, sized=sized))
    program = checked(model, rt.simulate(tp=2), SPEC)
    first = program.programs[0]
    q, k, v = model.qkv.weight.split([Q * HEAD, KV * HEAD, KV * HEAD])
    gate, up = model.gate_up.weight.chunk(2)
    # The loaded weights are twice the model's.
    assert torch.equal(first.qkv.weight, 2 * torch.cat([x.chunk(2)[0] for x in (q, k, v)]))
    assert torch.equal(first.gate_up.weight, 2 * torch.cat([x.chunk(2)[0] for x in (gate, up)]))
    assert {s.conversion.forward.value for s in program.plan.steps} == {"none", "all_reduce"}


def test_C17_sizes_that_do_not_divide_are_refused() -> None:
    """Six rows of gate and up divide by 2; three of each do not. Nor do two KV heads by 3, where 24 rows would."""
    text, hint = refusal(drawn(Fused(3, sized=False)), SPEC, 2, example=example())
    assert text == (
        "dim 'out' of parameter 'gate_up.weight' is 6, in 2 pieces of 3, which axis 'tp' of 2 does not divide"
    )
    assert hint.startswith("pieces of 2 or 4 would do, or 3 ranks")
    text, hint = refusal(drawn(Fused(6, sized=True)), SPEC, 3, example=example())
    assert text == (
        "dim 'out' of parameter 'qkv.weight' is 24, in segments of 12, 6 and 6 with 2 parts each, "
        "which axis 'tp' of 3 does not divide"
    )
    assert hint.startswith("a number of parts of 3 would do, or 2 ranks")


def test_C17_segments_that_nothing_cuts_together() -> None:
    """All query heads, one key, one value, of one size: what they begin with is not the same."""

    class MultiQuery(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(HIDDEN, 6 * HEAD)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).split([4 * HEAD, HEAD, HEAD], -1)
            return q.unflatten(-1, (4, HEAD)) * (k * v)[..., None, :]

    lines = "mesh tp\ninput x : [batch, seq, hidden]\nparam qkv.weight : Shard(out)\n"
    text, hint = refusal(drawn(MultiQuery()), lines, 2, example=example())
    assert text == (
        "dim 'out' of parameter 'qkv.weight' is 18, in segments of 12, 3 and 3 that do not begin with the same parts"
    )
    assert hint.startswith("leave the line out: it is then used replicated")


def test_C15_a_view_across_an_uneven_shard_is_refused() -> None:
    """Twelve rows divide by 2, but the model looks at them as three heads."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(HIDDEN, 12)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x).unflatten(-1, (3, 4)).softmax(-1)

    model, lines = drawn(Heads()), "mesh tp\ninput x : [batch, seq, hidden]\n"
    text, hint = refusal(model, lines + "value up : Shard(2)\n", 2, example=example())
    assert text == "dim '2' of the output of 'up' is 12, in 3 parts of 4, which axis 'tp' of 2 does not divide"
    assert hint.startswith("a number of parts of 2 or 4 would do, or 3 ranks")
    program = checked(model, rt.simulate(tp=2), lines + "param up.weight : Shard(out)\n")
    (note,) = program.plan.bound.notes
    assert note.message == (
        "parameter 'up.weight' stays replicated: 12 are 3 parts of 4, which axis 'tp' of 2 does not divide"
    )
