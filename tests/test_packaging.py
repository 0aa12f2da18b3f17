"""What users install: the wheel and the editable install have all that the language needs, and importing is quick."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
ROOT = Path(__file__).resolve().parent.parent
KINDS = ("*.py", "*.plc")
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
    """The wheel that a release would upload: made by the hook that pip calls, without pip's seconds around it."""
    folder = tmp_path_factory.mktemp("wheel")
    code = f"from hatchling.build import build_wheel; print(build_wheel({str(folder)!r}))"
    name = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return folder / name.strip()


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
    inside = {path.relative_to(unpacked) for kind in KINDS for path in unpacked.rglob(kind)}
    assert inside == {path.relative_to(ROOT) for kind in KINDS for path in (ROOT / "placement").rglob(kind)}
    assert {path.name.split("-")[0] for path in unpacked.iterdir()} == {"placement"}


def test_the_wheel_installs_the_command(unpacked: Path) -> None:
    (entry_points,) = unpacked.glob("placement-*.dist-info/entry_points.txt")
    assert "placement = placement.cli:main" in entry_points.read_text(encoding="utf-8")
    _run("from placement.cli import main; assert callable(main)", path=unpacked, cwd=unpacked.parent)


@pytest.fixture(scope="module")
def command(wheel: Path) -> Callable[..., str]:
    """``command("check", ...)`` runs the wheel's own ``placement`` in a virtual environment, outside the checkout.

    What the package depends on comes from the environment that runs the tests: nothing is downloaded.
    """
    folder = wheel.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    scripts, suffix = ("Scripts", ".exe") if os.name == "nt" else ("bin", "")
    python = folder / scripts / f"python{suffix}"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, stdin=subprocess.DEVNULL)
    home = subprocess.run([python, "-c", SITE], check=True, capture_output=True, text=True).stdout.strip()
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (Path(home) / "dependencies.pth").write_text("\n".join(others), encoding="utf-8")  # only appended to the path

    def run(*arguments: str, code: int = 0) -> str:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        line = [str(folder / scripts / f"placement{suffix}"), *arguments]
        done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_the_installed_command_is_the_wheels_own(command, wheel: Path) -> None:
    folder = wheel.parent / "venv"
    (python,) = {folder / "bin" / "python", folder / "Scripts" / "python.exe"} & set(folder.glob("*/python*"))
    code = "import placement.lang.statements as s; print(s.__file__)"
    found = subprocess.run([python, "-c", code], cwd=folder, check=True, capture_output=True, text=True).stdout
    assert folder in Path(found.strip()).parents


def test_the_installed_command_checks_and_formats_the_examples(command) -> None:
    specs = sorted(map(str, (ROOT / "examples").glob("*/*.plc")))
    assert len(specs) >= 10
    told = command("check", *specs)
    assert told.count("nothing wrong") == len(specs)
    command("fmt", "--check", *specs)


def test_the_installed_command_knows_its_codes(command) -> None:
    page = (ROOT / "docs" / "diagnostics" / "PLC204.md").read_text(encoding="utf-8")
    assert command("explain", "PLC204").strip() == page.strip()


def test_the_installed_command_tells_faults(command, tmp_path: Path) -> None:
    (tmp_path / "wrong.plc").write_text("mesh tp\nvalue a : Shrad(0) @ tp\n", encoding="utf-8")
    assert "did you mean 'Shard'?" in command("check", str(tmp_path / "wrong.plc"), code=1)


def test_the_installed_command_compiles_the_spec_of_a_model(command) -> None:
    example = ROOT / "examples" / "mlp"
    told = command("check", str(example / "mlp.plc"), "--model", f"{example / 'model.py'}:build", "--mesh", "tp=2")
    assert "fits" in told


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
