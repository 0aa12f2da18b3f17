"""What changes between two plans: added up it leads from the one to the other, and nothing is told twice."""

from __future__ import annotations

import copy
import json
from collections import Counter

import pytest

from placement.report import explain_data, to_json
from placement.report.against import SavedPlanError, _sent, against_data, checked, compare, saved
from placement.report.against_pages import against_text
from placement.report.views import told_apart
from tests.report.plans import LONG, MIXED, PLACED, SEQUENCE, SPEC, WHOLE, make

PAIRS = {
    "to whole": lambda: (make(SEQUENCE, seq=4096), make(WHOLE, seq=4096)),
    "one layer": lambda: (make(SEQUENCE, layers=4, seq=4096), make(MIXED, layers=4, seq=4096)),
    "more layers": lambda: (make(SEQUENCE), make(SEQUENCE, layers=4)),
    "longer": lambda: (make(SEQUENCE), make(SEQUENCE, seq=4096)),
    "more ranks": lambda: (make(SEQUENCE, n=2), make(SEQUENCE, n=4)),
    "a value line": lambda: (make(SEQUENCE), make(PLACED)),
    "long names": lambda: (make(SEQUENCE, name=LONG), make(WHOLE, name=LONG)),
}


@pytest.fixture(params=PAIRS)
def pair(request):
    return tuple(map(explain_data, PAIRS[request.param]()))


def compared(old, new):
    return compare(old, new, "old.plc", "new.plc")


def test_golden(golden):
    old, new = map(explain_data, PAIRS["to whole"]())
    golden("report/net_against.txt", against_text(compared(old, new)))


def test_changes_lead_from_the_one_to_the_other(pair):
    old, new = pair
    left = Counter(_sent(old))
    for change in compared(old, new).changes:
        if change.kind != "added":
            left[change.before or change.sent] -= 1
        if change.kind != "removed":
            left[change.sent] += 1
    assert +left == Counter(_sent(new))
    assert min(left.values()) >= 0


def test_the_other_way_round_is_the_opposite(pair):
    old, new = pair
    there, back = (against_data(compared(*order))["against"] for order in ((old, new), (new, old)))

    def told(changes):
        return Counter(json.dumps(change, sort_keys=True) for change in changes)

    assert told(there["conversions"]["added"]) == told(back["conversions"]["removed"])
    assert there["hooks"]["added"] == back["hooks"]["removed"]
    for key in ("params", "values"):
        assert {n: {a: p[::-1] for a, p in axes.items()} for n, axes in there[key].items()} == back[key]
    assert there["cost"] == back["cost"][::-1]


def test_numbers_are_the_explanations(pair):
    old, new = pair
    found = against_data(compared(old, new))["against"]
    assert found["cost"] == [old["proof"]["cost"], new["proof"]["cost"]]
    for key in ("communication", "compute"):
        assert found["time"][key] == [old["time"][key], new["time"][key]]
    assert found["memory"]["saved_for_backward"] == [data["memory"]["saved_for_backward"] for data in pair]
    for index, data in enumerate(pair):
        told = {
            (axis, phase, action): (both["count"][index], both["bytes"][index])
            for axis, phases in found["totals"].items()
            for phase, actions in phases.items()
            for action, both in actions.items()
        }
        for axis, phases in data["totals"].items():
            for phase, actions in phases.items():
                for action, total in actions.items():
                    assert told.pop((axis, phase, action)) == (total["count"], total["bytes"])
        assert set(told.values()) <= {(0, 0)}


def test_placements_are_those_that_differ(pair):
    old, new = pair
    found = compared(old, new)
    for key in ("params", "values"):
        names = {*old[key], *new[key]}
        assert set(getattr(found, key)) == {name for name in names if old[key].get(name) != new[key].get(name)}


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", PAIRS)
def test_lines_fit(name, width):
    text = against_text(compared(*map(explain_data, PAIRS[name]())), width)
    assert max(map(len, text.splitlines())) <= width


