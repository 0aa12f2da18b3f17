"""What ``strategy`` lines insist on: how an op runs on an axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from placement.graph.ir import Graph, Node, op_name
from placement.lang.diagnostics import Diagnostics, did_you_mean
from placement.lang.spec import Chosen, Name, Pattern, Span, Spec
from placement.rules import Context, Way, lookup, runs_as, strategies
from placement.solver.mesh import Mesh


def insisted(
    graph: Graph, spec: Spec, contexts: Sequence[Context], mesh: Mesh, found: Diagnostics
) -> dict[tuple[Node, int], Way]:
    """The way that lines name for ops, by op and axis.

    A line speaks of all ops with ways inside the modules that its pattern matches. Reports one that matches no such op,
    an unknown name (PLC121), what cannot be done there and why (PLC307), and two lines that disagree (PLC304). On an
    axis of one rank all ways are the same. ``mesh`` knows the orders of blocks.
    """
    chosen = _Chosen(graph, found)
    names = [axis.name for axis in mesh.axes]
    for line in spec.strategies:
        for one in line.ways:
            axis = spec.axis_of(one)
            if axis in names:
                chosen.add(_Part(line.pattern, one), names.index(axis), contexts[names.index(axis)])
    chosen.refuse_groups(contexts, mesh)
    return chosen.ways


@dataclass(frozen=True, slots=True)
class _Part:
    """What a line says of one axis."""

    pattern: Pattern
    chosen: Chosen

    @property
    def name(self) -> Name:
        """The way's."""
        return self.chosen.name


@dataclass(slots=True)
class _Chosen:
    graph: Graph
    found: Diagnostics
    ways: dict[tuple[Node, int], Way] = field(default_factory=dict)
    lines: dict[tuple[Node, int], _Part] = field(default_factory=dict)

    def add(self, line: _Part, index: int, context: Context) -> None:
        """What one line insists on."""
        inside = [path for path in self.graph.modules if line.pattern.matches(path)]
        nodes = [node for node in self.graph.nodes if any(_within(node.module, path) for path in inside)]
        offered = {node: rule.ways for node in nodes if (rule := lookup(node)) is not None and rule.ways}
        known = dict.fromkeys(way.name for ways in offered.values() for way in ways)
        if inside and not offered:
            text = f"nothing in '{line.pattern}' has implementations to choose from"
            hint = "name the module that the op is in, or leave the line out"
            self.found.error("PLC307", text, line.pattern.span, hint=hint)
        elif inside and line.name not in known:
            hint = did_you_mean(str(line.name), list(known)) or f"there is {', '.join(known)}"
            self.found.error("PLC121", f"unknown implementation '{line.name}'", line.name.span, hint=hint)
        for node, ways in offered.items():
            way = next((way for way in ways if way.name == line.name), None)
            if way is not None and not self._take(line, node, index, way, context):
                return  # one cause, told once

    def _take(self, line: _Part, node: Node, index: int, way: Way, context: Context) -> bool:
        earlier = self.lines.setdefault((node, index), line)
        if earlier.name != line.name:
            text = f"'{op_name(node.op)}' in '{node.module}' runs by {line.name} here, by {earlier.name} elsewhere"
            notes = [f"'{earlier.pattern}' at {earlier.pattern.span} speaks of it too"]
            self.found.error("PLC304", text, line.name.span, notes=notes)
            return False
        if context.n == 1:
            return True
        if not any(runs_as(way, node, strategy, context) for strategy in strategies(node, context)):
            text = f"'{op_name(node.op)}' in '{node.module}' cannot run by {way.name}: {way.refused(node, context)}"
            hint = "take the line out: the plan then has what costs least"
            self.found.error("PLC307", text, line.name.span, hint=hint)
            return False
        self.ways[node, index] = way
        return True

    def refuse_groups(self, contexts: Sequence[Context], mesh: Mesh) -> None:
        """Report one implementation on several axes together of which one has its blocks in zigzag order."""
        told: set[Span] = set()
        axes = {index for index, _ in mesh.zigzag}
        for (node, index), way in ((key, way) for key, way in self.ways.items() if key[1] in axes):
            name = _only(node, way, contexts[index])
            runs = [run for i, run in mesh.zigzag if i == index and contexts[i].dims.locate(node.operands[0], run)]  # type: ignore[arg-type]
            others = [i for i in range(len(contexts)) if i != index and (node, i) in self.ways and runs and name]
            for other in (i for i in others if _only(node, self.ways[node, i], contexts[i]) == name):
                span = self.lines[node, other].name.span
                if span not in told:
                    told.add(span)
                    here, there = mesh.axes[index].name, mesh.axes[other].name
                    text = f"'{op_name(node.op)}' in '{node.module}' cannot run by {way.name} on axes '{here}' and "
                    text += f"'{there}' together: their ranks' blocks are in one order, and '{here}' has its in zigzag"
                    hint = f"run it in another way on '{there}', or leave the zigzag order out"
                    self.found.error("PLC307", text, span, hint=hint)


def _only(node: Node, way: Way, context: Context) -> str:
    """The implementation that an axis runs together with others, '' where there is a choice or it only counts."""
    names = {s.implementation for s in strategies(node, context) if runs_as(way, node, s, context)}
    rule = lookup(node)
    counting = {one.name for one in (rule.implementations if rule else ()) if one.counts}
    return names.pop() if len(names) == 1 and not names & counting else ""


def _within(module: str, path: str) -> bool:
    return not path or module == path or module.startswith(f"{path}.")
