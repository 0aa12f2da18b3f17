"""Sizes, layouts, dtypes, counts and names (C16, C18, C22, C23, C27, C28)."""

from __future__ import annotations

import functools
import json
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import placement
from placement import api
from placement import runtime as rt
from placement.graph.capture import capture
from placement.graph.ir import Graph
from placement.graph.precision import lifted
from tests.cases import toys
from tests.cases.toys import BATCH, HIDDEN, SEQ, close, gradients, step, whole
from tests.parity import models
from tests.runtime.worlds import Pool, in_worlds, run


def few_heads(mesh: Any, n: int, kv_heads: int) -> None:
    model = models.build("llama", num_key_value_heads=kv_heads, num_hidden_layers=1)
    with lifted(torch.float64):
        program = placement.compile(model, mesh, models.spec("llama"), example=models.inputs())
        model(**models.inputs())["loss"].backward()
    whole(program(**models.inputs())["loss"]).backward()
    close(program.full_gradients(), gradients(model))
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "kv"]
    assert {h.parameter.name for h in program.plan.hooks} >= set(names)
    notes = [note.message for note in program.plan.bound.notes]
    assert all(any(name in note and "stays replicated" in note for note in notes) for name in names)
    assert "stays replicated" in " ".join(program.explain().split())


@pytest.mark.parametrize(
    ("world", "n", "kv_heads"),
    [("simulated", 2, 1), ("simulated", 4, 2), pytest.param("gloo", 2, 1, marks=pytest.mark.gloo)],
)
def test_C16_more_ranks_than_key_heads(world: str, n: int, kv_heads: int, gloo: Pool) -> None:
    """Fewer key and value heads than ranks: the forward dies in a view, deep inside of the model."""
    run(few_heads, world, n, gloo, kv_heads)


def other_lengths(mesh: Any, n: int) -> None:
    model, program = toys.pair(mesh, toys.SP)
    for seq in (n, 5, 3 * n, 2 * n + 1, 5 * n):
        model.zero_grad()
        program.zero_grad()
        want, got = step(model, **toys.batch(seq=seq)), step(program, **toys.batch(seq=seq))
        close({name: whole(got[name]) for name in want}, want)
        close(program.full_gradients(), gradients(model))


@in_worlds
def test_C18_a_length_that_the_axis_does_not_divide(world: str, n: int, gloo: Pool) -> None:
    """A module compiled at one length and called at another: wrong shapes somewhere inside, and no message."""
    run(other_lengths, world, n, gloo)


@pytest.mark.parametrize("n", [2, 4])
def test_C18_an_example_that_the_axis_does_not_divide(n: int) -> None:
    with pytest.raises(placement.PlacementError) as caught:
        placement.compile(toys.Toy(), rt.simulate(tp=n), toys.SP, example=toys.batch(seq=5))
    (fault, *_) = caught.value.diagnostics
    assert all(word in fault.message for word in ("seq", "5", "'tp'", f"{n}"))


# -- C22 -------------------------------------------------------------------------------------------

SMALL = 2.0**-9
TERMS = torch.tensor([1.0, SMALL, SMALL, SMALL])
IN_FLOAT32, IN_BFLOAT16 = 1.0078125, 1.0  # their sum, as bfloat16 has it, after one rounding and after three


