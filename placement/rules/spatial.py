"""Windows over positions: pooling, resampling, patches. Leading dims, batch and channels, are parallel."""

from __future__ import annotations

import math

from placement.graph.ir import Node
from placement.graph.signature import Dim, Signature
from placement.rules.core import SignatureRule, arguments, aten, rule


def _windows(spatial: int, *, linear: bool) -> SignatureRule:
    """The last ``spatial`` dims are whole before, and others after."""

    def signature(node: Node) -> Signature:
        rank = len(node.operands[0].shape) - spatial
        leading: tuple[Dim, ...] = tuple((f"d{i}",) for i in range(rank))
        before = tuple((f"x{i}",) for i in range(spatial))
        after = tuple((f"y{i}",) for i in range(spatial))
        return Signature(
            operands=((*leading, *before),),
            results=((*leading, *after),) * len(node.results),
            blocked=frozenset(letter for (letter,) in (*before, *after)),
            linear=frozenset({0} if linear else ()),
        )

    return signature


for _spatial, _averages, _maxima, _resampled in (
    (
        1, (aten.avg_pool1d, aten.adaptive_avg_pool1d), (aten.max_pool1d, aten.max_pool1d_with_indices),
        (aten.upsample_linear1d, aten.upsample_nearest1d),
    ),
    (
        2, (aten.avg_pool2d, aten.adaptive_avg_pool2d), (aten.max_pool2d, aten.max_pool2d_with_indices),
        (aten.upsample_bicubic2d, aten.upsample_bilinear2d, aten.upsample_nearest2d),
    ),
    (
        3, (aten.avg_pool3d, aten.adaptive_avg_pool3d), (aten.max_pool3d, aten.max_pool3d_with_indices),
        (aten.upsample_nearest3d, aten.upsample_trilinear3d),
    ),
):  # fmt: skip
    rule([*_averages, *_resampled], _windows(_spatial, linear=True))
    rule(_maxima, _windows(_spatial, linear=False))


def _patches(node: Node) -> Signature | None:
    """``b c h w -> b (c k) l``: every channel's patches stand side by side."""
    (source,) = node.operands
    if len(source.shape) != 4:
        return None  # without a batch dim
    kernel = math.prod(arguments(node)["kernel_size"])
    before: tuple[Dim, ...] = (("b",), ("c",), ("h",), ("w",))
    after: tuple[Dim, ...] = (("b",), ("c", "k"), ("l",))
    return Signature((before,), (after,), frozenset("hwlk"), frozenset({0}), sizes={"c": source.shape[1], "k": kernel})


def _from_patches(node: Node) -> Signature | None:
    """The reverse: overlapping patches of a channel are summed."""
    (source,), (result,) = node.operands, node.results
    if len(source.shape) != 3:
        return None
    kernel = math.prod(arguments(node)["kernel_size"])
    before: tuple[Dim, ...] = (("b",), ("c", "k"), ("l",))
    after: tuple[Dim, ...] = (("b",), ("c",), ("h",), ("w",))
    return Signature((before,), (after,), frozenset("hwlk"), frozenset({0}), sizes={"c": result.shape[1], "k": kernel})


rule(aten.im2col, _patches, code="F.unfold({self}, {kernel_size}, {dilation}, {padding}, {stride})")
rule(
    aten.col2im,
    _from_patches,
    code="F.fold({self}, {output_size}, {kernel_size}, {dilation}, {padding}, {stride})",
)


def _unfold(node: Node) -> Signature:
    """Windows over one dim, which is whole; what is in a window is a new last dim."""
    (source,) = node.operands
    dim = arguments(node)["dimension"] % max(len(source.shape), 1)
    before = tuple((f"d{i}",) for i in range(len(source.shape)))
    after = tuple(("y",) if i == dim else d for i, d in enumerate(before))
    return Signature((before,), ((*after, ("k",)),), frozenset({f"d{dim}", "y", "k"}), frozenset({0}))


rule(aten.unfold, _unfold, code="{self}.unfold({dimension}, {size}, {step})", view=True)


def _pixel_shuffle(node: Node) -> Signature:
    """``(c r s) h w -> c (h r) (w s)``: a shard of rows or columns keeps its own."""
    (source,), factor = node.operands, arguments(node)["upscale_factor"]
    *leading, channels, rows, columns = source.shape
    outer: tuple[Dim, ...] = tuple((f"d{i}",) for i in range(len(leading)))
    before: tuple[Dim, ...] = (*outer, ("c", "r", "s"), ("h",), ("w",))
    after: tuple[Dim, ...] = (*outer, ("c",), ("h", "r"), ("w", "s"))
    assert isinstance(channels, int)
    sizes = {"c": channels // factor**2, "r": factor, "s": factor, "h": rows, "w": columns}
    return Signature((before,), (after,), frozenset("rs"), frozenset({0}), sizes=sizes)


rule(aten.pixel_shuffle, _pixel_shuffle)
