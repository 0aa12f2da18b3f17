"""Small models whose parameters have names that no one has heard of: what is found comes from the graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@torch.library.custom_op("scaffold_tests::twist", mutates_args=())
def twist(x: Tensor, weight: Tensor, by: float) -> Tensor:
    """An op that has no rule."""
    return x * weight * by


@twist.register_fake
def _(x: Tensor, weight: Tensor, by: float) -> Tensor:
    return torch.empty_like(x)


def _saved(ctx, inputs, output) -> None:
    x, weight, ctx.by = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, grad):
    x, weight = ctx.saved_tensors
    return grad * weight * ctx.by, (grad * x * ctx.by).flatten(0, -2).sum(0), None


twist.register_autograd(_backward, setup_context=_saved)


class Layer(nn.Module):
    """Heads, and a gate whose halves multiply."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.calm = nn.LayerNorm(width)
        self.apple, self.pear, self.plum = (nn.Linear(width, width) for _ in range(3))
        self.bowl = nn.Linear(width, width)
        self.wide, self.open = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 4 * width, bias=False)
        self.back = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(self.calm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.apple, self.pear, self.plum)
        )
        x = x + self.bowl(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.back(self.wide(x) * F.silu(self.open(x)))


class Words(nn.Module):
    """A table of words, layers, and a head of ``classes``."""

    def __init__(self, classes: int, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(classes, width)
        self.floors = nn.ModuleList(Layer(width, heads) for _ in range(2))
        self.judge = nn.Linear(width, classes, bias=False)

    def forward(self, ids: Tensor, goal: Tensor) -> dict[str, Tensor]:
        x = self.table(ids)
        for floor in self.floors:
            x = floor(x)
        scores = self.judge(x)
        return {"loss": F.cross_entropy(scores.flatten(0, 1), goal.flatten()), "scores": scores}


class Twisted(nn.Module):
    """Two products with an op between them that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.weight = nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.up(x)
        hidden = twist(hidden, self.weight, 2.0)
        return {"loss": self.down(hidden).pow(2).mean()}


def words(classes: int = 128, heads: int = 4) -> tuple[nn.Module, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    ids, goal = (torch.randint(0, classes, (2, 32), generator=draw) for _ in range(2))
    return Words(classes, heads=heads), {"ids": ids, "goal": goal}


def twisted() -> tuple[nn.Module, dict[str, Tensor]]:
    return Twisted(), {"x": torch.randn(2, 6, 8)}
