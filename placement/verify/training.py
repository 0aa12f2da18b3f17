"""A few training steps of a module, and what they show. Both sides of a comparison run this."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from placement.graph.ir import Call

LEARNING_RATE = 1e-3


@dataclass(slots=True)
class Objective:
    """The number that is differentiated: a scalar output, or every differentiable output times fixed random numbers.

    ``weights`` (by output, of one-device shape) are chosen at the first call, which has to be that of one device.
    """

    weights: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    @property
    def name(self) -> str:
        """What gradients are of, in words."""
        scalar = [name for name, weight in self.weights.items() if weight.ndim == 0]
        return scalar[0] if scalar else "a random weighting of all outputs"

    def __call__(self, outputs: Mapping[str, Tensor]) -> Tensor | None:
        """The number, None where no output has a gradient."""
        if not self.weights:
            self._choose({name: x for name, x in outputs.items() if x.requires_grad})
        terms = [(outputs[name] * weight).sum() for name, weight in self.weights.items()]
        return torch.stack(terms).sum() if terms else None

    def _choose(self, outputs: Mapping[str, Tensor]) -> None:
        scalars = [name for name, x in outputs.items() if x.ndim == 0]
        if scalars:
            name = "loss" if "loss" in scalars else scalars[0]
            self.weights = {name: torch.ones_like(outputs[name])}
            return
        draw = torch.Generator().manual_seed(0)
        for name, x in outputs.items():
            weight = torch.randn(x.shape, generator=draw, dtype=torch.float64) / max(x.numel(), 1) ** 0.5
            self.weights[name] = weight.to(x.device, x.dtype)


@dataclass(frozen=True, slots=True)
class First:
    """What the first step shows: outputs, and gradients of inputs, by name."""

    outputs: dict[str, Tensor]
    inputs: dict[str, Tensor]


def train(
    module: nn.Module,
    call: Callable[[nn.Module], Any],
    inputs: Mapping[str, Tensor],
    objective: Objective,
    steps: int,
    look: Callable[[], None],
) -> First:
    """Call, differentiate, and step with AdamW, ``steps`` times; ``look`` is called once, on the first gradients."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE) if parameters else None
    first: First | None = None
    for _ in range(max(steps, 1)):
        module.zero_grad()
        outputs = named(call(module))
        loss = objective({name: _differentiable(x) for name, x in outputs.items()})
        if loss is not None:
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
        if first is None:
            kept = {name: _local(x).detach().clone() for name, x in outputs.items()}
            first = First(kept, {name: _gradient(x) for name, x in inputs.items() if x.requires_grad})
            look()
        if loss is None or optimizer is None or not steps:
            break
        optimizer.step()
    assert first is not None
    return first


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad.detach().clone()


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _differentiable(x: Tensor) -> Tensor:
    """A rank's own part, with the cotangent that its placement asks for: that of a term is the whole one."""
    if not isinstance(x, DTensor):
        return x
    return x.to_local(grad_placements=[Replicate() if p.is_partial() else p for p in x.placements])


def named(result: Any) -> dict[str, Tensor]:
    """The tensors of what a model returned, by keys and indices joined with dots; ``output`` for a single one."""
    paths, _ = pytree.tree_flatten_with_path(result)
    return {".".join(map(_key, path)) or "output": leaf for path, leaf in paths if isinstance(leaf, Tensor)}


def _key(key: Any) -> str:
    return str(next(getattr(key, a) for a in ("key", "idx", "name") if hasattr(key, a)))


@contextmanager
def watched(module: nn.Module, picks: Mapping[Call, int] | None = None) -> Generator[dict[Call, Tensor]]:
    """While it is open: the first tensor of each call's result, or the one at the index ``picks`` has for the call.

    Closing it ends the watch, not what was seen.
    """
    seen: dict[Call, Tensor] = {}
    counts: dict[str, int] = {}

    def hook(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(_module: nn.Module, _args: Any, result: Any) -> None:
            call = Call(path, counts.get(path, 0))
            counts[path] = call.index + 1
            if picks is not None and call not in picks:
                return
            tensors = _tensors(result)
            index = 0 if picks is None else picks[call]
            if index < len(tensors):
                seen[call] = tensors[index].detach().clone()

        return look

    handles = [m.register_forward_hook(hook(path)) for path, m in module.named_modules() if path]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _tensors(result: Any) -> Sequence[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
