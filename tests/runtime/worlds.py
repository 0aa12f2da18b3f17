"""Run one test body in either world: ranks simulated in this process, or gloo processes.

A body takes the mesh and the number of ranks. On gloo it runs on every rank, and must be importable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from placement import runtime as rt
from tests.gloo import GlooPool
from tests.runtime.programs import build, full_state, one_device

Pool = Callable[[int], GlooPool]
Body = Callable[..., Any]

WORLDS = [
    pytest.param("simulated", 2, id="simulated-2"),
    pytest.param("simulated", 4, id="simulated-4"),
    pytest.param("gloo", 2, id="gloo-2", marks=pytest.mark.gloo),
]
in_worlds = pytest.mark.parametrize(("world", "n"), WORLDS)


def run(body: Body, world: str, n: int, gloo: Pool, *args: Any) -> None:
    """Run ``body(mesh, n, *args)`` in the world; its assertions are the test's."""
    if world == "simulated":
        body(rt.simulate(tp=n), n, *args)
    else:
        gloo(n).run(_on_mesh, body, n, *args)


def _on_mesh(body: Body, n: int, *args: Any) -> None:
    body(init_device_mesh("cpu", (n,), mesh_dim_names=("tp",)), n, *args)


def pair(mesh: Any, n: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any]:
    """The one-device model and the program on the mesh, with equal weights."""
    model = one_device(dtype)
    program = build(n, dtype).on(mesh)
    program.load_full_state_dict(full_state(model))
    return model, program


def whole(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs as one device has them."""
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in outputs.items()}


def assert_replicas_equal(program: Any) -> None:
    """Every parameter that no axis cuts is bit-equal on all ranks."""
    ranks = program.programs if isinstance(program, rt.Simulated) else [program]
    own = [{name: p.detach() for name, p in r.named_parameters() if not r.layout_of(name)} for r in ranks]
    if not isinstance(program, rt.Simulated):
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own[0])
        own = every
    for rank, held in enumerate(own):
        for name, parameter in held.items():
            assert torch.equal(parameter, own[0][name]), f"{name} differs on rank {rank}"
