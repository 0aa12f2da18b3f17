"""Mistakes that people make in specs, as edits of a spec that is right.

Each edit gives a line of ``RIGHT`` another text, None takes the line out. «These marks» stand around what the first
fault must point at; a mistake without marks has no place in the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

RIGHT = """\
# Tensor and sequence parallelism for a Llama.
mesh tp

input input_ids, labels : [batch, seq]

param model.embed_tokens.weight : [vocab, hidden], Shard(vocab) @ tp

within model.layers.* {
  param self_attn.{q,k,v}_proj.weight    : Shard(out) @ tp
  param self_attn.o_proj.weight          : Shard(in) @ tp
  param mlp.{gate,up}_proj.weight        : Shard(out) @ tp
  param mlp.down_proj.weight             : Shard(in) @ tp
  value {input,post_attention}_layernorm : Shard(seq) @ tp
}

value model.norm     : Shard(seq) @ tp
param lm_head.weight : [vocab, hidden], Shard(vocab) @ tp
output loss   : Replicate
output logits : Shard(vocab) @ tp
"""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake: the edits, the code of the first fault, and the model and mesh that it shows on."""

    name: str
    code: str
    edits: dict[int, str | None]
    model: dict[str, int] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=lambda: {"tp": 2})

    @property
    def text(self) -> str:
        """The spec with the mistake in it, and with its marks."""
        lines: list[str | None] = [*RIGHT.splitlines()]
        for number, line in self.edits.items():
            lines[number - 1] = line
        return "".join(f"{line}\n" for line in lines if line is not None)


M = Mistake

