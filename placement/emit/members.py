"""Names that the emitted module cannot have: where a model's member or an axis would hide something of the other."""

from __future__ import annotations

from collections.abc import Mapping

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
    for axis in dict.fromkeys((*axes, *spans)):
        if axis in names or hasattr(Program, axis) or axis == "training":
            what = f"the model's member '{names[axis]}'" if axis in names else "an attribute of every module"
            text = f"axis '{axis}' has the name of {what}"
            hint = "each module has the axis as an attribute: name it otherwise, here and in the mesh"
            faults.append(Diagnostic("PLC112", text, spans.get(axis), hint=hint))
    if faults:
        raise PlacementError(faults, spec.sources)
