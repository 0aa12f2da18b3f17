"""The tables that run are those of the grammar, and running them is what lark does."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from grammar.make_tables import TABLES, build
from placement.lang import lalr
from placement.lang.split import KEYWORDS

ROOT = Path(__file__).parents[2]
PIECES = ("tp", "stored", "over", "Shard", "auto", "forward", "seq", "in", "all_gather", "mesh", "param", "x1", "é")
PIECES += ("8", "-2.5", "450 GB/s", "3us", '"f"', "a.*.b", "{a,b}", "[0-3]", "Shard(0)", "[a, b]", "a : ", "x = y")
PIECES += ("(", ")", "[", "]", ",", ":", "@", "=", "+", "<=", "<", "==", ".", "%", "\t", "#c\n")
GOOD = {
    "mesh": ["tp", "=", "8", "over", "ib"],
    "link": ["a", "=", "4 GB/s", ",", "3 us"],
    "device": ["a", "=", "4 TFLOP/s", "float32", ",", "2 TB/s", ",", "96 GB"],
    "limit": ["memory", "60 GB"],
    "input": ["a", ",", "b", ":", "[", "a", ",", "b", "]", ",", "Shard", "(", "x", ")", "@", "dp"],
    "param": ["a.*", ":", "[", "a", "]", ",", "stored", "Shard", "(", "0", ",", "zigzag", ")", "@", "tp", ",", "auto"],
    "value": ["a", ":", "Partial", "@", "tp", ",", "Shard", "(", "1", ")"],
    "output": ["a", ":", "auto"],
    "strategy": ["a.{b,c}", ":", "ring", "@", "cp", "+", "gather", "@", "tp", "+", "b"],
    "lower": ["a", ":", "a", "=", "b", ",", "c", "=", "2"],
    "expect": ["a", ":", "all_gather", "@", "tp", "forward", "<=", "2 MiB"],
    "within": ["a.*"],
    "include": ['"f"'],
}


def test_the_tables_are_those_of_the_grammar():
    """Run ``python grammar/make_tables.py`` where this fails. In a fresh process: lark's states have no fixed order."""
    code = "from grammar.make_tables import tables; print(tables(), end='')"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, cwd=ROOT, check=True)
    assert made.stdout.decode() == TABLES.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def lark():
    return build()


def by_lark(lark, text, keyword):
    """Lark's tree as ours, or the place of the fault and what could stand there."""
    from lark import Tree
    from lark.exceptions import UnexpectedInput

    def node(tree):
        if tree is None:
            return None
        if isinstance(tree, Tree):
            return lalr.Node(str(tree.data), [node(child) for child in tree.children])
        return lalr.Token(tree.type, str(tree), tree.start_pos)

    try:
        return node(lark.parse(text, start=keyword))
    except UnexpectedInput as fault:
        ended = getattr(fault, "token", None) is not None and fault.token.type == "$END"
        return len(text) if ended else fault.pos_in_stream, frozenset(fault.interactive_parser.accepts())


def by_tables(text, keyword):
    try:
        return lalr.parse(text, keyword)
    except lalr.UnexpectedTokenError as fault:
        return fault.start, fault.accepted


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_every_statement_parses_as_lark_parses_it(lark, keyword):
    assert set(GOOD) == set(KEYWORDS)
    source = random.Random(keyword)
    right = 0
    for _ in range(400):
        parts = list(GOOD[keyword])
        for _ in range(source.randrange(4)):
            at = source.randrange(len(parts) + 1)
            parts[at : at + source.randrange(2)] = source.choice([[], [source.choice(PIECES)]])
        text = keyword + "".join(source.choice(["", " ", " "]) + part for part in ["", *parts])
        ours = by_tables(text, keyword)
        assert ours == by_lark(lark, text, keyword), text
        right += isinstance(ours, lalr.Node)
    assert 40 < right < 400


def test_long_lists_take_linear_time(monkeypatch):
    """Every token is looked at once."""
    looked_at = []
    token = lalr._token
    monkeypatch.setattr(lalr, "_token", lambda text, at, state: looked_at.append(at) or token(text, at, state))
    for n in (10, 10_000):
        looked_at.clear()
        tree = lalr.parse(f"input x : [{', '.join(['d'] * n)}]", "input")
        assert len(tree.children[1].children) == n
        assert len(looked_at) == 2 * n + 5
