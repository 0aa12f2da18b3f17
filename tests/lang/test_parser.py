"""Every statement, its parts and its places."""

import copy
import pickle
from fractions import Fraction

import pytest

from placement.lang import (
    Device,
    InputLine,
    MeshAxis,
    OutputLine,
    ParamLine,
    PlacementError,
    Span,
    ValueLine,
    check,
    load,
    parse,
)
from placement.types import Auto, Partial, Replicate, Shard

DESIGN = """\
# Tensor and sequence parallelism for a Llama-style decoder.
mesh tp = 8 over nvlink                    # size and link may be left out: then the mesh decides
mesh cp = 2 over fast
link fast = 450 GB/s, 3 us                 # a link of one's own; nvlink, ib, pcie, host are known
device h100                                # roofline for compute and the memory's size

input input_ids, labels : [batch, seq]                         # names dims
param model.embed_tokens.weight : [vocab, hidden], Shard(vocab) @ tp

within model.layers.* {
  param self_attn.{q,k,v}_proj.weight : Shard(out) @ tp
  param self_attn.o_proj.weight       : Shard(in) @ tp
  param mlp.{gate,up}_proj.weight     : Shard(out) @ tp
  param mlp.down_proj.weight          : Shard(in) @ tp
  value {input,post_attention}_layernorm : Shard(seq) @ tp     # a module's output (its first tensor)
}
output loss   : Replicate @ tp             # the default for every output
output logits : Shard(vocab) @ tp

strategy model.layers.*.self_attn : ring @ cp              # insist on an implementation of an op
lower model.layers.* : overlap = ring, gathered = again, reduce = float32    # how it is emitted
limit memory 60 GB                                         # a constraint on the plan
expect model.layers.* : all_gather @ tp forward <= 2       # a budget that `check` holds
"""


def only(text):
    (statement,) = parse(text).statements
    return statement


def text_at(source, span):
    """What stands at a span of one line."""
    assert span.line == span.end_line
    return source.split("\n")[span.line - 1][span.column - 1 : span.end_column - 1]


def test_the_design_example():
    spec = parse(DESIGN, "llama.plc")
    assert check(spec) == ()
    assert (
        str(spec)
        == """\
mesh tp = 8 over nvlink
mesh cp = 2 over fast
link fast = 450 GB/s, 3 us
device h100
limit memory 60 GB
input input_ids, labels : [batch, seq]
param model.embed_tokens.weight : [vocab, hidden], Shard(vocab) @ tp
param model.layers.*.self_attn.{q,k,v}_proj.weight : Shard(out) @ tp
param model.layers.*.self_attn.o_proj.weight : Shard(in) @ tp
param model.layers.*.mlp.{gate,up}_proj.weight : Shard(out) @ tp
param model.layers.*.mlp.down_proj.weight : Shard(in) @ tp
value model.layers.*.{input,post_attention}_layernorm : Shard(seq) @ tp
output loss : Replicate @ tp
output logits : Shard(vocab) @ tp
strategy model.layers.*.self_attn : ring @ cp
lower model.layers.* : overlap = ring, gathered = again, reduce = float32
expect model.layers.* : all_gather @ tp forward <= 2
"""
    )
    lines = [s.span.line for s in spec.statements]
    assert lines == [2, 3, 4, 5, 22, 7, 8, 11, 12, 13, 14, 15, 17, 18, 20, 21, 23]
    assert parse(str(spec)) == spec
    assert spec.file == "llama.plc"
    assert spec.sources == {"llama.plc": DESIGN}


@pytest.mark.parametrize(
    ("text", "size", "link"),
    [
        ("mesh tp", None, None),
        ("mesh tp = 8", 8, None),
        ("mesh tp over ib", None, "ib"),
        ("mesh tp=2 over ib", 2, "ib"),
    ],
)
def test_mesh(text, size, link):
    axis = only(text)
    assert isinstance(axis, MeshAxis)
    assert (axis.name, axis.size, axis.link) == ("tp", size, link)
    assert text_at(text, axis.span) == text
    assert text_at(text, axis.name.span) == "tp"
    assert (axis.size_span is None) == (size is None)
    assert size is None or text_at(text, axis.size_span) == str(size)


