"""What the backward keeps, as costs of the solver's problem: the second component of every price.

An op pays for what it alone keeps. A storage that several ops keep is paid once by all of them together: a net
whose table has the bytes of every set of types. What is paid so is what ``memory`` counts, or less: two
conversions to one type on both sides of a view are two storages there and one here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from placement.graph.ir import Node
from placement.rules import lookup
from placement.rules.saved import kept
from placement.rules.strategies import Strategy
from placement.solver.bind import Bound
from placement.solver.problem import COMPONENTS, Costs, Net
from placement.solver.steiner import MOST_TYPES
from placement.solver.storages import OneDevice, Use, thin_views
from placement.types import Kind, Type

_Form = object  # what tells the storages of one value apart: cut over which factors, partial, or whole


def _form(kind: Type) -> _Form:
    """I and R are one storage: what joins them moves nothing."""
    return kind if kind.kind in (Kind.S, Kind.P) else "whole"


@dataclass(frozen=True, slots=True)
class _Shared:
    """A storage that several ops keep: which they are, and its bytes where it is whole."""

    keepers: tuple[Node, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Charge:
    """What an op pays for one storage: its bytes where it is whole, and the operand or result that says how it lies.

    places: positions among the operands and then the results; of several types each is paid. paid: whether this op
    pays at all; of a storage that several keep the first one does.
    """

    storage: int
    nbytes: int
    places: tuple[int, ...]
    use: Use
    paid: bool


class Keeping:
    """The bytes that every strategy of every op keeps.

    With ``least`` never more than ``memory`` counts for any plan; else as much for a plan that cuts what the spec cuts.
    """

    def __init__(self, bound: Bound, *, least: bool = False) -> None:
        self.n = bound.context.n
        self.dims = bound.dims
        pins = (*bound.inputs.values(), *bound.parameters.values(), *bound.values.values())
        cut: Any = None if least else frozenset(kind.over for pin in pins for kind in pin.types if kind.over)
        self.one = OneDevice(bound.graph, bound.context, thin_views(bound.graph, bound.context, cut))
        self._charges: dict[tuple[Node, str], tuple[_Charge, ...]] = {}
        self._tables: dict[tuple[int, ...], Costs] = {}
        uses = {(node, ""): found for node, found in self.one.uses.items()}
        uses |= {(node, name): self._otherwise(node, name) for node in bound.graph.nodes for name in _others(node)}
        keepers: dict[int, dict[Node, None]] = {}
        for (node, _), found in uses.items():
            for use in found:
                if use.storage >= 0 and use.storage not in self.one.heap.exempt:
                    keepers.setdefault(use.storage, {})[node] = None
        order = {node: index for index, node in enumerate(bound.graph.nodes)}
        self.shared = {
            storage: _Shared(tuple(sorted(nodes, key=order.__getitem__)), self.one.heap.nbytes[storage])
            for storage, nodes in keepers.items()
            if len(nodes) > 1
        }
        for key, found in uses.items():
            self._charges[key] = tuple(self._charged(key[0], found))

    def _otherwise(self, node: Node, implementation: str) -> tuple[Use, ...]:
        """What another implementation of the op keeps, by the storages of one device."""
        layouts = self.one.layouts
        operands, results = [layouts[v] for v in node.operands], [layouts[v] for v in node.results]
        found = (self.one.use(node, one, operands, results) for one in kept(node, implementation))
        return tuple(use for uses in found for use in uses)

    def _charged(self, node: Node, uses: tuple[Use, ...]) -> Iterator[_Charge]:
        values = (*node.operands, *node.results)
        for use in uses:
            if use.storage in self.one.heap.exempt:
                continue
            shared = self.shared.get(use.storage)
            places = tuple(place for place, value in enumerate(values) if value is use.kept.value)
            yield _Charge(use.storage, use.nbytes, places, use, shared is None or shared.keepers[0] is node)

    def nbytes(self, node: Node, strategy: Strategy) -> int:
        """What the op itself pays for on one rank; of a storage that others keep too, if it is the first of them."""
        charges = self._charges[node, strategy.implementation]
        if not charges:
            return 0
        total = 0
        kinds = (*strategy.operands, *strategy.results)
        counted: set[tuple[int, _Form]] = set()
        for charge in charges:
            if charge.storage < 0:
                total += charge.nbytes // (self.n if self._cuts(charge.use, kinds[charge.places[0]]) else 1)
                continue
            for place in charge.places if charge.paid else ():
                key = charge.storage, _form(kinds[place])
                if key not in counted:
                    counted.add(key)
                    total += charge.nbytes // (self.n if kinds[place].over else 1)
        return total

    def _cuts(self, use: Use, kind: Type) -> bool:
        """Whether a tensor of the op's own is cut where the value is."""
        place = self.dims.locate(use.kept.value, kind.over) if kind.over else None  # type: ignore[arg-type]
        return place is not None and (use.kept.dims is None or place[0] in use.kept.dims)

    # -- storages that several keep -------------------------------------------------------------

    def nets(self, variable: Mapping[Node, int], offered: Mapping[Node, Sequence[Strategy]]) -> Iterator[Net]:
        """A net for each storage with several keepers, over the variables of their strategies."""
        for storage, shared in self.shared.items():
            forms: dict[_Form, int] = {None: 0}
            asked = [self._asked(node, offered[node], storage, forms) for node in shared.keepers]
            if len(forms) > MOST_TYPES:
                continue
            table = self._table(tuple(self._size(form, shared.nbytes) for form in forms))
            consumers = tuple(zip((variable[node] for node in shared.keepers[1:]), asked[1:], strict=True))
            name = f"bytes of {self.one.heap.values[storage].name}"
            yield Net(name, variable[shared.keepers[0]], asked[0], consumers, table)

    def _size(self, form: _Form, nbytes: int) -> int:
        return 0 if form is None else nbytes // (self.n if isinstance(form, Type) and form.over else 1)

    def _asked(
        self, node: Node, offered: Sequence[Strategy], storage: int, forms: dict[_Form, int]
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """For each strategy the form in which it keeps the storage; of several the first."""
        ids: list[int] = []
        for strategy in offered:
            kinds = (*strategy.operands, *strategy.results)
            charges = self._charges[node, strategy.implementation]
            found = [_form(kinds[c.places[0]]) for c in charges if c.storage == storage]
            ids.append(forms.setdefault(found[0], len(forms)) if found else 0)
        return np.array(ids, dtype=np.int64)

    def _table(self, sizes: tuple[int, ...]) -> Costs:
        """[3, forms, 2 ** forms]: the bytes of a set of forms, without the row's own, which its keeper pays."""
        if sizes not in self._tables:
            count = len(sizes)
            masks = np.arange(1 << count)
            table = np.zeros((COMPONENTS, count, 1 << count), dtype=np.int64)
            for form, size in enumerate(sizes):
                table[1] += ((masks >> form) & 1) * size
            table.setflags(write=False)
            self._tables[sizes] = table
        return self._tables[sizes]


def _others(node: Node) -> tuple[str, ...]:
    """The implementations that a rule adds to the op as it is."""
    found = lookup(node)
    return tuple(implementation.name for implementation in found.implementations) if found else ()
