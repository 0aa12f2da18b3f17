"""Specs drawn at random: whatever is placed how, gradients are those of one device and counts are those explained."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch

import placement
from placement import api
from placement import runtime as rt
from tests.cases import toys
from tests.cases.toys import close, gradients

WAYS = ["Replicate", "Shard(seq)", "Shard(batch)", "Partial", "auto", "Shard(2)"]
# Lines with the choices for what stands in their place, and how often they are written.
PARAMETERS = [
    ("param blocks.*.attention.{q,k,v}.weight : Shard(out)", [""], 0.7),
    ("param blocks.*.attention.q.bias : Shard(out)", [""], 0.5),
    ("param blocks.*.attention.o.weight : Shard(in)", [""], 0.7),
    ("param blocks.*.mlp.up.weight : Shard(%s)", ["out", "in"], 0.5),
    ("param blocks.*.mlp.up.bias : Shard(out)", [""], 0.3),
    ("param blocks.*.mlp.down.weight : Shard(%s)", ["in", "out"], 0.5),
    ("param embed.weight : [vocab, hidden], Shard(%s)", ["vocab", "hidden"], 0.5),
]
MODULES = [
    "blocks.*.norm1", "blocks.*.norm2", "norm", "blocks.*.attention", "blocks.*.mlp", "blocks.*.mlp.up", "embed",
    "head", "blocks.*.attention.q_norm",
]  # fmt: skip


def drawn_spec(draw: random.Random) -> str:
    lines = ["mesh tp", "input ids, labels : [batch, seq]"]
    if draw.random() < 0.5:
        lines.append("device h100")
    for line, ways, share in PARAMETERS:
        if draw.random() < share:
            lines.append(line.replace("%s", draw.choice(ways)))
    for module in MODULES:
        if draw.random() < 0.35:
            # The norm of heads keeps its heads: two groups of two are not cut in four.
            ways = WAYS[:-1] if module.endswith("q_norm") else WAYS
            lines.append(f"value {module} : {draw.choice(ways)}")
    lines.append("output logits : " + draw.choice(["Replicate", "auto", "Shard(batch)", "Shard(seq)"]))
    if draw.random() < 0.3:
        lines.append("output loss : Partial")
    return "\n".join(lines) + "\n"


def differentiated(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs after a backward through all of them, so that every conversion's backward runs."""
    out = model(**inputs)
    weights = torch.randn(out["logits"].shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (out["loss"] + (out["logits"] * weights).sum()).backward()
    return dict(out)


@pytest.mark.parametrize("seed", range(40))
def test_any_spec(seed: int) -> None:
    draw = random.Random(seed)
    n, kv_heads = draw.choice([2, 4]), draw.choice([2, 4])
    spec = drawn_spec(draw)
    model, inputs = toys.drawn(toys.Toy(kv_heads=kv_heads)), toys.batch(size=4, seq=8)
    with mock.patch.object(api, "capture", return_value=toys._captured(kv_heads=kv_heads)):
        sizes = {"batch": 4, "seq": 8}
        program = placement.compile(model, rt.simulate(tp=n), spec, example=inputs, sizes=sizes)
    assert program.plan.cost == program.plan.lower_bound
    want = differentiated(model, inputs)
    with rt.record() as log:
        got = differentiated(program, inputs)
    close(got, want)
    close(program.full_gradients(), gradients(model))
    said = Counter((x.phase, x.action.value, x.nbytes) for x in program.plan.launches())
    assert Counter((e.phase, e.kind, e.bytes) for e in log) == said
