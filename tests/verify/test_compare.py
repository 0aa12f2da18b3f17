"""Joining ranks' parts and measuring differences, on tensors whose answers are known."""

from __future__ import annotations

import math

import pytest
import torch

from placement.runtime import Cut
from placement.verify import Failure, Parity, Worst
from placement.verify.compare import Part, measure, replicas, wholes

TP, BOTH = {"tp": 2}, {"dp": 2, "tp": 2}
X = torch.arange(24.0, dtype=torch.float64).reshape(4, 6)


def parts(layout, *tensors):
    return [Part(t, layout) for t in tensors]


def test_blocks_are_joined() -> None:
    (whole,) = wholes(parts({"tp": Cut(1)}, X[:, :3], X[:, 3:]), TP)
    assert torch.equal(whole, X)


def test_blocks_of_a_fused_dim_are_joined_piece_by_piece() -> None:
    # [a0 a1 | b0 b1]: each of the two outer parts is cut on its own.
    (whole,) = wholes(parts({"tp": Cut(1, 2)}, X[:, [0, 2]], X[:, [1, 3]]), TP)
    assert torch.equal(whole, X[:, :4])


def test_terms_are_summed() -> None:
    (whole,) = wholes(parts({"tp": "P"}, X - 1, torch.ones_like(X)), TP)
    assert torch.equal(whole, X)


def test_every_replica_is_a_candidate() -> None:
    assert [w.sum().item() for w in wholes(parts({}, X, X + 1), TP)] == [X.sum().item(), X.sum().item() + 24]


def test_two_axes_cut_one_inside_the_other() -> None:
    quarters = X.chunk(4)
    (whole,) = wholes(parts({"dp": Cut(0), "tp": Cut(0)}, *quarters), BOTH)
    assert torch.equal(whole, X)


def test_an_axis_without_a_cut_gives_a_candidate_for_each_of_its_ranks() -> None:
    left, right = X.chunk(2)
    found = wholes(parts({"tp": Cut(0)}, left, right, left, right + 1), BOTH)
    assert torch.equal(found[0], X)
    assert not torch.equal(found[1], X)
    found = wholes(parts({"dp": Cut(0)}, left, left, right, right + 1), BOTH)
    assert [torch.equal(whole, X) for whole in found] == [True, False]


def test_the_worst_tensor_and_the_worst_replica_count() -> None:
    worst, errors, failures = measure("outputs", {"a": X, "b": X}, {"a": [X], "b": [X, X * 1.5]}, 1e-3)
    assert (worst.name, worst.error, worst.compared, worst.ok) == ("b", 0.5, 2, False)
    assert errors == {"a": 0.0, "b": 0.5}
    assert failures == [Failure("outputs", "b", 0.5, 1e-3)]


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        (torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 1.0]), 0.0),
        (torch.tensor([math.inf, 2.0]), torch.tensor([math.inf, 1.0]), 1.0),
        (torch.tensor([-math.inf, 1.0]), torch.tensor([math.inf, 1.0]), math.inf),
        (torch.tensor([math.nan]), torch.tensor([math.nan]), 0.0),
        (torch.tensor([math.nan]), torch.tensor([1.0]), math.inf),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), 0.0),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), math.inf),
        (torch.ones(2), torch.ones(3), math.inf),
        (torch.ones(1), torch.zeros(1), math.inf),
        (torch.zeros(0), torch.zeros(0), 0.0),
    ],
)
def test_special_values(found, expected, error: float) -> None:
    assert measure("outputs", {"x": expected}, {"x": [found]}, 1.0)[0].error == error


def test_a_value_that_is_missing_is_infinitely_wrong() -> None:
    assert measure("outputs", {"x": X}, {}, 1.0)[0].error == math.inf


def test_what_is_zero_but_for_rounding_is_relative_to_the_largest() -> None:
    noise = torch.full((3,), 1e-17, dtype=torch.float64)
    assert measure("g", {"big": X, "zero": noise}, {"big": [X], "zero": [-noise]}, 1e-11)[0].ok
    assert not measure("g", {"big": X, "small": noise}, {"big": [X], "small": [noise + 1e-13]}, 1e-11)[0].ok


def test_replicas_have_to_have_the_same_bits() -> None:
    ranks = [
        {"a": Part(X, {}), "cut": Part(X, {"tp": Cut(0)})},
        {"a": Part(X + 1e-12, {}), "cut": Part(X + 1, {"tp": Cut(0)})},
    ]
    worst, failures = replicas(ranks, TP)
    assert (worst.name, worst.compared, [f.name for f in failures]) == ("a", 1, ["a"])
    same = [{"a": Part(X, {})}, {"a": Part(X.clone(), {})}]
    assert replicas(same, TP)[0].ok


def test_the_table_fits_80_columns_whatever_the_names() -> None:
    name = "model.layers.10.self_attn.a_module_with_quite_a_long_name.another_one.weight"
    worst = {kind: Worst(name, 1.0, 1e-11, 3) for kind in ("outputs", "parameter gradients")}
    failures = tuple(Failure(kind, name, math.inf, 1e-11) for kind in ("layers", "parameter gradients")) * 9
    text = str(Parity("t" * 50 + " " + "u" * 50, worst, {}, failures, ("word " * 40,)))
    assert max(map(len, text.splitlines())) <= 80
    assert "another_one.weight" in text
    assert "and 10 more" in text
