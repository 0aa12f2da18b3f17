"""The literature's tables of activation memory come out of plans, in bytes: one GPT block in bfloat16 with dropout.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", for s tokens, a batch of b, hidden
size h, a heads and t ranks. They leave out what a norm keeps of each row, two numbers of four bytes.
"""

from __future__ import annotations

import functools

import pytest
import torch

import placement
from placement.solver.memory import memory, saved
from tests.memory.gpt_block import Net, spec

KEPT = "lower ** : gathered = kept\n"
SIZES = [(64, 2, 128, 4), (32, 3, 64, 8)]  # s, b, h, a


@functools.cache
def plan(layers, placed, t, s, b, h, a, more=""):
    with torch.device("meta"):
        model = Net(layers, h, a).to(torch.bfloat16).train()
    x = torch.empty(b, s, h, dtype=torch.bfloat16, device="meta").requires_grad_()
    return placement.plan(model, {"tp": t}, spec(placed) + more, example={"x": x})


def per_layer(measure, placed, t, s, b, h, a, more=""):
    """Bytes of one more layer, without the statistics of its two norms."""
    one, two = (measure(plan(layers, placed, t, s, b, h, a, more)) for layers in (1, 2))
    statistics = 2 * 2 * 4 * s * b // (t if "Shard" in placed else 1)
    return two - one - statistics


def rank(plan):
    return memory(plan).rank.saved_bytes


def one_device(plan):
    return memory(plan).one_device.saved_bytes


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("t", [2, 4])
def test_bytes_of_a_layer(t, sizes):
    s, b, h, a = sizes
    sbh, square = s * b * h, 5 * a * s * s * b  # s b h · 5 a s / h
    assert per_layer(one_device, "Replicate", t, *sizes) == 34 * sbh + square
    assert per_layer(rank, "Replicate", t, *sizes) == 10 * sbh + 24 * sbh // t + square // t
    assert per_layer(rank, "Shard(seq)", t, *sizes) == (34 * sbh + square) // t
    # The two inputs that are gathered for products are kept whole if they are not gathered again.
    assert per_layer(rank, "Shard(seq)", t, *sizes, KEPT) == 4 * sbh + 30 * sbh // t + square // t


def test_the_residual_of_a_70b_shape():
    """Tokens 4096, hidden 8192, bfloat16: 64 MB where it is whole, 8 MB on each of eight ranks."""
    sizes = 4096, 1, 8192, 64
    for placed, expected in (("Replicate", 64 << 20), ("Shard(seq)", 8 << 20)):
        found = plan(1, placed, 8, *sizes)
        kept = [item for item in saved(found) if item.node.module == "layers.0.ln_2" and not item.own]
        assert [item.nbytes for item in kept] == [expected]
