"""Attention by keys and values that go round: equal to torch's own on one device, results and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from placement import runtime as rt
from placement.runtime import ring
from placement.runtime._torch import flash_attention
from placement.runtime.attention import attention as dropped_attention
from placement.runtime.cuts import block, joined, places, spans
from placement.runtime.rng import Dropping
from tests.gloo import GlooPool

Pool = Callable[[int], GlooPool]
BATCH, HEADS, INNER = 2, 4, 6


def operands(tokens: int, kv: int = HEADS, outer: int = INNER, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    shapes = (BATCH, HEADS, tokens, INNER), (BATCH, kv, tokens, INNER), (BATCH, kv, tokens, outer)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def one_device(parts: list[Tensor], cotangent: Tensor, seen: str = "all", **options: Any) -> list[Tensor]:
    tokens = parts[0].shape[2]
    mask = as_mask(**SEEN[seen](tokens), tokens=tokens)
    out = F.scaled_dot_product_attention(*parts, enable_gqa=True, attn_mask=mask, **options)
    return [out, *torch.autograd.grad(out, parts, cotangent)]


def as_mask(
    left: int | None = None,
    right: int | None = None,
    compare: tuple[str, ...] = (),
    of_query: tuple[Tensor, ...] = (),
    of_key: tuple[Tensor, ...] = (),
    spare: int = 0,
    *,
    tokens: int,
) -> Tensor | None:
    """Element by element."""
    if (left, right, of_key, spare) == (None, None, (), 0):
        return None
    mask = torch.ones(BATCH, 1, tokens, tokens, dtype=torch.bool)
    how = {"==": lambda a, b: a == b, "!=": lambda a, b: a != b, ">=": lambda a, b: a >= b, ">": lambda a, b: a > b}
    how |= {"<=": lambda a, b: a <= b, "<": lambda a, b: a < b}
    for b in range(BATCH):
        for i in range(tokens):
            for j in range(tokens):
                mine = [mark.expand(BATCH, -1)[b, i].item() for mark in of_query]
                its = [mark.expand(BATCH, -1)[b, j].item() for mark in of_key]
                seen = (left is None or j >= i - left) and (right is None or j <= i + right)
                seen = seen and all(how[one](m, o) for one, m, o in zip(compare, mine, its, strict=False))
                mask[b, 0, i, j] = seen and all(its[len(compare) :]) and j < tokens - spare
    return mask


def documents(tokens: int) -> Tensor:
    """One that is longer than a block, and some that end inside of one."""
    ends = torch.tensor([[3, 4, tokens], [tokens // 2 + 1, tokens - 2, tokens]])
    return (torch.arange(tokens)[None, :, None] >= ends[:, None]).sum(-1)


def kept(tokens: int) -> Tensor:
    """The first row starts with padding, of which causal queries see nothing at all; the second ends with it."""
    at = torch.arange(tokens)
    return torch.stack((at >= tokens // 3, at < tokens // 2))


SEEN: dict[str, Callable[[int], dict[str, Any]]] = {
    "all": lambda _: {},
    "causal": lambda _: {"right": 0},
    "window": lambda _: {"left": 3, "right": 0},
    "around": lambda _: {"left": 2, "right": 4},
    "later": lambda _: {"left": -1},
    "packed": lambda t: {
        "right": 0,
        "compare": ("==",),
        "of_query": (documents(t),),
        "of_key": (documents(t),),
    },
    "positions": lambda t: {
        "left": 4,
        "compare": ("!=", "<"),
        "of_query": (documents(t)[0], torch.arange(t) % 5),
        "of_key": (documents(t)[1], torch.arange(t) % 7),
    },
    "padded": lambda t: {"right": 0, "of_key": (kept(t),)},
    "padding alone": lambda t: {"of_key": (kept(t),)},
    "nothing": lambda t: {"of_key": (torch.zeros(t, dtype=torch.bool),)},
    "but the last": lambda _: {"spare": 1},
    "but a block and more": lambda t: {"spare": t // 3 + 1},
    "of them causal": lambda t: {"spare": t // 2 - 1, "right": 0},
    "of them around": lambda _: {"spare": 3, "left": 2, "right": 4},
    "of them packed": lambda t: {
        "spare": 4,
        "compare": ("==",),
        "of_query": (documents(t),),
        "of_key": (documents(t),),
    },
}


def own(
    axis: rt.Axis, parts: list[Tensor], cotangent: Tensor, cut: rt.Cut, seen: str = "all", **options: Any
) -> list[Tensor]:
    """What one rank has of the result and of the gradients."""
    options |= SEEN[seen](parts[0].shape[2])
    leaves = [block(x.detach(), cut, axis.size, axis.rank).requires_grad_() for x in parts]
    options = {"enable_gqa": True, "zigzag": cut.zigzag, **options}
    out = rt.ring_attention(*leaves, axis, 2, cut.outer, cut.segments, **options)
    return [out, *leaves, block(cotangent, cut, axis.size, axis.rank)]


def simulated(
    n: int, parts: list[Tensor], cotangent: Tensor, cut: rt.Cut, seen: str = "all", **options: Any
) -> list[Tensor]:
    ranks = rt.simulate(cp=n).run(lambda axes: own(axes["cp"], parts, cotangent, cut, seen, **options))
    torch.autograd.backward([rank[0] for rank in ranks], [rank[4] for rank in ranks])
    rows = zip(*[[rank[0], *(x.grad for x in rank[1:4])] for rank in ranks], strict=True)
    return [joined(torch.stack([x.detach() for x in row]), cut) for row in rows]


def close(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-12) -> None:
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


CUTS = {
    "plain": rt.Cut(2),
    "outer": rt.Cut(2, 2),
    "segments": rt.Cut(2, 1, (2, 1)),
    "zigzag": rt.Cut(2, zigzag=True),
    "all": rt.Cut(2, 2, (2, 1), zigzag=True),
}


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize(("n", "kv", "outer"), [(2, 4, INNER), (3, 2, 5), (4, 1, INNER), (3, 1, 7)])
def test_against_torch(n: int, kv: int, outer: int, seen: str) -> None:
    """With the kernel of CPUs where values are as long as keys, else by the plain formula."""
    parts = operands(12 * n, kv, outer)
    cotangent = torch.randn(BATCH, HEADS, 12 * n, outer, dtype=torch.float64)
    options = {"scale": -0.7 if n == 3 else None}
    want = one_device(parts, cotangent, seen, **options)
    for cut in CUTS.values():
        close(simulated(n, parts, cotangent, cut, seen, **options), want)


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("axes", [("cp",), ("dp", "cp", "tp")])
def test_dropped_probabilities(seen: str, axes: tuple[str, ...]) -> None:
    """The same ones as on one device, of which a rank has some batches, heads and tokens."""
    parts = operands(12, 2)
    cotangent = torch.randn(BATCH, HEADS, 12, INNER, dtype=torch.float64)
    what = SEEN[seen](12)
    mask = as_mask(**what, tokens=12)
    out = dropped_attention(*parts, 0.3, 7, attn_mask=mask, enable_gqa=True)
    want = [out, *torch.autograd.grad(out, parts, cotangent)]
    dims = {"dp": 0, "tp": 1, "cp": 2}
    cuts = [(axis, rt.Cut(dims[axis], zigzag=axis == "cp")) for axis in axes]

    def on_rank(mesh: dict[str, rt.Axis]) -> list[Tensor]:
        def mine(x: Tensor) -> Tensor:
            for axis, cut in cuts:
                x = block(x.detach(), cut, 2, mesh[axis].rank)
            return x

        def of_rank(mark: Tensor) -> Tensor:
            return block(mark, rt.Cut(0), 2, mesh["dp"].rank) if mark.ndim == 2 and "dp" in mesh else mark

        leaves = [mine(x).requires_grad_() for x in parts]
        dropping = Dropping(0.3, 7, tuple((mesh[axis], cut) for axis, cut in cuts), {})
        marks = {name: tuple(map(of_rank, what.get(name, ()))) for name in ("of_query", "of_key")}
        options: Any = {**what, **marks, "zigzag": True, "enable_gqa": True, "dropping": dropping}
        return [rt.ring_attention(*leaves, mesh["cp"], 2, **options), *leaves, mine(cotangent)]

    ranks = rt.simulate(**dict.fromkeys(axes, 2)).run(on_rank)
    torch.autograd.backward([rank[0] for rank in ranks], [rank[4] for rank in ranks])
    rows = zip(*[[rank[0].detach(), *(x.grad for x in rank[1:4])] for rank in ranks], strict=True)
    for row, whole in zip(rows, want, strict=True):
        stack = torch.stack(row)
        for _, cut in reversed(cuts):
            stack = torch.stack([joined(pair, cut) for pair in stack.unflatten(0, (-1, 2))])
        torch.testing.assert_close(stack[0], whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv", [4, 1])
def test_the_plain_formula(kv: int) -> None:
    parts = operands(6, kv)
    cotangent = torch.randn(BATCH, HEADS, 6, INNER, dtype=torch.float64)
    with mock.patch.object(ring, "flash_attention", return_value=None) as asked:
        for seen in ("causal", "padded", "around"):
            got = simulated(2, parts, cotangent, CUTS["plain"], seen)
            close(got, one_device(parts, cotangent, seen))
    assert asked.called
    assert flash_attention(*parts) is not None


def test_narrow_dtypes() -> None:
    """What goes round is narrow, what is summed is not."""
    parts = operands(12, 2, dtype=torch.bfloat16)
    cotangent = torch.randn(BATCH, HEADS, 12, INNER).to(torch.bfloat16)
    with rt.record() as log:
        got = simulated(3, parts, cotangent, CUTS["plain"], "causal")
    exact = one_device([x.detach().double().requires_grad_() for x in parts], cotangent.double(), "causal")
    assert all(x.dtype is torch.bfloat16 for x in got)
    close([x.double() for x in got], exact, 4e-2)
    whole = 2 * BATCH * 2 * 12 * INNER  # keys and values, in elements
    assert [(e.phase, e.kind, e.bytes // whole) for e in log] == [
        *[("forward", "send_recv", 2)] * 2,
        *[("backward", "send_recv", size) for size in (2, 2, 4, 4)],
    ]


def test_large_scores_and_three_dims() -> None:
    """A maximum is subtracted before anything is raised; without a dim for the batch there is one anyway."""
    parts = [(40 * x[0]).detach().requires_grad_() for x in operands(8)]
    cotangent = torch.randn(HEADS, 8, INNER, dtype=torch.float64)
    ranks = rt.simulate(cp=2).run(
        lambda axes: rt.ring_attention(
            *(block(x, rt.Cut(1), 2, axes["cp"].rank) for x in parts), axes["cp"], 1, right=0
        )
    )
    want = F.scaled_dot_product_attention(*parts, is_causal=True)
    assert want.isfinite().all()
    got = torch.cat(ranks, 1)
    close(*([x, *torch.autograd.grad(x, parts, cotangent)] for x in (got, want)), 1e-10)


@pytest.mark.parametrize(
    ("seen", "zigzag", "want"),
    [
        ("causal", False, [(16, True)] * 4 + [(16, False)] * 6),
        ("causal", True, [(16, True)] * 4 + [(8, False)] * 12),
        ("but a block and more", False, [(16, False)] * 8 + [(8, False)] * 4),
    ],
)
def test_only_own_tensors_are_kept_and_hidden_blocks_are_not_computed(
    seen: str, zigzag: bool, want: list[tuple[int, bool]]
) -> None:
    """In zigzag order every rank computes equally many pairs of causal attention."""
    parts, cut = operands(16), rt.Cut(2, zigzag=zigzag)
    kept: list[Tensor] = []
    calls: list[tuple[int, bool]] = []
    forward = ring._Kernel.forward

    def counted(self: Any, query: Tensor, key: Tensor, value: Tensor, hidden: Any) -> Any:
        calls.append((query.shape[2] * key.shape[2], hidden.causal))
        return forward(self, query, key, value, hidden)

    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x),
        mock.patch.object(ring._Kernel, "forward", counted),
    ):
        rt.simulate(cp=4).run(lambda axes: own(axes["cp"], parts, parts[0].detach(), cut, seen)[0])
    block_of = BATCH * HEADS * 4 * INNER
    assert sorted(x.numel() for x in kept) == sorted([*[block_of] * 4, BATCH * HEADS * 4] * 4)
    assert sorted(calls) == sorted(want)


def test_nothing_is_as_large_as_the_scores() -> None:
    """Of 4 ranks with 64 tokens each every tensor that is made has fewer elements than queries times keys."""
    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            largest.extend(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor))
            return out

    parts = [x[:1, :1, :, :2].detach() for x in operands(256)]
    with Watch():
        simulated(4, parts, parts[0], rt.Cut(2), "causal")
    assert 0 < max(largest) < 64 * 64


def test_a_frozen_key_and_value_send_no_gradient() -> None:
    parts = operands(8)
    with rt.record() as log:
        ranks = rt.simulate(cp=2).run(
            lambda axes: rt.ring_attention(
                *(block(x.detach(), rt.Cut(2), 2, axes["cp"].rank).requires_grad_(i == 0) for i, x in enumerate(parts)),
                axes["cp"],
                2,
            )
        )
        sum(out.sum() for out in ranks).backward()
    assert [e.phase for e in log] == ["forward", "backward"]


def test_a_result_that_nobody_differentiates() -> None:
    """Of ranks whose results are not all used, the others take part."""
    parts = operands(8)
    ranks = rt.simulate(cp=2).run(lambda axes: own(axes["cp"], parts, parts[0].detach(), rt.Cut(2), "causal"))
    ranks[1][0].sum().backward()
    want = torch.autograd.grad(F.scaled_dot_product_attention(*parts, is_causal=True)[:, :, 4:].sum(), parts)
    close([torch.cat([rank[i].grad for rank in ranks], 2) for i in (1, 2, 3)], list(want))


def test_no_second_derivative() -> None:
    parts = operands(4)
    ranks = rt.simulate(cp=2).run(lambda axes: own(axes["cp"], parts, parts[0].detach(), rt.Cut(2))[:2])
    (gradient,) = torch.autograd.grad(ranks[0][0].sum(), ranks[0][1], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("shapes", "options", "text"),
    [
        (((4, 8, 6), (2, 8, 6), (2, 8, 6)), {}, "heads"),
        (((4, 8, 6), (3, 8, 6), (3, 8, 6)), {"enable_gqa": True}, "heads"),
        (((4, 8, 6), (4, 8, 5), (4, 8, 5)), {}, "sizes"),
        (((4, 8, 6), (4, 9, 6), (4, 9, 6)), {}, "as many queries"),
        (((8, 6), (8, 6), (8, 6)), {}, "dim 1"),
    ],
)
def test_refused(shapes: Any, options: dict[str, Any], text: str) -> None:
    (axis,) = rt.simulate(cp=1).axes(0).values()
    with pytest.raises(ValueError, match=text):
        rt.ring_attention(*map(torch.zeros, shapes), axis, 1, **options)


@pytest.mark.parametrize("cut", CUTS.values())
def test_spans_are_places(cut: rt.Cut) -> None:
    for rank in range(2):
        found = [place for start, stop in spans(24, cut, 2, rank) for place in range(start, stop)]
        assert found == places(24, cut, 2, rank).tolist()


def on_gloo(n: int) -> tuple[list[Tensor], list[rt.Event]]:
    axis = rt.MeshAxis(init_device_mesh("cpu", (n,), mesh_dim_names=("cp",)), "cp")
    parts = operands(4 * n, 2)
    with rt.record() as log:
        out, *leaves, cotangent = own(axis, parts, torch.ones_like(parts[0]), rt.Cut(2), "causal")
        out.backward(cotangent)
    return [out.detach(), *(x.grad for x in leaves)], log


@pytest.mark.gloo
@pytest.mark.parametrize("n", [2, 3])
def test_processes(n: int, gloo: Pool) -> None:
    parts = operands(4 * n, 2)
    results = gloo(n).run(on_gloo, n)
    got = [torch.cat(row, 2) for row in zip(*(found for found, _ in results), strict=True)]
    close(got, one_device(parts, torch.ones_like(parts[0]), "causal"))
    assert all([(e.phase, e.kind) for e in log].count(("backward", "send_recv")) == 2 * (n - 1) for _, log in results)
