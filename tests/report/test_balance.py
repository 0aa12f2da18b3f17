"""Pairs of query and key by rank, against counting them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import placement
from placement.graph.capture import capture
from placement.graph.example import Example
from placement.graph.ir import Graph
from placement.graph.seen import keys_seen
from placement.lang.parser import parse
from placement.report import explain_data, explain_text, to_html
from placement.report.balance import Balance, _before, _blocks, _least_and_most, told
from placement.solver.bind import bind
from placement.solver.build import plan as solve
from placement.solver.mesh import Place
from placement.solver.plan import Plan
from tests.gloo import GlooPool
from tests.parity import marked


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
    want = [counted(size, bounds, own) for own in owned(size, n, zigzag=zigzag)]
    sums = functools.partial(_before, size=size, seen=bounds)
    found = _least_and_most([sums], _blocks(size, [(n, Place(2, 1, zigzag=zigzag))], {}))
    assert found == (min(want), max(want))


def owned(size: int, n: int, *, zigzag: bool) -> list[list[int]]:
    """The tokens of each rank."""
    piece = size // (2 * n)
    chunks = [list(range(at * piece, (at + 1) * piece)) for at in range(2 * n)]
    apart = [(r, 2 * n - 1 - r) if zigzag else (2 * r, 2 * r + 1) for r in range(n)]
    return [chunks[a] + chunks[b] for a, b in apart]


@pytest.mark.parametrize(
    ("bounds", "marks", "sequences", "what"),
    [
        ((None, 0), "", 1, "causal attention"),
        ((4, 0), "", 1, "causal attention to 4 before"),
        ((4, 2), "", 1, "attention to 4 before and 2 after"),
        ((None, 2), "", 1, "attention to all before and 2 after"),
        ((None, None), "counted", 1, "attention with the example's marks"),
        ((4, 0), "counted", 4, "causal attention to 4 before in 4 sequences with the example's marks"),
        ((None, 0), "unknown", 1, "causal attention without its marks"),
    ],
)
def test_how_it_is_told(bounds: tuple[int | None, int | None], marks: str, sequences: int, what: str) -> None:
    found = Balance(("a",), ("cp",), False, bounds, (3, 6), (3, 6), marks, sequences)
    assert told(found) == f"3 to 6 pairs, 1 : 2 of {what} on a rank of cp, contiguous"


# -- what marks hide ---------------------------------------------------------------------------------


def planned(graph: Graph, cp: int, order: str, *, dp: int = 1, sizes: dict[str, int] | None = None) -> Plan:
    text = marked.spec("ring", order)
    if dp > 1:
        both = f"Shard(seq{order}) @ cp, Shard(batch) @ dp\n"
        text = text.replace(f"Shard(seq{order}) @ cp\n", both) + f"value attention.{{q,k,v}} : {both}output y : {both}"
        text = f"mesh dp over slow\nlink slow = 1 MB/s, 1 ms\n{text}"  # heads are not sent over it
    read = parse(text)
    axes = {"dp": dp, "cp": cp} if dp > 1 else {"cp": cp}
    return solve(bind(graph, read, axes, sizes=sizes), read.sources)


@functools.cache
def captured(mask: str, *, blocks: tuple[str, ...] = ()) -> Graph:
    """``blocks``: inputs of which the example has a rank's block alone."""
    given = marked.inputs()
    names = {name: marked.NAMES[: x.ndim] for name, x in given.items()}
    model = marked.Model(mask, marked.KV["grouped"]).double()
    graph = capture(model, given, names)
    return dataclasses.replace(graph, seen=keys_seen(graph, model, Example.of(model, given), blocks))


def pairs_of(mask: str) -> Tensor:
    """What each query sees, counted in the mask that the model writes: [batch, queries]."""
    given = marked.inputs()
    seen = marked.MASKS[mask](torch.arange(marked.SEQ), given["documents"], given["kept"])
    return seen.expand(marked.BATCH, 1, marked.SEQ, marked.SEQ).sum(-1)[:, 0]


@pytest.mark.parametrize("mask", ["packed", "padded"])
@pytest.mark.parametrize("order", marked.ORDERS)
@pytest.mark.parametrize("dp", [1, 2])
def test_pairs_of_marks_are_those_of_the_example(mask: str, order: str, dp: int) -> None:
    """Each rank's own queries, of its own sequences where an axis cuts the batch."""
    n, pairs = 3, pairs_of(mask)
    each = [pairs] if dp == 1 else list(pairs.split(1))
    want, contiguous = (
        sorted(int(rows[:, own].sum()) for rows in each for own in owned(marked.SEQ, n, zigzag=zigzag))
        for zigzag in (bool(order), False)
    )
    plan = planned(captured(mask), n, order, dp=dp)
    (balance,) = explain_data(plan)["balance"]
    assert (balance["pairs"], balance["contiguous"]) == ([want[0], want[-1]], [contiguous[0], contiguous[-1]])
    assert (balance["marks"], balance["sequences"]) == ("counted", marked.BATCH // dp)
    assert balance["axes"] == (["cp"] if dp == 1 else ["dp", "cp"])
    said = " ".join(explain_text(plan).split())
    assert f"{want[0]} to {want[-1]} pairs" in said
    assert "with the example's marks" in said
    assert "with the example&#39;s marks" in to_html(plan)


def test_marks_that_are_not_there() -> None:
    """From a rank's block alone, or at another length than the example's: the bounds are known as ever."""
    block = planned(captured("packed", blocks=("documents",)), 3, "")
    longer = planned(captured("packed"), 3, "", sizes={"seq": 2 * marked.SEQ})
    for plan, size in ((block, marked.SEQ), (longer, 2 * marked.SEQ)):
        want = [counted(size, (None, 0), own) for own in owned(size, 3, zigzag=False)]
        (balance,) = explain_data(plan)["balance"]
        assert (balance["pairs"], balance["marks"], balance["sequences"]) == ([want[0], want[-1]], "unknown", 1)
        assert "causal attention without its marks" in explain_text(plan, 200)


def on_gloo(*, whole: bool) -> str:
    """What a rank's program says that is given its block of the documents, or all of them."""
    mesh, text, given = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), marked.spec("ring"), marked.inputs()
    if whole:
        text = text.replace("input documents, kept", "input documents : [batch, seq]\ninput kept")
        given["documents"] = given["documents"].repeat(1, 2)
    model = marked.Model("packed", marked.KV["grouped"]).double()
    return str(placement.compile(model, mesh, text, example=given).explain(width=200))


@pytest.mark.gloo
def test_marks_of_a_block_are_not_known(gloo: Callable[[int], GlooPool]) -> None:
    for whole, words in ((False, "without its marks"), (True, "with the example's marks")):
        assert all(words in said for said in gloo(2).run(functools.partial(on_gloo, whole=whole)))
