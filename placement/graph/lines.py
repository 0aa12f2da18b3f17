"""Lines of the model's own code: where an error was raised, where an op was called."""

from __future__ import annotations

import re

import torch

from placement.lang.diagnostics import Diagnostic


def not_captured(failure: Exception | None) -> Diagnostic:
    """What is said of a model that export, or the model itself, failed at."""
    text = [line for line in str(failure).strip().splitlines() if line.strip()]
    place = raised_at(failure)
    if type(failure).__name__ == "GuardOnDataDependentSymNode":
        message = "the model could not be captured: it branches on the values of a tensor, or takes a size from them"
        hint = "compute both ways and choose with torch.where, or take the choice out of the model"
        return Diagnostic("PLC401", message, hint=hint, notes=tuple(text[:1]), model_line=place)
    message = f"the model could not be captured: {type(failure).__name__}: {text[0] if text else ''}"
    hint = "torch.export.export(model, args, strict=False) must accept the model and the example"
    return Diagnostic("PLC401", message, hint=hint, notes=tuple(text[1:12]), model_line=place)


def raised_at(error: BaseException | None) -> str | None:
    """The innermost line of the model's own code in a traceback."""
    place = None
    trace = error.__traceback__ if error else None
    while trace:
        name = trace.tb_frame.f_code.co_filename
        if not _is_library(name):
            place = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _is_library(filename: str) -> bool:
    return "/torch/" in filename or "/placement/" in filename or filename.startswith("<")


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def source_line(node: torch.fx.Node) -> str:
    """The innermost line of the model's own code that made the node."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for filename, line in reversed(frames):
        if not _is_library(filename):
            return f"{filename}:{line}"
    return ""
