"""Ranks' tensors against those of one device: joined by their layouts, then measured. No communication."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from placement.runtime.cuts import Cut, joined
from placement.verify.parity import Failure, Worst

Layout = Mapping[str, Cut | str]
"""By axis, outermost first: where a value is cut, or "P" for a term of a sum. An axis left out has one value on all
its ranks."""


@dataclass(frozen=True, slots=True)
class Part:
    """A value as one rank has it. lengths: by dim, what the whole is cut to, where the program pads it."""

    tensor: Tensor
    layout: Layout
    lengths: Mapping[int, int] = field(default_factory=dict[int, int])


Parts = dict[str, dict[str, Part]]
"""One rank's tensors, by kind and name."""


def wholes(parts: Sequence[Part], mesh: Mapping[str, int]) -> list[Tensor]:
    """The one-device value, once for each set of ranks that have all of it.

    ``parts`` are in rank order, the last axis of ``mesh`` varying fastest.
    """
    layout = parts[0].layout
    free = [range(n) if axis not in layout else (None,) for axis, n in mesh.items()]
    places = list(itertools.product(*map(range, mesh.values())))
    depths = {axis: depth for depth, axis in enumerate(mesh)}
    found = []
    for chosen in itertools.product(*free):
        own: dict[tuple[int | None, ...], Tensor] = {
            at: part.tensor
            for at, part in zip(places, parts, strict=True)
            if all(want in (None, have) for want, have in zip(chosen, at, strict=True))
        }
        for axis in reversed(list(layout)):  # innermost first: it cuts what the outer ones left
            groups: dict[tuple[int | None, ...], list[Tensor]] = {}
            for at, tensor in own.items():
                depth = depths[axis]
                groups.setdefault((*at[:depth], None, *at[depth + 1 :]), []).append(tensor)
            own = {at: _join(group, layout[axis]) for at, group in groups.items()}
        (whole,) = own.values()
        for dim, size in parts[0].lengths.items():
            whole = whole.narrow(dim, 0, size)
        found.append(whole)
    return found


def _join(group: list[Tensor], how: Cut | str) -> Tensor:
    if isinstance(how, Cut) and len({part.shape for part in group}) > 1:  # blocks of which the last are shorter
        return torch.cat(group, how.dim)
    stack = torch.stack(group)
    return stack.sum(0) if isinstance(how, str) else joined(stack, how)


def measure(
    kind: str,
    expected: Mapping[str, Tensor],
    found: Mapping[str, Sequence[Tensor]],
    tolerance: float,
    *,
    at_least: float = 0.0,
) -> tuple[Worst, dict[str, float], list[Failure]]:
    """The worst error of a kind, every tensor's error, and those past ``tolerance``.

    ``found`` has one or more candidates for each value; the worst counts. Errors are relative to the largest
    element of the expected tensor, or to ``at_least`` where that is more. A difference within one rounding of
    the largest element of *all* expected tensors is relative to that one: some gradients (of a key's bias in
    attention) are zero but for rounding.
    """
    largest = max((_largest(tensor) for tensor in expected.values()), default=0.0)
    errors: dict[str, float] = {}
    for name, tensor in expected.items():
        candidates = found.get(name, ())
        errors[name] = max((_error(c, tensor, largest, at_least) for c in candidates), default=math.inf)
    name = max(errors, key=errors.__getitem__, default="")
    worst = Worst(name, errors.get(name, 0.0), tolerance, len(errors))
    return worst, errors, [Failure(kind, n, e, tolerance) for n, e in errors.items() if not e <= tolerance]


def _largest(tensor: Tensor) -> float:
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _error(found: Tensor, expected: Tensor, largest: float, at_least: float) -> float:
    """max|found - expected| relative to max|expected|; equal infinities and not-a-numbers are no difference."""
    if found.shape != expected.shape:
        return math.inf
    found = found.to(expected.device, expected.dtype)
    same = (found == expected) | (found.isnan() & expected.isnan())
    if bool(same.all()):
        return 0.0
    if not expected.is_floating_point():
        return math.inf
    difference = float(torch.where(same, 0.0, (found - expected).abs()).max())
    if not math.isfinite(difference):
        return math.inf
    if difference <= torch.finfo(expected.dtype).eps * largest:
        return difference / largest
    scale = max(_largest(expected), at_least)
    return difference / scale if scale else math.inf


def replicas(ranks: Sequence[Mapping[str, Part]], mesh: Mapping[str, int]) -> tuple[Worst, list[Failure]]:
    """Whether ranks that hold the same block of a value hold the same bits; the error is the largest difference."""
    places = [dict(zip(mesh, at, strict=True)) for at in itertools.product(*map(range, mesh.values()))]
    errors: dict[str, float] = {}
    for name, part in ranks[0].items():
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for place, rank in zip(places, ranks, strict=True):
            groups.setdefault(tuple(place[axis] for axis in part.layout), []).append(rank[name].tensor)
        copies = [group for group in groups.values() if len(group) > 1]
        if copies:
            errors[name] = max(_distance(group) for group in copies)
    name = max(errors, key=errors.__getitem__, default="")
    failures = [Failure("replicas", n, e, 0.0) for n, e in errors.items() if e > 0]
    return Worst(name, errors.get(name, 0.0), 0.0, len(errors)), failures


def _distance(copies: Iterable[Tensor]) -> float:
    first, *others = copies
    different = [other for other in others if not torch.equal(first, other)]
    if not different:
        return 0.0
    largest = max(float((first - other).abs().max()) for other in different)
    return largest if math.isfinite(largest) and largest else math.inf
