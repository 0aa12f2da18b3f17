"""Ops, sizes and conversions as Python text, with sizes as they are on one rank."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.printing.str import StrPrinter

from placement.graph._torch import overload_name, schema_arguments, schema_name
from placement.graph.factors import Factors
from placement.graph.ir import Node, Size, Value, leaves
from placement.rules import lookup
from placement.rules.core import arguments
from placement.solver.plan import Plan, Step, Version
from placement.types import Action, Kind, Type

_DEVICE = "{device}"


def draws(node: Node) -> bool:
    """Whether the op draws random numbers."""
    given = arguments(node)
    return torch.Tag.nondeterministic_seeded in node.op.tags and given.get("p", given.get("dropout_p")) != 0  # type: ignore[attr-defined]


def size_text(size: Size) -> str:
    """A size over the program's symbols, as an expression over variables of their names."""
    return str(size) if isinstance(size, int) else _spaced(_floors(_Sizes().doprint(size)))


class _Sizes(StrPrinter):
    """Sympy's text, with torch's own functions of sizes in Python's words."""

    def _divided(self, sign: str, expr: sympy.Expr) -> str:
        left, right = (self.parenthesize(a, 1000) for a in expr.args)
        return f"({left}{sign}{right})"

    def _print_FloatTrueDiv(self, expr: sympy.Expr) -> str:  # noqa: N802 - sympy looks methods up by class name
        return self._divided(" / ", expr)

    _print_IntTrueDiv = _print_FloatTrueDiv  # noqa: N815 - as above

    def _print_FloorDiv(self, expr: sympy.Expr) -> str:  # noqa: N802 - as above
        return self._divided(" // ", expr)

    def _print_Mod(self, expr: sympy.Expr) -> str:  # noqa: N802 - as above
        return self._divided(" % ", expr)

    _print_PythonMod = _print_Mod  # noqa: N815 - as above

    def _print_FloatPow(self, expr: sympy.Expr) -> str:  # noqa: N802 - as above
        return self._divided("**", expr)

    _print_PowByNatural = _print_FloatPow  # noqa: N815 - as above

    def _print_ToFloat(self, expr: sympy.Expr) -> str:  # noqa: N802 - as above
        return f"float({self._print(expr.args[0])})"

    def _print_Max(self, expr: sympy.Expr) -> str:  # noqa: N802 - as above
        return f"max({', '.join(map(self._print, expr.args))})"

    def _print_Min(self, expr: sympy.Expr) -> str:  # noqa: N802 - as above
        return f"min({', '.join(map(self._print, expr.args))})"


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a version is cut: its dim, and the size of what lies before the run in that dim."""

    dim: int
    outer: Size

    def text(self) -> str:
        """``1`` or ``0, batch``: how it is written in calls."""
        return str(self.dim) if self.outer == 1 else f"{self.dim}, {size_text(self.outer)}"


@dataclass(frozen=True, slots=True)
class Printer:
    """Writes the pieces of one plan."""

    plan: Plan

    def cut(self, value: Value, kind: Type) -> Cut | None:
        """Where a value of type ``kind`` is cut, None where it is not."""
        if kind.kind is not Kind.S:
            return None
        place = self.plan.bound.dims.locate(value, kind.over)  # type: ignore[arg-type]
        assert place is not None
        return Cut(place[0], _extent(place[1]))

    def local_shape(self, value: Value, kind: Type) -> tuple[Size, ...]:
        """The shape of a value on one rank; a cut dynamic size is a floor division."""
        cut = self.cut(value, kind)
        return tuple(_divided(s, self.plan.axis.n) if cut and cut.dim == i else s for i, s in enumerate(value.shape))

    def describe(self, version: Version) -> str:
        """``S(seq)``, or ``S(2)`` where the dim has no name: the same for layers that are alike."""
        kind = version.type
        if kind.kind is not Kind.S:
            return kind.kind.value
        names = self.plan.bound.dims.names
        for name, factors in names.items():
            if kind.over and kind.over[0] in factors and len(factors) == 1:
                return f"S({name})"
        cut = self.cut(version.value, kind)
        return f"S({cut.dim})" if cut else "S"

    # -- conversions ----------------------------------------------------------------------------

    def step(self, step: Step, source: str, axis: str) -> tuple[str, str]:
        """A conversion's call and the comment beside it."""
        dual = step.conversion.backward.value
        arrow = f"{self.describe(step.source)} -> {self.describe(step.target)}"
        gradient = f"; backward: {dual}" if step.value.requires_grad and dual != "none" else ""
        return self._call(step, source, axis), arrow + gradient

    def _call(self, step: Step, x: str, axis: str) -> str:
        before, after = self.cut(step.value, step.source.type), self.cut(step.value, step.target.type)
        kinds = step.source.type.kind.value, step.target.type.kind.value
        match step.conversion.forward:
            case Action.ALL_REDUCE:
                return f"rt.all_reduce({x}, {axis})"
            case Action.ALL_GATHER if before:
                invariant = ', to="I"' if kinds[1] == "I" else ""
                return f"rt.all_gather({x}, {axis}, {before.text()}{invariant})"
            case Action.REDUCE_SCATTER if after:
                return f"rt.reduce_scatter({x}, {axis}, {after.text()})"
            case Action.ALL_TO_ALL if before and after:
                outers = (
                    "" if before.outer == after.outer == 1 else f", {size_text(before.outer)}, {size_text(after.outer)}"
                )
                return f"rt.all_to_all({x}, {axis}, {before.dim}, {after.dim}{outers})"
            case Action.SPLIT if after:
                of = ', of="R"' if kinds[0] == "R" else ""
                return f"rt.split({x}, {axis}, {after.text()}{of})"
            case Action.PAD if before:
                return f"rt.pad({x}, {axis}, {before.text()})"
            case Action.KEEP:
                of = ', of="R"' if kinds[0] == "R" else ""
                return f"rt.partial({x}, {axis}{of})"
            case _:
                return f"rt.replicated({x}, {axis})" if kinds == ("I", "R") else f"rt.invariant({x}, {axis})"

    # -- ops ------------------------------------------------------------------------------------

    def sizes_of(self, node: Node) -> set[sympy.Symbol]:
        """The symbols that the op's text speaks of."""
        strategy = self.plan.strategies[node]
        cuts = [self.cut(v, t) for v, t in zip(node.operands, strategy.operands, strict=True)]
        sizes = [*leaves(list(self._local_arguments(node).values())), *(c.outer for c in cuts if c)]
        return {s for size in sizes if isinstance(size, sympy.Basic) for s in size.free_symbols}  # type: ignore[misc]

    def _local_arguments(self, node: Node) -> dict[str, Any]:
        given = arguments(node)
        rule = lookup(node)
        kind = self.plan.strategies[node].results
        if rule and rule.shape:
            local = self.local_shape(node.results[0], kind[0])
            asked = given[rule.shape]
            keep = len(asked) == len(local)
            given[rule.shape] = tuple(-1 if keep and asked[i] == -1 else s for i, s in enumerate(local))
        if rule and rule.piece:
            dim = given["dim"] % len(node.results[0].shape)
            given[rule.piece] = self.local_shape(node.results[0], kind[0])[dim]
        return given

    def op(self, node: Node, name: Callable[[int], str], axis: str, site: int | str) -> str:
        """The op as a call.

        ``name`` gives the variable of each operand by position, ``site`` the op's place among random ops.
        """
        strategy = self.plan.strategies[node]
        rule = lookup(node)
        positions = iter(range(len(node.operands)))
        by_name = {key: self._text(value, positions, name) for key, value in self._ordered(node).items()}
        fields = {**by_name, "axis": axis, "site": repr(site), "pieces": str(len(node.outputs))}
        for key, value in arguments(node).items():
            fields[f"{key}*"] = by_name[key][1:-1].rstrip(",") if isinstance(value, tuple) else by_name[key]
        position = 0
        for key, value in self._ordered(node).items():
            fields[f"{key}_cut"] = fields[f"{key}_on"] = ""
            if isinstance(value, Value):
                cut = self.cut(value, strategy.operands[position])
                if cut:
                    fields[f"{key}_cut"], fields[f"{key}_on"] = f", {cut.text()}", f", {axis}, {cut.text()}"
            position += sum(isinstance(leaf, Value) for leaf in leaves(value))
        code = strategy.code or (rule.code if rule else None)
        if code is None:
            return self._plain(node, by_name)
        if callable(code) or _INFIX.fullmatch(code):
            loose = {key for key, value in self._ordered(node).items() if _binds_loosely(value, first=key == "self")}
            fields |= {key: f"({by_name[key]})" for key in loose}
        return code(fields) if callable(code) else string.Formatter().vformat(code, (), _Fields(fields))

    def _ordered(self, node: Node) -> dict[str, Any]:
        """Arguments by name, those that hold operands in the operands' order."""
        local = self._local_arguments(node)
        names = [name for name, _ in schema_arguments(node.op)]
        given = [*names[: len(node.args)], *node.kwargs]
        return {**{k: local[k] for k in given}, **{k: v for k, v in local.items() if k not in given}}

    def _plain(self, node: Node, by_name: Mapping[str, str]) -> str:
        """The op by its own name: ``torch.cos(x)`` where torch has such a function, else the overload itself."""
        op = node.op
        positional = [by_name[name] for name, _ in schema_arguments(op)[: len(node.args)]]
        keywords = [f"{key}={by_name[key]}" for key in node.kwargs if key not in ("pin_memory", "layout")]
        namespace, name = schema_name(op)
        gaps = any(
            isinstance(a, tuple) and any(item is None for item in a) for a in node.args
        )  # torch.index_put takes none
        if namespace == "aten" and callable(getattr(torch, name, None)) and not name.startswith("_") and not gaps:
            return f"torch.{name}({', '.join(positional + keywords)})"
        if namespace == "aten" and name in _FUNCTIONAL:
            return f"F.{name}({', '.join(positional + keywords)})"
        return f"torch.ops.{namespace}.{name}.{overload_name(op)}({', '.join(positional + keywords)})"

    def _text(self, value: Any, positions: Any, name: Callable[[int], str]) -> str:
        if isinstance(value, Value):
            return name(next(positions))
        if isinstance(value, tuple | list):
            inner = [self._text(item, positions, name) for item in value]
            return f"({inner[0]},)" if len(inner) == 1 else f"({', '.join(inner)})"
        if isinstance(value, sympy.Basic):
            return size_text(value)  # type: ignore[arg-type]
        if isinstance(value, torch.device):
            return _DEVICE
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            return f'float("{value}")'
        return repr(value)


