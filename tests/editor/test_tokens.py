"""Colours: one table, read by Pygments and by TextMate, that knows every word the language knows."""

from __future__ import annotations

import json
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from pygments.lexers import get_lexer_by_name, get_lexer_for_filename

from placement.editor.lexer import TOKENS, PlacementLexer
from placement.editor.textmate import SCOPE, text
from placement.editor.tokens import RULES, Kind
from placement.lang import spec, split, statements

ROOT = Path(__file__).resolve().parents[2]
EXTENSION = ROOT / "editors" / "vscode"
GRAMMAR = EXTENSION / "syntaxes" / "placement.tmLanguage.json"
KINDS = {token: kind for kind, token in TOKENS.items()}
BLOCK = re.compile(r"^```plc\b[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def by_pygments(source: str) -> list[tuple[Kind, str]]:
    lexer = PlacementLexer(stripnl=False, ensurenl=False)
    return [(KINDS[token], shown) for token, shown in lexer.get_tokens(source) if shown.strip()]


def by_textmate(source: str) -> list[tuple[Kind, str]]:
    """What an editor does with the grammar's file: line by line, the leftmost match, then the first rule."""
    grammar = json.loads(GRAMMAR.read_text(encoding="utf-8"))
    assert set(grammar) == {"name", "scopeName", "fileTypes", "patterns"}  # nothing this reader does not know
    found = []
    for line in source.split("\n"):
        at = 0
        while at < len(line):
            matches = [(m, p) for p in grammar["patterns"] if (m := re.compile(p["match"]).search(line, at))]
            if not matches:
                break
            match, pattern = min(matches, key=lambda pair: pair[0].start())
            captures = {0: pattern["name"]} if "name" in pattern else {}
            captures |= {int(group): capture["name"] for group, capture in pattern.get("captures", {}).items()}
            found += [(Kind(scope.removesuffix(".placement")), match[group]) for group, scope in captures.items()]
            at = match.end()
    return found


def kinds(text: str) -> list[tuple[Kind, str]]:
    """``KEYWORD mesh | NAME tp`` as tokens."""
    pairs = (item.strip().split(" ", 1) for item in text.split("|"))
    return [(Kind[kind], shown) for kind, shown in pairs]


TABLE = {
    "mesh tp = 8 over nvlink": "KEYWORD mesh | SETTING tp | OPERATOR = | NUMBER 8 | MODIFIER over | CONSTANT nvlink",
    "link fast = 450 GB/s, 3.5 us": (
        "KEYWORD link | SETTING fast | OPERATOR = | NUMBER 450 | UNIT GB/s | PUNCTUATION , | NUMBER 3.5 | UNIT us"
    ),
    "device h100   # fast": "KEYWORD device | NAME h100 | COMMENT # fast",
    "device own = 60 TFLOP/s float32, 96 GB": (
        "KEYWORD device | SETTING own | OPERATOR = | NUMBER 60 | UNIT TFLOP/s | CONSTANT float32 | PUNCTUATION ,"
        "| NUMBER 96 | UNIT GB"
    ),
    "input a, value : [batch,\n  value]": (
        "KEYWORD input | NAME a | PUNCTUATION , | NAME value | PUNCTUATION : | PUNCTUATION [ | NAME batch"
        "| PUNCTUATION , | NAME value | PUNCTUATION ]"  # a dim of this name starts a line, and no statement
    ),
    "param h.[0-3].{q,k}-x.w*:Shard(out)@tp": (
        "KEYWORD param | NAME h | PUNCTUATION . | WILDCARD [0-3] | PUNCTUATION . | PUNCTUATION { | NAME q"
        "| PUNCTUATION , | NAME k | PUNCTUATION } | NAME -x | PUNCTUATION . | NAME w | WILDCARD * | PUNCTUATION :"
        "| PLACEMENT Shard | PUNCTUATION ( | NAME out | PUNCTUATION ) | OPERATOR @ | AXIS tp"
    ),
    "value model.auto.**.0.forward : Shard(0, zigzag) @ cp": (
        "KEYWORD value | NAME model | PUNCTUATION . | NAME auto | PUNCTUATION . | WILDCARD ** | PUNCTUATION . | NAME 0"
        "| PUNCTUATION . | NAME forward | PUNCTUATION : | PLACEMENT Shard | PUNCTUATION ( | NUMBER 0 | PUNCTUATION ,"
        "| CONSTANT zigzag | PUNCTUATION ) | OPERATOR @ | AXIS cp"
    ),
    "param w : stored Shard(0) @ dp, auto": (
        "KEYWORD param | NAME w | PUNCTUATION : | MODIFIER stored | PLACEMENT Shard | PUNCTUATION ( | NUMBER 0"
        "| PUNCTUATION ) | OPERATOR @ | AXIS dp | PUNCTUATION , | PLACEMENT auto"
    ),
    "strategy m.* : ring @ cp + gather@tp+\n  ring": (
        "KEYWORD strategy | NAME m | PUNCTUATION . | WILDCARD * | PUNCTUATION : | NAME ring | OPERATOR @ | AXIS cp"
        "| OPERATOR + | NAME gather | OPERATOR @ | AXIS tp | OPERATOR + | NAME ring"
    ),
    "lower m : overlap = ring, reduce = float32": (
        "KEYWORD lower | NAME m | PUNCTUATION : | SETTING overlap | OPERATOR = | NAME ring | PUNCTUATION ,"
        "| SETTING reduce | OPERATOR = | NAME float32"
    ),
    "limit memory 60 GiB": "KEYWORD limit | NAME memory | NUMBER 60 | UNIT GiB",
    "expect m : all_gather @ tp forward <= 2": (
        "KEYWORD expect | NAME m | PUNCTUATION : | COLLECTIVE all_gather | OPERATOR @ | AXIS tp | MODIFIER forward"
        "| OPERATOR <= | NUMBER 2"
    ),
    'include "a b.plc"': 'KEYWORD include | STRING "a b.plc"',
    "\twithin a {\n}": "KEYWORD within | NAME a | PUNCTUATION { | PUNCTUATION }",
    "value é.größe : $": "KEYWORD value | NAME é | PUNCTUATION . | NAME größe | PUNCTUATION : | ERROR $",
    'include "open': 'KEYWORD include | STRING "open',
}


@pytest.mark.parametrize("source", TABLE)
@pytest.mark.parametrize("read", [by_pygments, by_textmate])
def test_tokens(read, source) -> None:
    assert read(source) == kinds(TABLE[source])


def test_the_table_shows_every_kind() -> None:
    assert {kind for shown in TABLE.values() for kind, _ in kinds(shown)} == set(Kind)


@pytest.mark.parametrize(
    ("words", "kind", "line"),
    [
        (split.KEYWORDS, Kind.KEYWORD, "{} x"),
        (statements.PLACEMENTS, Kind.PLACEMENT, "value x : {}"),
        (spec.COLLECTIVES, Kind.COLLECTIVE, "expect x : {} <= 1"),
        (spec.DIRECTIONS, Kind.MODIFIER, "expect x : all_reduce {} <= 1"),
        (spec.LINKS, Kind.CONSTANT, "mesh x over {}"),
        (statements.ORDERS, Kind.CONSTANT, "value x : Shard(a, {})"),
        (spec.UNITS, Kind.UNIT, "limit memory 1 {}"),
        (spec.DTYPES, Kind.CONSTANT, "device x = 1 TFLOP/s {}"),
        (spec.LOWERINGS, Kind.SETTING, "lower x : {} = none"),
        (("over",), Kind.MODIFIER, "mesh x {} y"),
        (("stored",), Kind.MODIFIER, "param x : {} auto"),
    ],
)
def test_every_word_of_the_language_has_its_colour(words, kind, line) -> None:
    for word in words:
        for read in (by_pygments, by_textmate):
            assert (kind, word) in read(line.format(word)), word


@pytest.mark.parametrize("word", ["meshes", "param_x", "Shards", "autos", "all_gathered", "overs", "zigzags"])
def test_longer_words_are_names(word) -> None:
    for read in (by_pygments, by_textmate):
        assert read(word) == [(Kind.NAME, word)]


def test_the_grammars_words_are_known() -> None:
    """A word that the grammar itself spells is a keyword or a modifier here."""
    spelled = set(re.findall(r'"([a-z]+)"', (ROOT / "grammar" / "placement.lark").read_text(encoding="utf-8")))
    pattern = next(rule.pattern for rule in RULES if rule.kinds == (Kind.MODIFIER,))
    assert {word for word in spelled if word not in split.KEYWORDS and not re.fullmatch(pattern, word)} == set()


def specs() -> list[tuple[str, str]]:
    """Every example, and every block of the documentation but for the lines that show a wrong character."""
    found = [(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in ROOT.glob("examples/**/*.plc")]
    for page in [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"]:
        for index, block in enumerate(BLOCK.findall(page.read_text(encoding="utf-8"))):
            lines = [line for line in block.splitlines() if "error[PLC004]" not in line]
            found.append((f"{page.relative_to(ROOT)}#{index}", "\n".join(lines)))
    return found


def test_no_example_and_no_block_of_the_documentation_has_an_error_token() -> None:
    found = specs()
    assert len(found) > 40
    for name, source in found:
        tokens = by_pygments(source)
        assert [token for token in tokens if token[0] is Kind.ERROR] == [], name
        assert by_textmate(source) == tokens, name


def test_the_grammars_file_is_fresh(request) -> None:
    if request.config.getoption("--accept"):
        GRAMMAR.write_text(text(), encoding="utf-8")
    assert GRAMMAR.read_text(encoding="utf-8") == text(), "run this test with --accept"


def test_pygments_finds_the_lexer() -> None:
    declared = {entry.name: entry.value for entry in entry_points(group="pygments.lexers")}
    assert declared.get("placement") == "placement.editor.lexer:PlacementLexer"
    assert isinstance(get_lexer_by_name("plc"), PlacementLexer)
    assert isinstance(get_lexer_for_filename("llama.plc"), PlacementLexer)


def test_every_character_is_kept() -> None:
    source = "".join(f"{line}\n" for line in TABLE)
    lexer = PlacementLexer(stripnl=False, ensurenl=False)
    assert "".join(shown for _, shown in lexer.get_tokens(source)) == source


def test_the_extension_names_files_that_exist() -> None:
    package = json.loads((EXTENSION / "package.json").read_text(encoding="utf-8"))
    (language,), (grammar,) = package["contributes"]["languages"], package["contributes"]["grammars"]
    assert language["extensions"] == [".plc"]
    assert grammar["scopeName"] == SCOPE
    assert (EXTENSION / grammar["path"]).resolve() == GRAMMAR
    assert (EXTENSION / package["main"]).is_file()
    rules = json.loads((EXTENSION / language["configuration"]).read_text(encoding="utf-8"))
    assert rules["comments"] == {"lineComment": "#"}
    assert ["{", "}"] in rules["brackets"]
