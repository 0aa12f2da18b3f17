"""Dims that are sums: what splits, slices and cat make of factors, and which cuts are right, by proof."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from placement.graph.capture import capture
from placement.graph.factors import Dims, infer
from placement.graph.ir import Graph, op_name
from placement.graph.segments import flattened, pattern
from placement.rules import Context, signature_of
from placement.rules.proof import prove
from tests.graph.test_factors import Call, result


def heads_first(x: Tensor, size: int) -> Tensor:
    """[rows, heads * size] to [heads, rows, size]."""
    return x.view(x.shape[0], -1, size).transpose(0, 1)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Grouped heads of size 2, by products, so that the groups of q meet the heads of k and v."""
    q, k, v = (heads_first(x, 2) for x in (q, k, v))
    groups = q.view(k.shape[0], -1, *q.shape[1:])
    return (groups @ k[:, None].transpose(-1, -2)) @ v[:, None]


def by_sizes(y: Tensor) -> Tensor:
    return attended(*y.split([24, 12, 12], -1))


def by_slices(y: Tensor) -> Tensor:
    return attended(y[:, :24], y[:, 24:36], y[:, -12:])


def one_by_one(y: Tensor) -> Tensor:
    q, rest = y.split([24, 24], -1)[0], y.narrow(1, 24, 24)
    return attended(q, *rest.chunk(2, -1))


def two_ways(y: Tensor) -> Tensor:
    """What one split leaves whole another one takes apart; the borders of both are borders."""
    qk, v = y.split([36, 12], -1)
    return attended(y.split([24, 12, 12], -1)[0], y[:, 24:36], v) + qk.sum()


def joined_again(y: Tensor) -> Tensor:
    q, k, v = y.split([24, 12, 12], -1)
    return attended(q, k, v).sum() + torch.cat((v, q, k), -1).relu()


def halves(y: Tensor) -> Tensor:
    return y[:, :24] * y[:, 24:] + torch.cat(torch.cat((y[:, 24:], y[:, :24]), -1).chunk(2, -1), -1)[:, :24]


def programs(function: Any, y: Tensor) -> tuple[Graph, Dims]:
    graph = capture(Call(function), {"args": (y,)})
    return graph, infer(graph, signature_of)


# -- what becomes of factors ------------------------------------------------------------------------


@pytest.mark.parametrize("function", [by_sizes, by_slices, two_ways, joined_again])
def test_pieces_of_unequal_size_are_a_sum(function: Any) -> None:
    graph, dims = programs(function, torch.ones(5, 48))
    (fused,) = dims.of(graph.inputs[0].value)[1]
    (q, k, v) = fused.segments
    assert [[f.size for f in segment] for segment in fused.segments] == [[6, 2, 2], [6, 2], [6, 2]]
    assert q[0] is k[0] is v[0]
    assert q[-1] is k[-1]
    (heads, group, _) = q
    value = graph.inputs[0].value
    assert dims.locate(value, (heads,)) == (1, ())
    assert [(before, size) for before, size in dims.segments(value, (heads,))] == [((), 24), ((), 12), ((), 12)]
    assert dims.locate(value, (heads, group)) is None, "only q has it"
    assert dims.locate(value, (group,)) is None


def test_a_sum_in_a_product() -> None:
    """A part that one op takes for two equal pieces, of a dim that another op splits unequally."""
    graph, dims = programs(one_by_one, torch.ones(5, 48))
    context = Context(dims, 3, {}, frozenset())
    assert context.runs(dims.of(graph.inputs[0].value)[1]) != ()
    assert len({f for f in flattened(dims.of(graph.inputs[0].value)[1]) if f.size == 6}) == 1


def test_the_runs_of_a_sum() -> None:
    """What all segments have in common, and never the sum; without anything in common the sum itself."""
    graph, dims = programs(by_sizes, torch.ones(5, 48))
    fused = dims.of(graph.inputs[0].value)[1]
    assert [[f.size for f in run] for run in Context(dims, 3, {}, frozenset()).runs(fused)] == [[6]]
    assert Context(dims, 4, {}, frozenset()).runs(fused) == (), "of q alone four ranks could cut heads and groups"
    graph, dims = programs(lambda y: y[:, :8] @ y[:, 8:].expand(8, 2), torch.ones(1, 10))
    fused = dims.of(graph.inputs[0].value)[1]
    assert Context(dims, 5, {}, frozenset()).runs(fused) == (fused,)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda y: (y.view(5, 6, 4).relu(), y[:, :8]), (5, 24)),  # a slice of a product
        (lambda y: (y.split([8, 16], -1)[0].sum(), y.chunk(2, -1)[0]), (5, 24)),  # borders that differ
        (lambda y: (y.split([4, 20], -1)[0].view(5, 2, 2), y[:, 2:7]), (5, 24)),
        (lambda y: torch.cat((y, y.relu().flip(-1)), -1).sum(), (5, 4)),
    ],
)
@pytest.mark.parametrize("n", [2, 3])
def test_what_does_not_fit_is_needed_whole(function: Any, shape: tuple[int, int], n: int) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    assert prove(function, x, n=n).require()