def test_layers_that_change_alike_are_told_once():
    old, new = map(explain_data, PAIRS["to whole"]())
    text = against_text(compared(old, new))
    assert "3 alike, each:" in text
    assert text.count("- down.linear  Partial -> Shard(seq) @ tp") == 1
    assert text.count("+ norm  Invariant -> Replicate @ tp") == 2  # of the blocks, and the last one
    assert "a step of new.plc takes" in text


def test_one_layer_that_differs_is_told_alone():
    old, new = map(explain_data, PAIRS["one layer"]())
    titles = [line.split("  ")[0] for line in against_text(compared(old, new)).splitlines() if line.startswith("block")]
    assert titles == ["blocks.1"]


def test_a_line_that_changes_nothing_changes_nothing():
    data = explain_data(make(SEQUENCE))
    found = compared(data, json.loads(to_json(make(SEQUENCE))))
    assert found.nothing
    assert "nothing changes" in against_text(found)
    assert not compared(data, explain_data(make(WHOLE))).nothing


def test_what_stands_elsewhere_has_moved():
    old = explain_data(make(SEQUENCE))
    new = copy.deepcopy(old)
    moved = next(c for c in new["conversions"] if c["value"] == "blocks.1.norm")
    assert moved["module"] == "blocks.1.up"
    moved["module"] = "blocks.1"
    (change,) = compared(old, new).changes
    assert (change.kind, change.before.module, change.sent.module) == ("moved", "blocks.1.up", "blocks.1")
    assert "> norm: up -> output" in against_text(compared(old, new))
    (told,) = against_data(compared(old, new))["against"]["conversions"]["moved"]
    assert told["module"] == ["blocks.1.up", "blocks.1"]


def test_another_size_is_one_change():
    found = compared(*map(explain_data, PAIRS["longer"]()))
    resized = [c for c in found.changes if c.kind == "resized"]
    assert resized
    assert all(c.sent.nbytes == 512 * c.before.nbytes for c in resized if c.sent.what != "by over classes")


def test_meshes_are_told_where_they_differ():
    text = against_text(compared(*map(explain_data, PAIRS["more ranks"]())))
    assert "mesh tp = 2 -> tp = 4" in text


# -- saved plans --------------------------------------------------------------------------------------


def test_a_saved_plan_is_read_back(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(to_json(make(SEQUENCE)), encoding="utf-8")
    assert compared(saved(path), explain_data(make(SEQUENCE))).nothing
    spec = tmp_path / "net.plc"
    spec.write_text(SPEC)
    assert saved(spec) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{nonsense", "no JSON"),
        ("{}", "format_version None"),
        ('{"format_version": 2}', "format_version 2, not 1"),
        ('{"format_version": 1, "mesh": {}}', "has no 'conversions'"),
    ],
)
def test_what_is_no_saved_plan(tmp_path, text, message):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(SavedPlanError, match=message):
        saved(path)


def test_a_whole_explanation_is_needed():
    data = explain_data(make(SEQUENCE))
    assert checked(data, "it") is data
    with pytest.raises(SavedPlanError, match="proof"):
        checked({key: value for key, value in data.items() if key != "proof"}, "it")


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("specs/a.plc", "specs/b.plc", ("a.plc", "b.plc")),
        ("/x/old/net.plc", "/x/new/net.plc", ("old/net.plc", "new/net.plc")),
        ("net.plc", "net.plc", ("net.plc", "net.plc")),
        ("net.plc", "old/net.plc", ("net.plc", "old/net.plc")),
    ],
)
def test_names_are_as_long_as_they_must_be(before, after, told):
    assert told_apart(before, after) == told


def test_what_is_there_twice_is_counted_twice():
    old = explain_data(make(SEQUENCE, seq=4096))
    new = copy.deepcopy(old)
    (op,) = new["implementations"]
    op["collectives"].append(op["collectives"][0])
    (change,) = compared(old, new).changes
    assert (change.kind, change.sent.value) == ("added", "cross_entropy_loss")
    assert [c.kind for c in compared(new, old).changes] == ["removed"]
