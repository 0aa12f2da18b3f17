"""Why a value lies as it does: statements, neighbours, and prices that are those of the spec with that line in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from placement.report import why as module
from placement.report.subjects import UnknownNameError
from placement.report.why import why
from placement.report.why_pages import why_data, why_text
from tests.report.plans import LONG, PLACED, SEQUENCE, SPEC, WHOLE, make


def answered(asked, spec=SEQUENCE, **options):
    options.setdefault("seq", 4096)
    return why(make(spec, **options), asked, {"net.plc": spec})


def one(asked, spec=SEQUENCE, **options):
    (found,) = answered(asked, spec, **options).found
    return found


def test_golden(golden):
    golden("report/net_why.txt", why_text(answered("blocks.*.norm")))


# -- as it is -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "kind", "placement", "statement"),
    [
        ("norm", "value", "Shard(seq)", ("net.plc:11", "value norm : Shard(seq)")),
        ("blocks.1.up.weight", "parameter", "Shard(out)", ("net.plc:5", "param up.{weight,bias} : Shard(out)")),
        ("blocks.1.up", "value", "Shard(2)", None),
        ("blocks.1.up.linear", "value", "Shard(2)", None),
        ("blocks.0.norm.weight", "parameter", "Replicate", None),
        ("ids", "input", "Replicate", None),
        ("loss", "output", "Replicate", None),
        ("logits", "output", "Shard(vocab)", ("net.plc:9", "output logits : Shard(vocab)")),
        ("cross_entropy_loss", "value", "Invariant", None),
    ],
)
def test_what_places_it(asked, kind, placement, statement):
    found = one(asked)
    assert (found.kind, found.placement, found.statement) == (kind, {"tp": placement}, statement)
    assert found.names == (asked,)


@pytest.mark.parametrize(
    ("asked", "spec", "rule"),
    [
        ("blocks.1.norm.weight", SEQUENCE, "used replicated"),
        ("blocks.1.up", SEQUENCE, "costs least"),
        ("ids", SEQUENCE, "every rank is given all of it"),
        ("loss", SEQUENCE, "outputs are returned replicated"),
        ("loss", SEQUENCE + "output loss : auto\n", "left to the solver"),
    ],
)
def test_what_nothing_places_has_a_rule(asked, spec, rule):
    assert rule in one(asked, spec).rule
    assert rule in " ".join(why_text(answered(asked, spec)).split())


def test_neighbours_are_told_with_what_they_give_and_need():
    found = one("blocks.1.norm")
    assert (found.producer.name, found.producer.placement) == ("blocks.1.norm.layer_norm", "Shard(seq)")
    assert [(n.name, n.placement) for n in found.consumers] == [("blocks.1.up.linear", "Replicate")]
    assert [(c.source, c.target, c.forward) for c in found.conversions] == [("Shard(seq)", "Replicate", "all_gather")]
    residual = one("blocks.0")
    assert {n.name for n in residual.consumers} == {"blocks.1.norm.layer_norm", "blocks.1.add"}
    assert [n.name for n in one("logits").consumers] == []
    assert {n.name for n in one("head").consumers} == {"reshape", "output logits"}


def test_a_value_converted_at_once_says_from_what():
    found = one("embed", PLACED)
    assert (found.placement, found.made) == ({"tp": "Shard(seq)"}, "Partial")
    assert "Shard(seq) @ tp, converted at once from Partial" in why_text(answered("embed", PLACED))


def test_a_summed_gradient_is_told():
    assert one("blocks.1.norm.weight").hook.meets == ("Shard(seq)",)
    assert one("embed.table.weight").hook is None
    assert "summed over tp after backward, as it meets Shard(seq)" in why_text(answered("blocks.1.norm.weight"))


# -- as it could be -----------------------------------------------------------------------------------


def outcome(plan):
    sent = sum(launch.nbytes for launch in plan.launches())
    return plan.cost[0], plan.cost[0] - plan.compute, plan.compute, sent, plan.saved, len(plan.launches())


def difference(spec, other):
    old, new = (outcome(make(each, seq=4096)) for each in (spec, other))
    return tuple(b - a for a, b in zip(old, new, strict=True))


IDS_CUT = "input ids : [batch, seq], Shard(seq)\ninput labels : [batch, seq]"
REPLACED = [
    # asked, alternative, the line that is there, the line that would be
    ("norm", "Invariant", "value norm : Shard(seq)", "value norm : Replicate"),
    ("norm", "Partial", "value norm : Shard(seq)", "value norm : Partial"),
    ("norm", "Shard(hidden)", "value norm : Shard(seq)", "value norm : Shard(2)"),
    ("blocks.*.norm", "Invariant", "value blocks.*.norm : Shard(seq)", "value blocks.*.norm : Replicate"),
    ("blocks.*.up", "Shard(seq)", "value norm : Shard(seq)", "value norm : Shard(seq)\nvalue blocks.*.up : Shard(seq)"),
    ("head.weight", "Replicate", "[vocab, hidden], Shard(vocab)\noutput", "[vocab, hidden], Replicate\noutput"),
    ("head.weight", "Shard(hidden)", "[vocab, hidden], Shard(vocab)\noutput", "[vocab, hidden], Shard(hidden)\noutput"),
    ("blocks.*.down.weight", "Replicate", "down.weight      : Shard(in)", "down.weight : Replicate"),
    ("logits", "Replicate", "output logits : Shard(vocab)", "output logits : Replicate"),
    ("logits", "Shard(seq)", "output logits : Shard(vocab)", "output logits : Shard(seq)"),
    (
        "ids",
        "Shard(seq)",
        "input ids, labels : [batch, seq]",
        "input ids : [batch, seq], Shard(seq)\ninput labels : [batch, seq]",
    ),
]


@pytest.mark.parametrize(("asked", "placement", "line", "instead"), REPLACED)
def test_the_price_is_that_of_the_spec_with_that_line(asked, placement, line, instead):
    assert SEQUENCE.count(line) == 1
    other = {a.placement: a for a in one(asked).alternatives}[placement]
    told = (other.time, other.communication, other.compute, other.sent, other.kept, other.launches)
    assert told == difference(SEQUENCE, SEQUENCE.replace(line, instead))
    assert not other.obstacle
    assert other.proven


def test_alternatives_are_all_the_others():
    placements = [a.placement for a in one("norm").alternatives]
    assert placements == ["Invariant", "Replicate", "Partial", "Shard(hidden)"]
    assert next(a.placement for a in one("norm", WHOLE).alternatives) == "Replicate"
    assert {a.placement for a in one("blocks.0.up.bias").alternatives} == {"Replicate"}
    assert {a.made for a in one("norm").alternatives} == {"", "Shard(seq)"}  # no op gives a norm as a sum


def test_what_no_strategy_meets_says_so():
    other, stored = one("blocks.1.norm.weight").alternatives
    assert (other.placement, other.time, stored.placement) == ("Shard(hidden)", 0, "stored Shard(0)")
    assert "has no strategy" in other.obstacle
    assert "impossible: 'aten.layer_norm.default'" in why_text(answered("blocks.1.norm.weight"))


def test_what_is_asked_too_much_is_told_without_prices(monkeypatch):
    monkeypatch.setattr(module, "MOST_SOLVES", 5)
    said = []
    answer = why(make(SEQUENCE, seq=4096), "blocks.1.*", say=said.append)
    priced = [found for found in answer.found if found.alternatives is not None]
    assert 0 < len(priced) < len(answer.found)
    assert said == [f"pricing alternative {i} of 5" for i in range(1, 1 + sum(len(f.alternatives) for f in priced))]
    assert "its alternatives are not priced: name fewer values" in why_text(answer)


# -- names --------------------------------------------------------------------------------------------


def test_alike_values_are_one_answer():
    norms, last = answered("blocks.*").found
    assert norms.names == ("blocks.0", "blocks.1")
    assert last.names == ("blocks.2",)  # the norm after it is another kind of consumer
    (ups,) = answered("blocks.*.up").found
    assert ups.names == ("blocks.0.up", "blocks.1.up", "blocks.2.up")
    assert why_text(answered("blocks.*.up")).count("blocks.[0-2].up ") == 1


def test_one_value_of_several_names_is_told_once():
    (found,) = answered("{embed,embed.table}").found
    assert found.names == ("embed",)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("nrom", "did you mean 'norm'?"),
        ("up", "did you mean 'blocks.[0-2].up'?"),
        ("blocks.*.nrom", "did you mean 'blocks.*.norm'?"),
        ("blocks.7.norm", "did you mean 'blocks.[0-2].norm'?"),
        ("lables", "did you mean 'labels'?"),
        ("[", "is no name and no pattern"),
        ("zzz", "nothing in the model is called 'zzz'$"),
    ],
)
def test_names_that_nothing_has(asked, told):
    with pytest.raises(UnknownNameError, match=re.escape(told).replace(r"\$", "$")):
        answered(asked)


# -- pages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", ["blocks", LONG])
def test_lines_fit(width, name):
    for asked in ("blocks.*.norm", "blocks.0.down.weight", "blocks.0.norm.weight", "logits"):
        plan = make(SEQUENCE, name=name, seq=4096)
        text = why_text(why(plan, asked.replace("blocks", name), {"net.plc": SEQUENCE}), width)
        assert max(map(len, text.splitlines())) <= width


def test_colour_changes_no_character():
    answer = answered("blocks.*.norm")
    colored = why_text(answer, color=True)
    assert colored != why_text(answer)
    assert re.sub(r"\x1b\[[0-9]+m", "", colored) == why_text(answer)


def _keys(data, prefix=""):
    for key, value in data.items():
        yield prefix + key
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, dict) and key not in ("mesh", "placement"):
            yield from _keys(first, f"{prefix}{key}{'[]' if isinstance(value, list) else ''}.")


def test_every_key_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "why.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `(why[^`]*)` \|", page, re.MULTILINE))
    data = [why_data(answered(asked)) for asked in ("norm", "blocks.1.norm.weight")]
    assert {key for each in data for key in _keys(json.loads(json.dumps(each))) if key.startswith("why")} == told


def test_data_says_what_the_text_says():
    found = why_data(answered("blocks.*.norm"))["why"]["found"][0]
    assert found["names"] == [f"blocks.{i}.norm" for i in range(3)]
    assert found["statement"] == {"cause": "net.plc:10", "text": "value blocks.*.norm : Shard(seq)"}
    assert [other["possible"] for other in found["alternatives"]] == [True] * 4
    assert found["type"] == "S"
    impossible = why_data(answered("blocks.1.norm.weight"))["why"]["found"][0]["alternatives"]
    assert [(other["possible"], "time" in other) for other in impossible] == [(False, False), (True, True)]


def test_a_transformer():
    import placement
    from examples.qwen3.model import build

    model, example = build(layers=2)
    options = {"example": example, "format": "json", "why": "model.layers.*.self_attn.o_proj.weight"}
    (found,) = json.loads(placement.explain(model, {"tp": 4}, "examples/qwen3/qwen3.plc", **options))["why"]["found"]
    assert found["names"] == [f"model.layers.{i}.self_attn.o_proj.weight" for i in range(2)]
    assert found["placement"] == {"tp": "Shard(in)"}
    assert found["statement"]["cause"] == "qwen3.plc:10"
    whole = next(other for other in found["alternatives"] if other["placement"] == "Replicate")
    assert whole["compute"] > 0  # every rank then does all of the product
    with pytest.raises(ValueError, match="nothing in the model"):
        placement.explain(model, {"tp": 4}, "examples/qwen3/qwen3.plc", example=example, why="model.layer")


def test_nothing_placed_has_every_choice():
    assert SPEC in SEQUENCE
    assert len(one("blocks.0.norm", SPEC).alternatives) == 4
    assert one("blocks.0.norm", SPEC).statement is None
