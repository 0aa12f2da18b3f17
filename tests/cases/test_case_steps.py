"""Loops that know nothing of ranks: casts, wrappers, recomputation, torch.compile (C02, C03, C20, C25, C26, C29)."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import placement
from placement import runtime as rt
from tests.cases import toys
from tests.cases.toys import close, gradients, step, whole
from tests.runtime.worlds import Pool, assert_replicas_equal, in_worlds, run

Change = Callable[[Any], Any]

CHANGES: dict[str, Change] = {
    "to": lambda m: m.to(torch.float32),
    "half and back": lambda m: m.half().float(),
    "optimizer": lambda m: (torch.optim.AdamW(m.parameters()), m)[1],
    "device and mode": lambda m: m.to("cpu").eval().train(),
}


def hooks_fired(log: list[rt.Event], program: Any) -> int:
    """The flat reductions of hooked gradients: all-reduces of the backward that no conversion accounts for."""
    conversions = sum(s.conversion.backward.value == "all_reduce" for s in program.plan.steps) - len(program.plan.hooks)
    return sum(e.kind == "all_reduce" and e.phase == "backward" for e in log) - conversions


def changed(mesh: Any, n: int, how: str) -> None:
    for spec in (toys.SP, toys.TP):
        model, program = toys.pair(mesh, spec)
        model, program = CHANGES[how](model), CHANGES[how](program)
        tolerance = 1e-11 if next(model.parameters()).dtype == torch.float64 else 1e-4
        for seed in range(2):
            model.zero_grad()
            program.zero_grad()
            step(model, **toys.batch(seed))
            with rt.record() as log:
                step(program, **toys.batch(seed))
            close(program.full_gradients(), gradients(model), tolerance)
            assert hooks_fired(log, program) == 1


@in_worlds
@pytest.mark.parametrize("how", CHANGES)
def test_C02_after_a_cast(world: str, n: int, how: str, gloo: Pool) -> None:
    """What hung on the Parameter objects is lost when a cast replaces them, or counts twice, or averages."""
    run(changed, world, n, gloo, how)


def wrapped(mesh: Any, n: int) -> None:
    model, program = toys.pair(mesh, toys.SP)
    both = init_device_mesh("cpu", (1, n), mesh_dim_names=("dp", "tp"))
    for block in program.blocks:
        fully_shard(block, mesh=both["dp"])
    for seed in range(2):
        model.zero_grad()
        program.zero_grad()
        step(model, **toys.batch(seed))
        step(program, **toys.batch(seed))
        hooked = [hook.parameter.name for hook in program.plan.hooks]
        assert any(name.startswith("blocks.") for name in hooked)
        for name in hooked:
            close(program.get_parameter(name).grad, model.get_parameter(name).grad)


@pytest.mark.gloo
def test_C02_under_fully_shard(gloo: Pool) -> None:
    """A wrapper that puts tensors of its own in the parameters' place: hooks lost, or its mean instead of the sum."""
    run(wrapped, "gloo", 2, gloo)


def adam(mesh: Any, n: int) -> None:
    model, program = toys.pair(mesh, toys.SP)
    assert {h.parameter.name for h in program.plan.hooks} >= {f"blocks.0.attention.{x}_norm.weight" for x in "qk"}
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, program)]
    for number in range(20):
        for m, optimizer in zip((model, program), optimizers, strict=True):
            optimizer.zero_grad()
            for micro in range(2):
                (whole(m(**toys.batch(2 * number + micro))["loss"]) / 2).backward()
            optimizer.step()
    close(program.full_state_dict(), dict(model.state_dict()), 1e-9)
    assert_replicas_equal(program)


@in_worlds
def test_C03_replicas_do_not_drift(world: str, n: int, gloo: Pool) -> None:
    """Replicas drift apart in a loop of one's own, because a trainer did the reducing: norms per head first."""
    run(adam, world, n, gloo)


def norm(mesh: Any, n: int, spec: str) -> None:
    for max_norm in (0.1, 1e6):
        model, program = toys.pair(mesh, spec)
        step(model, **toys.batch())
        step(program, **toys.batch())
        want = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        got = placement.clip_grad_norm_(program, max_norm)
        close(got, want, 1e-6)
        close(program.full_gradients(), gradients(model))
        if not isinstance(program, rt.Simulated):
            every: list[Any] = [None] * n
            dist.all_gather_object(every, got.item())
            assert len(set(every)) == 1


