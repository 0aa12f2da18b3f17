"""Cutting and joining against the reference, which indexes element by element."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from placement import runtime as rt
from placement.runtime.cuts import block, blocks, in_rows, joined, local_shape, of_rows, padded, places
from tests.reference import Shard, to_global, to_ranks


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, rt.Cut, int]:
    """A tensor, possibly transposed, with a cut that n ranks divide."""
    n, outer, rest = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 3))
    segments = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    zigzag = draw(st.booleans())
    shape[dim] = outer * n * rest * (sum(segments) or 1) * (2 if zigzag else 1)
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    if draw(st.booleans()):
        x = x.flip(0).movedim(0, -1).contiguous().movedim(-1, 0)
    return x, rt.Cut(dim, outer, segments, zigzag), n


@given(cut_tensors())
def test_against_the_reference(case: tuple[torch.Tensor, rt.Cut, int]) -> None:
    x, cut, n = case
    shard = Shard(cut.dim, cut.outer, cut.segments, cut.zigzag)
    expected = to_ranks(x, shard, n)
    own = [block(x, cut, n, rank) for rank in range(n)]
    for rank, (got, want) in enumerate(zip(own, expected, strict=True)):
        assert torch.equal(got, want)
        assert got.is_contiguous()
        assert got.shape == local_shape(tuple(x.shape), cut, n, "x")
        full = to_global([want if r == rank else torch.zeros_like(want) for r in range(n)], shard)
        assert torch.equal(padded(want, cut, n, rank), full)
    stack = blocks(x, cut, n)
    assert stack.is_contiguous()
    assert torch.equal(stack, torch.stack(expected))
    assert torch.equal(joined(stack, cut), x)
    rows = in_rows(x, cut, n, "x")
    assert torch.equal(rows, torch.cat(expected))
    assert torch.equal(of_rows(rows, cut, n, "x"), x)
    along = places(x.shape[cut.dim], cut, n, n - 1)
    assert torch.equal(x.index_select(cut.dim, along), expected[-1])


@pytest.mark.parametrize(
    ("shape", "cut", "n"),
    [
        ((5,), rt.Cut(0), 2),
        ((2, 6), rt.Cut(1, 2), 2),
        ((6,), rt.Cut(0, 3), 4),
        ((12,), rt.Cut(0, segments=(2, 1)), 3),
        ((2, 6), rt.Cut(1, zigzag=True), 2),
    ],
)
def test_what_cannot_be_cut(shape: tuple[int, ...], cut: rt.Cut, n: int) -> None:
    for attempt in (
        lambda: block(torch.ones(shape), cut, n, 0, "w on axis 'tp'"),
        lambda: blocks(torch.ones(shape), cut, n, "w on axis 'tp'"),
        lambda: in_rows(torch.ones(shape), cut, n, "w on axis 'tp'"),
        lambda: local_shape(shape, cut, n, "w on axis 'tp'"),
    ):
        with pytest.raises(rt.SizeError, match=rf"w on axis 'tp': dim {cut.dim} of shape .* has size {shape[cut.dim]}"):
            attempt()


def test_outer_that_a_block_lacks() -> None:
    with pytest.raises(rt.SizeError, match="does not make 2 equal parts of dim 0"):
        joined(torch.ones(2, 3), rt.Cut(0, 2))
    with pytest.raises(rt.SizeError, match="does not make 2 equal parts of dim 0"):
        padded(torch.ones(3), rt.Cut(0, 2), 2, 0)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        rt.Cut(0, 0)
    with pytest.raises(rt.SizeError, match="1 equal parts of segments 2 : 1 of dim 0"):
        joined(torch.ones(2, 4), rt.Cut(0, 1, (2, 1)))
    assert repr(rt.Cut(0, 1, (2, 1))) == "Cut(dim=0, outer=1, segments=(2, 1))"
    with pytest.raises(rt.SizeError, match="of two chunks of dim 0"):
        joined(torch.ones(2, 3), rt.Cut(0, zigzag=True))
    assert repr(rt.Cut(0, zigzag=True)) == "Cut(dim=0, outer=1, zigzag=True)"
