"""The tutorial runs: its Python, its spec, its commands, and what it says that they print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from placement import cli
from tests.pages import blocks

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = blocks(ROOT / "docs" / "tutorial.md")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with the files of the tutorial, as working directory."""
    for block in BLOCKS:
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "train", raising=False)
    return tmp_path


def _without_numbers(text: str) -> str:
    """Numbers vary from machine to machine, and with them which tensor is the worst."""
    text = re.sub(r"(e-\d\d  )\S+$", r"\1NAME", text, flags=re.MULTILINE)
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.e+-]*", "#", text)).strip()


def test_python_and_commands(folder, capsys, monkeypatch) -> None:
    assert {"train.py", "llama.plc", "train_ranks.py"} <= {path.name for path in folder.iterdir()}
    names: dict[str, object] = {}
    for block in BLOCKS:
        if block.language == "python" and block.file != "train_ranks.py":
            exec(compile(block.text, "tutorial.md", "exec"), names)
        elif block.language == "console" and block.text.startswith("$ placement "):
            command, _, shown = block.text.removeprefix("$ placement ").partition("\n")
            capsys.readouterr()
            assert cli.run(shlex.split(command)) == 0, command
            if shown:
                assert _without_numbers(capsys.readouterr().out) == _without_numbers(shown)


@pytest.mark.gloo
def test_on_real_ranks(folder) -> None:
    (command,) = [b.text for b in BLOCKS if b.language == "console" and b.text.startswith("$ torchrun ")]
    arguments = shlex.split(command.removeprefix("$ torchrun "))
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(number) for number in re.findall(r"\d+\.\d+", done.stdout.strip().splitlines()[-1])]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
