"""Layers that run as one with the conversion of their input, against the conversion and each layer by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from placement import runtime as rt
from tests.gloo import GlooPool

Pool = Callable[[int], GlooPool]
IN, OUTS = 6, (4, 2, 3)
ALONG = rt.Cut(1)


@dataclasses.dataclass(frozen=True)
class Case:
    """How the layers are called. frozen: which weights have no gradient. used: how many results are."""

    gathered: bool = True
    kept: bool = False
    bias: bool = False
    frozen: tuple[int, ...] = ()
    gradient: bool = True
    used: int = 3
    dtype: torch.dtype = torch.float64
    cut: rt.Cut = ALONG
    overlap: Any = "async"


CASES = {
    "gathered": Case(),
    "kept": Case(kept=True),
    "shared": Case(gathered=False),
    "bias": Case(bias=True),
    "shared, bias": Case(gathered=False, bias=True),
    "one frozen": Case(frozen=(1,), bias=True),
    "all frozen": Case(frozen=(0, 1, 2)),
    "shared, all frozen": Case(gathered=False, frozen=(0, 1, 2)),
    "no gradient of the input": Case(gradient=False),
    "one unused": Case(used=2),
    "batch and tokens in one dim": Case(cut=rt.Cut(1, 2)),
    "the first dim": Case(cut=rt.Cut(0)),
    "float32": Case(dtype=torch.float32),
}


class Layer(rt.Linear):
    def operands(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.bias


def draw(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def layers(case: Case, rank: int) -> list[Layer]:
    """This rank's layers: others on every rank."""
    made = []
    for index, out in enumerate(OUTS):
        layer = Layer(weight=rt.param(out, IN), bias=rt.param(out) if case.bias else None)
        layer.to_empty(device="cpu").to(case.dtype)
        with torch.no_grad():
            for at, p in enumerate(layer.parameters()):
                p.copy_(draw(*p.shape, seed=100 * rank + 10 * index + at, dtype=case.dtype))
        layer.weight.requires_grad_(index not in case.frozen)
        made.append(layer)
    return made


def step(axis: rt.Axis, case: Case, how: str) -> dict[str, Tensor | None]:
    """Results and gradients of one rank, by the plain form or the one that is tested."""
    n, own = axis.size, layers(case, axis.rank)
    shape = [2 * n, 4 * n, IN]
    if case.gathered:
        shape[case.cut.dim] //= n
    x = draw(*shape, seed=7 + (axis.rank if case.gathered else 0), dtype=case.dtype).requires_grad_(case.gradient)
    if how == "plain":
        whole = rt.all_gather(x, axis, case.cut.dim, case.cut.outer) if case.gathered else rt.replicated(x, axis)
        results = [F.linear(whole, *layer.operands()) for layer in own]
    elif case.gathered:
        results = rt.all_gather_linears(
            own, x, axis, case.cut.dim, case.cut.outer, kept=case.kept, overlap=case.overlap
        )
    else:
        results = rt.replicated_linears(own, x, axis, overlap=case.overlap)
    found: dict[str, Any] = {f"result {i}": y for i, y in enumerate(results)}
    return {"x": x, **found, **{f"{i}.{k}": p for i, m in enumerate(own) for k, p in m.named_parameters()}}


def cotangents(found: dict[str, Any], case: Case, rank: int) -> list[tuple[Tensor, Tensor]]:
    results = [(i, found[f"result {i}"]) for i in range(case.used) if found[f"result {i}"].requires_grad]
    return [(y, draw(*y.shape, seed=50 * rank + i, dtype=y.dtype)) for i, y in results]


def outcome(found: dict[str, Any]) -> dict[str, Tensor | None]:
    return {k: t.detach() if k.startswith("result") else t.grad for k, t in found.items()}


def simulated(n: int, case: Case, how: str) -> list[dict[str, Tensor | None]]:
    ranks = rt.simulate(tp=n).run(lambda axes: step(axes["tp"], case, how))
    pairs = [pair for rank, found in enumerate(ranks) for pair in cotangents(found, case, rank)]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
    return [outcome(found) for found in ranks]


def on_gloo(cases: list[Case], how: str) -> list[dict[str, Tensor | None]]:
    """This rank's outcomes: one mesh for all cases, since groups take time to make."""
    axis = rt.MeshAxis(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)), "tp")
    outcomes = []
    for case in cases:
        found = step(axis, case, how)
        if pairs := cotangents(found, case, dist.get_rank()):
            torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
        outcomes.append(outcome(found))
    return outcomes


