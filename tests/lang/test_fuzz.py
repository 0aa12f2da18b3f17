"""Ten thousand texts drawn from the grammar, and ten thousand mutilated examples."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import drawn
import pytest

from placement.lang import PlacementError, Spec, check, load, parse
from placement.lang.format import format_text
from placement.lang.split import KEYWORDS

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*/*.plc"))
ROUNDS, EACH = 10, 1000
LIMIT = 0.05  # seconds of CPU per input


def nothing(_path: str) -> str:
    return ""


# -- from the grammar -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> dict[str, list[str]]:
    writer = drawn.Writer(0)
    return {keyword: [writer.statement(keyword) for _ in range(100)] for keyword in KEYWORDS}


def comments(text: str) -> list[str]:
    pieces = re.findall(r'"[^"\n\r]*"|(#[^\n\r]*)', text)
    return [piece.rstrip() for piece in pieces if piece]


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_what_the_grammar_allows_is_formatted_once_and_for_all(pool, seed):
    writer = drawn.Writer(seed)
    for _ in range(EACH):
        text = writer.text(pool, writer.random.randint(1, 3))
        formatted = format_text(text)
        assert parse(formatted, read=nothing) == parse(text, read=nothing), text
        assert format_text(formatted) == formatted, text
        assert comments(formatted) == comments(text), text
        assert not re.search(r"[ \t\r]\n|\r|\n\n\n|\A\n|[^\n]\Z|\n\n\Z", formatted), text


def test_every_statement_and_terminal_is_drawn(pool):
    rules, _, _ = drawn._rules()
    assert set(KEYWORDS) <= set(rules)
    for keyword, statements in pool.items():
        assert len(set(statements)) > 5, keyword
    text = "\n".join(statement for statements in pool.values() for statement in statements)
    for words in drawn.WORDS.values():
        assert sum(word in text for word in words) > len(words) / 2


# -- from the examples ------------------------------------------------------------------------------

TOKEN = re.compile(r"\w+|\s+|[^\w\s]")
ODD = (*'{}[]()"#:,=@*\n\r\t\0\ufeff\u2028\x85é漢', "\U0001f600", "**", "{" * 40, "a." * 60, "9" * 20)
ODDER = ("mesh", "within", "stored", "Shard(", "over", *ODD)


def mutilated(text: str, draw: random.Random) -> bytes:
    """The text after a few slips: of tokens, characters, lines or bytes."""
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        kind = draw.randrange(4)
        if kind == 3:
            data = bytearray(text.encode("utf-8", "surrogatepass"))
            for _ in range(draw.choice((1, 1, 4))):
                data[draw.randrange(len(data) + 1) : draw.randrange(len(data) + 1)] = draw.randbytes(draw.randrange(3))
            text = data.decode("utf-8", "replace") if draw.random() < 0.5 else data.decode("latin-1")
            continue
        parts = (TOKEN.findall(text), list(text), text.splitlines(keepends=True))[kind]
        parts = parts or [""]
        at, other = draw.randrange(len(parts)), draw.randrange(len(parts))
        action = draw.randrange(5)
        if action == 0:
            del parts[at]
        elif action == 1:
            parts.insert(at, draw.choice(ODDER))
        elif action == 2:
            parts[at] = draw.choice((*ODDER, parts[other]))
        elif action == 3:
            parts[at:at] = parts[at : at + draw.randrange(1, 4)] * draw.choice((1, 1, 20))
        else:
            parts[at], parts[other] = parts[other], parts[at]
        text = "".join(parts)
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if data and draw.random() < 0.1:
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def judged(content: bytes) -> Spec | PlacementError:
    """What a reader of the file gets: a spec that was checked, or diagnostics that can be shown."""
    try:
        spec = load("m.plc", read=lambda path: content if path == "m.plc" else b"")
        check(spec)
    except PlacementError as error:
        str(error)
        return error
    return spec


def seconds(content: bytes) -> float:
    start = time.process_time()
    judged(content)
    return time.process_time() - start


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_a_mutilated_example_is_a_spec_or_diagnostics_at_once(seed):
    draw = random.Random(seed)
    texts = [path.read_text() for path in EXAMPLES]
    specs = 0
    for _ in range(EACH):
        content = mutilated(draw.choice(texts), draw)
        start = time.process_time()
        result = judged(content)
        if time.process_time() - start > LIMIT:  # a collection of garbage may fall into one run, not into each
            assert min(seconds(content) for _ in range(3)) < LIMIT, content
        specs += isinstance(result, Spec)
        if isinstance(result, Spec) and draw.random() < 0.1:
            text = content.decode("utf-8-sig")
            assert parse(format_text(text, "m.plc"), "m.plc", read=nothing) == parse(text, "m.plc", read=nothing)
    assert EACH * 0.1 < specs < EACH * 0.7  # slips of both kinds
