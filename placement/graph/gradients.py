"""What only autograd would see: backwards and hooks of the model's own, which a captured program lacks.

A capture keeps the forward ops and lets autograd derive their backward. A custom ``autograd.Function`` or a
hook on a gradient says otherwise, and would be lost without a word; so it is refused.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator
from typing import Any

import torch

from placement.graph._torch import gradient_hooks
from placement.lang.diagnostics import Diagnostic, PlacementError


def refuse_gradient_hooks(model: torch.nn.Module) -> None:
    """Raise PlacementError (PLC407) with every module and parameter whose gradient a hook may change."""
    named = [
        *((f"module '{path or 'the root'}'", module) for path, module in model.named_modules()),
        *((f"parameter '{name}'", parameter) for name, parameter in model.named_parameters()),
    ]
    faults = [
        Diagnostic("PLC407", f"{what} has a backward hook, which the compiled program would not run")
        for what, owner in named
        if gradient_hooks(owner)
    ]
    if faults:
        raise PlacementError(faults)


@contextlib.contextmanager
def own_backwards_refused() -> Generator[None]:
    """While the model runs for capture, refuse a backward of its own with the line that asks for it.

    Functions and hooks of torch itself (checkpointing, say) stay allowed.
    """
    found: list[Diagnostic] = []
    function, hook = vars(torch.autograd.Function)["apply"], torch.Tensor.register_hook

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not cls.__module__.startswith("torch."):
            text = f"the backward of the autograd.Function '{cls.__name__}' cannot be captured"
            hint = "write it with ops whose own backward is meant, or as a torch.library.custom_op with a rule"
            _note(found, Diagnostic("PLC407", text, hint=hint, model_line=_caller()))
        return function.__get__(None, cls)(*args, **kwargs)

    def register_hook(self: torch.Tensor, given: Callable[..., Any]) -> Any:
        line = _caller()
        if line:
            _note(found, Diagnostic("PLC407", "a hook on a gradient cannot be captured", model_line=line))
        return hook(self, given)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = function  # type: ignore[method-assign]
        torch.Tensor.register_hook = hook  # type: ignore[method-assign]
    if found:
        raise PlacementError(found)


def _note(found: list[Diagnostic], diagnostic: Diagnostic) -> None:
    if diagnostic not in found:
        found.append(diagnostic)


def _caller() -> str | None:
    """The line of the model that is calling; None where torch itself is."""
    frame = inspect.currentframe()
    while frame and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    name = frame.f_code.co_filename if frame else ""
    return None if frame is None or "/torch/" in name else f"{name}:{frame.f_lineno}"


def differentiable(dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype may have a gradient."""
    return dtype.is_floating_point or dtype.is_complex
