"""Which programs give at a longer length, cut to the given one, what they give at that: proven, and tried."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from placement.graph.capture import capture
from placement.graph.ir import Graph
from placement.runtime.lengths import Padded as Runtime
from placement.runtime.lengths import lengthened
from placement.runtime.visible import visible
from placement.solver.lengths import Padded, proven

BATCH, HIDDEN, WORDS, POSITIONS = 2, 4, 6, 9
INFINITY = float("inf")
ATTENTION = F.scaled_dot_product_attention


class Parts(nn.Module):
    """What the expressions below are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(HIDDEN, HIDDEN)
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.table = nn.Embedding(POSITIONS, HIDDEN)
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)
        self.register_buffer("places", torch.arange(POSITIONS)[None])


def attention(x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, mask, **more)


def by_hand(x: Tensor, hidden: Tensor, fill: float = -INFINITY) -> Tensor:
    return (x @ x.transpose(1, 2)).masked_fill(hidden, fill).softmax(-1) @ x


def square(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)


def window(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    return (at[:, None] >= at) & (at[:, None] < at + 2)


def loss(x: Tensor, labels: Tensor, **more: Any) -> Tensor:
    return F.cross_entropy(x.reshape(-1, HIDDEN), labels.reshape(-1), **more)


Expression = Callable[[Parts, Tensor, Tensor, Tensor, Tensor], Tensor]  # of x, ids, labels and a mask: (m, x, i, y, k)
EXACT: dict[str, tuple[Expression, dict[str, float]]] = {
    "positions one by one": (lambda m, x, i, y, k: torch.tanh(m.w(x)) + m.words(i), {}),
    "causal": (lambda m, x, i, y, k: attention(m.w(x), is_causal=True), {}),
    "causal by hand": (lambda m, x, i, y, k: by_hand(m.w(x), ~square(x).tril()), {}),
    "a triangle of scores": (lambda m, x, i, y, k: (m.w(x) @ x.mT).tril() @ x, {}),
    "a window": (lambda m, x, i, y, k: attention(m.w(x), window(x)), {}),
    "a mask of keys": (lambda m, x, i, y, k: attention(m.w(x), k[:, None].bool()), {"mask": 0}),
    "a mask of what is hidden": (lambda m, x, i, y, k: by_hand(m.w(x), k[:, None].bool()), {"mask": 1}),
    "a mask that is added": (
        lambda m, x, i, y, k: attention(m.w(x), torch.zeros(()).double().masked_fill(k[:, None] == 0, -INFINITY)),
        {"mask": 0},
    ),
    "a mean by a mask": (lambda m, x, i, y, k: (m.w(x) * k[..., None]).sum(1) / k.sum(1)[:, None], {"mask": 0}),
    "losses": (lambda m, x, i, y, k: loss(m.w(x), y), {"labels": -100}),
    "a sum of losses": (lambda m, x, i, y, k: loss(m.w(x), y, ignore_index=3, reduction="sum"), {"labels": 3}),
    "losses by a mask": (
        lambda m, x, i, y, k: (loss(m.w(x), i % 4, reduction="none").view_as(k) * k).sum(),
        {"mask": 0},
    ),
    "labels shifted": (lambda m, x, i, y, k: loss(m.w(x)[:, :-1], y[:, 1:]), {"labels": -100}),
    "labels padded": (lambda m, x, i, y, k: loss(m.w(x), F.pad(y, (0, 1), value=-100)[:, 1:]), {"labels": -100}),
    "labels joined": (
        lambda m, x, i, y, k: loss(m.w(x), torch.cat((y[:, 1:], y.new_full((y.shape[0], 1), -100)), 1)),
        {"labels": -100},
    ),
    "sums up to each": (lambda m, x, i, y, k: m.w(x).cumsum(1), {}),
    "neighbours": (lambda m, x, i, y, k: torch.diff(m.w(x), dim=1, prepend=x[:, :1]), {}),
    "the first": (lambda m, x, i, y, k: m.w(x)[:, 0], {}),
    "after a class token": (lambda m, x, i, y, k: attention(torch.cat((m.w(x[:, :1]), x), 1), is_causal=True), {}),
    "shifted to the right": (lambda m, x, i, y, k: m.words(F.pad(i[:, :-1], (1, 0), value=2)), {}),
    "ended with a word": (lambda m, x, i, y, k: m.words(F.pad(i, (0, 1), value=2)), {"ids": 2}),
    "looked up in order": (lambda m, x, i, y, k: m.w(x)[:, torch.arange(x.shape[1])], {}),
    "positions from a table": (lambda m, x, i, y, k: m.table(torch.arange(x.shape[1])) + x, {}),
    "positions counted": (lambda m, x, i, y, k: m.table(torch.ones_like(i).cumsum(1) - 1) + x, {}),
    "part of a table": (lambda m, x, i, y, k: m.table(m.places[:, : x.shape[1]]) + x, {}),
}
REFUSED: dict[str, tuple[Expression, str]] = {
    "a mean": (lambda m, x, i, y, k: m.w(x).mean(1), "'mean' .*looks along all of it"),
    "a sum": (lambda m, x, i, y, k: m.w(x).sum(1), "'sum' .*sums over what is past its end"),
    "a mask of numbers": (
        lambda m, x, i, y, k: by_hand(x, k[:, None] == 0, torch.finfo(x.dtype).min),
        "with no mask that says -inf",
    ),
    "ended with zeros": (lambda m, x, i, y, k: F.pad(m.w(x), (0, 0, 0, 1)), "adds to its end"),
    "the length": (lambda m, x, i, y, k: m.w(x) / x.shape[1], "'div' .*computes with the length as a number"),
    "the last": (lambda m, x, i, y, k: m.w(x)[:, -1], "'select' .*counted from its end"),
    "the last ones": (lambda m, x, i, y, k: m.w(x)[:, -2:], "'slice' .*counted from its end"),
    "backwards": (lambda m, x, i, y, k: m.w(x).flip(1), "'flip' .*looks along all of it"),
    "windows": (lambda m, x, i, y, k: m.conv(x.mT), "'conv1d' .*looks along all of it"),
    "joined twice": (lambda m, x, i, y, k: torch.cat((x, m.w(x)), 1), "'cat' .*adds to its end"),
    "places in data": (lambda m, x, i, y, k: x.gather(1, i[..., None]), "looks up places that may be past its end"),
    "words as labels": (lambda m, x, i, y, k: loss(m.words(i), i), "nothing says that they are -100"),
    "merged": (lambda m, x, i, y, k: m.w(x).flatten(0, 1), "has it merged with another dim"),
}
TOLD: dict[str, tuple[Expression, dict[str, float]]] = {
    "all keys": (lambda m, x, i, y, k: attention(m.w(x)), {}),
    "keys before queries": (
        lambda m, x, i, y, k: F.scaled_dot_product_attention(x, m.w(x)[:, :-1], x[:, :-1], is_causal=True),
        {},
    ),
    "keys with a class token": (
        lambda m, x, i, y, k: F.scaled_dot_product_attention(x, y := torch.cat((x[:, :1], m.w(x)), 1), y),
        {},
    ),
    "a window both ways": (lambda m, x, i, y, k: attention(m.w(x), window(x) | window(x).mT), {}),
    "a mask of anything": (lambda m, x, i, y, k: attention(m.w(x), x[:, None, :, 0] > 0), {}),
    "numbers that are added": (lambda m, x, i, y, k: attention(m.w(x), x[:, None, :, 0]), {}),
    "keys from a place on": (lambda m, x, i, y, k: attention(m.w(x), torch.arange(x.shape[1])[None] >= 4), {}),
    "keys counted by halves": (
        lambda m, x, i, y, k: attention(m.w(x), (torch.full((x.shape[1],), 0.5).cumsum(0) > 0.6)[None]),
        {},
    ),
    "a mask, and none": (
        lambda m, x, i, y, k: attention(attention(m.w(x)), k[:, None].bool()),
        {"mask": 0},
    ),
}


class Many(Parts):
    def forward(self, x: Tensor, ids: Tensor, labels: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {name: f(self, x, ids, labels, mask) for name, (f, _) in (EXACT | REFUSED | TOLD).items()}


def drawn(length: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(length)
    mask = torch.randint(0, 2, (BATCH, length), generator=draw)
    mask[:, 0] = 1
    return {
        "x": torch.randn(BATCH, length, HIDDEN, generator=draw).double(),
        "ids": torch.randint(0, min(WORDS, length), (BATCH, length), generator=draw),
        "labels": torch.randint(0, HIDDEN, (BATCH, length), generator=draw),
        "mask": mask,
    }


DIMS = {"x": ("batch", "seq", "hidden"), **dict.fromkeys(("ids", "labels", "mask"), ("batch", "seq"))}


@functools.cache
def made() -> tuple[Many, Graph]:
    torch.manual_seed(0)
    model = Many().double()
    return model, capture(model, drawn(6), DIMS)


def proof(name: str) -> Padded | str:
    _, graph = made()
    (seq,) = (s.symbol for s in graph.symbols if s.name == "seq")
    outputs = tuple(output for output in graph.outputs if output.name == name)
    needed = {output.value for output in outputs}
    nodes = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.results):
            needed.update(node.operands)
            nodes.append(node)
    return proven(dataclasses.replace(graph, outputs=outputs, nodes=tuple(nodes[::-1])), seq)


def told(spare: int) -> Callable[..., Tensor]:
    """Attention that is told how many of its keys are too many."""

    def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False) -> Tensor:
        seen = visible(q, k, attn_mask=mask, spare=spare, right=0 if is_causal else None)
        return ATTENTION(q, k, v, attn_mask=seen)

    return attended


@pytest.mark.parametrize("name", [*EXACT, *TOLD])
def test_exact(name: str) -> None:
    expression, constants = (EXACT | TOLD)[name]
    found = proof(name)
    assert isinstance(found, Padded), found
    assert found.inputs == constants
    assert bool(found.told) == (name in TOLD)
    model, _ = made()
    runtime = Runtime(found.inputs, found.outputs)
    for given, inside in ((5, 8), (3, 4)):
        example = drawn(given)
        longer = lengthened(example, DIMS, {"seq": runtime}, {"seq": (given, inside)})
        gradients = []
        outputs = []
        for inputs in (example, longer):
            spare = inside - given if inputs is longer and name in TOLD else 0
            with mock.patch.object(F, "scaled_dot_product_attention", told(spare) if spare else ATTENTION):
                out = expression(model, *inputs.values())
            for dim in found.outputs.get(name, ()):
                out = out.narrow(dim, 0, out.shape[dim] - (inside - given if inputs is longer else 0))
            gradients.append(torch.autograd.grad(out.sin().sum(), list(model.parameters()), allow_unused=True))
            outputs.append(out.detach())
        torch.testing.assert_close(outputs[1], outputs[0], equal_nan=True)
        for one, many in zip(*gradients, strict=True):
            torch.testing.assert_close(many, one, equal_nan=True)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    found = proof(name)
    assert isinstance(found, str), found
    assert re.search(REFUSED[name][1], found), found


@pytest.mark.parametrize("name", ["positions from a table", "positions counted", "part of a table"])
def test_tables_bound_the_length(name: str) -> None:
    found = proof(name)
    assert isinstance(found, Padded)
    assert (found.least, found.most) == (1, POSITIONS)