# Functions of torch.nn.functional that take what the op of their name takes, in the same order.
_FUNCTIONAL = frozenset(
    {
        "silu",
        "gelu",
        "relu",
        "relu6",
        "elu",
        "leaky_relu",
        "hardswish",
        "hardsigmoid",
        "hardtanh",
        "mish",
        "softplus",
        "pad",
        "one_hot",
    }
)


# Templates whose fields stand beside an operator.
_INFIX = re.compile(r"-?\{\w+\}( \S+ \{\w+\})?")


def _binds_loosely(value: Any, *, first: bool) -> bool:
    """Whether an argument's text needs parentheses beside an operator: a compound size, or a negative base."""
    if isinstance(value, sympy.Basic):
        return not value.is_Atom
    return first and isinstance(value, int | float) and value < 0


class _Fields(dict[str, str]):
    def __missing__(self, key: str) -> str:
        raise KeyError(f"the rule's code speaks of {key!r}; the op has {', '.join(self)}")


def _extent(factors: Factors) -> Size:
    total: Size = 1
    for factor in factors:
        total = total * factor.size
    return total


def _divided(size: Size, n: int) -> Size:
    return size // n if isinstance(size, int) else sympy.floor(size / n) if n > 1 else size


def _spaced(text: str) -> str:
    return re.sub(r"(?<![*/])([*/]|//)(?![*/])", r" \1 ", text)


def _floors(text: str) -> str:
    """Sympy's ``floor(seq/4)`` as Python's ``seq//4``."""
    while (start := text.find("floor(")) >= 0:
        depth, end = 1, start + len("floor(")
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        inner = text[start + len("floor(") : end - 1].replace("/", "//")
        alone = start == 0 and end == len(text)
        text = f"{text[:start]}{inner if alone else f'({inner})'}{text[end:]}"
    return text