def test_device():
    device = parse("device h100").device
    assert device is not None
    assert isinstance(device, Device)
    assert device.name == "h100"
    assert device.name.span == Span("<string>", 1, 8, 1, 12)


@pytest.mark.parametrize(
    ("text", "printed", "amounts"),
    [
        (
            "device a = 400 TFLOP/s bfloat16, 60 TFLOP/s float32, 2 TB/s, 96 GB",
            "device a = 400 TFLOP/s bfloat16, 60 TFLOP/s float32, 2 TB/s, 96 GB",
            [("bfloat16", 4 * 10**14), ("float32", 6 * 10**13), (None, 2 * 10**12), (None, 96 * 10**9)],
        ),
        (
            "device a =\n 80GiB,1.5PFLOP/s float8_e5m2,\n\t2 Tbit/s , 0.5 GFLOP/s\tfloat64",
            "device a = 80 GiB, 1.5 PFLOP/s float8_e5m2, 2 Tbit/s, 0.5 GFLOP/s float64",
            [(None, 80 * 2**30), ("float8_e5m2", 15 * 10**14), (None, 25 * 10**10), ("float64", 5 * 10**8)],
        ),
    ],
)
def test_a_device_of_ones_own(text, printed, amounts):
    device = only(text)
    assert isinstance(device, Device)
    assert str(device) == printed
    assert [(figure.dtype, figure.quantity.amount) for figure in device.figures] == amounts
    for figure in device.figures:
        assert figure.dtype is None or text_at(text, figure.dtype.span) == figure.dtype
    assert device != only(text.replace("2 T", "3 T"))
    assert {figure.what for figure in device.figures} >= {
        "bandwidth",
        "capacity",
        f"rate for {amounts[0][0] or 'float64'}",
    }


def test_input():
    text = "input input_ids, past.0 : [batch, seq], Shard(batch) @ dp, Replicate @ tp"
    line = only(text)
    assert isinstance(line, InputLine)
    assert line.names == ("input_ids", "past.0")
    assert line.dims == ("batch", "seq")
    assert [(p.placement, p.axis) for p in line.placed] == [(Shard("batch"), "dp"), (Replicate(), "tp")]
    assert [text_at(text, n.span) for n in (*line.names, *line.dims)] == ["input_ids", "past.0", "batch", "seq"]
    assert [text_at(text, p.span) for p in line.placed] == ["Shard(batch) @ dp", "Replicate @ tp"]
    assert text_at(text, line.placed[0].dim_span) == "batch"
    assert text_at(text, line.placed[0].axis.span) == "dp"


def test_input_dims_or_placements_may_be_left_out():
    assert only("input x : Shard(0)").dims is None
    assert only("input x : [a]").placed == ()
    assert only("input x : []").dims == ()  # a scalar


def test_param():
    line = only("param a.{b, c}.w : [out, in], Shard(out, zigzag) @ tp")
    assert isinstance(line, ParamLine)
    assert line.pattern.text == "a.{b,c}.w"
    assert text_at("param a.{b, c}.w : [out, in]", line.pattern.span) == "a.{b, c}.w"
    assert line.dims == ("out", "in")
    assert line.placed[0].placement == Shard("out", "zigzag")


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        ("Replicate", Replicate()),
        ("Partial", Partial()),
        ("auto", Auto()),
        ("Shard(seq)", Shard("seq")),
        ("Shard(0)", Shard(0)),
        ("Shard( 1 , contiguous )", Shard(1)),
        ("Shard(seq, zigzag)", Shard("seq", "zigzag")),
    ],
)
def test_placements(text, placement):
    line = only(f"value norm : {text}")
    assert isinstance(line, ValueLine)
    (placed,) = line.placed
    assert (placed.placement, placed.axis) == (placement, None)
    assert placed.span == Span("<string>", 1, 14, 1, 14 + len(text))


