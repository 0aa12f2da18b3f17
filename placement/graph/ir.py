"""The global program: values, nodes, and where each came from.

A ``Graph`` is what ``capture`` makes of a model and what every later stage reads. It is single
assignment and functional: a node's outputs are new values and nothing is written in place. Sizes are
ints or sympy expressions over the graph's ``symbols`` (the dims named on ``input`` lines).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from placement.graph._torch import is_overload, schema_arguments

Size = int | sympy.Expr


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A tensor of the global program."""

    name: str
    shape: tuple[Size, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __repr__(self) -> str:
        return f"%{self.name}"

    def describe(self) -> str:
        """``%name: float32[batch, seq, 64]``, with a star where autograd reaches it."""
        shape = ", ".join(map(str, self.shape))
        return f"%{self.name}: {str(self.dtype).removeprefix('torch.')}[{shape}]{'*' if self.requires_grad else ''}"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one module: its dotted path ('' is the root) and which call of it this is."""

    path: str
    index: int = 0

    def __repr__(self) -> str:
        return self.path if not self.index else f"{self.path}@{self.index}"


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One op. ``args`` and ``kwargs`` hold Values, Sizes and literals, nested in tuples.

    ``operands`` are the tensors among the arguments in order of appearance, a repeated one repeated;
    ``results`` are the outputs that exist. ``stack`` names the module calls the op lies in, outermost
    first (the root is left out). ``source`` is the model's own line, ``file:line``, or '' where it is
    not known.
    """

    name: str
    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Value | None, ...]
    stack: tuple[Call, ...] = ()
    source: str = ""
    operands: tuple[Value, ...] = field(init=False)
    results: tuple[Value, ...] = field(init=False)

    def __post_init__(self) -> None:  # read far more often than made
        operands = (v for v in leaves((self.args, tuple(self.kwargs.values()))) if isinstance(v, Value))
        object.__setattr__(self, "operands", tuple(operands))
        object.__setattr__(self, "results", tuple(v for v in self.outputs if v is not None))

    @property
    def module(self) -> str:
        """The dotted path of the innermost module, '' for the root."""
        return self.stack[-1].path if self.stack else ""

    def __repr__(self) -> str:
        outs = ", ".join("_" if v is None else v.describe() for v in self.outputs)
        kwargs = "".join(f", {k}={v!r}" for k, v in self.kwargs.items())
        args = ", ".join(map(repr, self.args))
        return f"{outs} = {op_name(self.op)}({args}{kwargs})"


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """A parameter or buffer: all its dotted names (a tied weight has several), first the canonical one."""

    value: Value
    names: tuple[str, ...]
    is_buffer: bool = False
    persistent: bool = True
    given: tuple[int, ...] | None = None  # its own shape, where the program pads it with zeros

    @property
    def name(self) -> str:
        """The canonical dotted name."""
        return self.names[0]


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """A tensor that the caller passes; ``name`` is its argument's name (``a.0`` inside a container)."""

    value: Value
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """A leaf of what ``forward`` returns: a value, or a constant that is not a tensor."""

    value: Value | None
    name: str
    constant: Any = None
    given: tuple[Size, ...] | None = None  # its own shape, where the program pads it


@dataclass(frozen=True, slots=True)
class Symbol:
    """A dynamic size: its sympy symbol, the example's size, and the bounds that capture found."""

    symbol: sympy.Symbol
    hint: int
    lower: int = 1
    upper: int | None = None

    @property
    def name(self) -> str:
        """The dim's name on its ``input`` line."""
        return self.symbol.name


