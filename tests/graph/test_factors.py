"""Factors of dims: on small graphs, and on Llama, Qwen3, GPT-2 and BERT as transformers writes them."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F

from placement.graph.capture import capture
from placement.graph.factors import Dims, NameClashError, NamedDims, infer
from placement.graph.ir import Graph, Value, op_name
from placement.rules import signature_of


class Call(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, args: tuple[torch.Tensor, ...]) -> Any:
        return self.function(*args)


def inferred(function: Any, *args: torch.Tensor, names: dict[int, str] | None = None) -> tuple[Graph, Dims]:
    """The factors of a function's program; ``names`` gives names to the dims of arguments by position."""
    graph = capture(Call(function), {"args": args})
    named = [NamedDims(graph.inputs[at].value, tuple(text.split())) for at, text in (names or {}).items()]
    return graph, infer(graph, signature_of, named)


def result(graph: Graph) -> Value:
    assert graph.outputs[0].value is not None
    return graph.outputs[0].value


def sizes(dims: Dims, value: Value) -> list[list[Any]]:
    return [[f.size for f in factors] for factors in dims.of(value)]


# -- small graphs ---------------------------------------------------------------------------------


def test_names_spread_through_products_and_transposes() -> None:
    graph, dims = inferred(
        lambda h, w: F.linear(h, w).transpose(0, 1).relu(),
        torch.ones(2, 3, 4),
        torch.ones(5, 4),
        names={0: "batch seq hidden", 1: "out in"},
    )
    assert dims.describe(result(graph)) == "seq | batch | out"
    assert dims.describe(graph.inputs[1].value) == "out | hidden", "one dim: the first name stays"
    assert dims.names["in"] == dims.names["hidden"]


def test_a_view_cuts_the_dim_everywhere() -> None:
    graph, dims = inferred(
        lambda h, w: F.linear(h, w).view(2, 3, 4, 2).transpose(1, 2),
        torch.ones(2, 3, 5),
        torch.ones(8, 5),
        names={1: "out in"},
    )
    assert dims.describe(graph.inputs[1].value) == "out.0·out.1 | in"
    batch, seq = dims.of(graph.inputs[0].value)[:2]
    heads, rest = dims.names["out"]
    assert dims.of(result(graph)) == (batch, (heads,), seq, (rest,))
    assert (heads.size, rest.size) == (4, 2)


def test_merged_dims_are_products_in_order() -> None:
    graph, dims = inferred(lambda h: h.reshape(6, 4).relu(), torch.ones(2, 3, 4), names={0: "batch seq hidden"})
    assert dims.describe(result(graph)) == "batch·seq | hidden"
    (reshape, _) = graph.nodes
    assert dims.locate(reshape.results[0], dims.names["seq"]) == (0, dims.names["batch"])
    assert dims.locate(reshape.results[0], dims.names["batch"]) == (0, ())
    assert dims.locate(reshape.results[0], (*dims.names["batch"], *dims.names["seq"])) == (0, ())
    assert dims.locate(reshape.results[0], (*dims.names["seq"], *dims.names["batch"])) is None


def test_what_a_later_view_cuts_is_cut_before() -> None:
    """Merge, then cut at another border: the dims of the source get the common refinement."""
    graph, dims = inferred(lambda h: h.reshape(24).reshape(4, 6), torch.ones(2, 12), names={0: "a b"})
    assert sizes(dims, graph.inputs[0].value) == [[2], [2, 6]]
    assert dims.describe(result(graph)) == "a·b.0 | b.1"


def test_a_border_across_a_factor_is_opaque() -> None:
    graph, dims = inferred(lambda h: h.reshape(3, 2).relu(), torch.ones(2, 3))
    reshape, _ = graph.nodes
    assert dims.opaque == {reshape}
    assert not {f for d in dims.of(graph.inputs[0].value) for f in d} & {f for d in dims.of(result(graph)) for f in d}


def test_broadcast_dims_have_no_factor() -> None:
    graph, dims = inferred(lambda h, m: h * m, torch.ones(2, 3, 4), torch.ones(3, 1), names={0: "batch seq hidden"})
    assert dims.describe(graph.inputs[1].value) == "seq | 1"


def test_equal_pieces_are_a_factor_of_their_own() -> None:
    """A fused q|k|v: pieces · heads · head_dim, so a shard of the heads takes its part of each."""
    graph, dims = inferred(
        lambda h, w: F.linear(h, w).chunk(3, -1)[1].view(2, 5, 4, 2),
        torch.ones(2, 5, 6),
        torch.ones(24, 6),
        names={1: "out in"},
    )
    pieces, heads, rest = dims.names["out"]
    assert [f.size for f in (pieces, heads, rest)] == [3, 4, 2]
    assert [f.piece for f in (pieces, heads, rest)] == [True, False, False]
    assert dims.of(result(graph))[2:] == ((heads,), (rest,))
    assert dims.locate(graph.inputs[1].value, (heads,)) == (0, (pieces,))


