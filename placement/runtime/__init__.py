"""What emitted code calls: axes, conversions, modules, reductions. Needs only torch."""

from placement.runtime.axis import ALL_REDUCE, KEEP, NONE, Axis, MeshAxis, Step, joint_exchange
from placement.runtime.cuts import Cut
from placement.runtime.errors import MeshError, RankError, SizeError, StateError
from placement.runtime.exchange import (
    all_gather,
    all_reduce,
    all_to_all,
    invariant,
    pad,
    partial,
    reduce_scatter,
    replicated,
    split,
)
from placement.runtime.simulate import SimulatedAxis, SimulatedMesh, simulate
from placement.runtime.trace import Event, record

__all__ = [
    "ALL_REDUCE",
    "KEEP",
    "NONE",
    "Axis",
    "Cut",
    "Event",
    "MeshAxis",
    "MeshError",
    "RankError",
    "SimulatedAxis",
    "SimulatedMesh",
    "SizeError",
    "StateError",
    "Step",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "invariant",
    "joint_exchange",
    "pad",
    "partial",
    "record",
    "reduce_scatter",
    "replicated",
    "simulate",
    "split",
]
