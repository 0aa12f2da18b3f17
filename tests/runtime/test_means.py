"""C13: means over a dim that lies in unequal or empty blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from placement import runtime as rt
from tests.gloo import GlooPool

Pool = Callable[[int], GlooPool]
BLOCKS = [(4,), (2, 2), (3, 0), (1, 0, 2), (0, 5, 1, 1)]
WHERE = [
    (0, None, False),
    (0, (), False),
    (0, 0, True),
    (1, 1, False),
    (-1, -1, True),
    (1, (0, 1), False),
    (2, [-1, 0], True),
    (0, (0, 1, 2), True),
]


def whole(sizes: tuple[int, ...], cut: int) -> Tensor:
    shape = [2, 3, 5]
    shape[cut] = sum(sizes)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("sizes", BLOCKS)
@pytest.mark.parametrize(("cut", "dim", "keepdim"), WHERE)
def test_value_and_gradient(sizes: tuple[int, ...], cut: int, dim: int | tuple[int, ...] | None, keepdim: bool) -> None:
    n = len(sizes)
    x = whole(sizes, cut).requires_grad_()
    expected = x.mean() if dim is None else x.mean(dim, keepdim)
    cotangent = torch.randn(expected.shape, dtype=torch.float64)
    expected.backward(cotangent)
    leaves = [part.clone().requires_grad_() for part in x.detach().split(sizes, cut)]
    with rt.record() as log:
        terms = rt.simulate(tp=n).run(lambda axes: rt.mean(leaves[axes["tp"].rank], axes["tp"], dim, keepdim))
        torch.autograd.backward(terms, [cotangent] * n)
    torch.testing.assert_close(sum(terms), expected)
    torch.testing.assert_close(torch.cat([leaf.grad for leaf in leaves], cut), x.grad)
    assert log == ([rt.Event("all_reduce", "tp", 8, "forward")] if n > 1 else [])


def test_nothing_at_all() -> None:
    terms = rt.simulate(tp=2).run(lambda axes: rt.mean(torch.ones(0, 3), axes["tp"], 0))
    assert sum(terms).isnan().all()


def test_dtypes() -> None:
    def means(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return sum(rt.simulate(tp=2).run(lambda axes: rt.mean(x.chunk(2)[axes["tp"].rank], axes["tp"], dtype=dtype)))

    big = torch.full((4096,), 100.0, dtype=torch.float16)  # its sum is no float16
    assert means(big).dtype == torch.float16
    assert means(big).item() == 100.0
    ones = torch.ones(4096, dtype=torch.bfloat16)  # nor could 2049 be counted in bfloat16
    assert means(ones).item() == 1.0
    assert means(torch.arange(8), torch.float64).item() == 3.5
    assert means(torch.tensor([1 + 1j, 3j])).item() == 0.5 + 2j
    assert means(big, torch.float64).dtype == torch.float64
    with pytest.raises(RuntimeError, match=r"mean of torch\.int64"):
        means(torch.arange(8))


def on_processes() -> list[tuple[Tensor, Tensor]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    axis = rt.MeshAxis(mesh, "tp")
    found = []
    for sizes in ((3, 0), (1, 2)):
        leaf = whole(sizes, 0).split(sizes)[axis.rank].clone().requires_grad_()
        term = rt.mean(leaf, axis, (0, 2))
        rt.all_reduce(term, axis).sum().backward()
        found.append((term.detach(), leaf.grad))
    return found


@pytest.mark.gloo
def test_on_processes(gloo: Pool) -> None:
    answers = gloo(2).run(on_processes)
    for index, sizes in enumerate([(3, 0), (1, 2)]):
        terms, grads = zip(*(answer[index] for answer in answers), strict=True)
        x = whole(sizes, 0).requires_grad_()
        expected = x.mean((0, 2))
        expected.sum().backward()
        torch.testing.assert_close(sum(terms), expected)
        torch.testing.assert_close(torch.cat(grads), x.grad)
