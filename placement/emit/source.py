"""Blocks to Python: a class per repeated structure, and ``build`` that makes the module tree.

Two module calls whose forward reads the same share a class. A module whose calls read differently is
part of its callers. What a person reads is what runs: the compiler executes this very text.
"""

from __future__ import annotations

import inspect
import keyword
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
from torch.utils import _pytree as pytree

from placement.emit.blocks import Block, nested, owned, uses_of
from placement.emit.expressions import Printer, draws
from placement.emit.file import Class, File, Source, is_list
from placement.emit.layers import Layer, Layers, child_of, layer_calls
from placement.emit.order import orders
from placement.emit.text import WIDTH, class_name, commented, fixed, held, merged, returned, structure
from placement.graph.example import key_text
from placement.graph.ir import Call, Node, Value
from placement.graph.rows import LINEAR
from placement.solver.fusion import fused
from placement.solver.lengths import padded
from placement.solver.plan import Plan, Step, Version
from placement.types import Kind


def write(plan: Plan, title: str = "") -> Source:
    """The whole program of a plan as Python text that needs only torch and ``placement.runtime``."""
    plan = fused(plan)
    inlined: frozenset[Call] = frozenset()
    printer = Printer(plan, padded(plan))
    found = orders(plan, lambda version, step: printer.cut(version.value, version.type, step.axes))
    printer = replace(printer, orders=found)
    while True:
        root = nested(plan, inlined)
        layers = layer_calls(plan, root)
        if layers.unfit:
            inlined |= layers.unfit
            continue
        writer = _Writer(printer, root, layers)
        different = writer.classes()
        if not different:
            text = File(plan, writer.printer, writer.found, writer.class_of).text(title)
            return Source(text, writer.class_of[""].name, writer.root)
        inlined |= different


