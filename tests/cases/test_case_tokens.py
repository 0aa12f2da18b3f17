"""What follows the tokens of a cut sequence: places, documents, gradients of a ring (C10, C11, C12)."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import placement
from placement import api
from placement import runtime as rt
from placement.graph.capture import capture
from placement.graph.precision import lifted
from tests.cases.toys import close, drawn, gradients, step
from tests.parity import axes, models
from tests.parity.measure import Measured
from tests.runtime.worlds import Pool, in_worlds, run

WIDTH, SEQ = 8, 24


class Attention(nn.Module):
    """Documents and positions out of where each document starts; rotary by the place in the document."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        at = torch.arange(x.shape[1])
        documents = torch.searchsorted(starts, at, right=True)
        places = at - starts[documents - 1]
        angles = places[:, None].to(x.dtype) * torch.tensor([1.0, 0.1], dtype=x.dtype)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def rotated(t: Tensor) -> Tensor:
            return t * cos + torch.cat((-t[..., 2:], t[..., :2]), -1) * sin

        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        seen = (documents[:, None] == documents[None]) & (at[:, None] >= at[None])
        q, k = rotated(q), rotated(k)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(y.transpose(1, 2).flatten(2)), q, k


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor, starts: Tensor) -> dict[str, Tensor]:
        y, q, k = self.attention(x, starts)
        return {"loss": (y * torch.arange(1, x.shape[1] + 1)[:, None]).square().mean(), "y": y, "scores": q @ k.mT}


SPEC = """
mesh tp
input x : [batch, seq, width], Shard(seq{order}) @ tp
value attention : Shard(seq{order}) @ tp
strategy attention : {way} @ tp
"""


def compared(mesh: Any, way: str, order: str, tokens: int, given: list[int], then: list[list[int]]) -> str:
    """Documents that start at these tokens, in calls of one program; the emitted text."""
    model = drawn(Packed())
    x = torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    example = {"x": x.requires_grad_(), "starts": torch.tensor(given)}
    program = placement.compile(model, mesh, SPEC.format(order=order, way=way), example=example)
    for starts in (given, *then):
        model.zero_grad()
        program.zero_grad()
        one = x.detach().clone().requires_grad_()
        many = program.own_inputs(x=x.detach().clone())["x"].requires_grad_()
        want, got = (step(m, x=x, starts=torch.tensor(starts)) for m, x in ((model, one), (program, many)))
        close(dict(got), want)
        close(many.grad, program.own_inputs(x=one.grad)["x"])
        close(program.full_gradients(), gradients(model))
    return program.source


def rotary(mesh: Any, n: int, way: str) -> None:
    """A rank has tokens of both documents, in zigzag order the first ones of one and the last ones of the other."""
    for order in ("", ", zigzag"):
        source = compared(mesh, way, order, 4 * n, [0, 2 * n], [])
        assert ("zigzag=True" in source) == bool(order)
        assert way != "ring" or "arange = rt.split(arange" in source  # of the rows that turn queries each has its own


@in_worlds
@pytest.mark.parametrize("way", ["gather", "ring"])
def test_C10_rotary_rows_of_packed_sequences(world: str, n: int, way: str, gloo: Pool) -> None:
    """q · k after the rotation is that of one device: no document reads the rows of another one's places."""
    run(rotary, world, n, gloo, way)


def packed(mesh: Any, n: int, way: str) -> None:
    """Rank 1 starts inside a document; one document is longer than a rank's share, one has a single token."""
    for order in ("", ", zigzag"):
        compared(mesh, way, order, SEQ, [0, 4, 5, 20], [[0, 1, 11, 13], [0, 12, 24, 24]])


@in_worlds
@pytest.mark.parametrize("way", ["gather", "all_to_all", "ring"])
def test_C11_lengths_given_once(world: str, n: int, way: str, gloo: Pool) -> None:
    if way != "all_to_all" or n == 2:
        run(packed, world, n, gloo, way)


class Core(nn.Module):
    """Attention alone, causal and not, so that the gradients of its operands are those of inputs."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)


class Whole(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.core = Core(causal)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        y = self.core(q, k, v)
        return {"loss": (y * torch.arange(1, y.shape[2] + 1)[:, None]).square().sum(), "y": y}


RING = """
mesh tp
input q : [batch, heads, seq, size]
input k, v : [batch, kv, seq, size]
value core : Shard(seq) @ tp
strategy core : ring @ tp
"""


def ring(mesh: Any, n: int, causal: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    given = [torch.randn(2, heads, 3 * n, 4, generator=draw, dtype=torch.float64) for heads in (6, 2, 2)]
    one, many = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    model = Whole(causal)
    program = placement.compile(model, mesh, RING, example=dict(zip("qkv", one, strict=True)))
    assert "rt.ring_attention" in program.source
    want, got = (step(m, **dict(zip("qkv", xs, strict=True))) for m, xs in ((model, one), (program, many)))
    close(dict(got), want, 1e-10)
    close(*(dict(zip("qkv", (x.grad for x in xs), strict=True)) for xs in (many, one)), 1e-10)


@in_worlds
@pytest.mark.parametrize("causal", [True, False])
def test_C12_gradients_of_a_ring(world: str, n: int, causal: bool, gloo: Pool) -> None:
    """dQ, dK and dV, of which each passes through other ranks' steps."""
    run(ring, world, n, gloo, causal)


@pytest.mark.parametrize("causal", [True, False])
def test_C12_on_three_ranks(causal: bool) -> None:
    """The middle rank's block is neither the first nor the last to come by."""
    ring(rt.simulate(tp=3), 3, causal)


MODEL = """
link quick = 10 GB/s, 1 ns
mesh cp over quick
input inputs_embeds : [batch, seq, hidden], Shard(seq{order}) @ cp
input labels : [batch, seq], Shard(seq{order}) @ cp
strategy model.layers.*.self_attn : ring @ cp
"""


def test_C12_in_a_whole_model() -> None:
    """A Llama whose heads share keys: gradients of its weights before and after the ring, and of what it is given."""
    model, given, found = models.build("llama", num_hidden_layers=1), models.inputs(2, 12, embeds=True), Measured()
    names = {"inputs_embeds": ("batch", "seq", "hidden"), "labels": ("batch", "seq")}
    with lifted(torch.float64):
        graph = capture(model, given, names)
    for n, order in ((2, ", zigzag"), (3, "")):
        with mock.patch.object(api, "capture", return_value=graph):
            program = placement.compile(model, rt.simulate(cp=n), MODEL.format(order=order), example=given)
        assert program.source.count("rt.ring_attention(") == 1
        axes.compared(found, model, program, given)
    assert not found.problems()
