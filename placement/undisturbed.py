"""Python's collector of cycles stands still while the compiler works."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def undisturbed() -> Generator[None]:
    """Within, no cycles are collected; what nothing refers to is freed as ever.

    A compilation makes very many objects and next to no cycles, and a collection looks at all of them: a quarter of
    the time went there.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