class Sums(nn.Module):
    """Three values, each of which some rank has one of the four terms of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.LayerNorm(4, bias=False)  # for its weight alone
        self.scale.forward = lambda x: x * self.scale.weight
        self.up, self.down = (nn.Linear(4, 4, bias=False) for _ in range(2))
        with torch.no_grad():
            self.scale.weight.fill_(1)
            self.up.weight.copy_(TERMS[:, None].expand(4, 4))
            self.down.weight.copy_(TERMS.expand(4, 4))

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> dict[str, Tensor]:
        out = self.down(y)
        return {"loss": self.scale(x).sum() + self.up(z).sum() + out.sum(), "out": out}


SUMS = """
mesh tp
input x, y, z : [batch, seq, hidden]
param up.weight : Shard(out)
param down.weight : Shard(in)
value scale : Shard(seq)
value down : PLACEMENT
"""


@pytest.mark.parametrize("placed", ["Replicate", "Shard(seq)"])
@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, IN_FLOAT32), (None, IN_BFLOAT16)])
def test_C22_every_reduction_obeys(placed: str, dtype: torch.dtype | None, expected: float) -> None:
    """One of several reductions ignores the dtype asked for: gradient hooks, or those of the forward."""
    model = Sums().bfloat16()
    ones = torch.ones(1, 4, 4, dtype=torch.bfloat16)
    given = {"x": TERMS[None, :, None].expand(1, 4, 4).bfloat16(), "y": ones, "z": ones.clone().requires_grad_()}
    spec = SUMS.replace("PLACEMENT", placed)
    program = placement.compile(model, rt.simulate(tp=4), spec, example=given, reduce_dtype=dtype)
    with rt.record() as log:
        out = program(**given)
        out["loss"].backward()
    assert out["out"].unique().tolist() == [expected]  # down: an all-reduce or a reduce-scatter
    assert given["z"].grad.unique().tolist() == [expected]  # up: the backward of I -> R
    assert program.full_gradients()["scale.weight"].unique().tolist() == [expected]  # a hook
    said = Counter((x.phase, x.action.value, x.nbytes) for x in program.plan.launches())
    assert Counter((e.phase, e.kind, e.bytes) for e in log) == said


FLOAT32, BFLOAT16 = IN_FLOAT32, IN_BFLOAT16


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("lower ** : reduce = float32", (FLOAT32, FLOAT32, FLOAT32)),
        ("lower down : reduce = float32", (FLOAT32, BFLOAT16, BFLOAT16)),
        ("lower up : reduce = float32", (BFLOAT16, FLOAT32, BFLOAT16)),
        ("lower scale : reduce = float32", (BFLOAT16, BFLOAT16, FLOAT32)),
    ],
    ids=["all", "forward", "backward", "hook"],
)
def test_C22_by_module(lines: str, expected: tuple[float, float, float]) -> None:
    """A line for a module holds for sums of what it makes, of gradients that it gives, and of its parameters' ones."""
    model = Sums().bfloat16()
    ones = torch.ones(1, 4, 4, dtype=torch.bfloat16)
    given = {"x": TERMS[None, :, None].expand(1, 4, 4).bfloat16(), "y": ones, "z": ones.clone().requires_grad_()}
    spec = SUMS.replace("PLACEMENT", "Shard(seq)") + lines
    program = placement.compile(model, rt.simulate(tp=4), spec, example=given)
    with rt.record() as log:
        out = program(**given)
        out["loss"].backward()
    found = out["out"], given["z"].grad, program.full_gradients()["scale.weight"]
    assert [x.unique().tolist() for x in found] == [[one] for one in expected]
    said = Counter((x.phase, x.action.value, x.nbytes) for x in program.plan.launches())
    assert Counter((e.phase, e.kind, e.bytes) for e in log) == said
    assert ("its gradient" in program.explain()) is (expected[0] == FLOAT32)  # a scatter and a gather of unlike sizes
    assert "'tp_float32': ('tp', torch.float32)" in program.source


