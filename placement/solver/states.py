"""What is held between steps, whatever the batch: parameters, their gradients, the optimizer's moments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.graph.ir import Value, numel

if TYPE_CHECKING:
    from placement.solver.bind import Bound

ADAM_STATES = 2  # tensors of a parameter's size and dtype that AdamW keeps: the two moments


def states(bound: Bound, value: Value) -> int:
    """Bytes of a parameter with its gradient and moments, whole; of one without a gradient, its own."""
    return numel(value.shape, bound.hints) * value.dtype.itemsize * (2 + ADAM_STATES if value.requires_grad else 1)


def chosen(bound: Bound) -> frozenset[Value]:
    """The parameters whose placement is left to the solver."""
    return frozenset(v for v, pin in bound.parameters.items() if any(len(kinds or ()) > 1 for kinds in pin.kinds))
