"""Ops, sizes and conversions as Python text, with sizes as they are on one rank."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from sympy.printing.precedence import PRECEDENCE
from sympy.printing.str import StrPrinter

from placement.emit.order import Orders
from placement.graph._torch import overload_name, schema_arguments, schema_name
from placement.graph.ir import Node, Size, Value, leaves
from placement.rules import lookup
from placement.rules.core import arguments, sizes_on_rank
from placement.solver.lengths import Padded
from placement.solver.mesh import Axes, Place
from placement.solver.overlap import ASYNC, chunks, cuts
from placement.solver.plan import Plan, Step, Version
from placement.solver.sums import SUMS
from placement.types import Action, Joint, Kind, Type

_DEVICE = "{device}"


def draws(node: Node) -> bool:
    """Whether the op draws random numbers."""
    given = arguments(node)
    return torch.Tag.nondeterministic_seeded in node.op.tags and given.get("p", given.get("dropout_p")) != 0  # type: ignore[attr-defined]


def size_text(size: Size) -> str:
    """A size over the program's symbols, as an expression over variables of their names."""
    if isinstance(size, int):
        return str(size)
    text = _Sizes().doprint(size)
    return _spaced(text[1:-1] if isinstance(size, sympy.floor) else text)


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

    def _print_CeilToInt(self, expr: sympy.Expr) -> str:  # noqa: N802 - as above
        return f"(-int(-({self._print(expr.args[0])}) // 1))"

    def _print_FloorToInt(self, expr: sympy.Expr) -> str:  # noqa: N802 - as above
        return f"int(({self._print(expr.args[0])}) // 1)"

    def _print_TruncToInt(self, expr: sympy.Expr) -> str:  # noqa: N802 - as above
        return f"int({self._print(expr.args[0])})"

    def _print_ToFloat(self, expr: sympy.Expr) -> str:  # noqa: N802 - as above
        return f"float({self._print(expr.args[0])})"

    def _print_floor(self, expr: sympy.Expr) -> str:
        over, under = sympy.fraction(sympy.together(expr.args[0]))
        while isinstance(over, sympy.floor):  # blocks of blocks: one division by what both divide by
            over, inner = sympy.fraction(sympy.together(over.args[0]))
            under *= inner
        left = self.parenthesize(over, PRECEDENCE["Mul"], strict=True)
        return f"({left}//{self.parenthesize(under, PRECEDENCE['Pow'])})"

    def _print_Max(self, expr: sympy.Expr) -> str:  # noqa: N802 - as above
        return f"max({', '.join(map(self._print, expr.args))})"

    def _print_Min(self, expr: sympy.Expr) -> str:  # noqa: N802 - as above
        return f"min({', '.join(map(self._print, expr.args))})"


def cut_text(cut: Place) -> str:
    """``1``, ``0, batch`` or ``0, segments=(2, 1, 1), zigzag=True``: how a cut is written in calls."""
    outer = "" if cut.outer == 1 else f", {size_text(cut.outer)}"
    segments = f", segments={cut.segments}" if cut.segments else ""
    return f"{cut.dim}{outer}{segments}" + ", zigzag=True" * cut.zigzag


def overlap_text(step: Step) -> str:
    """``, overlap="ring"`` or ``, overlap=4``: how a conversion beside layers is cut, '' where nothing is said."""
    if step.overlap == ASYNC:
        return ""
    count = chunks(step.overlap)
    return f", overlap={count}" if count else f', overlap="{step.overlap}"'


def _listed(cut: Place) -> str:
    """``1``, ``0, batch`` or ``0, 1, (2, 1, 1)``: a cut in a tuple."""
    if cut.zigzag:
        return f"{cut.dim}, {size_text(cut.outer)}, {cut.segments}, True"
    return f"{cut.dim}, {size_text(cut.outer)}, {cut.segments}" if cut.segments else cut_text(cut)