class Within(nn.Module):
    """Sums inside ops: statistics of a norm, and a loss over classes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2048, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


WITHIN = """
mesh tp
input x : [batch, seq, hidden]
input labels : [batch, seq]
param norm.{weight,bias} : Shard(0)
param head.weight : Shard(out)
lower ** : reduce = DTYPE
"""


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_C22_inside_ops(dtype: str) -> None:
    given = {"x": torch.randn(1, 64, 4, requires_grad=True), "labels": torch.randint(2048, (1, 64))}
    program = placement.compile(Within(), rt.simulate(tp=2), WITHIN.replace("DTYPE", dtype), example=given)
    with rt.record() as log:
        program(**given).backward()
    said = Counter((x.phase, x.action.value, x.nbytes) for x in program.plan.launches())
    assert Counter((e.phase, e.kind, e.bytes) for e in log) == said
    size = getattr(torch, dtype).itemsize
    # A number for each token in the mean and the variance, each way; the maximum, as it is; two numbers in the loss.
    sums = (
        [("forward", 64 * size)] * 2 + [("backward", 64 * size)] * 2 + [("forward", 64 * 4), ("forward", 2 * 64 * size)]
    )
    reduced = Counter((phase, nbytes) for phase, action, nbytes in said.elements() if action == "all_reduce")
    assert all(reduced[one] == count for one, count in Counter(sums).items())
    assert f", self.tp_{dtype}, 1, self.weight, self.bias" in program.source


class TiedTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def test_a_tied_parameter_has_one_dtype_of_sums() -> None:
    lines = (
        "mesh tp\ninput ids : [batch, seq], Shard(seq)\noutput output : Shard(seq)\nlower embed : reduce = float32\n"
    )
    given = {"ids": torch.zeros(1, 2, dtype=torch.long)}
    plan = placement.plan(TiedTables(), {"tp": 2}, lines, example=given)
    assert [hook.reduce for hook in plan.hooks] == [torch.float32]
    plan = placement.plan(TiedTables(), {"tp": 2}, lines.replace("embed", "head"), example=given)
    assert [hook.reduce for hook in plan.hooks] == [torch.float32]
    with pytest.raises(placement.PlacementError) as caught:
        placement.plan(TiedTables(), {"tp": 2}, lines + "lower head : reduce = float64\n", example=given)
    (fault,) = caught.value.diagnostics
    assert (fault.code, fault.line) == ("PLC304", 5)
    assert "'embed.weight' and 'head.weight' are one parameter" in fault.notes[0]


# -- C23 -------------------------------------------------------------------------------------------


class View(nn.Module):
    """Strides that a collective is easily wrong with."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "transposed":
            return x.transpose(1, 2)
        if self.kind == "sliced":
            return x[1:]
        return x.unsqueeze(1).expand(-1, 2, -1, -1)


class Tail(nn.Module):
    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        return x * like


