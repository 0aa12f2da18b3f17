"""``placement lsp``: the language server. It answers from texts at once and from the model when that is planned."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from lsprotocol import types as lsp
from pygls.lsp.server import LanguageServer
from pygls.uris import from_fs_path, to_fs_path

from placement import __version__
from placement.editor import completion, navigation
from placement.editor.document import Declared, Document, declared, family, read
from placement.editor.knowledge import Answer, Known, Request
from placement.editor.planner import Planner, Settings
from placement.editor.positions import Text
from placement.editor.worker import reader
from placement.lang.check import check
from placement.lang.diagnostics import Diagnostic, PlacementError
from placement.lang.format import format_text
from placement.lang.parser import load
from placement.lang.spec import Span

_PAUSE = 0.15  # seconds without a key until a text is looked at
_SEVERITIES = {
    "error": lsp.DiagnosticSeverity.Error,
    "warning": lsp.DiagnosticSeverity.Warning,
    "note": lsp.DiagnosticSeverity.Information,
}


class Server(LanguageServer):
    """What is open, what was found in it, and what is known of its model. Files are paths, not URIs."""

    def __init__(self) -> None:
        super().__init__("placement", __version__, text_document_sync_kind=lsp.TextDocumentSyncKind.Full)
        self.open: dict[str, Text] = {}
        self.uris: dict[str, str] = {}  # of open documents, as the client writes them
        self.versions: dict[str, int] = {}
        self.known: dict[str, Known] = {}
        self.found: dict[str, tuple[Diagnostic, ...]] = {}  # by the root in which they were found
        self.rooted: dict[str, bool] = {}  # whether an open spec includes it, when it was looked at
        self.told: set[str] = set()  # files that the client shows faults of
        self.planner: Planner | None = None
        self.timers: dict[str, asyncio.TimerHandle] = {}
        self._documents: dict[tuple[str, str], Document] = {}

    # -- texts -----------------------------------------------------------------------------------

    def take(self, uri: str, text: str, *, pause: float) -> None:
        """A document was opened or changed: look at it, and at the open specs that include it, after a pause."""
        file = self.file(uri)
        encoding = str(self.workspace.position_encoding or lsp.PositionEncodingKind.Utf16.value)
        self.open[file] = Text(file, text, encoding)
        self.uris[file] = uri
        for root in (file, *self.including(file)):
            self.later(root, pause)

    def later(self, file: str, pause: float) -> None:
        """Look at an open spec in ``pause`` seconds, not before the last of several calls."""
        if file in self.timers:
            self.timers[file].cancel()
        self.versions[file] = self.versions.get(file, 0) + 1
        self.timers[file] = asyncio.get_running_loop().call_later(pause, self.look, file)

    def look(self, file: str) -> None:
        """Publish what shows without a model; ask for the rest."""
        if file not in self.open:
            return
        rooted = self.rooted[file] = bool(self.roots(file))
        self.found[file] = () if rooted else self.faults(file)
        self.publish()
        for other, before in self.rooted.items():
            if other != file and bool(self.roots(other)) != before:
                self.later(other, 0)
        if self.planner is not None and not rooted:
            texts = {name: text.text for name, text in self.open.items()}
            if self.planner.settings.speaks_of(file, self.planner.folder):
                self.planner.ask(self.versions[file], Request(file, texts))

    def faults(self, file: str) -> tuple[Diagnostic, ...]:
        """What is wrong in a spec by itself, or in what it includes."""
        try:
            return check(load(file, read=reader({name: text.text for name, text in self.open.items()})))
        except PlacementError as error:
            return error.diagnostics

    def planned(self, file: str, version: int, answer: Answer) -> None:
        """The model's process has answered; an answer to an older text only tells names."""
        if file not in self.open:
            return
        if self.versions.get(file) == version or answer.known.params:
            before = self.known.get(file, Known())
            # While the spec is at fault, what was solved last is still of use.
            self.known[file] = answer.known if answer.known.mesh or not before.mesh else before
        if self.versions.get(file) == version:
            self.found[file] = answer.faults
            self.publish()

    def close(self, uri: str) -> None:
        """A document was closed: its faults are no longer shown."""
        file = self.file(uri)
        for kept in (self.open, self.found, self.known, self.uris, self.rooted):
            kept.pop(file, None)
        if self.planner is not None:
            self.planner.forget(file)
        self.publish()
        for other in self.open:
            self.later(other, _PAUSE)

    def publish(self) -> None:
        """Tell the client the faults of every file, and that those of others are mended."""
        by_file: dict[str, dict[Diagnostic, None]] = {file: {} for file in self.open}
        for root, faults in self.found.items():
            for fault in faults:
                by_file.setdefault(fault.file or root, {})[fault] = None
        for file in self.told - set(by_file):
            self._tell(file, [])
        for file, faults in by_file.items():
            self._tell(file, [self.diagnostic(file, fault) for fault in faults])
        self.told = set(by_file)

    def _tell(self, file: str, diagnostics: list[lsp.Diagnostic]) -> None:
        self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(self.uri(file), diagnostics))

    def diagnostic(self, file: str, fault: Diagnostic) -> lsp.Diagnostic:
        """A fault as the protocol has it; one without a place stands at the start of the file."""
        span = fault.span or Span(file, 1, 1, 1, 1)
        notes = [f"help: {fault.hint}"] if fault.hint else []
        notes += [f"note: {note}" for note in fault.notes]
        path, _, line = (fault.model_line or "").rpartition(":")
        at = self.location(path, int(line)) if path and line.isdigit() else None
        related = [lsp.DiagnosticRelatedInformation(at, "the model's line")] if at is not None else None
        return lsp.Diagnostic(
            range=self.text(file).range(span),
            severity=_SEVERITIES[fault.severity],
            code=fault.code,
            source="placement",
            message="\n".join([fault.message, *notes]),
            related_information=related,
        )

    # -- files -----------------------------------------------------------------------------------

    def file(self, uri: str) -> str:
        """The path of a URI; the URI itself where it is of no file."""
        return to_fs_path(uri) or uri

    def uri(self, file: str) -> str:
        """The URI of a path, as the client writes it where it has said so."""
        return self.uris.get(file) or from_fs_path(file) or file

    def text(self, file: str) -> Text:
        """The text of a file, open or on disk; an empty one where it cannot be read."""
        if file in self.open:
            return self.open[file]
        encoding = str(self.workspace.position_encoding or lsp.PositionEncodingKind.Utf16.value)
        try:
            return Text(file, Path(file).read_text(encoding="utf-8"), encoding)
        except (OSError, ValueError):
            return Text(file, "", encoding)

    def document(self, file: str) -> Document | None:
        """The document of a file; None where there is no such file."""
        text = self.text(file)
        if not text.text and file not in self.open:
            return None
        if self._documents.get((file, text.text)) is None:
            self._documents = {key: d for key, d in self._documents.items() if key[0] != file}
            self._documents[file, text.text] = read(text)
        return self._documents[file, text.text]

    def including(self, file: str) -> list[str]:
        """The other open specs that include a file."""
        others = (other for other in self.open if other != file)
        return [root for root in others if any(d.text.file == file for d in family(root, self.document))]

    def roots(self, file: str) -> list[str]:
        """The open specs that a file is a part of. Of files that include one another, each stands for itself."""
        found = self.including(file)
        inside = {document.text.file for document in family(file, self.document)} if found else set[str]()
        return [root for root in found if root not in inside]

    def names(self, file: str) -> Declared:
        """What is declared for a file: in it, in what it includes, and in the open specs that include it."""
        return declared(d for root in (file, *self.roots(file)) for d in family(root, self.document))

    def knowledge(self, file: str) -> Known:
        """What is known of the model of a file, or of an open spec that includes it."""
        return next((self.known[root] for root in (file, *self.roots(file)) if root in self.known), Known())

    def location(self, file: str, line: int) -> lsp.Location:
        """A whole line of a file."""
        start = lsp.Position(max(line - 1, 0), 0)
        return lsp.Location(self.uri(file), lsp.Range(start, start))

    def at(self, of: lsp.TextDocumentIdentifier, position: lsp.Position) -> tuple[Document, int] | None:
        """The document and the offset that a request speaks of."""
        document = self.document(self.file(of.uri))
        return None if document is None else (document, document.text.offset(position))


