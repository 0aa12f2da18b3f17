"""A layer that runs as one with the sum of its terms, against the layer and the conversion after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from placement import runtime as rt
from tests.gloo import GlooPool
from tests.runtime.test_linears import ALONG, Layer, draw, same

Pool = Callable[[int], GlooPool]
IN, OUT = 6, 4


@dataclasses.dataclass(frozen=True)
class Case:
    """How the layer is called. cut: of the result, None where all have the sum. turned: how the input lies."""

    cut: rt.Cut | None = ALONG
    outermost: bool = False
    turned: bool = False
    frozen: bool = False
    gradient: bool = True
    alone: bool = False  # the first rank's result is used, and no other's
    batch: int = 2
    overlap: Any = "async"


CASES = {
    "scattered": Case(),
    "scattered, outermost": Case(outermost=True),
    "outermost throughout": Case(outermost=True, turned=True),
    "outermost before": Case(turned=True),
    "one sequence": Case(outermost=True, batch=1),
    "many sequences": Case(outermost=True, batch=9),
    "the first dim": Case(cut=rt.Cut(0)),
    "batch and tokens in one dim": Case(cut=rt.Cut(1, 2)),
    "summed": Case(cut=None),
    "frozen": Case(outermost=True, frozen=True),
    "summed, frozen": Case(cut=None, frozen=True),
    "no gradient of the input": Case(gradient=False),
    "no gradient": Case(cut=None, gradient=False, frozen=True),
    "one result used": Case(outermost=True, alone=True),
}


def step(axis: rt.Axis, case: Case, how: str) -> dict[str, Any]:
    """The result and gradients of one rank, by the plain form or the one that is tested."""
    n = axis.size
    layer = Layer(weight=rt.param(OUT, IN), bias=None)
    layer.to_empty(device="cpu").double()
    with torch.no_grad():
        layer.weight.copy_(draw(OUT, IN, seed=axis.rank, dtype=torch.float64))
    layer.weight.requires_grad_(not case.frozen)
    x = draw(case.batch * (1 if case.cut != rt.Cut(0) else n), 4 * n, IN, seed=50 + axis.rank, dtype=torch.float64)
    x.requires_grad_(case.gradient)
    taken = rt.outermost(x, 1) if case.turned else x
    if how == "plain":
        y = layer(taken)
        y = rt.all_reduce(y, axis) if case.cut is None else rt.reduce_scatter(y, axis, case.cut.dim, case.cut.outer)
    elif case.cut is None:
        y = rt.all_reduce_linear(layer, taken, axis, overlap=case.overlap)
    else:
        given = layer, taken, axis, case.cut.dim, case.cut.outer
        y = rt.reduce_scatter_linear(*given, outermost=case.outermost, overlap=case.overlap)
        assert axis.size == 1 or y.is_contiguous() != (case.outermost and case.batch > 1)
    return {"result": y, "x": x, "weight": layer.weight}


def finished(ranks: list[dict[str, Any]], case: Case, first: int = 0) -> list[dict[str, Tensor | None]]:
    used = ranks[:1] if case.alone and not first else ranks if not case.alone else []
    pairs = [
        (found["result"], draw(*found["result"].shape, seed=70 + first + i, dtype=torch.float64))
        for i, found in enumerate(used)
        if found["result"].requires_grad
    ]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
    return [{k: t.detach() if k == "result" else t.grad for k, t in found.items()} for found in ranks]


def simulated(n: int, case: Case, how: str) -> list[dict[str, Tensor | None]]:
    return finished(rt.simulate(tp=n).run(lambda axes: step(axes["tp"], case, how)), case)


def on_gloo(cases: list[Case], how: str) -> list[dict[str, Tensor | None]]:
    """This rank's outcomes: one mesh for all cases, since groups take time to make."""
    axis = rt.MeshAxis(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)), "tp")
    return [finished([step(axis, case, how)], case, dist.get_rank())[0] for case in cases]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_result_and_gradients(n: int, case: Case) -> None:
    same(simulated(n, case, "joined"), simulated(n, case, "plain"))


@pytest.mark.gloo
def test_in_processes_as_well(gloo: Pool) -> None:
    cases = [case for case in CASES.values() if not case.alone]
    for ours, plain in zip(gloo(2).run(on_gloo, cases, "joined"), gloo(2).run(on_gloo, cases, "plain"), strict=True):
        same(ours, plain)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("scattered", ["reduce_scatter", "all_gather"]),
        ("frozen", ["reduce_scatter", "all_gather"]),
        ("summed", ["all_reduce"]),
        ("no gradient", ["all_reduce"]),
    ],
)
def test_what_is_sent_with_a_sum(name: str, kinds: list[str]) -> None:
    with rt.record() as log:
        simulated(2, CASES[name], "joined")
    assert [event.kind for event in log] == kinds


def test_kept_are_the_input_and_the_weight() -> None:
    for name, more in (("scattered", {"x", "weight"}), ("frozen", {"weight"}), ("no gradient of the input", {"x"})):
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            ranks = rt.simulate(tp=2).run(lambda axes, name=name: step(axes["tp"], CASES[name], "joined"))
        assert {id(t) for t in kept} == {id(found[key]) for found in ranks for key in more}


def test_a_watched_layer_is_called() -> None:
    seen: list[torch.Size] = []

    def body(axes: dict[str, rt.Axis]) -> Tensor:
        layer = Layer(weight=rt.param(OUT, IN), bias=None)
        layer.to_empty(device="cpu")
        torch.nn.init.ones_(layer.weight)
        layer.register_forward_hook(lambda _, __, out: seen.append(out.shape))
        other = torch.nn.Linear(IN, OUT, bias=False)
        torch.nn.init.ones_(other.weight)
        x = torch.ones(1, 2, IN)
        return rt.reduce_scatter_linear(layer, x, axes["tp"], 1) + rt.reduce_scatter_linear(other, x, axes["tp"], 1)

    for y in rt.simulate(tp=2).run(body):
        assert torch.equal(y, torch.full((1, 1, OUT), 4.0 * IN))
    assert seen == [(1, 2, OUT)] * 2


def test_second_derivatives_of_a_sum() -> None:
    for name in ("outermost throughout", "scattered", "summed"):
        found: list[list[dict[str, Tensor | None]]] = []
        for how in ("joined", "plain"):
            ranks = rt.simulate(tp=2).run(lambda axes, how=how, name=name: step(axes["tp"], CASES[name], how))
            xs = [one["x"] for one in ranks]
            grads = torch.autograd.grad(sum(one["result"].pow(3).sum() for one in ranks), xs, create_graph=True)
            sum(g.pow(2).sum() for g in grads).backward()
            found.append([{key: one[key].grad for key in ("x", "weight")} for one in ranks])
        same(*found)


def test_a_sum_under_autocast() -> None:
    def body(axes: dict[str, rt.Axis]) -> Tensor:
        x, weight = (draw(*shape, seed=1, dtype=torch.float32) for shape in ((2, 4, IN), (OUT, IN)))
        return rt.all_reduce_linear(weight.requires_grad_(), x, axes["tp"])

    with torch.autocast("cpu", torch.bfloat16):
        assert all(y.dtype == torch.bfloat16 for y in rt.simulate(tp=2).run(body))