class Strided(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.row, self.view, self.tail = nn.Linear(HIDDEN, 2 * SEQ, bias=False), View(kind), Tail()
        self.like = nn.Parameter(torch.empty(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.tail(self.view(self.row(torch.tanh(x))), self.like)
        back = out.transpose(-1, -2)  # so that the gradient comes back transposed, and of the sum expanded
        return {"loss": (back.contiguous().sin() * 3).sum() + out.sum(), "out": out}


STRIDED = """
mesh tp
input x : [batch, seq, hidden]
param row.weight : [out, in], Shard(in)
value view : BEFORE
value tail : AFTER
output out : auto
"""


@functools.cache
def captured_strided(kind: str) -> Graph:
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64, requires_grad=True)
    return capture(toys.drawn(Strided(kind)), {"x": x}, {"x": ("batch", "seq", "hidden")})


def strided(mesh: Any, n: int, kind: str) -> None:
    model = toys.drawn(Strided(kind))
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64, requires_grad=True)
    moved: set[tuple[str, str]] = set()
    for before in ("Partial", "Replicate", "Shard(seq)", "Shard(out)"):
        for after in ("Replicate", "Shard(seq)", "Shard(out)"):
            spec = STRIDED.replace("BEFORE", before).replace("AFTER", after)
            with mock.patch.object(api, "capture", return_value=captured_strided(kind)):  # one graph for all specs
                program = placement.compile(model, mesh, spec, example={"x": x})
            model.zero_grad()
            one, many = (x.detach().clone().requires_grad_() for _ in range(2))
            want, got = step(model, x=one), step(program, x=many)
            assert torch.equal(many, x), "an input was written"
            close({name: whole(got[name]) for name in want}, want)
            close(many.grad, one.grad)
            close(program.full_gradients(), gradients(model))
            moved |= {(s.conversion.forward.value, s.conversion.backward.value) for s in program.plan.steps}
    assert {way for ways in moved for way in ways} >= {"all_reduce", "reduce_scatter", "all_gather", "all_to_all"}


@pytest.mark.parametrize("world", ["simulated", pytest.param("gloo", marks=pytest.mark.gloo)])
@pytest.mark.parametrize("kind", ["transposed", "sliced", "expanded"])
def test_C23_strides(world: str, kind: str, gloo: Pool) -> None:
    """A backend reads a view's memory as if it were dense, reduces the wrong numbers and overwrites the neighbours."""
    run(strided, world, 2, gloo, kind)


# -- C27 -------------------------------------------------------------------------------------------


def counts(layers: int, mode: str) -> tuple[Counter[Any], Counter[Any], set[str]]:
    """By pass and action: what is planned and what is run; and where per-head norms convert."""
    model = models.build("qwen3", torch.float32, num_hidden_layers=layers)
    given = models.inputs()
    program = placement.compile(model, rt.simulate(tp=2), models.spec("qwen3", mode), example=given)
    with rt.record() as log:
        program(**given)["loss"].backward()
    made = {v: node.module for node in program.plan.graph.nodes for v in node.results}
    moved = {made.get(s.value, "") for s in program.plan.steps if s.conversion.forward.communicates}
    planned = Counter((x.phase, x.action.value) for x in program.plan.launches())
    return planned, Counter((e.phase, e.kind) for e in log), moved


@pytest.mark.parametrize(
    ("mode", "forward", "backward"),
    [
        ("tp", {"all_reduce": 2}, {"all_reduce": 2}),
        ("sp", {"all_gather": 2, "reduce_scatter": 2}, {"all_gather": 2, "reduce_scatter": 2}),
    ],
)
def test_C27_collectives_of_a_layer(mode: str, forward: dict[str, int], backward: dict[str, int]) -> None:
    """Queries, keys and values are reduced one by one, and gathered before the norms of their heads."""
    few, many = counts(1, mode), counts(3, mode)
    for index in (0, 1):
        layer = {key: (count - few[index][key]) / 2 for key, count in many[index].items() if count != few[index][key]}
        again = layer.get(("backward", "all_gather"), 0) - backward.get("all_gather", 0)
        assert 0 <= again <= (2 if mode == "sp" else 0)
        if again:
            layer["backward", "all_gather"] -= again
        expected = {("forward", k): v for k, v in forward.items()} | {("backward", k): v for k, v in backward.items()}
        assert layer == expected
    assert not any("q_norm" in module or "k_norm" in module for module in many[2])


# -- C28 -------------------------------------------------------------------------------------------


def faults(extra: str) -> tuple[placement.Diagnostic, ...]:
    found = placement.check(toys.WEIGHTS + extra, toys.Toy(), rt.simulate(tp=2), example=toys.batch())
    with pytest.raises(placement.PlacementError) as caught:
        placement.compile(toys.Toy(), rt.simulate(tp=2), toys.WEIGHTS + extra, example=toys.batch())
    assert [d.message for d in caught.value.diagnostics] == [d.message for d in found]
    return found


def test_C28_a_path_that_matches_nothing() -> None:
    """A pattern with a slip places nothing: a warning at best, and the weights stay whole."""
    extra = (
        "param blocks.*.mlp.downs.weight : Shard(in)\nparam nowhere.at.all : Shard(0)\nvalue blocks.*.norm3 : Replicate"
    )
    found = faults(extra)
    lines = toys.WEIGHTS.count("\n")
    assert [(d.code, d.line) for d in found] == [("PLC104", lines + 1), ("PLC104", lines + 2), ("PLC104", lines + 3)]
    assert "blocks.*.mlp.down.weight" in str(found[0].hint)
    assert "norm" in str(found[2].hint)


TWO_NAMES = "param head.weight : [vocab, hidden], Shard(vocab)\nparam embed.weight : Replicate"  # of one parameter


@pytest.mark.parametrize(
    "other", ["param blocks.0.mlp.down.weight : Shard(in)", "param **.down.weight : Replicate", TWO_NAMES]
)
def test_C28_a_parameter_of_two_statements(other: str) -> None:
    """Two lines speak of one parameter and the later one wins, or the earlier."""
    (fault,) = faults(other)
    assert fault.code == "PLC201"
    assert any("line" in note or ":" in note for note in fault.notes)


def test_C28_every_parameters_placement_in_one_call() -> None:
    model = toys.Toy()
    text = placement.explain(model, rt.simulate(tp=2), toys.SP, example=toys.batch(), format="json")
    params = json.loads(text)["params"]
    assert set(params) == {name for name, _ in model.named_parameters()}
    assert params["blocks.0.mlp.down.weight"]["tp"].startswith("Shard(")
    assert params["blocks.0.mlp.down.bias"] == params["norm.weight"] == {"tp": "Replicate"}
