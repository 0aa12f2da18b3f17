"""The table of what ops keep, op by op, against torch's own hooks on the ops themselves."""

from __future__ import annotations

import pytest
import torch

from placement.graph.factors import infer
from placement.graph.ir import leaves
from placement.rules import Context, signature_of
from placement.rules.proof import _single  # a program of one op
from placement.solver.bind import Bound
from placement.solver.storages import OneDevice
from tests.memory.saved_hooks import kept_bytes
from tests.one_axis import one_axis
from tests.rules.samples import SAMPLES

# What torch composes of other ops in ways that depend on values, shapes or the device.
OTHERWISE = {
    "dropout.default": "the runtime's own, tested with programs",
    "scaled_dot_product_attention.default": "tested with programs: on a CPU no fused kernel takes these samples",
    "placement.attention.default": "tested with programs, too",
    "rms_norm.default": "the runtime's own, tested with programs",
    "einsum.default": "composed of products with copies in between",
    "kl_div.default": "composed in two ways",
}


def tensors_of(sample):
    given = sample.arguments(2)
    tensors = [t for t in leaves(given) if isinstance(t, torch.Tensor)]
    if not any(t.requires_grad for t in tensors):
        for tensor in tensors:
            tensor.requires_grad_(tensor.is_floating_point())
    return given, tensors


def unplaced(graph):
    """Bound to one rank, without a spec."""
    context = Context(infer(graph, signature_of), 1, {}, frozenset())
    return Bound(graph, context.dims, one_axis(1), (context,), inputs={}, parameters={}, values={}, outputs={})


@pytest.mark.parametrize("sample", SAMPLES, ids=[f"{i}-{sample}" for i, sample in enumerate(SAMPLES)])
def test_an_op_keeps_what_the_table_says(sample):
    """Whatever of its operands have a gradient: all of them, or one alone."""
    if str(sample) in OTHERWISE:
        return
    torch.manual_seed(0)
    given, tensors = tensors_of(sample)
    trained = [t for t in dict.fromkeys(tensors) if t.requires_grad]
    for chosen in [trained, *([t] for t in trained)]:
        for tensor in trained:
            tensor.requires_grad_(any(tensor is t for t in chosen))
        results = []
        real = kept_bytes(lambda results=results: results.append(sample.op(*given, **sample.kwargs)), ())
        if any(t.requires_grad for t in leaves(results) if isinstance(t, torch.Tensor)):
            graph, _ = _single(sample.op, given, sample.kwargs)
            one = OneDevice(unplaced(graph))
            assert sum(item.nbytes for item in one.saved()) == real, [(i.value, i.own, i.nbytes) for i in one.saved()]
