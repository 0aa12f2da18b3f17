"""How a collective beside linear layers may be cut: the words of ``lower … overlap``, and what is launched for each."""

from __future__ import annotations

from placement.types import Action

NONE, ASYNC, RING = "none", "async", "ring"


def chunks(overlap: str) -> int:
    """How many chunks ``chunks(4)`` has; 0 of what is no such thing."""
    return int(overlap[len("chunks(") : -1]) if overlap.startswith("chunks(") else 0


def cuts(overlap: str) -> bool:
    """Whether collectives are cut in pieces."""
    return overlap == RING or chunks(overlap) > 0


def sizes(rows: int, count: int) -> list[int]:
    """The rows of each of ``count`` chunks, as ``runtime.overlap`` makes them."""
    count = max(1, min(rows, count))
    least, more = divmod(rows, count)
    return [least + (index < more) for index in range(count)]


def pieces(action: Action, n: int, overlap: str, rows: int, nbytes: int) -> list[tuple[Action, int]]:
    """What is launched in place of an action of ``nbytes`` on ``n`` ranks, each with its bytes."""
    if overlap == RING:
        return [(Action.SEND_RECV, nbytes)] * (n - 1)
    if count := chunks(overlap):
        return [(action, nbytes * size // rows) for size in sizes(rows, count)]
    return [(action, nbytes)]
