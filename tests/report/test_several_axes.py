"""On several axes an explanation names axes and groups, and its numbers still add up to what runs."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from placement.lang.parser import parse
from placement.report import explain_data, explain_text, to_dot, to_html
from placement.report.against import compare
from placement.report.against_pages import against_text
from placement.report.budgets import broken, launches
from placement.report.facts import facts
from placement.report.fold import blocks
from placement.report.memory import memory_text
from placement.report.names import told
from placement.report.timeline import COMPUTE, timeline, timeline_text
from placement.report.trace import timeline_chrome
from placement.report.why import why
from placement.report.why_pages import why_data, why_text
from placement.solver.bind import bind
from placement.solver.build import plan as solve
from placement.solver.cost import DEVICES
from placement.solver.memory import memory
from placement.solver.plan import Plan
from tests.report.plans import graph

BOTH = """\
mesh dp
mesh tp
input ids, labels : [batch, seq], Shard(batch) @ dp
param embed.table.weight : [vocab, hidden], Shard(vocab) @ tp
within blocks.* {
  param up.{weight,bias} : Shard(out) @ tp
  param down.weight : Shard(in) @ tp
  value norm : Shard(seq) @ tp
}
param head.weight : [vocab, hidden], Shard(vocab) @ tp
output logits : Shard(batch) @ dp, Shard(vocab) @ tp
"""
STORED = (
    BOTH.replace("Shard(out) @ tp", "Shard(out) @ tp, stored Shard(0) @ dp")
    .replace("within", "param {norm,blocks.*.norm}.* : stored Shard(0) @ dp\nwithin")
    .replace("value norm : Shard(seq) @ tp", "value norm : Shard(batch) @ dp, Shard(seq) @ tp")
)
ALONE = """\
mesh dp
input ids, labels : [batch, seq], Shard(batch) @ dp
param ** : stored Shard(0) @ dp
value {embed,norm,head} : Shard(batch) @ dp
value blocks.*.{norm,up,down} : Shard(batch) @ dp
"""


@cache
def make(spec: str, dp: int = 2) -> Plan:
    read = parse(spec, "net.plc")
    mesh = {"dp": dp, "tp": 2} if "mesh tp" in spec else {"dp": dp}
    return solve(bind(graph(2, "blocks"), read, mesh, sizes={"seq": 512, "batch": 4}), read.sources)


@pytest.fixture(params=[BOTH, STORED, ALONE], ids=["both", "stored", "alone"])
def plan(request: pytest.FixtureRequest) -> Plan:
    return make(request.param)


def said(plan: Plan, *, hidden: bool = True) -> Counter[tuple[str, str, str, int]]:
    return Counter((x.axis, x.phase, x.action.value, x.nbytes) for x in plan.launches() if hidden or not x.hidden)


def test_the_timeline_adds_up_and_has_every_launch(plan: Plan) -> None:
    made = timeline(plan)
    assert made.duration == plan.cost[0]
    assert sum(e.duration for e in made.events if e.track == COMPUTE) == plan.compute
    assert all(a.start + a.duration == b.start for a, b in pairwise(made.events))
    sent = [e for e in made.events if e.action not in ("", "split", "zeros")]
    assert Counter((e.axis, e.phase, e.action, e.nbytes) for e in sent) == said(plan, hidden=False)
    slices = [
        e for e in json.loads(timeline_chrome(plan))["traceEvents"] if e.get("cat") in ("compute", "communication")
    ]
    assert sum(e["dur"] for e in slices) == pytest.approx(plan.cost[0] / 10**6)


def test_what_is_gathered_again_stands_right_before_the_op_that_needs_it() -> None:
    events = [(e.phase, e.name, e.what or e.track) for e in timeline(make(ALONE)).events]
    at = events.index(("backward", "blocks.1.up.weight", "gathered again"))
    assert events[at + 1] == ("backward", "blocks.1.up.linear", "compute")
    assert events[at + 2][1:] == ("blocks.1.up.weight", "stored Shard(0) -> Replicate")


def test_budgets_count_every_launch(plan: Plan) -> None:
    assert Counter((c.axis, c.phase, c.action, c.nbytes) for c in launches(facts(plan))) == said(plan)


def test_a_launch_of_a_group_counts_for_each_axis_of_it() -> None:
    plan = make(BOTH)
    counts = Counter(axis for axis, _, action, _ in said(plan).elements() if action == "all_reduce")
    assert counts["dp_tp"] > 0
    for axis, count in [("@ dp", counts["dp"] + counts["dp_tp"]), ("@ tp", counts["tp"] + counts["dp_tp"])]:
        assert broken(plan, parse(f"{BOTH}expect ** : all_reduce {axis} == {count}\n")) == ()
    assert broken(plan, parse(f"{BOTH}expect ** : all_reduce == {counts.total()}\n")) == ()
    (fault,) = broken(plan, parse(f"{BOTH}expect ** : all_reduce @ dp == 0\n"))
    assert any(note.startswith("all_reduce @ dp_tp") for note in fault.notes)


def test_totals_have_every_axis_and_every_group_in_use(plan: Plan) -> None:
    data = explain_data(plan)
    assert set(data["totals"]) == {*data["mesh"], *(axis for axis, *_ in said(plan))}
    for axis, phases in data["totals"].items():
        for phase, actions in phases.items():
            for action, total in actions.items():
                sizes = [n for (a, p, c, n) in said(plan).elements() if (a, p, c) == (axis, phase, action)]
                assert (len(sizes), sum(sizes)) == (total["count"], total["bytes"])


def test_the_json_has_stored_parameters_by_axis_and_their_gathers() -> None:
    data = explain_data(make(STORED))
    assert data["params"]["blocks.0.up.weight"] == {"dp": "stored Shard(0)", "tp": "Shard(out)"}
    (gather,) = [c for c in data["conversions"] if c["value"] == "blocks.0.up.weight"]
    told = {key: gather[key] for key in ("axis", "from", "forward", "backward", "again")}
    assert told == {
        "axis": "dp", "from": "stored Shard(0)", "forward": "all_gather", "backward": "reduce_scatter", "again": 1,
    }  # fmt: skip
    assert {tuple(hook["axes"]) for hook in explain_data(make(BOTH))["hooks"]} == {("dp",), ("dp", "tp")}


def test_gradients_are_told_by_axis_or_group_with_what_they_meet_there() -> None:
    text = explain_text(make(BOTH))
    assert "dp_tp is dp and tp together, 4 ranks\n" in text
    assert re.search(r"^Gradients of \d+ parameters summed over dp  +1 all_reduce", text, re.MULTILINE)
    assert re.search(r"^Gradients of \d+ parameters summed over dp_tp  +1 all_reduce", text, re.MULTILINE)
    by_name = {hook.parameter: hook.meets for hook in facts(make(BOTH)).hooks}
    assert by_name["blocks.0.up.weight"] == ("Shard(batch)",)
    assert by_name["blocks.0.norm.weight"] == ("Shard(batch) @ dp", "Shard(seq) @ tp")
    (outputs,) = re.findall("^Outputs +(.*)", text, re.MULTILINE)
    assert set(outputs.split("; ")) == {"loss Replicate", "logits Shard(batch) @ dp, Shard(vocab) @ tp"}


def test_what_is_gathered_alike_is_one_item_and_nothing_is_lost(plan: Plan) -> None:
    found = facts(plan)
    items = [item for block in blocks(found) for item in block.items]
    members = [member for item in items for member in item.members]
    assert Counter(map(id, members)) == Counter(map(id, (*found.conversions, *found.inside)))
    layer = next((block for block in blocks(make_facts(ALONE)) if block.is_layer), None)
    assert layer is not None
    assert [item.source for item in layer.items if "their uses" in item.target] != []


def make_facts(spec: str):
    return facts(make(spec))


def test_one_way_of_a_value_is_one_item(plan: Plan) -> None:
    for block in blocks(facts(plan)):
        heads = [(item.source, item.goal) for item in block.items if item.target]
        assert len(set(heads)) == len(heads)


def test_a_rank_holds_its_blocks() -> None:
    plan = make(ALONE)
    used = memory(plan)
    assert used.one_device.parameters == 2 * used.rank.parameters
    assert (used.rank.gradients, used.rank.optimizer) == (used.rank.parameters, 2 * used.rank.parameters)


def test_alternatives_are_told_by_axis() -> None:
    found = why_data(why(make(BOTH), "blocks.0.up.weight"))["why"]["found"][0]
    others = {(other["axis"], other["placement"]) for other in found["alternatives"]}
    assert ("dp", "stored Shard(0)") in others
    assert ("tp", "Replicate") in others
    text = why_text(why(make(STORED), "blocks.0.up.weight"))
    assert "placement   stored Shard(0) @ dp, Shard(out) @ tp" in text
    assert re.search(r"gathered again @ dp  +- \| all_gather", text)


def test_a_gradient_that_is_summed_over_other_axes_is_a_change() -> None:
    one = explain_data(make(BOTH.replace("value norm : Shard(seq) @ tp", "value norm : Replicate @ tp")))
    text = against_text(compare(one, explain_data(make(BOTH)), "before", "after"))
    assert re.search(r"^  - blocks.*norm.*over dp$", text, re.MULTILINE)
    assert re.search(r"^  \+ blocks.*norm.*over dp_tp$", text, re.MULTILINE)
    assert not re.search(r"ward(all|reduce)_", text)


@pytest.mark.parametrize("width", [60, 80])
def test_lines_fit(plan: Plan, width: int) -> None:
    texts = [explain_text(plan, width, verbose=True), timeline_text(plan, width), memory_text(plan, width)]
    texts.append(why_text(why(plan, "blocks.0.norm"), width))
    assert max(len(line) for text in texts for line in text.splitlines()) <= width


def test_other_formats_name_groups_and_gathers() -> None:
    assert "dp_tp is dp and tp together, 4 ranks" in to_html(make(BOTH))
    assert '<td class="w">gathered again</td><td>dp</td>' in to_html(make(STORED))
    dot = to_dot(make(ALONE))
    assert "gathered again @ dp" in dot
    assert set(re.findall(r"b\d+_\d+(?= ->|;| \[color| \[label = \".* ->)", dot)) <= set(re.findall(r"b\d+_\d+", dot))


@pytest.mark.parametrize(
    ("placed", "text"),
    [
        ({"tp": "Replicate"}, "Replicate"),
        ({"dp": "Replicate", "tp": "Replicate"}, "Replicate"),
        ({"dp": "Replicate", "tp": "Shard(out)"}, "Shard(out) @ tp"),
        ({"dp": "Shard(batch)", "tp": "Partial"}, "Shard(batch) @ dp, Partial @ tp"),
    ],
)
def test_placements_are_told_with_their_axes(placed, text) -> None:
    assert told(placed) == text


def test_the_table_of_devices_has_the_figures_of_the_cost_model() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "mesh.md").read_text(encoding="utf-8")
    rows = {
        c[1].strip(" `"): [x.strip() for x in c[2:-1]]
        for c in (r.split("|") for r in page.splitlines() if r[:3] == "| `")
    }
    for device in DEVICES.values():
        rates = [device.flops.get(name) for name in ("float64", "float32", "bfloat16", "float8_e4m3fn")]
        figures = [f"{rate / 10**12:g}" if rate else "" for rate in rates]
        sizes = [f"{device.bandwidth / 10**9:g}", f"{device.capacity / 10**9:g}"]
        assert rows[device.name] == [*figures, *sizes, device.sources]
