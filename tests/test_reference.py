"""The reference runs: its specs report and reveal what they claim, its commands print what is shown."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from placement import PlacementError, cli
from placement.lang import check, parse
from placement.lang.format import format_text
from placement.lang.parser import read_file
from placement.lang.render import FORMS, render
from placement.lang.spec import (
    COLLECTIVES,
    DEVICES,
    DIRECTIONS,
    DTYPES,
    LINKS,
    LOWERINGS,
    PARAMETER_DIMS,
    RESOURCES,
    UNITS,
)
from placement.lang.split import KEYWORDS
from placement.lang.statements import COMPARISONS, ORDERS, PLACEMENTS
from tests import pages

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
TOLD = ("axes", "explain", "memory", "why")
PAGES = [*sorted(REFERENCE.glob("*.md")), *(ROOT / "docs" / f"{name}.md" for name in TOLD)]


@pytest.fixture(scope="module")
def _captured_once() -> Iterator[None]:
    """A model that several blocks speak of is built and captured once."""
    from placement import api, models

    built: dict[object, object] = {}
    captured: dict[object, object] = {}

    def build_once(name, sizes, **options):
        key = name, str(sizes), str(options)
        return built[key] if key in built else built.setdefault(key, build(name, sizes, **options))

    def capture_once(model, example, dims):
        key = id(model), str(dims)
        return captured[key] if key in captured else captured.setdefault(key, capture(model, example, dims))

    with pytest.MonkeyPatch.context() as patch:
        build, capture = models.build, api.capture
        patch.setattr(models, "build", build_once)
        patch.setattr(api, "capture", capture_once)
        patch.setattr(sys, "path", [str(REFERENCE), *sys.path])
        patch.delitem(sys.modules, "models", raising=False)
        yield
        sys.modules.pop("models", None)


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
@pytest.mark.usefixtures("_captured_once")
def test_the_page_runs(page, tmp_path, monkeypatch, request) -> None:
    shutil.copy(REFERENCE / "models.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    if request.config.getoption("--accept"):
        _accept(page)
    faults = _Run().page(page)
    assert not faults, "\n" + "\n".join(faults)


def _accept(page: Path) -> None:
    """Write the page anew: messages, outputs, quotes of them, layout. Which lines err, and placements, stay claims."""
    run = _Run()
    run.page(page)
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    for block, text in reversed(run.anew):
        lines[block.line - 1 : block.line - 1 + block.text.count("\n")] = [text]
    page.write_text("".join(lines), encoding="utf-8")


class _Run:
    """One page: its blocks in order, in a folder that holds the files they are."""

    def __init__(self) -> None:
        self.printed = self.shown = ""  # by the last command or Python; as the page shows it
        self.names: dict[str, object] = {}
        self.anew: list[tuple[pages.Block, str]] = []  # blocks and what they should be

    def page(self, page: Path) -> list[str]:
        """The faults of all blocks."""
        return [f"{page.name}:{line}: {fault}" for block in pages.blocks(page) for line, fault in self.block(block)]

    def block(self, block: pages.Block) -> Iterator[tuple[int, str]]:
        """The faults of a block, each with its line in the page."""
        if block.file is not None:
            Path(block.file).write_text(block.text, encoding="utf-8")
        if block.language == "plc" and "faulty" not in block.options:  # else a command tells its faults
            yield from ((block.line - 1 + line, fault) for line, fault in self._spec(block))
        elif block.language == "console":
            yield from self._console(block)
        elif block.language == "python":
            with _output() as out:
                exec(compile("\n" * (block.line - 1) + block.text, "page", "exec"), self.names)
            self.printed = self.shown = out()
        elif block.language == "text" and f"\n{block.text}" not in f"\n{self.printed}":
            yield block.line, "the last command or Python printed no such lines"
            self.anew.append((block, self._quoted_anew(block.text)))

    def _quoted_anew(self, text: str) -> str:
        """The lines that stand where the quoted ones stood; the quoted ones where the output has other lines now."""
        before, now = self.shown.splitlines(), self.printed.splitlines(keepends=True)
        start = f"\n{self.shown}".find(f"\n{text}")
        if start < 0 or len(before) != len(now):
            return text
        first = self.shown[:start].count("\n")
        return "".join(now[first : first + text.count("\n")])

    def _spec(self, block: pages.Block) -> Iterator[tuple[int, str]]:
        file = block.file or "example.plc"
        plan, found, spec = None, (), None
        try:
            spec = parse(block.text, file, read=lambda name: block.text if name == file else read_file(name))
            found = check(spec)
            if "model" in block.options:
                plan = _plan(spec, block.options)
                found = (*found, *plan.bound.notes)
        except PlacementError as error:
            found = error.diagnostics
        for fault in pages.differences(pages.marks(block.text), found, file):
            yield 1, fault
        now = pages.corrected(block.text, found, file)
        if spec is not None and "unformatted" not in block.options:
            now = format_text(now, file)
            if format_text(block.text, file) != block.text:
                yield 1, "not as `placement fmt` lays it out"
        if now != block.text:
            self.anew.append((block, now))
        if spec is not None:
            for line, statement, claimed in pages.claims(block.text, spec):
                if plan is None:
                    yield line, "nothing is revealed: there is no plan"
                else:
                    yield from ((line, fault) for fault in pages.unlike(statement, claimed, _placements(plan)))

    def _console(self, block: pages.Block) -> Iterator[tuple[int, str]]:
        """Every ``$`` line is a command and what follows its output; ``...`` stands for any lines of it."""
        now, code = "", 0
        for command, shown in re.findall(r"^\$ (.*\n)((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
            words = shlex.split(command)
            assert words[0] == "placement" or words == ["echo", "$?"], f"{command}: other commands stand in `sh` blocks"
            if words[0] == "placement":
                if code:
                    yield block.line, f"a command ends with {code}, and no `echo $?` tells so"
                with _output() as out:
                    code = cli.run(words[1:])
                self.printed = out()
            else:
                self.printed, code = f"{code}\n", 0
            self.shown = shown
            elided = re.escape(shown).replace(re.escape("...\n"), r"(?:.*\n)*")
            same = re.fullmatch(elided, self.printed) is not None
            if not same:
                yield block.line, f"$ {command}now prints\n{self.printed}"
            now += f"$ {command}" + (shown if same or "...\n" in shown else self.printed)
        if code:
            yield block.line, f"the last command ends with {code}, and no `echo $?` tells so"
        if now != block.text:
            self.anew.append((block, now))


@contextlib.contextmanager
def _output():
    """What is written to stdout and stderr, in the order of a terminal."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        yield lambda: stream.buffer.getvalue().decode()


