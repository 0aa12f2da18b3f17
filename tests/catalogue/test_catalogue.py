"""What people get wrong: the first fault names the place, and its text is enough to mend it.

The texts are goldens, to be read: ``tests/goldens/catalogue``.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import catalogue_models
import pytest
from mistakes import ALL, RIGHT, Mistake

import placement
from placement import api
from placement.graph.capture import capture
from placement.lang import parser
from placement.lang.render import render
from placement.report.findings import findings

ROOT = Path(__file__).resolve().parents[2]
FILE = "mistake.plc"
MARKED = re.compile(r"«([^»]*)»")
_graphs: dict[object, Any] = {}


@functools.cache
def model_of(sizes: tuple[tuple[str, int], ...]):
    return catalogue_models.llama(**dict(sizes))


def captured(model, example, dims=None):
    """Each model once for each list of dims; what cannot be captured is tried each time."""
    key = id(model), tuple(sorted((dims or {}).items()))
    if key not in _graphs:
        _graphs[key] = capture(model, example, dims)
    return _graphs[key]


def read(path: str) -> str:
    raise FileNotFoundError(2, "No such file or directory", path)


def told(text: str, mistake: Mistake | None, monkeypatch: pytest.MonkeyPatch):
    """The diagnostics of ``placement check`` with a model, and the sources to show them with."""
    monkeypatch.setattr(api, "capture", captured)
    monkeypatch.setattr(api, "mended", functools.partial(api.mended, seconds=60))  # on a busy machine too
    model, example = model_of(tuple(mistake.model.items()) if mistake else ())
    mesh = mistake.mesh if mistake else {"tp": 2}
    try:
        spec = parser.parse(text, FILE, read=read)
    except placement.PlacementError as error:
        return error.diagnostics, error.sources
    found = placement.check(spec, model, mesh, example=example)
    if not any(d.severity == "error" for d in found):
        found = (*found, *findings(api.plan(model, mesh, spec, example=example), FILE))
    return tuple(d for d in found if d.code != "PLC208"), spec.sources  # the norms, which no line places


def test_without_a_mistake_there_is_no_fault(monkeypatch) -> None:
    assert told(RIGHT, None, monkeypatch)[0] == ()


@pytest.mark.parametrize("mistake", ALL, ids=lambda m: m.name.replace(" ", "_"))
def test_the_first_fault_names_the_place(mistake: Mistake, monkeypatch, golden) -> None:
    marked = mistake.text
    text = MARKED.sub(r"\1", marked)
    found, sources = told(text, mistake, monkeypatch)
    first = found[0]
    shown = render(found, sources, width=100).replace(f"{ROOT}/", "")
    shown = re.sub(r"\d[\d.]* (ns|us|ms|s)\b", "TIME", shown)  # prices are tested elsewhere
    golden(f"catalogue/{mistake.name.replace(' ', '_')}.txt", f"{shown}\n")
    assert first.code == mistake.code
    mark = MARKED.search(marked)
    place = (
        None
        if mark is None
        else (marked.count("\n", 0, mark.start()) + 1, mark.start() - marked.rfind("\n", 0, mark.start()), mark[1])
    )
    assert place == (first.span and (first.line, first.column, _covered(text, first.span)))


def _covered(text: str, span) -> str:
    lines = text.split("\n")
    if span.line == span.end_line:
        return lines[span.line - 1][span.column - 1 : span.end_column - 1]
    return lines[span.line - 1][span.column - 1 :]


def test_the_catalogue_is_one_of_different_mistakes() -> None:
    assert len({m.name for m in ALL}) == len(ALL) >= 40
    assert len({(m.text, *m.mesh.items(), *m.model.items()) for m in ALL}) == len(ALL)


def test_no_golden_is_left_of_a_mistake_that_is_gone() -> None:
    folder = ROOT / "tests" / "goldens" / "catalogue"
    assert {path.stem for path in folder.iterdir()} == {m.name.replace(" ", "_") for m in ALL}
