"""docs/rules.md runs: its Python in order, each ``text`` block being what the block before it prints."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from pathlib import Path

import pytest
import torch

from placement.rules import core, proof
from placement.rules.proof import prove

_PAGE = Path(__file__).parents[2] / "docs" / "rules.md"
_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.rules.test_code import emitted

    monkeypatch.setattr(core, "_RULES", dict(core._RULES))
    names: dict[str, object] = {}
    printed = ""
    blocks = [
        (match[1], match[2], _PAGE.read_text()[: match.start()].count("\n"))
        for match in _BLOCK.finditer(_PAGE.read_text())
    ]
    assert len(blocks) >= 10
    for kind, text, line in blocks:
        if kind == "text":
            assert printed.rstrip() == text.rstrip(), f"line {line + 1}"
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("\n" * (line + 1) + text, str(_PAGE), "exec"), names)
        printed = out.getvalue()
    # What the page leaves to the reader: its implementation holds on ranks that communicate.
    center = prove(names["center"], torch.randn(4, 6, dtype=torch.float64), 1, execute=emitted).require()
    assert [f.run for f in center.findings if f.strategy.implementation] == [True]


def test_the_example_in_prove_runs() -> None:
    result = doctest.testmod(proof)
    assert result.attempted == 1
    assert result.failed == 0