WORDS = [
    M("keyword misspelt", "PLC002", {6: "«params» model.embed_tokens.weight : [vocab, hidden], Shard(vocab) @ tp"}),
    M("keyword of another language", "PLC002", {17: "«let» lm_head.weight = Shard(vocab) @ tp"}),
    M("placement misspelt", "PLC017", {9: "  param self_attn.{q,k,v}_proj.weight : «Shards»(out) @ tp"}),
    M("placement of DTensor", "PLC018", {18: "output loss : «Replicate»()"}),
    M("axis misspelt", "PLC101", {9: "  param self_attn.{q,k,v}_proj.weight : Shard(out) @ «tpp»"}),
    M("another axis", "PLC101", {9: "  param self_attn.{q,k,v}_proj.weight : Shard(out) @ «model»"}),
    M("a dim for an axis", "PLC101", {13: "  value {input,post_attention}_layernorm : Shard(seq) @ «seq»"}),
    M("an axis for a dim", "PLC103", {13: "  value {input,post_attention}_layernorm : Shard(«tp»)"}),
    M("axis inside Shard", "PLC018", {9: "  param self_attn.{q,k,v}_proj.weight : Shard(out, «tp»)"}),
    M("dim misspelt", "PLC103", {16: "value model.norm : Shard(«sequence») @ tp"}),
    M("dims never named", "PLC103", {4: None, 13: "  value {input,post_attention}_layernorm : Shard(«seq») @ tp"}),
    M("dim by keyword", "PLC003", {17: "param lm_head.weight : Shard(dim«=»0) @ tp"}),
    M("dim from the end", "PLC013", {17: "param lm_head.weight : Shard(«-1») @ tp"}),
    M("dim in quotes", "PLC003", {16: 'value model.norm : Shard(«"seq"») @ tp'}),
    M("order misspelt", "PLC018", {16: "value model.norm : Shard(seq, «zigzagged») @ tp"}),
    M("order with a hyphen", "PLC003", {16: "value model.norm : Shard(seq, zig«-»zag) @ tp"}),
    M("colon missing", "PLC003", {18: "output loss «Replicate»"}),
    M("equals for a colon", "PLC003", {18: "output loss «=» Replicate"}),
    M("quotes around a path", "PLC003", {17: 'param «"lm_head.weight"» : Shard(0) @ tp'}),
    M("semicolon", "PLC004", {2: "mesh tp = 2«;»"}),
    M("comment of another language", "PLC003", {2: "mesh tp «/»/ tensor parallel"}),
    M("axis before a placement", "PLC003", {16: "value model.norm : tp «=» Shard(seq)"}),
    M("on for @", "PLC003", {16: "value model.norm : Shard(seq) «on» tp"}),
    M("two axes in one placement", "PLC003", {16: "value model.norm : Shard(seq) @ «(»tp, dp)"}),
    M("axes in one mesh line", "PLC003", {2: "mesh tp = 2«,» dp = 2"}),
    M("mesh without a word", "PLC003", {2: "mesh «(»tp=2, dp=4)"}),
    M("on for over", "PLC003", {2: "mesh tp = 2 «on» nvlink"}),
    M("link misspelt", "PLC110", {2: "mesh tp = 2 over «nvlnk»"}),
    M("link of the cloud", "PLC110", {2: "mesh tp = 2 over «efa»"}),
    M("device misspelt", "PLC109", {2: "mesh tp\ndevice «h10»"}),
    M("device of the shop", "PLC109", {2: "mesh tp\ndevice «rtx4090»"}),
    M("bits for bytes", "PLC011", {2: "mesh tp over fast\nlink fast = 400 «Gb/s», 3 us"}),
    M("link's numbers swapped", "PLC011", {2: "mesh tp over fast\nlink fast = «3 us, 400 GB/s»"}),
    M("unit cut short", "PLC011", {2: "mesh tp\nlimit memory 80«G»"}),
    M("unit forgotten", "PLC011", {2: "mesh tp\nlimit memory «80»"}),
    M("mesh forgotten", "PLC111", {2: "", 6: "param model.embed_tokens.weight : [vocab, hidden], «Shard(vocab) @ tp»"}),
    M("mesh size in words", "PLC013", {2: "mesh tp = «two»"}),
    M("axis left out of two", "PLC113", {2: "mesh tp\nmesh dp", 18: "output loss : «Partial»"}),
    M("axis declared twice", "PLC112", {2: "mesh tp = 2\nmesh «tp» = 4"}),
    M("block left open", "PLC007", {8: "within model.layers.* «{»", 14: ""}),
    M("block closed twice", "PLC008", {16: "«}»\nvalue model.norm : Shard(seq) @ tp"}),
    M("block without braces", "PLC003", {8: "within model.layers.*:«»", 14: ""}),
    M("input in a block", "PLC010", {13: "  «input» labels : [batch, seq]"}),
    M("braces left open in a path", "PLC005", {9: "  param self_attn.«{»q,k,v_proj.weight : Shard(out) @ tp"}),
    M("includes itself", "PLC015", {2: 'mesh tp\ninclude «"mistake.plc"»'}),
    M("include of what is not there", "PLC014", {2: 'mesh tp\ninclude «"common.plc"»'}),
    M("include without quotes", "PLC003", {2: "mesh tp\ninclude «common.plc»"}),
    M("stored on a value", "PLC209", {16: "value model.norm : «stored Shard(seq) @ tp»"}),
    M("dims of a value", "PLC003", {16: "value model.norm : «[»batch, seq, hidden], Shard(seq) @ tp"}),
    M("dims after the placement", "PLC003", {17: "param lm_head.weight : Shard(vocab) @ tp, «[»vocab, hidden]"}),
    M("one dim twice", "PLC118", {4: "input input_ids, labels : [batch, «batch»]"}),
]

