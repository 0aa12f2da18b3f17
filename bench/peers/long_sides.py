"""Causal attention over a cut sequence by the emitted program's functions and by other libraries, as one function each.

A side takes this rank's query, key and value, [batch, heads, tokens / n, size], and gives its result; which tokens a
rank has is the side's own order. Where a library has no kernel for CPUs, a second side has torch's put into it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import placement.runtime as rt

aten = torch.ops.aten
CPU_KERNEL = aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 - as sides need it by itself
CPU_KERNEL_BACK = aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001
OURS = "placement, zigzag"
Order = Callable[[int, int, int], Tensor]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Around = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a comparison."""

    batch: int = 1
    heads: int = 8
    seq: int = 2048
    size: int = 64

    def drawn(self, dtype: torch.dtype) -> list[Tensor]:
        """Query, key, value and the result's gradient, whole and alike on every rank."""
        draw = torch.Generator().manual_seed(5)
        shape = (self.batch, self.heads, self.seq, self.size)
        return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for _ in range(4)]


@dataclass
class Side:
    """One implementation on this rank: ``given`` holds its query, key, value and the result's gradient.

    ``around`` is entered for a forward and its backward. ``tokens_first``: memory is [batch, tokens, heads, size].
    """

    order: Order
    attention: Attention
    around: Around = nullcontext
    tokens_first: bool = False
    given: list[Tensor] = field(default_factory=list)

    def take(self, whole: list[Tensor]) -> Side:
        """With this rank's tokens of query, key, value and gradient."""
        places = self.places(whole[0].shape[2])
        parts = [x[:, :, places].contiguous() for x in whole]
        if self.tokens_first:
            parts = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts]
        self.given = [*(x.requires_grad_() for x in parts[:3]), parts[3]]
        return self

    def places(self, seq: int) -> Tensor:
        """The tokens that this rank has."""
        return self.order(seq, dist.get_world_size(), dist.get_rank())


def contiguous(seq: int, n: int, rank: int) -> Tensor:
    """One block."""
    return torch.arange(seq).chunk(n)[rank]


def zigzag(seq: int, n: int, rank: int) -> Tensor:
    """An early and a late chunk."""
    chunks = torch.arange(seq).chunk(2 * n)
    return torch.cat((chunks[rank], chunks[2 * n - 1 - rank]))


def alone(seq: int, n: int, rank: int) -> Tensor:
    """All of them."""
    del n, rank
    return torch.arange(seq)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What one device does."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _world() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def one_device() -> Side:
    """All tokens, on each rank by itself."""
    return Side(alone, plain)


def ours(order: str) -> Side:
    """The ring of emitted programs."""
    axis = rt.MeshAxis(_world(), "cp")

    def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rt.ring_attention(q, k, v, axis, 2, zigzag=order == "zigzag", right=0)

    return Side(zigzag if order == "zigzag" else contiguous, ring)


def our_heads() -> Side:
    """The exchange of tokens for heads in emitted programs."""
    axis = rt.MeshAxis(_world(), "cp")

    def exchanged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (rt.all_to_all(x, axis, 2, 1) for x in (q, k, v))
        return rt.all_to_all(plain(q, k, v), axis, 1, 2)

    return Side(contiguous, exchanged)


def by_torch() -> Side:
    """The ``context_parallel`` of torch as it comes."""
    from torch.distributed.tensor.experimental import context_parallel  # noqa: PLC0415 - may be gone in a version

    mesh = _world()

    def around() -> AbstractContextManager[Any]:
        # At least one buffer is asked for; what it cuts is of no use here.
        return context_parallel(mesh, buffers=[torch.zeros(1, 4 * mesh.size())], buffer_seq_dims=[1])

    return Side(zigzag, plain, around)  # which looks up in F what the context puts there


