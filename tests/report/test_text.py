"""The text says everything once and never leaves the page."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import pytest

from placement.report import explain_text
from placement.report.facts import Converted, facts
from placement.report.fold import blocks, layer_sums, summed
from placement.report.text import _Page
from placement.types import Kind
from tests.report.plans import LONG, MIXED, PLACED, SEQUENCE, SPEC, WHOLE, make
from tests.report.test_data import PLANS

ANSI = re.compile(r"\x1b\[[0-9]+m")


@pytest.mark.parametrize(("name", "spec", "seq"), [("sequence", SEQUENCE, 4096), ("whole", WHOLE, 8)])
def test_golden(golden, name, spec, seq):
    golden(f"report/net_{name}.txt", explain_text(make(spec, seq=seq)))


@pytest.mark.parametrize("width", [60, 72, 80, 100, 120])
@pytest.mark.parametrize("plan", PLANS)
def test_lines_fit(plan, width):
    text = explain_text(PLANS[plan](), width, verbose=True)
    assert max(map(len, text.splitlines())) <= width
    assert not re.search(r"[ \t]$", text, re.MULTILINE)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_arrows_are_whole_at_any_length(width):
    text = explain_text(make(SEQUENCE, name=LONG), width)
    arrows = [line for line in text.splitlines()[4:] if ">" in line]
    assert arrows
    assert all(re.search(r"(^ +|\S )-> \S", line) for line in arrows)
    assert any(line.endswith((LONG + ".0")[-20:]) for line in arrows) or f"embed.table -> {LONG}.0" in text


def test_the_ends_of_long_names_are_kept():
    text = explain_text(make(SEQUENCE, name=LONG))
    assert re.search(r"^\.\.\.\S+\.\[0-2\]$", text, re.MULTILINE)


def test_narrower_than_can_be_is_the_narrowest_that_can():
    assert explain_text(make(SEQUENCE), 10) == explain_text(make(SEQUENCE), 60)


@pytest.mark.parametrize("plan", PLANS)
def test_colour_changes_no_character(plan):
    plain = explain_text(PLANS[plan](), verbose=True)
    colored = explain_text(PLANS[plan](), color=True, verbose=True)
    assert colored != plain
    assert ANSI.sub("", colored) == plain


@pytest.mark.parametrize("plan", PLANS)
def test_everything_is_told_once(plan):
    found = facts(PLANS[plan]())
    told = [id(member) for block in blocks(found) for item in block.items for member in item.members]
    assert Counter(told) == Counter(id(event) for event in (*found.conversions, *found.inside))
    hooks = [hook.parameter for group in summed(found, 60) for hook in group.members]
    assert Counter(hooks) == Counter(hook.parameter for hook in found.hooks)


@pytest.mark.parametrize("plan", PLANS)
def test_blocks_add_up_to_the_step(plan):
    made = PLANS[plan]()
    found = facts(made)
    for phase in ("forward", "backward"):
        total = Counter()
        for block in blocks(found):
            for action, (count, nbytes) in layer_sums(block.items, phase).items():
                total[action, "count"] += count * len(block.modules)
                total[action, "bytes"] += nbytes * len(block.modules)
        if phase == "backward" and found.hooks and made.mesh.axes[0].n > 1:
            total["all_reduce", "count"] += 1
            total["all_reduce", "bytes"] += sum(hook.nbytes for hook in found.hooks)
        step = Counter()
        for action, (count, nbytes) in found.totals["tp"][phase].items():
            step[action, "count"], step[action, "bytes"] = count, nbytes
        assert total == step


def test_alike_layers_are_one_block():
    titles = [(block.title, len(block.modules)) for block in blocks(facts(make(SEQUENCE, seq=4096)))]
    assert titles == [("", 1), ("blocks.[0-2]", 3), ("", 1)]


def test_a_layer_that_differs_has_a_block_of_its_own():
    layers = [block.modules for block in blocks(facts(make(MIXED, layers=4))) if block.is_layer]
    assert ("blocks.1",) in layers
    assert sorted(layer for modules in layers for layer in modules) == [f"blocks.{i}" for i in range(4)]


def gathered(layer: int, value: str, step: int, **changes: object) -> Converted:
    """A gather of ``value`` before ``blocks.LAYER.up``."""
    plain = Converted(
        value=value,
        home=f"blocks.{layer}",
        module=f"blocks.{layer}.up",
        place=f"blocks.{layer}.up",
        users=(f"blocks.{layer}.up.linear",),
        user_modules=(f"blocks.{layer}.up",),
        axis="tp",
        axes=("tp",),
        source="Shard(seq)",
        target="Replicate",
        source_type=Kind.S,
        target_type=Kind.R,
        forward="all_gather",
        backward="reduce_scatter",
        nbytes=1024,
        cause=("net.plc:1",),
        position=(step, 0),
    )
    return dataclasses.replace(plain, **changes)


def folded(*conversions: Converted) -> list[tuple[str, list[str]]]:
    found = dataclasses.replace(facts(make(SPEC)), conversions=conversions, inside=())
    return [(block.title, [item.source for item in block.items]) for block in blocks(found)]


def test_alike_layers_with_another_between_are_one_block():
    each = [gathered(i, f"blocks.{i}.norm", i) for i in range(4)]
    each[1] = gathered(1, "blocks.1.norm", 1, nbytes=2048)
    assert folded(*each) == [("blocks.{0,[2-3]}", ["norm"]), ("blocks.1", ["norm"])]


@pytest.mark.parametrize(
    "change",
    [{"axis": "dp"}, {"backward": "split"}, {"source": "Shard(2)"}, {"value": "blocks.1.other"}, {"nbytes": 1}],
)
def test_layers_are_alike_in_everything_but_causes(change):
    first, second = gathered(0, "blocks.0.norm", 0), gathered(1, "blocks.1.norm", 1, cause=("net.plc:2",))
    assert folded(first, second) == [("blocks.[0-1]", ["norm"])]
    assert len(folded(first, dataclasses.replace(second, **change))) == 2


def test_what_alike_layers_are_given_is_their_input():
    given = [gathered(i, "embed" if i == 0 else f"blocks.{i - 1}", i) for i in range(3)]
    assert folded(*given) == [("blocks.[0-2]", ["input"])]
    assert folded(given[0]) == [("blocks.0", ["embed"])]


def test_what_lies_between_layers_interrupts_what_is_outside():
    before, after = (gathered(0, "x", i, place="norm", module="norm") for i in (0, 2))
    layer = gathered(0, "blocks.0.norm", 1)
    assert [title for title, _ in folded(before, layer, after)] == ["norm", "blocks.0", "norm"]
    assert [title for title, _ in folded(before, after)] == ["norm"]


def test_causes_of_alike_layers_are_joined():
    (block,) = (block for block in blocks(facts(make(SEQUENCE, seq=4096))) if block.is_layer)
    down = next(item for item in block.items if item.source == "down.linear")
    assert set(down.cause) == {cause for member in down.members for cause in member.cause}
    assert len({member.cause for member in down.members}) > 1  # the last layer's residual goes to the final norm


def test_the_two_kinds_of_replicate_are_told_apart_where_they_meet():
    text = explain_text(make(WHOLE))
    assert "Invariant -> Replicate @ tp" in text
    assert "Replicate -> Replicate" not in text


def test_a_placed_value_is_converted_where_it_is_made():
    found = facts(make(PLACED, layers=2))
    (item,) = (item for block in blocks(found) for item in block.items if item.target == "as placed")
    assert (item.source, item.rows[0].what, item.rows[0].forward) == (
        "output",
        "Partial -> Shard(seq)",
        "reduce_scatter",
    )
    assert explain_text(make(PLACED, layers=2)).count("as placed") == 1


def test_hooks_say_what_they_meet():
    meets = {hook.parameter: hook.meets for hook in facts(make(SEQUENCE)).hooks}
    assert meets["blocks.0.norm.weight"] == ("Shard(seq)",)
    assert meets["blocks.2.down.bias"] == ("Shard(seq)",)
    assert "embed.table.weight" not in meets
    assert facts(make(WHOLE)).hooks == ()


def test_verbose_adds_parameters_and_stages():
    plan = make(SEQUENCE)
    short, long = explain_text(plan), explain_text(plan, verbose=True)
    assert re.search(r"Stages   solve [0-9.]+ s, plan ", long)
    assert "Stages" not in short
    assert re.search(r"blocks\.\[0-2\]\.down\.weight +Shard\(in\) @ tp", long)
    assert not re.search(r"down\.weight", short)


def test_one_rank_sends_nothing():
    text = explain_text(make(SEQUENCE, n=1))
    assert not re.search("all_|scatter", text)
    assert len(re.findall("nothing$", text, re.MULTILINE)) == 2  # forward and backward of the step


def test_a_gap_is_told():
    found = facts(make(SPEC))
    changed = dataclasses.replace(found, cost=1_030_000_000, bound=1_000_000_000, optimal=False)
    assert "at most 3 % above the optimum" in " ".join(_Page(changed, 80, color=False).text(verbose=False).split())
    assert "the optimum, proven" in explain_text(make(SPEC))


def test_notes_are_told_and_fit():
    found = dataclasses.replace(facts(make(SPEC)), notes=("net.plc:3:1: " + "parameter 'x' stays replicated " * 5,))
    text = _Page(found, 80, color=False).text(verbose=False)
    assert "Note     net.plc:3:1: parameter" in text
    assert max(map(len, text.splitlines())) <= 80


def test_nothing_to_say_is_said():
    found = dataclasses.replace(facts(make(SPEC)), conversions=(), inside=())
    assert "nothing is sent between modules" in _Page(found, 80, color=False).text(verbose=False)
