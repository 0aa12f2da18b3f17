"""Which dynamic sizes an axis may cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import sympy

from placement.graph.ir import Graph, Size
from placement.lang.spec import Placed, Spec
from placement.types import Shard


def dynamic(graph: Graph, spec: Spec, hints: Mapping[sympy.Symbol, int], axis: str) -> frozenset[sympy.Symbol]:
    """The dynamic sizes that an axis may cut: those that the spec has it cut, and of those it has none cut the longest.

    Cutting every dynamic dim that the example happens to divide would make a plan that the next batch
    size does not fit.
    """
    lines = (*spec.inputs, *spec.params, *spec.values, *spec.outputs)
    symbols = [s.symbol for s in graph.symbols]

    def spoken_of(name: str) -> set[sympy.Symbol]:
        names = {str(dim) for line in lines for dim in _shard_dims(spec, line.placed, name)}
        by_index = {size for size in _cut_by_index(graph, spec, name) if isinstance(size, sympy.Symbol)}
        return {s for s in symbols if s.name in names or s in by_index}

    allowed = spoken_of(axis)
    elsewhere = {s for declared in spec.axes for s in spoken_of(str(declared.name))}
    rest = [s for s in symbols if s not in allowed | elsewhere]
    if rest:
        longest = max(hints[s] for s in rest)
        allowed |= {[s for s in rest if hints[s] == longest][-1]}
    return frozenset(allowed)


def _cut_by_index(graph: Graph, spec: Spec, axis: str) -> Iterator[Size]:
    """The sizes of the dims that ``Shard(0)`` and the like speak of, where it is not a parameter's."""
    inputs = {i.name: i.value for i in graph.inputs}
    outputs = {o.name: o.value for o in graph.outputs if o.value is not None}
    spoken = [(inputs[name], line.placed) for line in spec.inputs for name in line.names if name in inputs]
    spoken += [(outputs[name], line.placed) for line in spec.outputs for name in line.names if name in outputs]
    for line in (line for line in spec.values if any(isinstance(d, int) for d in _shard_dims(spec, line.placed, axis))):
        infos = [info for path, info in graph.modules.items() if line.pattern.matches(path)]
        spoken += [(values[0], line.placed) for info in infos for values in info.returned.values() if values]
    for value, placed in spoken:
        for dim in _shard_dims(spec, placed, axis):
            if isinstance(dim, int) and -len(value.shape) <= dim < len(value.shape):
                yield value.shape[dim]


def _shard_dims(spec: Spec, placed: Sequence[Placed], axis: str) -> list[str | int]:
    """The dims that a line has the axis cut."""
    return [p.placement.dim for p in placed if isinstance(p.placement, Shard) and spec.axis_of(p) == axis]
