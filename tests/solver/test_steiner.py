"""Conversion tables against the enumeration of every set of edges."""

from __future__ import annotations

import random
from itertools import combinations, permutations

import numpy as np
import pytest

from placement.solver.cost import DEVICES, LINKS, Machine
from placement.solver.problem import FORBIDDEN, LIMIT
from placement.solver.steiner import Conversions, conversions
from placement.types import I, P, R, S, conversion
from tests.solver.problems import dense

Prices = dict[tuple[int, int], tuple[int, int, int]]


def random_prices(rng: random.Random, count: int) -> Prices:
    """Sparse or dense, many zeros and ties in every component."""
    density = rng.choice((0.3, 0.6, 1.0))
    return {
        (a, b): (rng.choice((0, 0, 1, 2, 5)), rng.choice((0, 3)), rng.randint(0, 2))
        for a in range(count)
        for b in range(count)
        if a != b and rng.random() < density
    }


def reach(source: int, edges: tuple[tuple[int, int], ...]) -> int:
    mask, size = 1 << source, 0
    while size != mask:
        size = mask
        for a, b in edges:
            if mask >> a & 1:
                mask |= 1 << b
    return mask


def every_edge_set(count: int, prices: Prices) -> dict[tuple[int, int], tuple[int, int, int]]:
    """(source, asked) → least cost, by trying all sets of edges."""
    best: dict[tuple[int, int], tuple[int, int, int]] = {}
    for size in range(min(len(prices), count - 1) + 1):
        for chosen in combinations(prices, size):
            cost = np.sum([prices[edge] for edge in chosen] or [(0, 0, 0)], axis=0)
            for source in range(count):
                have = reach(source, chosen)
                key = (source, have)
                best[key] = min(best.get(key, tuple(cost)), tuple(cost))
    least: dict[tuple[int, int], tuple[int, int, int]] = {}
    for (source, have), cost in best.items():
        for asked in range(1 << count):
            if asked & ~have == 0:
                least[source, asked] = min(least.get((source, asked), cost), cost)
    return least


@pytest.mark.parametrize("seed", range(40))
def test_table_and_tree_are_least(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.choice((1, 2, 3, 4, 4)) if seed < 32 else 5
    prices = random_prices(rng, count)
    if count == 5:  # keep the enumeration short
        prices = dict(rng.sample(sorted(prices.items(), key=repr), min(len(prices), 12)))
    least = conversions(count, prices, range(count))
    table, expected = dense(least), every_edge_set(count, prices)
    for source in range(count):
        for asked in range(1 << count):
            if (source, asked) not in expected:
                assert table[0, source, asked] == FORBIDDEN
                with pytest.raises(ValueError, match="no conversions"):
                    least.tree(source, asked)
                continue
            assert tuple(table[:, source, asked]) == expected[source, asked]
            check_tree(least, prices, source, asked, expected[source, asked])


def check_tree(least: Conversions, prices: Prices, source: int, asked: int, cost: tuple[int, int, int]) -> None:
    edges = least.tree(source, asked)
    have = {source}
    for a, b in edges:
        assert a in have
        assert b not in have, "a type is made once"
        have.add(b)
    assert all(j in have for j in range(least.count) if asked >> j & 1)
    assert all(asked >> b & 1 or any(a == b for a, _ in edges) for _, b in edges), "every leaf is asked for"
    assert tuple(np.sum([prices[edge] for edge in edges] or [(0, 0, 0)], axis=0)) == cost


@pytest.mark.parametrize("seed", range(8))
def test_some_types_and_some_sets(seed: int) -> None:
    """Bits count the types asked for, rows the sources given; the rest are there to pass through."""
    rng = random.Random(100 + seed)
    prices, asked, sources, sets = random_prices(rng, 5), (4, 1, 2), (3, 0), np.array([0, 1, 6, 7])
    whole, some = conversions(5, prices, range(5)), conversions(5, prices, asked)
    wide = [sum(1 << t for bit, t in enumerate(asked) if mask >> bit & 1) for mask in sets.tolist()]
    assert np.array_equal(some.table(sources, sets), dense(whole)[:, sources][:, :, wide])
    for source, mask, same in ((s, m, w) for s in sources for m, w in zip(sets.tolist(), wide, strict=True)):
        cost = dense(whole)[:, source, same]
        if cost[0] < FORBIDDEN:
            assert np.array_equal(
                np.sum([prices[edge] for edge in some.tree(source, mask)] or [(0, 0, 0)], axis=0), cost
            )


def test_consumers_share_the_beginning_of_a_chain() -> None:
    types = (I, R, P, S("seq"), S("heads"))
    machine, prices, nbytes = Machine(DEVICES["h100"], LINKS["nvlink"], 8), {}, 4096 * 8192 * 2
    for a, b in permutations(range(5), 2):
        row = conversion(types[a], types[b])
        if row is not None:
            both = (row.forward, row.backward)
            prices[a, b] = (
                sum(machine.collective(x, nbytes) for x in both),
                0,
                sum(machine.launches(x) for x in both),
            )
    least = conversions(5, prices, range(5))
    i, r, p, seq, heads = range(5)
    # P has no edge to R: through I (all-reduce both ways) or a shard (four halves), the same volume, fewer launches
    assert least.tree(p, 1 << r) == ((p, i), (i, r))
    # one gather, which R and a second shard share; a second exchange costs more than a local split
    assert least.tree(seq, 1 << r | 1 << heads) == ((seq, r), (r, heads))
    table = dense(least)
    gather, split = prices[seq, r], prices[r, heads]
    assert tuple(table[:, seq, 1 << r | 1 << heads]) == tuple(a + b for a, b in zip(gather, split, strict=True))
    assert table[2, seq, 1 << r] == 2


def test_result_is_shared_and_read_only() -> None:
    first = conversions(2, {(0, 1): (1, 0, 0), (1, 0): (1, 0, 0)}, (0, 1))
    assert first is conversions(2, {(1, 0): (1, 0, 0), (0, 1): (1, 0, 0)}, [0, 1])
    assert dense(first) is dense(first)
    with pytest.raises(ValueError, match="read-only"):
        dense(first)[0, 0, 1] = 7


@pytest.mark.parametrize("part", [-1, LIMIT + 1])
def test_what_is_out_of_range_is_refused(part: int) -> None:
    with pytest.raises(ValueError, match="not between"):
        conversions(2, {(0, 1): (0, part, 0)}, (0, 1))


def test_ten_types_in_reasonable_time() -> None:
    table = dense(conversions(10, {(a, b): (abs(a - b), 0, 1) for a, b in permutations(range(10), 2)}, range(10)))
    assert table.shape == (3, 10, 1024)
    assert tuple(table[:, 0, 1 << 9]) == (9, 0, 1)
    assert tuple(table[:, 4, 1023]) == (9, 0, 9)
