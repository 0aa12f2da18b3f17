"""The private torch names that the runtime leans on still mean what it takes them to mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from placement.runtime._torch import (
    Group,
    Placing,
    accumulates,
    after_backward,
    applied,
    autocast_dtype,
    constant,
    eager,
    hooked,
    in_backward,
    itself_eager,
    members_to,
    own_parameter,
    place_here,
    version,
)
from tests.gloo import GlooPool


class Probe(torch.autograd.Function):
    """Identity that reports from within backward."""

    report: list[Any] = []  # noqa: RUF012 - a test's own

    @staticmethod
    def forward(ctx: Any, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.clone() for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        Probe.report.append([accumulates(node) for node, _ in ctx.next_functions])
        Probe.report.append(in_backward())
        return grads


def probe(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    Probe.report.clear()
    x, y = Probe.apply(a, b)
    return (x + y).sum()


def test_in_backward() -> None:
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    assert not in_backward()
    probe(a, b).backward()
    assert Probe.report[1] is True
    assert not in_backward()


def test_accumulates() -> None:
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    probe(a, b).backward()
    assert Probe.report[0] == [True, True]
    probe(a, b).backward(inputs=[a])
    assert Probe.report[0] == [True, False]
    torch.autograd.grad(probe(a, b), [a])
    assert Probe.report[0] == [False, False]
    probe(a * 2, b).backward()
    assert Probe.report[0] == [False, True]


def test_after_backward_sees_the_accumulated_gradient() -> None:
    a = torch.ones(2, requires_grad=True)
    seen: list[Any] = []
    out = a * 3
    out.register_hook(lambda _: after_backward(lambda: seen.append(a.grad.clone())))
    out.sum().backward()
    assert [g.tolist() for g in seen] == [[3.0, 3.0]]


def test_version() -> None:
    x = torch.zeros(2)
    before = version(x)
    x.zero_()
    assert version(x) > before


def test_eager_breaks_the_graph() -> None:
    """What is eager is not traced: a compiled caller still runs it as Python."""
    calls: list[bool] = []

    @eager
    def inner(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.compiler.is_compiling())
        return x + 1

    torch.compile(lambda x: inner(x * 2) * 2, backend="eager")(torch.ones(2))
    torch.compile(lambda x: inner(x * 2) * 2, backend="eager")(torch.ones(2))
    assert calls
    assert not any(calls)


@pytest.mark.parametrize(
    "hook",
    [
        lambda m: m.register_forward_hook(lambda *_: None),
        lambda m: m.register_forward_pre_hook(lambda *_: None),
        lambda m: m.register_full_backward_hook(lambda *_: None),
        lambda m: m.register_full_backward_pre_hook(lambda *_: None),
        lambda _: torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
    ],
    ids=["forward", "before forward", "backward", "before backward", "of all modules"],
)
def test_hooked(hook: Callable[[torch.nn.Module], Any]) -> None:
    module = torch.nn.Linear(2, 2)
    assert not hooked(module)
    handle = hook(module)
    assert hooked(module)
    handle.remove()
    assert not hooked(module)


@pytest.mark.gloo
def test_placing_is_from_local(gloo: Callable[[int], GlooPool]) -> None:
    gloo(2).run(_placed)


def _placed() -> None:
    mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), dist.get_rank()
    placing = Placing(mesh, (Shard(1),))
    for dtype, uneven in ((torch.float64, False), (torch.float32, False), (torch.float64, True)) * 2:  # met, then known
        x = (torch.arange(6.0, dtype=dtype).view(2, 3) + rank).requires_grad_()
        block = x[:, : 3 - rank] if uneven else x
        whole: Any = {"shape": torch.Size((2, 5)), "stride": (5, 1)} if uneven else {}
        gradients: list[torch.Tensor] = []
        pair = placing(block, **whole), DTensor.from_local(block, mesh, (Shard(1),), run_check=False, **whole)
        for made in pair:
            weight = torch.arange(made.numel(), dtype=dtype).view(made.shape)
            replicated: Any = made.redistribute(placements=[Replicate()])
            (replicated.to_local() * weight).sum().backward()
            assert x.grad is not None
            gradients.append(x.grad)
            x.grad = None
        assert torch.equal(*gradients)
        assert gradients[0].abs().sum() > 0
        assert len({(made.shape, made.stride(), made.dtype, made.placements) for made in pair}) == 1
        assert pair[0]._spec == pair[1]._spec
        assert torch.equal(pair[0].full_tensor(), pair[1].full_tensor())


def test_autocast_dtype() -> None:
    x = torch.ones(1)
    assert autocast_dtype(x) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtype(x) is torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert autocast_dtype(x) is None


def test_members() -> None:
    module = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    met: dict[Any, Any] = {}
    found = members_to(module, "0.0", met)
    assert found is not None
    assert found["weight"] is own_parameter(module[0][0], "weight") is module[0][0].weight
    assert [(members[name] is one, one) for members, name, one in met.values()] == [
        (True, module[0]),
        (True, module[0][0]),
    ]
    assert own_parameter(module[0][0], "other") is members_to(module, "0.1", met) is None


def test_what_is_placed_later_runs_earlier_in_backward() -> None:
    order: list[str] = []
    x = torch.ones(1, requires_grad=True)
    first, second = x.clone(), x.clone()
    for name, made in (("first", first), ("second", second)):
        made.register_hook(lambda _, name=name: order.append(name))
    (first + second).backward(retain_graph=True)
    place_here(first)
    (first + second).backward()
    assert order == ["second", "first", "first", "second"]


def in_a_group() -> list[list[float]]:
    """What each call leaves on this rank of two, at once and later."""
    group, rank, found = Group(dist.group.WORLD), dist.get_rank(), []  # type: ignore[arg-type]
    for later in (False, True):
        own = torch.tensor([1.0 + rank, 5.0 - rank])
        total, largest, both, part, other = own.clone(), own.clone(), own.new_empty(4), own.new_empty(1), own.clone()
        for work in (
            group.all_reduce(total, "sum", later=later),
            group.all_reduce(largest, "max", later=later),
            group.all_gather(both, own, later=later),
            group.reduce_scatter(part, own, later=later),
            group.all_to_all(other, own, later=later),
        ):
            work.wait()
        found += [x.tolist() for x in (total, largest, both, part, other)]
    return found


@pytest.mark.gloo
def test_a_group(gloo: Callable[[int], GlooPool]) -> None:
    for rank, found in enumerate(gloo(2).run(in_a_group)):
        expected = [[3.0, 9.0], [2.0, 5.0], [1.0, 5.0, 2.0, 4.0], [[3.0], [9.0]][rank], [[1.0, 2.0], [5.0, 4.0]][rank]]
        assert found == expected * 2


def test_applied_is_apply() -> None:
    a = torch.ones(2, requires_grad=True)
    (y,) = applied(Probe, a)
    assert torch.equal(y, torch.ones(2))
    y.sum().backward()
    assert torch.equal(a.grad, torch.ones(2))


def test_what_torch_compile_is_told() -> None:
    """``itself_eager`` leaves one function and compiles what it calls; ``constant`` runs once, while compiling."""
    graphs: list[int] = []
    ran: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    @constant
    def size(name: str) -> int:
        ran.append(name)
        return len(name)

    class Outer(torch.nn.Module):
        @itself_eager
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            ran.append("called")
            return super().__call__(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * size("abc")

    fast = torch.compile(Outer(), backend=backend, fullgraph=True)
    for _ in range(2):
        assert torch.equal(fast(torch.ones(2)), torch.full((2,), 3.0))
    assert ran == ["called", "abc", "called"]
    assert len(graphs) == 1
    torch.compiler.reset()
