"""Work counted instead of timed: the same on every machine, at any load."""

import sys
from collections.abc import Callable


def calls(function: Callable[[], object]) -> int:
    """How many functions, of Python and of C, ``function()`` calls in this thread, itself included."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
