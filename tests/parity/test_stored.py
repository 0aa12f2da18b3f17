"""Parameters stored in blocks (ZeRO-3 is `stored Shard(0) @ dp` on each): parity, launches, and what is not kept."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

import placement
from placement import PlacementError, api
from placement import runtime as rt
from placement.graph.capture import capture
from placement.graph.ir import Graph
from placement.runtime import gathers
from placement.solver.memory import memory
from placement.solver.plan import Plan
from tests.parity import models
from tests.parity.axes import own
from tests.runtime.worlds import Pool

WHOLE = """
device h100
mesh dp
input input_ids, labels : [batch, seq], Shard(batch)
param ** : stored Shard(0)
output logits : auto
"""
WITH_TP = """
device h100
mesh {0}
mesh {1}
input input_ids, labels : [batch, seq], Shard(batch) @ dp
param model.embed_tokens.weight : [vocab, hidden], Shard(vocab) @ tp, stored Shard(0) @ dp
param lm_head.weight            : [vocab, hidden], Shard(vocab) @ tp, stored Shard(0) @ dp
within model.layers.* {{
  param self_attn.{{q,k,v}}_proj.weight : Shard(out) @ tp, stored Shard(0) @ dp
  param self_attn.o_proj.weight         : Shard(in) @ tp, stored Shard(1) @ dp
  param mlp.{{gate,up}}_proj.weight     : Shard(out) @ tp, stored Shard(in) @ dp
  param mlp.down_proj.weight            : Shard(in) @ tp, stored Shard(0) @ dp
  param *_layernorm.weight              : stored Shard(0) @ dp
  value {{input,post_attention}}_layernorm : Shard(seq) @ tp
}}
output logits : auto
"""
CASES = [
    (WHOLE, {"dp": 2}),
    (WHOLE, {"dp": 4}),
    (WITH_TP.format("dp", "tp"), {"dp": 2, "tp": 2}),
    (WITH_TP.format("tp", "dp"), {"tp": 2, "dp": 2}),  # a stored shard is innermost wherever its axis stands
]
IDS = ["dp2", "dp4", "dp2-tp2", "tp2-dp2"]


def model() -> nn.Module:
    return models.build(
        "qwen3", head_dim=16, num_hidden_layers=1
    )  # 4 divides every dim, also that of the rotary frequencies


def example() -> dict[str, Tensor]:
    given = models.inputs(4, 12)
    given["labels"][0, 1:] = -100
    return given


@pytest.mark.parametrize(("text", "mesh"), CASES, ids=IDS)
def test_one_device_is_equalled(text: str, mesh: dict[str, int]) -> None:
    result = placement.verify(model(), rt.simulate(**mesh), text, example=example(), steps=2)
    assert result.ok, str(result)


@functools.cache
def _captured() -> Graph:
    return capture(model(), example(), dict.fromkeys(("input_ids", "labels"), ("batch", "seq")))


def counted(mesh: Any, text: str) -> tuple[Counter[Any], Counter[Any], Plan, list[int]]:
    """What one step sends, what the plan says, and the bytes of this rank's parameters."""
    with mock.patch.object(api, "capture", return_value=_captured()):  # one graph for all meshes and specs
        program: Any = placement.compile(model(), mesh, text, example=example())
    with rt.record() as log:
        program(**own(program, example()))["loss"].backward()
    one = program.programs[0] if isinstance(program, rt.Simulated) else program
    sizes = [p.numel() * p.element_size() for p in one.parameters()]
    seen = Counter((e.phase, e.kind, e.axis, e.bytes) for e in log)
    said = Counter((x.phase, x.action.value, x.axis, x.nbytes) for x in program.plan.launches())
    return seen, said, program.plan, sizes


@pytest.mark.parametrize(("text", "mesh"), CASES, ids=IDS)
def test_what_is_sent_is_what_the_plan_says(text: str, mesh: dict[str, int]) -> None:
    seen, said, _, _ = counted(rt.simulate(**mesh), text)
    assert seen == said
    again = sum(
        count
        for (phase, kind, axis, _), count in said.items()
        if (phase, kind, axis) == ("backward", "all_gather", "dp")
    )
    assert again >= 7  # the seven products of the layer need their weights again


def _on_gloo(shape: tuple[int, ...], names: tuple[str, ...], text: str) -> tuple[Counter[Any], Counter[Any]]:
    seen, said, _, _ = counted(init_device_mesh("cpu", shape, mesh_dim_names=names), text)
    return seen, said


@pytest.mark.gloo
@pytest.mark.usefixtures("warm_ranks")
def test_in_processes(gloo: Pool) -> None:
    text, mesh = CASES[2]
    for seen, said in gloo(4).run(_on_gloo, tuple(mesh.values()), tuple(mesh), text):
        assert seen == said
    result = placement.verify(model(), {"dp": 2}, WHOLE, example=example(), backend="gloo", steps=2)
    assert result.ok, str(result)


def test_a_rank_holds_its_blocks_only() -> None:
    whole = sum(p.numel() * 8 for p in model().parameters())
    _, _, plan, sizes = counted(rt.simulate(dp=4), WHOLE)
    assert sum(sizes) == whole // 4
    assert memory(plan).rank.parameters == whole // 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.square = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.square(x)
        return self.down(torch.relu(self.up(x))).square().mean()


NET = """
mesh dp = 2
input x : [batch, width], Shard(batch)
param {up,down}.* : stored Shard(0)
value up : Shard(batch)
"""


def net() -> tuple[Any, Tensor]:
    x = torch.randn(4, 8)
    return placement.compile(Net(), rt.simulate(dp=2), NET, example={"x": x}), x


def test_gathered_parameters_are_not_kept_for_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    add, made = gathers._Gathered.add, []

    def noted(known: Any, whole: Tensor, recipe: Any) -> None:
        made.append(StorageWeakRef(whole.untyped_storage()))
        add(known, whole, recipe)

    monkeypatch.setattr(gathers._Gathered, "add", noted)
    program, x = net()
    loss = program(x=x)
    gc.collect()
    assert len(made) == 2 * 4
    assert all(storage.expired() for storage in made)
    assert not gathers._gathered._known  # nor does the record of them hold on to blocks
    loss.backward()


def test_a_block_written_to_before_the_backward_is_noticed() -> None:
    program, x = net()
    loss = program(x=x)
    with torch.no_grad():
        for parameter in program.parameters():
            parameter.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        loss.backward()


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("param up.weight : stored Shard(seq)", "PLC103", "dim 'seq'"),
        ("param square.weight : stored Shard(0)", "PLC204", "several of its dims are one and the same"),
        ("param up.weight : stored Replicate", "PLC210", "what is stored is a block"),
        (
            "param up.bias : Shard(out) @ tp, stored Shard(0) @ dp",
            "PLC203",
            "is 12, 3 on one rank, which axis 'dp' of 4",
        ),
        (
            "param down.weight : Shard(in) @ tp, stored Shard(0) @ dp\nparam ** : stored Shard(0) @ dp",
            "PLC201",
            "placed stored Shard(0) here, Shard(in) elsewhere",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused(line: str, code: str, message: str) -> None:
    text = f"mesh dp = 4\nmesh tp = 4\ninput x : [batch, width]\n{line} {'' if '@' in line else '@ dp'}\n"
    with pytest.raises(PlacementError) as caught:
        placement.plan(Net(), None, text, example={"x": torch.randn(4, 8)})
    assert (caught.value.diagnostics[0].code, message in caught.value.diagnostics[0].message) == (code, True)
