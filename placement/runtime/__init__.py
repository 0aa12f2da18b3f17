"""What emitted code calls: axes, conversions, modules, reductions. Needs only torch."""

from placement.runtime.axis import ALL_REDUCE, KEEP, NONE, Axis, MeshAxis, Step, joint_exchange
from placement.runtime.clip import clip_grad_norm_
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
from placement.runtime.module import Module, buffer, param, tied
from placement.runtime.outputs import Output
from placement.runtime.program import Program
from placement.runtime.simulate import SimulatedAxis, SimulatedMesh, simulate
from placement.runtime.simulated import Simulated
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
    "Module",
    "Output",
    "Program",
    "RankError",
    "Simulated",
    "SimulatedAxis",
    "SimulatedMesh",
    "SizeError",
    "StateError",
    "Step",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "buffer",
    "clip_grad_norm_",
    "invariant",
    "joint_exchange",
    "pad",
    "param",
    "partial",
    "record",
    "reduce_scatter",
    "replicated",
    "simulate",
    "split",
    "tied",
]
