"""Masks put together at random mean to attention what they say, whatever of them is read."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import placement
from tests.cases.toys import close

BATCH, HEADS, WIDTH = 2, 2, 4
Part = Callable[[int, Tensor, Tensor], Tensor]  # of the length, documents and what is kept


def at(s: int, *, offset: int = 0, step: int = 1) -> Tensor:
    return torch.arange(offset, offset + step * s, step)


PARTS: list[Part] = [
    lambda s, d, k: at(s)[:, None] >= at(s),
    lambda s, d, k: at(s)[None] > at(s).unsqueeze(-1),
    lambda s, d, k: at(s)[:, None] - at(s) < 3,
    lambda s, d, k: (at(s)[:, None] - at(s)).abs() <= 2,
    lambda s, d, k: (at(s)[:, None] - at(s)).abs() > 1,
    lambda s, d, k: 2 * at(s)[:, None] >= at(s, step=2) - 3,
    lambda s, d, k: at(s, step=2)[:, None] >= at(s),
    lambda s, d, k: at(s + 3)[2 : s + 2, None] >= at(s),
    lambda s, d, k: at(2 * s)[::2][:, None] != at(s, step=2),
    lambda s, d, k: (4 - at(s))[:, None] <= at(s),
    lambda s, d, k: at(s).flip(0)[:, None] >= at(s),
    lambda s, d, k: at(s)[1:2, None] <= at(s),
    lambda s, d, k: torch.ones(s, s, dtype=torch.bool).tril(1),
    lambda s, d, k: torch.ones(1, s, dtype=torch.bool).triu(1).expand(s, s),
    lambda s, d, k: torch.full((s, s), True).triu(-2).transpose(0, 1),
    lambda s, d, k: d[:, None, :, None] == d[:, None, None],
    lambda s, d, k: d[:, None, :, None] > d[:, None, None] - 1,
    lambda s, d, k: d[:, None, None] != 1,
    lambda s, d, k: d[:, :, None].le(d[:, None])[:, None],
    lambda s, d, k: d[:1, :, None] == d[:1, None],
    lambda s, d, k: (at(s) // 2)[:, None] == at(s) // 2,
    lambda s, d, k: (at(s) % 3)[:, None] < at(s) % 2,
    lambda s, d, k: k[:, None, None],
    lambda s, d, k: k[:, None, :, None],
    lambda s, d, k: k[torch.arange(k.shape[0])[:, None, None, None], at(s)[None, None, None]],
    lambda s, d, k: d[0, at(s)][:, None] >= d[1, at(s)],
    lambda s, d, k: torch.ones(s, dtype=torch.int64).cumsum(0)[:, None] > at(s),
    lambda s, d, k: (d * 2**32)[:, None, :, None].int() >= (d * 2**32)[:, None, None].int() + 1,
    lambda s, d, k: at(s).int()[:, None] + (2**31 - 5) >= at(s).int(),
    lambda s, d, k: (-3 * at(s) + 4)[:, None] <= 1 - at(s) * 2,
    lambda s, d, k: at(2 * s).unfold(0, 1, 1)[:s] <= at(2 * s).narrow(0, 1, s),
    lambda s, d, k: d[1] <= d[1].view(-1, 1),
    lambda s, d, k: d.flip(0)[:, None, :, None] >= d.select(0, -1),
    lambda s, d, k: torch.ones(s, s).triu(-1) - torch.ones(s, s).tril(-1) != 0,
    lambda s, d, k: (d > 0).int()[:, None, :, None] == (d > 0).int()[:, None, None],
    lambda s, d, k: (k.double()[:, None, None] - 1).bool(),
    lambda s, d, k: torch.where(k[:, None, None], at(s)[:, None] >= at(s), d[:, None, None] > 1),
    lambda s, d, k: k[:, None, :, None] == k[:, None, None],
    lambda s, d, k: (at(s)[:, None] >= at(s)).masked_fill(k[:, None, None], True),
]
REARRANGED: list[Callable[[Tensor], Tensor]] = [
    lambda m: m.mT,
    lambda m: m.movedim(-1, -2),
    lambda m: m.flip(-1),
    lambda m: m.flip(-1).flip(-1),
    lambda m: m.unsqueeze(0).squeeze(0),
    lambda m: m.flatten().view(m.shape),
    lambda m: m.expand(3, *m.shape)[1],
    lambda m: m.repeat(3, *[1] * m.ndim).select(0, 2),
    lambda m: m.unsqueeze(-1).repeat_interleave(2, -1).narrow(-1, 1, 1).squeeze(-1),
    lambda m: m[..., :1, :].expand(m.shape),
    lambda m: m.reshape((*m.shape[:-1], 1, -1)).transpose(-1, -2)[..., 0],
]
LEAST = torch.finfo(torch.float64).min
FORMS: list[Callable[[Tensor], Tensor]] = [  # what is passed on of a truth
    lambda m: m,
    lambda m: torch.where(m, 0.0, -torch.inf).double(),
    lambda m: torch.zeros(m.shape, dtype=torch.float64).masked_fill(~m, -torch.inf),
    lambda m: torch.zeros(m.shape, dtype=torch.float64).masked_fill(m.logical_not(), LEAST),
    lambda m: (1 - m.double()) * LEAST,
    lambda m: m.double().log() + torch.zeros(m.shape[-1], dtype=torch.float64),
    lambda m: torch.where(m, 1.0, -1e30).double() - 1,
    lambda m: m.double().clamp(max=0.5) * 2,
    lambda m: torch.full(m.shape, -torch.inf, dtype=torch.float64).triu(1).masked_fill(m, 0),
    lambda m: (m.double() == 0) ^ m.new_ones(m.shape),
]


class Drawn(nn.Module):
    """Attention with a mask of one to three parts, some of them turned around, as truths or as numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.parts = [
            (draw.choice(PARTS), draw.random() < 0.3, draw.choice(("and", "and", "and", "in place", "or")))
            for _ in range(draw.choice((1, 2, 3)))
        ]
        self.last = [draw.choice(REARRANGED)] if draw.random() < 0.3 else []
        self.last += [draw.choice(FORMS)] if draw.random() < 0.6 else []
        self.up = nn.Linear(WIDTH, HEADS * WIDTH)

    def forward(self, x: Tensor, documents: Tensor, kept: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        for part, negative, how in self.parts:
            made = part(x.shape[1], documents, kept)
            made = ~made if negative else made
            if how == "in place" and made.ndim == mask.ndim:
                mask &= made
            else:
                mask = mask | made if how == "or" else mask & made
        for change in self.last:
            mask = change(mask)
        heads = self.up(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads.flip(-1), heads, attn_mask=mask)


def inputs(seq: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seq)
    return {
        "x": torch.randn(BATCH, seq, WIDTH, generator=draw, dtype=torch.float64),
        "documents": torch.randint(0, 3, (BATCH, seq), generator=draw),
        "kept": torch.rand(BATCH, seq, generator=draw) > 0.3,
    }


@pytest.mark.parametrize("part", PARTS)
def test_each_alone(part: Part) -> None:
    model = Drawn(0).double()
    model.parts, model.last = [(part, False, "and")], []
    spec = "mesh tp\ninput x : [batch, seq, width]\ninput documents, kept : [batch, seq]\n"
    program = placement.compile(model, placement.simulate(tp=1), spec, example=inputs(6))
    close(program(**inputs(8)), model(**inputs(8)))


@pytest.mark.parametrize("change", [*REARRANGED, *FORMS])
def test_each_change_alone(change: Callable[[Tensor], Tensor]) -> None:
    """Of a mask by which the first query sees nothing, and of one by which all see themselves."""
    for part in PARTS[1::-1]:
        model = Drawn(0).double()
        model.parts, model.last = [(part, False, "and")], [change]
        spec = "mesh tp\ninput x : [batch, seq, width]\ninput documents, kept : [batch, seq]\n"
        program = placement.compile(model, placement.simulate(tp=1), spec, example=inputs(6))
        close(program(**inputs(8)), model(**inputs(8)))


@pytest.mark.parametrize("start", range(0, 80, 20))
def test_what_is_read_is_what_is_said(start: int) -> None:
    """At the captured length, which may be that of the batch, and at another."""
    read = 0
    for seed in range(start, start + 20):
        model = Drawn(seed).double()
        seq = (2, 5, 6)[seed % 3]
        spec = "mesh tp\ninput x : [batch, seq, width]\ninput documents, kept : [batch, seq]\n"
        program = placement.compile(model, placement.simulate(tp=1), spec, example=inputs(seq))
        read += "rt.visible" in program.source
        for length in (seq, 7):
            close(program(**inputs(length)), model(**inputs(length)))
    assert read