def test_parts_that_have_a_factor_but_are_no_segments() -> None:
    """The dim is 3 times 4; its parts have the 4 as well, each elsewhere than the dim has it."""

    def function(y: Tensor, scale: Tensor) -> Tensor:
        first, second = y.split([4, 8], -1)
        return (y.view(5, 3, 4) * scale).sum() + (first * scale).sum() + (second.view(5, 4, 2) * scale[:, None]).sum()

    arguments = torch.randn(5, 12, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    graph = capture(Call(function), {"args": arguments})
    dims = infer(graph, signature_of)
    ((four,),) = dims.of(graph.inputs[1].value)
    assert all(four in flattened(dims.of(v)[-1]) for node in graph.nodes if "split" in node.name for v in node.results)
    assert prove(function, *arguments).require()


@pytest.mark.parametrize("function", [by_sizes, by_slices, one_by_one, two_ways, joined_again, halves])
@pytest.mark.parametrize("n", [2, 3])
def test_every_cut_holds(function: Any, n: int) -> None:
    """Each op on blocks of its own, forward and backward; some op does cut the fused dim."""
    proof = prove(function, torch.randn(6, 48, dtype=torch.float64), n=n).require()
    sums = ("split", "slice", "narrow", "cat")
    cut = [f for f in proof.findings if any(name in f.op for name in sums) and f.strategy.operands[0].over]
    assert len({f.strategy.operands[0] for f in cut}) > 1, "the rows, and what the segments have in common"


# -- drawn at random ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_sums_drawn_at_random(seed: int) -> None:
    """Segments of a common factor and others around it, taken apart by splits or slices, used apart, and joined."""
    draw = random.Random(seed)
    n = draw.choice([2, 3])
    shapes = [(draw.choice([1, 2]), 6, draw.choice([1, 2])) for _ in range(draw.randint(2, 4))]
    lengths = [a * b * c for a, b, c in shapes]
    order = draw.sample(range(len(shapes)), len(shapes))
    sliced = draw.random() < 0.5

    def function(y: Tensor, scale: Tensor) -> Tensor:
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        parts = [y[:, s : s + m] for s, m in zip(starts, lengths, strict=True)] if sliced else y.split(lengths, -1)
        total = sum(
            (part.view(4, *shape) * scale[:, None]).sum((1, 3)) for part, shape in zip(parts, shapes, strict=True)
        )
        return total.sum() + torch.cat([parts[i] for i in order], -1).relu() * y.sum()

    arguments = torch.randn(4, sum(lengths), dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    proof = prove(function, *arguments, n=n).require()
    op = "slice" if sliced else "split"
    assert any(op in f.op and f.strategy.operands[0].over not in ((), None) for f in proof.findings)


def test_ratios() -> None:
    assert pattern([4, 2, 2]) == (1, (2, 1, 1))
    assert pattern([4, 2, 2, 4, 2, 2]) == (2, (2, 1, 1))
    assert pattern([6, 6, 6]) == (3, ())
    assert pattern([5]) == (1, ())


def test_the_result_of_cat_is_cut_as_its_parts() -> None:
    graph, dims = programs(joined_again, torch.ones(5, 48))
    (fused,) = dims.of(graph.inputs[0].value)[1]
    (other,) = dims.of(result(graph))[1]
    assert [len(segment) for segment in other.segments] == [2, 3, 2]
    assert other.segments[1] == fused.segments[0]


# -- tensors that are filled part by part ------------------------------------------------------------------


def one_after_the_other(y: Tensor) -> Tensor:
    out = y.new_empty(y.shape)
    out[:, 40:] = y[:, :8]
    out[:, :40] = y[:, 8:]
    return out


def over_each_other(y: Tensor) -> Tensor:
    out = torch.empty_like(y)
    out[:, :40] = y[:, :40]
    out[:, 8:] = y[:, :40]
    return out


@pytest.mark.parametrize(("function", "op"), [(one_after_the_other, "cat"), (over_each_other, "slice_scatter")])
def test_what_is_filled_part_by_part_is_put_side_by_side(function: Any, op: str) -> None:
    """Without the tensor of no data: it would have to be cut as its parts are."""
    graph, _ = programs(function, torch.ones(5, 48))
    ops = [op_name(node.op).split(".")[1] for node in graph.nodes]
    assert [o for o in ops if o in ("cat", "slice_scatter")] == [op] * (1 if op == "cat" else 2)
    assert (op == "cat") == (not any("empty" in o for o in ops))
    if op == "cat":
        (cat,) = (node for node in graph.nodes if "cat" in op_name(node.op))
        assert [v.shape[1] for v in cat.operands] == [40, 8]
