"""A record of what was communicated: how tests hold execution to the explanation of a plan."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from placement.runtime._torch import recomputing

if TYPE_CHECKING:
    from collections.abc import Generator

# Module state, not a context variable: the autograd engine runs backward in threads of its own.
_logs: list[list[Event]] = []


@dataclass(frozen=True, slots=True)
class Event:
    """One collective: what, on which axis, the bytes of the full value, and in which pass.

    ``bytes`` is the full value's size before a split or after a gather, in the dtype sent.
    """

    kind: str
    axis: str
    bytes: int
    phase: Literal["forward", "backward"]


@contextmanager
def record() -> Generator[list[Event]]:
    """Log every collective that communicates, in order of execution.

    On a mesh the log holds this rank's; simulated, those that rank 0 takes part in: every rank does the same. What
    recomputation in a backward pass communicates counts as backward. Axes of one rank log nothing.
    """
    log: list[Event] = []
    _logs.append(log)
    try:
        yield log
    finally:
        # By identity: two empty logs are equal, and nested records may end in any order.
        del _logs[next(i for i, other in enumerate(_logs) if other is log)]


def watched() -> bool:
    """Whether a log is open."""
    return bool(_logs)


def note(kind: str, axis: str, size: int) -> None:
    """Add one collective of ``size`` bytes to the open logs."""
    if _logs:
        event = Event(kind, axis, size, "backward" if recomputing() else "forward")
        for log in _logs:
            log.append(event)
