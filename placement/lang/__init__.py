"""The language: ``.plc`` text → ``Spec``, and the diagnostics of every stage. No torch, no model.

``parse`` and ``load`` raise PlacementError for what is no ``.plc``; ``check`` finds what contradicts
itself without a model. Path patterns, spans and the registry of codes are described in their modules.
"""

from placement.lang.check import check
from placement.lang.diagnostics import CODES, Code, Diagnostic, Diagnostics, PlacementError, did_you_mean, near, render
from placement.lang.parser import load, parse
from placement.lang.spec import (
    Device,
    InputLine,
    MeshAxis,
    Name,
    OutputLine,
    ParamLine,
    Pattern,
    Placed,
    Span,
    Spec,
    ValueLine,
)

__all__ = [
    "CODES",
    "Code",
    "Device",
    "Diagnostic",
    "Diagnostics",
    "InputLine",
    "MeshAxis",
    "Name",
    "OutputLine",
    "ParamLine",
    "Pattern",
    "Placed",
    "PlacementError",
    "Span",
    "Spec",
    "ValueLine",
    "check",
    "did_you_mean",
    "load",
    "near",
    "parse",
    "render",
]
