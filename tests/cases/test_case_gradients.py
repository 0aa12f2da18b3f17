"""Gradients that are partial on some path: norms, biases, shared heads, losses, masks (C01, C05, C06, C07, C09)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import placement
from placement import runtime as rt
from tests.cases import toys
from tests.cases.toys import BATCH, HIDDEN, SEQ, close, gradients, ranks, step, whole
from tests.runtime.worlds import Pool, in_worlds, run


def norms(mesh: Any, n: int) -> None:
    model, program = toys.pair(mesh, toys.SP)
    step(model, **toys.batch())
    step(program, **toys.batch())
    names = [name for name, _ in model.named_parameters() if name.split(".")[-2].startswith("norm")]
    assert len(names) == 6
    for name in names:
        for rank in ranks(program):  # as autograd left them
            close(rank.get_parameter(name).grad, model.get_parameter(name).grad)
    assert {(hook.parameter.name, hook.axis) for hook in program.plan.hooks} >= {(name, "tp") for name in names}


@in_worlds
def test_C01_norms_under_sequence_shards(world: str, n: int, gloo: Pool) -> None:
    """A replicated norm that sees a part of the sequence: its weight's and bias's gradients stay each rank's own."""
    run(norms, world, n, gloo)


class OneHead(nn.Module):
    """Queries of four heads against one key and value head, which no axis can cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.o = nn.Linear(width, 4 * 6, bias=False), nn.Linear(4 * 6, width, bias=False)
        self.k, self.v = nn.Linear(width, 6, bias=False), nn.Linear(width, 6, bias=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.norm(x)
        q = self.q(x).unflatten(-1, (4, 6)).transpose(1, 2)
        k, v = (t.unsqueeze(1).expand(-1, 4, -1, -1) for t in (self.k(x), self.v(x)))
        out = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return {"loss": out.square().mean(), "out": out}


ONE_HEAD = """
device h100
mesh tp = 2 over nvlink
input x : [batch, seq, width]
param q.weight : Shard(out)
param o.weight : Shard(in)
value norm : Replicate
"""


def one_head(mesh: Any, n: int, width: int, size: int, seq: int, at_weights: bool) -> None:
    model = toys.drawn(OneHead(width))
    with torch.no_grad():
        for linear in (model.q, model.k, model.v):
            linear.weight.mul_(width**-0.5)  # softmax must not saturate
    x = torch.randn(size, seq, width, dtype=torch.float64, requires_grad=True)
    program = placement.compile(model, mesh, ONE_HEAD, example={"x": x})
    one, many = (x.detach().clone().requires_grad_() for _ in range(2))
    step(model, x=one)
    with rt.record() as log:
        step(program, x=many)
    close(many.grad, one.grad)
    close(program.full_gradients(), gradients(model))
    # What the queries' path needs is reduced once, with the keys' and values' share in it; and the weights are
    # summed only where that is cheaper than the heads.
    hooked = {hook.parameter.name for hook in program.plan.hooks}
    assert hooked == ({"k.weight", "v.weight"} if at_weights else set())
    bytes_ = sorted(e.bytes for e in log if e.phase == "backward" and e.kind == "all_reduce")
    residual, heads, weights = 8 * size * seq * width, 8 * size * seq * 6, 8 * 2 * 6 * width
    assert bytes_ == sorted([residual, weights] if at_weights else [residual, heads, heads])


@pytest.mark.parametrize(("width", "size", "seq", "at_weights"), [(16, 2, 64, True), (65536, 1, 4, False)])
@pytest.mark.parametrize("world", ["simulated", pytest.param("gloo", marks=pytest.mark.gloo)])
def test_C05_one_key_head(world: str, width: int, size: int, seq: int, at_weights: bool, gloo: Pool) -> None:
    """Every rank's queries attend to the same keys: the gradients of the keys' weight and of the input are terms."""
    run(one_head, world, 2, gloo, width, size, seq, at_weights)


class Row(nn.Module):
    """Column, row with a bias, and a weight for each output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)
        self.tail = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.down(torch.tanh(self.up(x)))
        return {"loss": self.tail(out).pow(3).sum(), "out": out}


ROW = """
mesh tp
input x : [batch, seq, hidden]
param up.{weight,bias} : Shard(out)
param down.weight : [out, inner], Shard(in)
value down : PLACEMENT
output out : auto
"""


