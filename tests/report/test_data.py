"""The JSON says what the plan says: every step once, every launch counted, every name a name of the user's."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from placement.lang.diagnostics import Diagnostic
from placement.lang.parser import parse
from placement.lang.spec import Span
from placement.report import explain_data, to_json
from placement.report.facts import facts, told_files
from placement.report.names import visible
from placement.types import Action
from tests.report.plans import LONG, MIXED, PLACED, SEQUENCE, SPEC, WHOLE, make

PLANS = {
    "sequence": lambda: make(SEQUENCE),
    "sequence, long": lambda: make(SEQUENCE, seq=4096),
    "whole": lambda: make(WHOLE, n=2),
    "mixed": lambda: make(MIXED, layers=4),
    "placed": lambda: make(PLACED, layers=2),
    "free": lambda: make(SPEC),
    "one rank": lambda: make(SEQUENCE, n=1),
    "long names": lambda: make(SEQUENCE, name=LONG),
}


@pytest.fixture(params=PLANS)
def plan(request):
    return PLANS[request.param]()


def test_golden(golden):
    golden("report/net.json", to_json(make(SEQUENCE, seq=4096)))


def test_text_is_stable_and_sorted(plan):
    text = to_json(plan)
    assert text == to_json(plan)
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def test_every_step_is_one_conversion_or_one_hook(plan):
    data = explain_data(plan)
    hooked = {h.parameter.value for h in plan.hooks}
    hooks = [s for s in plan.steps if s.value in hooked and s.sums_gradient]
    rest = [s for s in plan.steps if s not in hooks]
    assert Counter(h["param"] for h in data["hooks"]) == Counter(h.parameter.name for h in plan.hooks)
    assert len(data["hooks"]) == len(hooks)
    silent = plan.mesh.axes[0].n == 1
    assert [(c["axis"], c["bytes"], tuple(c["cause"]), c["forward"], c["backward"]) for c in data["conversions"]] == [
        (
            s.axis,
            s.nbytes,
            s.cause,
            "none" if silent else visible(s.conversion.forward),
            "none" if silent else visible(s.conversion.backward),
        )
        for s in rest
    ]


def test_actions_are_the_six_of_the_format(plan):
    allowed = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "split", "none"}
    assert {visible(action) for action in Action if action is not Action.SEND_RECV} == allowed  # no conversion's
    for found in explain_data(plan)["conversions"]:
        assert {found["forward"], found["backward"]} <= allowed


def test_totals_are_the_launches(plan):
    counts, nbytes = Counter(), Counter()
    for launch in plan.launches():
        counts[launch.axis, launch.phase, launch.action.value] += 1
        nbytes[launch.axis, launch.phase, launch.action.value] += launch.nbytes
    totals = explain_data(plan)["totals"]
    assert set(totals) == {"tp"}
    assert set(totals["tp"]) == {"forward", "backward"}
    told = {
        (axis, phase, action): (total["count"], total["bytes"])
        for axis, phases in totals.items()
        for phase, actions in phases.items()
        for action, total in actions.items()
    }
    assert told == {key: (counts[key], nbytes[key]) for key in counts}


def test_totals_follow_from_the_parts(plan):
    """Conversions, implementations and one flat reduction of the hooks are all that is launched."""
    data = explain_data(plan)
    parts = Counter()
    for found in data["conversions"]:
        for phase in ("forward", "backward"):
            if Action(found[phase]).communicates:
                parts[phase, found[phase]] += found["bytes"]
        parts["backward", found["forward"]] += found["again"] * found["bytes"]
    for found in data["implementations"]:
        for sent in found["collectives"]:
            parts[sent["phase"], sent["action"]] += sent["bytes"]
    if data["hooks"] and plan.mesh.axes[0].n > 1:
        parts["backward", "all_reduce"] += sum(hook["bytes"] for hook in data["hooks"])
    totals = {
        (phase, action): total["bytes"]
        for phase, actions in data["totals"]["tp"].items()
        for action, total in actions.items()
    }
    assert +parts == totals


def test_long_sequences_are_lost_inside_an_op_that_says_so():
    (found,) = explain_data(make(SEQUENCE, seq=4096))["implementations"]
    assert (found["op"], found["module"], found["name"]) == ("cross_entropy_loss", "", "over classes")
    assert [sent["action"] for sent in found["collectives"]] == ["all_reduce", "all_reduce"]


def test_values_have_the_names_of_modules():
    named = {c["value"]: c["module"] for c in explain_data(make(SEQUENCE, seq=4096))["conversions"]}
    assert named == {
        "embed.table": "blocks.0",
        **{f"blocks.{i}.norm": f"blocks.{i}.up" for i in range(3)},
        **{f"blocks.{i}.down.linear": f"blocks.{i}.down" for i in range(3)},
        "norm": "head",
    }


def test_placements_are_the_users_words(plan):
    data = explain_data(plan)
    lines = [f"param {name} : {placed['tp']}" for name, placed in data["params"].items()]
    lines += [f"value {name} : {placed['tp']}" for name, placed in data["values"].items()]
    parse("mesh tp\n" + "\n".join(lines))  # raises where a line could not be written so


def test_parameters_are_placed_as_the_spec_says():
    params = explain_data(make(SEQUENCE))["params"]
    told = {name: placed["tp"] for name, placed in params.items() if name.startswith(("embed", "blocks.1", "head"))}
    assert told == {
        "embed.table.weight": "Shard(vocab)",
        "blocks.1.norm.weight": "Replicate",
        "blocks.1.norm.bias": "Replicate",
        "blocks.1.up.weight": "Shard(out)",
        "blocks.1.up.bias": "Shard(out)",
        "blocks.1.down.weight": "Shard(in)",
        "blocks.1.down.bias": "Replicate",
        "head.weight": "Shard(vocab)",
    }


def test_a_value_line_that_converts_is_told_at_the_value_placed():
    data = explain_data(make(PLACED, layers=2))
    assert {c["value"]: c["to"] for c in data["conversions"]}["embed.table"] == "Shard(seq)"
    assert data["values"]["embed"] == data["values"]["embed.table"] == {"tp": "Shard(seq)"}
    assert explain_data(make(SEQUENCE))["values"]["embed"] == {"tp": "Partial"}


def test_memory_counts_the_shards_of_one_rank():
    whole, cut = (explain_data(make(SEQUENCE, n=n))["memory"]["params"] for n in (1, 4))
    params = make(SEQUENCE).graph.parameters
    sharded = sum(make(SEQUENCE).nbytes(p.value) for p in params if re.search("embed|up|head|down.weight", p.name))
    assert whole == sum(make(SEQUENCE).nbytes(p.value) for p in params)
    assert cut == whole - sharded + sharded // 4


def test_time_and_proof_are_the_solvers(plan):
    data = explain_data(plan)
    assert data["proof"] == {"cost": plan.cost[0], "bound": plan.lower_bound[0]}
    assert data["time"]["communication"] + data["time"]["compute"] == plan.cost[0]
    assert (data["time"]["communication"] > 0) == (plan.mesh.axes[0].n > 1)


def test_no_folder_of_a_machine_is_told():
    here, there = make(SEQUENCE), make(SEQUENCE, file="/somewhere/else/net.plc")
    assert to_json(here) == to_json(there)
    note = Diagnostic("PLC203", "so", Span("/somewhere/else/net.plc", 3, 1, 3, 2), severity="note")
    noted = dataclasses.replace(there, bound=dataclasses.replace(there.bound, notes=(note,)))
    assert facts(noted).notes == ("net.plc:3:1: so",)


def test_files_of_two_folders_keep_what_tells_them_apart():
    files = {"/a/b/net.plc": "net.plc", "/a/b/parts/mlp.plc": "parts/mlp.plc", "/a/b/norm.plc": "norm.plc"}
    assert told_files(files) == files
    assert told_files(["net.plc", "../common.plc"]) == {"net.plc": "net.plc", "../common.plc": "../common.plc"}
    assert told_files([]) == {}


def _keys(data, prefix=""):
    for key, value in data.items():
        yield prefix + key
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield from _keys(value[0], f"{prefix}{key}[].")
        elif key in ("memory", "time", "proof"):
            yield from _keys(value, f"{prefix}{key}.")


def test_every_key_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "explain.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    assert set(_keys(explain_data(make(SEQUENCE, seq=4096)))) == told
