"""Weights that are several in one: fused models of transformers, and chains of ops around a fused projection.

Everything is compared with one device in float64: outputs, input gradients, every parameter's gradient, and the state
in the order of the original. `tests/zoo` has more models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import placement
from placement import runtime as rt
from placement.graph.precision import lifted
from tests.cases.toys import close, gradients
from tests.parity.measure import call
from tests.runtime.worlds import Pool

# -- models of transformers ---------------------------------------------------------------------------

_SIZES = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 24, "use_cache": False,
}  # fmt: skip
_STILL = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
_PHI3 = {
    "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "intermediate_size": 12,
    "max_position_embeddings": 16, "original_max_position_embeddings": 16,
}  # fmt: skip
_MLA = {
    "intermediate_size": 12, "num_key_value_heads": 4, "kv_lora_rank": 6, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 2, "v_head_dim": 6, "first_k_dense_replace": 1,
}  # fmt: skip
# How a model is made, its spec, and what is said of where its fused weights are cut.
MODELS: dict[str, tuple[Callable[[], nn.Module], str, set[str]]] = {
    "q, k, v by slices; gate and up by halves": (
        lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**_SIZES, **_PHI3)),
        """
param **.{qkv_proj,gate_up_proj}.weight : Shard(out)
param **.{o_proj,down_proj}.weight : Shard(in)
""",
        {"rt.Cut(0, segments=(2, 1, 1))", "rt.Cut(0, 2)"},
    ),
    "all queries, one key, one value": (
        lambda: transformers.FalconForCausalLM(
            transformers.FalconConfig(**_SIZES, **_STILL, bias=True, new_decoder_architecture=False, multi_query=True)
        ),
        """
param **.self_attention.dense.weight : Shard(in)
param **.mlp.dense_h_to_4h.{weight,bias} : Shard(out)
param **.mlp.dense_4h_to_h.weight : Shard(in)
""",
        set(),
    ),
    "latents and a rotary part": (
        lambda: transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**_SIZES, **_MLA)),
        """
param **.{q_b_proj,kv_b_proj,gate_proj,up_proj}.weight : Shard(out)
param **.{o_proj,down_proj}.weight : Shard(in)
""",
        {".split((2, 6), -1)"},
    ),
}


def drawn(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = model.double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_models_with_fused_weights(name: str) -> None:
    build, lines, said = MODELS[name]
    model = drawn(build())
    ids, labels = torch.randint(0, 24, (2, 2, 6), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids, "labels": labels}
    text = "mesh tp\ndevice h100\ninput input_ids, labels : [batch, seq]\n" + lines
    with lifted(torch.float64):
        program = placement.compile(model, rt.simulate(tp=2), text, example=given)
    assert all(words in program.source for words in said), program.source
    assert moved(program) <= {"split", "keep"}, "what is cut stays cut"
    (want, _), (got, _) = call(model, **given), call(program, **given)
    close(dict(got), dict(want))
    close(program.full_gradients(), gradients(model))
    close(program.full_state_dict(), dict(model.state_dict()))


# -- chains of ops --------------------------------------------------------------------------------------

HEADS, KV_HEADS, HEAD, HIDDEN = 6, 2, 2, 8
SIZES = [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD]
Q, K, V = SIZES


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.unflatten(-1, (-1, HEAD)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


class Fused(nn.Module):
    """One projection for q, k and v; ``way`` from it to these, and to what is added before the attention's output."""

    def __init__(self, way: Callable[[Tensor], tuple[Tensor, ...]], rank: int = 0, p: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(HIDDEN, sum(SIZES)), nn.Linear(Q, HIDDEN)
        self.way, self.p = way, p
        self.down = nn.Linear(HIDDEN, rank, bias=False) if rank else None
        self.up = nn.Linear(rank, sum(SIZES), bias=False) if rank else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)
        if self.down is not None and self.up is not None:
            y = y + self.up(self.down(x))
        q, k, v, *more = self.way(F.dropout(y, self.p, self.training))
        out = attention(q, k, v)
        return self.o(out + more[0] if more else out)


def crossed(y: Tensor) -> tuple[Tensor, ...]:
    """Apart, joined in another order, and apart again."""
    q, k, v = y.split(SIZES, -1)
    v, q, k = torch.cat((v.relu(), q, k), -1).split([V, Q, K], -1)
    return q, k, v


def twice(y: Tensor) -> tuple[Tensor, ...]:
    """One border in one split, both in another."""
    q, k, _ = y.split(SIZES, -1)
    return q, k, y.split([Q + K, V], -1)[1], (y * 2).split([Q, K + V], -1)[0]


def unlike(y: Tensor) -> tuple[Tensor, ...]:
    """The last part begins within a head of q: for it the tensor is needed whole."""
    return *y.split(SIZES, -1), y[..., :Q] * y[..., -Q - 1 : -1].sigmoid()


def rows(y: Tensor) -> tuple[Tensor, ...]:
    """The sequence taken apart as well, which is of any length."""
    first, rest = y[:, :1], y[:, 1:]
    return *torch.cat((rest, first), 1).split(SIZES, -1), first[..., :Q]


WAYS: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], bool]] = {
    "split": (lambda y: tuple(y.split(SIZES, -1)), False),
    "slices": (lambda y: (y[..., :Q], y[..., Q : Q + K], y[..., -V:]), False),
    "a slice, and halves of the rest": (lambda y: (y[..., :Q], *y[..., Q:].chunk(2, -1)), False),
    "cat after split": (crossed, False),
    "two splits": (twice, False),
    "splits that do not fit": (unlike, True),
    "rows": (rows, False),
}
LINES = "param **.qkv.{weight,bias} : Shard(out) @ tp\nparam **.o.weight : Shard(in) @ tp\n"


