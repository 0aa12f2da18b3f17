"""Cross entropy over sharded classes and over sharded tokens, against ``F.cross_entropy`` of the whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from placement import runtime as rt
from tests.gloo import GlooPool
from tests.reference import Shard, to_global, to_ranks

IGNORED = -100
Pool = Callable[[int], GlooPool]


@dataclass(frozen=True)
class Case:
    """Logits [classes], or [N, classes, *extra]; ``ignored`` tokens of each row of the flat target."""

    tokens: tuple[int, ...]
    classes: int
    outer: int = 1
    segments: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    weighted: bool = False
    ignored: str = "some"
    spread: float = 3.0

    @property
    def dim(self) -> int:
        return 1 if self.tokens else 0

    @property
    def shard(self) -> Shard:
        return Shard(self.dim, self.outer, self.segments)

    def values(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, dict[str, Any], Tensor]:
        """Logits, target, options, and a cotangent of the result."""
        g = torch.Generator().manual_seed(3)
        shape = [self.classes] if not self.tokens else [self.tokens[0], self.classes, *self.tokens[1:]]
        logits = (torch.randn(shape, generator=g, dtype=torch.float64) * self.spread).to(dtype)
        target = torch.randint(self.classes, self.tokens, generator=g)
        options = dict(self.options)
        if self.ignored == "all":
            target = torch.full_like(target, options.get("ignore_index", IGNORED))
        elif self.ignored == "some" and self.tokens:
            target = target.masked_fill(
                torch.rand(self.tokens, generator=g) < 0.3, options.get("ignore_index", IGNORED)
            )
            target.view(-1)[0] = 1  # at least one that counts
        if self.weighted:
            options["weight"] = torch.rand(self.classes, generator=g, dtype=dtype) + 0.1
        scalar = options.get("reduction", "mean") != "none"
        cotangent = torch.randn(() if scalar else self.tokens, generator=g, dtype=torch.float64).to(dtype)
        return logits, target, options, cotangent

    def one_device(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Loss and gradient of the logits."""
        logits, target, options, cotangent = self.values(dtype)
        leaf = logits.requires_grad_()
        loss = F.cross_entropy(leaf, target, **options)
        loss.backward(cotangent)
        assert leaf.grad is not None
        return loss.detach(), leaf.grad


def over_classes(case: Case, axis: rt.Axis, leaf: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    _, target, options, _ = case.values(dtype)
    return rt.class_parallel_cross_entropy(leaf, target, axis, case.dim, case.outer, case.segments, **options)


def simulated(case: Case, n: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, list[rt.Event]]:
    logits, _, _, cotangent = case.values(dtype)
    shard = case.shard
    leaves = [part.requires_grad_() for part in to_ranks(logits, shard, n)]
    with rt.record() as log:
        losses = rt.simulate(tp=n).run(lambda axes: over_classes(case, axes["tp"], leaves[axes["tp"].rank], dtype))
        torch.autograd.backward(losses, [cotangent] * n)
    loss = to_global([x.detach() for x in losses], "I") if not losses[0].isnan().any() else losses[0].detach()
    return loss, to_global([leaf.grad for leaf in leaves], shard), log


SHAPES = [
    Case((), 12),
    Case((7,), 12),
    Case((5,), 24, outer=2),
    Case((3, 5), 12),
    Case((2, 3, 5), 36, outer=3),
    Case((5,), 48, segments=(1, 3)),
    Case((1,), 12),
]
OPTIONS = [
    dict(zip(("reduction", "label_smoothing", "ignore_index"), values, strict=True))
    for values in itertools.product(("mean", "sum", "none"), (0.0, 0.3), (-100, 2))
]
CASES = [
    replace(shape, options=tuple(options.items()), weighted=weighted)
    for shape in SHAPES
    for options in OPTIONS
    for weighted in (False, True)
]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_over_classes(n: int) -> None:
    for case in CASES:
        loss, grad, _ = simulated(case, n)
        expected, expected_grad = case.one_device()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-13, msg=str(case))
        torch.testing.assert_close(grad, expected_grad, rtol=1e-11, atol=1e-13, msg=str(case))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_large_logits(smoothing: float) -> None:
    """The maximum of all ranks, not the rank's own, keeps exponentials finite."""
    case = Case((6,), 12, spread=1000.0, options=(("label_smoothing", smoothing),))
    loss, grad, _ = simulated(case, 3)
    expected, expected_grad = case.one_device()
    assert loss.isfinite()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad, expected_grad)


