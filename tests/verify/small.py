"""Models of the tests of ``verify``; at the top level of a module, so that they pickle."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

SPEC = """
mesh tp
input x : [batch, seq, width]
param up.weight   : Shard(out) @ tp
param up.bias     : Shard(out) @ tp
param down.weight : Shard(in) @ tp
value norm        : Shard(seq) @ tp
output loss       : Replicate
output output     : Replicate
"""


class Block(nn.Module):
    """Norm, up, down, and a mean square; or what comes before it."""

    def __init__(self, width: int = 8, *, loss: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.loss = loss

    def forward(self, x: torch.Tensor) -> Any:
        y = x + self.down(F.gelu(self.up(self.norm(x))))
        return {"loss": y.pow(2).mean(), "y": y} if self.loss else y


def spec(*, loss: bool = True) -> str:
    """The spec without the line of the output that there is not."""
    return SPEC.replace("output output     : Replicate\n" if loss else "output loss       : Replicate\n", "")


def example(**options: Any) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 6, 8, **options)}


class Faulty(Block):
    """Fails in the first process that it is sent to: ``raise``, ``die`` or ``hang``."""

    def __init__(self, how: str, folder: Path) -> None:
        super().__init__()
        self.how, self.claim = how, str(folder / "claim")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if multiprocessing.parent_process() is None:
            return  # a copy in the test's own process
        try:
            os.close(os.open(self.claim, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        if self.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "hang":
            time.sleep(600)
        raise RuntimeError("planted")
