"""Whole models whose ranks hold only their tokens: nothing placed but the inputs, attention run in every way.

Label shift, positions and the loss' mean are those of the whole sequence, of which each rank has a block.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import placement
from placement import api
from placement import runtime as rt
from placement.graph.capture import capture
from placement.graph.ir import Graph
from placement.graph.precision import lifted
from placement.report import explain_data, explain_text
from placement.solver.memory import memory
from tests.gloo import GlooPool
from tests.memory.saved_hooks import kept_bytes
from tests.parity import axes, marked, models
from tests.parity.measure import Measured

Pool = Callable[[int], GlooPool]
BATCH, SEQ = 2, 24
# A launch costs next to nothing: the work of tokens so few would not be divided otherwise.
HEAD = "mesh cp over quick\nlink quick = 10 GB/s, 1 ns\ninput {names} : [batch, seq], Shard(seq) @ cp\n"
# By name: the family, its config, and where its attention is.
MODELS = {
    "qwen3": ("qwen3", {"num_hidden_layers": 2}, "model.layers.*.self_attn"),
    "many": ("llama", {"num_hidden_layers": 1, "num_key_value_heads": 8}, "model.layers.*.self_attn"),
    "one": ("llama", {"num_hidden_layers": 1, "num_key_value_heads": 1}, "model.layers.*.self_attn"),
    "gpt2": ("gpt2", {"n_layer": 1}, "transformer.h.*.attn"),
    "bert": ("bert", {"num_hidden_layers": 1}, "bert.encoder.layer.*.attention"),
}


def inputs(seq: int = SEQ) -> dict[str, torch.Tensor]:
    """Of the last ranks' tokens none has a label that counts, but for the very last."""
    given = models.inputs(BATCH, seq)
    given["labels"][0, seq // 2 : -1] = -100
    return given


@functools.cache
def _captured(name: str) -> tuple[nn.Module, Graph]:
    family, config, _ = MODELS[name]
    model, given = models.build(family, **config), inputs()
    with lifted(torch.float64):
        return model, capture(model, given, dict.fromkeys(given, ("batch", "seq")))


def _text(name: str, way: str, shard: str = "Shard(seq)") -> str:
    text = HEAD.format(names=", ".join(inputs())) + (f"strategy {MODELS[name][2]} : {way} @ cp\n" if way else "")
    return text.replace("Shard(seq)", shard)


def compiled(mesh: Any, name: str, text: str) -> tuple[nn.Module, Any]:
    model, graph = _captured(name)
    with mock.patch.object(api, "capture", return_value=graph):
        return model, placement.compile(model, mesh, text, example=inputs())


def measured(mesh: Any, name: str, text: str) -> tuple[Measured, Any]:
    """At the example's length, where what is sent is what the plan says, and at another."""
    found = Measured()
    model, program = compiled(mesh, name, text)
    log = axes.compared(found, model, program, inputs())
    axes.explained(log, program.plan)
    axes.compared(found, model, program, inputs(2 * SEQ))
    return found, program


CALLS = {
    "ring": r"rt\.ring_attention\((?!.*::)",  # heads that are repeated are joined to it
    "gather": r"rt\.visible|F\.scaled_dot_product_attention",
    "all_to_all": r"rt\.all_to_all[\s\S]*F\.scaled_dot_product_attention",
}


@pytest.mark.parametrize(
    ("name", "n", "way"),
    [
        *(("qwen3", n, way) for n in (2, 4) for way in CALLS),
        ("qwen3", 3, "ring"),
        ("qwen3", 3, "gather"),
        ("many", 2, "all_to_all"),
        ("many", 4, "ring"),
        ("one", 3, "ring"),
        ("one", 2, "all_to_all"),
        ("gpt2", 2, "ring"),
        ("bert", 4, "ring"),
        ("bert", 2, "gather"),
    ],
)
def test_every_way(name: str, n: int, way: str) -> None:
    found, program = measured(rt.simulate(cp=n), name, _text(name, way))
    assert not found.problems()
    assert re.search(CALLS[way], program.source)
    assert ("rt.ring_attention" in program.source) == (way == "ring")


ZIGZAG = "Shard(seq, zigzag)"


@pytest.mark.parametrize(
    ("name", "n", "way"), [("qwen3", 3, "ring"), ("qwen3", 4, "gather"), ("many", 2, "all_to_all")]
)
def test_an_early_and_a_late_chunk(name: str, n: int, way: str) -> None:
    """Outputs come back in the user's order, and the pairs of causal attention are as many on every rank."""
    text = _text(name, way, ZIGZAG) + f"output logits : {ZIGZAG} @ cp\n"
    found, program = measured(rt.simulate(cp=n), name, text)
    assert not found.problems()
    assert re.search(CALLS[way], program.source)
    assert "'logits': rt.Cut(1, zigzag=True)" in program.source
    said = explain_data(program.plan)
    assert said["values"]["model.layers.0.mlp"] == {"cp": ZIGZAG}
    if way == "all_to_all":  # every rank has all queries of some heads
        assert "balance" not in said
        return
    (balance,) = said["balance"]
    each = SEQ * (SEQ + 1) // 2 // n
    own = SEQ // n
    assert set(balance) == {"modules", "axes", "order", "pairs", "bounds", "contiguous"}
    assert (balance["axes"], balance["order"], balance["pairs"]) == (["cp"], "zigzag", [each, each])
    assert balance["contiguous"] == [own * (own + 1) // 2, own * (own + 1) // 2 + own * (SEQ - own)]
    assert f"{each} pairs of causal attention on a rank of cp, zigzag" in str(program.explain())


def test_balance_of_contiguous_blocks() -> None:
    plan = compiled(rt.simulate(cp=4), "one", _text("one", "ring"))[1].plan
    (balance,) = explain_data(plan)["balance"]
    assert (balance["order"], balance["pairs"]) == ("contiguous", [21, 129])
    assert "21 to 129 pairs, 1 : 6.14 of causal attention on a rank of cp, contiguous" in explain_text(plan, 200)


def test_random_masks_follow_their_elements() -> None:
    model = models.build("gpt2", n_layer=1, resid_pdrop=0.2, embd_pdrop=0.1, attn_pdrop=0.1)
    text = _text("gpt2", "gather", ZIGZAG)
    found = placement.verify(model, rt.simulate(cp=2), text, example=inputs(8), backend="simulated")
    assert found.failures == (), str(found)
    assert any("the same masks on both sides" in note for note in found.notes)


def hiding(what: str) -> dict[str, torch.Tensor]:
    """Positions that start again with every document, or rows that begin and end with padding."""
    given = inputs()
    if what == "packed":
        lengths = [[7, 17], [10, 3, 11]]
        given["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    if what == "padded":
        given["attention_mask"] = torch.ones(BATCH, SEQ, dtype=torch.long)
        given["attention_mask"][0, :5] = given["attention_mask"][1, -9:] = 0
    return given


WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 5,
    "max_window_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.mark.parametrize(
    ("name", "what", "way", "n", "order"),
    [
        ("qwen3", "packed", "ring", 3, ZIGZAG),
        ("many", "packed", "gather", 2, "Shard(seq)"),
        ("qwen3", "window", "ring", 4, "Shard(seq)"),
        ("qwen3", "window", "gather", 2, ZIGZAG),
        ("one", "padded", "ring", 2, "Shard(seq)"),
        ("gpt2", "padded", "all_to_all", 2, ZIGZAG),
        ("bert", "padded", "ring", 3, "Shard(seq)"),
    ],
)
def test_what_transformers_hides(name: str, what: str, way: str, n: int, order: str) -> None:
    """Sliding windows, packed documents and padding, as its own masks say them."""
    family, config, _ = MODELS[name]
    model, given = models.build(family, **config, **(WINDOWS if what == "window" else {})), hiding(what)
    text = _text(name, way, order).replace(", ".join(inputs()), ", ".join(given))
    found = Measured()
    with lifted(torch.float64):
        graph = capture(model, given, dict.fromkeys(given, ("batch", "seq")))
    with mock.patch.object(api, "capture", return_value=graph):
        program = placement.compile(model, rt.simulate(cp=n), text, example=given)
    axes.explained(axes.compared(found, model, program, given), program.plan)
    assert not found.problems()
    assert ("rt.ring_attention" if way == "ring" else "rt.visible") in program.source
    assert not any(v.shape[-2:] == v.shape[-1:] * 2 for node in graph.nodes for v in node.results if len(v.shape) == 4)


class Seen(nn.Module):
    """The text side of a model that sees: each token has a place in time, in height and in width."""

    def __init__(self) -> None:
        super().__init__()
        kind = transformers.models.qwen2_5_vl
        config = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 1, "num_attention_heads": 8}
        config |= {"num_key_value_heads": 4, "vocab_size": 88, "use_cache": False}
        config["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 100.0}
        words = {"bos_token_id": 0, "eos_token_id": 0}
        self.model = kind.modeling_qwen2_5_vl.Qwen2_5_VLTextModel(
            kind.configuration_qwen2_5_vl.Qwen2_5_VLTextConfig(**config, **words)
        )

    def forward(self, inputs_embeds: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
        y = self.model(inputs_embeds=inputs_embeds, position_ids=position_ids).last_hidden_state
        return {"y": y, "loss": (y * torch.arange(1, y.shape[1] + 1)[:, None]).sin().sum()}


def test_positions_of_three_kinds() -> None:
    draw = torch.Generator().manual_seed(1)
    model = Seen().double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    x = torch.randn(BATCH, SEQ, 48, generator=draw, dtype=torch.float64).requires_grad_()
    given = {"inputs_embeds": x, "position_ids": torch.randint(0, 30, (3, BATCH, SEQ), generator=draw)}
    with lifted(torch.float64):
        dims = {"inputs_embeds": ("batch", "seq", "hidden"), "position_ids": ("kinds", "batch", "seq")}
        graph = capture(model, given, dims)
    for way in ("ring", "gather"):
        spec = f"mesh cp over quick\nlink quick = 10 GB/s, 1 ns\nstrategy model.layers.*.self_attn : {way} @ cp\n"
        spec += f"input inputs_embeds : [batch, seq, hidden], {ZIGZAG} @ cp\n"
        spec += f"input position_ids : [kinds, batch, seq], {ZIGZAG} @ cp\n"
        with mock.patch.object(api, "capture", return_value=graph):
            program = placement.compile(model, rt.simulate(cp=2), spec, example=given)
        found = Measured()
        axes.explained(axes.compared(found, model, program, given), program.plan)
        assert not found.problems()


class Positions(nn.Module):
    """A learned row for each place of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(8, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = (x + self.rows).tanh()
        return {"y": y, "loss": (y * y[:, :1]).sum()}


def test_a_parameter_along_the_sequence() -> None:
    """It is kept in one piece, also where its placement is left to the solver, and each rank takes its chunks of it."""
    model, x = Positions(), torch.randn(2, 8, 4, dtype=torch.float64)
    text = "mesh cp\ninput x : Shard(1, zigzag) @ cp\nparam rows : auto\noutput y : Shard(1, zigzag) @ cp\n"
    program = placement.compile(model, rt.simulate(cp=2), text, example={"x": x})
    found = Measured()
    axes.compared(found, model, program, {"x": x})
    assert not found.problems()
    assert "rt.param(8, 4, dtype=torch.float64)" in program.source
    assert re.search(r"rt\.split\(.*zigzag=True", program.source)


SEVERAL = {
    # Heads on one axis and a ring on the other; hidden tokens of both axes round one ring; a ring of groups of heads.
    "heads": ({"cp": 2, "tp": 2}, f"{ZIGZAG} @ cp", "strategy model : ring @ cp\n", r"ring_attention\(.*self\.cp, 2"),
    "batch": (
        {"dp": 2, "cp": 2},
        f"Shard(batch) @ dp, {ZIGZAG} @ cp",
        "strategy model : ring @ cp\n",
        r"ring_attention\(.*self\.cp, 2, zigzag=True",
    ),
    # One ring round both axes would cost least, but has its blocks in one order.
    "chosen": (
        {"cp": 2, "tp": 2},
        f"{ZIGZAG} @ cp, Shard(seq) @ tp",
        "",
        r"ring_attention\(.*self\.cp, 2, zigzag=True",
    ),
    "group": (
        {"cp": 2, "tp": 2},
        "Shard(seq) @ cp, Shard(seq) @ tp",
        "strategy model : ring @ cp\nstrategy model : ring @ tp\n",
        r"ring_attention\(.*self\.cp_tp, 2",
    ),
    "hybrid": (
        {"cp": 3, "tp": 2},
        f"{ZIGZAG} @ cp, Shard(seq) @ tp",
        "strategy model : ring @ cp + all_to_all @ tp\n",
        r"all_to_all\([\s\S]*ring_attention\(.*self\.cp, 2",
    ),
}


@pytest.mark.parametrize("how", SEVERAL)
def test_several_axes(how: str) -> None:
    sizes, placed, lines, call = SEVERAL[how]
    model, graph = _captured({"hybrid": "many", "batch": "one", "chosen": "one"}.get(how, "qwen3"))
    text = "link quick = 10 GB/s, 1 ns\n" + "".join(f"mesh {axis} over quick\n" for axis in sizes)
    text += f"input input_ids, labels : [batch, seq], {placed}\n{lines}"
    if how == "heads":
        text += "param model.layers.*.self_attn.{q,k,v}_proj.weight : Shard(out) @ tp\n"
        text += "param model.layers.*.self_attn.o_proj.weight : Shard(in) @ tp\n"
    with mock.patch.object(api, "capture", return_value=graph):
        program = placement.compile(model, rt.simulate(**sizes), text, example=inputs())
    found = Measured()
    axes.explained(axes.compared(found, model, program, inputs()), program.plan)
    assert not found.problems()
    assert re.search(call, program.source)


def on_gloo(n: int, name: str, way: str) -> list[Measured]:
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))
    with pytest.raises(rt.SizeError, match=r"'logits' on axis 'cp': no DTensor has the layout .* zigzag=True"):
        compiled(mesh, name, _text(name, way, ZIGZAG) + f"output logits : {ZIGZAG} @ cp\n")
    return [measured(mesh, name, _text(name, way, shard))[0] for shard in ("Shard(seq)", ZIGZAG)]


@pytest.mark.gloo
def test_processes(gloo: Pool) -> None:
    for found in gloo(3).run(on_gloo, 3, "one", "ring"):
        assert not [problem for one in found for problem in one.problems()]


def test_the_bytes_of_a_ring_are_of_the_heads_of_keys() -> None:
    """Keys and values of n_kv heads, n - 1 times forward; twice as often backward; also where nothing is joined."""
    model, graph = _captured("qwen3")
    for more in ("", "lower model : ops = written\n"):
        text = HEAD.format(names=", ".join(inputs())) + f"strategy {MODELS['qwen3'][2]} : ring @ cp\n{more}"
        with mock.patch.object(api, "capture", return_value=graph):
            program = placement.compile(model, rt.simulate(cp=4), text, example=inputs())
        with rt.record() as log:
            program(**inputs())["loss"].backward()
        sent = Counter((e.phase, e.bytes) for e in log if e.kind == "send_recv")
        whole = 2 * models.KV_HEADS * 10 * 8 * BATCH * SEQ
        assert sent == {("forward", whole): 2 * 3, ("backward", whole): 2 * 2 * 3}
        assert ("[..., ::2, :, :]" in program.source) == bool(more)
    assert "by ring" in str(program.explain())
    assert "send_recv" in str(program.explain())


def test_a_rank_keeps_its_share() -> None:
    """In float32, in which nothing is cast: what the memory model says, and of a layer a fourth of one device's."""
    model = models.build("llama", torch.float32, num_hidden_layers=1)
    # Of one row a contiguous block is a view of the whole; in zigzag order none is.
    given = {name: x[:1].clone() for name, x in inputs().items()}
    kept = {}
    for n in (1, 4):
        text = _text("many", "ring" if n > 1 else "", ZIGZAG)
        program = placement.compile(model, rt.simulate(cp=n), text, example=given)
        exempt = [*program.parameters(), *program.buffers()]
        kept[n] = kept_bytes(lambda p=program: p(**given), exempt, given.values(), n)
        assert memory(program.plan).rank.saved_bytes == kept[n]
    assert kept[4] < kept[1] / 3


@pytest.mark.parametrize(("more", "by"), [("", 3), (f"value model.layers.*.mlp : {ZIGZAG} @ cp\n", 6)])
def test_a_length_that_the_axis_does_not_divide(more: str, by: int) -> None:
    """Of inputs that every rank has whole. Padded inside: what is past the end lies after every query's place."""
    found = Measured()
    text = _text("one", "ring").replace(", Shard(seq) @ cp", "") + more
    model, program = compiled(rt.simulate(cp=3), "one", text)
    assert f"divides = {{'seq': {by}}}" in program.source
    for seq in (25, 4):
        axes.compared(found, model, program, inputs(seq))
    assert not found.problems()


FAULTS = [
    ("model.layers.*.self_attn : rign @ cp", "PLC121", "unknown implementation 'rign'", "did you mean 'ring'?"),
    ("model.layers.*.mlp : ring @ cp", "PLC307", "nothing in 'model.layers.*.mlp' has implementations", None),
    ("model.layers.*.atn : ring @ cp", "PLC104", "matches no module", None),
    ("model.layers.* : all_to_all @ cp", "PLC307", "the axis of 3 does not divide the 8 heads", None),
]


@pytest.mark.parametrize(("line", "code", "text", "hint"), FAULTS)
def test_what_cannot_be(line: str, code: str, text: str, hint: str | None) -> None:
    model, graph = _captured("qwen3")
    with mock.patch.object(api, "capture", return_value=graph), pytest.raises(placement.PlacementError) as caught:
        placement.plan(model, {"cp": 3}, f"{HEAD.format(names='input_ids, labels')}strategy {line}\n", example=inputs())
    (fault,) = caught.value.diagnostics
    assert fault.code == code
    assert text in fault.message
    assert fault.hint
    assert hint is None or fault.hint == hint


class Apart(nn.Module):
    """Attention whose queries see the keys that are not beside them, by a mask that says two things in one."""

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        mask = (at[:, None] - at[None, :]).abs() >= 2
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).transpose(1, 2).flatten(2)


def test_a_mask_of_pairs_goes_by_gather_but_in_no_ring() -> None:
    spec = "mesh cp\ninput input : [batch, seq, width], Shard(seq) @ cp\nstrategy 0 : {} @ cp\n"
    model, given = nn.Sequential(Apart()), {"input": torch.randn(2, 8, 8)}
    placement.plan(model, {"cp": 2}, spec.format("gather"), example=given)
    with pytest.raises(placement.PlacementError) as caught:
        placement.plan(model, {"cp": 2}, spec.format("ring"), example=given)
    (fault,) = caught.value.diagnostics
    assert (fault.code, "its mask is a tensor [queries, keys]" in fault.message) == ("PLC307", True)


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
def test_two_ways_that_do_not_go_together(mask: str) -> None:
    """What goes round on one axis are the blocks of all its ranks: another axis does not cut the queries further."""
    spec = "mesh cp\nmesh cq\ninput x : [batch, seq, width], Shard(seq) @ cp, Shard(seq) @ cq\n"
    spec += "strategy attention : {}\n"
    model, given = marked.Model(mask, 12), marked.inputs()
    for ways in ("gather @ cp + ring @ cq", "ring @ cp + gather @ cq"):
        with pytest.raises(placement.PlacementError) as caught:
            placement.plan(model, {"cp": 2, "cq": 2}, spec.format(ways), example=given)
        (fault,) = caught.value.diagnostics
        assert (fault.code, "together" in fault.message, bool(fault.hint)) == ("PLC307", True, True)
    placement.plan(model, {"cp": 2, "cq": 2}, spec.format("ring @ cp + ring @ cq"), example=given)


class Nested(nn.Module):
    def forward(self, x: Tensor, more: dict[str, Any]) -> Tensor:
        return (x * more["scale"][0] + more["shift"]).tanh()


def test_own_inputs() -> None:
    """Of several axes, in any order of blocks, wherever a tensor is in the arguments."""
    x = torch.arange(2 * 24, dtype=torch.float64).reshape(2, 24)
    given = {"x": x, "more": {"scale": [x + 1], "shift": x[:, :1] * 0}}
    placed = f"{ZIGZAG} @ cp, Shard(seq) @ tp"
    spec = f"mesh cp\nmesh tp\ninput x : [batch, seq], {placed}\ninput more.scale.0 : [batch, seq], {placed}\n"
    program = placement.compile(Nested(), rt.simulate(cp=2, tp=2), spec, example=given)
    assert program.own_inputs(**given) == given
    chunks = [torch.cat((x[:, 0:6], x[:, 18:24]), 1), x[:, 6:18]]
    for rank, one in enumerate(program.programs):
        own = one.own_inputs(**given, flag=True)
        want = chunks[rank // 2].chunk(2, 1)[rank % 2]
        assert torch.equal(own["x"], want)
        assert torch.equal(own["more"]["scale"][0], want + 1)
        assert own["more"]["shift"] is given["more"]["shift"]
        assert own["flag"] is True
    with pytest.raises(rt.SizeError, match="input 'x' on axis 'cp'"):
        program.programs[0].own_inputs(x=x[:, :6])


ORDER_FAULTS = [
    ({"cp": 2}, SEQ, "value model.layers.*.mlp : Shard(seq) @ cp", "PLC304", "contiguous order by axis 'cp'"),
    ({"cp": 2}, 26, "", "PLC203", "is 26, of which zigzag order makes two equal chunks"),
    ({"tp": 2, "cp": 2}, 12, "", "PLC203", "axis 'cp' of 2 cannot cut the blocks evenly"),
    (
        {"cp": 2, "tp": 2},
        SEQ,
        "strategy ** : ring @ cp + ring @ tp",
        "PLC307",
        "axes 'cp' and 'tp' together",
    ),
]


@pytest.mark.parametrize(("sizes", "seq", "lines", "code", "text"), ORDER_FAULTS)
def test_orders_that_cannot_be(sizes: dict[str, int], seq: int, lines: str, code: str, text: str) -> None:
    model, graph = _captured("qwen3")
    inside = ", Shard(seq) @ tp" if "tp" in sizes else ""
    spec = "".join(f"mesh {axis}\n" for axis in sizes)
    spec += f"input input_ids, labels : [batch, seq], {ZIGZAG} @ cp{inside}\n{lines}\n"
    with mock.patch.object(api, "capture", return_value=graph), pytest.raises(placement.PlacementError) as caught:
        placement.plan(model, sizes, spec, example=inputs(), sizes={"seq": seq})
    (fault,) = caught.value.diagnostics
    assert fault.code == code
    assert text in fault.message
    assert fault.hint


def test_two_lines_that_disagree() -> None:
    model, graph = _captured("qwen3")
    lines = "strategy model.layers.0 : ring @ cp\nstrategy model.layers.*.self_attn : gather @ cp\n"
    with mock.patch.object(api, "capture", return_value=graph), pytest.raises(placement.PlacementError) as caught:
        placement.plan(model, {"cp": 2}, HEAD.format(names="input_ids, labels") + lines, example=inputs())
    assert [(d.code, d.line) for d in caught.value.diagnostics] == [("PLC304", 5)]


@pytest.mark.parametrize(
    ("line", "code", "column"),
    [
        ("strategy model.layers.0 : ring @ cp + gather @ tp", "PLC304", 39),
        ("strategy model.layers.0 : ring @ cp + rign @ tp", "PLC121", 39),
        ("strategy model.layers.*.mlp : ring @ cp + gather @ tp", "PLC307", 10),
    ],
)
def test_each_part_has_its_own_place(line: str, code: str, column: int) -> None:
    model, graph = _captured("qwen3")
    spec = "mesh cp\nmesh tp\ninput input_ids, labels : [batch, seq], Shard(seq) @ cp, Shard(seq) @ tp\n"
    spec += f"strategy model : ring @ cp + all_to_all @ tp\n{line}\n"
    with mock.patch.object(api, "capture", return_value=graph), pytest.raises(placement.PlacementError) as caught:
        placement.plan(model, {"cp": 2, "tp": 2}, spec, example=inputs())
    assert [(d.code, d.line, d.column) for d in caught.value.diagnostics] == [(code, 5, column)]
