"""The emitted file: its header, its classes, the root's interface, and ``build`` that makes the module tree."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sympy
import torch

from placement.emit.blocks import Block
from placement.emit.expressions import Printer, cut_text, draws, size_text
from placement.emit.text import WIDTH, class_name, dtype_kind, folded_paths, member
from placement.graph.ir import Parameter, Value
from placement.solver.lengths import parts
from placement.solver.plan import Plan
from placement.solver.sums import SUMS, Bucket
from placement.types import Joint, Kind


@dataclass(frozen=True, slots=True)
class Source:
    """The emitted program: its text, the name of the root class, and the calls that the text makes."""

    text: str
    root: str
    calls: Block


@dataclass(slots=True)
class Class:
    """The text of one class, and the modules that are of it."""

    name: str
    body: str
    base: str = "rt.Module"
    paths: list[str] = field(default_factory=list)
    interfaces: dict[str, None] = field(default_factory=dict)  # "S(seq) -> R", one for each set of types


def is_list(plan: Plan, path: str) -> bool:
    """Whether the module is a list whose items are called one by one; with a ``forward`` it is a module like others."""
    info = plan.graph.modules.get(path)
    if info is None or not issubclass(info.type, torch.nn.ModuleList):
        return False
    return info.type.forward is torch.nn.ModuleList.forward


@dataclass(frozen=True, slots=True)
class File:
    """Everything that stands in the file; ``classes`` in the order of their definition."""

    plan: Plan
    printer: Printer
    classes: Mapping[tuple[str, str], Class]
    class_of: Mapping[str, Class]

    @property
    def symbols(self) -> dict[sympy.Symbol, str]:
        """The names of dynamic sizes."""
        return {s.symbol: s.name for s in self.plan.graph.symbols}

    def text(self, title: str) -> str:
        """The file: imports, classes from the leaves up, ``build``."""
        root = self.class_of[""]
        parts = [self._header(title)]
        for made in self.classes.values():
            doc = (
                f'"""{folded_paths(made.paths)}"""'
                if made is not root
                else f'"""The whole model, on one rank of {_named([a.name for a in self.plan.mesh.axes])}."""'
            )
            attributes = textwrap.indent(self._interface(), "    ") if made is root else ""
            types = next(iter(made.interfaces)) + "\n" if len(made.interfaces) == 1 and any(made.interfaces) else ""
            body = textwrap.indent(types + made.body, "    ")
            parts.append(f"class {made.name}({made.base}):\n    {doc}\n\n{attributes}{body}")
        parts.append(self._build())
        return "\n\n\n".join(parts) + "\n"

    def _header(self, title: str) -> str:
        graph = self.plan.graph
        model = class_name(graph.modules[""].type)
        source = f" from {title}" if title else ""
        axes = [f"{axis.name} of {axis.n}" for axis in self.plan.mesh.axes]
        about = f"{model} on {'a mesh axis' if len(axes) == 1 else 'mesh axes'} {_named(axes)}, by placement{source}."
        return (
            f'"""{about}\n\n'
            "Types: I the same on every rank, R the same and used differently, P a term of a sum, S(dim) a block.\n"
            '"""\n\n'
            "import torch\nfrom torch.nn import functional as F\n\nfrom placement import runtime as rt"
        )

    def _interface(self) -> str:
        plan = self.plan
        inputs = []
        for item in plan.graph.inputs:
            dims = tuple(
                s if isinstance(s, int) else s.name if isinstance(s, sympy.Symbol) else None for s in item.value.shape
            )
            layout = self._layout(item.value, plan.produced[item.value])
            kind = dtype_kind(item.value.dtype)
            gradient = f", {item.value.requires_grad}" if kind == "float" else ""
            inputs.append(f"    {item.name!r}: ({dims!r}, {layout}, {kind!r}{gradient}),")
        outputs = [
            f"    {output.name!r}: {self._layout(output.value, plan.uses[output, 0].type)},"
            for output in plan.graph.outputs
            if output.value is not None
        ]
        cut = parts(plan)
        divides = {name: cut[symbol] for symbol, name in self.symbols.items() if symbol in cut}
        hooks: dict[str, list[Bucket]] = {}
        for bucket in plan.buckets():
            name = bucket.axis if bucket.reduce is None else self.printer.summing_name(bucket.axes, bucket.reduce)
            hooks.setdefault(name, []).append(bucket)
        lines = [f"axes = {dict(plan.mesh.sizes)!r}"]
        if groups := self._groups():
            lines.append(f"groups = {groups!r}  # axes that are reduced or gathered over together")
        if reduces := self._reduces():
            lines += ["reduces = {  # axes over which sums are done in another dtype", *reduces, "}"]
        lines += ["inputs = {", *inputs, "}", "outputs = {", *outputs, "}"]
        if lengths := self._lengths():
            lines.append(f"lengths = {lengths!r}  # of dims that are padded inside")
        if divides:
            lines.append(f"divides = {divides!r}  # sizes that are cut into equal blocks")
        lines += self._uneven()
        if any(kind.stored for parameter in plan.graph.parameters for kind in plan.produced[parameter.value]):
            lines.append("gathers = True  # parameters are kept in blocks, and gathered again in backward")
        if any(map(draws, plan.graph.nodes)):
            lines.append("draws = True  # random numbers, in training")
        if plan.graph.training_only:
            lines.append(
                f"training_only = {plan.graph.training_only!r}  # branches on `training`, taken as in training"
            )
        if plan.graph.size_guards:
            lines.append(f"requires = {plan.graph.size_guards!r}  # the model branches on sizes; this branch was taken")
        if hooks:
            lines.append("hooks = {  # their gradients are summed over the axis, those in one tuple together")
            for axis, made in hooks.items():
                lines.append(f"    {axis!r}: (")
                for bucket in made:
                    names = (f"            {hook.parameter.name!r}," for hook in bucket.hooks)
                    lines += ["        (", *names, "        ),"]
                lines.append("    ),")
            lines.append("}")
        if not any(plan.produced[i.value].over for i in plan.graph.inputs) or not divides:
            lines.append("same_blocks = False  # no collective needs the ranks' inputs to be of one size")
        return "\n".join(lines) + "\n\n"

    def _uneven(self) -> list[str]:
        """What a call does where a size does not divide."""
        found: list[str] = []
        for name, how in self.printer.lengths.items():
            if isinstance(how, str):
                lines = textwrap.wrap(how, WIDTH - 16, drop_whitespace=False)
                found += [f"    {name!r}: (", *(f"        {line!r}" for line in lines), "    ),"]
                continue
            inputs = {key: int(value) if value == int(value) else value for key, value in how.inputs.items()}
            given = [f"{inputs!r}", f"{dict(how.outputs)!r}"]
            given += [f"least={how.least}"] if how.least > 1 else []
            given += [f"most={how.most}"] if how.most is not None else []
            given += [f"told={self.printer.spare_name(name)!r}"] if how.told else []
            found.append(f"    {name!r}: rt.Padded({', '.join(given)}),")
        return ["uneven = {  # where they do not divide: padded inside, or refused", *found, "}"] if found else []

    def _lengths(self) -> dict[str, dict[int, int]]:
        """By output and dim, how long it is where the program has it longer."""
        found: dict[str, dict[int, int]] = {}
        for output in self.plan.graph.outputs:
            if output.value is not None and output.given is not None:
                pairs = enumerate(zip(output.given, output.value.shape, strict=True))
                found[output.name] = {dim: int(own) for dim, (own, size) in pairs if own != size}
        return found

    def _layout(self, value: Value, joint: Joint) -> str:
        """How a value lies: a cut, "P" or None where there is one axis, else by axis name."""
        cuts = self.printer.cuts(value, joint)
        names = [axis.name for axis in self.plan.mesh.axes]
        terms = {i: '"P"' for i, kind in enumerate(joint) if kind.kind is Kind.P}
        how = {**terms, **{i: f"rt.Cut({cut_text(cut)})" for i, cut in cuts.items()}}
        if len(names) == 1:
            return how.get(0, "None")
        return "{" + ", ".join(f"{names[i]!r}: {text}" for i, text in how.items()) + "}" if how else "None"

    def _groups(self) -> dict[str, tuple[str, ...]]:
        """The groups of axes that anything is done over."""
        plan = self.plan
        inside = (group for s in plan.strategies.values() if s.leading for group in s.groups().values())
        used = dict.fromkeys((*(s.axes for s in plan.steps), *inside))
        axes = plan.mesh.axes
        return {plan.mesh.name(group): tuple(axes[i].name for i in group) for group in used if len(group) > 1}

    def _reduces(self) -> list[str]:
        """The axes, by the names that calls have for them, with the dtypes of sums."""
        plan, printer = self.plan, self.printer
        steps = ((s.axes, s.reduce) for s in plan.steps if {s.conversion.forward, s.conversion.backward} & {*SUMS})
        ops = (
            (axes, printer.reduce_inside(node)) for node, s in plan.strategies.items() for axes in s.groups().values()
        )
        found = dict.fromkeys((axes, dtype) for axes, dtype in (*steps, *ops) if dtype is not None)
        names = ((printer.summing_name(axes, dtype), plan.mesh.name(axes), dtype) for axes, dtype in found)
        return [f"    {name!r}: ({axis!r}, {dtype})," for name, axis, dtype in sorted(names, key=lambda row: row[0])]

    def _build(self) -> str:
        tree = self._constructor("", 1)
        return (
            "def build(mesh, reduce_dtype=None):\n"
            '    """The program on a mesh, without data: load_full_state_dict brings it."""\n'
            f"    return {tree}.on(mesh, reduce_dtype)"
        )

    def _constructor(self, path: str, depth: int) -> str:
        """The expression that makes the module at ``path`` with all below it."""
        members = [*self._own_tensors(path), *self._children(path, depth)]
        made = self.class_of.get(path)
        name = made.name if made else "rt.Module"
        inside = ", ".join(members)
        if not any(len(line) > WIDTH - 4 * depth for line in f"{name}({inside})".split("\n")) and "\n" not in inside:
            return f"{name}({inside})"
        pad = "    " * (depth + 1)
        return f"{name}(\n" + "".join(f"{pad}{member},\n" for member in members) + "    " * depth + ")"

    def _own_tensors(self, path: str) -> list[str]:
        found = []
        for parameter in self.plan.graph.parameters:
            for position, name in enumerate(parameter.names):
                owner, _, leaf = name.rpartition(".")
                if owner != path:
                    continue
                text = f"rt.tied({parameter.name!r})" if position else self._declaration(parameter)
                found.append(member(leaf, text))
        return found

    def _declaration(self, parameter: Parameter) -> str:
        value = parameter.value
        options = [] if value.dtype == torch.float32 else [f"dtype={value.dtype}"]
        joint = self.plan.produced[value]
        options += [f"cut={self._layout(value, joint)}"] if joint.over else []
        if parameter.is_buffer:
            options += [] if parameter.persistent else ["persistent=False"]
        elif not value.requires_grad:
            options.append("trainable=False")
        if parameter.given is not None:
            options.append(f"given={parameter.given}")
        shape = [size_text(s) for s in value.shape]
        return f"rt.{'buffer' if parameter.is_buffer else 'param'}({', '.join([*shape, *options])})"

    def _children(self, path: str, depth: int) -> list[str]:
        children: dict[str, str] = {}
        for full in self.plan.graph.modules:
            owner, _, name = full.rpartition(".")
            if owner == path and full:
                children[name] = full
        found = []
        for name, full in children.items():
            if is_list(self.plan, full) and name.isidentifier():
                found.append(f"{name}={self._list(full, depth + 1)}")
            else:
                found.append(member(name, self._constructor(full, depth + 1)))
        return found

    def _list(self, path: str, depth: int) -> str:
        items = [full for full in self.plan.graph.modules if full.rpartition(".")[0] == path and full != path]
        texts = [self._constructor(item, depth + 1) for item in items]
        if len(texts) > 1 and len(set(texts)) == 1:
            pad = "    " * (depth + 1)
            return f"[\n{pad}{texts[0]}\n{pad}for _ in range({len(texts)})\n{'    ' * depth}]"
        if not texts:
            return "[]"
        pad = "    " * (depth + 1)
        return "[\n" + "".join(f"{pad}{text},\n" for text in texts) + "    " * depth + "]"


def _named(words: Sequence[str]) -> str:
    """``dp, cp and tp``."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
