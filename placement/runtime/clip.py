"""Gradient clipping by the norm that one device would see."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from placement.runtime.axis import Axis, Step
from placement.runtime.cuts import Cut
from placement.runtime.main_grads import gradient
from placement.runtime.simulate import each
from placement.runtime.simulated import Simulated
from placement.runtime.state import refuse_waiting

if TYPE_CHECKING:
    from torch import Tensor

    from placement.runtime.program import Program


def clip_grad_norm_(
    program: Program | Simulated, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients in place so that their one-device norm is at most ``max_norm``; returns the norm.

    Every parameter counts once, whatever its placement and however many names it has, and every rank gets the same
    number. Otherwise as ``torch.nn.utils.clip_grad_norm_``.

    Raises:
        StateError: backwards under ``no_sync`` wait for one outside.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    clip: Callable[[Program], Tensor] = partial(
        _clip, max_norm=max_norm, p=float(norm_type), error_if_nonfinite=error_if_nonfinite
    )
    if isinstance(program, Simulated):
        return each([partial(clip, rank) for rank in program.programs])[0]
    return clip(program)


def _clip(program: Program, max_norm: float, p: float, *, error_if_nonfinite: bool) -> Tensor:
    refuse_waiting(program)
    groups: dict[tuple[Axis, ...], list[Tensor]] = {}
    for name, parameter in program.named_parameters():
        grad = gradient(parameter)
        if grad is not None:
            groups.setdefault(tuple(axis for axis, _ in program.layout_of(name)), []).append(grad)
    if not groups:
        return torch.tensor(0.0)
    norms = torch.stack([_norm(torch.stack([_norm(grad, p) for grad in grads]), p) for grads in groups.values()])
    for axis in program.mesh_axes.values():
        every = axis.run(Step("all_gather", Cut(0)), norms[None])
        # Replicas may differ in the last bit where an op is not deterministic: the first rank's norm holds.
        norms = torch.stack([_norm(every[:, i], p) if axis in cut else every[0, i] for i, cut in enumerate(groups)])
    total = _norm(norms, p)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"the total norm of order {p} of the gradients is not finite, so they cannot be clipped")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grads in groups.values():
        for grad in grads:
            grad.mul_(scale.to(grad.device))
    return total


def _norm(x: Tensor, p: float) -> Tensor:
    """The p-norm over all elements, in float32 at least."""
    if x.numel() == 0 and math.isinf(p):
        return torch.zeros((), dtype=torch.float32, device=x.device)  # torch has no maximum of nothing
    return torch.linalg.vector_norm(x, p, dtype=torch.promote_types(x.dtype, torch.float32))
