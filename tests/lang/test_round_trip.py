"""``str(spec)`` is ``.plc`` text that means ``spec``, and no text at all breaks the parser."""

from hypothesis import given, settings
from hypothesis import strategies as st

from placement.lang import PlacementError, check, parse

words = st.sampled_from(
    ["tp", "dp", "seq", "out", "mesh", "value", "over", "stored", "auto", "Shard", "_x1", "é", "in"]
)
pieces = st.sampled_from(
    ["a", "q_proj", "0", "mesh", "{q,k}_proj", "{a.b,c}", "{a,b{1,2}}", "[0-12]", "*", "**", "h_*", "a-b"]
)
paths = st.lists(pieces, min_size=1, max_size=4).map(".".join)
dims = st.one_of(st.none(), st.lists(words, max_size=3).map(lambda names: f"[{', '.join(names)}]"))
placements = st.one_of(
    st.sampled_from(["Replicate", "Partial", "auto"]),
    st.builds(
        lambda dim, order: f"Shard({dim}{order})",
        st.one_of(words, st.integers(0, 9)),
        st.sampled_from(["", ", zigzag", ", contiguous"]),
    ),
)
at = st.one_of(st.just(""), words.map(" @ {}".format))
placed = st.builds("{}{}{}".format, st.sampled_from(["", "", "stored "]), placements, at)


@st.composite
def tails(draw):
    """``[dims], placements``, at least one of them."""
    named = draw(dims)
    places = draw(st.lists(placed, min_size=named is None, max_size=2))
    return ", ".join([*([] if named is None else [named]), *places])


names = st.lists(words, min_size=1, max_size=2, unique=True).map(", ".join)
blanks = st.sampled_from(["", "\n", '  # comment } { "\n', "\t"])
inner = st.one_of(
    st.builds("param {} : {}".format, paths, tails()),
    st.builds("value {} : {}".format, paths, st.lists(placed, min_size=1, max_size=2).map(", ".join)),
)
settings_ = st.lists(st.builds("{} = {}".format, words, words), min_size=1, max_size=3).map(", ".join)
bounds = st.sampled_from(["2", "0", "2 MiB", "1.5GB"])
inner = st.one_of(
    inner,
    st.builds("strategy {} : {}{}".format, paths, words, at),
    st.builds("strategy {} : {}{} + {}{}".format, paths, words, at, words, at),
    st.builds("lower {} : {}".format, paths, settings_),
    st.builds(
        "expect {} : {}{} {} {} {}".format,
        paths,
        words,
        at,
        st.sampled_from(["", "forward", "backward"]),
        st.sampled_from(["<=", "<", "==", ">=", ">"]),
        bounds,
    ),
)
blocks = st.recursive(
    inner,
    lambda inside: st.builds(
        lambda path, body, blank: f"within {path} {{{blank}\n" + "\n".join(body) + f"\n{blank}}}",
        paths,
        st.lists(inside, max_size=3),
        blanks,
    ),
    max_leaves=4,
)
statements = st.one_of(
    blocks,
    st.builds("mesh {}{}{}".format, words, st.sampled_from(["", " = 8"]), st.sampled_from(["", " over ib"])),
    st.builds("input {} : {}".format, names, tails()),
    st.builds("output {} : {}".format, names, placed),
    st.builds("link {} = {}, {}".format, words, st.sampled_from(["1 GB/s", "4.5Gbit/s"]), st.sampled_from(["3 us"])),
    st.builds("limit {} {}".format, words, st.sampled_from(["60 GB", "1 TiB"])),
)
rates = st.builds("{} {}".format, st.sampled_from(["400 TFLOP/s", "1.5PFLOP/s"]), st.sampled_from(["float32", "half"]))
figures = st.one_of(rates, st.sampled_from(["2 TB/s", "96 GB", "80GiB"]))
devices = st.one_of(
    st.sampled_from(["", "device h100"]),
    st.builds("device {} = {}".format, words, st.lists(figures, min_size=1, max_size=4).map(", ".join)),
)
lines = st.lists(st.builds("{}{}".format, blanks, statements), max_size=6).map("\n".join)
texts = st.builds("{}\n{}".format, lines, devices)


@settings(max_examples=150, deadline=None)
@given(texts)
def test_a_spec_prints_itself_back(text):
    spec = parse(text)
    printed = str(spec)
    again = parse(printed)
    assert again == spec
    assert str(again) == printed
    assert sorted(d.code for d in check(again)) == sorted(d.code for d in check(spec))


def no_file(path):
    raise FileNotFoundError(2, "No such file or directory", path)


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.text(max_size=60),
        st.lists(st.one_of(statements, st.text('{}[](),:=@+"#\n ab*.', max_size=12))).map(" ".join),
    )
)
def test_any_text_is_a_spec_or_diagnostics(text):
    error = None
    try:
        check(parse(text, read=no_file))
    except PlacementError as raised:
        error = raised
    if error is None:
        return
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    assert error.diagnostics
    for fault in error.diagnostics:
        assert 1 <= fault.line <= len(lines)
        assert 1 <= fault.column <= len(lines[fault.line - 1]) + 1
    assert str(error)
