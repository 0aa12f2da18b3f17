"""Numbers for people: bytes, times and counts."""

from __future__ import annotations

from collections.abc import Callable

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIMES = ((10**12, "s"), (10**9, "ms"), (10**6, "us"), (10**3, "ns"), (1, "ps"))


def show_bytes(count: int) -> str:
    """``512 B``, ``1.5 KiB``, ``64 MiB``: binary units, at most three digits and never more than 8 characters."""
    size, unit = float(count), 0
    while unit + 1 < len(_BYTES) and round(size) >= 1024:
        size, unit = size / 1024, unit + 1
    return f"{_digits(size)} {_BYTES[unit]}"


def show_time(picoseconds: int) -> str:
    """``9.1 ms``, ``350 us``: at most three digits, a decimal one only below 100."""
    for scale, unit in _TIMES:
        if picoseconds >= scale:
            return f"{_digits(picoseconds / scale)} {unit}"
    return "0 s"


def signed(number: int, show: Callable[[int], str]) -> str:
    """A difference: ``+1.5 KiB``, ``-3 us``, ``0``."""
    return f"{'+' if number > 0 else '-'}{show(abs(number))}" if number else "0"


def plural(count: int, noun: str) -> str:
    """``1 parameter``, ``2 parameters``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _digits(number: float) -> str:
    text = f"{number:.1f}" if number < 99.95 else f"{number:.0f}"
    return text.removesuffix(".0")
