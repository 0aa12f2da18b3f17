"""Several axes as one: what joins the ranks that differ on any of them, and a program that uses such a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from placement import runtime as rt
from tests.gloo import GlooPool
from tests.reference import dual, to_global
from tests.runtime.conversions import cases, values

Pool = Callable[[int], GlooPool]
GROUP = {"dp_tp": ("dp", "tp")}


def convert_all(group: rt.Axis) -> list[tuple[Tensor, Tensor]]:
    """This rank's output and input gradient of every case, its ranks being those of the group."""
    found = []
    for case in cases(group.size):
        _, parts, _, cotangents = values(case, group.size)
        leaf = parts[group.rank].clone().requires_grad_()
        out = case.convert(leaf, group)
        out.backward(cotangents[group.rank])
        found.append((out.detach(), leaf.grad))
    return found


def groups_of(
    mesh: rt.SimulatedMesh, axes: dict[str, rt.Axis], names: dict[str, tuple[str, ...]]
) -> dict[str, rt.Axis]:
    own = {name: axis.rank for name, axis in axes.items()}
    return mesh.axes_and_groups(mesh.ranks.index(own), names)[1]


def test_every_conversion() -> None:
    """The backward runs in here: it goes through the ranks in turn, as the forward does."""
    mesh = rt.simulate(dp=2, sp=2, tp=2)
    leaves: dict[tuple[int, int], Tensor] = {}
    for case in cases(4):
        x, parts, cotangent, cotangents = values(case, 4)

        def body(axes: dict[str, rt.Axis], case: Any = case, parts: list[Tensor] = parts) -> tuple[int, int, Tensor]:
            group = groups_of(mesh, axes, GROUP)["dp_tp"]
            leaf = leaves[axes["sp"].rank, group.rank] = parts[group.rank].clone().requires_grad_()
            return axes["sp"].rank, group.rank, case.convert(leaf, group)

        outs = {(sp, rank): out for sp, rank, out in mesh.run(body)}
        torch.autograd.backward(list(outs.values()), [cotangents[rank] for _, rank in outs])
        for sp in range(2):
            own = [(sp, rank) for rank in range(4)]
            torch.testing.assert_close(to_global([outs[at].detach() for at in own], case.target), x, msg=case.name)
            grads = [leaves[at].grad for at in own]
            torch.testing.assert_close(to_global(grads, dual(case.source)), cotangent, msg=case.name)


def test_ranks_count_in_mesh_order() -> None:
    mesh = rt.simulate(dp=2, sp=3, tp=2)
    names = {"dp_tp": ("dp", "tp"), "sp_tp": ("sp", "tp"), "dp_sp_tp": ("dp", "sp", "tp")}

    def body(axes: dict[str, rt.Axis]) -> dict[str, list[float]]:
        x = torch.tensor([100.0 * axes["dp"].rank + 10 * axes["sp"].rank + axes["tp"].rank])
        found = groups_of(mesh, axes, names)
        return {name: rt.all_gather(x, group, 0).tolist() for name, group in found.items()}

    outs = mesh.run(body)
    assert [out["dp_tp"] for out in outs[2:4]] == [[10.0, 11.0, 110.0, 111.0]] * 2
    assert [out["sp_tp"] for out in outs[6:]] == [[100.0, 101.0, 110.0, 111.0, 120.0, 121.0]] * 6
    assert all(
        out["dp_sp_tp"] == [100.0 * a + 10 * b + c for a in (0, 1) for b in (0, 1, 2) for c in (0, 1)] for out in outs
    )


