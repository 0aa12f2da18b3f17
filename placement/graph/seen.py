"""How many keys each query of attention sees in the example, where marks of tokens decide it.

The few ops that marks are made of run once more, on the example's own numbers, and only counts are kept. Nothing is
known where numbers are not there (a meta tensor), where weights or random draws decide, or where counting takes long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor

from placement.graph._torch import schema_name
from placement.graph.attention import COMPARISONS
from placement.graph.example import Example
from placement.graph.ir import Graph, Node, Value, arguments, evaluate, numel, substitute

_LARGEST = 1 << 22  # elements of a tensor that is worked out
_PAIRS = 1 << 24  # pairs that are looked at one by one: some tens of milliseconds
_BLOCK = 1 << 20  # of them at once


def keys_seen(
    graph: Graph, model: torch.nn.Module, example: Example, blocks: Collection[str] = ()
) -> dict[str, Tensor]:
    """By the name of what attention with marks gives: the keys that each query sees, int32 [batch or 1, queries].

    blocks: tensors of the example whose numbers are not those of a whole call. None of its tensors is kept.
    """
    marked = [node for node in graph.nodes if "compare" in node.kwargs and _marks(node)]
    if not marked:
        return {}
    wanted = {mark for node in marked for mark in _marks(node)}
    known = _worked_out(graph, _values(graph, model, example, blocks), wanted)
    found: dict[str, Tensor] = {}
    counted: list[tuple[_Sight, Tensor | None]] = []
    for node in marked:
        if all(mark in known for mark in _marks(node)):
            sight = _sight(node, known, graph.hints())
            counts = next((counts for other, counts in counted if other.same(sight)), None)
            if counts is None and (counts := sight.counts()) is not None:
                counted.append((sight, counts))
            if counts is not None:
                found[node.results[0].name] = counts
    return found


def _marks(node: Node) -> tuple[Value, ...]:
    given = arguments(node)
    return (*given["of_query"], *given["of_key"])


# -- the example's numbers -------------------------------------------------------------------------


def _values(graph: Graph, model: torch.nn.Module, example: Example, blocks: Collection[str]) -> dict[Value, Tensor]:
    """What the program starts from, where its numbers are there, at its sizes; parameters are none to go by."""
    given = dict(zip(example.names, example.tensors, strict=True))
    own = {**dict(model.named_buffers(remove_duplicate=False)), **graph.constants}
    tensors = {i.value: given.get(i.name) for i in graph.inputs if i.name not in blocks}
    tensors |= {p.value: own.get(p.name) for p in graph.parameters}
    found = {value: tensor.detach() for value, tensor in tensors.items() if tensor is not None and _is_there(tensor)}
    hints = graph.hints()
    shapes = {value: tuple(evaluate(size, hints) for size in value.shape) for value in found}
    return {value: tensor for value, tensor in found.items() if tensor.shape == shapes[value]}


def _is_there(tensor: Any) -> bool:
    plain = type(tensor) in (Tensor, torch.nn.Parameter)  # no subclass, which may stand for anything
    return plain and tensor.layout is torch.strided and not tensor.is_meta


def _worked_out(graph: Graph, known: dict[Value, Tensor], wanted: Iterable[Value]) -> dict[Value, Tensor]:
    """Those values that are known, or follow by ops of torch without chance, at the example's sizes."""
    needed, nodes = set(wanted), []
    for node in reversed(graph.nodes):
        if needed.intersection(node.results):
            needed.update(node.operands)
            nodes.append(node)
    known = {value: tensor.cpu() for value, tensor in known.items() if value in needed}
    hints = graph.hints()
    for node in reversed(nodes):
        if _may_run(node, known, hints):
            known.update(_run(node, known, hints))
    return known


def _may_run(node: Node, known: Mapping[Value, Tensor], hints: Mapping[sympy.Symbol, int]) -> bool:
    plain = schema_name(node.op)[0] == "aten" and torch.Tag.nondeterministic_seeded not in node.op.tags  # type: ignore[attr-defined]
    small = all(numel(value.shape, hints) <= _LARGEST for value in node.results)
    return plain and small and all(operand in known for operand in node.operands)


def _run(node: Node, known: Mapping[Value, Tensor], hints: Mapping[sympy.Symbol, int]) -> dict[Value, Tensor]:
    """What an op gives; nothing where the example's numbers do not fit it, as rows that a table has not."""
    sizes: dict[sympy.Basic, sympy.Basic] = {symbol: sympy.Integer(size) for symbol, size in hints.items()}

    def now(leaf: Any) -> Any:
        match leaf:
            case Value():
                return known[leaf]
            case sympy.Expr():
                number: Any = leaf.xreplace(sizes)
                return int(number) if number.is_Integer else float(number)
            case torch.device():
                return torch.device("cpu")
            case _:
                return leaf

    kwargs = {name: substitute(argument, now) for name, argument in node.kwargs.items()}
    try:
        with torch.no_grad():
            made = node.op(*substitute(node.args, now), **kwargs)
    except (RuntimeError, IndexError):
        return {}
    made = (made,) if isinstance(made, Tensor) else made
    pairs = zip(node.outputs, made, strict=True)
    return {value: tensor for value, tensor in pairs if value is not None and _is_there(tensor)}


