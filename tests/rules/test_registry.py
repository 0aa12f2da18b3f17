"""The one call by which ops become known: what it reads, what it refuses, and which rule a node gets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from placement.graph.ir import Node, Value
from placement.graph.signature import Signature
from placement.rules import core
from placement.rules.core import arguments, lookup, registered, rule, signature_of

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test registers is forgotten after it."""
    monkeypatch.setattr(core, "_RULES", dict(core._RULES))


def node(op, *shapes, out=((4, 6),), extra=()):
    values = [Value(f"x{i}", shape, torch.float64, True) for i, shape in enumerate(shapes)]
    results = tuple(Value(f"y{i}", shape, torch.float64, True) for i, shape in enumerate(out))
    return Node("op", op, (*values, *extra), {}, results)


def test_text_becomes_a_signature() -> None:
    rule(aten.rrelu, "* k, k -> *", linear=(0,), additive=(0, 1))
    found = signature_of(node(aten.rrelu.default, (2, 4, 6), (6,), out=((2, 4),)))
    assert str(found) == "*1 *0 k, k -> *1 *0; linear in 0; additive in 0, 1"
    assert isinstance(found, Signature)
    assert found.contracted == {"k"}


def test_additive_true_means_all_operands() -> None:
    rule(aten.rrelu, "k, k -> k", additive=True)
    found = signature_of(node(aten.rrelu.default, (6,), (6,), out=((6,),)))
    assert isinstance(found, Signature)
    assert found.additive == {0, 1}


def test_dims_of_size_one_broadcast() -> None:
    rule(aten.rrelu, "* k, * k -> * k")
    found = signature_of(node(aten.rrelu.default, (4, 1), (3, 1, 6), out=((3, 4, 6),)))
    assert str(found) == "*0 1, *1 1 k -> *1 *0 k"


def test_text_that_does_not_fit_a_node_leaves_it_without_a_signature() -> None:
    rule(aten.rrelu, "b s h -> b h")
    assert signature_of(node(aten.rrelu.default, (4, 6))) is None
    assert signature_of(node(aten.rrelu.default, (4, 6), (6,))) is None


def test_an_overload_comes_before_its_packet() -> None:
    of_packet = rule(aten.bernoulli, "* -> *")
    assert lookup(node(aten.bernoulli.default, (4, 6))) is of_packet
    of_overload = rule(aten.bernoulli.default, "* -> *")
    assert lookup(node(aten.bernoulli.default, (4, 6))) is of_overload
    assert lookup(node(aten.bernoulli.p, (4, 6))) is of_packet


def test_a_later_rule_replaces_an_earlier_one() -> None:
    rule(aten.rrelu, "* -> *")
    later = rule([aten.rrelu, aten.bernoulli], "* k -> * k", blocked="k")
    assert lookup(node(aten.rrelu.default, (4, 6))) is later
    assert registered().count(aten.rrelu) == 1


def test_a_custom_op_is_named_by_what_its_decorator_returns() -> None:
    @torch.library.custom_op("placement_test::same", mutates_args=())
    def same(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    made = rule(same, "* -> *", linear=(0,))
    assert lookup(node(torch.ops.placement_test.same.default, (4, 6))) is made


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("b s, s", {}, "needs one '->'"),
        ("b -> s -> b", {}, "needs one '->'"),
        ("b s -> b", {"blocked": "t"}, "no t to block"),
        ("b s -> b", {"linear": (1,)}, "has 1 operands"),
        ("b s -> b", {"additive": [0, 2]}, "has 1 operands"),
        ("(p d) -> d", {}, "gives no sizes for"),
    ],
)
def test_text_that_cannot_be_meant_is_refused(text, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        rule(aten.rrelu, text, **options)


def test_what_is_no_op_is_refused() -> None:
    """A rule for it would never be found: captured programs call ops."""
    with pytest.raises(TypeError, match="silu is no op"):
        rule(F.silu, "* -> *")


def test_arguments_have_their_names_and_defaults() -> None:
    given = arguments(node(aten.sum.dim_IntList, (4, 6), extra=((1,),)))
    assert given["dim"] == (1,)
    assert given["keepdim"] is False
    assert given["dtype"] is None