def test_masked_classes() -> None:
    """A rank all of whose classes are -inf, for some tokens: no NaN from it."""
    logits, target = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 1])
    logits[:2, 3:] = -torch.inf
    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(leaf, target)
    expected.backward()
    parts = [part.requires_grad_() for part in to_ranks(logits, Shard(1), 2)]
    losses = rt.simulate(tp=2).run(
        lambda axes: rt.class_parallel_cross_entropy(parts[axes["tp"].rank], target, axes["tp"], 1)
    )
    torch.autograd.backward(losses)
    torch.testing.assert_close(losses[0], expected)
    torch.testing.assert_close(to_global([part.grad for part in parts], Shard(1)), leaf.grad)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_ignored(reduction: str, smoothing: float) -> None:
    case = Case((4,), 6, ignored="all", options=(("reduction", reduction), ("label_smoothing", smoothing)))
    loss, grad, _ = simulated(case, 2)
    expected, expected_grad = case.one_device()
    assert expected.isnan().all() == (reduction == "mean")
    torch.testing.assert_close(loss, expected, equal_nan=True)
    assert not expected_grad.any()
    assert not grad.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_narrow_dtypes(dtype: torch.dtype, smoothing: float) -> None:
    """Sums are done in float32: no worse than one device, against float64 of the same logits."""
    case = Case((9, 3), 48, options=(("label_smoothing", smoothing),))
    loss, grad, _ = simulated(case, 4, dtype)
    logits, target, options, cotangent = case.values(dtype)
    leaf = logits.double().requires_grad_()
    exact = F.cross_entropy(leaf, target, **options)
    exact.backward(cotangent.double())
    eps = torch.finfo(dtype).eps
    assert loss.dtype == grad.dtype == dtype
    torch.testing.assert_close(loss.double(), exact, rtol=eps, atol=0)
    torch.testing.assert_close(grad.double(), leaf.grad, rtol=2 * eps, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_what_is_sent(dtype: torch.dtype, smoothing: float) -> None:
    case = Case((3, 5), 12, options=(("label_smoothing", smoothing),))
    _, _, log = simulated(case, 2, dtype)
    narrow, wide = dtype.itemsize, max(4, dtype.itemsize)
    assert log == [
        rt.Event("all_reduce", "tp", 15 * narrow, "forward"),
        rt.Event("all_reduce", "tp", 15 * wide * (3 if smoothing else 2), "forward"),
    ]


@pytest.mark.parametrize("wrong", [6, -1, 1000])
def test_a_target_that_is_no_class(wrong: int) -> None:
    def body(axes: dict[str, rt.Axis]) -> str:
        with pytest.raises(IndexError) as caught:
            rt.class_parallel_cross_entropy(torch.zeros(2, 3), torch.tensor([0, wrong]), axes["tp"], 1)
        return str(caught.value)

    assert set(rt.simulate(tp=2).run(body)) == {f"target {wrong} is out of range: there are 6"}


def test_a_graph_that_is_used_twice() -> None:
    """Nothing that is kept is written: the second backward gives what the first gave."""
    logits = torch.randn(2, 5, 3, dtype=torch.float64)  # of rank 0 and rank 1
    leaves = [part.clone().requires_grad_() for part in logits]
    target = torch.tensor([0, 5, -100, 2, 3])
    losses = rt.simulate(tp=2).run(
        lambda axes: rt.class_parallel_cross_entropy(leaves[axes["tp"].rank], target, axes["tp"], 1)
    )
    first, second = (torch.autograd.grad(losses, leaves, retain_graph=True) for _ in range(2))
    whole = torch.cat(list(logits), 1).requires_grad_()
    F.cross_entropy(whole, target).backward()
    assert whole.grad is not None
    for grads in (first, second):
        torch.testing.assert_close(torch.cat(grads, 1), whole.grad)


def test_a_target_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"target of shape \[3\] for logits of shape \[2, 3\]"):
        rt.class_parallel_cross_entropy(torch.zeros(2, 3), torch.zeros(3).long(), rt.simulate(tp=2).axes(0)["tp"], 1)