@dataclass(frozen=True, slots=True)
class Printer:
    """Writes the pieces of one plan."""

    plan: Plan
    lengths: Mapping[str, Padded | str] = field(default_factory=dict)  # of dims that are cut inside, see solver.lengths
    orders: Orders = field(default_factory=Orders)

    def axis(self, axes: Axes) -> str:
        """The axis, or group of axes, as an expression in a module."""
        return f"self.{self.plan.mesh.name(axes)}"

    def summing(self, axes: Axes, dtype: torch.dtype | None) -> str:
        """As ``axis``, with sums done in ``dtype`` if one is given."""
        return self.axis(axes) if dtype is None else f"self.{self.summing_name(axes, dtype)}"

    def summing_name(self, axes: Axes, dtype: torch.dtype) -> str:
        """``tp_float32``: a name that no axis has."""
        name = f"{self.plan.mesh.name(axes)}_{str(dtype).removeprefix('torch.')}"
        known = {self.plan.mesh.name(group) for group in self.plan.mesh.groups}
        while name in known or name in self.plan.mesh.sizes:
            name += "_"
        return name

    def cut(self, value: Value, joint: Joint, axes: Axes, others: Axes | None = None) -> Place | None:
        """Where ``axes`` cut a value, None where they do not. ``others``: see ``Mesh.place``."""
        if not joint[axes[0]].over:
            return None
        return self.plan.mesh.place(self.plan.bound.dims, value, joint, axes, others)

    def cuts(self, value: Value, joint: Joint) -> dict[int, Place]:
        """Where each axis cuts a value, one after the other."""
        order = joint.order
        found = ((axis, self.cut(value, joint, (axis,), order[:at])) for at, axis in enumerate(order))
        return {index: cut for index, cut in found if cut is not None}

    def local_shape(self, value: Value, joint: Joint) -> tuple[Size, ...]:
        """The shape of a value on one rank; a cut dynamic size is a floor division."""
        return self.plan.mesh.shape(self.plan.bound.dims, value, joint, value.shape)

    def describe(self, version: Version) -> str:
        """``S(seq)``, or ``S(2)`` where the dim has no name: the same for layers that are alike; ``(S(0), R)``."""
        words = [self._word(version.value, kind) for kind in version.type]
        return words[0] if len(words) == 1 else f"({', '.join(words)})"

    def _word(self, value: Value, kind: Type) -> str:
        if kind.kind is not Kind.S:
            return kind.kind.value
        for name, factors in self.plan.bound.dims.names.items():
            if kind.over[0] in factors and len(factors) == 1:
                return f"S({name})"
        place = self.plan.bound.dims.locate(value, kind.over)  # type: ignore[arg-type]
        return f"S({place[0]})" if place else "S"

    # -- conversions ----------------------------------------------------------------------------

    def step(self, step: Step, source: str) -> tuple[str, str]:
        """A conversion's call and the comment beside it."""
        dual = step.conversion.backward.value
        call = self._call(step, source)
        if step in self.orders.steps:
            call = f"{call[:-1]}, outermost=True)"
        before, after = (self._word(step.value, v.type[step.axes[0]]) for v in (step.source, step.target))
        arrow = f"{before} -> {after}"
        gradient = f"; backward: {dual}" if step.value.requires_grad and dual != "none" else ""
        return call, arrow + gradient

    def layers(self, step: Step, called: Sequence[str], source: str) -> tuple[str, str]:
        """A conversion with the layers that run with it: the call and the comment beside it."""
        plain, comment = self.step(step, source)
        name, _, given = plain.partition("(")
        kept = step.conversion.forward is Action.ALL_GATHER and not step.again and not cuts(step.overlap)
        more = ", kept=True" * kept + overlap_text(step)
        return f"{name}_linears([{', '.join(called)}], {given[:-1]}{more})", comment

    def summed(self, step: Step, called: str, source: str) -> tuple[str, str]:
        """A layer with the sum of its terms: the call and the comment beside it."""
        plain, comment = self.step(step, f"{called}, {source}")
        name, _, given = plain.partition("(")
        return f"{name}_linear({given[:-1]}{overlap_text(step)})", comment

    def _call(self, step: Step, x: str) -> str:
        sums = step.conversion.forward in SUMS or step.conversion.backward in SUMS
        axis = self.summing(step.axes, step.reduce if sums else None)
        before = self.cut(step.value, step.source.type, step.axes)
        after = self.cut(step.value, step.target.type, step.axes)
        kinds = step.conversion.source.value, step.conversion.target.value
        match step.conversion.forward:
            case Action.ALL_REDUCE:
                return f"rt.all_reduce({x}, {axis})"
            case Action.ALL_GATHER if before and step.source.type[step.axes[0]].stored:
                invariant = ', to="I"' if kinds[1] == "I" else ""
                return f"rt.gathered({x}, {axis}, {cut_text(before)}{invariant})"
            case Action.ALL_GATHER if before:
                invariant = ', to="I"' if kinds[1] == "I" else ""
                return f"rt.all_gather({x}, {axis}, {cut_text(before)}{invariant})"
            case Action.REDUCE_SCATTER if after:
                return f"rt.reduce_scatter({x}, {axis}, {cut_text(after)})"
            case Action.ALL_TO_ALL if before and after:
                outers = (
                    "" if before.outer == after.outer == 1 else f", {size_text(before.outer)}, {size_text(after.outer)}"
                )
                segments = f", segments={before.segments}" if before.segments else ""
                segments += f", to_segments={after.segments}" if after.segments else ""
                segments += ", zigzag=True" * before.zigzag + ", to_zigzag=True" * after.zigzag
                return f"rt.all_to_all({x}, {axis}, {before.dim}, {after.dim}{outers}{segments})"
            case Action.SPLIT if after:
                of = ', of="R"' if kinds[0] == "R" else ""
                return f"rt.split({x}, {axis}, {cut_text(after)}{of})"
            case Action.PAD if before:
                return f"rt.pad({x}, {axis}, {cut_text(before)})"
            case Action.KEEP:
                of = ', of="R"' if kinds[0] == "R" else ""
                return f"rt.partial({x}, {axis}{of})"
            case _:
                return f"rt.replicated({x}, {axis})" if kinds == ("I", "R") else f"rt.invariant({x}, {axis})"

    # -- ops ------------------------------------------------------------------------------------

    def sizes_of(self, node: Node) -> set[sympy.Symbol]:
        """The symbols that the op's text speaks of."""
        strategy = self.plan.strategies[node]
        sides = zip(node.operands, strategy.operands, strict=True)
        cuts = [cut for v, joint in sides for cut in self.cuts(v, joint).values()]
        spare = self.spare(node)
        sizes = [*leaves(list(self._local_arguments(node).values())), *(c.outer for c in cuts), *spare]
        return {s for size in sizes if isinstance(size, sympy.Basic) for s in size.free_symbols}  # type: ignore[misc]

    def _local_arguments(self, node: Node) -> dict[str, Any]:
        strategy, rule = self.plan.strategies[node], lookup(node)
        if rule is None or not (rule.shape or rule.piece or rule.pieces or rule.along):
            return arguments(node)
        operand = self.local_shape(node.operands[0], strategy.operands[0]) if node.operands else ()
        results = [self.local_shape(v, joint) for v, joint in zip(node.results, strategy.results, strict=True)]
        return {**arguments(node), **sizes_on_rank(node, operand, results)}

    def op(self, node: Node, name: Callable[[int], str], site: int | str) -> str:
        """The op as a call.

        ``name`` gives the variable of each operand by position, ``site`` the op's place among random ops.
        """
        strategy = self.plan.strategies[node]
        rule = lookup(node)
        positions = iter(range(len(node.operands)))
        by_name = {key: self._text(value, positions, name) for key, value in self._ordered(node).items()}
        leading = strategy.leading or (0,)
        reduce = self.reduce_inside(node)
        fields = {**by_name, "site": repr(site), "pieces": str(len(node.outputs))}
        fields["axis"] = self.summing(leading, reduce)
        fields["longer"] = self._longer(node)
        fields["spare"] = " + ".join(self.spares[symbol] for symbol in self.spare(node))
        others = ((name, axes) for name, axes in strategy.groups().items() if axes != strategy.leading)
        fields |= {name: self.summing(axes, reduce) for name, axes in others}
        for key, value in arguments(node).items():
            fields[f"{key}*"] = by_name[key][1:-1].rstrip(",") if isinstance(value, tuple) else by_name[key]
        position = 0
        for key, value in self._ordered(node).items():
            fields[f"{key}_cut"] = fields[f"{key}_on"] = ""
            if isinstance(value, Value):
                joint = strategy.operands[position]
                cut = self.cut(value, joint, leading)
                fields[f"{key}_cut"] = f", {cut_text(cut)}" if cut else ""
                on = ((self.axis((index,)), _listed(at)) for index, at in self.cuts(value, joint).items())
                fields[f"{key}_on"] = "".join(f", ({axis}, {at})" for axis, at in on)
            position += sum(isinstance(leaf, Value) for leaf in leaves(value))
        code = strategy.code or (rule.code if rule else None)
        if code is None:
            return self._plain(node, by_name)
        if callable(code) or _INFIX.fullmatch(code):
            loose = {key for key, value in self._ordered(node).items() if _binds_loosely(value, first=key == "self")}
            fields |= {key: f"({by_name[key]})" for key in loose}
        text = code(fields) if callable(code) else string.Formatter().vformat(code, (), _Fields(fields))
        return f"{text[:-1]}, outermost=True)" if node in self.orders.lookups else text

    def reduce_inside(self, node: Node) -> torch.dtype | None:
        """The dtype of sums inside the op where a line says it; None where it sums nothing."""
        return next((sent.reduce for sent in self.plan.inside.get(node, ()) if sent.reduce is not None), None)

    @property
    def spares(self) -> dict[sympy.Symbol, str]:
        """By how much dims are padded of whose length ops are told, each with the name of ``forward``'s argument."""
        return {_spare(name): self.spare_name(name) for name, how in self.lengths.items() if _tells(how)}

    def spare_name(self, dim: str) -> str:
        """``seq_spare``: a name that no input and no dim has."""
        graph = self.plan.graph
        given = (*(item.name for item in graph.inputs), *graph.constant_inputs)
        known = {*(name.partition(".")[0] for name in given), *(s.name for s in graph.symbols)}
        name = f"{dim}_spare"
        while name in known:
            name += "_"
        return name

    def spare(self, node: Node) -> tuple[sympy.Symbol, ...]:
        """What an op is told of ``spares``."""
        return tuple(_spare(name) for name, how in self.lengths.items() if isinstance(how, Padded) and node in how.told)

    def _longer(self, node: Node) -> str:
        """The dims of what a random op draws for that may be padded: ``, lengths={1: "seq"}``."""
        known = ((name, how.drawn.get(node, ())) for name, how in self.lengths.items() if isinstance(how, Padded))
        dims = {dim: name for name, found in known for dim in found}
        return f", lengths={dict(sorted(dims.items()))!r}" if dims else ""

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


def _spare(dim: str) -> sympy.Symbol:
    return sympy.Symbol(f"spare of {dim}", integer=True)


def _tells(how: Padded | str) -> bool:
    return isinstance(how, Padded) and bool(how.told)


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


def _spaced(text: str) -> str:
    return re.sub(r"(?<![*/])([*/]|//)(?![*/])", r" \1 ", text)