@dataclass(slots=True)
class _Scope:
    """Variables of one forward."""

    names: dict[Version, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    symbols: dict[sympy.Symbol, str] = field(default_factory=dict)

    def fresh(self, base: str) -> str:
        base = re.sub(r"\W", "_", base)
        base = f"_{base}" if not base or base[0].isdigit() else base
        base = f"{base}_" if keyword.iskeyword(base) or base in ("self", "rt", "torch", "F") else base
        name, count = base, 1
        while name in self.taken:
            count += 1
            name = f"{base}_{count}"
        self.taken.add(name)
        return name


class _Writer:
    def __init__(self, printer: Printer, root: Block, layers: Layers) -> None:
        self.plan = plan = printer.plan
        self.root = root
        self.printer = printer
        self.parameters = {p.value: p for p in plan.graph.parameters}
        self.symbols = {**{s.symbol: s.name for s in plan.graph.symbols}, **printer.spares}
        self.sites = _sites(plan)
        self.needs: dict[Block, list[sympy.Symbol]] = {}
        self.found: dict[tuple[str, str], Class] = {}
        self.class_of: dict[str, Class] = {}
        self.layers = layers

    # -- classes --------------------------------------------------------------------------------

    def classes(self) -> frozenset[Call]:
        """Write every block's class; returns calls that read differently from the module's first."""
        different: set[Call] = set()
        for block in self._bottom_up(self.root):
            if block is not self.root and self.class_of.get(block.path) is not None and block.call.index == 0:
                different.add(block.call)
                continue
            layer = self.layers.calls.get(block)
            body = self._operands(block, layer) if layer else self._forward(block)
            comment = self._interface_comment(block)
            original = class_name(self.plan.graph.modules[block.path].type)
            known = self.class_of.get(block.path)
            if known is not None and known.body != body:
                different.add(block.call)
                continue
            made = self.found.get((original, body))
            if made is None:
                count = sum(1 for name, _ in self.found if name == original)
                base = "rt.Program" if block is self.root else "rt.Linear" if layer else "rt.Module"
                made = Class(original if not count else f"{original}{count + 1}", body, base)
                self.found[original, body] = made
            made.interfaces.setdefault("\n".join(comment))
            self.class_of[block.path] = made
            if block.path not in made.paths:
                made.paths.append(block.path)
        return frozenset(different)

    def _bottom_up(self, block: Block) -> list[Block]:
        found = []
        for entry in block.entries:
            if isinstance(entry, Block):
                found += self._bottom_up(entry)
        return [*found, block]

    # -- sizes ----------------------------------------------------------------------------------

    def _symbols_of(self, block: Block) -> list[sympy.Symbol]:
        """Symbols that the block's own lines, or children that cannot find them themselves, speak of."""
        wanted: set[sympy.Symbol] = set()
        for entry in block.entries:
            if isinstance(entry, Block):
                wanted |= set(self._passed(entry))
            elif isinstance(entry, Node):
                wanted |= self.printer.sizes_of(entry)
            else:
                for version in (entry.source, entry.target):
                    cut = self.printer.cut(version.value, version.type, entry.axes)
                    if cut is not None and isinstance(cut.outer, sympy.Basic):
                        wanted |= cut.outer.free_symbols  # type: ignore[arg-type]
        return sorted(wanted, key=str)

    def _passed(self, block: Block) -> list[sympy.Symbol]:
        """Symbols that the block has to be given as numbers: none of its tensors has such a dim."""
        if block not in self.needs:
            self.needs[block] = [s for s in self._symbols_of(block) if self._found_in(s, self._tensors(block)) is None]
        return self.needs[block]

    def _tensors(self, block: Block) -> Sequence[Version]:
        return block.takes if block is not self.root else [self._input(i.value) for i in self.plan.graph.inputs]

    def _input(self, value: Value) -> Version:
        return Version(value, self.plan.produced[value])

    def _found_in(self, symbol: sympy.Symbol, versions: Sequence[Version]) -> tuple[Version, int, list[int]] | None:
        """A tensor and a dim whose size is the symbol, and the axes that cut it: whole if there is one."""
        best = None
        for version in versions:
            cuts = self.printer.cuts(version.value, version.type)
            for dim, size in enumerate(version.value.shape):
                if size == symbol:
                    by = [index for index, cut in cuts.items() if cut.dim == dim]
                    if not by:
                        return version, dim, by
                    best = best or (version, dim, by)
        return best

    # -- forward --------------------------------------------------------------------------------

    def _forward(self, block: Block) -> str:
        scope = _Scope(taken={"self"})
        arguments = self._arguments(block, scope)
        lines = []
        if block is self.root:
            lines += self._unpack(scope)
        for symbol in self._symbols_of(block):
            place = self._found_in(symbol, self._tensors(block))
            name = self.symbols[symbol]
            if place is None:
                continue
            version, dim, by = place
            scope.taken.add(name)
            times = "".join(f" * {self.printer.axis((index,))}.size" for index in by)
            lines.append(f"{name} = {scope.names[version]}.size({dim}){times}")
        lines += self._body(block, scope)
        lines.append(self._return(block, scope))
        head = f"def forward({', '.join(['self', *arguments])}):"
        if len(head) + 4 > WIDTH:
            head = "def forward(\n    " + ", ".join(["self", *arguments]) + "\n):"
        lines = returned(merged(lines))
        return "\n".join([head, *(textwrap.indent(line, "    ") for line in lines)])

    def _operands(self, block: Block, layer: Layer) -> str:
        """What a layer multiplies with, in place of its ``forward``."""
        scope = _Scope(taken={"self"})
        lines = [self._step_line(step, block, scope, ends=False) for step in layer.steps]
        weight = self._weight(layer.product, block, scope)
        biased = len(layer.product.operands) > 2
        bias = self._name(self.plan.uses[layer.product, 2], block, scope) if biased else None
        lines = ["def operands(self):", *lines, f"return {weight}, {bias}"]
        return "\n    ".join(lines)

    def _weight(self, product: Node, block: Block, scope: _Scope) -> str:
        """The weight [out, in] of a linear layer."""
        weight = self._name(self.plan.uses[product, 1], block, scope)
        return f"{weight}.t()" if product.op is LINEAR else weight

    def _interface_comment(self, block: Block) -> list[str]:
        if block is self.root or not block.gives:
            return []
        takes = ", ".join(self.printer.describe(v) for v in block.takes)
        gives = ", ".join(self.printer.describe(v) for v in block.gives)
        return textwrap.wrap(f"{takes} -> {gives}", WIDTH - 8, initial_indent="# ", subsequent_indent="# ")

    def _arguments(self, block: Block, scope: _Scope) -> list[str]:
        if block is self.root:
            return self._root_arguments(scope)
        info = self.plan.graph.modules[block.path]
        given = {value: name for name, value in info.arguments.get(block.call.index, {}).items()}
        positional = _forward_names(info.type)
        names = []
        for symbol in self._passed(block):
            scope.taken.add(self.symbols[symbol])
        for version in block.takes:
            base = given.get(version.value) or self._base_name(version.value)
            match = re.fullmatch(r"argument_(\d+)", base)
            if match:
                base = positional[int(match[1])] if int(match[1]) < len(positional) else "x"
            scope.names[version] = scope.fresh(base)
            names.append(scope.names[version])
        return [*names, *(self.symbols[s] for s in self._passed(block))]

    def _base_name(self, value: Value) -> str:
        if value in self.parameters:
            return "_".join(self.parameters[value].name.split(".")[-2:])
        base = re.sub(r"(_\d+)+$", "", value.name.removesuffix("_product")) or value.name
        return _PLAIN.get(base, base)

    def _body(self, block: Block, scope: _Scope) -> list[str]:
        last = self._last_uses(block)
        lines: list[str] = []
        done: set[Node | Step | Block] = set()
        for position, entry in enumerate(block.entries):
            if entry in done:
                continue
            if not isinstance(entry, Step) and entry in self.layers.sums:
                lines.append(self._sum_line(entry, block, scope))
                done.add(self.layers.sums[entry])
            elif isinstance(entry, Step) and entry.layers:
                lines += self._layer_lines(entry, block, scope, done)
            elif isinstance(entry, Node):
                lines.append(self._op_line(entry, block, scope))
            elif isinstance(entry, Step):
                lines.append(self._step_line(entry, block, scope, last.get(entry.source) == position))
            else:
                lines.append(self._call_line(entry, block, scope, last, position))
        return lines

    def _last_uses(self, block: Block) -> dict[Version, int]:
        last = {v: i for i, entry in enumerate(block.entries) for v in uses_of(self.plan, entry)}
        ends = len(block.entries)
        final = (
            block.gives
            if block is not self.root
            else [self.plan.uses[o, 0] for o in self.plan.graph.outputs if o.value]
        )
        return {**last, **dict.fromkeys(final, ends)}

    def _name(self, version: Version, block: Block, scope: _Scope) -> str:
        if version in scope.names:
            return scope.names[version]
        parameter = self.parameters[version.value]
        relative = owned(parameter.names, block.path)
        assert relative is not None
        return f"self.{self._member(block.path, relative)}"

    def _member(self, base: str, relative: str) -> str:
        """``layers.0.norm`` as an expression below the module at ``base``: ``layers[0].norm``."""
        text, path = "", base
        for part in relative.split("."):
            if part.isdigit() and is_list(self.plan, path):
                text += f"[{part}]"
            elif part.isidentifier() and not keyword.iskeyword(part):
                text += f".{part}" if text else part
            else:
                return f"get_submodule({relative!r})"
            path = f"{path}.{part}" if path else part
        return text

    def _site(self, node: Node, block: Block) -> int | str:
        """Which of its module's random ops this is, as ``runtime.rng`` counts them; from a caller, with the path."""
        site = self.sites.get(node, 0)
        if node.module == block.path:
            return site
        return f"{node.module.removeprefix(f'{block.path}.') if block.path else node.module}:{site}"

    def _op_line(self, node: Node, block: Block, scope: _Scope) -> str:
        site = self._site(node, block)
        text = self.printer.op(node, lambda i: self._name(self.plan.uses[node, i], block, scope), site)
        text = text.replace("{device}", f"{self.printer.axis((0,))}.device")
        targets = []
        for value in node.outputs:
            if value is None:
                targets.append("_")
                continue
            version = Version(value, self.plan.produced[value])
            scope.names[version] = scope.fresh(self._base_name(value))
            targets.append(scope.names[version])
        return f"{', '.join(targets)} = {text}"

    def _step_line(self, step: Step, block: Block, scope: _Scope, ends: bool) -> str:
        source = self._name(step.source, block, scope)
        axis = self.printer.summing(step.axes, step.reduce)
        parameter = self.parameters.get(step.value) if step.sums_gradient and step.source not in scope.names else None
        if parameter is not None:
            call = f'rt.summed(self, "{owned(parameter.names, block.path)}", {axis})'
            comment = "I -> R; backward: all_reduce, with the other hooks"
        else:
            call, comment = self.printer.step(step, source)
        if ends and "." not in source:
            target = source
        else:
            base = source.rsplit(".", 1)[-1] if "." in source else re.sub(r"_\d+$", "", source)
            target = scope.fresh(base if "." in source else f"{base}_{_SUFFIX[step.conversion.target]}")
        scope.names[step.target] = target
        return commented(f"{target} = {call}", comment)

    def _layer_lines(self, step: Step, block: Block, scope: _Scope, done: set[Node | Step | Block]) -> list[str]:
        """The call of layers with the conversion of their input; what it stands for is then ``done``."""
        lines: list[str] = []
        layers: list[tuple[str, Version, str]] = []  # what is called, what it gives and the base of its name
        for node in step.layers:
            child = child_of(block, node)
            if child is not None:
                relative = child.path[len(block.path) + 1 :] if block.path else child.path
                called = f"self.{self._member(block.path, relative)}"
                layers.append((called, child.gives[0], _last_word(relative)))
                done.add(child)
                continue
            for own in (e for e in block.entries if isinstance(e, Step) and e.value in node.operands[1:]):
                if own not in done and own.target not in scope.names:  # what makes the weight comes first
                    lines.append(self._step_line(own, block, scope, ends=False))
                    done.add(own)
            (result,) = node.results
            weight = self._weight(node, block, scope)
            if len(node.operands) > 2:
                weight = f"({weight}, {self._name(self.plan.uses[node, 2], block, scope)})"
            layers.append((weight, Version(result, self.plan.produced[result]), self._base_name(result)))
            done.add(node)
        source = self._name(step.source, block, scope)
        call, comment = self.printer.layers(step, [called for called, _, _ in layers], source)
        for _, version, base in layers:
            scope.names[version] = scope.fresh(base)
        targets = ", ".join(scope.names[version] for _, version, _ in layers)
        return [*lines, commented(f"{targets if len(layers) > 1 else f'[{targets}]'} = {call}", comment)]

    def _sum_line(self, entry: Node | Block, block: Block, scope: _Scope) -> str:
        """The call of a layer with the sum of its terms."""
        step = self.layers.sums[entry]
        if isinstance(entry, Block):
            relative = entry.path[len(block.path) + 1 :] if block.path else entry.path
            called, base, source = f"self.{self._member(block.path, relative)}", _last_word(relative), entry.takes[0]
        else:
            called, base = self._weight(entry, block, scope), self._base_name(step.value)
            source = self.plan.uses[entry, 0]
        call, comment = self.printer.summed(step, called, self._name(source, block, scope))
        scope.names[step.target] = scope.fresh(base)
        return commented(f"{scope.names[step.target]} = {call}", comment)

    def _call_line(self, entry: Block, block: Block, scope: _Scope, last: Mapping[Version, int], position: int) -> str:
        arguments = [self._name(v, block, scope) for v in entry.takes] + [self.symbols[s] for s in self._passed(entry)]
        relative = entry.path[len(block.path) + 1 :] if block.path else entry.path
        call = f"self.{self._member(block.path, relative)}({', '.join(arguments)})"
        targets = []
        for index, version in enumerate(entry.gives):
            first = entry.takes[0] if entry.takes else None
            carried = (
                index == 0
                and first is not None
                and last.get(first) == position
                and first.value.shape == version.value.shape
                and relative.rsplit(".", 1)[-1].isdigit()  # layers one after the other: one variable, and a loop
                and "." not in self._name(first, block, scope)
            )
            base = _last_word(relative) if index == 0 else self._base_name(version.value)
            scope.names[version] = self._name(first, block, scope) if carried and first else scope.fresh(base)
            targets.append(scope.names[version])
        return f"{', '.join(targets)} = {call}" if targets else call

    def _return(self, block: Block, scope: _Scope) -> str:
        if block is self.root:
            return f"return {self._root_result(scope)}"
        return f"return {', '.join(scope.names[v] for v in block.gives)}"

    # -- root -----------------------------------------------------------------------------------

    def _root_arguments(self, scope: _Scope) -> list[str]:
        """``forward``'s arguments; those that hold no tensor have the example's value as their default."""
        given = self._given()
        order = _forward_names(self.plan.graph.modules[""].type)
        names = sorted(given, key=lambda n: order.index(n) if n in order else len(order))
        scope.taken.update(names)
        for item in self.plan.graph.inputs:
            if item.name in names:
                scope.names[self._input(item.value)] = item.name
        found: list[str] = []
        for name in names:
            if fixed(given[name]):
                found.append(f"{name}={given[name]!r}")
                continue
            if "*" not in found and any("=" in text for text in found):
                found.append("*")  # Python has no argument without a default after one that has it
            found.append(name)
        spares = list(self.printer.spares.values())
        scope.taken.update(spares)
        return [*found, *(f"{name}=0" for name in spares)]

    def _given(self) -> dict[str, Any]:
        """The example's arguments by name, with ``...`` in place of tensors."""
        graph = self.plan.graph
        flat = pytree.tree_unflatten(list(range(graph.in_spec.num_leaves)), graph.in_spec)
        constants = graph.constant_inputs

        def value(path: Any, _: int) -> Any:
            return constants.get(".".join(key_text(key) for key in path[1:]), ...)

        _, kwargs = pytree.tree_map_with_path(value, flat)
        return kwargs

    def _unpack(self, scope: _Scope) -> list[str]:
        """Tensors that come inside containers get variables of their own; all else is held to the example's value."""
        lines = []
        for item in self.plan.graph.inputs:
            if self._input(item.value) in scope.names:
                continue
            first, *rest = item.name.split(".")
            path = "".join(f"[{part}]" if part.isdigit() else f"[{part!r}]" for part in rest)
            name = scope.fresh(item.name)
            scope.names[self._input(item.value)] = name
            lines.append(f"{name} = {first}{path}")
        for name, value in self._given().items():
            lines = [*held(name, value), *lines]
        return lines

    def _root_result(self, scope: _Scope) -> str:
        texts = []
        for output in self.plan.graph.outputs:
            if output.value is None:
                texts.append(repr(output.constant))
            else:
                texts.append(self._name(self.plan.uses[output, 0], self.root, scope))
        return structure(self.plan.graph.out_spec, iter(texts))


_SUFFIX = {Kind.I: "whole", Kind.R: "shared", Kind.P: "partial", Kind.S: "block"}


# Variables named after ops whose names Python has for something else, or that are long.
_PLAIN = {
    "pow": "power", "slice": "part", "sum": "total", "max": "largest", "min": "smallest", "abs": "size",
    "and": "both", "or": "either", "any": "some", "all": "every", "eq": "equal", "le": "before", "ne": "differs",
    "scaled_dot_product_attention": "attended", "attention": "attended",
    "cross_entropy_loss": "loss", "masked_fill": "filled",
    "addmm": "projected", "linear": "projected", "mm": "projected",
}  # fmt: skip


def _sites(plan: Plan) -> dict[Node, int]:
    """The number of each random op among those that its module does in a step, over all calls of the module."""
    counts: dict[str, int] = {}
    sites: dict[Node, int] = {}
    for node in plan.graph.nodes:
        if draws(node):
            sites[node] = counts.get(node.module, 0)
            counts[node.module] = sites[node] + 1
    return sites


def _last_word(path: str) -> str:
    """``q_proj`` of ``self_attn.q_proj``; of an item of a list all of it."""
    word = path.rsplit(".", 1)[-1]
    return path.replace(".", "_") if word.isdigit() else word


def _forward_names(kind: type) -> list[str]:
    try:
        parameters = inspect.signature(kind.forward).parameters  # type: ignore[attr-defined]
    except (TypeError, ValueError, AttributeError):
        return []
    return [name for name in parameters if name != "self"]