def make() -> Server:
    """The server with all that it can do."""
    server = Server()
    _lifetime(server)
    _texts(server)
    _questions(server)
    return server


def main() -> None:
    """Serve one client over stdin and stdout until it says exit or is gone."""
    server = make()
    try:
        server.start_io()
    finally:
        if server.planner is not None:
            server.planner.stop()


def _lifetime(server: Server) -> None:
    faults: list[str] = []

    @server.feature(lsp.INITIALIZE)
    def initialize(server: Server, params: lsp.InitializeParams) -> None:
        try:
            settings = Settings.of(plain(params.initialization_options))
        except ValueError as error:
            faults.append(f"placement: {error}")
            settings = Settings()
        if settings.model is not None:
            folder = to_fs_path(server.workspace.root_uri or "") or ""
            server.planner = Planner(settings, folder, server.planned)

    @server.feature(lsp.INITIALIZED)
    async def initialized(server: Server, _: lsp.InitializedParams) -> None:
        for fault in faults:
            server.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Error, fault))
        workspace = server.client_capabilities.workspace
        watched = workspace.did_change_watched_files if workspace is not None else None
        if server.planner is not None and watched is not None and watched.dynamic_registration:
            watchers = [lsp.FileSystemWatcher(glob) for glob in ("**/*.py", "**/*.plc")]
            options = lsp.DidChangeWatchedFilesRegistrationOptions(watchers)
            registration = lsp.Registration("files", lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES, options)
            await server.client_register_capability_async(lsp.RegistrationParams([registration]))

    @server.feature(lsp.SHUTDOWN)
    def shutdown(server: Server, _: None) -> None:
        for timer in server.timers.values():
            timer.cancel()
        if server.planner is not None:
            server.planner.stop()
            server.planner = None


