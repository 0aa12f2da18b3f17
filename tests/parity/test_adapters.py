"""Low-rank adapters on frozen weights, on the column and on the row: gradients, hooks, and no work where none flows."""

from __future__ import annotations

import torch
from torch import nn

import placement
from placement.types import Action
from tests.cases.toys import close, gradients

BATCH, SEQ, HIDDEN, FFN, RANK = 3, 4, 6, 10, 3


class Adapted(nn.Module):
    """A linear layer that stays as it is, and a product of two thin ones that learns beside it."""

    def __init__(self, size: int, out: int, *, bias: bool) -> None:
        super().__init__()
        self.base = nn.Linear(size, out, bias=bias)
        self.a, self.b = nn.Linear(size, RANK, bias=False), nn.Linear(RANK, out, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + 0.5 * self.b(self.a(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN).requires_grad_(False)
        self.up, self.down = Adapted(HIDDEN, FFN, bias=True), Adapted(FFN, HIDDEN, bias=True)

    def forward(self, x):
        return (x + self.down(torch.tanh(self.up(self.norm(x))))).square().mean()


SPEC = """
mesh tp
input x : [batch, seq, hidden]
param up.base.* : Shard(out) @ tp
param up.b.weight : Shard(out) @ tp
param down.base.weight : Shard(in) @ tp
param down.a.weight : Shard(in) @ tp
"""
SEQUENCE = "value norm : Shard(seq) @ tp\n"


def drawn() -> Block:
    model = Block().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def test_adapters_learn_what_they_learn_on_one_device() -> None:
    model, x = drawn(), torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64, requires_grad=True)
    loss = model(x)
    loss.backward()
    for spec in (SPEC, SPEC + SEQUENCE):
        program = placement.compile(model, placement.simulate(tp=2), spec, example={"x": x})
        mine = x.detach().clone().requires_grad_()
        found = program(x=mine)
        found.backward()
        close(found, loss)
        close(mine.grad, x.grad)
        learned = {name for name, grad in program.full_gradients().items() if grad is not None}
        assert learned == {"up.a.weight", "up.b.weight", "down.a.weight", "down.b.weight"}
        close(program.full_gradients(), gradients(model))


def test_what_is_frozen_is_summed_nowhere_and_costs_no_backward() -> None:
    model, x = drawn(), torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64)
    plan = placement.plan(model, {"tp": 2}, SPEC + SEQUENCE, example={"x": x})
    # Data has no gradient and the norm is frozen: nothing flows back past the first adapter.
    assert {hook.parameter.names[0] for hook in plan.hooks} == {"up.a.weight", "down.b.weight"}
    (gathered,) = (step.conversion for step in plan.steps if step.conversion.forward is Action.ALL_GATHER)
    assert gathered.backward is Action.NONE
