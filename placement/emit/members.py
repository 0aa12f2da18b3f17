"""Names that the emitted module cannot have: where a model's member or an axis would hide something of the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import torch

from placement.graph.ir import Graph
from placement.lang.diagnostics import Diagnostic, PlacementError
from placement.lang.spec import Spec
from placement.runtime import Program

# What the root has beyond every nn.Module, as class attributes or once it is compiled.
_ROOT = {n for n in dir(Program) if not hasattr(torch.nn.Module, n)} | {"restore", "plan", "source", "explain"}


def refuse_names(graph: Graph, axes: Mapping[str, int], spec: Spec) -> None:
    """Raise PlacementError (PLC407, PLC112) where a member of the model, or an axis, has a name that is taken."""
    owned = {*graph.modules, *(name for p in graph.parameters for name in p.names)} - {""}
    names = {name.rpartition(".")[2]: name for name in owned}
    faults = [
        Diagnostic("PLC407", f"the model's member '{name}' has a name that the compiled module needs", hint="rename it")
        for name in sorted(owned & _ROOT)
    ]
    spans = {str(axis.name): axis.name.span for axis in spec.axes}
    known = list(dict.fromkeys((*axes, *spans)))
    for axis in known:
        if axis in names or hasattr(Program, axis) or axis == "training":
            what = f"the model's member '{names[axis]}'" if axis in names else "an attribute of every module"
            text = f"axis '{axis}' has the name of {what}"
            hint = "each module has the axis as an attribute: name it otherwise, here and in the mesh"
            faults.append(Diagnostic("PLC112", text, spans.get(axis), hint=hint))
    taken = {name: f"the model's member '{path}'" for name, path in names.items()}
    taken |= {axis: f"axis '{axis}'" for axis in known}
    for group, joined in _groups(known, spec):
        own = f"the group of the axes {', '.join(joined)}"
        if (what := taken.setdefault(group, own)) != own:
            text = f"{own} has the name of {what}"
            hint = f"what axes do together is called by their names, as in {group}: name one of them otherwise"
            faults.append(Diagnostic("PLC112", text, spans.get(group, spans.get(joined[-1])), hint=hint))
    if faults:
        raise PlacementError(faults, spec.sources)


def _groups(known: Sequence[str], spec: Spec) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every set of axes that could do something together, after the name that it has in a program."""
    order = [*(str(axis.name) for axis in spec.axes), *known]
    axes = [name for name in dict.fromkeys(order) if name in known]
    for count in range(2, len(axes) + 1):
        yield from (("_".join(joined), joined) for joined in combinations(axes, count))
