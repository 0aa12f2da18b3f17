"""A compiler from a model for one device and a page of placements to a distributed program.

Names are loaded when they are first used, so that the language alone costs neither torch nor time.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from placement.api import check, compile, emit, explain, plan  # noqa: A004
    from placement.lang.diagnostics import Diagnostic, PlacementError
    from placement.lang.parser import load, parse
    from placement.rules import rule
    from placement.runtime import clip_grad_norm_, main_grads, seed, simulate
    from placement.verify import verify

_WHERE = {
    "Diagnostic": "placement.lang.diagnostics",
    "PlacementError": "placement.lang.diagnostics",
    "check": "placement.api",
    "clip_grad_norm_": "placement.runtime",
    "compile": "placement.api",
    "emit": "placement.api",
    "explain": "placement.api",
    "load": "placement.lang.parser",
    "main_grads": "placement.runtime",
    "parse": "placement.lang.parser",
    "plan": "placement.api",
    "rule": "placement.rules",
    "seed": "placement.runtime",
    "simulate": "placement.runtime",
    "verify": "placement.verify",
}

_RAISING = {"compile", "emit", "explain", "load", "parse", "plan", "verify"}  # PlacementError, in a user's face

__all__ = [
    "Diagnostic",
    "PlacementError",
    "check",
    "clip_grad_norm_",
    "compile",
    "emit",
    "explain",
    "load",
    "main_grads",
    "parse",
    "plan",
    "rule",
    "seed",
    "simulate",
    "verify",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'placement' has no attribute {name!r}")
    found = getattr(importlib.import_module(_WHERE[name]), name)
    if name in _RAISING:
        from placement.boundary import short_traceback  # noqa: PLC0415 - the names above are all that a start needs

        found = short_traceback(found)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Face(ModuleType):
    """Two functions, ``emit`` and ``verify``, have the names of rooms: importing a room must not hide its function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _WHERE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
