"""Every rule, every strategy: values and gradients on 2, 3 and 4 ranks are those of one device."""

from __future__ import annotations

import pytest
import torch

from placement.graph.ir import leaves
from placement.rules.core import registered
from placement.rules.proof import Proof, prove
from tests.rules.samples import SAMPLES, Sample

_IDS = [f"{index}-{sample}" for index, sample in enumerate(SAMPLES)]


@pytest.mark.parametrize("sample", SAMPLES, ids=_IDS)
def test_strategies_hold(sample: Sample) -> None:
    for n in (2, 3, 4):
        proof = prove(sample.op, *sample.arguments(n), n=n, **sample.kwargs).require()
        assert len(proof.findings) >= sample.least, str(proof)


@pytest.mark.parametrize("sample", SAMPLES, ids=_IDS)
def test_strategies_hold_on_data(sample: Sample) -> None:
    """Without gradients there is no invariant type, and nothing else is missing."""
    args = sample.arguments(2)
    data = _plain(prove(sample.op, *args, gradients=False, **sample.kwargs).require())
    assert data == [name for name in _plain(prove(sample.op, *args, **sample.kwargs)) if "I" not in name]


def _plain(proof: Proof) -> list[str]:
    return [repr(f.strategy) for f in proof.findings if not f.strategy.implementation]


@pytest.mark.parametrize("sample", SAMPLES, ids=_IDS)
def test_strategies_hold_where_one_operand_has_a_gradient(sample: Sample) -> None:
    count = len(_differentiable(sample))
    for index in range(count if count > 1 else 0):
        torch.manual_seed(0)
        args = sample.arguments(2)
        floats = [t for t in leaves(args) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        floats[index].requires_grad_()
        prove(sample.op, *args, **sample.kwargs).require()


def _differentiable(sample: Sample) -> list[torch.Tensor]:
    floats = [t for t in leaves(sample.arguments(2)) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return [] if any(t.requires_grad for t in floats) else floats


def test_every_rule_has_a_sample() -> None:
    sampled = {sample.op for sample in SAMPLES} | {sample.op.overloadpacket for sample in SAMPLES}
    known = [op for op in registered() if str(op).startswith("aten.")]
    assert [str(op) for op in known if op not in sampled] == []
