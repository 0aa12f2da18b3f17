"""Every rule, every strategy: values and gradients on 2, 3 and 4 ranks are those of one device."""

from __future__ import annotations

import pytest

from placement.rules.core import registered
from placement.rules.proof import prove
from tests.rules.samples import SAMPLES, Sample

_IDS = [f"{index}-{sample}" for index, sample in enumerate(SAMPLES)]


@pytest.mark.parametrize("sample", SAMPLES, ids=_IDS)
def test_strategies_hold(sample: Sample) -> None:
    for n in (2, 3, 4):
        for gradients in (True, False):
            proof = prove(sample.op, *sample.arguments(n), n=n, gradients=gradients, **sample.kwargs).require()
            assert len(proof.findings) >= sample.least - (2 if not gradients else 0), str(proof)


def test_every_rule_has_a_sample() -> None:
    sampled = {sample.op for sample in SAMPLES} | {sample.op.overloadpacket for sample in SAMPLES}
    known = [op for op in registered() if str(op).startswith("aten.")]
    assert [str(op) for op in known if op not in sampled] == []
