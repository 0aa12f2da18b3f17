"""Casts to float32 lifted to the working precision.

Models cast to float32 inside norms, rotary embeddings and losses whatever their own dtype is. In float64
such casts would hide differences below 1e-7, so comparisons lift them, on both sides.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NEAR = 8  # frames between torch's maker of fake tensors and a mode


class _Lifted(TorchFunctionMode):
    """Every function that is asked for float32 gives ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        if func is torch.Tensor.float:
            return args[0].to(self.dtype)
        if any(a is torch.float32 for a in (*args, *(kwargs or {}).values())) and _describing():
            return func(*args, **(kwargs or {}))
        lifted = tuple(self.dtype if a is torch.float32 else a for a in args)
        options = {k: self.dtype if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*lifted, **options)


def _describing() -> bool:
    """Whether torch itself makes a fake tensor like a real one, which has the dtype that it has."""
    frame = inspect.currentframe()
    for _ in range(_NEAR):
        frame = frame.f_back if frame else None
        if frame and "/torch/_subclasses/" in frame.f_code.co_filename:
            return True
    return False


@contextlib.contextmanager
def lifted(dtype: torch.dtype) -> Generator[None]:
    """While it is open, casts to float32 give ``dtype``, and ``dtype`` is the default for new tensors.

    Open it around both the capture of a model and the calls of the model it is compared with. With
    float32 it changes nothing.
    """
    before = torch.get_default_dtype()
    if dtype == torch.float32:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        with _Lifted(dtype):
            yield
    finally:
        torch.set_default_dtype(before)
