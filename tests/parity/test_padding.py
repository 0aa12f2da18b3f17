"""Vocabularies that an axis does not divide: outputs, gradients, steps and state are those of one device."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import placement
from placement import runtime as rt
from tests.cases.test_case_axes import run
from tests.cases.toys import close, gradients, whole
from tests.runtime.worlds import Pool

HIDDEN, BATCH, SEQ = 6, 2, 4


@dataclasses.dataclass(frozen=True)
class Loss:
    """How the loss is taken of logits and labels."""

    smoothing: float = 0.0
    reduction: str = "mean"
    weighted: bool = False


class Words(nn.Module):
    """A table, a layer and a head over ``vocab`` words, with a bias on the logits that is no parameter."""

    def __init__(self, vocab: int, loss: Loss = Loss(), *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, HIDDEN, padding_idx=1)
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, vocab, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.zeros(1, vocab))
        self.register_buffer("weight", torch.ones(vocab), persistent=False)
        self.loss = loss

    def forward(self, ids, labels):
        logits = torch.tanh(self.head(torch.tanh(self.layer(self.embed(ids)))) / 3.0) + self.shift
        weight = self.weight if self.loss.weighted else None
        loss = F.cross_entropy(
            logits.view(-1, logits.shape[-1]),
            labels.view(-1),
            weight,
            reduction=self.loss.reduction,
            label_smoothing=self.loss.smoothing,
        )
        return {"loss": loss.sum(), "logits": logits}


SPEC = """
mesh tp
input ids, labels : [batch, seq]
param embed.weight : [vocab, hidden], Shard(vocab) @ tp
"""
UNTIED = "param head.* : Shard(out) @ tp\n"


def drawn(vocab: int, *args: Any, **kwargs: Any) -> Words:
    torch.manual_seed(vocab)
    model = Words(vocab, *args, **kwargs).double()
    with torch.no_grad():
        model.shift.normal_()
        model.weight.uniform_(0.5, 2)
    return model


def batch(vocab: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    made = {name: torch.randint(0, vocab, (BATCH, SEQ), generator=draw) for name in ("ids", "labels")}
    made["labels"][0, :3] = -100
    made["ids"][1, 0], made["labels"][1, 0] = vocab - 1, vocab - 1
    return made


def compare(mesh: Any, vocab: int, spec: str, loss: Loss, tied: bool) -> None:
    model, given = drawn(vocab, loss, tied=tied), batch(vocab)
    program = placement.compile(model, mesh, spec, example=given)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.1) for m in (program, model))
    for _ in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        want, got = model(**given), program(**given)
        want["loss"].backward()
        whole(got["loss"]).backward()
        close({name: whole(got[name]) for name in want}, want)
        close(program.full_gradients(), gradients(model))
        norm = placement.clip_grad_norm_(program, 0.1)
        close(norm, torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        ours.step()
        theirs.step()
    full = program.full_state_dict()
    close(full, model.state_dict(), rtol=1e-9)
    again = drawn(vocab, loss, tied=tied)
    again.load_state_dict(full, strict=True)
    program.load_full_state_dict({name: 2 * x for name, x in full.items()})
    close(program.full_state_dict(), {name: 2 * x for name, x in full.items()})


@pytest.mark.parametrize(
    ("sizes", "vocab", "loss", "tied"),
    [
        ({"tp": 2}, 7, Loss(), True),
        ({"tp": 4}, 9, Loss(smoothing=0.1, reduction="sum"), False),
        ({"tp": 4}, 5, Loss(smoothing=0.2), True),  # the last rank has padding alone
        ({"tp": 3}, 7, Loss(reduction="none"), True),
        ({"tp": 2}, 7, Loss(weighted=True), False),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else None,
)
def test_a_padded_vocabulary(sizes: dict[str, int], vocab: int, loss: Loss, tied: bool) -> None:
    run(compare, "simulated", sizes, None, vocab, SPEC + ("" if tied else UNTIED), loss, tied)  # type: ignore[arg-type]


BOTH = """
mesh dp
mesh tp
input ids, labels : [batch, seq], Shard(batch) @ dp
param embed.weight : [vocab, hidden], Shard(vocab) @ tp, stored Shard(vocab) @ dp
"""


@pytest.mark.parametrize("world", ["simulated", pytest.param("gloo", marks=pytest.mark.gloo)])
def test_a_padded_vocabulary_of_which_a_part_is_stored(world: str, gloo: Pool) -> None:
    run(step_of_both, world, {"dp": 2, "tp": 2}, gloo)


def step_of_both(mesh: Any) -> None:
    """On gloo each rank gets its own rows of the batch."""
    model, given = drawn(5, tied=True), batch(5)
    own = given
    if not hasattr(mesh, "sizes"):
        own = {name: x[mesh.get_local_rank("dp")][None] for name, x in given.items()}
    program = placement.compile(model, mesh, BOTH, example=own)
    model(**given)["loss"].backward()
    whole(program(**own)["loss"]).backward()
    close(program.full_gradients(), gradients(model))
    close(program.full_state_dict(), model.state_dict())


def test_logits_are_never_whole_on_a_rank_and_the_padding_is_told() -> None:
    plan = placement.plan(
        drawn(1001), {"tp": 4}, SPEC + "output logits : auto\n", example=batch(1001), sizes={"batch": 64, "seq": 512}
    )
    text = "parameter 'embed.weight' is padded with zeros: 'tp' of 4 does not divide 1001"
    assert text in [note.message for note in plan.bound.notes]
    assert {p.value.shape[0] for p in plan.graph.parameters if 1001 in (p.given or ())} == {1004, 1}
    source = placement.emit(drawn(1001), {"tp": 4}, SPEC, example=batch(1001))
    assert "rows=1001" in source
    assert "given=(1001, 6)" in source


def test_words_past_the_vocabulary_are_refused_as_ever() -> None:
    program = placement.compile(drawn(7), placement.simulate(tp=2), SPEC, example=batch(7))
    with pytest.raises(IndexError, match="index 7 is out of range: there are 7"):
        program(ids=torch.full((BATCH, SEQ), 7), labels=batch(7)["labels"])


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 7), nn.Linear(7, 4)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))).sum()


@pytest.mark.parametrize("line", ["up.weight : Shard(out)", "down.weight : Shard(in)", "up.weight : stored Shard(0)"])
def test_a_hidden_size_is_not_padded(line: str) -> None:
    with pytest.raises(placement.PlacementError, match=r"is 7, which axis 'tp' of 2\s+does\s+not\s+divide"):
        placement.plan(Wide(), {"tp": 2}, f"mesh tp\nparam {line} @ tp\n", example={"x": torch.ones(2, 4)})


class Looked(Words):
    """What needs all words of the logits, and is no loss, gets them cut to their own length."""

    def forward(self, ids, labels):
        out = super().forward(ids, labels)
        soft = out["logits"].softmax(-1)
        return {**out, "loss": out["loss"] + soft.square().mean()}


def test_what_is_done_with_all_words_sees_those_that_there_are() -> None:
    torch.manual_seed(0)
    model, given = Looked(7).double(), batch(7)
    program = placement.compile(model, placement.simulate(tp=2), SPEC, example=given)
    want, got = model(**given), program(**given)
    want["loss"].backward()
    got["loss"].backward()
    close(got, want)
    close(program.full_gradients(), gradients(model))


class Divided(Words):
    """Logits over a number for each word, which the padding would make 0 / 0."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        self.heat = nn.Parameter(torch.rand(vocab) + 0.5)

    def forward(self, ids, labels):
        logits = self.head(self.layer(self.embed(ids))) / self.heat
        return {"loss": F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1)), "logits": logits}


