"""Every conversion between real processes: against the reference, and against spmd_types' collectives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from placement import runtime as rt
from tests.gloo import GlooPool
from tests.reference import Shard, dual, to_global
from tests.runtime.conversions import LAYOUTS, Case, cases, spread, values

pytestmark = pytest.mark.gloo

Pool = Callable[[int], GlooPool]


def mesh_axis(reduce_dtype: torch.dtype | None = None) -> rt.MeshAxis:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return rt.MeshAxis(mesh, "tp", reduce_dtype)


def convert_all(how: str) -> list[tuple[Tensor, Tensor, bool]]:
    """This rank's output and input gradient of every case, and whether anything given was written."""
    axis = mesh_axis()
    found = []
    for case in cases(axis.size):
        _, parts, _, cotangents = values(case, axis.size)
        base, view = spread(parts[axis.rank], how)
        grad_base, grad = spread(cotangents[axis.rank], how)
        before = base.clone(), grad_base.clone()
        leaf = view.detach().requires_grad_()
        out = case.convert(leaf, axis)
        out.backward(grad)
        same = torch.equal(base, before[0]) and torch.equal(grad_base, before[1])
        found.append((out.detach(), leaf.grad, same))
    return found


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("how", LAYOUTS)
def test_value_gradient_and_layout(gloo: Pool, n: int, how: str) -> None:
    """C23 with the conversions' own values: right answers, nothing written, whatever the strides."""
    answers = gloo(n).run(convert_all, how)
    for index, case in enumerate(cases(n)):
        x, _, cotangent, _ = values(case, n)
        outs, grads, same = zip(*(answer[index] for answer in answers), strict=True)
        torch.testing.assert_close(to_global(list(outs), case.target), x, msg=case.name)
        torch.testing.assert_close(to_global(list(grads), dual(case.source)), cotangent, msg=case.name)
        assert all(same), case.name


def convert_both() -> list[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    """Ours and spmd_types' output and input gradient of each case that it has."""
    import spmd_types as spmd

    axis = mesh_axis()
    kinds = {"I": spmd.I, "R": spmd.R, "P": spmd.P}

    def theirs(case: Case, x: Tensor) -> Tensor:
        src, dst = (spmd.S(t.dim % x.ndim) if isinstance(t, Shard) else kinds[t] for t in (case.source, case.target))
        name = case.name.split(",")[0].split(" ")[0]
        if name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            return getattr(spmd, name)(x, axis.group, src=src, dst=dst)
        return spmd.convert(x, axis.group, src=src, dst=dst, expert_mode=True)

    found = []
    for case in cases(axis.size):
        shards = [t for t in (case.source, case.target) if isinstance(t, Shard)]
        if any(shard.outer != 1 or shard.segments or shard.zigzag for shard in shards) or 0 in case.shape:
            continue  # spmd_types knows whole dims only
        _, parts, _, cotangents = values(case, axis.size)
        ours, other = (parts[axis.rank].clone().requires_grad_() for _ in range(2))
        y, z = case.convert(ours, axis), theirs(case, other)
        y.backward(cotangents[axis.rank])
        z.backward(cotangents[axis.rank])
        found.append((case.name, y.detach(), z.detach(), ours.grad, other.grad))
    return found


def test_same_as_spmd_types(gloo: Pool) -> None:
    answers = gloo(2).run(convert_both)
    assert len(answers[0]) > 25
    for answer in answers:
        for name, y, z, grad, other in answer:
            torch.testing.assert_close(y, z, msg=name)
            torch.testing.assert_close(grad, other, msg=name)


def reduced() -> list[tuple[float, float]]:
    """The reductions of 1 and three times 2^-9 in bfloat16, forward and backward, by reduction dtype."""
    found = []
    for dtype in (None, torch.float32):
        axis = mesh_axis(dtype)
        x = torch.full((4,), 1.0 if axis.rank == 0 else 2.0**-9, dtype=torch.bfloat16)
        leaf = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
        rt.replicated(leaf, axis).backward(x)
        block = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
        rt.all_gather(block, axis, 0).backward(x)
        every = [rt.all_reduce(x, axis)[0], rt.reduce_scatter(x, axis, 0)[0], leaf.grad[0], block.grad[0]]
        found.append([y.item() for y in every])
    return found


def test_reduce_dtype(gloo: Pool) -> None:
    """C22: all of them obey, none only some of the time."""
    for plain, asked in gloo(4).run(reduced):
        assert set(plain) <= {1.0, 1.0078125}
        assert set(asked) == {1.0078125}


def strange() -> dict[str, Tensor | str]:
    """Tensors that collectives are easily wrong with: conjugated, empty, of one rank's own layout."""
    axis = mesh_axis()
    z = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, float(axis.rank)])).conj()
    found = {"conj": rt.all_reduce(z, axis).resolve_conj(), "empty": rt.all_gather(torch.ones(0, 3), axis, 0)}
    found["complex"] = rt.all_gather(rt.reduce_scatter(z, axis, 0), axis, 0).resolve_conj()
    with pytest.raises(ValueError, match="no max of complex numbers"):
        axis.run(rt.Step("all_reduce", op="max"), z)
    ours = torch.ones(2)
    found["own"] = axis.run(rt.ALL_REDUCE, ours, own=True)
    assert found["own"] is ours
    mine = torch.arange(6.0).reshape(2, 3)
    if axis.rank == 1:  # the same numbers, stored by columns
        mine = mine.t().contiguous().t()
    found["own layout"] = rt.all_reduce(mine, axis)
    found["ints"] = rt.all_gather(torch.tensor([axis.rank]), axis, 0)
    found["bools"] = rt.all_gather(torch.tensor([axis.rank == 1]), axis, 0)
    try:
        rt.reduce_scatter(torch.ones(3), axis, 0)
    except rt.SizeError as error:
        found["error"] = str(error)
    return found


def test_strange_tensors(gloo: Pool) -> None:
    for found in gloo(2).run(strange):
        assert torch.equal(found["conj"], torch.tensor([2.0 - 6.0j, 4.0 - 1.0j]))
        assert torch.equal(found["complex"], found["conj"])
        assert found["own"].tolist() == [2, 2]
        assert found["empty"].shape == (0, 3)
        assert torch.equal(found["own layout"], 2 * torch.arange(6.0).reshape(2, 3))
        assert found["ints"].tolist() == [0, 1]
        assert found["bools"].tolist() == [False, True]
        assert "axis 'tp': dim 0 of shape [3] has size 3" in found["error"]


def wrong_axis() -> str:
    with pytest.raises(rt.MeshError) as caught:
        rt.MeshAxis(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), "dp")
    return str(caught.value)


def test_an_axis_that_the_mesh_lacks(gloo: Pool) -> None:
    assert gloo(2).run(wrong_axis)[0] == "the mesh has no axis 'dp': its axes are tp"
