"""Conversion tables against the enumeration of every set of edges."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest

from placement.solver.cost import DEVICES, LINKS, Machine
from placement.solver.problem import FORBIDDEN
from placement.solver.steiner import conversion_table, conversion_tree
from placement.types import I, P, R, S, Type, conversion

TYPES = (I, R, P, S("a"), S("b"), S("c"))
Prices = dict[tuple[Type, Type], tuple[int, int, int]]


def random_prices(rng: random.Random, count: int) -> Prices:
    """Sparse or dense, many zeros and ties in every component."""
    density = rng.choice((0.3, 0.6, 1.0))
    return {
        (a, b): (rng.choice((0, 0, 1, 2, 5)), rng.choice((0, 3)), rng.randint(0, 2))
        for a in TYPES[:count]
        for b in TYPES[:count]
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
    edges = [(TYPES.index(a), TYPES.index(b)) for a, b in prices]
    best: dict[tuple[int, int], tuple[int, int, int]] = {}
    for size in range(min(len(edges), count - 1) + 1):
        for chosen in combinations(edges, size):
            cost = np.sum([prices[TYPES[a], TYPES[b]] for a, b in chosen] or [(0, 0, 0)], axis=0)
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
    table = conversion_table(TYPES[:count], lambda a, b: prices.get((a, b)))
    expected = every_edge_set(count, prices)
    for source in range(count):
        for asked in range(1 << count):
            if (source, asked) not in expected:
                assert table[0, source, asked] == FORBIDDEN
                with pytest.raises(ValueError, match="no conversions"):
                    conversion_tree(TYPES[:count], lambda a, b: prices.get((a, b)), source, asked)
                continue
            assert tuple(table[:, source, asked]) == expected[source, asked]
            check_tree(prices, count, source, asked, expected[source, asked])


def check_tree(prices: Prices, count: int, source: int, asked: int, cost: tuple[int, int, int]) -> None:
    edges = conversion_tree(TYPES[:count], lambda a, b: prices.get((a, b)), source, asked)
    have = {source}
    for a, b in edges:
        assert a in have
        assert b not in have, "a type is made once"
        have.add(b)
    assert all(j in have for j in range(count) if asked >> j & 1)
    assert all(asked >> b & 1 or any(a == b for a, _ in edges) for _, b in edges), "every leaf is asked for"
    assert tuple(np.sum([prices[TYPES[a], TYPES[b]] for a, b in edges] or [(0, 0, 0)], axis=0)) == cost


def priced(nbytes: int):
    machine = Machine(DEVICES["h100"], LINKS["nvlink"], 8)

    def price(a: Type, b: Type) -> tuple[int, int, int] | None:
        row = conversion(a, b)
        if row is None:
            return None
        both = (row.forward, row.backward)
        return sum(machine.collective(x, nbytes) for x in both), 0, sum(machine.launches(x) for x in both)

    return price


def test_consumers_share_the_beginning_of_a_chain() -> None:
    types = (I, R, P, S("seq"), S("heads"))
    price = priced(4096 * 8192 * 2)
    i, r, p, seq, heads = range(5)
    # P has no edge to R: through I (all-reduce both ways) or a shard (four halves), the same volume, fewer launches
    assert conversion_tree(types, price, p, 1 << r) == ((p, i), (i, r))
    # one gather, which R and a second shard share; a second exchange costs more than a local split
    assert conversion_tree(types, price, seq, 1 << r | 1 << heads) == ((seq, r), (r, heads))
    table = conversion_table(types, price)
    gather, split = price(types[seq], types[r]), price(types[r], types[heads])
    assert tuple(table[:, seq, 1 << r | 1 << heads]) == tuple(a + b for a, b in zip(gather, split, strict=True))
    assert table[2, seq, 1 << r] == 2


def test_result_is_shared_and_read_only() -> None:
    first = conversion_table(TYPES[:2], lambda a, b: (1, 0, 0))
    assert first is conversion_table(TYPES[2:4], lambda a, b: (1, 0, 0))
    with pytest.raises(ValueError, match="read-only"):
        first[0, 0, 1] = 7


def test_what_is_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 10"):
        conversion_table([S(k) for k in range(11)], lambda a, b: None)
    with pytest.raises(ValueError, match="not between"):
        conversion_table(TYPES[:2], lambda a, b: (-1, 0, 0))


def test_ten_types_in_reasonable_time() -> None:
    types = [S(k) for k in range(10)]
    table = conversion_table(types, lambda a, b: (abs(a.over[0] - b.over[0]), 0, 1))
    assert table.shape == (3, 10, 1024)
    assert tuple(table[:, 0, 1 << 9]) == (9, 0, 1)
    assert tuple(table[:, 4, 1023]) == (9, 0, 9)
