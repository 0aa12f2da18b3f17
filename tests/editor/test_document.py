"""What stands at a place of a text that is being written; ``|`` marks the place."""

from __future__ import annotations

import pytest
from lsprotocol.types import Position

from placement.editor import navigation
from placement.editor.completion import complete
from placement.editor.document import Slot, declared, family, read
from placement.editor.knowledge import Effect, Known
from placement.editor.positions import Text
from placement.editor.words import pathed
from placement.lang import parser
from placement.lang.spec import COLLECTIVES, DEVICES, DTYPES, LINKS, LOWERINGS, PARAMETER_DIMS, Span
from placement.lang.split import KEYWORDS

HEAD = "mesh tp = 4\nlink fast = 1 GB/s, 3 us\ninput x, y : [batch, seq]\n"
KNOWN = Known(
    params={f"blocks.{i}.{name}": "[8]" for i in range(3) for name in ("up.weight", "up.bias", "down.weight")},
    modules={"blocks": "ModuleList"}
    | {f"blocks.{i}{name}": "Linear" for i in range(3) for name in ("", ".up", ".down", ".norm")},
    inputs={"x": "[4, 8]", "y": "[4]"},
    outputs={"loss": "Replicate @ tp"},
    strategies=("ring",),
    mesh={"tp": 4},
)


def marked(text: str, file: str = "a.plc"):
    """The document of a text without its ``|``, and the offset where that was."""
    offset = text.index("|")
    return read(Text(file, text.replace("|", "", 1))), offset


def offered(text: str) -> list[str]:
    document, offset = marked(text)
    return [item.label for item in complete(document, offset, declared([document]), KNOWN)]


DIMS = ["batch", "seq"]
PLACEMENTS = ["Replicate", "Partial", "Shard", "auto"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("|", list(KEYWORDS)),
        ("par|", list(KEYWORDS)),
        ("mesh x|", []),
        ("mesh x |", ["over"]),
        ("mesh x = 2 |", ["over"]),
        ("mesh x = 2 over |", ["fast", *LINKS]),
        ("link |", []),
        ("device |", list(DEVICES)),
        ("device own = 60 |", []),
        ("device own = 60 TFLOP/s |", list(DTYPES)),
        ("device own = 96 GB,\n  60 TFLOP/s bfl|", list(DTYPES)),
        ("limit |", ["memory"]),
        ("input |", ["x", "y"]),
        ("input x, |", ["x", "y"]),
        ("input x : |", PLACEMENTS),
        ("input x : [|", DIMS),
        ("input x : [batch,\n  |", DIMS),
        ("output |", ["loss"]),
        ("output loss : Re|", PLACEMENTS),
        ("param w : |", [*PLACEMENTS, "stored"]),
        ("param w : stored |", PLACEMENTS),
        ("param w : Shard(|", [*DIMS, *PARAMETER_DIMS]),
        ("param w : Shard(|) @ tp", [*DIMS, *PARAMETER_DIMS]),
        ("value w : Shard(|", DIMS),
        ("value w : Shard(seq, |", ["contiguous", "zigzag"]),
        ("value w : Shard(seq) @ |", ["tp"]),
        ("value w : Shard(seq) @ tp, |", PLACEMENTS),
        ("value w : Shard(seq) @ |\nvalue v : Replicate", ["tp"]),  # the next statement is none of this one
        ("strategy w : |", ["ring"]),
        ("strategy w : ring @ |", ["tp"]),
        ("strategy w : ring @ tp + |", ["ring"]),
        ("strategy w : ring @ tp +\n  |", ["ring"]),
        ("strategy w : ring @ tp + gather @ |", ["tp"]),
        ("lower w : |", list(LOWERINGS)),
        ("lower w : overlap = ring, gathered = |", list(LOWERINGS["gathered"])),
        ("expect w : |", list(COLLECTIVES)),
        ("expect w : all_gather @ |", ["tp"]),
        ("expect w : all_gather |", ["forward", "backward"]),
        ("expect w : all_gather @ tp |", ["forward", "backward"]),
        ("# comment |", []),
        ("value w : Replicate # @ |", []),
        ('include "|', []),
        ("value w : Shard(seq) |", []),
        # paths of the model
        ("param |", ["blocks"]),
        ("param bl|", ["blocks"]),
        ("param blocks.|", ["0", "1", "2", "*"]),
        ("param blocks.*.|", ["up", "down"]),
        ("param blocks.[0-1].up.|", ["weight", "bias"]),
        ("param blocks.*.{up,do|", ["up", "down"]),
        ("param blocks.*.{up, down}.|", ["weight", "bias"]),
        ("param **.up.|", ["weight", "bias"]),
        ("value blocks.*.|", ["up", "down", "norm"]),
        ("param nothing.|", []),
        ("param blocks.{.|", []),  # malformed
        # inside blocks
        ("within blocks.* {\n  |\n}", list(pathed())),
        ("within blocks.* {\n  param |", ["up", "down"]),
        ("within blocks.* {\n  param up.|\n}", ["weight", "bias"]),
        ("within blocks {\n  within * {\n    value |", ["up", "down", "norm"]),
        ("within blocks {\n  within * {\n  }\n  value |", ["0", "1", "2", "*"]),
        ("within blocks.* {\n  value up : Replicate\n}\nparam |", ["blocks"]),
        ("within blocks.* {\n}\n|", list(KEYWORDS)),
        ("within blocks.* { # }\n|", list(pathed())),
        ("within {\n  param |", ["blocks", "0", "1", "2", "*", "up", "down", "weight", "bias"]),  # a header at fault
    ],
)
def test_completion(line, expected) -> None:
    assert sorted(offered(HEAD + line)) == sorted(expected)


