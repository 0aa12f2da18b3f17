"""The timeline is the predicted step, piece by piece: nothing is lost, nothing overlaps, everything is in order."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest

from placement.graph.ir import Node
from placement.report.names import Names
from placement.report.timeline import (
    BACKWARD,
    COMMUNICATION,
    COMPUTE,
    FORWARD,
    GRADIENTS,
    timeline,
    timeline_data,
    timeline_rows,
    timeline_text,
)
from placement.report.trace import timeline_chrome
from tests.report.plans import LONG, SEQUENCE, WHOLE, make
from tests.report.test_data import PLANS

COLLECTIVES = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}


@pytest.fixture(params=PLANS)
def plan(request):
    return PLANS[request.param]()


@pytest.fixture(scope="module")
def qwen3():
    import placement
    from examples.qwen3.model import build

    model, example = build(layers=2)
    return placement.plan(model, {"tp": 4}, "examples/qwen3/qwen3.plc", example=example)


def took(events, **wanted):
    return sum(e.duration for e in events if all(getattr(e, key) == value for key, value in wanted.items()))


def check_sums(plan):
    made = timeline(plan)
    assert made.duration == plan.cost[0] == sum(e.duration for e in made.events)
    assert took(made.events, track=COMPUTE) == plan.compute
    assert took(made.events, track=COMMUNICATION) == plan.cost[0] - plan.compute
    assert made.events[0].start == 0
    assert all(a.start + a.duration == b.start and b.duration > 0 for a, b in pairwise(made.events))


def test_the_sum_is_the_predicted_time_to_the_picosecond(plan):
    check_sums(plan)


def test_the_sum_holds_for_a_transformer(qwen3):
    check_sums(qwen3)
    assert timeline_text(qwen3).count("model.layers.[0-1] x 2") == 1


def test_every_launch_is_an_event(plan):
    events = [e for e in timeline(plan).events if e.action in COLLECTIVES]
    told = Counter((e.axis, e.phase, e.action, e.nbytes) for e in events)
    launches = [sent for sent in plan.launches() if not sent.hidden]
    assert told == Counter((sent.axis, sent.phase, sent.action.value, sent.nbytes) for sent in launches)


def test_forward_is_in_program_order_and_backward_in_the_opposite():
    plan = make(SEQUENCE, seq=4096)
    events = timeline(plan).events
    work = [e.name for e in events if (e.phase, e.track) == (FORWARD, COMPUTE)]
    back = [e.name for e in events if (e.phase, e.track) == (BACKWARD, COMPUTE)]
    assert len(work) > 10
    assert work == [n for n in (Names(plan).user(node) for node in plan.graph.nodes) if n in work]
    assert back[::-1] == [name for name in work if name in back]
    phases = [e.phase for e in events]
    assert phases == sorted(phases, key=(FORWARD, BACKWARD).index)
    assert events[-1].module == GRADIENTS


def test_a_conversion_stands_between_the_ops_that_it_joins():
    events = timeline(make(SEQUENCE, seq=4096)).events
    names = [(e.phase, e.action or "work", e.name) for e in events]
    gather = names.index((FORWARD, "all_gather", "blocks.1.norm"))
    assert names[gather - 1][1:] == ("work", "blocks.1.norm.layer_norm")
    assert names[gather + 1][1:] == ("work", "blocks.1.up.linear")
    scatter = names.index((BACKWARD, "reduce_scatter", "blocks.1.norm"))
    assert names[scatter - 1][1:] == ("work", "blocks.1.up.linear")
    assert names[scatter + 1][1:] == ("work", "blocks.1.norm.layer_norm")


def test_rows_add_up_to_the_step(plan):
    made = timeline(plan)
    rows = timeline_rows(made)
    assert sum(row.total.whole for row in rows) == made.duration
    assert sum(row.total.sent for row in rows) == took(made.events, track=COMMUNICATION)
    assert all(sum(p.whole for p in row.parts.values()) == row.total.whole for row in rows if row.parts)


def test_alike_layers_are_one_row():
    rows = timeline_rows(timeline(make(SEQUENCE, seq=4096)))
    assert [(row.title, row.count, [*row.parts]) for row in rows if row.parts] == [
        ("blocks.[0-2]", 3, ["norm", "up", "", "down"])
    ]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", PLANS)
def test_lines_fit(name, width):
    lines = timeline_text(PLANS[name](), width).splitlines()
    assert max(map(len, lines)) <= width
    assert not any(line.endswith(" ") for line in lines)


def test_golden(golden):
    golden("report/net_time.txt", timeline_text(make(SEQUENCE, seq=4096)))


def test_bars_are_in_proportion():
    lines = timeline_text(make(SEQUENCE, seq=4096)).splitlines()
    bars = {line.split("  ")[0].strip() or "(head)": Counter(line)["#"] + Counter(line)["="] for line in lines[3:]}
    layers = next(count for name, count in bars.items() if name.startswith("blocks."))
    assert layers == max(bars.values()) == 20
    assert 0 < bars["head"] < layers / 4


def test_data_is_the_events():
    plan = make(SEQUENCE, seq=4096)
    data = json.loads(json.dumps(timeline_data(plan)))
    assert data["format_version"] == 1
    made = data["timeline"]
    assert made["time"] == {"compute": plan.compute, "communication": plan.cost[0] - plan.compute}
    assert [e["start"] for e in made["events"]] == [e.start for e in timeline(plan).events]
    gather = next(e for e in made["events"] if e.get("action") == "all_gather")
    assert (gather["axis"], gather["bytes"], gather["what"]) == ("tp", 3 * 4096 * 16 * 4, "Shard(seq) -> Replicate")


# -- Chrome's format ----------------------------------------------------------------------------------


def slices(plan):
    trace = json.loads(timeline_chrome(plan))
    named = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    by_track = {name: [] for name in named.values()}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            by_track[named[event["tid"]]].append(event)
    return trace, by_track


def picoseconds(micro: float) -> int:
    return round(micro * 10**6)


@pytest.mark.parametrize("name", ["sequence, long", "whole", "one rank"])
def test_the_trace_is_valid(name):
    """As the Trace Event format has it: complete events with times in microseconds, and metadata."""
    trace, _ = slices(PLANS[name]())
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "args"} <= set(event)
        assert isinstance(event["name"], str)
        assert event["ph"] in ("X", "M")
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] > 0
            assert event["cat"] in ("step", "modules", COMPUTE, COMMUNICATION)


def test_the_tracks_are_the_step(plan):
    _, tracks = slices(plan)
    assert [*tracks] == ["step", "modules", COMPUTE, COMMUNICATION]
    sums = {name: sum(picoseconds(e["dur"]) for e in events) for name, events in tracks.items()}
    assert sums[COMPUTE] == plan.compute
    assert sums[COMMUNICATION] == plan.cost[0] - plan.compute
    assert sums["step"] == plan.cost[0]
    both = sorted([*tracks[COMPUTE], *tracks[COMMUNICATION]], key=lambda e: e["ts"])
    ends = [picoseconds(e["ts"]) + picoseconds(e["dur"]) for e in both]
    assert ends[:-1] == [picoseconds(e["ts"]) for e in both[1:]]


def test_slices_of_modules_nest():
    """On one track a viewer draws a slice inside the one before it only where it also ends inside."""
    _, tracks = slices(make(SEQUENCE, seq=4096))
    opened = []
    for event in tracks["modules"]:
        start, end = picoseconds(event["ts"]), picoseconds(event["ts"]) + picoseconds(event["dur"])
        while opened and opened[-1][1] <= start:
            opened.pop()
        if opened:
            assert end <= opened[-1][1]
            assert event["name"].startswith(f"{opened[-1][0]}.")
        opened.append((event["name"], end))
    names = Counter(e["name"] for e in tracks["modules"])
    assert names["blocks.1"] == 2  # forward and backward


def test_backward_takes_what_forward_does_not():
    """Every op knows its two directions apart: what needs no gradient has no backward."""
    plan = make(WHOLE)
    for node, (forward, backward) in plan.work.items():
        assert isinstance(node, Node)
        assert backward == 0 or any(v.requires_grad for v in node.results)
        assert forward >= 0
    assert sum(map(sum, plan.work.values())) == plan.compute
    assert LONG not in timeline_text(plan)
