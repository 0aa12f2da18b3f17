"""A first spec for a model: its dims named, its parameters placed as plans say it pays, every line with its why."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from placement.graph.ir import Graph, Parameter
from placement.lang.diagnostics import Diagnostic, PlacementError, did_you_mean
from placement.lang.format import format_text
from placement.lang.parser import parse
from placement.propose.cuts import bytes_of, placeable, wild
from placement.propose.inputs import Named, captured
from placement.propose.lines import MOST_LINES, Line, block_of, count, joined, parameter_lines, shortened, written
from placement.propose.search import Search
from placement.report.fold import patterns
from placement.report.units import show_bytes, show_time
from placement.solver.bind import Bound, bind, leading, parameter_dims
from placement.solver.build import plan
from placement.solver.nearest import multiples
from placement.solver.plan import Plan

_FILE = "init.plc"
_WIDTH = 100  # of comments that stand alone
_TOKENS = 4096  # prices are for a step of at least so many; a toy's latencies would say that nothing pays


@dataclass(frozen=True, slots=True)
class Scaffold:
    """text: the spec. plan: what the text compiles to. replicated: picoseconds of a step with nothing placed."""

    text: str
    plan: Plan
    replicated: int


def scaffold(
    model: torch.nn.Module,
    axis: str,
    ranks: int,
    *,
    example: Mapping[str, Any] | Sequence[Any],
    sizes: Mapping[str, int] | None = None,
    device_type: str = "cpu",
) -> Scaffold:
    """A spec for ``model`` on one mesh axis of ``ranks``; the model is captured once and may be on the meta device.

    ``sizes`` are those that prices are for, by the names that ``init`` gives to dims. The same model gives the same
    text. Raises PlacementError where the model cannot be captured, or has no dim of a name in ``sizes``.
    """
    graph, named = captured(model, example)
    dims = [symbol.name for symbol in graph.symbols]
    for size in sizes or {}:
        if size not in dims:
            hint = did_you_mean(size, dims) or f"there are {', '.join(dims) or 'none'}"
            raise PlacementError(
                [Diagnostic("PLC103", f"the model's inputs have no dim '{size}' to give a size", hint=hint)]
            )
    priced = {**_ample(graph), **(sizes or {})}
    inputs = _inputs(named)
    bare = parse("".join(f"{line}\n" for line in [f"mesh {axis}", *(f"{i.head} : {i.tail}" for i in inputs)]), _FILE)
    bound = bind(graph, bare, {axis: ranks}, device_type=device_type, sizes=priced)
    found = Search(bound)
    lines = _placed(bound, found)
    text = _text(type(model).__name__, bound, found, inputs, lines)
    final = bind(graph, parse(text, _FILE), {axis: ranks}, device_type=device_type, sizes=priced)
    return Scaffold(text, plan(final, {_FILE: text}), found.replicated)


def _ample(graph: Graph) -> dict[str, int]:
    """Sizes to price: the example's, enlarged where there are few tokens: the longest dim first, as far as it goes."""
    sizes = {symbol.name: symbol.hint for symbol in graph.symbols}
    for symbol in sorted(graph.symbols, key=lambda symbol: -symbol.hint):
        times = -(-_TOKENS // math.prod(sizes.values()))
        if symbol.upper is not None:
            times = min(times, symbol.upper // symbol.hint)
        sizes[symbol.name] *= max(times, 1)
    return sizes


def _inputs(named: Named) -> list[Line]:
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, dims in named.items():
        alike.setdefault(dims, []).append(name)
    return [Line("", "input", ", ".join(names), f"[{', '.join(dims)}]") for dims, names in alike.items()]


# -- lines --------------------------------------------------------------------------------------------


def _placed(bound: Bound, found: Search) -> list[Line]:
    every = [name for parameter in bound.graph.parameters for name in parameter.names]
    order = {wild(name): -index for index, name in reversed(list(enumerate(every)))}

    def position(line: Line) -> int:
        return -max(order[group.wild] for group in line.groups)

    lines = sorted(parameter_lines(found.cuts, bound.mesh.axes[0].name, every), key=position)
    rest = [*_values(bound, found), *_outputs(found)]
    if 2 + count([*lines, *rest]) > MOST_LINES:
        lines = joined(lines)
    n = bound.mesh.axes[0].n
    return [*(replace(line, comment=_why(line, found, n)) for line in lines), *rest]


def _why(line: Line, found: Search, ranks: int) -> str:
    """What a rank does with its block, how much it holds, and what the step would take without the line."""
    held = sum(group.nbytes for group in line.groups)
    text = f"{line.groups[0].role}; {show_bytes(held // ranks)} a rank"
    price = found.left_out(line.groups)
    if not price:
        return text
    return f"{text}, saves {show_time(price)}" if price > 0 else f"{text}, for {show_time(-price)}"


def _values(bound: Bound, found: Search) -> Iterator[Line]:
    for held in found.values:
        block = block_of(held.wild)
        path = held.wild[len(block) + 1 :] if block else held.wild
        why = f"its weight is whole: each rank takes part of {held.dim}, saves {show_time(held.saved)}"
        yield Line(block, "value", path, f"Shard({held.dim}) @ {bound.mesh.axes[0].name}", comment=why)


def _outputs(found: Search) -> Iterator[Line]:
    for kept in found.outputs:
        why = f"stays as it is made: gathering it takes {show_time(kept.saved)}"
        yield Line("", "output", kept.name, "auto", comment=why)


# -- text ---------------------------------------------------------------------------------------------


def _text(model: str, bound: Bound, found: Search, inputs: Sequence[Line], lines: Sequence[Line]) -> str:
    axis, machine, hints = bound.mesh.axes[0], bound.mesh.machine((0,)), bound.hints
    sizes = ", ".join(f"{symbol.name} = {hints[symbol]}" for symbol in hints) or "the example's sizes"
    head = [
        f"# {model} on {axis.n} ranks, written by `placement init`; every line is confirmed by a plan.",
        *_comment(
            f"Times are per step at {sizes} on {machine.device.name} over {machine.link.name}: "
            f"{show_time(found.cost)} as written, {show_time(found.replicated)} with everything replicated."
        ),
    ]
    mesh = f"mesh {axis.name}  # confirmed with --mesh {axis.name}={axis.n}"
    named = [replace(i, comment="every rank is given the whole") for i in inputs[:1]] + [*inputs[1:]]
    if not lines:
        head += _comment("Nothing that could be placed costs less: at other sizes (--size) or on more ranks it may.")
    body = written([line for line in lines if line.keyword != "output"])
    outputs = written([line for line in lines if line.keyword == "output"])
    parts = [
        [*head, mesh],
        written(named),
        body,
        outputs,
        list(_whole(bound, found)),
    ]
    return format_text("\n\n".join("\n".join(part) for part in parts if part), _FILE)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
    )


def _whole(bound: Bound, found: Search) -> Iterator[str]:
    """Comments on what no line places: what could not be cut, and why; then the rest, replicated by default."""
    placed = {value for cut in found.cuts for value in cut.pins}
    rest = [p for p in placeable(bound) if p.value not in placed]
    stuck: dict[str, list[str]] = {}
    for parameter in rest:
        reason = _stuck(bound, parameter)
        if reason:
            stuck.setdefault(reason, []).append(parameter.name)
    for reason, names in stuck.items():
        yield from _comment(f"Whole on every rank, {reason}: {_folded(names)}")
    told = {name for names in stuck.values() for name in names}
    others = [p for p in rest if p.name not in told]
    if others:
        size = show_bytes(sum(map(bytes_of, others)))
        yield from _comment(f"Whole on every rank, {size} in all: {_folded(p.name for p in others)}")


def _stuck(bound: Bound, parameter: Parameter) -> str:
    """Why a matrix cannot be cut in one of its dims, '' where it could be in all of them."""
    own = parameter_dims(bound.graph.modules, parameter)
    n = bound.mesh.axes[0].n
    for dim, factors in enumerate(bound.dims.of(parameter.value)):
        if len(parameter.value.shape) < 2 or not factors or leading(bound.contexts[0], factors) is not None:
            continue
        size = next((f.size for f in factors if not f.piece and f.size != 1), 1)
        if isinstance(size, int):
            spoken = own[dim] if dim < len(own) else f"dim {dim}"
            whole = "·".join(str(f.size) for f in factors)
            return f"since {spoken} is {whole} and {n} does not divide {size} ({multiples(size, n)} would do)"
    return ""


def _folded(names: Iterable[str]) -> str:
    return ", ".join(shortened(pattern) for pattern in patterns(dict.fromkeys(map(wild, names))))