def _texts(server: Server) -> None:
    @server.feature(lsp.TEXT_DOCUMENT_DID_OPEN)
    def did_open(server: Server, params: lsp.DidOpenTextDocumentParams) -> None:
        server.take(params.text_document.uri, params.text_document.text, pause=0)

    @server.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)
    def did_change(server: Server, params: lsp.DidChangeTextDocumentParams) -> None:
        for change in params.content_changes:  # each is the whole text, as the server asked for
            server.take(params.text_document.uri, change.text, pause=_PAUSE)

    @server.feature(lsp.TEXT_DOCUMENT_DID_CLOSE)
    def did_close(server: Server, params: lsp.DidCloseTextDocumentParams) -> None:
        server.close(params.text_document.uri)

    @server.feature(lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES)
    def did_change_files(server: Server, params: lsp.DidChangeWatchedFilesParams) -> None:
        if server.planner is not None and any(change.uri.endswith(".py") for change in params.changes):
            server.planner.stop()  # the next question loads the model anew
        for file in server.open:
            server.later(file, _PAUSE)


def _questions(server: Server) -> None:
    @server.feature(lsp.TEXT_DOCUMENT_COMPLETION, lsp.CompletionOptions(trigger_characters=list(".@:([{,=*")))
    def complete(server: Server, params: lsp.CompletionParams) -> lsp.CompletionList:
        found = server.at(params.text_document, params.position)
        if found is None:
            return lsp.CompletionList(is_incomplete=False, items=[])
        document, offset = found
        file = document.text.file
        items = completion.complete(document, offset, server.names(file), server.knowledge(file))
        return lsp.CompletionList(is_incomplete=False, items=items)

    @server.feature(lsp.TEXT_DOCUMENT_HOVER)
    def hover(server: Server, params: lsp.HoverParams) -> lsp.Hover | None:
        found = server.at(params.text_document, params.position)
        if found is None:
            return None
        document, offset = found
        file = document.text.file
        told = navigation.hover(document, offset, server.names(file), server.knowledge(file), server.uri)
        if told is None:
            return None
        text, start, end = told
        content = lsp.MarkupContent(lsp.MarkupKind.Markdown, text)
        return lsp.Hover(content, document.text.between(start, end))

    @server.feature(lsp.TEXT_DOCUMENT_DEFINITION)
    def definition(server: Server, params: lsp.DefinitionParams) -> list[lsp.Location]:
        found = server.at(params.text_document, params.position)
        if found is None:
            return []
        document, offset = found
        file = document.text.file
        span = navigation.declaration(document, offset, server.names(file))
        if span is not None:
            return [lsp.Location(server.uri(span.file), server.text(span.file).range(span))]
        others = navigation.causes(document, offset, server.knowledge(file))
        return [server.location(other, line) for other, line in others]

    @server.feature(lsp.TEXT_DOCUMENT_FORMATTING)
    def layout(server: Server, params: lsp.DocumentFormattingParams) -> list[lsp.TextEdit] | None:
        text = server.text(server.file(params.text_document.uri))
        try:
            made = format_text(text.text, text.file)
        except PlacementError:
            return None  # what does not parse stays as it is
        whole = lsp.Range(lsp.Position(0, 0), lsp.Position(len(text.source.starts), 0))
        return [] if made == text.text else [lsp.TextEdit(whole, made)]


def plain(value: object) -> Any:
    """A value of the protocol as dicts and lists: pygls makes objects of what no type is known for."""
    if hasattr(value, "_asdict"):
        value = cast("Any", value)._asdict()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast("list[Any]", value)]
    return value