# -- counting --------------------------------------------------------------------------------------


Bounds = tuple[int | None, int | None]  # how far before and after a query its keys may be
_BOUNDS: dict[str, Bounds] = {">=": (None, 0), ">": (None, -1), "<=": (0, None), "<": (-1, None)}  # in the marks' order


@dataclass(frozen=True, slots=True, eq=False)
class _Sight:
    """What attention sees: bounds, pairs of marks compared, and truths of keys; marks are [batch or 1, tokens]."""

    queries: int
    keys: int
    bounds: Bounds
    compare: tuple[str, ...]
    of_query: tuple[Tensor, ...]
    of_key: tuple[Tensor, ...]

    @property
    def rows(self) -> int:
        """How many sequences the marks tell apart."""
        return max(mark.shape[0] for mark in (*self.of_query, *self.of_key))

    def same(self, other: _Sight) -> bool:
        """Whether it is the same in everything."""
        mine, its = ((s.queries, s.keys, s.bounds, s.compare, len(s.of_key)) for s in (self, other))
        pairs = zip((*self.of_query, *self.of_key), (*other.of_query, *other.of_key), strict=False)
        return mine == its and all(one is two or torch.equal(one, two) for one, two in pairs)

    def counts(self) -> Tensor | None:
        """The keys that each query sees, int32 [rows, queries]; None where there are too many pairs to look at."""
        others = [how for how in self.compare if how != "=="]
        if not others or (len(others) == 1 and others[0] in _BOUNDS and self.bounds == (None, None)):
            return self._by_group().int()
        if self.rows * self.queries * self.keys > _PAIRS:
            return None
        step = max(1, _BLOCK // (self.rows * self.keys))
        blocks = (self._block(start, min(start + step, self.queries)) for start in range(0, self.queries, step))
        return torch.cat(list(blocks), 1).int()

    def _by_group(self) -> Tensor:
        """Where all marks but one must be equal: of the keys alike a query sees those between two places."""
        rows, queries, keys = self.rows, self.queries, self.keys
        sequences, tokens = torch.arange(rows), torch.arange(keys).repeat(rows)
        group = torch.cat([sequences.repeat_interleave(queries), sequences.repeat_interleave(keys)])
        first, stop = _reach(torch.arange(queries).repeat(rows), self.bounds, keys)
        for how, mine, its in zip(self.compare, self.of_query, self.of_key, strict=False):
            both = torch.cat([mine.expand(rows, queries).flatten(), its.expand(rows, keys).flatten()])
            which = both.unique(return_inverse=True)[1]
            if how == "==":
                group = (group * (which.max() + 1) + which).unique(return_inverse=True)[1]
            else:  # keys are placed by their marks, not in the order of tokens
                tokens = which[rows * queries :]
                first, stop = _reach(which[: rows * queries], _BOUNDS[how], len(which))
        seen = torch.ones(rows, keys, dtype=torch.bool)
        for truth in self.of_key[len(self.compare) :]:
            seen = seen & truth.bool()
        begin = group * (len(group) + 1)  # where the numbers of a group begin: no place is beyond
        at = (begin[rows * queries :] + tokens)[seen.flatten()].sort().values
        first, stop = (begin[: rows * queries] + end for end in (first, stop))
        return (torch.searchsorted(at, stop) - torch.searchsorted(at, first)).clamp(min=0).view(rows, queries)

    def _block(self, start: int, stop: int) -> Tensor:
        """The counts of some queries, pair by pair."""
        keys, (first, end) = torch.arange(self.keys), _reach(torch.arange(start, stop)[:, None], self.bounds, self.keys)
        seen = ((keys >= first) & (keys < end)).expand(self.rows, -1, -1)
        for how, mine, its in zip(self.compare, self.of_query, self.of_key, strict=False):
            seen = seen & COMPARISONS[how](mine[:, start:stop, None], its[:, None])
        for truth in self.of_key[len(self.compare) :]:
            seen = seen & truth.bool()[:, None]
        return seen.sum(-1)


def _reach(queries: Tensor, bounds: Bounds, keys: int) -> tuple[Tensor, Tensor]:
    """The places of the first key that the bounds let queries see, and after the last."""
    left, right = bounds
    first = queries * 0 if left is None else queries - left
    stop = queries * 0 + keys if right is None else queries + right + 1
    return first.clamp(0, keys), stop.clamp(0, keys)


def _sight(node: Node, known: Mapping[Value, Tensor], hints: Mapping[sympy.Symbol, int]) -> _Sight:
    given = arguments(node)

    def rows(marks: Sequence[Value]) -> tuple[Tensor, ...]:
        return tuple(known[mark].long().reshape(-1, known[mark].shape[-1]) for mark in marks)

    return _Sight(
        queries=evaluate(node.operands[0].shape[-2], hints),
        keys=evaluate(node.operands[1].shape[-2], hints),
        bounds=(given["left"], given["right"]),
        compare=tuple(given["compare"]),
        of_query=rows(given["of_query"]),
        of_key=rows(given["of_key"]),
    )
