"""Masks that stay tensors [queries, keys], where queries are cut: each rank takes its own rows of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import placement
from placement import runtime as rt
from placement.solver.memory import memory
from tests.gloo import GlooPool
from tests.memory.saved_hooks import kept_bytes
from tests.parity import axes, marked
from tests.parity.measure import Measured

HEADS, ROWS = marked.HEADS, 2 * marked.SEQ


class Slopes(nn.Module):
    """Scores get a learned slope of each head times the distance: every element of the mask has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.rand(HEADS) - 0.5)

    def forward(self, at: Tensor, _: Tensor, __: Tensor) -> Tensor:
        return self.slopes[:, None, None] * (at[:, None] - at).abs()


class Table(nn.Module):
    """Of each distance a number by head, looked up in a table; later keys of other documents are hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(ROWS, HEADS) - 0.5)

    def forward(self, at: Tensor, documents: Tensor, _: Tensor) -> Tensor:
        added = self.table[at[:, None] - at + ROWS // 2].permute(2, 0, 1)
        seen = (at[:, None] >= at) | (documents[:, None, :, None] == documents[:, None, None, :])
        return added.masked_fill(~seen, -torch.inf)


def either(at: Tensor, documents: Tensor, _: Tensor) -> Tensor:
    return (at[:, None] >= at) | (documents[:, None, :, None] == documents[:, None, None, :])


class Of(nn.Module):
    """A function as a module, which has no parameters."""

    def forward(self, *marks: Tensor) -> Tensor:
        return either(*marks)


class Kept(nn.Module):
    """What is seen lies in a buffer, of more tokens than there are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.rand(ROWS, ROWS).tril().ceil(), persistent=False)

    def forward(self, at: Tensor, _: Tensor, __: Tensor) -> Tensor:
        count = at.shape[0]
        return self.get_buffer("seen")[:count, :count] == 1


class Learned(nn.Module):
    """What is added is a parameter, of more tokens than there are, by head."""

    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Parameter(torch.rand(HEADS, ROWS, ROWS) - 0.5)

    def forward(self, at: Tensor, _: Tensor, __: Tensor) -> Tensor:
        return self.added[:, : at.shape[0], : at.shape[0]]


KINDS: dict[str, Callable[[], nn.Module]] = {
    "slopes": Slopes,
    "table": Table,
    "either": Of,
    "buffer": Kept,
    "learned": Learned,
}


def made(kind: str, kv: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    model = marked.Model("causal", marked.KV[kv], dropout)
    model.attention.mask = KINDS[kind]()
    return model


def undivided(order: str = "") -> str:
    """The spec of ``marked`` with inputs that are whole, of which lines cut what comes."""
    spec = marked.spec("gather", order)
    spec = spec.replace(
        f"input x : [batch, seq, width], Shard(seq{order}) @ cp",
        f"input x : [batch, seq, width]\nvalue attention.{{q,k,v,out}} : Shard(seq{order}) @ cp",
    )
    return spec.replace(f"[batch, seq], Shard(seq{order}) @ cp", "[batch, seq]")


def problems(mesh: object, kind: str, kv: str, spec: str, dropout: float = 0.0) -> list[str]:
    model, given = made(kind, kv, dropout).double(), marked.inputs()
    program = placement.compile(model, mesh, spec, example=given)  # pyright: ignore[reportArgumentType]
    assert "rt.visible(" in program.source
    assert "attn_mask=" in program.source
    found = Measured()
    with rt.same_random(model):
        axes.compared(found, model, program, given)
    return found.problems()


@pytest.mark.parametrize("kind", KINDS)
def test_own_rows(kind: str) -> None:
    cases = itertools.product(marked.KV, marked.ORDERS, (2, 3, 4))
    for kv, order, n in list(cases)[list(KINDS).index(kind) :: 6]:
        assert not problems(rt.simulate(cp=n), kind, kv, marked.spec("gather", order)), (kv, order, n)
    assert not problems(rt.simulate(cp=2), kind, "grouped", marked.spec("gather", ", zigzag"), 0.3)


@pytest.mark.parametrize("kind", ["buffer", "learned"])
def test_own_rows_where_no_data_comes_divided(kind: str) -> None:
    """A mask that is a buffer or a parameter is no weight whose work would be divided unasked."""
    assert not problems(rt.simulate(cp=2), kind, "grouped", undivided())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_what_it_keeps(kind: str, dropout: float) -> None:
    model, given = made(kind, "grouped", dropout).float(), marked.inputs()
    given["x"] = given["x"].detach().float().requires_grad_()
    for way in ("gather", "all_to_all") if kind != "learned" else ("gather",):  # a whole parameter is not cut by heads
        program = placement.compile(model, rt.simulate(cp=2), marked.spec(way), example=given)
        exempt = [*program.parameters(), *program.buffers()]
        kept = kept_bytes(lambda p=program: p(**given), exempt, given.values(), 2)
        assert memory(program.plan).rank.saved_bytes == kept, way


def test_heads_on_another_axis() -> None:
    """Of heads and rows a rank takes its own of both."""
    model, given = made("slopes", "multi-head").double(), marked.inputs()
    spec = marked.spec("gather").replace("mesh cp over quick\n", "mesh cp over quick\nmesh tp over quick\n")
    spec += "param attention.{q,k,v}.{weight,bias} : Shard(out) @ tp\n"
    program = placement.compile(model, rt.simulate(cp=2, tp=2), spec, example=given)
    found = Measured()
    axes.compared(found, model, program, given)
    assert not found.problems()


def on_gloo() -> list[str]:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
    return problems(mesh, "table", "grouped", undivided(", zigzag"))


@pytest.mark.gloo
def test_own_rows_on_processes(gloo: Callable[[int], GlooPool]) -> None:
    assert not any(gloo(3).run(on_gloo))
