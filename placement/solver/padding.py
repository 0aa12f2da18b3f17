"""Tables that an axis does not divide, made longer: the program with them padded, and everything else as it was.

A vocabulary of 50257 rows on two ranks is a table of 50258 whose last row is zero. The rewriting is one of the global
program: what the longer values flow through keeps them long, a lookup and a cross entropy are told how many rows
there are, and anything else gets the value cut to its own length. So every later stage sees an ordinary program. The
padding is zero in the parameters and stays so: no gradient reaches it.

It is for dims of tables and classes alone, which nothing takes apart. Heads and hidden sizes are told to the user.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from placement.graph.factors import Dims, Factor, Factors
from placement.graph.ir import Graph, Node, Output, Parameter, Value, substitute
from placement.graph.segments import flattened
from placement.graph.signature import Signature
from placement.lang.diagnostics import Diagnostic
from placement.rules import lookup
from placement.types import Shard

if TYPE_CHECKING:
    from placement.lang.spec import Placed, Spec
    from placement.solver.mesh import Axis, Mesh


class Uneven:
    """The dims of parameters that lines cut, those among them that an axis does not divide, and what to say of them."""

    def __init__(self) -> None:
        self._axes: dict[Factor, set[int]] = {}
        self._missed: dict[Factor, Diagnostic] = {}

    @property
    def notes(self) -> tuple[Diagnostic, ...]:
        """That they are padded."""
        return tuple(self._missed.values())

    def cut(self, factors: Factors, axis: int) -> None:
        """An axis cuts a parameter's dim."""
        if len(factors) == 1:
            self._axes.setdefault(factors[0], set()).add(axis)

    def missed(self, factors: Factors, what: str, placed: Placed, axis: Axis) -> None:
        """An axis does not divide what it was to cut."""
        if len(factors) == 1 and factors[0] in self._axes and isinstance(factors[0].size, int):
            text = f"{what} is padded with zeros: '{axis.name}' of {axis.n} does not divide {factors[0].size}"
            span = placed.dim_span or placed.span
            self._missed.setdefault(factors[0], Diagnostic("PLC203", text, span, severity="note"))

    def padded(self, graph: Graph, dims: Dims, mesh: Mesh, spec: Spec) -> Graph | None:
        """The program with them as long as their axes need; None where there are none or one is no table's.

        Outputs that the spec has sharded stay long: the runtime cuts each rank's block.
        """
        if not self._missed:
            return None
        parts = {f: prod(mesh.axes[index].n for index in self._axes[f]) for f in self._missed}
        try:
            return _Padding(
                graph, dims, {f: -(-int(f.size) // n) * n for f, n in parts.items()}, _sharded(spec)
            ).graph()
        except _Unfit:
            return None


def own_lengths(graph: Graph, dims: Dims, value: Value) -> dict[int, int]:
    """By dim, how long a value of a padded program is without its padding, where it has some."""
    lengths: dict[Factor, int] = {}
    for parameter in graph.parameters:
        for factors, own, size in zip(
            dims.of(parameter.value), parameter.given or (), parameter.value.shape, strict=False
        ):
            if own != size:
                lengths[factors[0]] = own
    own = ((dim, lengths.get(factors[0])) for dim, factors in enumerate(dims.of(value)) if len(factors) == 1)
    return {dim: size for dim, size in own if size is not None}


def _sharded(spec: Spec) -> frozenset[str]:
    lines = (line for line in spec.outputs if any(isinstance(p.placement, Shard) for p in line.placed))
    return frozenset(str(name) for line in lines for name in line.names)


class _Unfit(Exception):
    """A dim is taken apart somewhere, or is none of a table's rows or of classes."""


class _Padding:
    def __init__(self, graph: Graph, dims: Dims, sizes: Mapping[Factor, int], sharded: frozenset[str]) -> None:
        self.old, self.dims, self.sizes, self.sharded = graph, dims, sizes, sharded
        self.wide: dict[Value, Value] = {}  # by what they were
        self.short: dict[Value, Value] = {}  # those cut to their own length again
        self.nodes: list[Node] = []
        self.named = False  # whether an op is there that is told how long it is

    def graph(self) -> Graph:
        """The new program."""
        parameters = tuple(self._parameter(p) for p in self.old.parameters)
        for node in self.old.nodes:
            self._node(node)
        if not self.named:
            raise _Unfit
        outputs = tuple(self._output(o) for o in self.old.outputs)
        modules = {
            path: dataclasses.replace(
                info,
                returned={call: tuple(self.wide.get(v, v) for v in values) for call, values in info.returned.items()},
                arguments={
                    call: {name: self.wide.get(v, v) for name, v in given.items()}
                    for call, given in info.arguments.items()
                },
            )
            for path, info in self.old.modules.items()
        }
        made = dataclasses.replace(
            self.old, parameters=parameters, nodes=tuple(self.nodes), outputs=outputs, modules=modules
        )
        made.verify()
        return made

    # -- values ---------------------------------------------------------------------------------

    def _places(self, value: Value) -> tuple[int, ...] | None:
        """The dims of a value that are one of the factors; None where one of them is only a part of a dim."""
        places: list[int] = []
        for index, factors in enumerate(self.dims.of(value)):
            if any(factor in self.sizes for factor in flattened(factors)):
                if len(factors) != 1 or factors[0] not in self.sizes:
                    return None
                places.append(index)
        return tuple(places)

    def _carries(self, value: Value) -> bool:
        return self._places(value) != ()

    def _widened(self, value: Value) -> Value:
        places = self._places(value)
        if places is None:
            raise _Unfit
        shape = list(value.shape)
        for place in places:
            shape[place] = self.sizes[self.dims.of(value)[place][0]]
        return dataclasses.replace(value, shape=tuple(shape))

    def _parameter(self, parameter: Parameter) -> Parameter:
        if not self._carries(parameter.value):
            return parameter
        wide = self.wide[parameter.value] = self._widened(parameter.value)
        return dataclasses.replace(parameter, value=wide, given=tuple(int(size) for size in parameter.value.shape))

    def _cut(self, value: Value, node: Node | None = None) -> Value:
        """A value as it was: what was made longer is cut to its own length, where ``node`` stands."""
        if value not in self.wide:
            return value
        if value not in self.short:
            if len(value.shape) > 1 and any(value is p.value and not p.is_buffer for p in self.old.parameters):
                raise _Unfit  # a table is never gathered
            made = self.wide[value]
            for place in self._places(value) or ():
                shape = (*made.shape[:place], value.shape[place], *made.shape[place + 1 :])
                name = f"{made.name}_cut"
                after = Value(name, shape, value.dtype, value.requires_grad)
                args = (made, place, 0, value.shape[place])
                where = (node.stack, node.source) if node is not None else ((), "")
                self.nodes.append(Node(name, torch.ops.aten.slice.Tensor, args, {}, (after,), *where))
                made = after
            self.short[value] = made
        return self.short[value]

    def _output(self, output: Output) -> Output:
        if output.value is None or output.value not in self.wide:
            return output
        if output.name in self.sharded:
            return dataclasses.replace(output, value=self.wide[output.value], given=output.value.shape)
        return dataclasses.replace(output, value=self._cut(output.value))

    # -- ops ------------------------------------------------------------------------------------

    def _node(self, node: Node) -> None:
        if not any(v in self.wide for v in node.operands):
            self.nodes.append(node)
            return
        found = lookup(node)
        if found is not None and found.padded is not None and self._first_alone(node):
            self.named = True
            places = self._places(node.operands[0])
            assert places
            kwargs = {**node.kwargs, "size": node.operands[0].shape[places[0]]}
            self._append(node, op=found.padded, kwargs=kwargs)
        elif self._passes(node):
            for value in node.results:
                self.wide[value] = self._widened(value)
            self._append(node, outputs=tuple(None if v is None else self.wide[v] for v in node.outputs))
        else:
            args, kwargs = (
                substitute(tree, lambda leaf: self._cut(leaf, node) if isinstance(leaf, Value) else leaf)
                for tree in (node.args, tuple(node.kwargs.items()))
            )
            self.nodes.append(dataclasses.replace(node, args=args, kwargs=dict(kwargs)))

    def _first_alone(self, node: Node) -> bool:
        """Whether one dim of the first operand is what is longer, and nothing else is."""
        first, *rest = node.operands
        return len(self._places(first) or ()) == 1 and not any(map(self._carries, (*rest, *node.results)))

    def _passes(self, node: Node) -> bool:
        """Whether the op does with a longer operand what it does with its own, and no more.

        What is padded may be anything that is a number: a sum, a product, but no quotient by zeros.
        """
        if not all(self._places(v) for v in node.results):
            return False
        if any(self._carries(v) and v not in self.wide for v in node.operands):
            return False
        found = lookup(node)
        signature = found.signature(node) if found else None
        if found is None or (isinstance(signature, Signature) and self._blocks(node, signature)):
            return False
        carrying = (index for index, v in enumerate(node.operands) if self._carries(v))
        return found.view or found.flops is not None or all(map(found.keeps_finite, carrying))

    def _blocks(self, node: Node, signature: Signature) -> bool:
        """Whether the op needs one of the dims whole."""
        letters = self.dims.letters.get(node, {})
        return any(set(letters.get(letter, ())) & set(self.sizes) for letter in signature.blocked)

    def _append(self, node: Node, **changes: Any) -> None:
        def own(leaf: Any) -> Any:
            return self.wide.get(leaf, leaf) if isinstance(leaf, Value) else leaf

        kwargs = changes.pop("kwargs", node.kwargs)
        args = substitute(node.args, own)
        kwargs = dict(substitute(tuple(kwargs.items()), own))
        self.nodes.append(dataclasses.replace(node, args=args, kwargs=kwargs, **changes))
