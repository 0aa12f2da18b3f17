"""The literature's transformer layer: attention written out, dropout in three places, GELU, no biases that matter."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

SPEC = """\
mesh tp
device h100
input x : [batch, seq, hidden]
within layers.* {
  param {q,k,v,up}.weight  : Shard(out)
  param {q,k,v,up}.bias    : Shard(out)
  param {out,down}.weight  : Shard(in)
  value ln_{1,2}           : PLACEMENT
}
output * : PLACEMENT
"""


def spec(placement: str) -> str:
    return SPEC.replace("PLACEMENT", placement).replace("output *", "output output")


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        q, k, v = self.split(self.q(y)), self.split(self.k(y)), self.split(self.v(y))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        probabilities = F.dropout(scores.softmax(-1), self.p, self.training)
        x = x + F.dropout(self.out((probabilities @ v).transpose(1, 2).flatten(2)), self.p, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.ln_2(x)))), self.p, self.training)


class Net(nn.Module):
    def __init__(self, layers: int, hidden: int = 32, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
