"""The models of these pages, written for one device: nothing in them knows of ranks."""

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention: [batch, seq, hidden] to the same."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        shape = batch, seq, self.heads, hidden // self.heads
        q, k, v = (proj(x).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, seq, hidden))


class MLP(nn.Module):
    """Two linear layers: [batch, seq, hidden] to the same."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attn = Attention(hidden, heads)
        self.mlp = MLP(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A language model: token ids [batch, seq] to logits [batch, seq, vocab] and their loss."""

    def __init__(self, vocab: int, hidden: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def decoder(batch: int = 2, seq: int = 128, device: str = "cpu") -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The decoder and the keyword arguments of one call."""
    with torch.device(device):
        model = Decoder(vocab=256, hidden=64, heads=8, layers=2)
        ids, labels = (torch.randint(0, 256, (batch, seq)) for _ in range(2))
    return model, {"ids": ids, "labels": labels}


class Pair(nn.Module):
    """One tower for two sides: takes a dict of tensors, returns a tuple that holds another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tower = nn.Linear(width, width)

    def forward(self, sides: dict[str, torch.Tensor]) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        left, right = self.tower(sides["left"]), self.tower(sides["right"])
        return (left * right).sum(-1), (left, right)


def pair(device: str = "cpu") -> tuple[nn.Module, dict[str, dict[str, torch.Tensor]]]:
    """The pair of towers and the keyword arguments of one call."""
    with torch.device(device):
        return Pair(16), {"sides": {"left": torch.randn(8, 16), "right": torch.randn(8, 16)}}


def linear(device: str = "cpu") -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A linear layer, which returns one tensor by itself."""
    with torch.device(device):
        return nn.Linear(16, 32), {"input": torch.randn(8, 16)}