def test_stored():
    text = "param a : [x, y], stored Shard(0) @ dp, Shard(y) @ tp, stored auto"
    line = only(text)
    assert isinstance(line, ParamLine)
    assert [(p.placement, p.axis, p.stored) for p in line.placed] == [
        (Shard(0), "dp", True),
        (Shard("y"), "tp", False),
        (Auto(), None, True),
    ]
    assert [text_at(text, p.span) for p in line.placed] == ["stored Shard(0) @ dp", "Shard(y) @ tp", "stored auto"]
    assert line != only(text.replace("stored Shard", "Shard"))


@pytest.mark.parametrize(
    ("text", "printed", "bandwidth", "latency"),
    [
        ("link a = 450 GB/s, 3 us", "link a = 450 GB/s, 3 us", 450 * 10**9, Fraction(3, 10**6)),
        ("link a=450GB/s,3us", "link a = 450 GB/s, 3 us", 450 * 10**9, Fraction(3, 10**6)),
        ("link a = 400 Gbit/s, 0.5 ms", "link a = 400 Gbit/s, 0.5 ms", 50 * 10**9, Fraction(1, 2000)),
        ("link a = 1.5 GiB/s, 20 ns", "link a = 1.5 GiB/s, 20 ns", 3 * 2**29, Fraction(1, 5 * 10**7)),
    ],
)
def test_link(text, printed, bandwidth, latency):
    (line,) = parse(text).links
    assert str(line) == printed
    assert (line.name, line.bandwidth.amount, line.latency.amount) == ("a", bandwidth, latency)
    assert text_at(text, line.latency.span) == text.split(",")[1].strip()


def test_limit():
    (line,) = parse("limit memory 60 GiB").limits
    assert (line.resource, line.most.number, line.most.unit, line.most.amount) == ("memory", "60", "GiB", 60 * 2**30)


def test_strategy():
    (line,) = parse("within a {\n strategy b.* : ring @ cp\n}").strategies
    assert (str(line.pattern), [(way.name, way.axis) for way in line.ways]) == ("a.b.*", [("ring", "cp")])
    assert only("strategy a : ring").ways[0].axis is None
    two = only("strategy a : all_to_all @ tp +\n  ring @ cp")
    assert [(way.name, way.axis) for way in two.ways] == [("all_to_all", "tp"), ("ring", "cp")]
    assert str(two) == "strategy a : all_to_all @ tp + ring @ cp"


def test_lower():
    text = "lower a.* : overlap = ring, depth = 2"
    (line,) = parse(text).lowers
    assert [(s.key, s.value) for s in line.settings] == [("overlap", "ring"), ("depth", "2")]
    assert [text_at(text, s.span) for s in line.settings] == ["overlap = ring", "depth = 2"]


@pytest.mark.parametrize(
    ("text", "axis", "direction", "comparison", "amount"),
    [
        ("expect a : all_gather @ tp forward <= 2", "tp", "forward", "<=", 2),
        ("expect a : all_gather @ forward == 0", "forward", None, "==", 0),
        ("expect a : all_gather backward > 3", None, "backward", ">", 3),
        ("expect a : all_gather < 2 MiB", None, None, "<", 2 * 2**20),
        ("expect a : all_gather>=1.5kB", None, None, ">=", 1500),
    ],
)
def test_expect(text, axis, direction, comparison, amount):
    (line,) = parse(text).expects
    assert (line.collective, line.axis, line.direction) == ("all_gather", axis, direction)
    assert (line.comparison, line.bound.amount) == (comparison, amount)
    assert parse(str(line)).expects == (line,)


def test_output():
    line = only("output loss, 0 : Replicate")
    assert isinstance(line, OutputLine)
    assert line.names == ("loss", "0")


