"""Packed sequences, whose lengths are given once, for the whole batch (C11)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import placement
from tests.cases.toys import close, drawn, gradients, step
from tests.runtime.worlds import Pool, in_worlds, run

WIDTH, SEQ = 8, 24


class Attention(nn.Module):
    """Documents and positions out of where each document starts; rotary by the place in the document."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        documents = torch.searchsorted(starts, at, right=True)
        places = at - starts[documents - 1]
        angles = places[:, None].to(x.dtype) * torch.tensor([1.0, 0.1], dtype=x.dtype)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def rotated(t: Tensor) -> Tensor:
            return t * cos + torch.cat((-t[..., 2:], t[..., :2]), -1) * sin

        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        seen = (documents[:, None] == documents[None]) & (at[:, None] >= at[None])
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, attn_mask=seen)
        return self.out(y.transpose(1, 2).flatten(2))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor, starts: Tensor) -> dict[str, Tensor]:
        y = self.attention(x, starts)
        return {"loss": (y * torch.arange(1, x.shape[1] + 1)[:, None]).square().mean(), "y": y}


SPEC = """
mesh tp
input x : [batch, seq, width]
value attention : Shard(seq{order}) @ tp
strategy attention : {way} @ tp
"""


def packed(mesh: Any, n: int, way: str) -> None:
    """Rank 1 starts inside a document; one document is longer than a rank's share, one has a single token."""
    model = drawn(Packed())
    for order in ("", ", zigzag"):
        x = torch.randn(2, SEQ, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        given = {"x": x.requires_grad_()}
        given["starts"] = torch.tensor([0, 4, 5, 20])
        program = placement.compile(model, mesh, SPEC.format(order=order, way=way), example=given)
        for starts in ([0, 4, 5, 20], [0, 1, 11, 13], [0, 12, 24, 24]):  # the last: a document for each of two ranks
            given["starts"] = torch.tensor(starts)
            model.zero_grad()
            program.zero_grad()
            one, many = (x.detach().clone().requires_grad_() for _ in range(2))
            want, got = (step(m, x=x, starts=given["starts"]) for m, x in ((model, one), (program, many)))
            close(dict(got), want)
            close(many.grad, one.grad)
            close(program.full_gradients(), gradients(model))


@in_worlds
@pytest.mark.parametrize("way", ["gather", "all_to_all", "ring"])
def test_C11_lengths_given_once(world: str, n: int, way: str, gloo: Pool) -> None:
    if way != "all_to_all" or n == 2:
        run(packed, world, n, gloo, way)
