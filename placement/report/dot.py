"""The explanation as a Graphviz graph: modules as boxes, conversions as labelled arrows between them.

Alike layers are one cluster. Grey lines lead from one conversion to the next in program order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from placement.report.facts import Converted, facts
from placement.report.fold import Block, Item, blocks
from placement.report.units import show_bytes

if TYPE_CHECKING:
    from placement.solver.plan import Plan

_HEAD = """\
digraph placement {
  rankdir = TB;
  compound = true;
  graph [fontname = "Helvetica", fontsize = 12, labeljust = l, style = rounded, color = "#888888"];
  node [fontname = "Helvetica", fontsize = 11, shape = box, style = rounded];
  edge [fontname = "Helvetica", fontsize = 10];
"""


@dataclass(slots=True)
class _Cluster:
    """What is drawn of one block: its boxes by label, and its arrows."""

    nodes: dict[str, str] = field(default_factory=dict[str, str])
    edges: list[str] = field(default_factory=list[str])


def to_dot(plan: Plan) -> str:
    """The plan for ``dot -Tsvg``; the same text for equal plans."""
    found = facts(plan)
    lines = [_HEAD.rstrip("\n")]
    lines.append(f"  label = {_quoted(', '.join(f'{axis} = {n}' for axis, n in found.mesh.items()))};")
    for index, block in enumerate(blocks(found)):
        lines += _cluster(index, block)
    lines.append("}")
    return "\n".join(lines) + "\n"


def _cluster(index: int, block: Block) -> Iterator[str]:
    drawn = _Cluster()
    for item in block.items:
        _draw(drawn, item, f"b{index}")
    _flow(drawn, block)
    count = f" ({len(block.modules)} alike)" if len(block.modules) > 1 else ""
    yield f"  subgraph cluster_{index} {{"
    yield f"    label = {_quoted((block.title or 'the model itself') + count)};"
    yield from (f"    {name} [label = {_quoted(label)}];" for label, name in drawn.nodes.items())
    yield from (f"    {edge};" for edge in drawn.edges)
    yield "  }"


def _node(drawn: _Cluster, label: str, prefix: str) -> str:
    return drawn.nodes.setdefault(label, f"{prefix}_{len(drawn.nodes)}")


def _draw(drawn: _Cluster, item: Item, prefix: str) -> None:
    source = _node(drawn, item.source, prefix)
    target = _node(drawn, item.goal, prefix) if item.goal else source
    words = []
    for row in item.rows:
        both = " | ".join(row.actions)
        sent = f"  {show_bytes(row.nbytes)}" if row.forward or row.backward else ""
        words.append(f"{row.what} @ {row.axis}\n{both}{sent}")
    style = "" if item.launches else ", style = dashed"
    drawn.edges.append(f"{source} -> {target} [label = {_quoted(chr(10).join(words))}{style}]")


def _flow(drawn: _Cluster, block: Block) -> None:
    """Grey lines from where one conversion ends to where the next begins."""
    steps = [item for item in block.items if isinstance(m := item.members[0], Converted) and not m.stored]
    for before, after in pairwise(steps):
        if before.goal != after.source:
            edge = f'{drawn.nodes[before.goal]} -> {drawn.nodes[after.source]} [color = "#bbbbbb", arrowhead = none]'
            drawn.edges.append(edge)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
