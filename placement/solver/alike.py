"""Which ops do the same on values of the same sizes: what holds of one of them holds of all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.graph.ir import Node, Size, Value, evaluate, substitute

if TYPE_CHECKING:
    from placement.solver.bind import Bound


class Alike:
    """Numbers for the ops of one program, equal for ops that are alike; sizes as they are priced."""

    def __init__(self, bound: Bound) -> None:
        self.hints = bound.hints
        self._interned: dict[object, int] = {}
        self._nodes: dict[Node, int] = {}
        self._shapes: dict[Value, tuple[int, ...]] = {}
        self._sizes: dict[Size, int] = {}

    def intern(self, key: object) -> int:
        """A number for ``key``: equal for equal keys."""
        return self._interned.setdefault(key, len(self._interned))

    def size(self, size: Size) -> int:
        """A size as a number."""
        if size not in self._sizes:
            self._sizes[size] = evaluate(size, self.hints)
        return self._sizes[size]

    def shape(self, value: Value) -> tuple[int, ...]:
        """The full value's shape in numbers."""
        if value not in self._shapes:
            self._shapes[value] = tuple([s if isinstance(s, int) else self.size(s) for s in value.shape])
        return self._shapes[value]

    def of(self, node: Node) -> int:
        """Equal for ops that do the same on values of the same sizes."""
        if node not in self._nodes:
            taken = (*node.operands, *node.results)
            values = tuple([(self.shape(v), v.dtype, v.requires_grad, taken.index(v)) for v in taken])
            given = substitute(
                (node.args, tuple(node.kwargs.items())), lambda leaf: "" if isinstance(leaf, Value) else leaf
            )
            self._nodes[node] = self.intern((node.op, values, repr(given)))
        return self._nodes[node]
