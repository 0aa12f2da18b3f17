"""Attention with dropout on its probabilities, as torch's own plain formula does it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from placement.runtime.means import accumulated
from placement.runtime.rng import dropped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from placement.runtime.rng import Cuts


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    mask_key: Tensor | int,
    cuts: Cuts = (),
    spare: Mapping[int, int] | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` with the mask ``mask_key`` dropping probabilities.

    Probabilities are [batch, heads, queries, keys]; they are cut where ``query`` is; ``spare`` as for
    ``dropped``. The fused kernels cannot be
    given a mask, so the probabilities exist: heads · queries · keys elements. Narrow dtypes are computed in
    float32, a row of which every key is masked gives 0, both as in torch's plain formula.

    Raises:
        ValueError: ``attn_mask`` together with ``is_causal``.
    """
    if is_causal and attn_mask is not None:
        raise ValueError("attention with both attn_mask and is_causal")
    dtype = accumulated(query.dtype)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query.to(dtype) * scale) @ key.to(dtype).transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    probabilities = _softmax(scores, attn_mask)
    return (dropped(probabilities, dropout_p, mask_key, cuts, spare) @ value.to(dtype)).to(query.dtype)


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over keys; zeros, and a gradient of zeros, for a query that may see none."""
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask.to(scores.dtype)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
