"""A residual MLP written by hand: nothing here knows of transformers, or of more than one device."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Norm, up, GELU, down, and the residual around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, width] to the same."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ResidualMLP(nn.Module):
    """A stack of blocks that predicts a target of its input's shape."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """The prediction, [batch, seq, width], and its mean squared error."""
        for block in self.blocks:
            x = block(x)
        prediction = self.head(self.norm(x))
        return {"loss": (prediction - target).pow(2).mean(), "prediction": prediction}


def build(
    *,
    batch: int = 4,
    seq: int = 64,
    layers: int = 2,
    width: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[ResidualMLP, dict[str, torch.Tensor]]:
    """The model and the keyword arguments of one call, the same ones every time.

    Args:
        batch: sequences in the example.
        seq: rows of each sequence.
        layers: blocks.
        width: channels of a row; the blocks are four times as wide inside.
        dtype: of the parameters and of the example.
        device: where the model lives; ``meta`` makes one without weights.

    Returns:
        The model in training mode, and ``x`` and ``target``, both [batch, seq, width].
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = ResidualMLP(width, layers).to(dtype).train()
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(batch, seq, width, generator=draw)
    target = torch.randn(batch, seq, width, generator=draw)
    return model, {"x": x.to(device, dtype), "target": target.to(device, dtype)}
