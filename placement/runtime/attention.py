"""Attention by the plain formula: with dropout as torch's own does it, or with scores that are kept small."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from placement.runtime.means import accumulated
from placement.runtime.rng import Dropping, dropped

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

    Probabilities are [batch, heads, queries, keys]; they are cut where ``query`` is; ``spare`` as for ``dropped``. The
    fused kernels cannot be given such a mask, so it is ``capped_attention`` without a cap.

    Raises:
        ValueError: ``attn_mask`` together with ``is_causal``.
    """
    if is_causal and attn_mask is not None:
        raise ValueError("attention with both attn_mask and is_causal")
    if is_causal:
        pairs = query.shape[-2], key.shape[-2]
        attn_mask = torch.ones(pairs, dtype=torch.bool, device=query.device).tril()
    dropping = Dropping(dropout_p, mask_key, cuts, spare or {})
    return capped_attention(
        query, key, value, None, attn_mask=attn_mask, dropping=dropping, scale=scale, enable_gqa=enable_gqa
    )


def capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softcap: float | None,
    *,
    attn_mask: Tensor | None = None,
    dropping: Dropping | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` of scores ``s`` that become ``softcap * tanh(s / softcap)``, before the mask.

    Without a ``softcap`` they stay as they are. ``dropping`` drops probabilities, see ``drops``. There is no fused
    kernel: the scores exist, heads · queries · keys elements. Narrow dtypes are computed in float32; a row of which
    every key is masked gives 0.
    """
    dtype = accumulated(query.dtype)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query.to(dtype) * scale) @ key.to(dtype).transpose(-2, -1)
    probabilities = _softmax(capped(scores, softcap), attn_mask)
    if dropping is not None:
        probabilities = dropped(probabilities, dropping.p, dropping.key, dropping.cuts, dropping.spare)
    return (probabilities @ value.to(dtype)).to(query.dtype)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores between -softcap and softcap, of the same order; None: as they are."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over keys; zeros, and a gradient of zeros, for a query that may see none."""
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask.to(scores.dtype)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
