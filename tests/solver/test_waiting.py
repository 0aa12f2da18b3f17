"""How collectives beside linear layers are cut where no line says it: by what is waited for, and never for more."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest

from placement.report.data import explain_data
from placement.report.text import explain_text
from placement.solver.overlap import ASYNC, RING, chunks
from placement.solver.plan import Plan, Step
from placement.solver.waiting import LAUNCH, exposed
from placement.types import Action
from tests.parity import test_llama70b as llama
from tests.report.plans import SEQUENCE, WHOLE, make

SLOW = "device slow = 1 GFLOP/s float32, 1 GB/s, 16 GB\nlink wire = {link}\n"
MODES = {"sp": "", "tp": llama.REPLICATED_NORMS}


def small(spec: str, link: str = "10 MB/s, 1 us", more: str = "", seq: int = 4096) -> Plan:
    """Small blocks on devices that are slow enough for a product to be worth cutting."""
    return make(SLOW.format(link=link) + spec.replace("mesh tp", "mesh tp over wire") + more, seq=seq)


def beside(plan: Plan) -> Iterator[tuple[str, Step]]:
    for step in plan.steps:
        if step.beside:
            yield "+".join(node.module.rpartition(".")[2] for node in step.beside), step


def chosen(plan: Plan) -> dict[str, str]:
    return {name: step.overlap for name, step in beside(plan)}


def test_a_layer_of_70b_parameters_is_cut_where_products_are_long() -> None:
    found = chosen(llama.planned(head=llama.SHARDED, embedding=llama.SHARDED))
    assert found["gate_proj+up_proj"] == RING
    assert found["down_proj"] == "chunks(4)"
    assert found["q_proj+k_proj+v_proj"] == found["o_proj"] == ASYNC  # an eighth is over before a host can launch it
    found = chosen(llama.planned(more=llama.REPLICATED_NORMS))
    assert RING not in found.values()  # every rank gets the whole sum
    assert found["down_proj"] == "chunks(4)"


def test_small_layers_go_in_one_piece() -> None:
    for spec in (SEQUENCE, WHOLE):
        plan = make("device h100\n" + spec)
        assert set(chosen(plan).values()) == {ASYNC}
        assert not any(step.priced for step in plan.steps)


@pytest.mark.parametrize("mode", MODES)
def test_never_more_is_waited_for_than_in_one_piece(mode: str) -> None:
    for plan in (llama.planned(more=MODES[mode]), *(small(spec) for spec in (SEQUENCE, WHOLE))):
        for _, step in beside(plan):
            took = {way: sum(exposed(plan, step, way)) for way in (ASYNC, RING, "chunks(4)", step.overlap)}
            assert took[step.overlap] == min(took.values())
            assert step.priced == (step.overlap != ASYNC)


def test_what_lines_say_holds() -> None:
    plan = small(SEQUENCE, more="lower blocks.0 : overlap = async\nlower blocks.1 : overlap = chunks(3)\n")
    found = {(node.module, s.overlap, s.priced) for _, s in beside(plan) for node in s.beside}
    assert {(overlap, priced) for module, overlap, priced in found if module.startswith("blocks.0")} == {(ASYNC, False)}
    assert {(overlap, priced) for module, overlap, priced in found if module.startswith("blocks.1")} == {
        ("chunks(3)", False)
    }
    assert ("blocks.2.up", RING, True) in found


def test_what_is_kept_goes_in_one_piece() -> None:
    found = chosen(small(SEQUENCE, more="lower ** : gathered = kept\n"))
    assert found["up"] == ASYNC
    assert found["down"] != ASYNC  # nothing is gathered for it


def test_a_cpu_sends_with_the_cores_that_multiply() -> None:
    figures = "100 GFLOP/s float32, 20 GB/s, 16 GB"  # those of the cpu
    for device, cut in (("cpu", False), (f"other = {figures}", True)):
        spec = f"device {device}\nlink wire = 1 GB/s, 100 us\n" + SEQUENCE.replace("mesh tp", "mesh tp over wire")
        assert (RING in chosen(make(spec, seq=2**18)).values()) == cut


def test_what_is_cut_is_told() -> None:
    data = explain_data(small(SEQUENCE))
    told = {c["module"]: c.get("overlap") for c in data["conversions"]}
    assert told["blocks.1.up"] == RING
    sent = {action for totals in data["totals"]["tp"].values() for action in totals}
    assert Action.SEND_RECV.value in sent


def test_the_formulas() -> None:
    """Of rows that are gathered for one layer, on four ranks, forward: by hand from figures of the device and link."""
    plan = small(SEQUENCE, link="10 MB/s, 1 ms")
    step = next(s for name, s in beside(plan) if name == "up")
    n, seq, hidden, out = 4, 4096, 16, 32
    nbytes, flops = 3 * seq * hidden * 4, 2 * 3 * seq * hidden * out // n
    work = Fraction(flops, 10**9) * 10**12
    sent = Fraction(nbytes * (n - 1), n * 10**7) * 10**12
    latency = 10**9
    assert step.times[0] == latency + sent
    assert plan.work[step.layers[0]][0] == work
    product, hop = work / n, latency + sent / (n - 1)
    assert min(product, hop) > LAUNCH
    assert abs(exposed(plan, step, RING)[0] - (product + (n - 1) * max(product, hop) - work)) < n
    copied = Fraction(2 * 3 * seq * out * 4, n * 10**9) * 10**12
    product, piece = (work + copied) / 4, latency + sent / 4
    assert abs(exposed(plan, step, "chunks(4)")[0] - (piece + 3 * max(product, piece) + product - work)) < n
    assert exposed(plan, step, ASYNC)[0] == step.times[0]
    # Where a host cannot launch products as fast as they run, pieces cost that.
    fast = make("device h100\n" + SEQUENCE, seq=4096)
    step = next(s for name, s in beside(fast) if name == "up")
    assert exposed(fast, step, RING)[0] == n * LAUNCH - fast.work[step.layers[0]][0]
    assert chunks(step.overlap) == 0


def test_it_is_told_by_price() -> None:
    assert "Shard(seq) -> Replicate, ring by price" in explain_text(small(SEQUENCE), width=120)
    (told,) = {c["priced"] for c in explain_data(small(SEQUENCE))["conversions"] if "overlap" in c}
    assert told
