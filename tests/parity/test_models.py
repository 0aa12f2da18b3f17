"""Unmodified transformers models under the examples' specs equal one device: everything, in float64.

Outputs, input gradients (with ``inputs_embeds``), every parameter's gradient, weights after AdamW steps, and
replicas bit by bit; the same compiled module at several batch sizes and sequence lengths.
"""

from __future__ import annotations

import pytest
import torch

from placement import runtime as rt
from tests.parity import measure, models
from tests.runtime.worlds import Pool

CASES = [(family, mode) for family in models.FAMILIES for mode in models.MODES]
names = [f"{family}-{mode}" for family, mode in CASES]


@pytest.mark.parametrize(("n", "embeds"), [(2, False), (4, False), (2, True)], ids=["2-ids", "4-ids", "2-embeds"])
@pytest.mark.parametrize(("family", "mode"), CASES, ids=names)
def test_simulated(family: str, mode: str, n: int, embeds: bool) -> None:
    assert measure.measure(rt.simulate(tp=n), family, mode, embeds=embeds).problems() == []


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("family", "mode", "embeds"),
    [("qwen3", "sp", False), ("llama", "tp", True), ("gpt2", "sp", True), ("bert", "tp", False)],
)
def test_two_processes(family: str, mode: str, embeds: bool, gloo: Pool) -> None:
    for measured in gloo(2).run(measure.on_gloo, 2, family, mode, embeds):
        assert measured.problems() == []


@pytest.mark.gloo
def test_four_processes(gloo: Pool) -> None:
    for measured in gloo(4).run(measure.on_gloo, 4, "qwen3", "sp", False):
        assert measured.problems() == []


def test_a_fault_shows() -> None:
    """The measure itself: a weight that is off on one rank, and a gradient that is missing, are reported."""
    measured = measure.Measured()
    w = torch.ones(3, dtype=torch.float64)
    measured.note("gradient", {"a": w * (1 + 1e-10), "b": None, "c": w}, {"a": w, "b": w, "c": w})
    assert [p.split(":")[0] for p in measured.problems()] == ["gradient of a", "gradient of b"]
    _, program = measure.compiled(rt.simulate(tp=2), "llama", "sp")
    assert measure.drifted(program) == []
    with torch.no_grad():
        program.programs[1].model.norm.weight[0] += 1e-15
    assert measure.drifted(program) == ["model.norm.weight"]