def test_logits_are_not_written() -> None:
    logits, target, _, _ = Case((7,), 12).values()
    parts = [part.t().contiguous().t().requires_grad_() for part in to_ranks(logits, Shard(1), 2)]
    before = [part.detach().clone() for part in parts]
    losses = rt.simulate(tp=2).run(
        lambda axes: rt.class_parallel_cross_entropy(parts[axes["tp"].rank], target, axes["tp"], 1)
    )
    torch.autograd.backward(losses)
    assert all(torch.equal(part, old) for part, old in zip(parts, before, strict=True))


# -- tokens ---------------------------------------------------------------------------------------


def blocks(case: Case, sizes: tuple[int, ...], dim: int) -> tuple[list[Tensor], list[Tensor]]:
    """Logits and targets of blocks of the given sizes along token dim ``dim`` of the target."""
    logits, target, _, _ = case.values()
    of_logits = dim if dim == 0 else dim + 1
    return list(logits.split(sizes, of_logits)), list(target.split(sizes, dim))


def over_tokens(case: Case, axis: rt.Axis, logits: Tensor, target: Tensor, dim: int) -> Tensor:
    _, _, options, _ = case.values()
    return rt.token_parallel_cross_entropy(logits, target, axis, dim, **options)


TOKEN_CASES = [
    (replace(case, options=tuple(options.items()), weighted=weighted), sizes, dim)
    for case, sizes, dim in [
        (Case((7,), 5), (3, 4), 0),
        (Case((7,), 5), (5, 0, 2), 0),
        (Case((4, 3), 5), (1, 1, 1, 1), 0),
        (Case((2, 7), 5), (1, 4, 2), 1),
    ]
    for options in OPTIONS
    for weighted in (False, True)
]


def test_over_tokens() -> None:
    """Ranks with different numbers of tokens, of valid tokens, and without any token."""
    for case, sizes, dim in TOKEN_CASES:
        logits, targets = blocks(case, sizes, dim)
        _, _, options, cotangent = case.values()
        leaves = [part.clone().requires_grad_() for part in logits]
        n = len(sizes)
        losses = rt.simulate(tp=n).run(
            lambda axes, leaves=leaves, targets=targets, case=case, dim=dim: over_tokens(
                case, axes["tp"], leaves[axes["tp"].rank], targets[axes["tp"].rank], dim
            )
        )
        expected, expected_grad = case.one_device()
        if options.get("reduction") == "none":
            loss, cotangents = torch.cat(losses, dim), list(cotangent.split(sizes, dim))
        else:
            loss, cotangents = sum(losses), [cotangent] * n
        torch.autograd.backward(losses, cotangents)
        torch.testing.assert_close(loss, expected, msg=str((case, sizes)))
        grad = torch.cat([leaf.grad for leaf in leaves], dim if dim == 0 else dim + 1)
        torch.testing.assert_close(grad, expected_grad, msg=str((case, sizes)))


