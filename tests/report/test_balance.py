"""Pairs of query and key by rank, against counting them."""

from __future__ import annotations

import itertools

import pytest

from placement.report.balance import Balance, _least_and_most, told
from placement.solver.mesh import Place


def counted(size: int, bounds: tuple[int | None, int | None], own: list[int]) -> int:
    left, right = bounds
    pairs = itertools.product(own, range(size))
    return sum((left is None or j >= i - left) and (right is None or j <= i + right) for i, j in pairs)


@pytest.mark.parametrize(
    "bounds", [(None, 0), (3, 0), (2, 5), (None, 4), (40, None), (0, 0), (7, 40), (-3, None), (-1, 4), (None, -2)]
)
@pytest.mark.parametrize("zigzag", [False, True])
def test_pairs_are_those_that_one_counts(bounds: tuple[int | None, int | None], zigzag: bool) -> None:
    size, n = 24, 3
    piece = size // (2 * n)
    chunks = [list(range(at * piece, (at + 1) * piece)) for at in range(2 * n)]
    apart = [(r, 2 * n - 1 - r) if zigzag else (2 * r, 2 * r + 1) for r in range(n)]
    want = [counted(size, bounds, chunks[a] + chunks[b]) for a, b in apart]
    found = _least_and_most(size, bounds, [(n, Place(2, 1, zigzag=zigzag))], {})
    assert found == (min(want), max(want))


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ((None, 0), "3 to 6 pairs, 1 : 2 of causal attention on a rank of cp, contiguous"),
        ((4, 0), "3 to 6 pairs, 1 : 2 of causal attention to 4 before on a rank of cp, contiguous"),
        ((4, 2), "3 to 6 pairs, 1 : 2 of attention to 4 before and 2 after on a rank of cp, contiguous"),
        ((None, 2), "3 to 6 pairs, 1 : 2 of attention to all before and 2 after on a rank of cp, contiguous"),
    ],
)
def test_how_it_is_told(bounds: tuple[int | None, int | None], words: str) -> None:
    assert told(Balance(("a",), ("cp",), False, bounds, (3, 6), (3, 6))) == words