def test_within_joins_paths():
    spec = parse("""
        within model {
          within {encoder,decoder}.* {
            param w : auto
            value self : auto
          }
          param head : auto
        }
        param w : auto
    """)
    assert [str(p.pattern) for p in spec.params] == ["model.{encoder,decoder}.*.w", "model.head", "w"]
    assert [str(v.pattern) for v in spec.values] == ["model.{encoder,decoder}.*.self"]
    assert spec.params[0].pattern.matches("model.decoder.3.w")


@pytest.mark.parametrize(
    "text",
    [
        "within a {\n param w : auto\n}",
        "within a{\n param w : auto\n}",
        "within a\n{\n param w : auto\n}",
        "within a # why\n# more\n {\n param w : auto\n}",
        "within a {\n param w : auto }",
        "within a {  # opens\n\tparam w : auto\n\t} # closes",
    ],
)
def test_braces_of_a_block(text):
    assert str(parse(text)) == "param a.w : auto\n"


def test_braces_of_a_path_next_to_those_of_a_block():
    assert str(parse("within {a,b} {\n param {c,d} : auto\n}")) == "param {a,b}.{c,d} : auto\n"


@pytest.mark.parametrize(
    "text",
    [
        "input a, b : [x,\n  y]",
        "input a,\n  b : [x, y]",
        "input a, b :\n  [x, y]",
        "input a, b : [ # dims\n\n  x, # one\n  y\n]",
        "input\ta, b : [x, y] # done",
        "input a, b :\n\t[x,\r\n y]",
    ],
)
def test_a_statement_goes_on_while_it_is_open(text):
    spec = parse(text + "\nmesh tp")
    assert str(spec) == "mesh tp\ninput a, b : [x, y]\n"
    assert spec.axes[0].span.line == text.count("\n") + 2


def test_keywords_are_names_where_names_are_meant():
    text = "input value, over : [device,\n  mesh,\n  stored]"
    assert only(text).names == ("value", "over")
    assert only(text).dims == ("device", "mesh", "stored")
    assert str(parse("param mesh.within.param : Shard(over)")) == "param mesh.within.param : Shard(over)\n"


def test_axis_of():
    one = parse("mesh tp\nvalue a : Partial, Partial @ dp")
    assert [one.axis_of(p) for p in one.values[0].placed] == ["tp", "dp"]
    two = parse("mesh tp\nmesh dp\nvalue a : Partial")
    assert two.axis_of(two.values[0].placed[0]) is None


def test_equality_ignores_places_and_nothing_else():
    a = parse("mesh tp\nparam a.b : Shard(0)")
    assert a == parse("\n\n  mesh   tp\n\tparam a.b:Shard( 0 )", "other.plc")
    assert a != parse("mesh tp\nparam a.b : Shard(1)")
    assert a != parse("mesh tp\nparam a.c : Shard(0)")
    assert a != parse("mesh dp\nparam a.b : Shard(0)")


def test_specs_and_errors_cross_process_borders():
    spec = parse(DESIGN, "llama.plc")
    for other in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
        assert other == spec
        assert other.axes[0].name.span == spec.axes[0].name.span
    with pytest.raises(PlacementError) as caught:
        parse("foo\nbar")
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.diagnostics == caught.value.diagnostics
    assert str(error) == str(caught.value)


def test_load(tmp_path):
    (tmp_path / "a.plc").write_text(DESIGN)
    assert load(tmp_path / "a.plc") == parse(DESIGN)
    assert load(str(tmp_path / "a.plc")).file == str(tmp_path / "a.plc")


def test_names_that_look_alike_are_one():
    angstrom, letter = "\u212b", "\u00c5"  # NFC makes the second of the first
    text = f"input x : [{angstrom}], Shard({letter})\noutput o : Shard({angstrom})\nparam {angstrom}.w : Shard(0)"
    spec = parse(f"mesh tp\n{text}")
    assert spec.inputs[0].dims == (letter,)
    assert spec.params[0].pattern.matches(f"{letter}.w")
    assert check(spec) == ()