def test_completion_replaces_the_segment_and_tells_what_it_is() -> None:
    document, offset = marked(HEAD + "param blocks.*.u| : Shard(out)")
    (item,) = [i for i in complete(document, offset, declared([document]), KNOWN) if i.label == "up"]
    assert (item.text_edit.range.start, item.text_edit.range.end) == (Position(3, 15), Position(3, 16))
    document, offset = marked(HEAD + "param blocks.0.up.|")
    details = {i.label: i.detail for i in complete(document, offset, declared([document]), KNOWN)}
    assert details == {"weight": "[8]", "bias": "[8]"}


def test_what_stands_in_a_block_is_what_has_a_path() -> None:
    assert set(pathed()) == set(parser._IN_BLOCKS)


def test_every_slot_is_reached() -> None:
    lines = [mark.args[1] for mark in test_completion.pytestmark if mark.name == "parametrize"]
    found = {place.slot for line, _ in lines[0] for d, o in [marked(HEAD + line)] if (place := d.place(o))}
    assert found == set(Slot)


@pytest.mark.parametrize(
    ("line", "line_and_column"),
    [
        ("value w : Shard(seq) @ t|p", (1, 6)),
        ("value w : Shard(seq) @ tp|", (1, 6)),
        ("value w : Shard(s|eq) @ tp", (3, 22)),
        ("param w : [|batch]", (3, 15)),
        ("mesh dp over f|ast", (2, 6)),
        ("mesh d|p over fast", (4, 6)),
        ("strategy w : ring @ x + ring @ |tp", (1, 6)),
        ("value w : Shard(out|) @ tp", None),
        ("value w : Replicate @ nowhere|", None),
        ("val|ue w : Replicate", None),
    ],
)
def test_declarations(line, line_and_column) -> None:
    document, offset = marked(HEAD + line)
    span = navigation.declaration(document, offset, declared([document]))
    assert (None if span is None else (span.line, span.column)) == line_and_column


def test_an_include_leads_to_its_file() -> None:
    document, offset = marked('include "../com|mon.plc"', file="specs/sub/a.plc")
    assert navigation.declaration(document, offset, declared([document])) == Span("specs/common.plc", 1, 1, 1, 1)


def test_a_family_is_a_file_and_what_it_includes_once() -> None:
    texts = {"a.plc": 'include "b.plc"\ninclude "gone.plc"', "b.plc": 'include "a.plc"\nmesh tp'}
    found = family("a.plc", lambda file: read(Text(file, texts[file])) if file in texts else None)
    assert [document.text.file for document in found] == ["a.plc", "b.plc"]
    assert [*declared(found).axes] == ["tp"]


