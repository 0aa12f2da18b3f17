"""A branch on ``training`` that makes eval mode another program is not lost without a word."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import placement
from placement.runtime.errors import StateError

SPEC = "mesh tp\ninput x : [batch, width]\nparam up.weight : Shard(out) @ tp\nparam down.weight : Shard(in) @ tp\n"


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.dropout, self.gradient_checkpointing = 0.5, False

    def forward(self, x):
        return self.down(self.body(self.up(x)))

    def body(self, x):
        return x


class Scales(Base):
    def body(self, x):
        return x * 2 if self.training else x


class ScalesByAConstant(Base):
    def body(self, x):
        return x * (torch.tensor(2.0) if self.training else torch.tensor(3.0))


def scaled(x, training):
    return x * 2 if training else x


class Passes(Base):
    def body(self, x):
        return scaled(x, training=self.training)


class LooksInside(Base):
    def body(self, x):
        return x * 2 if vars(self)["training"] else x


class Dropping(Base):
    def body(self, x):
        x = F.dropout(x, self.dropout, self.training)
        if self.gradient_checkpointing and self.training:
            x = x + 1
        return F.dropout(x, p=0.5, training=self.training)


class Counting(Base):
    def body(self, x):
        if self.training:
            self.seen = True
        return x


class ReturnsMore(Base):
    def forward(self, x):
        y = super().forward(x)
        return {"y": y, "extra": y * 3} if self.training else {"y": y}


def compiled(model):
    return placement.compile(model, placement.simulate(tp=2), SPEC, example={"x": torch.randn(2, 4)})


@pytest.mark.parametrize("kind", [Scales, ScalesByAConstant, Passes, ReturnsMore, LooksInside])
def test_another_program_in_eval_mode_is_refused(kind):
    program = compiled(kind())
    program.train()
    with pytest.raises(StateError, match=r"something else in eval mode \(test_eval_mode.py:\d+\)"):
        program.eval()
    with pytest.raises(placement.PlacementError, match="model is in eval mode"):
        compiled(kind().eval())


@pytest.mark.parametrize("kind", [Dropping, Counting])
def test_the_same_program_but_for_dropout_has_both_modes(kind):
    model = kind().eval()
    program, x = compiled(model), torch.randn(3, 4)
    torch.testing.assert_close(program(x=x), model(x=x))


def test_a_mere_switch_of_dropout_costs_no_second_capture(monkeypatch):
    from placement.graph import capture as module

    calls = []
    export = module._export
    monkeypatch.setattr(module, "_export", lambda *args: calls.append(1) or export(*args))
    for kind, captures in ((Dropping, 1), (Scales, 2)):
        calls.clear()
        compiled(kind())
        assert len(calls) == captures, kind


def test_a_part_in_eval_mode_stays_in_it():
    model = nn.Sequential(Dropping(), Dropping())
    model[0].eval()
    spec = SPEC.replace("input x", "input input").replace("param ", "param *.")
    program = placement.compile(model, placement.simulate(tp=2), spec, example={"input": torch.randn(2, 4)})
    flags = {path: module.training for path, module in program.named_modules() if path.startswith("rank0")}
    assert flags == {f"rank0.{path}".rstrip("."): module.training for path, module in model.named_modules()}
