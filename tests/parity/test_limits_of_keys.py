"""Lengths that no axis divides, of attention in which nothing hides the keys that pad them: it is told of these."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import placement
from placement import api
from placement import runtime as rt
from placement.graph.capture import capture
from placement.graph.ir import Graph
from tests.gloo import GlooPool
from tests.parity import axes
from tests.parity.marked import KV, NAMES, ORDERS, WIDTH, Attention, inputs
from tests.parity.measure import Measured, gradients

Pool = Callable[[int], GlooPool]
Case = tuple[str, str, str, str]  # way, order, mask, heads
LENGTHS = (23, 5, 24, 1)  # through one module; of 5 on 4 ranks some have no token at all
CALLS = {"gather": "seq_spare", "all_to_all": "rt.all_to_all", "ring": "rt.ring_attention"}


def everything(at: Tensor, _: Tensor, __: Tensor) -> Tensor:
    return (at[:, None] >= 0) & (at[None] >= 0)


def packed(_: Tensor, documents: Tensor, __: Tensor) -> Tensor:
    return documents[:, None, :, None] == documents[:, None, None, :]


def around(at: Tensor, _: Tensor, __: Tensor) -> Tensor:
    return (at[:, None] - at[None] < 4) & (at[None] - at[:, None] < 6)


def later(at: Tensor, documents: Tensor, _: Tensor) -> Tensor:
    return (at[None] >= at[:, None]) & (documents[:, None, :, None] <= documents[:, None, None, :])


def either(at: Tensor, documents: Tensor, kept: Tensor) -> Tensor:
    """A tensor: of an | nothing is read."""
    return packed(at, documents, kept) | (at[:, None] >= at)


def added(at: Tensor, documents: Tensor, kept: Tensor) -> Tensor:
    return packed(at, documents, kept).double() - (at[:, None] - at).abs()


MASKS = {"everything": everything, "packed": packed, "around": around, "later": later}
WRITTEN = {"either": either, "added": added}


class Model(nn.Module):
    """The attention of ``marked``, and a loss of those tokens that were given."""

    def __init__(self, mask: str, kv: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention("causal", kv, dropout)
        self.attention.mask = {**MASKS, **WRITTEN}[mask]

    def forward(self, x: Tensor, documents: Tensor, kept: Tensor) -> dict[str, Tensor]:
        y = self.attention(x, documents, kept)
        return {"y": y, "loss": F.cross_entropy(y.flatten(0, 1), kept.flatten(), reduction="sum")}


@functools.cache
def _captured(mask: str, heads: str, dropout: float) -> tuple[nn.Module, Graph]:
    torch.manual_seed(2)
    model, given = Model(mask, KV[heads], dropout).double(), inputs()
    return model, capture(model, given, {name: NAMES[: x.ndim] for name, x in given.items()})


def spec(way: str, order: str = "") -> str:
    """Inputs are whole, and what comes of them is cut. The way is one on ``cp``, or says where it is done."""
    return (
        "link quick = 10 GB/s, 1 ns\n"
        + ("mesh cp over quick\nmesh tp over quick\n" if "@" in way else "mesh cp over quick\n")
        + "input x : [batch, seq, width]\ninput documents, kept : [batch, seq]\n"
        + f"value attention.{{q,k,v,out}} : Shard(seq{order}) @ cp{', Shard(seq) @ tp' if '@' in way else ''}\n"
        + f"strategy attention : {way}{'' if '@' in way else ' @ cp'}\n"
    )


def compiled(mesh: Any, case: Case, dropout: float = 0.0) -> tuple[nn.Module, Any]:
    way, order, mask, heads = case
    model, graph = _captured(mask, heads, dropout)
    with mock.patch.object(api, "capture", return_value=graph):
        return model, placement.compile(model, mesh, spec(way, order), example=inputs())


def given(seq: int) -> dict[str, Tensor]:
    """The first tokens of the example, of documents that end inside of blocks."""
    found = {name: x.detach()[:, :seq] for name, x in inputs().items()}
    return {**found, "x": found["x"].clone().requires_grad_()}


def problems(mesh: Any, case: Case, dropout: float = 0.0) -> list[str]:
    """Of calls of every length; attention is told how much longer it is inside."""
    model, program = compiled(mesh, case, dropout)
    found = Measured()
    with rt.same_random(model):
        for seq in LENGTHS:
            axes.compared(found, model, program, given(seq))
    assert "spare=seq_spare" in program.source
    assert all(call in program.source for way, call in CALLS.items() if way in case[0])
    return [f"{case}: {problem}" for problem in found.problems()]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_every_way(mask: str, dropout: float) -> None:
    """Of 54 plans of each mask every seventh, with dropout every thirteenth: all ways, orders and numbers of ranks."""
    cases = list(itertools.product(CALLS, ORDERS, KV, (2, 3, 4)))
    for way, order, heads, n in cases[list(MASKS).index(mask) :: 13 if dropout else 7]:
        assert not problems(rt.simulate(cp=n), (way, order, mask, heads), dropout)


@pytest.mark.parametrize("mask", ["packed", "around"])
def test_two_axes(mask: str) -> None:
    """Heads to heads inside, keys round outside."""
    assert not problems(rt.simulate(cp=2, tp=2), ("all_to_all @ tp + ring @ cp", ", zigzag", mask, "grouped"))


@pytest.mark.parametrize("mask", WRITTEN)
def test_a_mask_that_is_a_tensor(mask: str) -> None:
    """Truths, or what is added to scores: of a sequence twice, of which a rank takes its own rows."""
    for way, order, n in (("all_to_all", "", 3), ("gather", "", 2), ("gather", ", zigzag", 3)):
        assert not problems(rt.simulate(cp=n), (way, order, mask, "multi-head"))


class Across(nn.Module):
    """Queries of one length and keys of another, marks of both compared or places; a loss of the tokens given."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask = mask
        self.q, self.k, self.v = (nn.Linear(WIDTH, 12) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor, of_x: Tensor, of_y: Tensor) -> dict[str, Tensor]:
        q, k, v = (one(z).unflatten(-1, (3, 4)).transpose(1, 2) for one, z in ((self.q, x), (self.k, y), (self.v, y)))
        at, its = torch.arange(x.shape[1]), torch.arange(y.shape[1])
        seen = of_x[:, None, :, None] == of_y[:, None, None] if self.mask == "marks" else at[:, None] + 3 >= its
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
        return {"out": out, "loss": F.cross_entropy(out.flatten(0, 1), of_x.flatten(), reduction="sum")}


