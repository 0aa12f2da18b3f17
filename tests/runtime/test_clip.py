"""C20: the one-device gradient norm over sharded, replicated, per-head and tied parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from placement import runtime as rt
from tests.runtime.programs import assert_same, batch, gradients
from tests.runtime.worlds import Pool, in_worlds, pair, run


def clip(mesh: Any, n: int) -> None:
    for norm_type in (2.0, 1.0, 3.5, math.inf, 2):
        for max_norm in (0.1, 1e6):
            model, program = pair(mesh, n)
            for m in (model, program):
                m(**batch())["loss"].backward()
            want = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
            got = rt.clip_grad_norm_(program, max_norm, norm_type)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
            assert_same(program.full_gradients(), gradients(model))
            if not isinstance(program, rt.Simulated):
                every: list[Any] = [None] * n
                dist.all_gather_object(every, got)
                assert all(torch.equal(other, got) for other in every)


@in_worlds
def test_the_one_device_norm(world: str, n: int, gloo: Pool) -> None:
    run(clip, world, n, gloo)


def corners(mesh: Any, n: int) -> None:
    model, program = pair(mesh, n)
    ranks = program.programs if isinstance(program, rt.Simulated) else [program]
    assert rt.clip_grad_norm_(program, 1.0) == torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0.0
    for m in (model, *ranks):
        m.mlp.down.grad = torch.ones_like(m.mlp.down)
    # Not finite on one rank only: all get the same, as one device would.
    model.mlp.down.grad[0, 0] = math.inf
    for rank in ranks:
        if rank.tp.rank == 0:
            rank.mlp.down.grad[0, 0] = math.inf
    with pytest.raises(RuntimeError, match=r"order 2.0 .* is not finite"):
        rt.clip_grad_norm_(program, 1.0, error_if_nonfinite=True)
    assert rt.clip_grad_norm_(program, 1.0) == torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) == math.inf
    torch.testing.assert_close(program.full_gradients()["mlp.down"], model.mlp.down.grad, equal_nan=True)


@in_worlds
def test_no_gradients_and_infinite_ones(world: str, n: int, gloo: Pool) -> None:
    run(corners, world, n, gloo)


def low_precision(mesh: Any, n: int) -> None:
    _, program = pair(mesh, n, torch.bfloat16)
    for parameter in program.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    count = sum(x.numel() for x in dict(program.full_gradients()).values()) - 16 * 8  # the tied one counts once
    norm = rt.clip_grad_norm_(program, 1.0)
    assert norm.dtype == torch.float32
    element = torch.tensor(0.01, dtype=torch.bfloat16).item()
    assert abs(norm.item() / (element * math.sqrt(count)) - 1) < 1e-6


@in_worlds
def test_norm_in_float32(world: str, n: int, gloo: Pool) -> None:
    run(low_precision, world, n, gloo)
