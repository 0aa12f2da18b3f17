"""Attention with dropout: torch's plain formula with a given mask, cut anywhere the query may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from placement import runtime as rt
from placement.runtime.attention import attention
from placement.runtime.rng import drop_mask
from tests.gloo import GlooPool
from tests.reference import Shard, to_global, to_ranks

Pool = Callable[[int], GlooPool]
KEY, P = 77, 0.3
BATCH, HEADS, QUERIES, KEYS, INNER, OUTER = 4, 12, 8, 5, 6, 7


def operands(dtype: torch.dtype = torch.float64, kv: int = HEADS) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = (BATCH, HEADS, QUERIES, INNER), (BATCH, kv, KEYS, INNER), (BATCH, kv, KEYS, OUTER)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def masks(dtype: torch.dtype = torch.float64) -> dict[str, dict[str, Any]]:
    g = torch.Generator().manual_seed(1)
    boolean = torch.rand(BATCH, 1, QUERIES, KEYS, generator=g) < 0.7
    boolean[..., 0] = True
    return {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": boolean},
        "float": {"attn_mask": torch.randn(HEADS, QUERIES, KEYS, generator=g, dtype=torch.float64).to(dtype)},
        "scale": {"scale": -0.7},
        "grouped": {"enable_gqa": True},
    }


def reference(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """torch's own formula, given the mask of what is kept."""
    keep = ~drop_mask(q.new_empty(BATCH, HEADS, QUERIES, KEYS), P, KEY)
    given = {"attn_mask": None, **options}
    if given["attn_mask"] is not None and given["attn_mask"].dtype is torch.bool:  # what torch does in front of it
        given["attn_mask"] = torch.zeros_like(given["attn_mask"], dtype=q.dtype).masked_fill(
            ~given["attn_mask"], -torch.inf
        )
    out, _ = torch.ops.aten._scaled_dot_product_attention_math(q, k, v, dropout_p=P, dropout_mask=keep, **given)
    return out


@pytest.mark.parametrize("how", masks())
def test_against_torch(how: str) -> None:
    options = masks()[how]
    inputs, others = (operands(kv=3 if how == "grouped" else HEADS) for _ in range(2))
    out, expected = attention(*inputs, P, KEY, **options), reference(*others, options)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    cotangent = torch.randn_like(out)
    out.backward(cotangent)
    expected.backward(cotangent)
    for mine, other in zip(inputs, others, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", ["causal", "float"])
def test_narrow_dtypes(dtype: torch.dtype, how: str) -> None:
    """Computed in float32, rounded once."""
    inputs = operands(dtype)
    out = attention(*inputs, P, KEY, **masks(dtype)[how])
    exact = reference(
        *(x.double() for x in inputs), {k: v if v is True else v.double() for k, v in masks(dtype)[how].items()}
    )
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-3 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("floating", [False, True])
def test_a_query_that_sees_nothing(floating: bool) -> None:
    inputs = operands()
    mask = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    mask[3] = False
    given = torch.zeros(QUERIES, KEYS, dtype=torch.float64).masked_fill(~mask, -torch.inf) if floating else mask
    out = attention(*inputs, P, KEY, attn_mask=given)
    assert not out[:, :, 3].any()
    assert out[:, :, 2].all(-1).any()
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)
    assert not inputs[0].grad[:, :, 3].any()


def test_two_masks() -> None:
    with pytest.raises(ValueError, match="both"):
        attention(*operands(), P, KEY, attn_mask=torch.ones(QUERIES, KEYS), is_causal=True)


class Attend(rt.Module):
    pass


CUTS = [(0, 1), (1, 1), (1, 3), (2, 1), (-3, 1)]


def on_an_axis(axis: rt.Axis | None, dim: int, outer: int, training: bool = True) -> tuple[Tensor, list[Tensor]]:
    """This rank's output and its operands: cut where the query's dim is theirs too."""
    module = Attend().train(training)
    parts = operands()
    where = () if axis is None else ((axis, dim, outer),)
    if axis is not None:
        cut = [
            x if dim == 2 and i else to_ranks(x.detach(), Shard(dim, outer), axis.size)[axis.rank]
            for i, x in enumerate(parts)
        ]
        parts = [x.detach().clone().requires_grad_() for x in cut]
    return rt.attention(module, *parts, P, 0, *where), parts


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("dim", "outer"), CUTS)
def test_cut(n: int, dim: int, outer: int) -> None:
    if (dim, outer, n) == (1, 3, 4):
        n = 2  # of 12 heads
    with rt.record() as log:
        answers = rt.simulate(tp=n).run(lambda axes: on_an_axis(axes["tp"], dim, outer))
        whole, inputs = on_an_axis(None, 0, 1)
        cotangent = torch.randn_like(whole)
        whole.backward(cotangent)
        shard = Shard(dim, outer)
        torch.autograd.backward([out for out, _ in answers], to_ranks(cotangent, shard, n))
    assert log == []
    torch.testing.assert_close(to_global([out.detach() for out, _ in answers], shard), whole)
    for index, x in enumerate(inputs):
        grads = [parts[index].grad for _, parts in answers]
        grad = sum(grads) if dim == 2 and index else to_global(grads, shard)
        torch.testing.assert_close(grad, x.grad)


@pytest.mark.parametrize(("first", "second"), [((0, 1), (1, 1)), ((1, 1), (1, 3)), ((0, 1), (0, 1))])
def test_cut_on_two_axes(first: tuple[int, int], second: tuple[int, int]) -> None:
    """Both axes cut the query, the second the blocks of the first."""

    def body(axes: dict[str, rt.Axis]) -> Tensor:
        on = ((axes["dp"], *first), (axes["tp"], *second))
        parts = operands()
        for axis, *cut in on:
            parts = [to_ranks(x.detach(), Shard(*cut), axis.size)[axis.rank] for x in parts]
        return rt.attention(Attend(), *parts, P, 0, *on)

    outs = rt.simulate(dp=2, tp=2).run(body)
    rows = [to_global(outs[row : row + 2], Shard(*second)) for row in (0, 2)]
    torch.testing.assert_close(to_global(rows, Shard(*first)), on_an_axis(None, 0, 1)[0].detach())


def test_without_dropout() -> None:
    """Evaluation, and probability 0 in training: torch's own attention."""
    inputs = operands()
    expected = F.scaled_dot_product_attention(*inputs)
    assert torch.equal(on_an_axis(None, 0, 1, training=False)[0], expected)
    assert torch.equal(rt.attention(Attend(), *inputs, 0.0, 0), expected)
    assert not torch.allclose(on_an_axis(None, 0, 1)[0], expected)
    x = inputs[0]
    assert rt.dropout(Attend().eval(), x, 0.5, 0) is x


def on_processes() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return [on_an_axis(rt.MeshAxis(mesh, "tp"), dim, outer)[0].detach() for dim, outer in CUTS]


@pytest.mark.gloo
def test_on_processes(gloo: Pool) -> None:
    whole, _ = on_an_axis(None, 0, 1)
    answers = gloo(2).run(on_processes)
    for index, (dim, outer) in enumerate(CUTS):
        torch.testing.assert_close(to_global([answer[index] for answer in answers], Shard(dim, outer)), whole.detach())
