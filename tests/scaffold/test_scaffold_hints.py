"""What diagnostics about a model propose: near paths, sizes that would do, rules to start from, edits that plan."""

from __future__ import annotations

import pytest
import scaffold_models as toys
import torch

import placement
from placement.graph.capture import capture
from placement.graph.factors import infer
from placement.lang import parser
from placement.propose import mended
from placement.rules import signature_of
from placement.rules.skeleton import without_rules
from placement.solver.bind import bind
from placement.solver.build import plan
from placement.solver.nearest import divisors, multiples, nearest

LAYER = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "input_layernorm")
PARAMETERS = [f"model.layers.{i}.{name}.weight" for i in range(3) for name in LAYER]
PARAMETERS += ["model.embed_tokens.weight", "lm_head.weight"]
MODULES = sorted({name.rsplit(".", depth)[0] for name in PARAMETERS for depth in range(1, name.count(".") + 1)})


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("model.layer.*.mlp.up_proj.weight", "'model.layers.*.mlp.up_proj.weight'"),
        ("model.layers.self_attn.q_proj.weight", "'model.layers.*.self_attn.q_proj.weight'"),
        ("layers.*.self_attn.q_proj.weight", "'model.layers.*.self_attn.q_proj.weight'"),
        ("model.layers.*.q_proj.weight", "'model.layers.*.self_attn.q_proj.weight'"),
        ("model.layers.*.attn.q_proj.weight", "'model.layers.*.self_attn.q_proj.weight'"),
        ("model.layers.*.self_attn.{q,k}proj.weight", "'model.layers.*.self_attn.q_proj.weight'"),
        ("model.Layers.*.mlp.up_proj.weight", "'model.layers.*.mlp.up_proj.weight'"),
        ("model.layers.[4-7].mlp.up_proj.weight", "'model.layers.[0-2].mlp.up_proj.weight'"),
        ("model.layers.**.mlp.up.weight", "'model.layers.**.mlp.up_proj.weight'"),
        ("lm_heads.weight", "'lm_head.weight'"),
        ("lm_head", "a param line names a parameter: lm_head.weight"),
        ("model.layers.*.mlp", "a param line names a parameter: model.layers.*.mlp.up_proj.weight"),
        ("transformer.h.*.attn.c_attn.bias", "begin with 'model' or 'lm_head'"),
    ],
)
def test_a_param_pattern_that_matches_nothing(pattern: str, hint: str) -> None:
    assert hint in (nearest(pattern, PARAMETERS, {"value": MODULES}) or "")


def test_a_value_pattern_that_matches_parameters() -> None:
    hint = nearest("model.layers.*.input_layernorm.weight", MODULES, {"param": PARAMETERS})
    assert hint == "it matches a parameter; a value line names a module: model.layers.*.input_layernorm"


def test_sizes_and_ranks_that_would_do() -> None:
    assert (multiples(97, 4), multiples(3, 4), multiples(8, 4)) == ("96 or 100", "4", "8 or 8")
    assert list(divisors(12)) == [2, 3, 4, 6]
    assert list(divisors(7)) == [7]


HEAD = "mesh x\ninput ids, goal : [batch, seq]\n"


@pytest.fixture(scope="module")
def told():
    """``told(lines, n)``: the faults of a spec for the toy on n ranks, with all the time that hints need."""
    model, example = toys.words()
    graph = capture(model, example, dict.fromkeys(example, ("batch", "seq")))

    def faults(lines: str, n: int, seconds: float = 60):
        spec = parser.parse(f"{HEAD}{lines}\n")
        with pytest.raises(placement.PlacementError) as caught:
            plan(bind(graph, spec, {"x": n}))
        return mended(caught.value, graph, spec, {"x": n}, seconds=seconds).diagnostics

    return faults


