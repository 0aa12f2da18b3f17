"""The solver's input, as numbers only: variables, their costs, and the nets that join them.

Nothing here knows tensors, text or torch. ``bind`` builds a ``Problem`` from a graph and a spec;
``eliminate`` solves it exactly; tests solve it by brute force and by a MILP.

A cost is three int64 compared lexicographically: picoseconds, bytes kept for the backward, launches.
Arrays of costs have the three on axis 0. Each is at most ``LIMIT``; ``FORBIDDEN`` marks what is impossible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

COMPONENTS = 3
LIMIT = 1 << 52
FORBIDDEN = 1 << 54  # in component 0; sums of a few hundred do not overflow, solvers saturate at it

Costs = NDArray[np.int64]


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

    source: the producing variable. produced: int64 [choices of source], the type id it makes.
    consumers: (variable, asked) pairs; asked: int64 [choices of that variable], the type id it wants.
    One variable may occur in several pairs (an op that uses a value twice), or be the source itself.
    always: bit mask of the type ids that are asked for in any case (a graph output).
    table: int64 [3, types, 2 ** types], the least cost to have, from the row's type, every type whose bit is
    in the column's mask. Row t with mask 1 << t costs nothing. FORBIDDEN where there is no way.
    """

    name: str
    source: int
    produced: NDArray[np.int64]
    consumers: tuple[tuple[int, NDArray[np.int64]], ...]
    table: Costs
    always: int = 0

    @property
    def types(self) -> int:
        """How many types the value may have."""
        return int(self.table.shape[1])


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
            total += net.table[:, net.produced[choice[net.source]], mask]
        return int(total[0]), int(total[1]), int(total[2])

    def verify(self) -> None:
        """Raise ValueError where shapes or indices do not fit."""
        for variable in self.variables:
            if variable.costs.shape[0] != COMPONENTS or variable.costs.shape[1] < 1:
                raise ValueError(f"{variable.name}: costs have shape {variable.costs.shape}")
        for net in self.nets:
            if net.table.shape != (COMPONENTS, net.types, 1 << net.types):
                raise ValueError(f"{net.name}: table has shape {net.table.shape}")
            for index, ids in ((net.source, net.produced), *net.consumers):
                if ids.shape != self.variables[index].costs.shape[1:] or ids.min() < 0 or ids.max() >= net.types:
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
