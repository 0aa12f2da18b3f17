"""Parameters left to the solver: parity with one device, an expert's plan, memory that makes it store blocks."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest

import placement
from placement import PlacementError, api
from placement import runtime as rt
from placement.report.facts import facts
from placement.solver import limit
from placement.solver.memory import memory
from placement.solver.plan import Plan
from placement.types import I
from tests.parity import models
from tests.parity.test_llama70b import captured, inputs

ONE = "device h100\nmesh tp\ninput input_ids, labels : [batch, seq]\nparam ** : auto\noutput logits : auto\n"
DATA = ONE.replace("mesh tp", "mesh dp").replace("[batch, seq]", "[batch, seq], Shard(batch)")
BOTH = """
device h100
mesh dp
mesh tp
input input_ids, labels : [batch, seq], Shard(batch) @ dp
param **                : auto @ tp
output logits           : auto
"""
CASES = [
    ("gpt2", ONE, {"tp": 2}),
    ("qwen3", BOTH, {"dp": 2, "tp": 2}),
    ("qwen3", BOTH.replace(" @ tp\noutput", "\noutput"), {"dp": 2, "tp": 2}),
]


def plan(text: str, mesh: dict[str, int], family: str = "qwen3", batch: int = 4) -> Plan:
    return api.plan(models.build(family), mesh, text, example=models.inputs(batch, 12))


@pytest.mark.parametrize(("family", "text", "mesh"), CASES, ids=["tp", "dp-tp", "dp-tp-everywhere"])
def test_one_device_is_equalled(family: str, text: str, mesh: dict[str, int]) -> None:
    result = placement.verify(models.build(family), rt.simulate(**mesh), text, example=models.inputs(4, 12))
    assert result.ok, str(result)


def test_no_placement_that_a_line_could_say_is_better() -> None:
    """What the solver chooses costs no more than the examples' own lines do."""
    own = models.spec("qwen3", "sp").replace("mesh tp", "device h100\nmesh tp")
    left = api.plan(models.build("qwen3"), {"tp": 2}, own, example=models.inputs(4, 12)).cost
    assert plan(ONE, {"tp": 2}).cost[0] <= left[0]


@mock.patch.object(limit, "_WORK", 300)  # of a plan so small no proof is asked
def test_memory_makes_it_store_blocks() -> None:
    model, given = models.build("qwen3", num_hidden_layers=1), models.inputs(4, 64)
    free = api.plan(model, {"dp": 2}, DATA, example=given)
    assert not any(kind.stored for joint in free.produced.values() for kind in joint)
    held = memory(free).rank
    most = held.peak - held.states // 3
    limited = DATA + f"limit memory {most} B\n"
    tight = api.plan(model, {"dp": 2}, limited, example=given)
    assert any(kind.stored for joint in tight.produced.values() for kind in joint)
    assert memory(tight).rank.peak <= most
    assert tight.cost[0] > free.cost[0]
    result = placement.verify(model, rt.simulate(dp=2), limited, example=given)
    assert result.ok, str(result)


def test_what_cannot_fit_is_refused_with_what_the_least_takes() -> None:
    with pytest.raises(PlacementError, match=r"PLC305.*the least takes \d+") as caught:
        plan(DATA + "limit memory 20 kB\n", {"dp": 2})
    assert "of parameters" in caught.value.diagnostics[0].notes[0]


def test_an_expert_knows_the_plan_of_a_70b_shape() -> None:
    """Megatron's tensor and sequence parallelism, with a vocabulary-parallel head: nobody has said so."""
    model, graph = captured("llama", 4, False)
    text = ONE.replace("mesh tp", "mesh tp = 8 over nvlink") + "limit memory 8 GB\n"
    text += "lower ** : overlap = async\n"  # each collective is one launch
    with mock.patch.object(api, "capture", return_value=graph):
        found = api.plan(model, None, text, example=inputs())
    placed = facts(found).params
    for layer in range(4):
        at = f"model.layers.{layer}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            assert placed[f"{at}.{name}.weight"] == {"tp": "Shard(out)"}
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            assert placed[f"{at}.{name}.weight"] == {"tp": "Shard(in)"}
        assert placed[f"{at}.input_layernorm.weight"] == {"tp": "Replicate"}
    assert placed["lm_head.weight"] == {"tp": "Shard(out)"}
    sent = Counter(launch.action.value for launch in found.launches() if launch.phase == "forward")
    assert (sent["all_gather"], sent["reduce_scatter"]) == (9, 8)
    assert found.cost == found.lower_bound


def test_a_buffer_and_an_axis_of_one_rank_stay_as_they_are() -> None:
    found = plan(ONE, {"tp": 1})
    assert all(joint == (I,) for value, joint in found.produced.items() if value.requires_grad)
    two = plan(ONE, {"tp": 2})
    assert not any(two.produced[p.value][0].over for p in two.graph.parameters if p.is_buffer)
