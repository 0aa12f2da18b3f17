"""Ops that would run, and be wrong: those that draw by themselves, and those that behave otherwise in ``eval()``.

A program is captured in training mode and run in both. ``dropout`` and attention's dropout keep a live flag, and the
runtime draws their masks; what else draws would draw differently on each rank, and what else has a training
flag would train for ever.
"""

from __future__ import annotations

from placement.graph._torch import draws_numbers, schema_arguments, schema_name
from placement.graph.ir import Graph, Node
from placement.lang.diagnostics import Diagnostic, PlacementError

_KEPT = {"dropout", "scaled_dot_product_attention", "attention"}  # the runtime draws for these, and knows eval()
_TRAINING = {"train", "training", "use_input_stats"}
_DRAWING = {"feature_dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu", "rrelu_with_noise", "native_dropout"}


def refuse(graph: Graph) -> None:
    """Raise PlacementError (PLC407) with every such op of the graph, at its line of the model."""
    faults = [fault for node in graph.nodes if (fault := _fault(node))]
    if faults:
        raise PlacementError(list(dict.fromkeys(faults)))


def _fault(node: Node) -> Diagnostic | None:
    _, name = schema_name(node.op)
    if name in _KEPT:
        return None
    line = node.source or None
    trains = _argument(node, _TRAINING)
    if trains is True and _argument(node, {"running_mean"}) is not None:
        text = f"'{name}' keeps running statistics, which differ in eval() and by rank"
        hint = "set track_running_stats=False, or use a norm without statistics of the batch"
        return Diagnostic("PLC407", text, hint=hint, model_line=line)
    if trains is False:
        return None
    if name in _DRAWING or draws_numbers(node.op):
        text = f"'{name}' draws random numbers, which would differ by rank"
        hint = "draw outside the model and pass the tensor in, or use nn.Dropout"
        return Diagnostic("PLC407", text, hint=hint, model_line=line)
    return None


def _argument(node: Node, names: set[str]) -> object:
    """The value of the first argument of one of these names, None where there is none."""
    for index, (name, default) in enumerate(schema_arguments(node.op)):
        if name in names:
            return node.kwargs.get(name, node.args[index] if index < len(node.args) else default)
    return None
