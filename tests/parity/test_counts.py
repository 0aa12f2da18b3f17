"""What a plan says is what runs: every collective of a step, with its axis, bytes and pass, for every example."""

from __future__ import annotations

import functools
import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import placement
from placement import api
from placement import runtime as rt
from placement.graph.capture import capture
from placement.graph.ir import Graph
from placement.report import to_json
from placement.solver import sums
from placement.solver.plan import Plan
from tests.runtime.worlds import Pool

FOLDER = Path(__file__).resolve().parents[2] / "examples"
SPECS = sorted(FOLDER.glob("*/*.plc"))

Counts = dict[tuple[str, str, str, int], int]  # by phase, action, axis and bytes


@functools.cache
def _captured(example: str) -> tuple[nn.Module, dict[str, Tensor], Graph]:
    model, inputs = importlib.import_module(f"examples.{example}.model").build(batch=2, seq=12)
    spec = placement.load(next(path for path in SPECS if path.stem == example))
    dims = {str(name): tuple(map(str, line.dims)) for line in spec.inputs if line.dims for name in line.names}
    return model, inputs, capture(model, inputs, dims)


def counted(mesh: Any, path: Path, spec: Any = None) -> tuple[Plan, Counts]:
    """The plan of a spec of an example (or of ``spec``), and what one step of training communicates."""
    model, inputs, graph = _captured(path.parent.name)
    with mock.patch.object(api, "capture", return_value=graph):  # one graph for all meshes and specs
        program = placement.compile(model, mesh, spec or path, example=inputs)
    with rt.record() as log:
        program(**inputs)["loss"].backward()
    return program.plan, dict(Counter((e.phase, e.kind, e.axis, e.bytes) for e in log))


def said(plan: Plan) -> Counts:
    return dict(Counter((x.phase, x.action.value, x.axis, x.nbytes) for x in plan.launches()))


def totals(counts: Counts, axes: tuple[str, ...]) -> dict[str, Any]:
    """As ``explain --format json`` has them."""
    found: dict[str, Any] = {axis: {"forward": {}, "backward": {}} for axis in axes}
    for (phase, action, axis, size), count in sorted(counts.items()):
        phases = found.setdefault(axis, {"forward": {}, "backward": {}})
        entry = phases[phase].setdefault(action, {"count": 0, "bytes": 0})
        entry["count"] += count
        entry["bytes"] += count * size
    return found


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_execution_agrees_with_explanation(path: Path, n: int) -> None:
    axes = tuple(str(axis.name) for axis in placement.load(path).axes)
    plan, counts = counted(rt.simulate(**{axis: n if axis == "tp" else 2 for axis in axes}), path)
    assert counts
    assert counts == said(plan)
    assert totals(counts, axes) == json.loads(to_json(plan))["totals"]


SUMS = """
lower ** : reduce = float64
"""
INNER = """
lower model.layers.*            : reduce = float64
lower model.layers.*.input_layernorm : reduce = bfloat16
"""


@pytest.mark.parametrize("lines", ["", SUMS, INNER], ids=["own dtype", "float64", "by module"])
def test_buckets_and_dtypes_of_sums_are_counted(lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients in several buckets, and sums in the dtype that a line asks for: both ways, hooks, inside ops."""
    monkeypatch.setattr(sums, "BUCKET", 600)
    path = FOLDER / "qwen3" / "qwen3.plc"
    spec = placement.load(path)
    spec = placement.parse(f"{path.read_text()}{lines}", path.name) if lines else spec
    plan, counts = counted(rt.simulate(tp=2), path, spec)
    assert counts == said(plan)
    assert totals(counts, ("tp",)) == json.loads(to_json(plan))["totals"]
    hooked = [bucket.nbytes for bucket in plan.buckets()]
    assert len(hooked) > 3
    wide = sum(hook.nbytes for hook in plan.hooks) / sum(map(plan.nbytes, (h.parameter.value for h in plan.hooks)))
    assert wide == 1 if not lines else wide == 2 if lines == SUMS else 1 < wide < 2


def test_nothing_is_sent_on_one_rank() -> None:
    plan, counts = counted(rt.simulate(tp=1), FOLDER / "qwen3" / "qwen3.plc")
    assert counts == said(plan) == {}


def _on_gloo(path: Path) -> tuple[Counts, Counts]:
    plan, counts = counted(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), path)
    return counts, said(plan)


@pytest.mark.gloo
def test_every_process_agrees(gloo: Pool) -> None:
    results = gloo(2).run(_on_gloo, FOLDER / "qwen3" / "qwen3.plc")
    assert results[0][0]
    for counts, expected in results:
        assert counts == expected == results[0][0]


def test_an_evaluation_sends_no_more_than_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients only the forward's collectives run, each of them once."""
    model, inputs, graph = _captured("qwen3")
    monkeypatch.setattr(api, "capture", lambda *_: graph)
    program = placement.compile(model, rt.simulate(tp=2), FOLDER / "qwen3" / "qwen3.plc", example=inputs)
    with torch.no_grad(), rt.record() as log:
        program(**inputs)
    got = Counter((e.phase, e.kind, e.axis, e.bytes) for e in log)
    assert dict(got) == {key: count for key, count in said(program.plan).items() if key[0] == "forward"}
