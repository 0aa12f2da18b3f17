"""A 70B shape on the meta device: parallelism as the literature has it follows from prices and placed weights.

8192 hidden, 64 heads, 8 KV heads, 28672 in the MLP, 32000 tokens of vocabulary; 4096 tokens in bfloat16 on eight
H100s. The specs place weights and say nothing of activations, unless a test is about that.
"""

from __future__ import annotations

import functools
from collections import Counter
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn

from placement import api
from placement.graph.capture import capture
from placement.graph.ir import Graph, Node
from placement.solver.plan import Plan, Step

HIDDEN, SEQ = 8192, 4096
RESIDUAL = SEQ * HIDDEN * 2  # bytes
_SIZES = {"hidden_size": HIDDEN, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}

SPEC = """
device h100
mesh tp = 8 over nvlink
input input_ids, labels : [batch, seq]
param model.embed_tokens.weight : [vocab, hidden]{embedding}
param lm_head.weight : [vocab, hidden]{head}
within model.layers.* {{
  param self_attn.{{q,k,v}}_proj.weight : Shard(out)
  param self_attn.o_proj.weight : Shard(in)
  param mlp.{{gate,up}}_proj.weight : Shard(out)
  param mlp.down_proj.weight : Shard(in)
}}
"""
COLUMN_BIASES = "param model.layers.*.{self_attn.{q,k,v}_proj,mlp.{gate,up}_proj}.bias : Shard(out)\n"
REPLICATED_NORMS = "value model.layers.*.{input,post_attention}_layernorm : Replicate\nvalue model.norm : Replicate\n"
SHARDED = ", Shard(vocab)"


def build(family: str, layers: int, *, bias: bool = False) -> nn.Module:
    sizes = {**_SIZES, "num_hidden_layers": layers, "vocab_size": 32000, "use_cache": False}
    with torch.device("meta"):
        if family == "qwen3":
            model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=128))
        else:
            config = transformers.LlamaConfig(**sizes, attention_bias=bias, mlp_bias=bias)
            model = transformers.LlamaForCausalLM(config)
    return model.to(torch.bfloat16).train()


