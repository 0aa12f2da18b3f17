"""Ops that only rearrange a tensor: where in it each element of the result comes from.

For each dim of the source a reader gives its index as a function of the result's indices, None where that is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from placement.graph.conditions import Affine
from placement.graph.ir import Value

Places = Sequence[Affine | None]
Reader = Callable[[Value, Value, Mapping[str, Any]], Places | None]


def _index(dim: int) -> Affine:
    return Affine(0, {dim: 1})


def _ordered(dims: Sequence[int]) -> Places:
    """The result's dims are these of the source."""
    return [_index(dims.index(dim)) for dim in range(len(dims))]


def _permute(_: Value, result: Value, given: Mapping[str, Any]) -> Places:
    return _ordered([dim % len(result.shape) for dim in given["dims"]])


def _swapped(one: int, other: int, rank: int) -> Places:
    dims = list(range(rank))
    if rank:
        dims[one], dims[other] = dims[other], dims[one]
    return _ordered(dims)


def _transpose(_: Value, result: Value, given: Mapping[str, Any]) -> Places:
    return _swapped(given["dim0"], given["dim1"], len(result.shape))


def _last_two(_: Value, result: Value, __: Mapping[str, Any]) -> Places:
    return _swapped(-1, -2, len(result.shape))


def _reversed(_: Value, result: Value, __: Mapping[str, Any]) -> Places:
    return _ordered(list(reversed(range(len(result.shape)))))


def _moved(_: Value, result: Value, given: Mapping[str, Any]) -> Places:
    rank, ends = len(result.shape), (given["source"], given["destination"])
    source, to = ([dim % rank for dim in ([end] if isinstance(end, int) else end)] for end in ends)
    rest = iter(dim for dim in range(rank) if dim not in source)
    return _ordered([source[to.index(dim)] if dim in to else next(rest) for dim in range(rank)])


def _unsqueeze(source: Value, result: Value, given: Mapping[str, Any]) -> Places:
    at = given["dim"] % len(result.shape)
    return [_index(dim + (dim >= at)) for dim in range(len(source.shape))]


def _expand(source: Value, result: Value, _: Mapping[str, Any]) -> Places:
    more = len(result.shape) - len(source.shape)
    return [Affine(0) if size == 1 else _index(dim + more) for dim, size in enumerate(source.shape)]


def _part(source: Value, dim: int, start: Any, step: Any) -> Places:
    """From ``start`` on, in steps."""
    at: list[Affine | None] = [_index(own) for own in range(len(source.shape))]
    dim %= len(source.shape)
    start = _from_the_end(start, source.shape[dim])
    at[dim] = None if start is None or type(step) is not int else Affine(start, {dim: step})
    return at


def _from_the_end(index: Any, size: Any) -> int | None:
    """An index that may be negative; None where it is not a number."""
    if type(index) is not int or (index < 0 and not isinstance(size, int)):
        return None
    return index if index >= 0 else max(index + size, 0)


def _slice(source: Value, _: Value, given: Mapping[str, Any]) -> Places:
    start = given["start"]
    return _part(source, given["dim"], 0 if start is None else start, given["step"])


def _narrow(source: Value, _: Value, given: Mapping[str, Any]) -> Places:
    return _part(source, given["dim"], given["start"], 1)


def _select(source: Value, _: Value, given: Mapping[str, Any]) -> Places:
    dim = given["dim"] % len(source.shape)
    index = _from_the_end(given["index"], source.shape[dim])
    at: list[Affine | None] = [_index(own - (own > dim)) for own in range(len(source.shape))]
    at[dim] = None if index is None else Affine(index)
    return at


def _flip(source: Value, _: Value, given: Mapping[str, Any]) -> Places:
    turned = {dim % len(source.shape) for dim in given["dims"]}

    def place(dim: int, size: Any) -> Affine | None:
        if dim not in turned:
            return _index(dim)
        return Affine(size - 1, {dim: -1}) if isinstance(size, int) else None

    return [place(dim, size) for dim, size in enumerate(source.shape)]


def _repeated(source: Value, times: Sequence[Any], more: int) -> Places:
    """Each dim so many times: the only place of one, or where it is once."""
    kinds = zip(source.shape, times[-len(source.shape) :] if source.shape else (), strict=True)
    return [
        Affine(0) if size == 1 else _index(dim + more) if type(often) is int and often == 1 else None
        for dim, (size, often) in enumerate(kinds)
    ]


def _repeat(source: Value, result: Value, given: Mapping[str, Any]) -> Places:
    rank = len(source.shape)
    times = given["repeats"] if "repeats" in given else given["dims"]  # `tile` may say fewer dims than there are
    return _repeated(source, [*[1] * (rank - len(times)), *times], len(result.shape) - rank)


def _repeat_each(source: Value, _: Value, given: Mapping[str, Any]) -> Places | None:
    times: list[Any] = [1] * len(source.shape)
    if given["dim"] is None or isinstance(given["repeats"], Value):
        return None
    times[given["dim"]] = given["repeats"]
    return _repeated(source, times, 0)


def _reshape(source: Value, result: Value, _: Mapping[str, Any]) -> Places | None:
    """Where only dims of 1 come or go."""
    own, new = ([dim for dim, size in enumerate(value.shape) if size != 1] for value in (source, result))
    if [source.shape[dim] for dim in own] != [result.shape[dim] for dim in new]:
        return None
    to = dict(zip(own, new, strict=True))
    return [_index(to[dim]) if dim in to else Affine(0) for dim in range(len(source.shape))]


REARRANGED: Mapping[str, Reader] = {
    "permute": _permute,
    "transpose": _transpose,
    "swapdims": _transpose,
    "mT": _last_two,
    "mH": _last_two,
    "adjoint": _last_two,
    "matrix_H": _last_two,
    "t": _reversed,
    "numpy_T": _reversed,
    "movedim": _moved,
    "unsqueeze": _unsqueeze,
    "expand": _expand,
    "broadcast_to": _expand,
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    "flip": _flip,
    "repeat": _repeat,
    "tile": _repeat,
    "repeat_interleave": _repeat_each,
    "reshape": _reshape,
}