@dataclass(frozen=True, slots=True, eq=False)
class ModuleInfo:
    """A module of the original: its class, and for each call the values that it returned, in order."""

    path: str
    type: type
    returned: Mapping[int, tuple[Value, ...]] = field(default_factory=dict)
    arguments: Mapping[int, Mapping[str, Value]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """The captured program."""

    inputs: tuple[Input, ...]
    parameters: tuple[Parameter, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    symbols: tuple[Symbol, ...]
    modules: Mapping[str, ModuleInfo]
    in_spec: Any  # the pytree of (args, kwargs) that forward takes
    out_spec: Any  # the pytree that forward returns
    constant_inputs: Mapping[str, Any] = field(default_factory=dict)  # non-tensor arguments, fixed by capture
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)  # tensors that forward makes from numbers
    size_guards: tuple[str, ...] = ()  # what branches on sizes took for granted: "seq > 3"
    training_only: str = ""  # lines whose branch on `training` makes the model another one in eval mode
    seen: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of attention's results: see `seen.keys_seen`

    def values(self) -> Iterator[Value]:
        """Every value: inputs, parameters, then results in program order."""
        for item in (*self.inputs, *self.parameters):
            yield item.value
        for node in self.nodes:
            yield from node.results

    def hints(self) -> dict[sympy.Symbol, int]:
        """The example's size of every symbol."""
        return {s.symbol: s.hint for s in self.symbols}

    def __str__(self) -> str:
        lines = [f"input  {i.value.describe()}" for i in self.inputs]
        lines += [
            f"{'buffer' if p.is_buffer else 'param '} {p.value.describe()}  # {', '.join(p.names)}"
            for p in self.parameters
        ]
        lines += [f"{node!r}  # {node.module or '(root)'}" for node in self.nodes]
        lines += [f"output {o.name} = {o.value!r}" for o in self.outputs]
        return "\n".join(lines)

    def verify(self) -> None:
        """Raise ValueError unless the program is single assignment and every use follows its definition."""
        defined: set[Value] = set()
        names: set[str] = set()

        def define(value: Value) -> None:
            if value.name in names:
                raise ValueError(f"{value!r} is defined twice")
            names.add(value.name)
            defined.add(value)

        for item in (*self.inputs, *self.parameters):
            define(item.value)
        for node in self.nodes:
            for operand in node.operands:
                if operand not in defined:
                    raise ValueError(f"{node.name} uses {operand!r} before its definition")
            for result in node.results:
                define(result)
        for output in self.outputs:
            if output.value is not None and output.value not in defined:
                raise ValueError(f"output {output.name} is not defined")


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of nested tuples and lists, in order."""
    if isinstance(tree, tuple | list):
        for item in tree:
            yield from leaves(item)
    else:
        yield tree


def substitute(tree: Any, mapping: Callable[[Any], Any]) -> Any:
    """``tree`` with every leaf replaced by ``mapping(leaf)``; lists become tuples."""
    if isinstance(tree, tuple | list):
        return tuple(substitute(item, mapping) for item in tree)
    return mapping(tree)


def arguments(node: Node) -> dict[str, Any]:
    """The node's arguments by the names of the op's schema, defaults filled in."""
    result: dict[str, Any] = {}
    for position, (name, default) in enumerate(schema_arguments(node.op)):
        if position < len(node.args):
            result[name] = node.args[position]
        else:
            result[name] = node.kwargs.get(name, default)
    return result


def op_name(op: Callable[..., Any]) -> str:
    """``aten.add.Tensor`` for an overload, the qualified name for anything else."""
    return str(op) if is_overload(op) else getattr(op, "__qualname__", repr(op))


def evaluate(size: Size, hints: Mapping[sympy.Symbol, int]) -> int:
    """The size as an int, with the symbols at ``hints``."""
    if isinstance(size, int):
        return size
    if isinstance(size, sympy.Symbol):
        return hints[size]
    numbers: dict[sympy.Basic, sympy.Basic] = {symbol: sympy.Integer(hint) for symbol, hint in hints.items()}
    result: Any = size.xreplace(numbers)
    return int(result)


def numel(shape: Sequence[Size], hints: Mapping[sympy.Symbol, int]) -> int:
    """The number of elements of a shape."""
    count = 1
    for size in shape:
        count *= evaluate(size, hints)
    return count
