"""The emitted module under torch.compile: one graph without a break, the gradients and collectives of eager."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.device_mesh import init_device_mesh

import placement
from placement import runtime as rt
from tests.parity import models
from tests.parity.measure import whole
from tests.runtime.worlds import Pool

STORED = """
mesh tp
input input_ids, labels : [batch, seq], Shard(batch)
param **.weight : stored Shard(0)
output logits : auto
"""
# model, spec, configuration
CASES = {
    "dropout": ("gpt2", models.spec("gpt2"), {"n_layer": 1, "resid_pdrop": 0.3, "embd_pdrop": 0.2, "attn_pdrop": 0.1}),
    "padding": ("bert", models.spec("bert"), {"num_hidden_layers": 1}),  # of a table whose rows are cut
    "stored": ("llama", STORED, {"num_hidden_layers": 1}),
}
_NAMES = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


class Graphs:
    """A backend that keeps what it is given, as a compiler has it: forward and backward, in turn."""

    def __init__(self) -> None:
        self.made: list[fx.GraphModule] = []
        self.backend = aot_autograd(
            fw_compiler=self._keep, bw_compiler=self._keep, partition_fn=min_cut_rematerialization_partition
        )

    def _keep(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.made.append(graph)
        return make_boxed_func(graph.forward)


def collectives(graph: fx.GraphModule) -> Counter[str]:
    """Launches by kind. Each has one wait, and what uses the result uses what was waited for."""
    found: Counter[str] = Counter()
    for node in graph.graph.nodes:
        name = str(node.target)
        if not name.startswith("_c10d_functional.") or "wait_tensor" in name:
            continue
        (wait,) = node.users
        assert "wait_tensor" in str(wait.target)
        kind = name.split(".")[1]
        found[_NAMES.get(kind, kind)] += 1
    return found


def compiled(case: str) -> None:
    family, spec, config = CASES[case]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = models.build(family, **config)
    program: Any = placement.compile(model, mesh, spec, example=models.inputs(2))
    graphs = Graphs()
    fast = torch.compile(program, backend=graphs.backend, fullgraph=True)
    lengths = (12, 20) if case == "stored" else (12,)
    for seq in lengths:
        given = models.inputs(2, seq)
        if case == "stored":  # this rank's part of the batch
            given = {name: x.chunk(2)[mesh.get_rank()] for name, x in given.items()}
        results = []
        for one in (program, fast):
            rt.seed(program, 3)
            program.zero_grad()
            with rt.record() as log:
                out = one(**given)
                out["loss"].backward()
            results.append((whole(out), {name: g.clone() for name, g in program.full_gradients().items()}))
            if one is program:
                eager = log
            else:  # the sum of replicated parameters' gradients is no part of the graph
                hooks = Counter(event.kind for event in log)
        for got, want in zip(*results, strict=True):
            for name in {**got, **want}:
                bound = 1e-12 * float(want[name].abs().max())
                torch.testing.assert_close(got[name], want[name], rtol=1e-11, atol=bound)
        forward, backward = graphs.made[-2:]
        assert collectives(forward) == Counter(e.kind for e in eager if e.phase == "forward")
        assert collectives(backward) + hooks == Counter(e.kind for e in eager if e.phase == "backward")
    assert len(graphs.made) == 2 * len(lengths)
    torch.compiler.reset()


@pytest.mark.gloo
@pytest.mark.parametrize("case", CASES)
def test_one_graph(case: str, gloo: Pool) -> None:
    """C24, C29. Also what is gathered again in the backward is, and each collective has exactly one wait."""
    gloo(2).run(compiled, case)
