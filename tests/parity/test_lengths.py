"""Calls whose lengths no axis divides: outputs and gradients are those of one device, or the call is refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import placement
from placement import api
from placement import runtime as rt
from tests.cases import toys
from tests.cases.test_case_axes import run
from tests.cases.toys import close, gradients, whole
from tests.parity import axes, models
from tests.parity.measure import Measured
from tests.runtime.worlds import Pool

LENGTHS = (8, 7, 5, 1, 12)  # through one module


def given(seq: int, *, masked: bool = False) -> dict[str, Tensor]:
    """Four rows, of the first of which hardly a label counts."""
    found = models.inputs(4, seq)
    found["labels"][0, 1:] = -100
    found["labels"][1:, -1] = 7
    if seq == 1:
        found["labels"][:] = 5  # of a decoder none counts, as there is no next token
    if masked:
        found["attention_mask"] = torch.ones_like(found["labels"])
        found["attention_mask"][1, seq // 2 + 1 :] = 0
    return found


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", {"tp": 2}),
        ("gpt2", {"tp": 4}),
        ("qwen3", {"dp": 2, "tp": 2}),
    ],
    ids=str,
)
def test_decoders(family: str, sizes: dict[str, int]) -> None:
    found = Measured()
    model, program = axes.compiled(rt.simulate(**sizes), axes.spec(family, "sp", sizes), family)
    assert "'seq': rt.Padded({'labels': -100}" in program.source
    for seq in LENGTHS:
        inputs = given(seq)
        if seq == 1:
            close(program(**inputs)["logits"], model(**inputs)["logits"], rtol=1e-6)
        else:
            axes.compared(found, model, program, inputs)
    assert found.problems() == []


MASKED = models.spec("bert").replace("input_ids, labels", "input_ids, attention_mask, labels")


def test_an_encoder_with_a_mask() -> None:
    """Keys past the end are hidden by the mask, which is padded with zeros. Dropout draws what one device draws."""
    dropout = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
    model = models.build("bert", num_hidden_layers=1, **dropout)
    program = placement.compile(model, rt.simulate(tp=2), MASKED, example=given(8, masked=True))
    assert "{'attention_mask': 0, 'labels': -100}" in program.source
    found = Measured()
    with rt.same_random(model):
        for seq in (7, 8, 5):
            axes.compared(found, model, program, given(seq, masked=True))
    assert found.problems() == []


def test_an_encoder_without_a_mask() -> None:
    """Its attention is told how many keys there are."""
    model, program = axes.compiled(rt.simulate(tp=2), axes.spec("bert", "sp", {"tp": 2}), "bert", layers=2)
    assert "told='seq_spare'" in program.source
    assert program.source.count("attn_mask=rt.visible(") == 1  # of a class that both layers have
    found = Measured()
    for seq in (7, 8, 5):
        axes.compared(found, model, program, given(seq))
    assert found.problems() == []
    explained = " ".join(program.explain(verbose=True).split())
    assert "seq is cut in 2: a call of another length is padded inside" in explained


def test_positions_that_a_table_does_not_have_are_refused() -> None:
    model = models.build("gpt2", n_layer=1, n_positions=10)
    program = placement.compile(model, rt.simulate(tp=4), models.spec("gpt2"), example=given(8))
    with pytest.raises(rt.SizeError, match=r"seq has size 9, padded to 12, a multiple of 4; it works .* up to 10"):
        program(**given(9))


SHARDED = toys.SP + "output logits : Shard(seq)\n"


@pytest.mark.parametrize("world", ["simulated", pytest.param("gloo", marks=pytest.mark.gloo)])
def test_outputs_in_blocks_are_as_long_as_the_input(world: str, gloo: Pool) -> None:
    run(blocks, world, {"tp": 2}, gloo)


def blocks(mesh: Any) -> None:
    model, program = toys.pair(mesh, SHARDED)
    for seq in (5, 8, 3):
        model.zero_grad()
        program.zero_grad()
        inputs = toys.batch(seq=seq)
        want, got = model(**inputs), program(**inputs)
        if isinstance(got["logits"], DTensor):
            first = -(-seq // 2)
            assert got["logits"].to_local().shape[1] == (first, seq - first)[mesh.get_local_rank("tp")]
        (want["loss"] + want["logits"].square().sum()).backward()
        (got["loss"] + whole(got["logits"].square().sum())).backward()
        close(whole(got["logits"]), want["logits"])
        close(program.full_gradients(), gradients(model))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x))).mean(1).square().sum()


def test_a_mean_over_the_sequence_is_refused() -> None:
    spec = "mesh tp\ninput x : [batch, seq, hidden]\nvalue body : Shard(seq)\n"
    x = torch.randn(2, 8, 4).double().requires_grad_()
    program = placement.compile(Pooled().double(), rt.simulate(tp=2), spec, example={"x": x})
    with pytest.raises(rt.SizeError, match=r"cannot be padded: 'mean' \(test_lengths\.py:\d+\) looks along all of it"):
        program(x=x[:, :5])
    explained = " ".join(program.explain(verbose=True).split())
    assert "seq is cut in 2: a call of another length is refused, as 'mean'" in explained


def test_blocks_that_ranks_are_given_are_refused() -> None:
    spec = toys.SP.replace("[batch, seq]", "[batch, seq], Shard(seq) @ cp").replace("mesh tp", "mesh cp\nmesh tp")
    spec = spec.replace("Shard(out)", "Shard(out) @ tp").replace("Shard(in)", "Shard(in) @ tp")
    spec = spec.replace("} : Shard(seq)\n", "} : Shard(seq) @ cp, Shard(seq) @ tp\n")
    with mock.patch.object(api, "capture", return_value=toys._captured()):
        text = placement.emit(toys.Toy(), {"cp": 2, "tp": 2}, spec, example=toys.batch())
    assert "each rank of 'cp' is given its own block of 'ids'" in text


@pytest.mark.parametrize("backend", ["simulated", pytest.param("gloo", marks=pytest.mark.gloo)])
@pytest.mark.usefixtures("warm_ranks")
def test_verify(backend: str) -> None:
    example = toys.batch(seq=7)
    found = placement.verify(
        toys.drawn(toys.Toy()),
        {"tp": 2},
        toys.SP,
        example=example,
        sizes={"seq": 8},
        steps=2,
        backend=backend,
    )
    assert found.ok, str(found)
    assert found.worst["layers"].compared > 10
