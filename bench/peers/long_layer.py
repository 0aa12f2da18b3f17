"""One decoder layer whose ranks have their tokens: what plans of it cost, send, keep and make."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import placement
from bench.peers.long_sides import contiguous, zigzag
from placement.api import read
from placement.graph.capture import capture
from placement.graph.ir import Graph
from placement.report import explain_data
from placement.rules import lookup, runs_as
from placement.runtime import record, simulate
from placement.solver.bind import bind
from placement.solver.build import plan
from placement.solver.plan import Plan
from tests.memory.saved_hooks import kept_bytes

WAYS = ("gather", "all_to_all", "ring")
WHOLE = "whole"
QUICK = "link quick = 10 GB/s, 1 ns\nmesh cp over quick"  # launches that cost would be all, of so few tokens
ZIGZAG = "Shard(seq, zigzag)"
# Not the way of attention alone: linear layers, too, work on a rank's own tokens. What a gather takes is left open.
PINNED = """
within layers.* {{
  value self_attn.{{q,o}}_proj : {seq} @ cp
  value mlp.{{gate,up,down}}_proj : {seq} @ cp
}}
"""
SPEC = """
{head}
input inputs_embeds : [batch, seq, hidden], {seq} @ cp
output last_hidden_state : {seq} @ cp
"""


def text(head: str, way: str = "", seq: str = "Shard(seq)") -> str:
    """A spec whose ranks have their tokens."""
    line = f"strategy layers.*.self_attn : {way} @ cp\n" if way else ""
    return (SPEC + PINNED).format(head=head, seq=seq) + line


def layer(
    hidden: int, heads: int, kv: int, wide: int, dtype: torch.dtype = torch.float32, on: str = "cpu"
) -> nn.Module:
    """A decoder layer of Llama and the norm after it, without embeddings."""
    sizes = {"hidden_size": hidden, "intermediate_size": wide, "num_attention_heads": heads, "num_key_value_heads": kv}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=8, use_cache=False)
    torch.manual_seed(0)
    with torch.device(on):
        return transformers.LlamaModel(config).to(dtype).train()


def large(kv: int) -> Graph:
    """A layer of a model of 8B parameters, in bfloat16, with 32 heads of 128: one to price, not to run."""
    model = layer(4096, 32, kv, 14336, torch.bfloat16, "meta")
    given = {"inputs_embeds": torch.empty(1, 64, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)}
    return capture(model, given, {"inputs_embeds": ("batch", "seq", "hidden")})


def priced(graph: Graph, ranks: int, link: str, seq: int, way: str = "") -> Plan:
    """Its plan on h100 by a way, or by what costs least."""
    spec = text(f"device h100\nmesh cp = {ranks} over {link}", way)
    return plan(bind(graph, read(spec), {}, sizes={"seq": seq}))


def taken(made: Plan) -> str:
    """The way that a plan has its attention run by; ``whole`` where every rank does all of it."""
    (context,) = made.bound.contexts
    for node, strategy in made.strategies.items():
        rule = lookup(node)
        for way in rule.ways if rule else ():
            if runs_as(way, node, strategy.parts[0], context):
                return way.name
    return WHOLE


def compared(graph: Graph, ranks: int, link: str, seq: int) -> tuple[dict[str, int], str]:
    """Picoseconds of a step by way, and the way that the plan takes where no line insists.

    Raises AssertionError where that is not the cheapest, or costs something else. What is ``whole`` no line can insist
    on: it is to cost less than each of the ways.
    """
    free = priced(graph, ranks, link, seq)
    costs = {way: priced(graph, ranks, link, seq, way).cost for way in WAYS}
    best, chosen = min(costs.values()), taken(free)
    right = free.cost < best if chosen == WHOLE else free.cost == best == costs[chosen]
    if not right or free.cost != free.lower_bound:
        raise AssertionError(f"{ranks} ranks over {link}, {seq} tokens: {chosen} at {free.cost}, ways {costs}")
    return {way: cost[0] for way, cost in {**costs, chosen: free.cost}.items()}, chosen


Sent = Counter[tuple[str, str, int]]


def volume(way: str, kv: int, ranks: int, seq: int) -> tuple[Sent, Sent, int]:
    """What a plan says is sent and what is sent, by phase, kind and bytes; and the bytes of all keys and values."""
    given = {"inputs_embeds": torch.randn(1, seq, 64, requires_grad=True)}
    program = placement.compile(layer(64, 8, kv, 96), simulate(cp=ranks), text(QUICK, way), example=given)
    with record() as log:
        program(**given).last_hidden_state.sum().backward()
    made: Any = program.plan
    said = Counter((x.phase, x.action.value, x.nbytes) for x in made.launches())
    return said, Counter((e.phase, e.kind, e.bytes) for e in log), 2 * kv * 8 * 4 * seq


def kept(way: str, kv: int, ranks: int, seq: int) -> float:
    """Bytes that a rank keeps of a layer for the backward, parameters left out. It is wide as Llama's are."""
    given = {"inputs_embeds": torch.randn(1, seq, 128)}
    # In zigzag order a rank's tokens are no view of the whole input, which all have here.
    program = placement.compile(layer(128, 8, kv, 448), simulate(cp=ranks), text(QUICK, way, ZIGZAG), example=given)
    exempt = [*program.parameters(), *program.buffers()]
    return kept_bytes(lambda: program(**given), exempt, ranks=ranks)


def pairs(ranks: int, seq: int, order: str) -> tuple[int, int]:
    """The fewest and the most pairs of query and key that causal attention has on a rank, as a plan tells them.

    Raises AssertionError where they are not what counting gives: the query at place i sees i + 1 keys.
    """
    given = {"inputs_embeds": torch.empty(1, seq, 64, device="meta")}
    made = placement.plan(layer(64, 8, 8, 96, on="meta"), {"cp": ranks}, text(QUICK, "ring", order), example=given)
    (found,) = explain_data(made)["balance"]
    least, most = found["pairs"]
    places = [(zigzag if order == ZIGZAG else contiguous)(seq, ranks, rank) for rank in range(ranks)]
    counted = [int((own + 1).sum()) for own in places]
    if (least, most) != (min(counted), max(counted)):
        raise AssertionError(f"{ranks} ranks, {order}: the plan says {found['pairs']}, counted are {counted}")
    return least, most


class Largest(TorchDispatchMode):
    """The largest tensor that any op makes, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.shape: tuple[int, ...] = ()
        self.op = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor) and x.numel() > self.elements:
                self.elements, self.shape, self.op = x.numel(), tuple(x.shape), func.name().split("::")[-1]
        return made


def largest(way: str, ranks: int, seq: int, *, fused: bool = True) -> Largest:
    """Of a step of a layer with two heads of 16, by a way; ``one device`` is the model as it is.

    ``fused``: whether torch's fused kernels may run.
    """
    model = layer(32, 2, 1, 64)
    given = {"inputs_embeds": torch.randn(1, seq, 32, requires_grad=True)}
    run: Any = model
    if way != "one device":
        run = placement.compile(model, simulate(cp=ranks), text(QUICK, way, ZIGZAG), example=given)
    with _plain() if not fused else contextlib.nullcontext(), Largest() as seen:
        run(**given).last_hidden_state.sum().backward()
    return seen


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """Attention by its formula: of torch's own function and of a ring's blocks."""
    with sdpa_kernel(SDPBackend.MATH), mock.patch("placement.runtime.ring.flash_attention", return_value=None):
        yield
