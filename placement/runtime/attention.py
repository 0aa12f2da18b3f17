"""Attention by the plain formula: with dropout as torch's own does it, or with scores that are kept small."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from placement.runtime.means import accumulated
from placement.runtime.rng import dropped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from placement.runtime.rng import Cuts, Dropping


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
    key, value = _repeated(query, key, value) if enable_gqa else (key, value)
    scores = _scores(query, key, scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    probabilities = _softmax(scores, attn_mask)
    return (dropped(probabilities, dropout_p, mask_key, cuts, spare) @ value.to(scores.dtype)).to(query.dtype)


def capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softcap: float,
    *,
    attn_mask: Tensor | None = None,
    dropping: Dropping | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` of scores ``s`` that become ``softcap * tanh(s / softcap)``, before the mask.

    ``dropping`` drops probabilities, see ``drops``. There is no fused kernel: the scores exist, heads · queries · keys
    elements. Narrow dtypes are computed in float32; a row of which every key is masked gives 0.
    """
    key, value = _repeated(query, key, value) if enable_gqa else (key, value)
    probabilities = _softmax(capped(_scores(query, key, scale), softcap), attn_mask)
    if dropping is not None:
        probabilities = dropped(probabilities, dropping.p, dropping.key, dropping.cuts, dropping.spare)
    return (probabilities @ value.to(probabilities.dtype)).to(query.dtype)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores between -softcap and softcap, of the same order; None: as they are."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The head of keys, and that of values, for each of queries."""
    key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    return key, value


def _scores(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    dtype = accumulated(query.dtype)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return (query.to(dtype) * scale) @ key.to(dtype).transpose(-2, -1)


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over keys; zeros, and a gradient of zeros, for a query that may see none."""
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask.to(scores.dtype)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
