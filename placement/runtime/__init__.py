"""What emitted code calls: axes, conversions, modules, reductions. Needs only torch."""

from placement.runtime.attention import capped_attention
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
from placement.runtime.gathers import gathered
from placement.runtime.lengths import Padded
from placement.runtime.linears import Linear, all_gather_linears, replicated_linears
from placement.runtime.lookup import masked_embedding
from placement.runtime.losses import class_parallel_cross_entropy, classes, token_parallel_cross_entropy
from placement.runtime.main_grads import main_grads
from placement.runtime.means import mean
from placement.runtime.module import Module, attention, buffer, dropout, drops, param, summed, tied
from placement.runtime.norms import layer_norm, rms_norm
from placement.runtime.outputs import Output
from placement.runtime.program import Program
from placement.runtime.ring import ring_attention
from placement.runtime.rms import lean_rms_norm
from placement.runtime.rng import seed, steps
from placement.runtime.rows import outermost
from placement.runtime.same_random import same_random
from placement.runtime.simulate import SimulatedAxis, SimulatedMesh, simulate
from placement.runtime.simulated import Simulated
from placement.runtime.sums import all_reduce_linear, reduce_scatter_linear
from placement.runtime.trace import Event, record
from placement.runtime.visible import visible

__all__ = [
    "ALL_REDUCE",
    "KEEP",
    "NONE",
    "Axis",
    "Cut",
    "Event",
    "Linear",
    "MeshAxis",
    "MeshError",
    "Module",
    "Output",
    "Padded",
    "Program",
    "RankError",
    "Simulated",
    "SimulatedAxis",
    "SimulatedMesh",
    "SizeError",
    "StateError",
    "Step",
    "all_gather",
    "all_gather_linears",
    "all_reduce",
    "all_reduce_linear",
    "all_to_all",
    "attention",
    "buffer",
    "capped_attention",
    "class_parallel_cross_entropy",
    "classes",
    "clip_grad_norm_",
    "dropout",
    "drops",
    "gathered",
    "invariant",
    "joint_exchange",
    "layer_norm",
    "lean_rms_norm",
    "main_grads",
    "masked_embedding",
    "mean",
    "outermost",
    "pad",
    "param",
    "partial",
    "record",
    "reduce_scatter",
    "reduce_scatter_linear",
    "replicated",
    "replicated_linears",
    "ring_attention",
    "rms_norm",
    "same_random",
    "seed",
    "simulate",
    "split",
    "steps",
    "summed",
    "tied",
    "token_parallel_cross_entropy",
    "visible",
]
