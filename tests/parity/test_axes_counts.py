"""What a plan for several axes says is what runs: every collective with its axes or group, bytes and pass.

``tests/parity/test_axes.py`` counts on transformers models too; here, a small decoder on every mesh.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from placement import runtime as rt
from tests.cases import toys
from tests.cases.test_case_axes import CONTEXT, PINNED, SP, WEIGHTS, batch, pair
from tests.parity.axes import explained, own
from tests.runtime.worlds import Pool

TP = WEIGHTS + toys.NORMS + "Replicate @ tp\noutput logits : Shard(batch) @ dp\n"
MESHES = [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 2}, {"dp": 2, "tp": 1}, {"dp": 4, "tp": 2}]
CASES = [(spec, sizes) for spec in (SP, PINNED, TP) for sizes in MESHES]
CASES += [(PINNED.replace("mesh dp\n", "mesh dp\nmesh cp\n"), {"dp": 2, "cp": 1, "tp": 2})]
CASES += [(CONTEXT, {"dp": 2, "cp": 2}), (CONTEXT, {"dp": 1, "cp": 2})]
CASES += [(PINNED.replace("mesh dp\nmesh tp", "mesh tp\nmesh dp"), {"tp": 2, "dp": 2})]


def counted(mesh: Any, spec: str) -> list[rt.Event]:
    _, program = pair(mesh, spec)
    with rt.record() as log:
        out = program(**own(program, batch()))
        logits = out["logits"]
        # Through every output, so that every conversion's backward runs.
        (out["loss"] + (logits.to_local() if isinstance(logits, DTensor) else logits).sum()).backward()
    explained(log, program.plan)
    return log


@pytest.mark.parametrize(("spec", "sizes"), CASES, ids=[f"{i}-{sizes}" for i, (_, sizes) in enumerate(CASES)])
def test_execution_agrees_with_explanation(spec: str, sizes: dict[str, int]) -> None:
    assert counted(rt.simulate(**sizes), spec)


def _on_gloo(spec: str, sizes: dict[str, int]) -> list[rt.Event]:
    return counted(init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)), spec)


@pytest.mark.gloo
def test_every_process_agrees(gloo: Pool) -> None:
    logs = gloo(4).run(_on_gloo, PINNED, MESHES[0])
    assert any(event.axis == "dp_tp" for event in logs[0])
    assert all(log == logs[0] for log in logs)


def test_an_evaluation_sends_what_a_forward_does() -> None:
    _, program = pair(rt.simulate(**MESHES[0]), PINNED)
    with torch.no_grad(), rt.record() as log:
        program(**batch())
    forward = [(x.action.value, x.axis, x.nbytes) for x in program.plan.launches() if x.phase == "forward"]
    assert sorted((e.kind, e.axis, e.bytes) for e in log) == sorted(forward)