@pytest.mark.parametrize("weighted", [False, True])
def test_ranks_without_valid_tokens(weighted: bool) -> None:
    """C09: an empty rank gives 0, all empty ranks NaN; no gradient is NaN either way."""
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64) if weighted else None
    x = torch.randn(6, 3, dtype=torch.float64)
    for target in (torch.tensor([1, 2, 0, -100, -100, -100]), torch.full((6,), -100)):
        leaves = [part.clone().requires_grad_() for part in x.split(3)]
        losses = rt.simulate(tp=2).run(
            lambda axes, leaves=leaves, target=target: rt.token_parallel_cross_entropy(
                leaves[axes["tp"].rank], target.split(3)[axes["tp"].rank], axes["tp"], weight=weight
            )
        )
        one = x.clone().requires_grad_()
        expected = F.cross_entropy(one, target, weight)
        expected.backward()
        torch.autograd.backward(losses)
        torch.testing.assert_close(sum(losses), expected, equal_nan=True)
        torch.testing.assert_close(torch.cat([leaf.grad for leaf in leaves]), one.grad)
        if (target >= 0).any():
            assert losses[1].item() == 0


def test_a_float16_sum_would_overflow() -> None:
    x = torch.zeros(20_000, 2, dtype=torch.float16)
    x[:, 0] = 10
    target = torch.ones(20_000, dtype=torch.long)
    losses = rt.simulate(tp=2).run(
        lambda axes: rt.token_parallel_cross_entropy(
            x.split(10_000)[axes["tp"].rank], target.split(10_000)[axes["tp"].rank], axes["tp"]
        )
    )
    assert sum(losses).item() == 10.0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_tokens_send(reduction: str) -> None:
    case = Case((6,), 5, options=(("reduction", reduction),))
    logits, targets = blocks(case, (3, 3), 0)
    leaves = [part.clone().requires_grad_() for part in logits]
    with rt.record() as log:
        losses = rt.simulate(tp=2).run(
            lambda axes: over_tokens(case, axes["tp"], leaves[axes["tp"].rank], targets[axes["tp"].rank], 0)
        )
        torch.autograd.backward(losses)
    assert log == ([rt.Event("all_reduce", "tp", 8, "forward")] if reduction == "mean" else [])


# -- processes ------------------------------------------------------------------------------------


