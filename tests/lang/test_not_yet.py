"""What the compiler cannot do yet is refused at binding, each thing once, and nowhere before."""

from fractions import Fraction

import pytest

from placement.lang import PlacementError, check, parse
from placement.lang.diagnostics import Diagnostics
from placement.solver.unsupported import refuse

HEAD = "mesh tp = 4\ninput x : [batch, seq]\n"

CASES = [
    ("input y : auto", "PLC206", "an input left to the solver is not supported yet", "auto"),
]


def refused(text):
    found = Diagnostics()
    refuse(parse(text), found)
    return found.sorted()


@pytest.mark.parametrize(("line", "code", "message", "covered"), CASES, ids=[case[0] for case in CASES])
def test_what_is_missing_is_named(line, code, message, covered):
    (fault,) = refused(HEAD + line)
    assert (fault.code, fault.message) == (code, message)
    assert (fault.line, line[fault.column - 1 : fault.span.end_column - 1]) == (3, covered)
    assert fault.hint or fault.notes


def test_what_is_supported_is_not_refused():
    text = "mesh dp\nparam a : Shard(0) @ tp, stored Shard(0) @ dp\nparam c : auto\nvalue b : auto @ tp\n"
    text += "value d : Shard(seq, zigzag) @ tp\noutput o : auto @ tp, Partial @ tp\ndevice h100\n"
    assert refused(HEAD + text + "limit memory 60 GB\nexpect a : all_gather <= 2") == ()


def test_all_at_once_at_binding_and_none_by_the_check():
    import placement
    from examples.mlp.model import build

    text = "mesh tp = 2\ninput x : [batch, seq, width], auto\ninput target : [batch, seq, width], auto\n"
    assert check(parse(text)) == ()
    model, example = build()
    with pytest.raises(PlacementError) as caught:
        placement.plan(model, {"tp": 2}, parse(text), example=example)
    assert [(d.code, d.line) for d in caught.value.diagnostics] == [("PLC206", 2), ("PLC206", 3)]


def test_a_link_of_ones_own_is_priced():
    import placement
    from examples.mlp.model import build

    def times(name):
        text = f"mesh tp = 2 over {name}\nlink slow = 1 MB/s, 1 s\ninput x, target : [batch, seq, width]\n"
        text += "param blocks.*.up.weight : Shard(out) @ tp\n"
        model, example = build()
        (link,) = placement.plan(model, {"tp": 2}, parse(text), example=example).mesh.links
        return link.bandwidth, link.latency

    assert times("slow") == (10**6, 1)
    assert times("ib") == (50 * 10**9, Fraction(20, 10**6))


def test_a_device_of_ones_own_is_priced():
    import placement
    from examples.mlp.model import build
    from placement.solver.cost import LINKS, Device

    def planned(figures):
        text = f"mesh tp = 2\n\ndevice mine = {figures}\ninput x, target : [batch, seq, width]\nlimit memory 2 TB\n"
        model, example = build()
        return placement.plan(model, {"tp": 2}, parse(text, "net.plc"), example=example)

    plan = planned("96 GB, 4 PFLOP/s bfloat16, 0.5 TFLOP/s float32, 2 TB/s")
    flops = {"bfloat16": 4 * 10**15, "float32": 5 * 10**11}
    assert plan.mesh.device == Device("mine", flops, 2 * 10**12, 96 * 10**9, "net.plc:3")
    assert plan.mesh.links == (LINKS["nvlink"],)
    assert "device mine, link nvlink" in placement.report.view(plan, "text", name="net.plc", sources={})
    slower = planned("96 GB, 4 PFLOP/s bfloat16, 50 GFLOP/s float32, 2 TB/s")
    assert slower.cost[0] > plan.cost[0]
