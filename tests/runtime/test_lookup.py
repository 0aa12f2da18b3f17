"""The masked lookup against ``F.embedding`` of the whole table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from placement import runtime as rt
from placement.runtime.lookup import located
from tests.gloo import GlooPool
from tests.reference import Shard, indices, to_global, to_ranks

Pool = Callable[[int], GlooPool]
SHAPES = [(), (5,), (3, 7), (2, 3, 4), (0,)]


def values(shape: tuple[int, ...], vocab: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    """A table, indices with repetition, a cotangent."""
    g = torch.Generator().manual_seed(0)
    table = torch.randn(vocab, 3, generator=g, dtype=torch.float64)
    ids = torch.randint(vocab, shape, generator=g)
    return table, ids, torch.randn(*shape, 3, generator=g, dtype=torch.float64)


def one_device(shape: tuple[int, ...], padding: int) -> tuple[Tensor, Tensor]:
    table, ids, cotangent = values(shape)
    out = F.embedding(ids, table.requires_grad_(), padding if padding >= 0 else None)
    out.backward(cotangent)
    assert table.grad is not None
    return out.detach(), table.grad


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("cut", [Shard(0), Shard(0, 2), Shard(0, 1, (3, 1))])
@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradient(n: int, cut: Shard, shape: tuple[int, ...]) -> None:
    table, ids, cotangent = values(shape)
    some = int(ids.view(-1)[0]) if ids.numel() else 0
    for padding in (-1, 0, some, 23):
        leaves = [part.requires_grad_() for part in to_ranks(table, cut, n)]
        with rt.record() as log:
            terms = rt.simulate(tp=n).run(
                lambda axes, leaves=leaves, padding=padding: rt.masked_embedding(
                    ids, leaves[axes["tp"].rank], axes["tp"], 0, cut.outer, cut.segments, padding_idx=padding
                )
            )
            torch.autograd.backward(terms, [cotangent] * n)
        expected, expected_grad = one_device(shape, padding)
        assert torch.equal(to_global([x.detach() for x in terms], "P"), expected)
        grad = to_global([leaf.grad for leaf in leaves], cut)
        torch.testing.assert_close(grad, expected_grad)
        assert log == []


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("cut", [rt.Cut(0, 2), rt.Cut(0, 1, (1, 3))])
def test_located(dtype: torch.dtype, cut: rt.Cut) -> None:
    """Each index lies on one rank, at the place where the oracle has it."""
    n, size = 3, 4
    every = torch.arange(size * n, dtype=dtype)
    for rank in range(n):
        axis = rt.simulate(tp=n).axes(rank)["tp"]
        local, mine = located(every, size, axis, cut)
        assert every[mine].tolist() == indices(size * n, Shard(0, cut.outer, cut.segments), n, rank).tolist()
        assert local[mine].tolist() == list(range(size))
        assert not local[~mine].any()
        outside = torch.tensor([-1, -100, size * n, 1000], dtype=dtype)
        assert not located(outside, size, axis, cut)[1].any()


@pytest.mark.parametrize("wrong", [-1, 6, 10**9])
def test_an_index_that_is_no_row(wrong: int) -> None:
    """As ``F.embedding`` raises; zeros from every rank would be a wrong answer without a word."""

    def body(axes: dict[str, rt.Axis]) -> str:
        with pytest.raises(IndexError) as caught:
            rt.masked_embedding(torch.tensor([[0, wrong]]), torch.zeros(3, 2), axes["tp"])
        return str(caught.value)

    assert set(rt.simulate(tp=2).run(body)) == {f"index {wrong} is out of range: there are 6"}


def test_rows_that_are_not_finite() -> None:
    """Row 0 of a block stands in for what lies elsewhere; its inf reaches no result and no gradient."""
    table = torch.tensor([[torch.inf], [1.0], [torch.nan], [2.0]])
    leaves = [part.requires_grad_() for part in to_ranks(table, Shard(0), 2)]
    terms = rt.simulate(tp=2).run(
        lambda axes: rt.masked_embedding(torch.tensor([1, 3]), leaves[axes["tp"].rank], axes["tp"])
    )
    torch.autograd.backward(terms, [torch.ones(2, 1)] * 2)
    assert sum(terms).tolist() == [[1.0], [2.0]]
    assert to_global([leaf.grad for leaf in leaves], Shard(0)).tolist() == [[0.0], [1.0], [0.0], [1.0]]


def test_only_the_indices_are_kept_and_derivatives_have_derivatives() -> None:
    table, ids, cotangent = values((3, 7))
    kept: list[Tensor] = []
    leaves = [part.requires_grad_() for part in to_ranks(table, Shard(0), 2)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        terms = rt.simulate(tp=2).run(lambda axes: rt.masked_embedding(ids, leaves[axes["tp"].rank], axes["tp"]))
    assert all(t is ids for t in kept)
    cotangent.requires_grad_()
    grads = torch.autograd.grad(terms, leaves, [cotangent] * 2, create_graph=True)
    weights = torch.arange(48 * 3, dtype=torch.float64).view(48, 3)
    (second,) = torch.autograd.grad(grads, cotangent, list(to_ranks(weights, Shard(0), 2)))
    assert torch.equal(second, F.embedding(ids, weights))


def test_columns_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="rows are dim 0"):
        rt.masked_embedding(torch.tensor([0]), torch.zeros(3, 2), rt.simulate(tp=2).axes(0)["tp"], 1)


def on_processes() -> list[tuple[Tensor, Tensor]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    axis = rt.MeshAxis(mesh, "tp")
    found = []
    for shape in SHAPES:
        table, ids, cotangent = values(shape)
        leaf = to_ranks(table, Shard(0), axis.size)[axis.rank].requires_grad_()
        out = rt.all_reduce(rt.masked_embedding(ids, leaf, axis), axis)
        out.backward(cotangent)
        found.append((out.detach(), leaf.grad))
    return found


@pytest.mark.gloo
def test_on_processes(gloo: Pool) -> None:
    answers = gloo(2).run(on_processes)
    for index, shape in enumerate(SHAPES):
        outs, grads = zip(*(answer[index] for answer in answers), strict=True)
        expected, expected_grad = one_device(shape, -1)
        torch.testing.assert_close(to_global(list(outs), "I"), expected)
        torch.testing.assert_close(to_global(list(grads), Shard(0)), expected_grad)
