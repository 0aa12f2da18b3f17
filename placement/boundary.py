"""Where a PlacementError leaves the compiler: it points at the user's call, not at frames inside."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from placement.lang.diagnostics import PlacementError

P = ParamSpec("P")
R = TypeVar("R")


def short_traceback(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose PlacementErrors carry no frames of the compiler and no exceptions that led to them.

    With PLACEMENT_DEBUG set in the environment they keep both.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True  # pytest and IPython leave this frame out as well
        try:
            return function(*args, **kwargs)
        except PlacementError as error:
            if os.environ.get("PLACEMENT_DEBUG"):
                raise
            if error.__cause__ is not None:
                cause = type(error.__cause__).__name__
                error.add_note(f"(what led to it, {cause}, is shown with PLACEMENT_DEBUG=1 in the environment)")
            raise error.with_traceback(None) from None

    return call
