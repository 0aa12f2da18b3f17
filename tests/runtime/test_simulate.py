"""Ranks in one process: order, what threads inherit, and what happens when ranks disagree."""

from __future__ import annotations

import contextvars
import threading
import time
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from placement import runtime as rt

Axes = dict[str, rt.Axis]


def test_order_is_fixed_and_one_rank_runs_at_a_time() -> None:
    seen: list[tuple[int, int]] = []
    running = 0

    def body(axes: Axes) -> int:
        nonlocal running
        tp = axes["tp"]
        for step in range(3):
            running += 1
            assert running == 1
            time.sleep(0.001)  # another thread would get in here
            seen.append((step, tp.rank))
            running -= 1
            rt.all_reduce(torch.ones(1), tp)
        return tp.rank

    first = rt.simulate(tp=3).run(body), list(seen)
    seen.clear()
    assert (rt.simulate(tp=3).run(body), seen) == first
    assert first[0] == [0, 1, 2]


def test_several_axes() -> None:
    """Each axis joins the ranks that differ on it alone."""

    def body(axes: Axes) -> tuple[Any, ...]:
        dp, tp = axes["dp"], axes["tp"]
        x = torch.tensor([10.0 * dp.rank + tp.rank])
        return (
            rt.all_gather(x, tp, 0).tolist(),
            rt.all_gather(x, dp, 0).tolist(),
            rt.all_reduce(rt.all_reduce(x, tp), dp),
        )

    out = rt.simulate(dp=2, tp=3).run(body)
    assert [o[0] for o in out] == [[0.0, 1.0, 2.0]] * 3 + [[10.0, 11.0, 12.0]] * 3
    assert [o[1] for o in out] == [[0.0, 10.0], [1.0, 11.0], [2.0, 12.0]] * 2
    assert {o[2].item() for o in out} == {36.0}


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class Halving(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out / 2 if func is torch.cos else out


def test_threads_inherit_the_callers_state() -> None:
    def body(_: Axes) -> tuple[Any, ...]:
        packed = torch.ones(2, requires_grad=True).exp()
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            torch.get_default_dtype(),
            variable.get(),
            torch.cos(torch.zeros(())).item(),
            packed.requires_grad,
        )

    mesh = rt.simulate(tp=2)
    assert mesh.run(body) == [(True, False, False, torch.float32, "unset", 1.0, True)] * 2
    token = variable.set("given")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Halving():
            assert mesh.run(body) == [(False, False, torch.bfloat16, torch.float64, "given", 0.5, False)] * 2
        with torch.inference_mode():
            assert [out[1] for out in mesh.run(body)] == [True, True]
    finally:
        torch.set_default_dtype(torch.float32)
        variable.reset(token)


def test_saved_tensor_hooks_reach_the_ranks() -> None:
    saved: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        rt.simulate(tp=2).run(lambda _: torch.ones(2, requires_grad=True).exp())
    assert len(saved) == 2


def test_a_failing_rank_cancels_the_others() -> None:
    reached: list[int] = []

    def body(axes: Axes) -> None:
        tp = axes["tp"]
        rt.all_reduce(torch.ones(1), tp)
        if tp.rank == 1:
            raise KeyError("no such thing")
        try:
            rt.all_reduce(torch.ones(1), tp)
        except Exception:  # noqa: BLE001 - a model that swallows errors must not swallow this
            reached.append(tp.rank)
        reached.append(tp.rank)

    before = threading.active_count()
    with pytest.raises(KeyError, match="no such thing") as caught:
        rt.simulate(tp=3).run(body)
    assert caught.value.__notes__ == ["in simulated rank 1"]
    assert reached == []
    assert threading.active_count() == before


def test_a_failure_in_the_joint_action() -> None:
    with pytest.raises(rt.SizeError, match="dim 0"):
        rt.simulate(tp=3).run(lambda axes: rt.reduce_scatter(torch.ones(4), axes["tp"], 0))


def test_different_shapes() -> None:
    with pytest.raises(
        rt.RankError,
        match=r"on axis 'tp': rank 0 is at all_reduce of float32\[2\], rank 1 at all_reduce of float32\[3\]",
    ):
        rt.simulate(tp=2).run(lambda axes: rt.all_reduce(torch.ones(2 + axes["tp"].rank), axes["tp"]))


def test_different_collectives() -> None:
    def body(axes: Axes) -> None:
        if axes["tp"].rank:
            rt.all_gather(torch.ones(2), axes["tp"], 0)
        else:
            rt.all_reduce(torch.ones(2), axes["tp"])

    with pytest.raises(rt.RankError, match=r"rank 0 is at all_reduce of .*, rank 1 at all_gather Cut\(dim=0"):
        rt.simulate(tp=2).run(body)


def test_a_rank_that_ends_early() -> None:
    def body(axes: Axes) -> None:
        if axes["tp"].rank != 1:
            rt.all_reduce(torch.ones(2), axes["tp"])

    with pytest.raises(rt.RankError, match=r"rank 0 waits at all_reduce of float32\[2\] .*, rank 1 has finished"):
        rt.simulate(tp=3).run(body)


def test_ranks_that_wait_on_different_axes() -> None:
    def body(axes: Axes) -> None:
        first, second = ("dp", "tp") if axes["dp"].rank == axes["tp"].rank else ("tp", "dp")
        rt.all_reduce(rt.all_reduce(torch.ones(2), axes[first]), axes[second])

    with pytest.raises(rt.RankError, match=r"ranks wait for each other: .*on axis 'dp'.*on axis 'tp'"):
        rt.simulate(dp=2, tp=2).run(body)


def test_outside_of_a_run() -> None:
    axis = rt.simulate(tp=2).axes(0)["tp"]
    with pytest.raises(rt.RankError, match=r"all_reduce of float32\[1\] on simulated axis 'tp' outside of a run"):
        rt.all_reduce(torch.ones(1), axis)
    with pytest.raises(rt.RankError, match="mesh of its own"):
        rt.simulate(tp=2).run(lambda _: rt.simulate(tp=2).run(lambda _: None))


def test_meshes_need_axes() -> None:
    for sizes in ({}, {"tp": 0}):
        with pytest.raises(rt.MeshError, match="axes of size 1 or more"):
            rt.simulate(**sizes)


def test_one_rank_needs_no_threads() -> None:
    threads = rt.simulate(tp=1).run(lambda _: threading.current_thread())
    assert threads == [threading.current_thread()]
