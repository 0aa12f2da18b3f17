"""Small plans to explain: a stack of residual blocks between an embedding and a head, written by hand."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from placement.graph.capture import capture
from placement.graph.ir import Graph
from placement.lang.parser import parse
from placement.solver.bind import bind
from placement.solver.build import plan
from placement.solver.plan import Plan

LONG = "a_list_of_modules_with_a_name_so_very_long_that_no_line_of_a_terminal_holds_it_though_some_models_do"
SPEC = """\
mesh tp
input ids, labels : [batch, seq]
param embed.table.weight : [vocab, hidden], Shard(vocab)
within blocks.* {
  param up.{weight,bias} : Shard(out)
  param down.weight      : Shard(in)
}
param head.weight : [vocab, hidden], Shard(vocab)
output logits : Shard(vocab)
"""
SEQUENCE = SPEC + "value blocks.*.norm : Shard(seq)\nvalue norm : Shard(seq)\n"
WHOLE = SPEC + "value blocks.*.norm : Replicate\nvalue norm : Replicate\n"
MIXED = SPEC + "value blocks.{0,2,3}.norm : Shard(seq)\nvalue blocks.1.norm : Replicate\nvalue norm : Shard(seq)\n"
PLACED = SEQUENCE + "value embed : Shard(seq)\n"  # though what a cut table gives is Partial


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(48, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


class Net(nn.Module):
    def __init__(self, layers: int, name: str) -> None:
        super().__init__()
        self.embed = Tokens()
        self.blocks_name = name
        self.add_module(name, nn.ModuleList(Block(16) for _ in range(layers)))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 48, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        for block in getattr(self, self.blocks_name):
            x = block(x)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@cache
def graph(layers: int, name: str) -> Graph:
    example = {key: torch.randint(0, 48, (3, 8)) for key in ("ids", "labels")}
    return capture(Net(layers, name), example, dict.fromkeys(example, ("batch", "seq")))


@cache
def make(spec: str, n: int = 4, layers: int = 3, name: str = "blocks", seq: int = 8, file: str = "net.plc") -> Plan:
    """The plan on ``n`` ranks, priced at sequences of ``seq``; ``name`` replaces ``blocks`` in model and spec."""
    read = parse(spec.replace("blocks", name), file)
    return plan(bind(graph(layers, name), read, {"tp": n}, sizes={"seq": seq}), read.sources)
