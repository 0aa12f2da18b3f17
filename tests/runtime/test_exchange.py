"""Every conversion against the reference, all ranks in this process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from placement import runtime as rt
from placement import types
from placement.runtime.axis import COMMUNICATING, LOCAL
from tests.reference import Shard, Type, dual, to_global
from tests.runtime.conversions import LAYOUTS, Case, cases, spread, values

SIZES = (1, 2, 3, 4)
ALL = [pytest.param(n, case, id=f"{n}-{case.name}") for n in SIZES for case in cases(n)]


def run(case: Case, n: int, parts: list[Tensor]) -> list[Tensor]:
    mesh = rt.simulate(tp=n)
    return mesh.run(lambda axes: case.convert(parts[axes["tp"].rank], axes["tp"]))


@pytest.mark.parametrize(("n", "case"), ALL)
def test_value_and_gradient(n: int, case: Case) -> None:
    x, parts, cotangent, cotangents = values(case, n)
    leaves = [part.requires_grad_() for part in parts]
    out = run(case, n, leaves)
    torch.testing.assert_close(to_global([y.detach() for y in out], case.target), x)
    torch.autograd.backward(out, cotangents)
    torch.testing.assert_close(to_global([leaf.grad for leaf in leaves], dual(case.source)), cotangent)


@pytest.mark.parametrize(("n", "case"), [p for p in ALL if p.values[0] in (2, 3)])
def test_layouts(n: int, case: Case) -> None:
    """C23: whatever the strides of the input and of the gradient, and neither is written."""
    for how in LAYOUTS:
        x, parts, cotangent, cotangents = values(case, n)
        spreads = [spread(part, how) for part in parts]
        before = [base.clone() for base, _ in spreads]
        views = [view.detach().requires_grad_() for _, view in spreads]
        out = run(case, n, views)
        torch.testing.assert_close(to_global([y.detach() for y in out], case.target), x)
        grads = [spread(g, how) for g in cotangents]
        grads_before = [base.clone() for base, _ in grads]
        torch.autograd.backward(out, [g for _, g in grads])
        torch.testing.assert_close(to_global([view.grad for view in views], dual(case.source)), cotangent)
        assert all(torch.equal(base, old) for (base, _), old in zip(spreads, before, strict=True))
        assert all(torch.equal(base, old) for (base, _), old in zip(grads, grads_before, strict=True))


@pytest.mark.parametrize("n", [2, 3])
def test_expanded_gradients(n: int) -> None:
    """``sum().backward()`` sends an expanded gradient through every conversion."""
    for case in cases(n):
        _, parts, _, _ = values(case, n)
        leaves = [part.requires_grad_() for part in parts]
        torch.stack([y.sum() for y in run(case, n, leaves)]).sum().backward()
        ones = torch.ones(case.shape, dtype=torch.float64)
        # A cotangent of 1 on every rank is n terms of 1 where the target is R, else the value 1.
        expected = n * ones if case.target == "R" else ones
        torch.testing.assert_close(to_global([leaf.grad for leaf in leaves], dual(case.source)), expected)


@pytest.mark.parametrize("n", [2, 3])
def test_second_derivative(n: int) -> None:
    """The gradient of a gradient goes through the same conversions."""
    for case in cases(n):
        _, parts, _, _ = values(case, n)
        leaves = [part.requires_grad_() for part in parts]
        out = run(case, n, leaves)
        weights = [torch.full_like(y, 0.5 + rank).requires_grad_() for rank, y in enumerate(out)]
        first = torch.autograd.grad(out, leaves, weights, create_graph=True)
        second = torch.autograd.grad(first, weights, [torch.ones_like(g) for g in first])
        # Linear: the derivative of the gradient by its weights is the conversion of ones.
        expected = run(case, n, [torch.ones_like(leaf) for leaf in leaves])
        for got, want in zip(second, expected, strict=True):
            torch.testing.assert_close(got, want)


def test_gradient_of_some_ranks_only() -> None:
    """A rank whose output is not used has a zero gradient, not a missing one."""
    mesh = rt.simulate(tp=3)
    leaves = [torch.full((2,), 1.0 + rank, requires_grad=True) for rank in range(3)]
    out = mesh.run(lambda axes: rt.all_gather(leaves[axes["tp"].rank], axes["tp"], 0))
    (out[1] * torch.arange(6.0)).sum().backward()
    assert [leaf.grad.tolist() for leaf in leaves] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_other_dtypes_run_forward(dtype: torch.dtype) -> None:
    mesh = rt.simulate(tp=2)
    out = mesh.run(lambda axes: rt.all_gather(torch.tensor([axes["tp"].rank]).to(dtype), axes["tp"], 0))
    assert all(torch.equal(y, torch.tensor([0, 1]).to(dtype)) for y in out)


def test_results_are_each_ranks_own() -> None:
    """Writing one rank's result leaves the others' alone."""
    mesh = rt.simulate(tp=2)
    for case in cases(2):
        _, parts, _, _ = values(case, 2)
        first, second = run(case, 2, parts)
        kept = second.clone()
        if first.data_ptr() != parts[0].data_ptr():
            first.fill_(5.0)
        assert torch.equal(second, kept), case.name
    assert repr(mesh) == "simulate(tp=2)"


@pytest.mark.parametrize(
    ("function", "args"), [(rt.split, (1,)), (rt.reduce_scatter, (1,)), (rt.all_to_all, (0, 1)), (rt.split, (0, 2))]
)
def test_sizes_that_do_not_divide(function: object, args: tuple[int, ...]) -> None:
    mesh = rt.simulate(tp=2)
    with pytest.raises(rt.SizeError, match=r"axis 'tp': dim \d of shape \[6, 5\] has size \d") as caught:
        mesh.run(lambda axes: function(torch.ones(6, 5), axes["tp"], *args))
    assert isinstance(caught.value, ValueError)


def test_dim_out_of_range() -> None:
    with pytest.raises(rt.SizeError, match=r"no dim 2 in a tensor of shape \[4, 4\]"):
        rt.simulate(tp=2).run(lambda axes: rt.split(torch.ones(4, 4), axes["tp"], 2))


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_reduce_dtype(kind: str) -> None:
    """C22: every reduction is done in the dtype asked for, forward and backward, and cast back."""
    terms = [1.0, 2.0**-9, 2.0**-9, 2.0**-9]  # in bfloat16 each addition rounds back to 1

    def body(axes: dict[str, rt.Axis]) -> tuple[Tensor, Tensor]:
        tp = axes["tp"]
        x = torch.full((4,), terms[tp.rank], dtype=torch.bfloat16)
        y = rt.all_reduce(x, tp) if kind == "all_reduce" else rt.reduce_scatter(x, tp, 0)
        leaf = torch.ones(4 if kind == "all_reduce" else 1, dtype=torch.bfloat16, requires_grad=True)
        z = rt.replicated(leaf, tp) if kind == "all_reduce" else rt.all_gather(leaf, tp, 0)
        return y, (leaf, z, x)

    for dtype, expected in ((None, 1.0), (torch.float32, 1.0078125)):
        mesh = rt.simulate(tp=4)
        axes = [mesh.axes(rank, dtype) for rank in range(4)]
        results = mesh.run(lambda own, axes=axes: body(axes[own["tp"].rank]))
        assert all(y.dtype == torch.bfloat16 for y, _ in results)
        assert {y[0].item() for y, _ in results} == {expected}
        torch.autograd.backward([z for _, (_, z, _) in results], [x for _, (_, _, x) in results])
        assert {leaf.grad[0].item() for _, (leaf, _, _) in results} == {expected}


def test_the_strings_are_the_algebras() -> None:
    assert set(COMMUNICATING + LOCAL) == {action.value for action in types.Action}
    assert set(COMMUNICATING) == {action.value for action in types.Action if action.communicates}


class Recorder:
    """An axis that only notes the steps it is asked for."""

    def exchange(self, forward: rt.Step, backward: rt.Step, _: Tensor) -> None:
        self.steps = (forward.kind, backward.kind)


@pytest.mark.parametrize("case", cases(2), ids=lambda case: case.name)
def test_the_steps_are_the_tables(case: Case) -> None:
    """What a conversion does forward and backward is its row of the table."""
    axis = Recorder()
    case.convert(torch.ones(()), axis)  # pyright: ignore[reportArgumentType]
    row = types.CONVERSIONS[types.Kind(_kind(case.source)), types.Kind(_kind(case.target))]
    assert axis.steps == (row.forward.value, row.backward.value)


def _kind(of: Type) -> str:
    return "S" if isinstance(of, Shard) else of


def test_steps_are_checked() -> None:
    with pytest.raises(ValueError, match="no action 'gather'"):
        rt.Step("gather")
    with pytest.raises(ValueError, match="all_gather with cut None"):
        rt.Step("all_gather")
    with pytest.raises(ValueError, match="all_reduce with cut"):
        rt.Step("all_reduce", rt.Cut(0))