@pytest.mark.parametrize(
    ("line", "n", "code", "hints"),
    [
        ("param floors.*.back.weight : Shard(seq) @ x", 4, "PLC204", ["Shard(in) here ", "leaving the line out "]),
        ("param floors.*.wide.weight : Shard(5) @ x", 4, "PLC204", ["Shard(out) here ", "leaving the line out "]),
        ("param table.weight : Shard(2) @ x", 4, "PLC204", ["Shard(hidden) here ", "leaving the line out "]),
        ("value floors.*.apple : Shard(3) @ x", 4, "PLC204", ["Shard(seq) here ", "leaving the line out "]),
        ("output loss : Shard(seq) @ x", 4, "PLC204", ["leaving the line out costs "]),
        ("param floors.*.wide.weight : Shard(out) @ x", 3, "PLC203", ["255 or 258 would do", "leaving the line out "]),
        ("param floors.*.calm.weight : Shard(0) @ x", 4, "PLC301", ["leaving the line out costs "]),  # a norm
    ],
)
def test_edits_that_plan_are_told_with_their_price(told, line: str, n: int, code: str, hints: list[str]) -> None:
    (found,) = told(line, n)
    assert (found.code, found.line) == (code, 3)
    for hint in hints:
        assert hint in (found.hint or "")
    assert (found.hint or "").count(" here ") + (found.hint or "").count("leaving") <= 2


def test_each_of_two_faults_has_edits_of_its_own(told) -> None:
    first, second = told("param judge.weight : Shard(seq) @ x\nparam table.weight : Shard(2) @ x", 4)
    assert (first.code, first.line, second.code, second.line) == ("PLC204", 3, "PLC204", 4)
    assert "Shard(out) here" in (first.hint or "")
    assert "Shard(hidden) here" in (second.hint or "")


def test_without_time_the_fault_is_what_it_was(told) -> None:
    (plain,) = told("param judge.weight : Shard(seq) @ x", 4, seconds=-1)
    (more,) = told("param judge.weight : Shard(seq) @ x", 4)
    assert plain.message == more.message
    assert plain.hint is None
    assert more.hint is not None


def test_check_tells_the_edits_too() -> None:
    model, example = toys.twisted()
    spec = "mesh x\ninput x : [batch, seq, width]\nparam up.weight : Shard(7) @ x\n"
    (found,) = placement.check(spec, model, {"x": 2}, example=example)
    assert "per step" in (found.hint or "")


def test_an_op_without_a_rule_names_its_line_and_a_rule_to_start_from() -> None:
    model, example = toys.twisted()
    graph = capture(model, example, {"x": ("batch", "seq", "width")})
    (note,) = without_rules(graph, infer(graph, signature_of))
    assert (note.code, note.severity) == ("PLC402", "note")
    file, _, line = (note.model_line or "").rpartition(":")
    assert "twist(hidden" in open(file).readlines()[int(line) - 1]  # noqa: SIM115, PTH123
    call = (note.hint or "").partition("placement.rule(")[2].partition("\ntake")[0]
    assert '"b s h, h -> b s h", blocked="h"' in call
    assert "2.0" in note.notes[0]
    spec = "mesh x\ninput x : [batch, seq, width]\nparam weight : Shard(0) @ x\n"
    (fault,) = placement.check(spec, model, {"x": 2}, example=example)
    assert (fault.code, fault.line, fault.model_line) == ("PLC402", 3, note.model_line)
    assert "leaving the line out costs" in (fault.hint or "")


def test_the_rule_to_start_from_is_one_that_can_be_registered_and_proved() -> None:
    from placement.rules.core import _RULES
    from placement.rules.proof import prove

    model, example = toys.twisted()
    graph = capture(model, example, {"x": ("batch", "seq", "width")})
    (note,) = without_rules(graph, infer(graph, signature_of))
    text = "placement.rule(" + (note.hint or "").partition("placement.rule(")[2].partition("\ntake")[0]
    before = dict(_RULES)
    try:
        eval(text, {"placement": placement, "torch": torch})
        tensors = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 4, 6), (6,)))
        proof = prove(toys.twist, *tensors, 2.0)
    finally:
        _RULES.clear()
        _RULES.update(before)
    assert proof
    assert "S(" in str(proof)  # batch and sequence may be cut