def same(ours: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    for got, want in zip(ours, plain, strict=True):
        for name, expected in want.items():
            assert (got[name] is None) == (expected is None), name
            if expected is not None:
                # Sums are in another order.
                bound = 1e-4 if expected.dtype is torch.float32 else 1e-12
                torch.testing.assert_close(got[name], expected, msg=name, rtol=bound, atol=bound)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_and_gradients(n: int, case: Case) -> None:
    same(simulated(n, case, "layers"), simulated(n, case, "plain"))


@pytest.mark.gloo
def test_in_processes(gloo: Pool) -> None:
    cases = list(CASES.values())
    for ours, plain in zip(gloo(2).run(on_gloo, cases, "layers"), gloo(2).run(on_gloo, cases, "plain"), strict=True):
        same(ours, plain)


@pytest.mark.parametrize(
    ("name", "backward"),
    [
        ("gathered", ["all_gather", "reduce_scatter"]),
        ("kept", ["reduce_scatter"]),
        ("shared", ["all_reduce"]),
        ("all frozen", ["reduce_scatter"]),
        ("no gradient of the input", ["all_gather"]),
    ],
)
def test_what_is_sent(name: str, backward: list[str]) -> None:
    with rt.record() as log:
        simulated(2, CASES[name], "layers")
    assert [event.kind for event in log if event.phase == "backward"] == backward


@pytest.mark.parametrize("name", ["gathered", "shared"])
def test_only_what_the_backward_needs_is_kept(name: str) -> None:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ranks = rt.simulate(tp=2).run(lambda axes: step(axes["tp"], CASES[name], "layers"))
    parameters = {id(t) for found in ranks for k, t in found.items() if "weight" in k}
    assert {id(t) for t in kept} == parameters | {id(found["x"]) for found in ranks}


def test_hooks_and_modules_in_place_of_a_layer_are_called() -> None:
    seen: list[tuple[torch.Size, torch.Size]] = []

    class Other(torch.nn.Linear):
        pass

    def body(axes: dict[str, rt.Axis]) -> tuple[Tensor, ...]:
        first, second, _ = layers(Case(), 0)
        first.register_forward_hook(lambda _, args, out: seen.append((args[0].shape, out.shape)))
        other = Other(IN, 5, dtype=torch.float64)
        x = torch.ones(1, 2, IN, dtype=torch.float64)
        return (*rt.all_gather_linears([first, second, other], x, axes["tp"], 1), other(torch.cat([x, x], 1)))

    for first, _, other, expected in rt.simulate(tp=2).run(body):
        assert first.shape == (1, 4, 4)
        assert torch.equal(other, expected)
    assert seen == [((1, 4, IN), (1, 4, 4))] * 2


def test_a_forward_of_its_own_is_called() -> None:
    def body(axes: dict[str, rt.Axis]) -> tuple[Tensor, ...]:
        first, second, _ = layers(Case(), 0)
        first.forward = lambda x: x + 1  # type: ignore[method-assign]
        return tuple(rt.all_gather_linears([first, second], torch.ones(1, 2, IN, dtype=torch.float64), axes["tp"], 1))

    for first, second in rt.simulate(tp=2).run(body):
        assert torch.equal(first, torch.full((1, 4, IN), 2.0, dtype=torch.float64))
        assert second.shape == (1, 4, 2)


def test_a_weight_alone() -> None:
    weight = draw(3, IN, seed=1, dtype=torch.float64)
    x = draw(2, 4, IN, seed=2, dtype=torch.float64)
    bias = draw(3, seed=3, dtype=torch.float64)
    for n in (1, 2):
        found = rt.simulate(tp=n).run(lambda axes: rt.replicated_linears([weight, (weight, bias)], x, axes["tp"]))
        for y, z in found:
            assert torch.equal(y, F.linear(x, weight))
            assert torch.equal(z, F.linear(x, weight, bias))


def test_second_derivatives() -> None:
    """Of the sum of squares of the input's gradient, for the gathered and the shared input."""
    for name in ("gathered", "shared", "bias"):
        found: list[list[dict[str, Tensor | None]]] = []
        for how in ("layers", "plain"):
            ranks = rt.simulate(tp=2).run(lambda axes, how=how, name=name: step(axes["tp"], CASES[name], how))
            pairs = [pair for rank, one in enumerate(ranks) for pair in cotangents(one, CASES[name], rank)]
            total = sum((y.pow(3) * g).sum() for y, g in pairs)
            xs = [one["x"] for one in ranks]
            grads = torch.autograd.grad(total, xs, create_graph=True)  # type: ignore[arg-type]
            sum(g.pow(2).sum() for g in grads).backward()  # type: ignore[union-attr]
            found.append([outcome(one) for one in ranks])
        same(*found)


def test_autocast_computes_in_its_dtype() -> None:
    case = dataclasses.replace(CASES["bias"], dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, plain = simulated(2, case, "layers"), simulated(2, case, "plain")
    assert all(got["result 0"].dtype == torch.bfloat16 for got in ours)  # type: ignore[union-attr]
    for got, want in zip(ours, plain, strict=True):
        assert torch.equal(got["result 0"], want["result 0"])  # type: ignore[arg-type]
        torch.testing.assert_close(got["0.weight"], want["0.weight"], rtol=0.05, atol=0.05)
        assert got["0.weight"].dtype == torch.float32  # type: ignore[union-attr]
