"""What the backward keeps, as costs of the solver's problem: the second component of every price.

An op pays for what it keeps; of a storage that several ops keep the first of them pays, before others one that keeps it
however it runs. So no storage counts twice, and where several ops keep one value in different types the sum is less
than there is. A net over all of them would count exactly: it widens the problem so much that a solve takes fifty times
as long and proofs are lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from placement.graph.ir import Node, Value
from placement.rules import lookup
from placement.rules.strategies import JointStrategy
from placement.solver.alike import Alike
from placement.solver.bind import Bound
from placement.solver.fusion import kept_instead
from placement.solver.layers import thin, weights_of
from placement.solver.storages import OneDevice, Thin, Use
from placement.types import I, Joint, R

_Form = object  # what tells the storages of one value apart: cut over which factors, partial, or whole


def _form(joint: Joint) -> _Form:
    """I and R are one storage: what joins them moves nothing."""
    return tuple("whole" if kind in (I, R) else kind for kind in joint)


@dataclass(frozen=True, slots=True)
class _Charge:
    """What an op pays for one storage: its bytes where it is whole, and the operand or result that says how it lies.

    places: positions among the operands and then the results; of several types each is paid. paid: whether this op
    pays at all; of a storage that several keep the first one does. thin: whether blocks do where it is replicated,
    since it may be gathered again.
    """

    storage: int
    nbytes: int
    places: tuple[int, ...]
    use: Use
    paid: bool
    thin: bool = False


class Keeping:
    """The bytes that every strategy of every op keeps.

    With ``least`` a sum is never more than what ``memory`` counts, whatever the plan; else it may be where a plan cuts
    what no line of the spec cuts, and where it gathers the input of linear layers.
    """

    def __init__(self, bound: Bound, *, least: bool = False) -> None:
        self.mesh = bound.mesh
        self.dims = bound.dims
        pins = (*bound.inputs.values(), *bound.parameters.values(), *bound.values.values())
        cut: Any = None if least else frozenset(kind.over for pin in pins for kind in pin.types if kind.over)
        self.alike = Alike(bound)
        self._weights = weights_of(bound.graph) if least else frozenset[Value]()
        self._kept = bound.lowered("gathered = kept")
        axes = [Thin(bound, index, cut, self.alike) for index, axis in enumerate(bound.mesh.axes) if axis.n > 1]
        self.one = OneDevice(bound, self.alike, axes)
        self._charges: dict[tuple[Node, str], tuple[_Charge, ...]] = {}
        uses = {(node, ""): found for node, found in self.one.uses.items()}
        uses |= {(node, name): self._otherwise(node, name) for node in bound.graph.nodes for name in _others(node)}
        instead = kept_instead(bound)
        uses = {key: tuple(self._joined(found, instead)) for key, found in uses.items()}
        self._payers: dict[int, Node] = {}
        for node in bound.graph.nodes:  # first those that keep it however they run
            each = [{use.storage for use in uses[node, name]} for name in ("", *_others(node))]
            self._payers |= dict.fromkeys(set.intersection(*each) - self._payers.keys(), node)
        for node in bound.graph.nodes:
            for use in (use for name in ("", *_others(node)) for use in uses[node, name]):
                self._payers.setdefault(use.storage, node)
        for key, found in uses.items():
            self._charges[key] = tuple(self._charged(key[0], found))

    def _otherwise(self, node: Node, implementation: str) -> tuple[Use, ...]:
        """What another implementation of the op keeps, by the storages of one device."""
        layouts = self.one.layouts
        operands, results = [layouts[v] for v in node.operands], [layouts[v] for v in node.results]
        return tuple(self.one.used(node, implementation, operands, results))

    def _joined(self, uses: Iterable[Use], instead: Mapping[Value, Value | None]) -> Iterator[Use]:
        """What is kept where ops are joined to one."""
        for use in uses:
            other = instead.get(use.kept.value, use.kept.value)
            if other is use.kept.value or use.storage < 0:
                yield use
            elif other is not None:
                storage = self.one.layouts[other].storage
                yield dataclasses.replace(use, storage=storage, nbytes=self.one.heap.nbytes[storage])

    def _charged(self, node: Node, uses: tuple[Use, ...]) -> Iterator[_Charge]:
        values = (*node.operands, *node.results)
        blocks = thin(node, self._weights, self._kept)
        for use in uses:
            if use.storage in self.one.heap.exempt:
                continue
            places = tuple(place for place, value in enumerate(values) if value is use.kept.value)
            again = blocks and places == (0,)
            yield _Charge(use.storage, use.nbytes, places, use, self._payers[use.storage] is node, again)

    def likeness(self, node: Node) -> object:
        """Equal for ops that keep as much where they are cut alike."""
        numbers: dict[int, int] = {}
        return tuple(
            (
                charge.storage if charge.storage < 0 else numbers.setdefault(charge.storage, len(numbers)),
                charge.nbytes,
                charge.places,
                charge.paid,
                charge.thin,
                charge.use.kept.dims,
                name,
            )
            for name in ("", *_others(node))
            for charge in self._charges[node, name]
        )

    def nbytes(self, node: Node, strategy: JointStrategy) -> int:
        """What the op itself pays for on one rank; of a storage that others keep too, if it is the first of them."""
        charges = self._charges[node, strategy.implementation]
        if not charges:
            return 0
        total = 0
        kinds = (*strategy.operands, *strategy.results)
        counted: set[tuple[int, _Form]] = set()
        for charge in charges:
            if charge.storage < 0:
                total += charge.nbytes // self._parts(charge.use, kinds[charge.places[0]])
                continue
            for place in charge.places if charge.paid else ():
                key = charge.storage, _form(kinds[place])
                if key not in counted:
                    counted.add(key)
                    total += charge.nbytes // self._blocks(charge, kinds[place])
        return total

    def _blocks(self, charge: _Charge, joint: Joint) -> int:
        """Into how many blocks the storage is cut."""
        again = prod(axis.n for axis, kind in zip(self.mesh.axes, joint, strict=True) if charge.thin and kind == R)
        return self.mesh.parts(joint) * again

    def _parts(self, use: Use, joint: Joint) -> int:
        """Into how many blocks a tensor of the op's own is cut where the value is cut."""
        parts = 1
        for axis, kind in zip(self.mesh.axes, joint, strict=True):
            place = self.dims.locate(use.kept.value, kind.over) if kind.over else None  # type: ignore[arg-type]
            if place is not None and (use.kept.dims is None or place[0] in use.kept.dims):
                parts *= axis.n
        return parts


def _others(node: Node) -> tuple[str, ...]:
    """The implementations that a rule adds to the op as it is."""
    found = lookup(node)
    return tuple(implementation.name for implementation in found.implementations) if found else ()
