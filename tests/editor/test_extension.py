"""The VS Code extension, run by node against stand-ins for ``vscode`` and its language client."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from placement.editor.planner import Settings

EXTENSION = Path(__file__).resolve().parents[2] / "editors" / "vscode"
VSCODE = """\
const settings = { command: ["placement", "lsp"], server: { model: "m:f" } };
exports.log = [];
exports.workspace = {
  getConfiguration: (section) => ({ get: (key) => (section === "placement" ? settings[key] : undefined) }),
  onDidChangeConfiguration: (told) => { exports.changed = told; return { dispose() {} }; },
};
"""
CLIENT = """\
const { log } = require("vscode");
exports.LanguageClient = class {
  constructor(id, name, server, options) { log.push({ id, server, options }); }
  async start() { log.push("start"); }
  async stop() { log.push("stop"); }
};
"""
SCENE = """\
const extension = require("./extension.js");
const vscode = require("vscode");
(async () => {
  await extension.activate({ subscriptions: [] });
  await vscode.changed({ affectsConfiguration: (section) => section === "editor" });
  await vscode.changed({ affectsConfiguration: (section) => section === "placement" });
  await extension.deactivate();
  await extension.deactivate();
  console.log(JSON.stringify(vscode.log));
})();
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_the_extension_starts_restarts_and_stops_its_client(tmp_path) -> None:
    files = {
        "extension.js": (EXTENSION / "extension.js").read_text(encoding="utf-8"),
        "scene.js": SCENE,
        "node_modules/vscode/index.js": VSCODE,
        "node_modules/vscode-languageclient/node.js": CLIENT,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run(["node", "scene.js"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    made, *log = json.loads(done.stdout)
    assert made["server"] == {"command": "placement", "args": ["lsp"]}
    assert made["options"]["initializationOptions"] == {"model": "m:f"}
    assert made["options"]["documentSelector"] == [{"language": "placement"}]
    assert log == ["start", "stop", made, "start", "stop"]


def test_the_settings_are_documented() -> None:
    page = (EXTENSION.parents[1] / "docs" / "editor.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [field.name for field in dataclasses.fields(Settings)]


def test_its_settings_are_those_that_the_code_reads() -> None:
    package = json.loads((EXTENSION / "package.json").read_text(encoding="utf-8"))
    settings = package["contributes"]["configuration"]["properties"]
    assert set(settings) == {"placement.command", "placement.server"}
    assert settings["placement.command"]["default"] == ["placement", "lsp"]