def spec(mesh: str, lines: str = LINES, more: str = "") -> str:
    declared = "".join(f"mesh {axis}\n" for axis in mesh.split())
    return f"{declared}device h100\ninput x : [batch, seq, hidden]{more}\n{lines}"


def example(batch: int = 2, seq: int = 6) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seq)
    return {"x": torch.randn(batch, seq, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()}


def moved(program: Any) -> set[str]:
    """What is done with activations and weights, beside the sums that end a projection by rows."""
    return {step.conversion.forward.value for step in program.plan.steps} - {"none", "all_reduce"}


def checked(model: nn.Module, mesh: Any, text: str) -> Any:
    """Compile, and hold the program against the model."""
    program = placement.compile(model, mesh, text, example=example())
    held(model, program)
    return program


def held(model: nn.Module, program: Any) -> None:
    """Two calls of a program against the model: outputs, gradients, and the state in order."""
    close(program.full_state_dict(), model.state_dict())
    for given, same in ((example(), example()), (example(4, 3), example(4, 3))):
        want, got = model(**given), program(**same)
        close(got, want)
        weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for out in (want, got):
            (out * weight).sum().backward()
        close(same["x"].grad, given["x"].grad)
        close(program.full_gradients(), gradients(model))
    program.load_full_state_dict({name: 2 * x for name, x in model.state_dict().items()})
    close(program.full_state_dict(), {name: 2 * x for name, x in model.state_dict().items()})


@pytest.mark.parametrize("way", WAYS)
def test_ways_from_a_fused_projection(way: str) -> None:
    function, whole = WAYS[way]
    program = checked(drawn(Fused(function)), rt.simulate(tp=2), spec("tp"))
    assert bool(moved(program)) == whole, program.source


@pytest.mark.parametrize("sequence", ["all_gather", "reduce_scatter"])
def test_what_has_a_fused_dim_is_gathered_and_scattered(sequence: str) -> None:
    """A value line that has the whole projection on every rank, and a weight that makes terms of it."""
    lines = {"all_gather": LINES + "value qkv : Replicate\n", "reduce_scatter": "param qkv.weight : Shard(in)\n"}
    more = "param qkv.bias : Shard(out)\nparam o.weight : Shard(in)\nvalue qkv : Shard(fused)\n"
    named = "param qkv.weight : [fused, hidden]" + lines[sequence].removeprefix("param qkv.weight : ").join((", ", ""))
    text = spec("tp", lines["all_gather"] if sequence == "all_gather" else named + more)
    model = drawn(Fused(WAYS["split"][0]))
    program = checked(model, rt.simulate(tp=2), text)
    assert "segments=(3, 1, 1)" in program.source
    assert f"rt.{sequence}" in program.source


def test_adapters_on_a_frozen_fused_weight() -> None:
    model = drawn(Fused(WAYS["split"][0], rank=2))
    model.qkv.requires_grad_(requires_grad=False)
    program = checked(model, rt.simulate(tp=2), spec("tp", LINES + "param up.weight : Shard(out)\n"))
    assert {h.parameter.name for h in program.plan.hooks} == {"down.weight"}
    assert not moved(program)


def test_a_fused_weight_used_twice() -> None:
    model = drawn(nn.Sequential(Fused(WAYS["split"][0]), Fused(WAYS["slices"][0])))
    model[1].qkv = model[0].qkv
    tied = _Named(model)
    program = checked(tied, rt.simulate(tp=2), spec("tp"))
    assert not moved(program)


class _Named(nn.Module):
    """A module called with ``x``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_dropout_of_a_fused_value_is_that_of_one_device() -> None:
    """The masks of all ranks together are those of a program that keeps the value whole."""
    model = drawn(Fused(WAYS["split"][0], p=0.5))
    found = [
        placement.compile(model, rt.simulate(tp=2), text, example=example())
        for text in (spec("tp"), spec("tp", "value qkv : Replicate\n"))
    ]
    assert "(self.tp, 2, 1, (3, 1, 1))" in found[0].source
    outs = [program(**example()) for program in found]
    close(outs[0], outs[1])


@pytest.mark.parametrize("order", ["dp tp", "tp dp"])
def test_a_fused_weight_stored_in_blocks(order: str) -> None:
    """What is stored is a block of what the other axis leaves: of rows of q, k and v one after the other."""
    lines = LINES.replace("Shard(out) @ tp", "Shard(out) @ tp, stored Shard(0) @ dp")
    mesh = rt.simulate(**dict.fromkeys(order.split(), 2))
    program = checked(drawn(Fused(WAYS["split"][0])), mesh, spec(order, lines, ", Shard(batch) @ dp"))
    assert 'cut={"tp": rt.Cut(0, segments=(3, 1, 1)), "dp": rt.Cut(0)}' in program.source.replace("'", '"')


def _on_gloo(source: str) -> None:
    found: dict[str, Any] = {}
    exec(source, found)
    program = found["build"](init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    model = drawn(Fused(WAYS["slices"][0], rank=2))
    program.load_full_state_dict(model.state_dict())
    held(model, program)


@pytest.mark.gloo
def test_a_fused_weight_in_processes(gloo: Pool) -> None:
    model, text = drawn(Fused(WAYS["slices"][0], rank=2)), spec("tp", LINES + "value qkv : Replicate\n")
    source = placement.compile(model, rt.simulate(tp=2), text, example=example()).source
    assert "segments=(3, 1, 1)" in source
    assert "all_gather" in source
    gloo(2).run(_on_gloo, source)