def _plan(spec, options):
    import placement
    from placement import models

    built = models.build(f"models.py:{options['model']}", {}, meta=True)
    mesh = {name: int(size) for name, size in (pair.split("=") for pair in options["mesh"].split(","))}
    return placement.plan(built.model, mesh, spec, example=built.example)


def _placements(plan) -> pages.Placements:
    from placement.report.facts import facts
    from placement.report.names import Names

    found, names = facts(plan), Names(plan)
    inputs = {i.name: names.placements(i.value, plan.produced[i.value]) for i in plan.graph.inputs}
    return {"param": found.params, "value": found.values, "output": found.outputs, "input": inputs}


# -- nothing is left out ------------------------------------------------------------------------------


def _spoken_of(lines: str) -> set[str]:
    """The words in code spans of those lines of the reference, blocks left out, that begin as a pattern says."""
    pages = (page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    prose = "".join(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL) for text in pages)
    chosen = re.findall(rf"^{lines}.*$", prose, re.MULTILINE)
    return {word for line in chosen for word in re.findall(r"`([^`]+)`", line)}


PATTERNS = ("*", "**", "{a,b}", "[0-3]")  # as the docstring of placement/lang/patterns.py lists them


@pytest.mark.parametrize("word", [*KEYWORDS, *PLACEMENTS, "stored", *PATTERNS])
def test_it_has_a_section(word) -> None:
    assert word in _spoken_of("##")


def test_every_word_is_mentioned() -> None:
    values = [value for known in LOWERINGS.values() for value in known]
    words = [*LINKS, *UNITS, *ORDERS, *COLLECTIVES, *DIRECTIONS, *RESOURCES, *LOWERINGS, *values, *COMPARISONS]
    assert {*words, *PARAMETER_DIMS, *DEVICES, *DTYPES, *FORMS} - _spoken_of("") == set()


def test_every_key_of_the_json_of_diagnostics_is_described() -> None:
    (found, *_) = check(parse("value x : auto"))
    data = json.loads(render([found], {}, form="json"))
    told = re.findall(r"^\| `([^`]+)` \|", (REFERENCE / "checking.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [*data, *(f"diagnostics[].{key}" for key in data["diagnostics"][0])] == told


# -- the site -----------------------------------------------------------------------------------------


def test_the_site_builds(tmp_path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(tmp_path / "trees")]
    done = subprocess.run([*command, ROOT / "docs", site], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    sources = (path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md"))
    assert [path for path in sources if not (site / path.with_suffix(".html")).is_file()] == []
    page = (site / "reference" / "index.html").read_text(encoding="utf-8")
    assert 'class="highlight-plc' in page
    assert '<span class="k">within</span>' in page  # coloured by our lexer