def inputs() -> dict[str, Tensor]:
    return {name: torch.empty(1, SEQ, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}


@functools.cache
def captured(family: str, layers: int, bias: bool) -> tuple[nn.Module, Graph]:
    model = build(family, layers, bias=bias)
    return model, capture(model, inputs(), {"input_ids": ("batch", "seq"), "labels": ("batch", "seq")})


@functools.cache
def planned(
    family: str = "llama", layers: int = 2, embedding: str = "", head: str = "", more: str = "", bias: bool = False
) -> Plan:
    model, graph = captured(family, layers, bias)
    spec = SPEC.format(embedding=embedding, head=head) + more
    with mock.patch.object(api, "capture", return_value=graph):  # one graph for all specs
        return api.plan(model, None, spec, example=inputs())


def module_of(step: Step, plan: Plan) -> str:
    """Where the converted value is made; a residual's is the layer."""
    return next((node.module for node in plan.graph.nodes if step.value in node.results), "")


def arrows(plan: Plan, inside: str) -> dict[str, int]:
    """Conversions of activations that communicate, of values made in a module or below it: ``forward/backward``."""
    parameters = {parameter.value for parameter in plan.graph.parameters}
    found: Counter[str] = Counter()
    for step in plan.steps:
        moves = step.conversion.forward.communicates or step.conversion.backward.communicates
        path = module_of(step, plan)
        if moves and step.value not in parameters and (path == inside or path.startswith(inside + ".")):
            found[f"{step.conversion.forward.value}/{step.conversion.backward.value}"] += 1
    return dict(found)


def hooks(plan: Plan) -> set[str]:
    """Hooked parameters without ``model.`` and layer numbers; all layers must agree."""
    names = Counter(".".join(p for p in h.parameter.name.split(".") if not p.isdigit()) for h in plan.hooks)
    layers = sum(path.startswith("model.layers.") and path.count(".") == 2 for path in plan.graph.modules)
    for name, count in names.items():
        assert count == (layers if name.startswith("model.layers.") else 1), name
    return {name.removeprefix("model.").removeprefix("layers.") for name in names}


def gather_before(plan: Plan, weight: str) -> Step:
    """The all-gather whose result the linear with this weight takes."""
    parameter = next(p.value for p in plan.graph.parameters if weight in p.names)
    (user,) = (node for node in plan.graph.nodes if parameter in node.operands)
    (step,) = (s for s in plan.steps if s.conversion.forward.value == "all_gather" and user in s.consumers)
    return step


def users(step: Step) -> set[str]:
    return {user.module.rsplit(".", 1)[-1] for user in step.consumers if isinstance(user, Node)}


SP_HOOKS = {"input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight"}
HEADS = [pytest.param("", "", id="replicated"), pytest.param(SHARDED, SHARDED, id="sharded")]


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize(("embedding", "head"), HEADS)
def test_sequence_parallelism_follows_from_prices(layers: int, embedding: str, head: str) -> None:
    plan = planned(layers=layers, embedding=embedding, head=head)
    assert plan.cost == plan.lower_bound  # exact
    for layer in range(layers):
        found = arrows(plan, f"model.layers.{layer}")
        assert found == {"all_gather/reduce_scatter": 2, "reduce_scatter/all_gather": 2}
        assert all(s.nbytes == RESIDUAL for s in plan.steps if f"layers.{layer}." in module_of(s, plan))
        attention = gather_before(plan, f"model.layers.{layer}.self_attn.q_proj.weight")
        assert users(attention) == {"q_proj", "k_proj", "v_proj"}
        assert users(gather_before(plan, f"model.layers.{layer}.mlp.gate_proj.weight")) == {"gate_proj", "up_proj"}
    assert hooks(plan) == SP_HOOKS


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize(("embedding", "head"), HEADS)
def test_norms_replicated_give_plain_tensor_parallelism(layers: int, embedding: str, head: str) -> None:
    plan = planned(layers=layers, embedding=embedding, head=head, more=REPLICATED_NORMS)
    for layer in range(layers):
        found = arrows(plan, f"model.layers.{layer}")
        assert found == {"all_reduce/none": 2, "none/all_reduce": 2}
    assert hooks(plan) == set()


@pytest.mark.parametrize(("embedding", "head"), HEADS)
@pytest.mark.parametrize(("more", "of_norms"), [("", SP_HOOKS), (REPLICATED_NORMS, set())], ids=["sp", "tp"])
def test_norms_of_heads_are_hooked_either_way(embedding: str, head: str, more: str, of_norms: set[str]) -> None:
    plan = planned("qwen3", 1, embedding, head, more)
    assert hooks(plan) == of_norms | {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}


@pytest.mark.parametrize(("embedding", "head"), HEADS)
def test_row_biases_are_hooked_under_sequence_parallelism(embedding: str, head: str) -> None:
    plan = planned("llama", 1, embedding, head, COLUMN_BIASES, bias=True)
    assert hooks(plan) == SP_HOOKS | {"self_attn.o_proj.bias", "mlp.down_proj.bias"}
    assert arrows(plan, "model.layers.0") == {"all_gather/reduce_scatter": 2, "reduce_scatter/all_gather": 2}


@pytest.mark.parametrize("more", ["", "output logits : Shard(vocab)\n"])
@pytest.mark.parametrize(("embedding", "head", "backward"), [("", "", "split"), (SHARDED, SHARDED, "reduce_scatter")])
def test_the_gather_before_the_head(embedding: str, head: str, backward: str, more: str) -> None:
    if not head:
        more = ""  # a replicated head has no sharded logits to leave as they are
    step = gather_before(planned(layers=1, embedding=embedding, head=head, more=more), "lm_head.weight")
    assert (module_of(step, planned(layers=1)), step.nbytes) == ("model.norm", RESIDUAL)
    assert step.conversion.backward.value == backward
