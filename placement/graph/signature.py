"""The index structure of one op: which dims of its operands and results run together.

A ``Signature`` is an einsum-like statement. Each dim is a tuple of *letters*, outermost first: one
letter as a rule, none for a dim of size one that broadcasts, several where the op takes the dim apart
(``chunk`` sees its dim as pieces times rest). A dim may also be the sum of others, as of those that ``split`` makes
or ``cat`` takes. A ``Regrouping`` keeps the elements in order and only
draws the borders between dims anew (``reshape``, ``unsqueeze``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from placement.graph.ir import Node, Size

Dim = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """Letters of every dim of every operand and result.

    blocked: letters that need their whole extent. A letter of operands that no result has and that is
    not blocked is *contracted*: summed over, linearly.
    linear: operands in which the op is linear, each by itself, the others held fixed.
    additive: operands in which the op is linear together, the others held fixed: given terms of all of
    them, the sum of the results is the result for the sums.
    sizes: the size of letters that share a dim. pieces: letters that count equal pieces of a dim.
    segments: a blocked letter of one side, and the blocked letters (of the other side, or of no tensor) that lie side
    by side in it. What cuts every one of them cuts it too. Letters without a dim have their size in ``sizes``.
    """

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    blocked: frozenset[str] = frozenset()
    linear: frozenset[int] = frozenset()
    additive: frozenset[int] = frozenset()
    sizes: Mapping[str, Size] = field(default_factory=dict)
    pieces: frozenset[str] = frozenset()
    segments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def letters(self) -> tuple[str, ...]:
        """Every letter, in order of first appearance."""
        return tuple(dict.fromkeys(_letters((*self.operands, *self.results))))

    @property
    def contracted(self) -> frozenset[str]:
        """Letters that are summed over."""
        return frozenset(_letters(self.operands)) - set(_letters(self.results)) - self.blocked

    def __str__(self) -> str:
        left = ", ".join(" ".join(map(_show, dims)) for dims in self.operands)
        right = ", ".join(" ".join(map(_show, dims)) for dims in self.results)
        notes = [f"blocked {' '.join(sorted(self.blocked))}"] if self.blocked else []
        notes += [f"linear in {', '.join(map(str, sorted(self.linear)))}"] if self.linear else []
        notes += [f"additive in {', '.join(map(str, sorted(self.additive)))}"] if self.additive else []
        notes += [f"{whole} = {' + '.join(parts)}" for whole, parts in self.segments.items()]
        return "; ".join([f"{left} -> {right}", *notes])


@dataclass(frozen=True, slots=True)
class Regrouping:
    """Operand 0's elements in the same order under another shape; ``inferred`` is the result dim given as -1."""

    shape: tuple[Size, ...]
    inferred: int | None = None


def _letters(tensors: Iterable[Sequence[Dim]]) -> Iterable[str]:
    return (letter for dims in tensors for dim in dims for letter in dim)


def _show(dim: Dim) -> str:
    return dim[0] if len(dim) == 1 else f"({' '.join(dim)})" if dim else "1"


_TOKEN = re.compile(r"\(([^)]*)\)|(\S+)")


def parse(text: str) -> tuple[tuple[tuple[Dim, ...], ...], tuple[tuple[Dim, ...], ...]]:
    """``"* k, n k -> * n"`` as the dims of operands and results; ``*`` stays a letter of its own.

    Raises ValueError where the text has no single ``->``.
    """
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise ValueError(f"{text!r} needs one '->' between operands and results")

    def side(part: str) -> tuple[tuple[Dim, ...], ...]:
        return tuple(
            tuple(
                tuple(group.split()) if group else () if word == "1" else (word,)
                for group, word in _TOKEN.findall(item)
            )
            for item in part.split(",")
        )

    return side(left), side(right)


def expand(text: str, node: Node) -> tuple[tuple[tuple[Dim, ...], ...], tuple[tuple[Dim, ...], ...]]:
    """``parse`` with ``*`` replaced by letters for the dims that the node's tensors have there.

    Leading dims align from the right, as broadcasting does; a dim of size one that another tensor's dim
    extends gets no letter. Raises ValueError where the text does not fit the node's tensors.
    """
    operands, results = parse(text)
    shapes = [v.shape for v in node.operands], [v.shape for v in node.results]
    if (len(operands), len(results)) != (len(shapes[0]), len(shapes[1])):
        raise ValueError(f"{text!r} does not fit {len(shapes[0])} operands and {len(shapes[1])} results")
    tensors = [*zip(operands, shapes[0], strict=True), *zip(results, shapes[1], strict=True)]
    extent: dict[str, Size] = {}
    expanded = [_expand_star(dims, shape, text) for dims, shape in tensors]
    for dims, shape in expanded:
        for dim, size in zip(dims, shape, strict=True):
            if len(dim) == 1 and size != 1:
                extent[dim[0]] = size
    final = [
        tuple(
            () if size == 1 and len(dim) == 1 and dim[0] in extent else dim
            for dim, size in zip(dims, shape, strict=True)
        )
        for dims, shape in expanded
    ]
    return tuple(final[: len(operands)]), tuple(final[len(operands) :])


def _expand_star(dims: tuple[Dim, ...], shape: Sequence[Size], text: str) -> tuple[tuple[Dim, ...], Sequence[Size]]:
    if ("*",) not in dims:
        if len(dims) != len(shape):
            raise ValueError(f"{text!r} does not fit a tensor of {len(shape)} dims")
        return dims, shape
    at = dims.index(("*",))
    count = len(shape) - len(dims) + 1
    if count < 0:
        raise ValueError(f"{text!r} does not fit a tensor of {len(shape)} dims")
    star: tuple[Dim, ...] = tuple((f"*{i}",) for i in range(count - 1, -1, -1))
    return (*dims[:at], *star, *dims[at + 1 :]), shape