PATHS = [
    M("singular for plural", "PLC104", {8: "within «model.layer.*» {"}),
    M("wildcard missing in a block", "PLC104", {8: "within «model.layers» {"}),
    M("wildcard missing", "PLC104", {16: "value «model.layers.input_layernorm» : Shard(seq) @ tp", 13: None}),
    M("prefix missing", "PLC104", {16: "value «norm» : Shard(seq) @ tp"}),
    M("prefix of a wrapper", "PLC104", {17: "param «module.lm_head.weight» : [vocab, hidden], Shard(vocab) @ tp"}),
    M("absolute path in a block", "PLC104", {10: "  param «model.layers.*.self_attn.o_proj.weight» : Shard(in) @ tp"}),
    M("name cut short", "PLC104", {9: "  param «self_attn.{q,k,v}.weight» : Shard(out) @ tp"}),
    M("one of the alternatives misspelt", "PLC104", {11: "  param mlp.{«gates»,up}_proj.weight : Shard(out) @ tp"}),
    M("name of another model", "PLC104", {10: "  param «attention.wo.weight» : Shard(in) @ tp"}),
    M("all of another model", "PLC104", {16: "value «transformer.ln_f» : Shard(seq) @ tp"}),
    M("leaf forgotten", "PLC104", {17: "param «lm_head» : [vocab, hidden], Shard(vocab) @ tp"}),
    M("leaves forgotten", "PLC104", {9: "  param «self_attn.{q,k,v}_proj» : Shard(out) @ tp"}),
    M("leaf too many", "PLC104", {16: "value «model.norm.weight» : Shard(seq) @ tp"}),
    M(
        "bias that is not there",
        "PLC104",
        {17: "param lm_head.weight : [vocab, hidden], Shard(vocab) @ tp\nparam «lm_head.bias» : Shard(0) @ tp"},
    ),
    M("biases that are not there", "PLC104", {10: "  param «self_attn.{q,k,v}_proj.bias» : Shard(0) @ tp"}),
    M("index of Python", "PLC012", {16: "value model.layers«[1]».mlp : Shard(seq) @ tp"}),
    M("slice of Python", "PLC003", {16: "value model.layers.«[»0:1].mlp : Shard(seq) @ tp"}),
    M("range of Python", "PLC012", {16: "value model.layers.«[0..1]».mlp : Shard(seq) @ tp"}),
    M("range glued to a name", "PLC104", {16: "value «model.layers[0-1].mlp» : Shard(seq) @ tp"}),
    M("index past the end", "PLC104", {16: "value «model.layers.[2-5].mlp» : Shard(seq) @ tp"}),
    M("wildcard inside a segment", "PLC012", {16: "value «model.**norm» : Shard(seq) @ tp"}),
    M("container of layers", "PLC104", {16: "value «model.layers» : Shard(seq) @ tp"}),
    M("module that is never called", "PLC104", {16: "value «model.dropout» : Shard(seq) @ tp"}),
    M("module that returns a number", "PLC104", {16: "value «model.meter» : Shard(seq) @ tp"}),
    M("input misspelt", "PLC105", {4: "input «input_id», labels : [batch, seq]"}),
    M(
        "input of another model",
        "PLC105",
        {4: "input input_ids, labels : [batch, seq]\ninput «attention_mask» : [batch, seq]"},
    ),
    M("output misspelt", "PLC106", {19: "output «logit» : Shard(vocab) @ tp"}),
    M("output of another model", "PLC106", {19: "output «last_hidden_state» : Shard(seq) @ tp"}),
    M("output by its index", "PLC106", {19: "output «1» : Shard(vocab) @ tp"}),
    M("axis of the mesh misspelt", "PLC101", {2: "mesh «tp»"}, mesh={"tpp": 2}),
    M("mesh of another size", "PLC102", {2: "mesh tp = «8»"}),
    M("mesh of no size", "PLC102", {2: "«mesh tp»"}, mesh={}),
]

