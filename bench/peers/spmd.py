"""The same by hand over the collectives of spmd-types: one per conversion, none fused with a product."""

from __future__ import annotations

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from spmd_types import I, P, R, S
from torch import Tensor

from bench.peers.expert import Native


class Typed(Native):
    """Batch-outermost, with a typed collective wherever two types meet; torch's autograd does the rest."""

    def __init__(self, group: dist.ProcessGroup, *, sp: bool) -> None:
        super().__init__(group, sp=sp)
        self.seq_first = False

    def columns(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """As ``Native``'s; the gathered input is saved."""
        x = spmd.all_gather(x, self.group, src=S(1), dst=R) if self.sp else spmd.convert(x, self.group, src=I, dst=R)
        return tuple(F.linear(x, w) for w in weights)

    def row(self, x: Tensor, weight: Tensor) -> Tensor:
        """As ``Native``'s."""
        return self.summed(F.linear(x, weight))

    def summed(self, term: Tensor) -> Tensor:
        """P to what lies between the regions."""
        if self.sp:
            return spmd.reduce_scatter(term, self.group, src=P, dst=S(1))
        return spmd.all_reduce(term, self.group, src=P, dst=I)

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """As ``Native``'s."""
        local = ids - self.rank * table.shape[0]
        missing = (local < 0) | (local >= table.shape[0])
        return self.summed(F.embedding(local.masked_fill(missing, 0), table).masked_fill(missing.unsqueeze(-1), 0))

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """As ``Native``'s, by autograd."""
        classes = logits.shape[-1]
        flat, goal = logits.reshape(-1, classes), target.reshape(-1)
        top = flat.detach().amax(1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        shifted = flat - top.unsqueeze(1)
        local = goal - self.rank * classes
        missing = (local < 0) | (local >= classes)
        own = shifted.gather(1, local.masked_fill(missing, 0).unsqueeze(1)).squeeze(1).masked_fill(missing, 0)
        total, own = spmd.all_reduce(torch.stack((shifted.exp().sum(1), own)), self.group, src=P, dst=I).unbind()
        valid = goal >= 0
        return ((total.log() - own) * valid).sum() / valid.sum()
