"""What users install: the wheel and the editable install have the grammar, and importing is quick."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GRAMMAR = (ROOT / "grammar" / "placement.lark").read_text(encoding="utf-8")


def _run(code: str, *, path: Path, cwd: Path) -> str:
    """The output of ``code`` in a fresh interpreter that finds the package in ``path`` before anything installed."""
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel that a release would upload."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True, stdin=subprocess.DEVNULL)
    (built,) = folder.glob("placement-*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    folder = wheel.parent / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_holds_the_grammar_the_typing_marker_and_the_licence(unpacked: Path) -> None:
    assert (unpacked / "placement" / "lang" / "placement.lark").read_text(encoding="utf-8") == GRAMMAR
    assert (unpacked / "placement" / "py.typed").exists()
    pages = {path.name for path in (ROOT / "docs" / "diagnostics").glob("*.md")}
    assert {path.name for path in (unpacked / "placement" / "lang" / "pages").iterdir()} == pages
    assert list(unpacked.glob("placement-*.dist-info/licenses/LICENSE"))


def test_the_wheel_holds_every_module_of_the_package_and_nothing_beside_it(unpacked: Path) -> None:
    inside = {path.relative_to(unpacked) for path in unpacked.rglob("*.py")}
    assert inside == {path.relative_to(ROOT) for path in (ROOT / "placement").rglob("*.py")}
    assert {path.name.split("-")[0] for path in unpacked.iterdir()} == {"placement"}


def test_the_wheel_installs_the_command(unpacked: Path) -> None:
    (entry_points,) = unpacked.glob("placement-*.dist-info/entry_points.txt")
    assert "placement = placement.cli:main" in entry_points.read_text(encoding="utf-8")
    _run("from placement.cli import main; assert callable(main)", path=unpacked, cwd=unpacked.parent)


def test_an_editable_install_reads_the_checkout_and_copies_no_grammar(tmp_path: Path) -> None:
    code = f"from hatchling.build import build_editable; print(build_editable({str(tmp_path)!r}))"
    name = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with zipfile.ZipFile(tmp_path / name.strip()) as archive:
        files = archive.namelist()
        (pth,) = [file for file in files if file.endswith(".pth")]
        assert Path(archive.read(pth).decode().strip()).resolve() == ROOT
    assert not [file for file in files if file.endswith((".lark", ".py"))]  # a copy would go stale


@pytest.mark.parametrize("module", ["placement", "placement.lang", "placement.cli"])
def test_importing_loads_neither_torch_nor_transformers(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    assert _run(code, path=ROOT, cwd=tmp_path).strip() == "[]"