def on_processes(cases: list[Case]) -> list[tuple[Tensor, Tensor]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    axis = rt.MeshAxis(mesh, "tp")
    found = []
    for case in cases:
        logits, _, _, cotangent = case.values()
        leaf = to_ranks(logits, case.shard, axis.size)[axis.rank].requires_grad_()
        loss = over_classes(case, axis, leaf)
        loss.backward(cotangent)
        found.append((loss.detach(), leaf.grad))
    for dtype in (torch.bfloat16, torch.float16):
        loss = rt.class_parallel_cross_entropy(torch.ones(3, 2, dtype=dtype), torch.tensor([0, 1, 2]), axis, 1)
        found.append((loss, loss))
    with pytest.raises(IndexError):
        rt.class_parallel_cross_entropy(torch.ones(3, 2), torch.tensor([0, 1, 9]), axis, 1)
    for target in ([1, -100], [-100, -100], [2, 0]):
        x = torch.arange(3.0).expand(2 * axis.size, 3)[axis.rank : axis.rank + 2]
        own = torch.tensor(target) if axis.rank == 0 else torch.tensor([-100, 2])
        found.append((rt.token_parallel_cross_entropy(x, own, axis), own))
    return found


@pytest.mark.gloo
def test_on_processes(gloo: Pool) -> None:
    # Any shift would do for small logits; large ones need the maximum.
    cases = [*CASES[::5], Case((6,), 12, spread=1000.0)]
    answers = gloo(2).run(on_processes, cases)
    for index, case in enumerate(cases):
        losses, grads = zip(*(answer[index] for answer in answers), strict=True)
        expected, expected_grad = case.one_device()
        torch.testing.assert_close(to_global(list(losses), "I"), expected)
        torch.testing.assert_close(to_global(list(grads), case.shard), expected_grad)
    for index in (0, 1):
        loss, _ = answers[0][len(cases) + index]
        torch.testing.assert_close(loss.float(), torch.tensor(4.0).log(), rtol=0.01, atol=0)
    for index in (2, 3, 4):
        terms, targets = zip(*(answer[len(cases) + index] for answer in answers), strict=True)
        expected = F.cross_entropy(torch.arange(3.0).expand(4, 3), torch.cat(targets))
        torch.testing.assert_close(sum(terms), expected)


# -- classes on one axis and tokens on another ------------------------------------------------------

TARGETS = {
    "unequal": [0, IGNORED, 5, IGNORED, IGNORED, IGNORED, 3, IGNORED],
    "one rank without": [1, 4, 2, 2, *[IGNORED] * 4],
    "none": [IGNORED] * 8,
}


Both = tuple[Tensor, Tensor, dict[str, Any]]


def over_both(axes: dict[str, rt.Axis], case: Both) -> tuple[Tensor, Tensor]:
    """This rank's term of the loss, and the leaf: its rows and classes of the logits."""
    logits, target, options = case
    dp, tp = axes["dp"], axes["tp"]
    leaf = to_ranks(to_ranks(logits, Shard(0), dp.size)[dp.rank], Shard(1), tp.size)[tp.rank].requires_grad_()
    own = target.chunk(dp.size)[dp.rank]
    return rt.class_parallel_cross_entropy(leaf, own, tp, 1, tokens=dp, **options), leaf


def both_cases() -> list[Both]:
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(8, 6, generator=g, dtype=torch.float64)
    weight = torch.rand(6, generator=g, dtype=torch.float64) + 0.1
    options = [{}, {"label_smoothing": 0.2}, {"weight": weight}, {"weight": weight, "label_smoothing": 0.2}]
    options += [{"reduction": "sum"}, {"reduction": "sum", "weight": weight}]
    return [(logits, torch.tensor(target), option) for target in TARGETS.values() for option in options]


def check_both(case: Both, losses: list[Tensor], grads: list[Tensor]) -> None:
    """Of the ranks of a (2, 2) mesh: P over dp, I over tp."""
    logits, target, options = case
    one = logits.clone().requires_grad_()
    expected = F.cross_entropy(one, target, **options)
    expected.backward()
    terms = [to_global(losses[row : row + 2], "I") if not expected.isnan() else losses[row] for row in (0, 2)]
    torch.testing.assert_close(to_global(terms, "P"), expected.detach(), equal_nan=True, msg=str(options))
    rows = [to_global(grads[row : row + 2], Shard(1)) for row in (0, 2)]
    torch.testing.assert_close(to_global(rows, Shard(0)), one.grad, msg=str(options))


def test_over_classes_and_tokens() -> None:
    for case in both_cases():
        with rt.record() as log:
            answers = rt.simulate(dp=2, tp=2).run(lambda axes, case=case: over_both(axes, case))
            losses, leaves = zip(*answers, strict=True)
            torch.autograd.backward(losses)
        check_both(case, [loss.detach() for loss in losses], [leaf.grad for leaf in leaves])
        counted = [rt.Event("all_reduce", "dp", 8, "forward")]
        assert [event for event in log if event.axis == "dp"] == (counted if "reduction" not in case[2] else [])


def both_on_processes() -> list[tuple[Tensor, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    axes: dict[str, rt.Axis] = {name: rt.MeshAxis(mesh, name) for name in ("dp", "tp")}
    found = []
    for case in both_cases():
        loss, leaf = over_both(axes, case)
        loss.backward()
        found.append((loss.detach(), leaf.grad))
    return found


@pytest.mark.gloo
def test_over_classes_and_tokens_on_processes(gloo: Pool) -> None:
    answers = gloo(4).run(both_on_processes)
    for index, case in enumerate(both_cases()):
        losses, grads = zip(*(answer[index] for answer in answers), strict=True)
        check_both(case, list(losses), list(grads))
