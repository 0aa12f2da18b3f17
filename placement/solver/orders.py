"""In which order an axis cuts a run of factors: one for all values, so that types need say nothing of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import sympy

from placement.graph.ir import Value, evaluate
from placement.graph.segments import Factors, extent
from placement.lang.diagnostics import Diagnostics
from placement.lang.spec import Placed, Span
from placement.solver.mesh import Mesh
from placement.solver.nearest import multiples
from placement.types import Shard, Type

if TYPE_CHECKING:
    from placement.solver.bind import Pin


class Orders:
    """The orders that statements name, as they are met; ``mesh`` knows those met so far."""

    def __init__(self, mesh: Mesh, hints: Mapping[sympy.Symbol, int], found: Diagnostics) -> None:
        self.mesh, self.hints, self.found = mesh, hints, found
        self._named: dict[tuple[int, Factors], tuple[Shard, Span]] = {}
        self._told: set[Span] = set()

    def add(self, run: Factors, placed: Placed, index: int, what: str) -> bool:
        """Note the order that a statement gives ``run`` on an axis; reports one that cannot be, and gives False."""
        axis, shard = self.mesh.axes[index], placed.placement
        assert isinstance(shard, Shard)
        if axis.n == 1:
            return True
        earlier, span = self._named.setdefault((index, run), (shard, placed.span))
        if shard.order != earlier.order:
            text = f"{what} is cut in {shard.order} order by axis '{axis.name}', elsewhere in {earlier.order} order"
            notes = [f"{earlier!r} at {span}: a dim has one order on an axis"]
            self._tell("PLC304", text, placed.span, f"write {Shard(shard.dim, earlier.order)!r}", notes)
            return False
        size, chunks = evaluate(extent(run), self.hints), 2 * axis.n
        if shard.order == "zigzag" and size % chunks:
            text = f"dim '{shard.dim}' of {what} is {size}, of which zigzag order makes two equal chunks for each "
            text += f"of the {axis.n} ranks of axis '{axis.name}'"
            hint = f"a size of {multiples(size, chunks)} would do, or write {Shard(shard.dim)!r}"
            self._tell("PLC203", text, placed.dim_span or placed.span, hint)
            return False
        if shard.order == "zigzag":
            self.mesh = dataclasses.replace(self.mesh, zigzag=self.mesh.zigzag | {(index, run)})
        return True

    def _tell(self, code: str, text: str, span: Span, hint: str, notes: list[str] | None = None) -> None:
        """Once for each statement, which may speak of many values."""
        if span not in self._told:
            self._told.add(span)
            self.found.error(code, text, span, hint=hint, notes=notes or ())

    def of_parameters(self, pins: Mapping[Value, Pin]) -> dict[Value, Pin]:
        """Without choices in zigzag order: what a parameter is kept in lies side by side."""

        def kept(kinds: tuple[Type, ...] | None, index: int) -> tuple[Type, ...] | None:
            return kinds and tuple(k for k in kinds if k.stored or (index, k.over) not in self.mesh.zigzag)

        return {
            value: dataclasses.replace(pin, kinds=tuple(kept(kinds, index) for index, kinds in enumerate(pin.kinds)))
            for value, pin in pins.items()
        }
