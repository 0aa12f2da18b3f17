"""The proof itself: it finds wrong rules wrong, and follows factors through programs of several ops."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.graph.signature import Signature
from placement.rules import core
from placement.rules.core import Form, Implementation, elementwise, rule
from placement.rules.proof import Proof, UnprovenError, prove, run_locally
from placement.types import P
from tests.rules.samples import aten, b, i, u, x
from tests.rules.test_code import emitted


@pytest.fixture
def _rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test registers is forgotten after it."""
    monkeypatch.setattr(core, "_RULES", dict(core._RULES))


def faults(proof: Proof) -> list[str]:
    return [repr(finding.strategy) for finding in proof.faults]


# -- controls: rules that are wrong ----------------------------------------------------------------

WRONG: dict[str, tuple[Any, Any, dict[str, Any], tuple[Any, ...]]] = {
    "a product that forgets to contract": (
        aten.mm.default,
        "m k, k n -> m n",
        {"blocked": "m n", "linear": (2,)},
        (x(4, 6), x(6, 4)),
    ),
    "a sum linear in one operand": (aten.add.Tensor, "* k, k -> * k", {"linear": (0,)}, (x(4, 6), x(6))),
    "a number added once per rank": (aten.add.Scalar, "* -> *", {"linear": (0,)}, (x(4, 6), 2.0)),
    "a function that is not linear": (aten.silu.default, "* -> *", {"linear": (0,)}, (x(4, 6),)),
    "a softmax over a shard": (aten.softmax.int, "* k -> * k", {}, (x(4, 6), -1)),
    "a cumulative sum over a shard": (aten.cumsum.default, "* k -> * k", {"linear": (0,)}, (x(4, 6), -1)),
    "a norm over a shard": (aten.rms_norm.default, "* k, k -> * k", {}, (x(4, 6), (6,), x(6))),
    "a maximum as a sum": (aten.amax.default, "* k -> *", {}, (x(4, 6), (-1,))),
    "a mean of local means": (aten.mean.dim, "* k -> *", {}, (x(4, 6), (-1,))),
    "tokens of a mean": (aten.mse_loss.default, "s h, s h -> ", {}, (x(4, 6), x(4, 6))),
    "a triangle of a shard": (aten.tril.default, "* k -> * k", {}, (x(4, 6),)),
    "a flip of a shard": (aten.flip.default, "a b -> a b", {"linear": (0,)}, (x(4, 6), (0,))),
    "a bias in every term": (aten.linear.default, "* k, n k, n -> * n", {}, (x(4, 6), x(8, 6), x(8))),
    "rows of a shard": (aten.embedding.default, "v h, * -> * h", {}, (x(8, 6), i(4))),
    "keys of a shard": (
        aten.scaled_dot_product_attention.default,
        "b h q d, b h k d, b h k e -> b h q e",
        {"blocked": "d"},
        (x(2, 2, 4, 3), x(2, 2, 4, 3), x(2, 2, 4, 3)),
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.usefixtures("_rules")
def test_wrong_rule_is_found(name: str) -> None:
    op, text, options, args = WRONG[name]
    if name == "a product that forgets to contract":
        rule(
            op,
            lambda node: Signature(
                (((("m",)), ("k",)), (("k",), ("n",))), ((("m",), ("n",)),), additive=frozenset({0, 1})
            ),
        )
    else:
        rule(op, text, **options)
    proof = prove(op, *args)
    assert not proof
    assert {"I, I -> I", "R, R -> R"}.isdisjoint(faults(proof)), "what is the same on every rank always holds"
    with pytest.raises(UnprovenError, match=r"off by|instead of|differ|Error"):
        proof.require()


@pytest.mark.usefixtures("_rules")
def test_wrong_gradient_is_found_where_the_value_is_right() -> None:
    """The gradient of a lookup that is scaled by frequency counts the indices of all ranks."""
    rule(aten.embedding.default, "v h, * -> * h", blocked="v", linear=(0,))
    indices = torch.tensor([1, 2, 1, 1])
    proof = prove(aten.embedding.default, x(8, 6), indices, -1, True)
    (fault,) = proof.faults
    assert fault.fault.startswith("gradient of operand 0")
    assert prove(aten.embedding.default, x(8, 6), indices, -1, False)
    assert prove(aten.embedding.default, x(8, 6), indices, -1, True, gradients=False), "the values are right"


@pytest.mark.usefixtures("_rules")
def test_replicas_that_differ_are_found() -> None:
    rule(aten.bernoulli.default, elementwise)
    proof = prove(aten.bernoulli.default, u(4, 6), gradients=False)
    assert "R -> R" in faults(proof)
    assert "ranks differ" in str(proof)


@pytest.mark.usefixtures("_rules")
def test_wrong_implementation_is_found() -> None:
    def local_means(node, context):
        for run in context.runs(context.dims.of(node.operands[0])[1]):
            yield Form((context.shard(node.operands[0], run),), (P,))

    rule(aten.mean.dim, "* k -> *", blocked="k", implementations=(Implementation("local means", local_means),))
    left_out = prove(aten.mean.dim, x(4, 6), (-1,))
    assert left_out, "without a way to run it an implementation is left out"
    assert [f.run for f in left_out.findings].count(False) == 1
    assert "not run" in str(left_out)
    run = prove(aten.mean.dim, x(4, 6), (-1,), execute=run_locally)
    assert [f.strategy.implementation for f in run.faults] == ["local means"]


@pytest.mark.usefixtures("_rules")
def test_a_letter_needs_its_size() -> None:
    """Two dims of unequal size under one letter never run together, so nothing is offered."""
    rule(aten.outer.default, "m, m -> m m", linear=(0, 1))
    proof = prove(aten.outer.default, x(4), x(6))
    assert [repr(f.strategy) for f in proof.findings] == ["I, I -> I", "R, R -> R", "P, R -> P", "R, P -> P"]


# -- what is offered ----------------------------------------------------------------------------------


def offered(op: Any, *args: Any, **kwargs: Any) -> list[str]:
    return [repr(finding.strategy) for finding in prove(op, *args, **kwargs).require().findings]


def test_results_without_gradient_are_never_invariant() -> None:
    assert offered(aten.eq.Tensor, x(4, 6), x(4, 6))[:2] == ["I, I -> R", "R, R -> R"]
    assert offered(aten.argmax.default, x(3, 6), 0)[:2] == ["I -> R", "R -> R"]
    assert offered(aten.add.Tensor, x(3), x(3), gradients=False) == ["R, R -> R", "P, P -> P"]
    assert offered(aten.mul.Tensor, x(3).requires_grad_(), x(3))[:1] == ["I, R -> I"]


def test_truth_values_are_never_terms() -> None:
    for strategies in (
        offered(aten.expand.default, b(1, 3), (5, 3)),
        offered(aten.reshape.default, b(3, 3), (9,)),
        offered(aten.mul.Tensor, b(3), b(3)),
        offered(aten.to.dtype, b(3), torch.float64),
    ):
        assert strategies in (["R -> R"], ["R, R -> R"])
    assert offered(aten.mul.Tensor, x(3), b(3)) == ["I, R -> I", "R, R -> R", "P, R -> P"]
    assert offered(aten.sum.default, b(4)) == ["R -> R", "S(f1) -> P"]


@pytest.mark.usefixtures("_rules")
def test_truth_values_are_never_terms_whatever_a_rule_says() -> None:
    rule(aten.isnan.default, "* -> *", linear=(0,))
    assert offered(aten.isnan.default, x(3)) == ["I -> R", "R -> R"]
    rule(aten.any.dim, "* k -> *")
    assert offered(aten.any.dim, b(3, 4), -1) == ["R -> R"]


def test_a_bias_joins_a_contracted_sum_as_a_term() -> None:
    assert "S(f2), S(f2), P -> P" in offered(aten.linear.default, x(3, 6), x(5, 6), x(5))


def test_more_ranks_than_heads_cut_heads_and_group() -> None:
    """Two KV heads with two query heads each, on four ranks."""
    proof = prove(lambda q: q.reshape(3, 2, 2, 5).sum(-1).reshape(3, 4).relu(), x(3, 20), n=4).require()
    relu = [finding.strategy.operands[0] for finding in proof.findings if finding.op == "aten.relu.default"]
    assert [len(kind.over) for kind in relu] == [0, 0, 2]


# -- programs: factors behind other factors, and shards of them -------------------------------------


def grouped_attention(h, q, k, v, o):
    """Two KV heads, three query heads to each, as repeat_kv does it."""
    batch, seq, _ = h.shape
    queries = F.linear(h, q).view(batch, seq, -1, 2).transpose(1, 2)
    keys, values = (F.linear(h, w).view(batch, seq, -1, 2).transpose(1, 2) for w in (k, v))
    keys, values = (t[:, :, None].expand(batch, 4, 2, seq, 2).reshape(batch, 8, seq, 2) for t in (keys, values))
    out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    return F.linear(out.transpose(1, 2).reshape(batch, seq, -1), o)


def tiled_attention(h, q, k, v):
    """All KV heads one after the other, again and again: no two of a kind stand side by side, or two of three do."""
    queries, keys, values = (F.linear(h, w).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (q, k, v))
    row = [t[:, None].expand(2, 2, 4, 4, 2).reshape(2, 8, 4, 2) for t in (keys, values)]
    both = [t[:, None, :, None].expand(2, 2, 4, 2, 4, 2).reshape(2, 16, 4, 2) for t in (keys, values)]
    wide = queries[:, :, None].expand(2, 8, 2, 4, 2).reshape(2, 16, 4, 2)
    one = F.scaled_dot_product_attention(queries, *row, is_causal=True)
    return one.sum(1) + F.scaled_dot_product_attention(wide, *both, is_causal=True).sum(1)


def fused_qkv(h, w, bias):
    """GPT-2: one product makes q, k and v."""
    q, k, v = (torch.addmm(bias, h.view(-1, 6), w).view(2, 4, -1)).split(8, dim=2)
    return F.scaled_dot_product_attention(*(t.view(2, 4, 4, 2).transpose(1, 2) for t in (q, k, v)))


def merged_tokens(h, head, labels):
    logits = F.linear(h, head).float()
    return F.cross_entropy(logits.view(-1, 8), labels.view(-1))


def rotary(q, cos, sin):
    first, second = q.chunk(2, dim=-1)
    return q * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)


def patches(image, w, bias, token):
    embedded = F.conv2d(image, w, bias, stride=2).flatten(2).transpose(1, 2)
    return torch.cat((token.expand(embedded.shape[0], -1, -1), embedded), 1).mean(1)


PROGRAMS = {
    "grouped attention": (grouped_attention, (x(2, 4, 6), x(16, 6), x(8, 6), x(8, 6), x(4, 16))),
    "tiled attention": (tiled_attention, (x(2, 4, 6), x(16, 6), x(8, 6), x(8, 6))),
    "fused q, k, v": (fused_qkv, (x(2, 4, 6), x(6, 24), x(24))),
    "merged tokens": (merged_tokens, (x(2, 4, 6), x(8, 6), torch.tensor([[1, -100, -100, -100], [7, 3, -100, 0]]))),
    "rotary": (rotary, (x(2, 4, 4, 8), x(2, 4, 8), x(2, 4, 8))),
    "patches": (patches, (x(4, 4, 4, 4), x(8, 4, 2, 2), x(8), x(1, 1, 8))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_hold(name: str) -> None:
    function, args = PROGRAMS[name]
    for n in (2, 4):
        proof = prove(function, *args, n=n, execute=emitted).require()
        cut = [f for f in proof.findings if any(kind.over for kind in (*f.strategy.operands, *f.strategy.results))]
        assert len(cut) >= 8, str(proof)
        attended = {f.strategy.implementation for f in cut if f.op.startswith("aten.scaled_dot_product")}
        assert not attended or "ring" in attended


def test_shards_behind_other_factors_are_proven() -> None:
    """A merged batch·seq dim cut on seq, and thirds of a fused weight cut by heads."""
    tokens = prove(lambda h: h.reshape(8, 6).relu(), x(2, 4, 6))
    assert [repr(f.strategy) for f in tokens.findings if f.op == "aten.relu.default"][2:] == [
        "S(f1) -> S(f1)",
        "S(f2) -> S(f2)",
        "S(f3) -> S(f3)",
    ]
    fused = prove(lambda w: w.chunk(3, dim=0)[1], x(12, 6))
    assert len([f for f in fused.findings if f.op == "aten.chunk.default" and f.strategy.operands[0].over]) == 2


@st.composite
def regroupings(draw):
    """The same factors in order under two groupings, and whether a size of the second is left to be inferred."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=5))

    def grouped():
        borders = sorted(draw(st.sets(st.integers(0, len(factors)))) | {0, len(factors)})
        return tuple(prod(factors[a:b]) for a, b in pairwise(borders))

    before, after = grouped(), grouped()
    inferred = draw(st.none() | st.integers(0, len(after) - 1))
    return before, tuple(-1 if at == inferred else size for at, size in enumerate(after))


@given(regroupings(), st.sampled_from([2, 3, 4]))
@settings(max_examples=100)
def test_any_regrouping_holds(shapes, n) -> None:
    """Merges and cuts with every run of factors that the ranks divide, behind whatever stands before it."""
    before, after = shapes
    proof = prove(aten.reshape.default, torch.arange(float(prod(before))).view(before), after, n=n).require()
    if len(before) == 1 and before[0] % n == 0 and after[0] % n == 0:
        assert len(proof.findings) > 3, "a leading factor that n divides is never lost"


def test_a_module_brings_its_parameters() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8)).double()
    proof = prove(module, x(4, 6)).require()
    assert {f.op for f in proof.findings} == {
        "aten.linear.default", "aten.add.Tensor", "aten.gelu.default", "aten.layer_norm.default",
    }  # fmt: skip


def test_a_function_takes_tensors_by_name() -> None:
    assert prove(lambda h, scale: h * scale, x(4, 6), scale=x(6))
    with pytest.raises(TypeError, match="either by position or by name"):
        prove(torch.nn.Bilinear(6, 6, 2).double(), x(4, 6), input2=x(4, 6))


def test_arguments_are_left_alone() -> None:
    weight = x(6).requires_grad_()
    prove(aten.mul.Tensor, weight, x(4, 6))
    assert weight.grad is None
    assert weight.requires_grad
