"""The language server as an editor meets it: a process that is talked to over its stdin and stdout."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from lsprotocol import types as lsp
from pygls.lsp.client import LanguageClient

from placement import cli
from placement.editor.knowledge import Answer, Known, Request
from placement.editor.planner import Planner, Settings
from placement.lang.format import format_text

ROOT = Path(__file__).resolve().parents[2]
MODEL = """\
import os, time
import torch
from torch import nn

print("a model may print", flush=True)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean()}

def good():
    return Net(), {"x": torch.randn(2, 8, 8)}

def raises():
    raise RuntimeError("no weights here")

def exits():
    raise SystemExit(3)

def dies():
    os._exit(7)

def hangs():
    time.sleep(600)
"""
SPEC = """\
mesh tp
input x : [batch, seq, width]
within blocks.* {
  param up.weight   : Shard(out) @ tp
  param down.weight : Shard(in) @ tp   # \U0001f600
  value norm        : Shard(seq) @ tp
}
"""


class Editor(LanguageClient):
    """A client that keeps the newest faults of each document."""

    def __init__(self, folder: Path) -> None:
        super().__init__("editor", "1")
        self.folder = folder
        self.faults: dict[str, tuple[lsp.Diagnostic, ...]] = {}
        self.messages: list[str] = []
        self.news = asyncio.Event()
        self.versions: dict[str, int] = {}
        self.registered: list[lsp.Registration] = []

        @self.feature(lsp.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
        def publish(client: Editor, params: lsp.PublishDiagnosticsParams) -> None:
            self.faults[params.uri.rpartition("/")[2]] = tuple(params.diagnostics)
            self.news.set()

        @self.feature(lsp.WINDOW_SHOW_MESSAGE)
        def message(client: Editor, params: lsp.ShowMessageParams) -> None:
            self.messages.append(params.message)
            self.news.set()

        @self.feature(lsp.CLIENT_REGISTER_CAPABILITY)
        def register(client: Editor, params: lsp.RegistrationParams) -> None:
            self.registered += params.registrations
            self.news.set()

    def at(self, name: str) -> lsp.TextDocumentIdentifier:
        return lsp.TextDocumentIdentifier((self.folder / name).as_uri())

    def write(self, name: str, text: str) -> None:
        """Open a document, or change it."""
        version = self.versions[name] = self.versions.get(name, 0) + 1
        uri = self.at(name).uri
        if version == 1:
            self.text_document_did_open(
                lsp.DidOpenTextDocumentParams(lsp.TextDocumentItem(uri, "placement", version, text))
            )
        else:
            change = lsp.TextDocumentContentChangeWholeDocument(text)
            of = lsp.VersionedTextDocumentIdentifier(version, uri)
            self.text_document_did_change(lsp.DidChangeTextDocumentParams(of, [change]))

    async def until(self, seen: Callable[[], object]) -> None:
        """Wait for what the server is to tell."""
        async with asyncio.timeout(90):
            while not seen():
                self.news.clear()
                await self.news.wait()

    def codes(self, name: str) -> list[str | int | None]:
        return [fault.code for fault in self.faults.get(name, ()) if fault.severity is lsp.DiagnosticSeverity.Error]

    async def hover(self, name: str, line: int, character: int) -> str:
        found = await self.text_document_hover_async(lsp.HoverParams(self.at(name), lsp.Position(line, character)))
        return found.contents.value if found is not None else ""

    async def goes_to(self, name: str, line: int, character: int) -> list[tuple[str, int]]:
        params = lsp.DefinitionParams(self.at(name), lsp.Position(line, character))
        found = await self.text_document_definition_async(params)
        return [(place.uri.rpartition("/")[2], place.range.start.line) for place in found]

    async def offered(self, name: str, line: int, character: int) -> list[str]:
        params = lsp.CompletionParams(self.at(name), lsp.Position(line, character))
        return [item.label for item in (await self.text_document_completion_async(params)).items]


Scene = Callable[[Editor], Awaitable[None]]


@pytest.fixture
def play(tmp_path):
    """``play(scene, **options)`` runs a scene between the start of a server and its shutdown; it must end well."""
    (tmp_path / "own_net.py").write_text(MODEL)

    async def run(scene: Scene, options: object, capabilities: lsp.ClientCapabilities) -> None:
        editor = Editor(tmp_path)
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        await editor.start_io(sys.executable, "-m", "placement.cli", "lsp", "--stdio", env=env)
        folder = tmp_path.as_uri()
        params = lsp.InitializeParams(capabilities, root_uri=folder, initialization_options=options)
        await editor.initialize_async(params)
        editor.initialized(lsp.InitializedParams())
        await scene(editor)
        process = editor._server
        await editor.shutdown_async(None)
        editor.exit(None)
        assert await asyncio.wait_for(process.wait(), 20) == 0

    def start(scene: Scene, options: object = None, capabilities: lsp.ClientCapabilities | None = None) -> None:
        asyncio.run(run(scene, options, capabilities or lsp.ClientCapabilities()))

    return start


def model(name: str, **more: object) -> dict[str, object]:
    return {"model": f"own_net.py:{name}", "mesh": {"tp": 2}, **more}


# -- without a model --------------------------------------------------------------------------------


def test_faults_come_and_go_with_the_text(play) -> None:
    wrong = "input x : [batch, seq], Shard(seq) @ pt"

    async def scene(editor: Editor) -> None:
        editor.write("a.plc", "mesh tp\nvalue a b\nparma x : auto\nvalue : Replicate")
        await editor.until(lambda: editor.codes("a.plc"))
        assert editor.codes("a.plc") == ["PLC003", "PLC002", "PLC003"]
        editor.write("a.plc", "mesh tp\ndevice")
        editor.write("a.plc", f"mesh tp\n{wrong}")
        await editor.until(lambda: editor.codes("a.plc") == ["PLC101"])
        (fault,) = editor.faults["a.plc"]
        column = wrong.index("pt")
        assert (fault.range.start, fault.range.end) == (lsp.Position(1, column), lsp.Position(1, column + 2))
        assert fault.message == "unknown axis 'pt'\nhelp: the axes are tp"
        editor.write("a.plc", "mesh tp\n")
        await editor.until(lambda: not editor.faults["a.plc"])

    play(scene)


def test_positions_count_utf16_units(play) -> None:
    async def scene(editor: Editor) -> None:
        editor.write("a.plc", 'include "\U0001f600.plc" x')
        await editor.until(lambda: editor.codes("a.plc") == ["PLC003"])
        assert editor.faults["a.plc"][0].range == lsp.Range(lsp.Position(0, 17), lsp.Position(0, 18))

    play(scene)


def test_included_files_share_names_and_faults(play, tmp_path) -> None:
    (tmp_path / "common.plc").write_text("value a : Shard(sek) @ tp\n")
    main = 'mesh tp\ninput x : [batch, seq]\ninclude "common.plc"\n'

    async def scene(editor: Editor) -> None:
        editor.write("main.plc", main)
        await editor.until(lambda: editor.codes("common.plc") == ["PLC103"])  # though it is not open
        editor.write("common.plc", "value a : Shard(seq) @ tp\n")  # as it is in the editor, not on disk
        await editor.until(lambda: not editor.codes("common.plc"))
        editor.write("main.plc", main.replace("include", "#"))
        await editor.until(lambda: editor.codes("common.plc") == ["PLC111", "PLC103"])
        editor.write("main.plc", main)
        await editor.until(lambda: not editor.codes("common.plc"))
        assert await editor.goes_to("common.plc", 0, 16) == [("main.plc", 1)]
        assert await editor.goes_to("common.plc", 0, 24) == [("main.plc", 0)]
        assert await editor.goes_to("main.plc", 2, 12) == [("common.plc", 0)]
        assert await editor.offered("common.plc", 0, 24) == ["tp"]
        closed = lsp.DidCloseTextDocumentParams(editor.at("main.plc"))
        editor.text_document_did_close(closed)
        await editor.until(lambda: editor.codes("common.plc") == ["PLC111", "PLC103"])  # alone it has no mesh

    play(scene)


def test_files_that_include_one_another_are_told(play) -> None:
    async def scene(editor: Editor) -> None:
        editor.write("a.plc", 'include "b.plc"')
        editor.write("b.plc", 'include "a.plc"')
        await editor.until(lambda: "PLC015" in editor.codes("a.plc") and "PLC015" in editor.codes("b.plc"))

    play(scene)


def test_layout(play) -> None:
    untidy = "mesh   tp\nvalue a:Replicate@tp\n"

    async def scene(editor: Editor) -> None:
        def ask():
            options = lsp.FormattingOptions(tab_size=2, insert_spaces=True)
            return editor.text_document_formatting_async(lsp.DocumentFormattingParams(editor.at("a.plc"), options))

        editor.write("a.plc", untidy)
        (edit,) = await ask()
        tidy = edit.new_text
        assert tidy == format_text(untidy, "a.plc") != untidy
        assert (edit.range.start, edit.range.end.line) == (lsp.Position(0, 0), 3)
        editor.write("a.plc", tidy)
        assert not await ask()
        editor.write("a.plc", "mesh tp tp\n")
        assert await ask() is None

    play(scene)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modle": "x"}, "unknown setting 'modle'"),
        ({"model": 3}, "'model' is a name"),
        ({"model": "m:f", "mesh": {"tp": "4"}}, "'mesh' is an object of whole numbers"),
        ({"model": "m:f", "mesh": 4}, "'mesh' is an object of whole numbers"),
        ({"model": "m:f", "sizes": {"seq": 0}}, "'sizes' is an object of whole numbers"),
        ({"model": "m:f", "files": 3}, "'files' is a glob"),
        ({"model": "m:f", "timeout": -1}, "'timeout' is a number"),
        ([1], "initializationOptions is no object"),
    ],
)
def test_settings_that_are_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.of(options)


def test_refused_settings_are_told_and_the_text_is_served(play) -> None:
    async def scene(editor: Editor) -> None:
        await editor.until(lambda: editor.messages)
        assert "unknown setting 'modle'" in editor.messages[0]
        editor.write("a.plc", "mesh")
        await editor.until(lambda: editor.codes("a.plc"))

    play(scene, {"modle": "x"})


@pytest.mark.parametrize(
    ("files", "file", "speaks"),
    [
        ("*", "/w/a/b.plc", True),
        ("a/*.plc", "/w/a/b.plc", True),
        (["b/*", "c/*"], "/w/a/b.plc", False),
        ("*", "/elsewhere/b.plc", True),
    ],
)
def test_settings_say_which_specs_the_model_is_for(files, file, speaks) -> None:
    assert Settings.of({"model": "m:f", "files": files}).speaks_of(file, "/w") == speaks
    assert not Settings.of({"files": files}).speaks_of(file, "/w")


# -- with a model -----------------------------------------------------------------------------------


def test_the_model_is_planned_beside_and_answers_questions(play) -> None:
    async def scene(editor: Editor) -> None:
        editor.write("a.plc", SPEC)
        await editor.until(lambda: editor.faults.get("a.plc"))
        (note,) = editor.faults["a.plc"]  # a note, and no error
        assert (note.code, note.severity) == ("PLC208", lsp.DiagnosticSeverity.Information)
        text = await editor.hover("a.plc", 3, 10)
        assert "`Shard(out) @ tp`: 2 parameters" in text
        assert "`blocks.1.up.weight`" in text
        assert "`Shard(seq) -> Replicate @ tp`: `all_gather` forward, `reduce_scatter` backward" in text
        assert f"[a.plc:6]({editor.at('a.plc').uri}#L6)" in text
        assert ("a.plc", 5) in await editor.goes_to("a.plc", 3, 10)
        assert await editor.offered("a.plc", 5, 8) == ["up", "down", "norm"]
        # A text at fault: what was solved last is still told, where its lines are.
        editor.write("a.plc", SPEC.replace("Shard(in)", "Shard(inn)"))
        await editor.until(lambda: editor.codes("a.plc") == ["PLC103"])
        assert "`blocks.1.up.weight`" in await editor.hover("a.plc", 3, 10)
        # A fault that only the model shows.
        editor.write("a.plc", SPEC.replace("up.weight ", "pu.weight "))
        await editor.until(lambda: editor.codes("a.plc") == ["PLC104"])
        assert editor.faults["a.plc"][0].range.start.line == 3

    play(scene, model("good"))


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("raises", {}, "own_net.py:raises failed: RuntimeError: no weights here"),
        ("exits", {}, "own_net.py:exits failed: SystemExit: 3"),
        ("dies", {}, "the process that has own_net.py:dies ended with code 7"),
        ("missing", {}, "own_net.py has no 'missing'"),
        ("hangs", {"timeout": 6}, "own_net.py:hangs was not planned in 6 s"),
    ],
)
def test_a_model_that_fails_is_told_and_the_text_is_served(play, name, more, message) -> None:
    async def scene(editor: Editor) -> None:
        editor.write("a.plc", SPEC)
        assert await editor.goes_to("a.plc", 3, 35) == [("a.plc", 0)]  # while the model is being loaded
        await editor.until(lambda: editor.codes("a.plc"))
        (fault,) = editor.faults["a.plc"]
        assert fault.code == "PLC404"
        assert message in fault.message
        if name == "raises":
            (related,) = fault.related_information
            assert related.location.uri.endswith("own_net.py")
            assert MODEL.splitlines()[related.location.range.start.line].strip().startswith("raise RuntimeError")
        editor.write("a.plc", SPEC + "meshes")  # the text's own faults still come
        await editor.until(lambda: editor.codes("a.plc") == ["PLC002"])

    play(scene, model(name, **more))


def test_a_newer_text_takes_the_place_of_one_that_waits() -> None:
    planned: list[str] = []
    told: list[tuple[str, int]] = []
    go_on = asyncio.Event()

    class Slow(Planner):
        async def _exchange(self, request: Request) -> Answer:
            planned.append(request.texts[request.file])
            await go_on.wait()
            return Answer((), Known())

    async def scene() -> None:
        planner = Slow(Settings(model="m:f"), "", lambda file, version, _: told.append((file, version)))
        planner.ask(1, Request("a", {"a": "one"}))
        await asyncio.sleep(0)
        planner.ask(2, Request("a", {"a": "two"}))
        planner.ask(3, Request("a", {"a": "three"}))
        planner.ask(1, Request("b", {"b": "other"}))
        planner.ask(1, Request("c", {"c": "closed"}))
        planner.forget("c")
        go_on.set()
        assert planner._task is not None
        await asyncio.wait_for(planner._task, 10)

    asyncio.run(scene())
    assert planned == ["one", "three", "other"]
    assert told == [("a", 3), ("b", 1)]


def test_shutdown_does_not_wait_for_a_model(play) -> None:
    async def scene(editor: Editor) -> None:
        editor.write("a.plc", SPEC)
        await editor.until(lambda: "a.plc" in editor.faults)

    play(scene, model("hangs"))


def test_a_changed_model_is_loaded_anew(play, tmp_path) -> None:
    capabilities = lsp.ClientCapabilities(
        workspace=lsp.WorkspaceClientCapabilities(
            did_change_watched_files=lsp.DidChangeWatchedFilesClientCapabilities(dynamic_registration=True)
        )
    )

    async def scene(editor: Editor) -> None:
        await editor.until(lambda: editor.registered)
        assert editor.registered[0].method == lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES
        editor.write("a.plc", SPEC)
        await editor.until(lambda: editor.faults.get("a.plc"))
        (tmp_path / "own_net.py").write_text(MODEL.replace("self.up", "self.wide"))
        change = lsp.FileEvent(editor.at("own_net.py").uri, lsp.FileChangeType.Changed)
        editor.workspace_did_change_watched_files(lsp.DidChangeWatchedFilesParams([change]))
        await editor.until(lambda: editor.codes("a.plc") == ["PLC104"])
        assert "'blocks.*.up.weight' matches no parameter" in editor.faults["a.plc"][0].message

    play(scene, model("good"), capabilities)


# -- the command ------------------------------------------------------------------------------------


def test_the_command_says_what_it_needs(monkeypatch, capsys) -> None:
    monkeypatch.delitem(sys.modules, "placement.editor.server", raising=False)
    monkeypatch.setitem(sys.modules, "pygls.lsp.server", None)
    monkeypatch.setitem(sys.modules, "lsprotocol", None)
    assert cli.run(["lsp"]) == 2
    assert "pip install 'placement[lsp]'" in capsys.readouterr().err