@pytest.mark.parametrize("mask", ["marks", "places"])
def test_two_lengths(mask: str) -> None:
    """Rows that only pad change nothing, and of padded keys attention is told."""
    generator = torch.Generator().manual_seed(5)

    def drawn(queries: int, keys: int) -> dict[str, Tensor]:
        x, y = (torch.randn(2, n, WIDTH, generator=generator, dtype=torch.float64) for n in (queries, keys))
        of_x, of_y = (torch.randint(0, 3, (2, n), generator=generator) for n in (queries, keys))
        return {"x": x.requires_grad_(), "y": y.requires_grad_(), "of_x": of_x, "of_y": of_y}

    torch.manual_seed(4)
    model, found = Across(mask).double(), Measured()
    spec = (
        "link quick = 10 GB/s, 1 ns\nmesh cp over quick\ninput x : [batch, seq, width]\ninput y : [batch, mem, width]\n"
    )
    spec += "input of_x : [batch, seq]\ninput of_y : [batch, mem]\n"
    spec += "value q : Shard(seq) @ cp\nvalue {k,v} : Shard(mem) @ cp\n"
    program = placement.compile(model, rt.simulate(cp=2), spec, example=drawn(24, 36))
    for lengths in ((24, 36), (23, 36), (24, 35), (7, 5), (1, 1)):
        axes.compared(found, model, program, drawn(*lengths))
    assert not found.problems()


def test_a_caller_does_not_say_how_much_is_padded() -> None:
    _, program = compiled(rt.simulate(cp=2), ("gather", "", "everything", "multi-head"))
    call = given(24)
    for args, more in (((), {"seq_spare": 1}), ((*call.values(), 1), {})):
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'seq_spare'|too many positional"):
            program(*args, **(more if args else {**call, **more}))


def test_nothing_is_masked_where_nothing_is_padded() -> None:
    """torch's kernel without a mask runs then."""
    _, program = compiled(rt.simulate(cp=2), ("all_to_all", "", "everything", "multi-head"))
    masks = []

    def seen(*args: Any, **options: Any) -> Tensor:
        masks.append(options["attn_mask"])
        return attention(*args, **options)

    attention = F.scaled_dot_product_attention
    with mock.patch.object(F, "scaled_dot_product_attention", seen):
        program(**given(24))
        program(**given(23))
    assert [mask is None for mask in masks] == [True, True, False, False]


def on_gloo(n: int) -> list[str]:
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))
    return [problem for way in CALLS for problem in problems(mesh, (way, ", zigzag", "around", "grouped"))]


def recomputed_later(n: int) -> None:
    """A layer runs again in the backward, when a call of another length has followed."""
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))
    model, program = compiled(mesh, ("ring", ", zigzag", "around", "grouped"))
    layer = program.attention
    layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    model.zero_grad()
    want, got = model(**given(21))["loss"], program(**given(21))["loss"]
    program(**given(24))
    want.backward()
    got.backward()
    torch.testing.assert_close(program.full_gradients(), gradients(model), rtol=1e-10, atol=1e-10)


@pytest.mark.gloo
def test_processes(gloo: Pool) -> None:
    assert not [problem for found in gloo(2).run(on_gloo, 2) for problem in found]
    gloo(2).run(recomputed_later, 2)