def test_copies_stand_before_the_dim_that_is_repeated() -> None:
    graph, dims = inferred(lambda h: h.repeat(1, 3), torch.ones(2, 4), names={0: "a b"})
    assert sizes(dims, result(graph)) == [[2], [3, 4]]
    assert dims.locate(result(graph), dims.names["b"]) == (1, dims.of(result(graph))[1][:1])


def test_one_factor_twice_in_a_value_is_nowhere() -> None:
    graph, dims = inferred(lambda h: h @ h.transpose(0, 1), torch.ones(3, 4), names={0: "row column"})
    assert dims.describe(result(graph)) == "row | row"
    assert dims.locate(result(graph), dims.names["row"]) is None
    assert dims.locate(result(graph), dims.names["column"]) is None


def test_dims_that_cannot_be_one_leave_the_other_letters_alone() -> None:
    """2·3 against 3·2: no rank has the same part of both, but the other dim may still be cut."""
    graph, dims = inferred(
        lambda a, b, c: a.view(6, 4) + b.view(6, 4) * c,
        torch.ones(2, 3, 4),
        torch.ones(3, 2, 4),
        torch.ones(4),
        names={2: "columns"},
    )
    add = graph.nodes[-1]
    assert op_name(add.op) == "aten.add.Tensor"
    assert list(dims.letters[add]) == ["d1"]
    assert dims.letters[add]["d1"] == dims.names["columns"]
    assert add not in dims.opaque


def test_a_chunk_across_a_border_is_opaque() -> None:
    """Halves of 3·2: the factor of three cannot be cut in two."""
    graph, dims = inferred(lambda h: h.view(6, 4).chunk(2, 0)[0], torch.ones(3, 2, 4))
    (chunk,) = (node for node in graph.nodes if "view" not in node.name)
    assert chunk in dims.opaque


def test_one_name_for_unequal_dims_is_refused() -> None:
    with pytest.raises(NameClashError, match="dim 'a' of") as caught:
        inferred(lambda h: h.relu(), torch.ones(2, 3), names={0: "a a"})
    assert caught.value.name == "a"
    with pytest.raises(NameClashError):  # the same number of elements, other borders
        inferred(lambda h, g: (h.view(6), g.view(6)), torch.ones(2, 3), torch.ones(6), names={0: "a a", 1: "a"})


def test_one_name_makes_equal_dims_one() -> None:
    graph, dims = inferred(
        lambda h, g: (h.relu(), g.relu()), torch.ones(2, 3), torch.ones(3, 5), names={0: "a b", 1: "b c"}
    )
    assert dims.of(graph.inputs[0].value)[1] == dims.of(graph.inputs[1].value)[0] == dims.names["b"]


# -- transformers -----------------------------------------------------------------------------------


@cache
def captured(name: str, kv_heads: int = 2) -> tuple[Graph, Dims]:
    """A one-layer model: hidden 24, 4 heads, head_dim 8, 2 KV heads; batch 3 and seq 5 dynamic."""
    import transformers as hf

    shape = {
        "vocab_size": 40, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 4,
    }  # fmt: skip
    grouped = {**shape, "num_key_value_heads": kv_heads, "head_dim": 8}
    with torch.device("meta"):
        model = {
            "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**grouped)),
            "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**grouped)),
            "gpt2": lambda: hf.GPT2LMHeadModel(
                hf.GPT2Config(
                    vocab_size=40, n_embd=32, n_layer=1, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0
                )
            ),
            "bert": lambda: hf.BertForMaskedLM(
                hf.BertConfig(**{**shape, "hidden_size": 32, "max_position_embeddings": 16})
            ),
        }[name]()
        example = {key: torch.zeros(3, 5, dtype=torch.long) for key in ("input_ids", "labels")}
    graph = capture(model, example, dict.fromkeys(example, ("batch", "seq")))
    named = [NamedDims(item.value, ("batch", "seq")) for item in graph.inputs]
    tables = (".wte.weight", "word_embeddings.weight", "embed_tokens.weight", "lm_head.weight")
    named += [NamedDims(p.value, ("vocab", "hidden")) for p in graph.parameters if p.name.endswith(tables)]
    return graph, infer(graph, signature_of, named)


