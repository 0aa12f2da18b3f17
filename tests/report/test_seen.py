"""How many keys a query sees where marks decide it: against looking at every pair."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from placement.graph.capture import capture
from placement.graph.example import Example
from placement.graph.ir import Graph
from placement.graph.seen import _Sight, keys_seen

HOW: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def marks(rows: int, tokens: int, seed: int) -> Tensor:
    return torch.randint(-2, 2, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def looked_at(sight: _Sight) -> list[list[int]]:
    """Pair by pair."""
    left, right = sight.bounds
    truths = sight.of_key[len(sight.compare) :]

    def at(mark: Tensor, row: int, token: int) -> int:
        return int(mark[row % len(mark), token])

    def sees(row: int, i: int, j: int) -> bool:
        near = (left is None or j >= i - left) and (right is None or j <= i + right)
        pairs = zip(sight.compare, sight.of_query, sight.of_key, strict=False)
        alike = all(HOW[how](at(q, row, i), at(k, row, j)) for how, q, k in pairs)
        return near and alike and all(at(truth, row, j) for truth in truths)

    return [
        [sum(sees(row, i, j) for j in range(sight.keys)) for i in range(sight.queries)] for row in range(sight.rows)
    ]


@pytest.mark.parametrize(
    "compare", [(), ("==",), ("==", "=="), (">=", "=="), ("==", ">"), ("!=",), ("<",), ("<=",), ("<=", ">")]
)
@pytest.mark.parametrize("bounds", [(None, None), (None, 0), (3, 0), (2, 4), (-2, None), (None, -3), (-4, 2)])
def test_counts(compare: tuple[str, ...], bounds: tuple[int | None, int | None], monkeypatch: Any) -> None:
    """Of one sequence or of several, with as many queries as keys or not, and truths of keys."""
    monkeypatch.setattr("placement.graph.seen._BLOCK", 40)  # blocks of a few queries
    for (rows, queries, keys), truths in itertools.product([(1, 9, 9), (3, 7, 10), (2, 10, 6)], (0, 1, 2)):
        of_query = tuple(marks(1 if at == 1 else rows, queries, at) for at in range(len(compare)))
        of_key = tuple(marks(rows, keys, 10 + at) for at in range(len(compare)))
        of_key += tuple(marks(rows, keys, 20 + at) for at in range(truths))
        if of_key:
            sight = _Sight(queries, keys, bounds, compare, of_query, of_key)
            counts = sight.counts()
            assert counts is not None
            assert (counts.tolist(), counts.dtype) == (looked_at(sight), torch.int32)


def test_too_many_pairs() -> None:
    """Bounds beside marks in order are looked at pair by pair, of which there may be too many."""
    many = torch.zeros(1, 1 << 14, dtype=torch.int64)
    assert _Sight(1 << 14, 1 << 14, (None, 0), ("<=",), (many,), (many,)).counts() is None
    at = torch.arange(1 << 14)[None]
    for bounds, compare, mark in (((None, 0), "==", many), ((None, None), ">=", at)):
        counts = _Sight(1 << 14, 1 << 14, bounds, (compare,), (mark,), (mark,)).counts()
        assert counts is not None
        assert torch.equal(counts, at + 1)


SEQ = 6


class Packed(nn.Module):
    """Two layers of causal attention; what the documents are worked out from is one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.ones(SEQ))
        self.register_buffer("starts", torch.tensor([0, 2, 5]))

    def documents(self, x: Tensor, ids: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        match self.way:
            case "buffer":
                return torch.searchsorted(self.starts, at, right=True)
            case "places":  # they start again with every document
                return (ids == 0).cumsum(-1)
            case "looked up":
                return self.starts[ids]
            case "halves":
                return at * 2 // x.shape[1] + 0 * ids
            case "weights":
                return (ids * self.weight).long()
            case "draws":
                return F.dropout(x[..., 0]).long()
            case _:
                raise ValueError(self.way)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        for _ in range(2):
            documents = self.documents(x, ids)
            documents = documents[None] if documents.ndim == 1 else documents
            at = torch.arange(x.shape[1], device=x.device)
            seen = (at[:, None] >= at) & (documents[:, None, :, None] == documents[:, None, None, :])
            q = x.unsqueeze(1)
            x = F.scaled_dot_product_attention(q, q, q, attn_mask=seen).squeeze(1)
        return x


def graph_of(way: str, ids: Tensor) -> Graph:
    example = {"x": torch.randn(len(ids), SEQ, 4, device=ids.device), "ids": ids}
    names = {"x": ("batch", "seq", "size"), "ids": ("batch", "seq")}
    model = Packed(way).to(ids.device)
    graph = capture(model, example, names)
    return dataclasses.replace(graph, seen=keys_seen(graph, model, Example.of(model, example)))


def marked(graph: Graph) -> int:
    """How many ops have marks."""
    return sum("compare" in node.kwargs for node in graph.nodes)


@pytest.mark.parametrize(
    ("way", "ids", "want"),
    [
        ("buffer", [[0] * SEQ], [[1, 2, 1, 2, 3, 1]]),
        ("places", [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]], [[1, 2, 3, 1, 2, 1], [1, 2, 1, 2, 3, 4]]),
        ("places", [[0, 1, 2, 0, 1, 0]], [[1, 2, 3, 1, 2, 1]]),  # a batch of one is captured as one of two
        ("looked up", [[0, 0, 1, 1, 2, 2]], [[1, 2, 1, 2, 1, 2]]),
        ("halves", [[0] * SEQ], [[1, 2, 3, 1, 2, 3]]),
    ],
)
def test_marks_are_worked_out(way: str, ids: list[list[int]], want: list[list[int]]) -> None:
    found = graph_of(way, torch.tensor(ids)).seen
    assert len(found) == 2
    assert all(counts.tolist() == want for counts in found.values())
    assert len({id(counts) for counts in found.values()}) == 1  # kept once


@pytest.mark.parametrize(
    ("way", "ids"), [("weights", [[0] * SEQ]), ("draws", [[0] * SEQ]), ("looked up", [[0, 0, 0, 0, 0, 3]])]
)
def test_what_is_not_known(way: str, ids: list[list[int]]) -> None:
    """What weights and random draws decide, and indices that a table has not: the program is captured all the same."""
    graph = graph_of(way, torch.tensor(ids))
    assert graph.seen == {}
    assert marked(graph) == 2


@pytest.mark.parametrize("way", ["buffer", "places"])
def test_nothing_is_known_on_meta(way: str) -> None:
    graph = graph_of(way, torch.zeros(1, SEQ, dtype=torch.int64, device="meta"))
    assert graph.seen == {}
    assert marked(graph) == 2


def test_an_example_of_other_sizes() -> None:
    graph = graph_of("places", torch.zeros(1, SEQ, dtype=torch.int64))
    for rows, tokens, known in ((1, SEQ, 2), (2, SEQ, 0), (1, SEQ - 1, 0)):
        example = {"x": torch.randn(rows, tokens, 4), "ids": torch.zeros(rows, tokens, dtype=torch.int64)}
        model = Packed("places")
        assert len(keys_seen(graph, model, Example.of(model, example))) == known


def test_the_example_is_let_go() -> None:
    ids = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]])
    kept = weakref.ref(ids)
    graph = graph_of("places", ids)
    assert graph.seen
    del ids
    gc.collect()
    assert kept() is None
