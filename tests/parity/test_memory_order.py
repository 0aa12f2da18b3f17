"""Tokens that are cut lie outermost in memory: nothing of their size is copied for collectives, and nothing changes."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import placement
from placement import runtime as rt
from tests.cases.toys import close, gradients
from tests.runtime.worlds import Pool

HIDDEN, VOCAB, BATCH, SEQ = 8, 16, 2, 6


class Decoder(nn.Module):
    """Embedding, attention and a gated layer around a residual, a head. ``how``: what else becomes of the residual."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.first, self.second, self.last = (nn.RMSNorm(HIDDEN, 1e-6) for _ in range(3))
        sizes = {"q": (8, 8), "k": (8, 4), "v": (8, 4), "o": (8, 8), "gate": (8, 12), "up": (8, 12), "down": (12, 8)}
        for name, (size, out) in sizes.items():
            self.add_module(name, nn.Linear(size, out, bias=name in ("q", "o")))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        y = self.first(x)
        q, k, v = (p(y).unflatten(-1, (-1, 2)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.second(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        logits = self.head(self.last(x)).flatten(0, 1)
        return (logits, x) if self.how == "returned" else logits


SPEC = """
mesh tp
device h100
input ids : [batch, seq]
param {embed,q,k,v,gate,up,head}.* : Shard(0)
param {o,down}.weight : Shard(1)
value {embed,o,down} : Shard(seq)
"""


def made(how: str = "") -> tuple[Decoder, Any, Tensor]:
    torch.manual_seed(0)
    model, ids = Decoder(how).double(), torch.randint(0, VOCAB, (BATCH, SEQ))
    spec = f"{SPEC}output 1 : Shard(seq)\n" if how else f"{SPEC}output output : Shard(1)\n"
    return model, placement.compile(model, rt.simulate(tp=2), spec, example={"ids": ids}), ids


class Copies(TorchDispatchMode):
    """Lists copies of as much as a rank's block of the residual that the runtime makes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").split(".")[0]
        large = isinstance(out, Tensor) and out.is_floating_point() and out.numel() >= BATCH * SEQ // 2 * HIDDEN
        if name in ("clone", "copy_", "cat", "_to_copy") and large:
            where = [frame for frame in traceback.extract_stack() if "placement/runtime" in frame.filename]
            self.found += [f"{name} {list(out.shape)} in {where[-1].name}"] if where else []
        return out


def _on_mesh(source: str, model: Decoder) -> Any:
    found: dict[str, Any] = {}
    exec(source, found)
    program = found["build"](init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    program.load_full_state_dict(model.state_dict())
    return program


def _on_gloo(source: str, model: Decoder, ids: Tensor) -> None:
    program = _on_mesh(source, model)
    got, want = program(ids).full_tensor(), model(ids)
    for out in (got, want):
        (out * out.detach().cos()).sum().backward()
    close(got, want)
    close(program.full_gradients(), gradients(model))


@pytest.mark.gloo
def test_the_order_of_memory_in_processes(gloo: Pool) -> None:
    model, program, ids = made()
    gloo(2).run(_on_gloo, program.source, model, ids)


def test_nothing_of_the_size_of_the_residual_is_copied() -> None:
    """Counted on a group that sends nothing: gloo has copies of its own."""
    model, program, ids = made()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        own = _on_mesh(program.source, model)
        with Copies() as copies:
            own(ids).to_local().sum().backward()
    finally:
        dist.destroy_process_group()
    assert copies.found == []


@pytest.mark.parametrize(("how", "lie"), [("", True), ("returned", False)])
def test_where_the_residual_goes_decides(how: str, lie: bool) -> None:
    model, program, ids = made(how)
    lines = [line for line in program.source.splitlines() if "self.tp" in line and "rt." in line]
    lying = {line.partition("rt.")[2].partition("self.tp")[0] for line in lines if "outermost=True" in line}
    residual = {text for text in lying if text.startswith(("reduce_scatter", "masked_embedding"))}
    assert len(residual) == (4 if lie else 0), lines
    assert "all_gather_linears([self.gate, self.up], second, " in lying
    assert not any("self.head" in text for text in lying), "the logits would be copied"
    for one in (model, program):
        outs = one(ids)
        sum((out * out.detach().cos()).sum() for out in (outs if how else (outs,))).backward()
    close(program.full_gradients(), gradients(model))
