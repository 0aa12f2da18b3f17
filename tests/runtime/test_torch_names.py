"""The private torch names that the runtime leans on still mean what it takes them to mean."""

from __future__ import annotations

from typing import Any

import torch

from placement.runtime._torch import accumulates, after_backward, eager, in_backward, version


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