def parameter(graph: Graph, suffix: str) -> Value:
    (found,) = {p.value for p in graph.parameters for name in p.names if name.endswith(suffix)}
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bert"])
def test_names_reach_the_whole_model(name: str) -> None:
    graph, dims = captured(name)
    batch, seq = (sympy.Symbol(s, integer=True, positive=True) for s in ("batch", "seq"))
    assert [dims.names[s][0].size for s in ("batch", "seq")] == [batch, seq]
    logits = next(o.value for o in graph.outputs if o.name == "logits")
    assert logits is not None
    assert dims.describe(logits) == "batch | seq | vocab"
    (loss,) = (n for n in graph.nodes if op_name(n.op) == "aten.cross_entropy_loss.default")
    tokens, vocab = dims.of(loss.operands[0])
    assert vocab == dims.names["vocab"]
    assert tokens == (*dims.names["batch"], *dims.names["seq"]) == dims.of(loss.operands[1])[0]
    assert not dims.opaque & {n for n in graph.nodes if any(v.requires_grad for v in n.operands)}, (
        "views of activations pass all factors"
    )
    for value in graph.values():  # factors multiply to the dim that they make up
        for size, factors in zip(value.shape, dims.of(value), strict=True):
            assert sympy.expand(prod(f.size for f in factors) - size) == 0, value


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_query_heads_are_kv_heads_times_group(name: str) -> None:
    graph, dims = captured(name)
    q, k, v, o = (dims.of(parameter(graph, f"self_attn.{p}_proj.weight")) for p in "qkvo")
    kv, group, head_dim = q[0][0], q[0][1], q[0][2:]
    assert (kv.size, group.size, prod(f.size for f in head_dim)) == (2, 2, 8)
    assert v[0][0] is kv
    assert k[0][0] is kv
    assert k[0][1:] == head_dim, "q and k meet in a product over head_dim"
    assert o[1][:2] == (kv, group)
    assert o[1][2:] == v[0][1:], "the output projection takes the values' head_dim"
    assert q[1] == k[1] == v[1] == o[0] == dims.names["hidden"]


def test_norms_per_head_run_along_head_dim() -> None:
    graph, dims = captured("qwen3")
    head_dim = dims.of(parameter(graph, "self_attn.q_proj.weight"))[0][2:]
    assert dims.of(parameter(graph, "q_norm.weight")) == (head_dim,)
    assert dims.of(parameter(graph, "k_norm.weight")) == (head_dim,)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_one_kv_head_is_a_factor_of_size_one(name: str) -> None:
    """One KV head on two ranks is one head too few: nothing may cut head_dim in its place."""
    graph, dims = captured(name, kv_heads=1)
    k = dims.of(parameter(graph, "self_attn.k_proj.weight"))[0]
    assert k[0].size == 1
    assert prod(f.size for f in k[1:]) == 8
    q = dims.of(parameter(graph, "self_attn.q_proj.weight"))[0]
    assert prod(f.size for f in q) == 32
    assert any(f.size == 4 for f in q), "four query heads"


def test_gate_and_up_share_their_width() -> None:
    graph, dims = captured("llama")
    gate, up, down = (dims.of(parameter(graph, f"mlp.{p}_proj.weight")) for p in ("gate", "up", "down"))
    assert gate == up
    assert gate[0] == down[1]
    assert down[0] == dims.names["hidden"]


def test_fused_qkv_is_pieces_heads_head_dim() -> None:
    graph, dims = captured("gpt2")
    weight, bias = (dims.of(parameter(graph, f"attn.c_attn.{p}")) for p in ("weight", "bias"))
    pieces, heads, *head_dim = weight[1]
    assert (pieces.size, heads.size, prod(f.size for f in head_dim)) == (3, 4, 8)
    assert pieces.piece
    assert not heads.piece
    assert weight[0] == dims.names["hidden"]
    assert bias[0] == weight[1]
    projection = dims.of(parameter(graph, "attn.c_proj.weight"))
    assert projection[0] == (heads, *head_dim)
    assert projection[1] == dims.names["hidden"]


def test_heads_of_bert_run_from_projection_to_projection() -> None:
    graph, dims = captured("bert")
    q, k, v = (dims.of(parameter(graph, f"attention.self.{p}.weight")) for p in ("query", "key", "value"))
    heads = q[0][0]
    assert heads.size == 4
    assert k[0] == q[0]
    assert v[0][0] is heads
    assert dims.of(parameter(graph, "attention.output.dense.weight"))[1] == v[0]
    assert dims.of(parameter(graph, "attention.self.query.bias")) == (q[0],)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_tied_head_is_the_embedding(name: str) -> None:
    graph, dims = captured(name)
    embedding, head = {
        "gpt2": ("wte.weight", "lm_head.weight"), "bert": ("word_embeddings.weight", "predictions.decoder.weight"),
    }[name]  # fmt: skip
    assert parameter(graph, embedding) is parameter(graph, head)
    assert dims.of(parameter(graph, head)) == (dims.names["vocab"], dims.names["hidden"])