def row_bias(mesh: Any, n: int, placed: str) -> None:
    model = toys.drawn(Row())
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64)
    program = placement.compile(model, mesh, ROW.replace("PLACEMENT", placed), example={"x": x})
    want, got = step(model, x=x), step(program, x=x)
    close({name: whole(got[name]) for name in want}, want)
    close(program.full_gradients(), gradients(model))
    made = {v for node in program.plan.graph.nodes if node.module == "down" for v in node.results}
    moved = {
        s.conversion.forward.value for s in program.plan.steps if s.value in made and s.conversion.source.value == "P"
    }
    assert moved == {"all_reduce" if placed == "Replicate" else "reduce_scatter"}


@in_worlds
@pytest.mark.parametrize("placed", ["Replicate", "Shard(seq)", "Shard(out)"])
def test_C06_row_bias(world: str, n: int, placed: str, gloo: Pool) -> None:
    """A bias after a sum over ranks is added by each of them, or its gradient is a part of what it should be."""
    run(row_bias, world, n, gloo, placed)


class Criterion(nn.Module):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="sum")


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, toys.VOCAB)
        self.criterion = Criterion()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.criterion(self.head(self.norm(x)), labels) / labels.numel()}


LOSS = """
mesh tp
input x : [batch, seq, hidden]
input labels : [batch, seq]
value {norm,head} : Shard(seq)
"""
LOSSES = {
    "inside": "value criterion : Replicate\noutput loss : Replicate",
    "at the output": "value criterion : Partial\noutput loss : Replicate",
    "never": "value criterion : Partial\noutput loss : Partial",
}


def reduced_loss(mesh: Any, n: int, where: str) -> None:
    model = toys.drawn(WithLoss())
    given = {
        "x": torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64, requires_grad=True),
        "labels": toys.batch()["labels"],
    }
    program = placement.compile(model, mesh, LOSS + LOSSES[where], example=given)
    x, mine = (given["x"].detach().clone().requires_grad_() for _ in range(2))
    want = step(model, x=x, labels=given["labels"])
    got = program(x=mine, labels=given["labels"])["loss"]
    assert isinstance(got, DTensor) == (where == "never" and not isinstance(program, rt.Simulated))
    close(whole(got), want["loss"])
    got.backward()
    close(mine.grad, x.grad)
    close(program.full_gradients(), gradients(model))


@in_worlds
@pytest.mark.parametrize("where", LOSSES)
def test_C07_where_the_loss_is_reduced(world: str, n: int, where: str, gloo: Pool) -> None:
    """The gradient depends on whether the ranks' losses were summed before the backward, and by what."""
    run(reduced_loss, world, n, gloo, where)


class Mean(nn.Module):
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Total(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


class Masked(nn.Module):
    """Two means over the tokens that count: by ignored labels, and by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, toys.VOCAB)
        self.mean, self.total, self.count = Mean(), Total(), Total()

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.norm(x))
        ignoring = self.mean(logits, labels)
        sizes = logits.square().mean(-1) * mask
        return {"loss": ignoring + self.total(sizes) / self.count(mask), "ignoring": ignoring}


MASKED = """
mesh tp
input x : [batch, seq, hidden]
input labels, mask : [batch, seq]
value {norm,head} : Shard(seq)
value {mean,total,count} : Partial          # each rank's own tokens
"""


def masked_mean(mesh: Any, n: int, kept: int) -> None:
    model = toys.drawn(Masked())
    x, labels = torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64, requires_grad=True), toys.batch()["labels"]
    counts = torch.zeros(BATCH, SEQ, dtype=torch.bool)
    counts[:, :kept] = True
    counts[0, 1:3] = False
    given = {"labels": labels.where(counts, -100), "mask": counts.double()}
    program = placement.compile(model, mesh, MASKED, example={"x": x, **given})
    assert "token_parallel_cross_entropy" in program.source
    one, many = (x.detach().clone().requires_grad_() for _ in range(2))
    want, got = step(model, x=one, **given), step(program, x=many, **given)
    close(dict(got), want)
    close(many.grad, one.grad)
    close(program.full_gradients(), gradients(model))
    if not isinstance(program, rt.Simulated):
        every: list[Any] = [None] * n
        dist.all_gather_object(every, got["loss"].item())
        assert len(set(every)) == 1


@in_worlds
@pytest.mark.parametrize("kept", [7, 3, 1])
def test_C09_token_mean_of_unequal_ranks(world: str, n: int, kept: int, gloo: Pool) -> None:
    """Ranks with different numbers of tokens, some with none: a mean of the ranks' means, or NaN."""
    run(masked_mean, world, n, gloo, kept)
