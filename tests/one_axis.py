"""A mesh of one axis, as binding a spec makes it, for tests of what works without a spec."""

from __future__ import annotations

from placement.solver.cost import defaults
from placement.solver.mesh import Axis, Mesh


def one_axis(n: int) -> Mesh:
    """An axis ``tp`` of ``n`` ranks of the host."""
    device, link = defaults("cpu")
    return Mesh((Axis("tp", n),), device, (link,))
