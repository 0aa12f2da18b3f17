"""Two ops of which only the first rows or classes count, for tables that are padded so that an axis divides them.

They stand in a program where ``solver.padding`` has made a table longer: ``placement::embedding`` and
``placement::cross_entropy_loss`` are those of aten with ``size``, the number of rows or classes that there are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_LIBRARY = torch.library.Library("placement", "DEF")
_IMPLICIT = "CompositeImplicitAutograd"


def _embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    size: int,
) -> Tensor:
    return torch.ops.aten.embedding(weight.narrow(0, 0, size), indices, padding_idx, scale_grad_by_freq, sparse)


def _cross_entropy_loss(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    size: int,
) -> Tensor:
    how = ("none", "mean", "sum")[reduction]
    logits = self.narrow(min(self.ndim - 1, 1), 0, size)
    return F.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, reduction=how, label_smoothing=label_smoothing
    )


_LIBRARY.define(
    "embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False, bool sparse=False, "
    "*, int size) -> Tensor"
)
_LIBRARY.define(
    "cross_entropy_loss(Tensor self, Tensor target, Tensor? weight=None, int reduction=1, int ignore_index=-100, "
    "float label_smoothing=0.0, *, int size) -> Tensor"
)
_LIBRARY.impl("embedding", _embedding, _IMPLICIT)
_LIBRARY.impl("cross_entropy_loss", _cross_entropy_loss, _IMPLICIT)

EMBEDDING = torch.ops.placement.embedding.default
CROSS_ENTROPY = torch.ops.placement.cross_entropy_loss.default
