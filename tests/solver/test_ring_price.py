"""What a ring costs by the formula of the docs, and that the solver follows it both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import placement
from placement.solver.plan import Plan
from placement.types import Action


class Attention(nn.Module):
    """Causal attention with one head of keys: [batch, seq, 32] to [batch, seq, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(32, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, kv = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2), self.kv(x).unsqueeze(1)
        k, v = (t.expand(-1, 4, -1, -1) for t in kv.chunk(2, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def planned(link: str, way: str = "", n: int = 4, seq: int = 64) -> Plan:
    text = f"mesh cp over own\nlink own = {link}\ninput x : [batch, seq, hidden], Shard(seq) @ cp\n"
    text += "output output : Shard(seq) @ cp\n" + (f"strategy ** : {way} @ cp\n" if way else "")
    example: Any = {"x": torch.randn(2, seq, 32, requires_grad=True)}
    return placement.plan(Attention(), {"cp": n}, text, example=example)


@pytest.mark.parametrize("link", ["1 MB/s, 1 us", "2 GB/s, 1 us", "1000 GB/s, 1 ns"])
def test_the_formula(link: str) -> None:
    plan = planned(link, "ring")
    (node,) = plan.inside
    n, sent, machine = 4, plan.inside[node], plan.mesh.machine((0,))
    step = machine.collective(Action.SEND_RECV, 2 * 2 * 64 * 8 * 4)  # keys and values of one head, in float32
    work = plan.work[node]
    assert sum(s.time for s in sent if s.collective.phase == "forward") == max(0, 3 * step - work[0] * (n - 1) // n)
    behind = max(0, (3 + 2) * step - work[1] * (n - 1) // n)
    assert sum(s.time for s in sent if s.collective.phase == "backward") == behind + step
    assert [s.collective.phase for s in sent] == ["forward"] * 3 + ["backward"] * 6
    assert plan.cost == plan.lower_bound
    (other,) = (s for s in planned(link, "gather").work.items() if s[0].op == node.op)
    assert plan.work[node] == other[1]  # each rank's queries meet all keys either way


def test_the_cheapest_way_is_taken() -> None:
    """Where a launch is dear keys are gathered; where bytes are, they go round behind the work."""
    for link, way in (("100 GB/s, 1 ms", "gather"), ("2 GB/s, 1 ns", "ring")):
        free, ways = planned(link), {way: planned(link, way) for way in ("gather", "all_to_all", "ring")}
        assert free.cost == min(plan.cost for plan in ways.values())
        assert min(ways, key=lambda name: ways[name].cost) == way