EFFECT = Effect(
    where="blocks.[0-1]",
    alike=2,
    source="norm",
    target="up",
    what="Shard(seq) -> Replicate",
    axis="tp",
    forward="all_gather",
    backward="reduce_scatter",
    size="64 KiB",
    cause=(("a.plc", 4), ("b_`.plc", 7)),
)
SOLVED = Known(
    params=KNOWN.params,
    modules=KNOWN.modules,
    mesh={"tp": 4},
    placed_params={name: "Shard(out) @ tp" if "bias" not in name else "Replicate @ tp" for name in KNOWN.params},
    effects=(EFFECT,),
)


def hover(line: str) -> str:
    document, offset = marked(HEAD + line)
    found = navigation.hover(document, offset, declared([document]), SOLVED, lambda file: f"file:///{file}")
    return "" if found is None else found[0]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (
            "param blocks.*.up.|* : Shard(out) @ tp",
            ["`Shard(out) @ tp`: 3 parameters", "`Replicate @ tp`: 3 parameters"],
        ),
        ("param ** : |Shard(out) @ tp", ["- and 1 more", r"`blocks.0.up.weight` \[8\]"]),
        (
            "value w : |Replicate",
            [
                "`blocks.[0-1]` (2 alike): `norm → up`, `Shard(seq) -> Replicate @ tp`: ",
                ": `all_gather` forward, `reduce_scatter` backward, 64 KiB; from [a.plc:4](file:///a.plc#L4), ",
                "[b\\_\\`.plc:7](file:///b_`.plc#L7)",
            ],
        ),
        ("va|lue w : Replicate", ["where a module's first output tensor is produced"]),
        ("value w : Replicate @ t|p", ["`tp`: 4 ranks, line 1 of a.plc"]),
        ("mesh |dp", ["`dp`, line 4 of a.plc"]),
        ("dev|ice own = 60 TFLOP/s float32, 2 TB/s, 96 GB", ["``device mine = 60 TFLOP/s float32, 2 TB/s, 96 GB``"]),
    ],
)
def test_hover(line, parts) -> None:
    text = hover(line)
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize("line", ["|", "value w :|", "# |", "value w : Replicate # |x"])
def test_no_hover(line) -> None:
    assert hover(line) == ""


def test_a_statement_leads_to_what_else_caused_its_collectives() -> None:
    document, offset = marked(HEAD + "value w : |Replicate")
    assert navigation.causes(document, offset, SOLVED) == [("b_`.plc", 7)]
    document, offset = marked(HEAD + "\nvalue w : |Replicate")
    assert navigation.causes(document, offset, SOLVED) == []


@pytest.mark.parametrize(
    ("encoding", "text", "line", "units", "offset"),
    [
        ("utf-16", "ab\ncd", 1, 1, 4),
        ("utf-16", "# \U0001f600é x", 0, 6, 5),
        ("utf-8", "# \U0001f600é x", 0, 9, 5),
        ("utf-32", "# \U0001f600é x", 0, 5, 5),
        ("utf-16", "a\r\nb\rc", 2, 0, 5),
        ("utf-16", "a\u2028b\x0bc\nd", 1, 0, 6),  # what Python's splitlines cuts and editors do not
        ("utf-16", "\ufeffab", 0, 1, 0),
        ("utf-8", "\ufeffab", 0, 4, 1),
    ],
)
def test_positions(encoding, text, line, units, offset) -> None:
    read_text = Text("a.plc", text, encoding)
    assert read_text.offset(Position(line, units)) == offset
    assert read_text.between(offset, offset).start == Position(line, units)


@pytest.mark.parametrize(("line", "units", "offset"), [(0, 99, 2), (0, 0, 0), (1, 99, 5), (9, 0, 5)])
def test_positions_past_the_end(line, units, offset) -> None:
    assert Text("a.plc", "ab\ncd").offset(Position(line, units)) == offset


@pytest.mark.parametrize("cut", range(0, 400, 7))
def test_every_beginning_of_a_text_is_read(cut) -> None:
    """Whatever is typed so far, and wherever the cursor is, there is an answer."""
    text = (HEAD + 'within a.* {\n  param q.{w,b} : stored Shard(out, zigzag) @ tp # x\n}\ninclude "b.plc"\n' * 3)[:cut]
    document = read(Text("a.plc", text))
    names = declared([document])
    for offset in {0, len(text) // 2, len(text)}:
        complete(document, offset, names, KNOWN)
        navigation.hover(document, offset, names, SOLVED, str)
        navigation.declaration(document, offset, names)
