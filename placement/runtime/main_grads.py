"""Gradients added up in a buffer of each parameter, in a dtype of their own, instead of in ``.grad``.

What a function of the runtime knows to be for such a parameter it adds there itself, and hands on no gradient: a sum
over ranks in the dtype in which it was summed, a product without a second tensor where the dtypes are one. All else
arrives in ``.grad`` as ever, and is moved by a hook that torch calls right after. What is no part of a backward into
leaves (``torch.autograd.grad``), and what has a graph of its own, takes the usual way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from placement.runtime._torch import accumulates, watched, zero_each
from placement.runtime.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn

    from placement.runtime.program import Program
    from placement.runtime.simulated import Simulated


def main_grads(program: Program | Simulated, dtype: torch.dtype = torch.float32) -> None:
    """Give every parameter that is trainable now a buffer ``main_grad`` of its local shape, in ``dtype``.

    It starts as what ``.grad`` holds, else as zeros. From then on a backward adds each gradient to it and leaves
    ``.grad`` None; ``full_gradients`` and ``clip_grad_norm_`` use it; the program's ``zero_grad`` zeroes it in place,
    an optimizer's does not know of it. Gradients of replicated parameters are added in the dtype that they were summed
    in over the ranks; what waits under ``no_sync`` waits in ``dtype``, and is summed in it where no other is said.
    Wrappers that put parameters of their own in place come with gradients of their own. Called again, it starts anew.

    Raises:
        StateError: parameters have no data yet, belong to a wrapper, or lack what waits under ``no_sync``.
        ValueError: ``dtype`` cannot hold the gradients: it is no floating-point one, or parameters are complex.
    """
    if missing := program.meta_tensors():
        raise StateError(f"no data in {missing[0]}: load_full_state_dict loads it")
    if names := program.waiting():
        raise StateError(f"the gradient of {names[0]} lacks what waits under no_sync(): call main_grads before")
    trainable = {name: parameter for name, parameter in program.named_parameters() if parameter.requires_grad}
    for name, parameter in trainable.items():
        if isinstance(parameter, DTensor):
            raise StateError(f"{name} is a wrapper's DTensor: its gradients are the wrapper's")
        if parameter.is_complex() != dtype.is_complex or not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(f"gradients of {name}, {parameter.dtype}, cannot be added up in {dtype}")
    for parameter in trainable.values():
        known = main_grad(parameter)
        parameter.main_grad = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)  # pyright: ignore[reportAttributeAccessIssue]
        if parameter.grad is not None:
            _moved(parameter)
        if known is None:
            parameter.register_post_accumulate_grad_hook(_moved)


def main_grad(parameter: Tensor) -> Tensor | None:
    """The buffer that gradients of ``parameter`` are added to, if it has one."""
    return parameter.__dict__.get("main_grad")


def gradient(parameter: Tensor) -> Tensor | None:
    """The gradient of ``parameter``, wherever it is."""
    main = main_grad(parameter)
    return parameter.grad if main is None else main


def zero_main_grads(module: nn.Module) -> None:
    """Zero the buffers of a module's parameters, in place."""
    mains = [main for parameter in module.parameters() if (main := main_grad(parameter)) is not None]
    if mains:
        zero_each(mains)


def sink(node: Any) -> Tensor | None:
    """What a gradient for ``node`` may be added to in the running backward, instead of being handed on.

    None where it is not for a parameter with a buffer, where somebody watches it, and where autograd follows.
    """
    if torch.is_grad_enabled() or not accumulates(node) or watched(node.variable):
        return None
    return main_grad(node.variable)


def has_main_grads(tensors: Iterable[Tensor | None]) -> bool:
    """Whether some of ``tensors`` are parameters with a buffer."""
    return any(tensor is not None and "main_grad" in tensor.__dict__ for tensor in tensors)


def sinks(nodes: Sequence[tuple[Any, int]], places: Iterable[int], dtype: torch.dtype) -> dict[int, Tensor]:
    """By place, what gradients in ``dtype`` are added to as they are: the ``sink`` of a function's next ``nodes``."""
    found = zip(places, (sink(node) for node, _ in nodes), strict=True)
    return {at: main for at, main in found if main is not None and main.dtype == dtype}


def _moved(parameter: Tensor) -> None:
    """Move what has arrived in ``.grad``."""
    main, grad = main_grad(parameter), parameter.grad
    if main is not None and grad is not None:
        main.add_(grad.detach())
        parameter.grad = None
