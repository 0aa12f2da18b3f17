"""The language: ``.plc`` text → ``Spec``, and the diagnostics of every stage. No torch, no model.

``parse`` and ``load`` raise PlacementError for what is no ``.plc``; ``check`` finds what contradicts
itself without a model. Path patterns, spans and the registry of codes are described in their modules.

Names are loaded when they are first used: ``placement --help`` reports usage, and reads no spec.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from placement.lang.check import check
    from placement.lang.codes import CODES, Code
    from placement.lang.diagnostics import Diagnostic, Diagnostics, PlacementError, did_you_mean, near
    from placement.lang.parser import load, parse
    from placement.lang.render import render
    from placement.lang.source import Span
    from placement.lang.spec import (
        Chosen,
        Device,
        ExpectLine,
        Figure,
        InputLine,
        LimitLine,
        LinkLine,
        LowerLine,
        MeshAxis,
        Name,
        OutputLine,
        ParamLine,
        Pattern,
        Placed,
        Quantity,
        Setting,
        Spec,
        Statement,
        StrategyLine,
        ValueLine,
    )

_WHERE = {
    "check": "check",
    "CODES": "codes",
    "Code": "codes",
    "Diagnostic": "diagnostics",
    "Diagnostics": "diagnostics",
    "PlacementError": "diagnostics",
    "did_you_mean": "diagnostics",
    "near": "diagnostics",
    "load": "parser",
    "parse": "parser",
    "render": "render",
    "Span": "source",
}  # everything else is a part of a spec

__all__ = [
    "CODES",
    "Chosen",
    "Code",
    "Device",
    "Diagnostic",
    "Diagnostics",
    "ExpectLine",
    "Figure",
    "InputLine",
    "LimitLine",
    "LinkLine",
    "LowerLine",
    "MeshAxis",
    "Name",
    "OutputLine",
    "ParamLine",
    "Pattern",
    "Placed",
    "PlacementError",
    "Quantity",
    "Setting",
    "Span",
    "Spec",
    "Statement",
    "StrategyLine",
    "ValueLine",
    "check",
    "did_you_mean",
    "load",
    "near",
    "parse",
    "render",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'placement.lang' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"placement.lang.{_WHERE.get(name, 'spec')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Face(ModuleType):
    """Two functions, ``check`` and ``render``, are in modules of their name: importing one must not hide the other."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _WHERE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
