"""What is emitted for a rule: the text of every op under every strategy, run on simulated ranks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from placement import runtime as rt
from placement.emit.expressions import Printer
from placement.rules import joint_strategy
from placement.rules.proof import Call, prove
from tests.one_axis import one_axis
from tests.rules.samples import SAMPLES, Sample

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")  # torch's remark on kl_div


def emitted(call: Call) -> Sequence[Sequence[torch.Tensor]]:
    """Runs the op as the emitter writes it, implementations with their collectives too."""
    n = call.context.n
    plan = SimpleNamespace(
        strategies={call.node: joint_strategy(call.node, (call.strategy,))},
        bound=SimpleNamespace(dims=call.context.dims),
        mesh=one_axis(n),
        inside={},
    )
    text = Printer(plan).op(call.node, lambda index: f"x{index}", 0)
    code = compile(text, f"<{call.node.op}>", "eval")

    def body(axes: dict[str, rt.Axis]) -> tuple[torch.Tensor, ...]:
        axis = axes["tp"]
        own = {f"x{index}": x for index, x in enumerate(call.operands[axis.rank])}
        module = SimpleNamespace(training=False, tp=axis)
        made = eval(code, {"rt": rt, "torch": torch, "F": F, "self": module}, own)
        return tuple(made) if isinstance(made, tuple | list) else (made,)

    return rt.simulate(tp=n).run(body)


@pytest.mark.parametrize("sample", SAMPLES, ids=[f"{index}-{sample}" for index, sample in enumerate(SAMPLES)])
def test_emitted_code_holds(sample: Sample) -> None:
    for n in (2, 3, 4):
        prove(sample.op, *sample.arguments(n), n=n, execute=emitted, **sample.kwargs).require()


def test_implementations_are_offered_and_run() -> None:
    offered = {}
    for sample in SAMPLES:
        for finding in prove(sample.op, *sample.arguments(2), execute=emitted, **sample.kwargs).findings:
            if finding.strategy.implementation:
                assert finding.run
                offered.setdefault(finding.op, set()).add(finding.strategy.implementation)
    assert offered["aten.layer_norm.default"] == offered["aten.rms_norm.default"] == {"reduced statistics"}
    assert offered["aten.conv1d.default"] == {"own groups"}
    assert offered["aten.embedding.default"] == {"masked lookup"}
    assert offered["aten.cross_entropy_loss.default"] == {"over classes", "over tokens"}
    assert (
        offered["aten.mean.default"] == offered["aten.mean.dim"] == offered["aten.mse_loss.default"] == {"global count"}
    )
