import re
import time

import pytest

from placement.lang import Pattern, Span
from placement.lang.patterns import PatternError, compile_pattern, expand

SPAN = Span("t.plc", 1, 1, 1, 2)

# pattern, the paths that fit, the paths that do not
CASES = [
    ("lm_head.weight", ["lm_head.weight"], ["lm_head", "lm_head.weight.x", "lm_headxweight", "a.lm_head.weight", ""]),
    ("*", ["norm", "0", "a-b"], ["a.b", ""]),
    ("model.layers.*", ["model.layers.0", "model.layers.12"], ["model.layers", "model.layers.0.mlp", "model.layers."]),
    ("a.*.b", ["a.x.b"], ["a.b", "a.x.y.b"]),
    ("**", ["a", "a.b", "a.b.c", ""], []),
    ("**.weight", ["weight", "a.weight", "a.b.weight"], ["a.bias", "aweight", "weight.a"]),
    ("model.**", ["model", "model.a", "model.a.b"], ["models", "a.model", "modelx.a"]),
    ("a.**.z", ["a.z", "a.b.z", "a.b.c.z"], ["az", "a.bz", "z", "a"]),
    ("**.a.**", ["a", "x.a", "a.y", "x.y.a.y.x"], ["b", "xa", "a1"]),
    ("**.**.z", ["z", "a.z", "a.b.z"], ["a", "az"]),
    ("a.**.**.z", ["a.z", "a.b.c.z"], ["a.b"]),
    (
        "self_attn.{q,k,v}_proj.weight",
        ["self_attn.q_proj.weight", "self_attn.v_proj.weight"],
        ["self_attn.o_proj.weight"],
    ),
    ("{input,post_attention}_layernorm", ["input_layernorm", "post_attention_layernorm"], ["_layernorm"]),
    ("{a.b,c}.w", ["a.b.w", "c.w"], ["a.w", "b.w", "a.c.w"]),
    ("{a,b{1,2.x}}.w", ["a.w", "b1.w", "b2.x.w"], ["b.w", "ax.w", "b1.x.w"]),
    ("{a.**,b}.w", ["a.w", "a.x.y.w", "b.w"], ["b.x.w"]),
    ("a{**,b}", ["ab"], None),  # refused: '**' is part of a segment in one of them
    ("a.{**,b}.c", ["a.c", "a.b.c", "a.x.y.c"], ["ac", "a..c"]),
    ("{x,}y", ["xy", "y"], ["x"]),
    ("h.[0-3].w", ["h.0.w", "h.3.w"], ["h.4.w", "h.03.w", "h.10.w", "h.-1.w", "h..w"]),
    ("h.[8-12].w", [f"h.{i}.w" for i in range(8, 13)], [f"h.{i}.w" for i in (0, 1, 2, 7, 13, 80, 112)]),
    ("block[1-2].conv", ["block1.conv", "block2.conv"], ["block.conv", "block3.conv", "block12.conv"]),
    ("*_proj", ["q_proj", "_proj"], ["q_proj.weight", "q.x_proj", "proj"]),
    ("a.b", ["a.b"], ["aXb"]),  # a dot is a dot
    ("é.漢", ["é.漢"], ["e.漢"]),
    ("parametrizations.w.original0", ["parametrizations.w.original0"], ["parametrizations.w.original1"]),
]


@pytest.mark.parametrize(("pattern", "fits", "not_fits"), CASES, ids=[case[0] for case in CASES])
def test_pattern(pattern, fits, not_fits):
    if not_fits is None:
        with pytest.raises(ValueError, match="whole segments"):
            Pattern(pattern, SPAN).matches(fits[0])
        return
    assert [path for path in fits if not Pattern(pattern, SPAN).matches(path)] == []
    assert [path for path in not_fits if Pattern(pattern, SPAN).matches(path)] == []


@pytest.mark.parametrize(
    ("text", "start", "end", "message"),
    [
        ("a..b", 0, 4, "an empty segment"),
        (".a", 0, 2, "an empty segment"),
        ("a.", 0, 2, "an empty segment"),
        ("a.{b,}.c", 0, 8, "an empty segment in 'a..c'"),
        ("a.[3-0].b", 2, 7, "the index range [3-0] is empty"),
        ("a.[3].b", 2, 5, "a single index has no brackets: layers.3.mlp"),
        ("a.[0-9999999999]", 2, 16, "an index range is written [first-last]"),
        ("a.***", 2, 5, "only '*' and '**' have a meaning"),
        ("a.x**", 0, 5, "'**' stands for whole segments, but is part of 'x**': inside one write '*'"),
        ("a.{b", 2, 3, "this '{' is not closed"),
        ("a}.b", 1, 2, "this '}' closes nothing"),
        ("a b", 1, 2, "white space inside a path"),
        ("a/b", 1, 2, "'/' has no place in a path"),
    ],
)
def test_malformed(text, start, end, message):
    with pytest.raises(PatternError) as caught:
        expand(text)
    assert (str(caught.value), caught.value.start, caught.value.end) == (message, start, end)


@pytest.mark.parametrize(
    ("first", "last"), [(0, 0), (0, 9), (0, 31), (7, 7), (9, 120), (99, 1001), (100, 999), (0, 3000)]
)
def test_ranges_are_numeric(first, last):
    regex = compile_pattern(f"[{first}-{last}]")
    assert [i for i in range(3200) if regex.fullmatch(str(i))] == list(range(first, last + 1))


def test_expansion_keeps_order_and_drops_repeats():
    assert expand("a.{b,c.d,b}") == ("a.b", "a.c.d")


def test_alternatives_have_a_limit():
    assert len(expand("{a,b}" * 9)) == 512
    with pytest.raises(PatternError, match="more than 1000 alternatives"):
        expand("{a,b}" * 10)


def test_the_length_has_a_limit():
    assert len(expand("a" * 10_000)) == 1
    with pytest.raises(PatternError, match="more than 10000 characters"):
        expand("a" * 10_001)


def test_repeated_wildcards_do_not_slow_a_match():
    start = time.process_time()
    assert not Pattern("**." * 30 + "z", SPAN).matches("a." * 60 + "y")
    assert time.process_time() - start < 1


def test_nested_ambiguity_is_not_exponential():
    # Equal expansions are merged, so a failing match does not try 3^9 ways.
    regex = compile_pattern("{a,a,a}" * 9 + "b")
    assert regex.pattern == "aaaaaaaaab"
    assert isinstance(regex, re.Pattern)