def test_nothing_is_divided_by_the_padding() -> None:
    torch.manual_seed(0)
    result = placement.verify(Divided(7).double(), rt.simulate(tp=2), SPEC, example=batch(7), steps=2)
    assert result.ok, str(result)


class Decayed(Words):
    """The table itself is in the loss: no rank has it whole, so it is not padded."""

    def forward(self, ids, labels):
        out = super().forward(ids, labels)
        return {**out, "loss": out["loss"] + nn.functional.normalize(self.embed.weight, dim=0).sum()}


def test_a_table_that_is_needed_whole_is_refused_with_its_size() -> None:
    with pytest.raises(placement.PlacementError, match=r"is 7, which axis 'tp' of\s+2 does not divide"):
        placement.plan(Decayed(7), {"tp": 2}, SPEC, example=batch(7))


def test_the_shape_of_a_state_dict_is_the_models() -> None:
    program = placement.compile(drawn(7), placement.simulate(tp=2), SPEC, example=batch(7))
    with pytest.raises(rt.StateError, match=r"embed.weight is \[8, 6\], the program has \[7, 6\]"):
        program.load_full_state_dict({"embed.weight": torch.ones(8, 6, dtype=torch.float64)}, strict=False)
    assert math.prod(program.full_state_dict()["embed.weight"].shape) == 42


SHARDED = SPEC + "output logits : Shard(vocab) @ tp\n"


@pytest.mark.parametrize("world", ["simulated", pytest.param("gloo", marks=pytest.mark.gloo)])
def test_logits_come_back_in_blocks_of_their_own_length(world: str, gloo: Pool) -> None:
    run(blocks, world, {"tp": 4}, gloo)


def blocks(mesh: Any) -> None:
    """Five words on four ranks: two, two, one and none."""
    model, given = drawn(5), batch(5)
    program = placement.compile(model, mesh, SHARDED, example=given)
    out = program(**given)
    if isinstance(out["logits"], DTensor):
        assert out["logits"].to_local().shape[-1] == (2, 2, 1, 0)[mesh.get_local_rank("tp")]
    want = model(**given)
    (want["loss"] + want["logits"].square().sum()).backward()
    (out["loss"] + whole(out["logits"].square().sum())).backward()
    close(whole(out["logits"]), want["logits"])
    close(program.full_gradients(), gradients(model))


class Scores(nn.Module):
    """Logits and no loss: ``verify`` then weights every output, of which each rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, HIDDEN), nn.Linear(HIDDEN, 7)

    def forward(self, ids):
        return {"logits": self.head(torch.tanh(self.embed(ids)))}


SCORES = SPEC.replace("ids, labels", "ids") + "param head.* : Shard(out) @ tp\noutput logits : Shard(2) @ tp\n"


@pytest.mark.gloo
@pytest.mark.usefixtures("warm_ranks")
def test_verify_of_logits_alone_in_processes() -> None:
    result = placement.verify(
        Scores().double(), {"tp": 2}, SCORES, example={"ids": batch(7)["ids"]}, backend="gloo", steps=1
    )
    assert result.ok, str(result)
