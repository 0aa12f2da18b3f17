"""Unmodified transformers models on meshes of several axes equal one device, in float64.

Data parallelism beside tensor and sequence parallelism; a sequence on two axes; axes of one rank. Labels that count
are spread unequally over the batch, so that a mean of the ranks' means would be another number.
"""

from __future__ import annotations

import math

import pytest

import placement
from placement import runtime as rt
from tests.parity import axes, models
from tests.runtime.worlds import Pool

# family, mode, axes by size (outermost first), and whether the model is given embeddings, which have a gradient
CASES = [
    ("qwen3", "sp", {"dp": 2, "tp": 2}, False),
    ("qwen3", "tp", {"dp": 2, "tp": 2}, True),
    ("qwen3", "sp", {"dp": 1, "tp": 2}, False),
    ("qwen3", "sp", {"dp": 2, "tp": 1}, False),
    ("llama", "sp", {"tp": 2, "dp": 2}, True),
    ("llama", "tp", {"dp": 2, "tp": 2}, False),
    ("gpt2", "sp", {"dp": 2, "tp": 2}, False),
    ("bert", "sp", {"dp": 2, "tp": 2}, False),
    ("llama", "sp", {"dp": 2, "cp": 1, "tp": 2}, False),
    ("llama", "sp", {"dp": 1, "cp": 2, "tp": 2}, False),
]
# The same in processes: what a rank has of outputs and inputs, and groups of axes.
GLOO = [("qwen3", "sp", {"dp": 2, "tp": 2}, True)]


def named(case: tuple[str, str, dict[str, int], bool]) -> str:
    family, mode, sizes, embeds = case
    mesh = "-".join(f"{axis}{n}" for axis, n in sizes.items())
    return f"{family}-{mode}-{mesh}{'-embeds' if embeds else ''}"


@pytest.mark.parametrize("case", CASES, ids=map(named, CASES))
def test_simulated(case: tuple[str, str, dict[str, int], bool]) -> None:
    family, mode, sizes, embeds = case
    layers = 2 if case is CASES[0] else 1  # what joins two layers is alike in all
    found = axes.measured(rt.simulate(**sizes), family, mode, sizes, embeds=embeds, layers=layers)
    assert found.problems() == []


@pytest.mark.gloo
@pytest.mark.parametrize("case", GLOO, ids=map(named, GLOO))
def test_processes(case: tuple[str, str, dict[str, int], bool], gloo: Pool) -> None:
    family, mode, sizes, embeds = case
    for measured in gloo(math.prod(sizes.values())).run(axes.on_gloo, family, mode, sizes, embeds):
        assert measured.problems() == []


DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


@pytest.mark.parametrize(
    ("sizes", "backend"),
    [
        ({"dp": 2, "tp": 2}, "simulated"),
        ({"tp": 2, "dp": 2}, "simulated"),
        pytest.param({"dp": 2, "tp": 2}, "gloo", marks=pytest.mark.gloo),
    ],
    ids=["dp-tp", "tp-dp", "gloo"],
)
@pytest.mark.usefixtures("warm_ranks")
def test_dropout_draws_what_one_device_draws(sizes: dict[str, int], backend: str) -> None:
    """Masks of the batch's and the sequence's blocks on two axes, of residuals, embeddings and probabilities."""
    text = axes.spec("gpt2", "sp", sizes).replace("Shard(seq) @ tp", "Shard(seq) @ tp, Shard(batch) @ dp")
    model = models.build("gpt2", n_layer=1, **DROPOUT)
    found = placement.verify(model, rt.simulate(**sizes), text, example=axes.inputs(batch=4, seq=8), backend=backend)
    assert found.failures == (), str(found)
    assert any("the same masks on both sides" in note for note in found.notes)
