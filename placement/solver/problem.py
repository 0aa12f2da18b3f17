"""The solver's input, as numbers only: variables, their costs, and the nets that join them.

Nothing here knows tensors, text or torch. ``bind`` builds a ``Problem`` from a graph and a spec;
``eliminate`` solves it exactly; tests solve it by brute force and by a MILP.

A cost is three int64 compared lexicographically: picoseconds, bytes kept for the backward, launches.
Arrays of costs have the three on axis 0. Each is at most ``LIMIT``; ``FORBIDDEN`` marks what is impossible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

COMPONENTS = 3
LIMIT = 1 << 52


FORBIDDEN = 1 << 54  # in component 0; sums of a few hundred do not overflow, solvers saturate at it

Costs = NDArray[np.int64]


class Excessive(Exception):
    """Something costs more than the solver counts to: figures of a device or a link are not what they should be."""


@dataclass(frozen=True, slots=True, eq=False)
class Variable:
    """Something to choose: an op's strategy, or the type of an input or a parameter.

    costs: int64 [3, choices].
    """

    name: str
    costs: Costs


@dataclass(frozen=True, slots=True, eq=False)
class Net:
    """One value: its producer, its consumers, and what conversions between them cost.

    source: the producing variable. produced: int64 [choices of source], the row of what it makes.
    consumers: (variable, asked) pairs; asked: int64 [choices of that variable], the bit of the type it wants.
    One variable may occur in several pairs (an op that uses a value twice), or be the source itself.
    always: bit mask of the types that are asked for in any case (a graph output).
    table: int64 [3, rows, sets], the least cost to have, from the row's type, every type of the column's set.
    FORBIDDEN where there is no way.
    sets: int64 [sets], the columns' bit masks, ascending: every union of what consumers may ask for. None where
    there is a column for every mask. monotone: whether a larger set is known to cost no less.
    """

    name: str
    source: int
    produced: NDArray[np.int64]
    consumers: tuple[tuple[int, NDArray[np.int64]], ...]
    table: Costs
    always: int = 0
    sets: NDArray[np.int64] | None = None
    monotone: bool = False

    def columns(self, masks: Any) -> Any:
        """The columns of these masks: an int, or an array of them."""
        return masks if self.sets is None else np.searchsorted(self.sets, masks)


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Choose one entry per variable so that variables and nets cost least in total."""

    variables: tuple[Variable, ...]
    nets: tuple[Net, ...]

    def cost(self, choice: tuple[int, ...]) -> tuple[int, int, int]:
        """The total cost of a full choice; the definition that every solver is tested against."""
        total = np.zeros(COMPONENTS, dtype=np.int64)
        for variable, index in zip(self.variables, choice, strict=True):
            total += variable.costs[:, index]
        for net in self.nets:
            mask = net.always
            for variable, asked in net.consumers:
                mask |= 1 << int(asked[choice[variable]])
            total += net.table[:, net.produced[choice[net.source]], net.columns(mask)]
        return int(total[0]), int(total[1]), int(total[2])

    def verify(self) -> None:
        """Raise ValueError where shapes or indices do not fit."""
        for variable in self.variables:
            if variable.costs.shape[0] != COMPONENTS or variable.costs.shape[1] < 1:
                raise ValueError(f"{variable.name}: costs have shape {variable.costs.shape}")
        ranges: dict[int, tuple[int, int]] = {}  # of arrays, which many nets share
        for net in self.nets:
            _, rows, columns = net.table.shape
            bits = columns.bit_length() - 1 if net.sets is None else int(net.sets[-1]).bit_length()
            if len(net.table) != COMPONENTS or columns != (1 << bits if net.sets is None else len(net.sets)):
                raise ValueError(f"{net.name}: table has shape {net.table.shape}")
            sides = [(net.source, net.produced, rows), *((v, asked, bits) for v, asked in net.consumers)]
            for index, ids, most in sides:
                if id(ids) not in ranges:
                    ranges[id(ids)] = int(ids.min(initial=0)), int(ids.max(initial=-1))
                low, high = ranges[id(ids)]
                if ids.shape != self.variables[index].costs.shape[1:] or low < 0 or high >= most:
                    raise ValueError(f"{net.name}: types of {self.variables[index].name} do not fit")


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice per variable, what it costs, and a proven lower bound (equal to the cost when exact)."""

    choice: tuple[int, ...]
    cost: tuple[int, int, int]
    bound: tuple[int, int, int]
    width: int
    largest_table: int
    seconds: float