def on_mesh(sizes: dict[str, int]) -> tuple[int, list[tuple[Tensor, Tensor]]]:
    """The rank in the group dp_tp, and the conversions on it."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    first = rt.MeshAxis(mesh, "dp_tp", axes=("dp", "tp"))
    again = rt.MeshAxis(mesh, "dp_tp", axes=("dp", "tp"))  # of another program on the same mesh
    assert (again.size, again.rank) == (first.size, first.rank) == (sizes["dp"] * sizes["tp"], first.rank)
    return again.rank, convert_all(again)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({"dp": 2, "tp": 2}, [0, 1, 2, 3]),
        ({"dp": 2, "sp": 1, "tp": 2}, [0, 1, 2, 3]),
        ({"dp": 2, "sp": 2, "tp": 1}, [0, 0, 1, 1]),
    ],
    ids=str,
)
def test_every_conversion_on_processes(gloo: Pool, sizes: dict[str, int], ranks: list[int]) -> None:
    answers = gloo(4).run(on_mesh, sizes)
    assert [rank for rank, _ in answers] == ranks
    n = sizes["dp"] * sizes["tp"]
    for index, case in enumerate(cases(n)):
        x, _, cotangent, _ = values(case, n)
        outs, grads = zip(*(found[index] for _, found in answers[:: 4 // n]), strict=True)
        torch.testing.assert_close(to_global(list(outs), case.target), x, msg=case.name)
        torch.testing.assert_close(to_global(list(grads), dual(case.source)), cotangent, msg=case.name)


def unknown() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(rt.MeshError) as caught:
        rt.MeshAxis(mesh, "dp_sp", axes=("dp", "sp"))
    return str(caught.value)


@pytest.mark.gloo
def test_an_axis_of_a_group_that_the_mesh_lacks(gloo: Pool) -> None:
    assert set(gloo(4).run(unknown)) == {"the mesh has no axis 'sp': its axes are dp, tp"}


# -- programs -------------------------------------------------------------------------------------


class Grouped(rt.Program):
    """Each rank has rows of its own; the weight's gradient and the mean are sums over all ranks at once."""

    axes: ClassVar = {"dp": 2, "tp": 2}
    groups: ClassVar = GROUP
    inputs: ClassVar = {"x": (("batch", 4), {"dp": rt.Cut(0), "tp": rt.Cut(0)})}
    hooks: ClassVar = {"dp_tp": ("w",)}

    def forward(self, x: Tensor) -> Tensor:
        y = x @ rt.summed(self, "w", self.dp_tp)
        return rt.all_reduce(rt.mean(y.square(), self.dp_tp), self.dp_tp)


SENT = [
    rt.Event("all_reduce", "dp_tp", 8, "forward"),
    rt.Event("all_reduce", "dp_tp", 8, "forward"),
    rt.Event("all_reduce", "dp_tp", 24 * 8, "backward"),
]


def grouped(mesh: Any) -> None:
    model, x = torch.randn(4, 6, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    w = model.clone().requires_grad_()
    expected = (x @ w).square().mean()
    expected.backward()
    program = Grouped(w=rt.param(4, 6, dtype=torch.float64)).on(mesh)
    program.load_full_state_dict({"w": model})
    simulated = isinstance(mesh, rt.SimulatedMesh)
    own = x if simulated else x.chunk(4)[2 * mesh.get_local_rank("dp") + mesh.get_local_rank("tp")]
    with rt.record() as log:
        loss = program(own)
        loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(program.full_gradients()["w"], w.grad)
    assert log == SENT, log
    for one in program.programs if simulated else [program]:
        torch.testing.assert_close(one.w.grad, w.grad)  # on every rank, not on those that the report reads


def grouped_on_processes() -> None:
    grouped(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))


def test_a_program() -> None:
    grouped(rt.simulate(dp=2, tp=2))


@pytest.mark.gloo
def test_a_program_on_processes(gloo: Pool) -> None:
    gloo(4).run(grouped_on_processes)


def test_a_group_cannot_have_the_name_of_a_member() -> None:
    taken = Grouped(w=rt.param(4, 6), dp_tp=rt.param(3))
    with pytest.raises(rt.MeshError, match="axis 'dp_tp' cannot have the name of a member of the root"):
        taken.on(rt.simulate(dp=2, tp=2))
