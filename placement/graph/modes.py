"""Whether a model that was captured in training mode does something else in eval mode.

Dropout has a live flag in the captured program. Any other branch on ``self.training`` was decided when the model
was captured. So the lines that asked for the flag are noted, and where one is no mere switch of dropout
or of recomputation, the model is captured in eval mode too and the two programs are compared.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from placement.graph._torch import aten
from placement.graph.attention import ATTENTION
from placement.graph.ir import Graph, Value, op_name, substitute
from placement.lang.diagnostics import PlacementError

Line = tuple[str, int]
"""A file and a line in it."""

_SWITCHED = {aten.dropout, aten.native_dropout}
_ATTENTION = aten.scaled_dot_product_attention
_PROBABILITY = 4  # the position of attention's own dropout_p


def difference(training: Graph, asked: Iterable[Line], evaluated: Callable[[], Graph]) -> str:
    """``file.py:line`` of a branch that makes the model another one in eval mode, '' where there is none.

    ``evaluated`` captures the model in eval mode; it is called only where a line that was ``asked`` may matter.
    """
    suspects = [line for line in sorted(asked) if not _switches_only(line)]
    if not suspects:
        return ""
    try:
        same = _canonical(training) == _canonical(evaluated())
    except PlacementError:
        same = False  # what cannot be captured in eval mode is not what was captured
    return "" if same else ", ".join(f"{Path(file).name}:{line}" for file, line in suspects[:3])


def _canonical(graph: Graph) -> list[Any]:
    """The program with its values numbered and its dropout left out."""
    numbers: dict[Value, int] = {}
    fresh = itertools.count()

    def number(leaf: Any) -> Any:
        return ("value", numbers[leaf]) if isinstance(leaf, Value) else leaf

    for item in (*graph.inputs, *graph.parameters):
        numbers[item.value] = next(fresh)
    program: list[Any] = []
    for node in graph.nodes:
        packet = getattr(node.op, "_overloadpacket", node.op)
        if packet in _SWITCHED:
            numbers[node.results[0]] = numbers[node.operands[0]]
            continue
        args, kwargs = substitute(node.args, number), {k: substitute(v, number) for k, v in node.kwargs.items()}
        if packet is _ATTENTION:
            args = tuple(0.0 if i == _PROBABILITY else a for i, a in enumerate(args))
            kwargs.pop("dropout_p", None)
            args += (0.0,) * (len(args) == _PROBABILITY)
        if node.op is ATTENTION:
            kwargs.pop("dropout_p", None)
        for value in node.results:
            numbers[value] = next(fresh)
        program.append((op_name(node.op), args, sorted(kwargs.items()), [v.dtype for v in node.results]))
    outputs = [(o.name, None if o.value is None else numbers[o.value], o.constant) for o in graph.outputs]
    return [program, outputs, [(str(t.dtype), t.tolist()) for t in graph.constants.values()]]


def settled(frame: FrameType) -> bool:
    """Whether the line that a frame is at asks for the flag in vain: what else it asks for is false in either mode.

    ``if self.training and self.layerdrop > 0.0`` is such a line of a model that drops no layers.
    """
    file, number = frame.f_code.co_filename, frame.f_lineno
    found = [parents for node, parents in _flags(file) if node.lineno <= number <= (node.end_lineno or 0)]
    return bool(found) and all(any(_is_false_anyway(parent, frame) for parent in parents) for parents in found)


def _is_false_anyway(node: ast.AST, frame: FrameType) -> bool:
    if not isinstance(node, ast.BoolOp) or not isinstance(node.op, ast.And):
        return False
    for value in node.values:
        parts = list(ast.walk(value))
        if not all(isinstance(part, _READ) for part in parts) or any(map(_asks, parts)):
            continue
        code = compile(ast.Expression(value), "<asked>", "eval")
        found = eval(code, frame.f_globals, frame.f_locals)  # noqa: S307 - the model's own words
        if found is False or found is None:
            return True
    return False


_READ = (ast.Attribute, ast.Compare, ast.Constant, ast.Name, ast.Gt, ast.Is, ast.IsNot, ast.expr_context)
"""What a line may be made of to be read a second time: names, attributes of them, and numbers to compare with."""


def _asks(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "training"


def _switches_only(line: Line) -> bool:
    """Whether every ``.training`` on the line only switches dropout or recomputation, which changes no value."""
    found = [node for node in _flags(line[0]) if node[0].lineno <= line[1] <= (node[0].end_lineno or 0)]
    return bool(found) and all(_harmless(parents) for _, parents in found)


@functools.lru_cache(maxsize=64)
def _flags(file: str) -> tuple[tuple[ast.Attribute, tuple[ast.AST, ...]], ...]:
    """Every ``….training`` of a file with the nodes around it, innermost first; none where there is no source."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    return tuple(_walk(tree, ()))


def _walk(node: ast.AST, parents: tuple[ast.AST, ...]) -> Iterator[tuple[ast.Attribute, tuple[ast.AST, ...]]]:
    if isinstance(node, ast.Attribute) and _asks(node):
        yield node, parents
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, (node, *parents) if isinstance(node, ast.expr | ast.keyword) else (node,))


def _harmless(parents: tuple[ast.AST, ...]) -> bool:
    return any(map(_is_switch, parents))


def _is_switch(node: ast.AST) -> bool:
    if isinstance(node, ast.keyword):  # attend(..., dropout=0.0 if not self.training else self.dropout)
        return (node.arg or "").startswith("dropout")
    if isinstance(node, ast.Call):  # F.dropout(x, self.p, self.training)
        return ast.unparse(node.func).removeprefix("torch.") in ("dropout", "F.dropout", "nn.functional.dropout")
    if isinstance(node, ast.BoolOp):  # if self.gradient_checkpointing and self.training
        return isinstance(node.op, ast.And) and any("gradient_checkpointing" in ast.unparse(v) for v in node.values)
    return False
