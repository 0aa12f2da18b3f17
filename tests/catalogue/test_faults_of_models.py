"""Faults that come from the model: each names the line of the spec, or of the model, and what is so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placement
from placement.report.facts import facts
from placement.report.fold import summed

HEAD = "mesh tp = 2\ninput x : [batch, seq, width]\n"


class Toy(nn.Module):
    """Two layers, one of them called twice, with ``body`` to make of them what a test needs."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body = body
        self.a, self.b, self.same = nn.Linear(8, 8), nn.Linear(8, 4), nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def told(body: Callable[[Any, Tensor], Any], *lines: str):
    return placement.check(HEAD + "\n".join(lines), Toy(body), example={"x": torch.randn(2, 4, 8)})


def branches(m: Any, x: Tensor) -> Tensor:
    hidden = m.a(x)
    return hidden if hidden.sum() > 0 else -hidden


def returns_a_weight(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.a(x), m.a.weight


@pytest.mark.parametrize(
    ("body", "lines", "code", "line", "text"),
    [
        (returns_a_weight, ["param a.weight : Shard(out)"], "PLC301", 3, "output '1' is parameter 'a.weight'"),
        (returns_a_weight, ["output 1 : Shard(0)"], "PLC301", 3, "output '1' is parameter 'a.weight'"),
        (lambda m, x: m.a(m.same(x)), ["value same : Shard(seq)"], "PLC104", 3, "is an input of the model"),
        (lambda m, x: m.a(x), ["value b : Shard(seq)"], "PLC104", 3, "is never called"),
        (
            lambda m, x: (m.a(x).unflatten(-1, (2, 4)).unbind(2)[0], m.a(x).unflatten(-1, (2, 4))),
            ["output 1 : Shard(2)"],
            "PLC204",
            3,
            "an op takes the dim apart into 2 pieces",
        ),
        (branches, [], "PLC401", None, "branches on the values of a tensor"),
    ],
)
def test_a_fault_says_what_is_so(body, lines, code, line, text, capfd) -> None:
    (found,) = told(body, *lines)
    assert (found.code, found.line) == (code, line)
    assert text in found.message
    assert capfd.readouterr() == ("", "")  # torch has pages to say of an export that fails


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (lambda m, x: m.b(m.a(x)[:, 0]), "value a : Shard(seq)"),  # one token is taken of the sequence
        (lambda m, x: m.b(m.a(x)[:, 0]), "value a : Shard(1)"),
        (lambda m, x: m.a(torch.relu(m.a(x))), "value a : Shard(seq)"),  # twice
        (returns_a_weight, "param a.weight : Shard(out)\noutput 1 : Shard(0)"),
    ],
)
def test_what_is_no_fault(body, line) -> None:
    assert told(body, line) == ()


def test_a_cut_sequence_of_which_one_token_is_taken_gives_the_same() -> None:
    model, x = Toy(lambda m, x: m.b(m.a(x)[:, 0])), torch.randn(2, 4, 8)
    spec = HEAD + "value a : Shard(seq)\n"
    compiled = placement.compile(model, placement.simulate(tp=2), spec, example={"x": x})
    assert torch.equal(compiled(x=x), model(x))


def test_a_parameter_has_one_line_even_where_two_agree() -> None:
    (found,) = told(lambda m, x: m.a(x), "param a.weight : Shard(out)", "param *.weight : Shard(out)")
    assert (found.code, found.line) == ("PLC201", 4)
    assert "by two lines: one is enough" in found.message


def test_a_list_of_dims_is_held_against_the_example_before_the_model_is_captured(monkeypatch) -> None:
    monkeypatch.setattr("placement.api.capture", lambda *_: pytest.fail("captured"))
    spec = "mesh tp\ninput x : [batch, seq]\n"
    (found,) = placement.check(spec, Toy(branches), {"tp": 2}, example={"x": torch.randn(2, 4, 8)})
    assert (found.code, found.line, found.column, found.notes) == ("PLC107", 2, 12, ("its shape is [2, 4, 8]",))


def test_names_that_patterns_cannot_spell_are_told_all_the_same() -> None:
    model = nn.Sequential()
    model.add_module("a<b>", nn.LayerNorm(8))
    model.add_module("a<c>", nn.LayerNorm(8))
    spec = "mesh tp = 2\ninput input : [batch, seq, width], Shard(seq)\noutput output : Shard(seq)\n"
    example = {"input": torch.randn(2, 4, 8)}
    plan = placement.plan(model, {"tp": 2}, spec, example=example)
    assert [found.pattern for found in summed(facts(plan))] == ["{a<b>,a<c>}.{weight,bias}"]
    assert "a<b>" in placement.explain(model, {"tp": 2}, spec, example=example)