PLACEMENTS = [
    M("dims list too long", "PLC107", {4: "input input_ids, labels : [batch, seq, «hidden»]"}),
    M(
        "dims list too long on a parameter",
        "PLC107",
        {17: "param lm_head.weight : [vocab, hidden, «out»], Shard(vocab) @ tp"},
    ),
    M("dims swapped", "PLC108", {17: "param lm_head.weight : [«hidden», vocab], Shard(vocab) @ tp"}),
    M("dims of another size", "PLC108", {4: "input input_ids : [batch, seq]\ninput labels : [«seq», batch]"}),
    M("out of an embedding", "PLC103", {6: "param model.embed_tokens.weight : Shard(«out») @ tp"}),
    M(
        "vocab of a linear",
        "PLC103",
        {6: None, 17: "param lm_head.weight : Shard(«vocab») @ tp", 19: "output logits : Replicate"},
    ),
    M("sequence of a parameter", "PLC204", {10: "  param self_attn.o_proj.weight : Shard(«seq») @ tp"}),
    M("dim of another tensor", "PLC204", {16: "value model.norm : Shard(«vocab») @ tp"}),
    M(
        "dim named elsewhere only",
        "PLC204",
        {17: "param lm_head.weight : Shard(out) @ tp", 19: "output logits : Shard(«vocab») @ tp"},
    ),
    M("index past the dims", "PLC204", {11: "  param mlp.{gate,up}_proj.weight : Shard(«2») @ tp"}),
    M("index past the dims of a value", "PLC204", {16: "value model.norm : Shard(«3») @ tp"}),
    M("shard of a scalar", "PLC204", {18: "output loss : Shard(«0») @ tp"}),
    M(
        "width that does not divide",
        "PLC203",
        {11: "  param mlp.{gate,up}_proj.weight : Shard(«out») @ tp"},
        {"inner": 90},
        {"tp": 4},
    ),
    M(
        "sequence that does not divide",
        "PLC203",
        {13: "  value {input,post_attention}_layernorm : Shard(«seq») @ tp"},
        {"seq": 33},
    ),
    M(
        "heads that do not divide",
        "PLC203",
        {9: "  param self_attn.{q,k,v}_proj.weight : Shard(«out») @ tp"},
        {"vocab": 258, "seq": 33},
        {"tp": 3},
    ),
    M(
        "heads of a value that do not divide",
        "PLC203",
        {16: "value model.norm : Shard(seq) @ tp\nvalue model.layers.*.self_attn.q_proj : Shard(«2») @ tp"},
        {"vocab": 258, "seq": 33},
        {"tp": 3},
    ),
    M(
        "fewer heads than ranks",
        "PLC203",
        {9: "  param self_attn.{q,k,v}_proj.weight : Shard(«out») @ tp"},
        {},
        {"tp": 4},
    ),
    M(
        "two lines disagree on a parameter",
        "PLC201",
        {11: "  param mlp.*_proj.weight : Shard(out) @ tp", 12: "  param mlp.down_proj.weight : «Shard(in) @ tp»"},
    ),
    M("two patterns meet in a parameter", "PLC201", {14: "}\nparam **.weight : «Shard(0) @ tp»"}),
    M("two lines disagree on a value", "PLC202", {14: "}\nvalue model.layers.*.input_layernorm : «Replicate @ tp»"}),
    M("two patterns meet in a value", "PLC202", {14: "}\nvalue **.*norm : «Replicate @ tp»", 16: None}),
    M("two lines disagree on an output", "PLC202", {18: "output loss : Replicate @ tp\noutput loss : «Partial @ tp»"}),
    M(
        "two lines disagree on dims",
        "PLC112",
        {4: "input input_ids, labels : [batch, seq]\ninput «labels» : [batch, time]"},
    ),
    M("placed twice in one line", "PLC207", {16: "value model.norm : Shard(seq) @ tp, «Shard(batch) @ tp»"}),
    M("partial parameter", "PLC205", {10: "  param self_attn.o_proj.weight : «Partial @ tp»"}),
    M("partial input", "PLC205", {4: "input input_ids, labels : [batch, seq], «Partial @ tp»"}),
    M("partial where nothing sums", "PLC205", {16: "value model.norm : «Partial @ tp»"}),
    M("partial output", "PLC205", {19: "output logits : «Partial @ tp»"}),
    M(
        "tied weight placed two ways",
        "PLC201",
        {17: "param lm_head.weight : «Replicate @ tp»", 19: "output logits : Replicate"},
        {"tied": 1},
    ),
]


ALL = [*WORDS, *PATHS, *PLACEMENTS]