def by_torch_template(rotate: str) -> Side:
    """The ring of torch with torch's kernel for CPUs, which ``context_parallel`` does not know, put in."""
    module: Any = importlib.import_module("torch.distributed.tensor.experimental._context_parallel._attention")
    group = _world().get_group()

    def forward_kernel(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
        return CPU_KERNEL(q, k, v, 0.0, is_causal)

    def backward_kernel(**given: Any) -> tuple[Tensor, ...]:
        names = ("grad_out", "query", "key", "value", "out", "logsumexp")
        return CPU_KERNEL_BACK(*(given[name] for name in names), 0.0, given["is_causal"])

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *parts: Tensor) -> Tensor:
            module.set_rotate_method(rotate)
            ring = module._templated_ring_attention  # noqa: SLF001 - there is no public one
            out, total = ring(group, 2, forward_kernel, *parts, is_causal=True)
            ctx.save_for_backward(*parts, out, total)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            module.set_rotate_method(rotate)
            ring = module._templated_ring_attention_backward  # noqa: SLF001
            return tuple(ring(group, 2, backward_kernel, grad, "grad_out", *ctx.saved_tensors, is_causal=True))[:3]

    def apply(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made: Any = Ring.apply(q, k, v)
        return made

    return Side(zigzag, apply)


def _tokens_first(order: Order, attention: Attention, around: Around = nullcontext) -> Side:
    """Of a library whose tensors are [batch, tokens, heads, size]."""
    return Side(order, _transposed(attention), around, tokens_first=True)


def _transposed(attention: Attention) -> Attention:
    def called(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    return called


def by_ring_attention_pytorch(order: str, bucket: int = 512) -> Side:
    """ring-attention-pytorch's plain path."""
    ring = importlib.import_module("ring_attention_pytorch").ring_flash_attn
    spread = order == "striped"

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring(q, k, v, causal=True, bucket_size=bucket, ring_reduce_col=True, striped_ring_attn=spread)

    def stripes(seq: int, n: int, rank: int) -> Tensor:
        # As its own module cuts: a bucket is every (seq / bucket)-th token, and a rank has buckets side by side.
        own = min(bucket, seq // n)
        return torch.arange(seq).view(own, seq // own).t().reshape(-1).chunk(n)[rank]

    return _tokens_first(stripes if spread else contiguous, attention)


def by_yunchang_ring(*, kernel: bool) -> Side:
    """The ring of yunchang in torch's own ops; ``kernel``: with torch's for CPUs in their place."""
    module: Any = importlib.import_module("yunchang.ring.ring_pytorch_attn")
    group = _world().get_group()

    def forward_kernel(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, total = CPU_KERNEL(q, k, v, 0.0, causal, scale=softmax_scale)
        return out.transpose(1, 2), total

    def backward_kernel(grad: Tensor, *parts: Tensor, softmax_lse: Tensor, softmax_scale: float, causal: bool) -> Any:
        heads = [x.transpose(1, 2) for x in (grad, *parts)]
        # It keeps the sums beside the result, as [batch, tokens, heads].
        total = softmax_lse.transpose(1, 2).contiguous()
        back = CPU_KERNEL_BACK(*heads, total, 0.0, causal, scale=softmax_scale)
        return tuple(x.transpose(1, 2).contiguous() for x in back)

    @contextmanager
    def put_in() -> Iterator[None]:
        given = {"pytorch_attn_forward": forward_kernel, "pytorch_attn_backward": backward_kernel}
        with mock.patch.multiple(module, **given):
            yield

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return module.ring_pytorch_attn_func(q, k, v, causal=True, group=group)

    return _tokens_first(contiguous, attention, put_in if kernel else nullcontext)


def by_yunchang_ulysses(*, kernel: bool) -> Side:
    """The exchange of heads of yunchang; ``kernel``: with ``F.scaled_dot_product_attention`` inside."""
    yunchang: Any = importlib.import_module("yunchang")
    kernels: Any = importlib.import_module("yunchang.kernels")
    made = yunchang.UlyssesAttention(_world().get_group(), attn_type=kernels.AttnType.TORCH_FLASH)
    if kernel:
        made.attn_fn = _transposed_plain
    return _tokens_first(contiguous, lambda q, k, v: made(q, k, v, causal=True))


def _transposed_plain(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    return _transposed(plain)(q, k, v)


def by_ring_flash_attn() -> Side:
    """ring-flash-attn, over flash-attn alone."""
    ring = importlib.import_module("ring_flash_attn").zigzag_ring_flash_attn_func
    return _tokens_first(zigzag, lambda q, k, v: ring(q, k, v, causal=True))


MAKERS: dict[str, Callable[[], Side]] = {
    OURS: lambda: ours("zigzag"),
    "placement, contiguous": lambda: ours("contiguous"),
    "placement, all_to_all": our_heads,
    "one device": one_device,
    "torch context_parallel": by_torch,
    "torch's ring, allgather *": lambda: by_torch_template("allgather"),
    "torch's ring, alltoall *": lambda: by_torch_template("alltoall"),
    "ring-attention-pytorch": lambda: by_ring_attention_pytorch("contiguous"),
    "ring-attention-pytorch, striped": lambda: by_ring_attention_pytorch("striped"),
    "yunchang ring": lambda: by_yunchang_ring(kernel=False),
    "yunchang ring *": lambda: by_yunchang_ring(kernel=True),
    "yunchang ulysses": lambda: by_yunchang_ulysses(kernel=False),
    "yunchang ulysses *": lambda: by_yunchang_ulysses(kernel=True),
    "ring-flash-attn": by_ring_flash_attn,
}
