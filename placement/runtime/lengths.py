"""Calls whose lengths are not multiples of what the program cuts: longer inside, and cut again at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from placement.runtime.outputs import mapped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    Lengths = Mapping[str, tuple[int, int]]  # by name of a dim: as it was given, and as it is inside


@dataclass(frozen=True, slots=True)
class Padded:
    """What calls of another length do: ``inputs`` are padded with a number, those not named with their last position.

    ``outputs``: the dims of each output that are cut again. Calls are refused where the length given is less than
    ``least``, or the one inside more than ``most``. ``told``: the argument of ``forward`` that is how much longer it is
    inside, '' where nothing in it has to know.
    """

    inputs: Mapping[str, float] = field(default_factory=dict)
    outputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    least: int = 1
    most: int | None = None
    told: str = ""


def lengthened(
    arguments: Mapping[str, Any], dims: Mapping[str, Sequence[Any]], how: Mapping[str, Any], lengths: Lengths
) -> dict[str, Any]:
    """The arguments of a call, longer in the dims named in ``lengths``, and by how much where that is one of them.

    ``dims`` are those of each input, by name.
    """

    def longer(name: str, tensors: list[Tensor]) -> Tensor:
        (x,) = tensors
        for dim, named in enumerate(dims.get(name, ())):
            if named in lengths:
                x = _longer(x, dim, lengths[named][1], how[named].inputs.get(name))
        return x

    told = {how[name].told: inside - given for name, (given, inside) in lengths.items() if how[name].told}
    return {**mapped(longer, [dict(arguments)]), **told}


def _longer(x: Tensor, dim: int, size: int, value: float | None) -> Tensor:
    """``x`` with ``size`` elements along ``dim``: more of ``value``, or of the last one."""
    shape = list(x.shape)
    shape[dim] = size - x.shape[dim]
    more = x.narrow(dim, x.shape[dim] - 1, 1).expand(shape) if value is None else x.new_full(shape, value)
    return torch.cat((x, more), dim)


def spare(name: str, how: Mapping[str, Any], lengths: Lengths) -> dict[int, int]:
    """By dim of an output, how much longer it is than it was asked for."""
    found: dict[int, int] = {}
    for dim, (given, inside) in lengths.items():
        for index in how[dim].outputs.get(name, ()):
            found[index] = inside - given
    return found