@in_worlds
@pytest.mark.parametrize("head", ["", "param embed.weight : [vocab, hidden], Shard(vocab)\n"], ids=["whole", "sharded"])
def test_C20_the_norm_of_one_device(world: str, n: int, head: str, gloo: Pool) -> None:
    """Replicated gradients count once per rank, per-head and tied ones not at all, or the norm differs by rank."""
    run(norm, world, n, gloo, toys.SP + head)


def micro_batches(mesh: Any, n: int, deferred: bool, set_to_none: bool, kept: bool) -> None:
    model, program = toys.pair(mesh, toys.SP)
    for number in range(3):  # more than one, so that .grad is there when a step begins
        parts = [toys.batch(4 * number + micro) for micro in range(4)]
        big = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if not kept:
            model.zero_grad(set_to_none=set_to_none)
            program.zero_grad(set_to_none=set_to_none)
        step(model, **big)
        with rt.record() as log:
            for micro, part in enumerate(parts):
                loss = whole(program(**part)["loss"]) / 4
                if deferred and micro < 3:
                    with program.no_sync():
                        loss.backward()
                else:
                    loss.backward()
        close(program.full_gradients(), gradients(model))
        assert hooks_fired(log, program) == (1 if deferred else 4)


@in_worlds
@pytest.mark.parametrize("deferred", [False, True], ids=["each", "no_sync"])
@pytest.mark.parametrize(
    ("set_to_none", "kept"), [(True, False), (False, False), (False, True)], ids=["none", "zeroed", "kept"]
)
def test_C26_micro_batches_equal_one_batch(
    world: str, n: int, deferred: bool, set_to_none: bool, kept: bool, gloo: Pool
) -> None:
    """What an earlier backward summed is summed again, or only the last micro-batch counts."""
    run(micro_batches, world, n, gloo, deferred, set_to_none, kept)


def compiled(mesh: Any, n: int) -> None:
    model, program = toys.pair(mesh, toys.SP)
    fast = torch.compile(program, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        kept: list[Any] = []
        for m, source in ((model, model), (program, program), (fast, program)):
            source.zero_grad()
            out = m(**toys.batch(seed))
            assert set(out) == {"logits", "loss"}
            assert all(type(x) is torch.Tensor for x in out.values())
            out["loss"].backward()
            full = gradients(model) if source is model else source.full_gradients()
            kept.append(({k: v.detach() for k, v in out.items()}, {k: v.clone() for k, v in full.items()}))
        for got in kept[1:]:
            close(got[0], kept[0][0])
            close(got[1], kept[0][1])
    torch.compiler.reset()


@pytest.mark.gloo
def test_C29_compiled_equals_eager(gloo: Pool) -> None:
    """The compiled backward fails on the gradient it guessed for an output that the loss does not use."""
    run(compiled, "gloo", 2, gloo)


# -- C25 -------------------------------------------------------------------------------------------


def checkpointed(spec: str) -> list[list[rt.Event]]:
    """Of a step with each block's MLP recomputed and of one without, what is sent."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, program = toys.pair(mesh, spec, layers=2)
    step(model, **toys.batch())
    logs = []
    for recomputed in (False, True):
        program.zero_grad()
        for block in program.blocks if recomputed else ():
            block.mlp.forward = functools.partial(checkpoint, block.mlp.forward, use_reentrant=False)
        with rt.record() as log:
            step(program, **toys.batch())
        close(program.full_gradients(), gradients(model))
        logs.append(log)
    return logs


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("spec", "more"),
    [
        (toys.TP, {}),
        (toys.SP, {"all_gather": 2}),
        (toys.TP + "lower ** : overlap = chunks(2)\n", {}),
        (toys.SP + "lower ** : overlap = ring\n", {"send_recv": 2}),
    ],
    ids=["tp", "sp", "tp, chunks", "sp, ring"],
)
def test_C25_what_recomputation_sends(spec: str, more: dict[str, int], gloo: Pool) -> None:
    """A hang, or traffic twice: ranks recompute in one order, and the sum that ends an MLP is not done again."""
    ranks = gloo(2).run(checkpointed, spec)
    for plain, recomputed in ranks:
        assert [e for e in plain if e.phase == "forward"] == [e for e in recomputed if e.phase == "forward"]
        counts = [Counter(e.kind for e in log if e.phase == "backward") for log in (plain, recomputed)]
        assert counts[1] - counts[0] == Counter(more)
    assert ranks[0] == ranks[1]
