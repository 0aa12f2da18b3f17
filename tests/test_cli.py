"""The command line: what each command prints, in 80 columns, and with which exit code it ends."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from placement import cli
from placement.commands import check as commands
from placement.lang.diagnostics import CODES

ROOT = Path(__file__).resolve().parent.parent
MLP = str(ROOT / "examples" / "mlp" / "mlp.plc")
MLP_MODEL = "examples.mlp.model:build"
QWEN3 = str(ROOT / "examples" / "qwen3" / "qwen3.plc")
ON_TWO = ("--model", MLP_MODEL, "--mesh", "tp=2")

# A callable for --model that is nobody's example.
OWN = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
    def forward(self, x):
        y = self.down(self.up(x).relu())
        return {"loss": y.pow(2).mean()}

def build():
    return Own(), {"x": torch.randn(2, 6, 4)}

def broken():
    raise RuntimeError("no such weights")

def lonely():
    return Own()

def leaves():
    raise SystemExit(0)

def chatty():
    print("loading weights")
    return build()

def needy(path):
    return build()

class Leaving(Own):
    def forward(self, x):
        print("in forward")
        raise SystemExit(3)

def leaves_later():
    return Leaving(), {"x": torch.randn(2, 6, 4)}
"""
OWN_SPEC = """mesh tp
input x : [batch, seq, width]
param up.{weight,bias} : Shard(out) @ tp
param down.weight : Shard(in) @ tp
"""


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """A folder with a model and a spec, which is the working directory."""
    (tmp_path / "own_model.py").write_text(OWN)
    (tmp_path / "own.plc").write_text(OWN_SPEC)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_model", raising=False)  # another test's
    return tmp_path


@pytest.fixture
def run(capsys):
    """``run(*args)`` → (exit code, stdout, stderr); nothing may be wider than 80 columns."""

    def call(*args: str, wide: bool = False) -> tuple[int, str, str]:
        code = cli.run(list(args))
        out, err = capsys.readouterr()
        lines = [line for line in (out + err).splitlines() if len(line) > 80]
        assert wide or not lines, lines
        return code, out, err

    return call


@pytest.fixture
def config(tmp_path) -> str:
    """A transformers config, as a path for ``hf:``."""
    text = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(text))
    return f"hf:{tmp_path / 'config.json'}"


# -- start-up ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        *(["--help"], ["--version"], ["explain", "--help"], ["explain", "PLC204"]),
        *(["check", MLP], ["check", MLP, "--format", "json"], ["fmt", "--diff", MLP], ["fmt", "--help"]),
    ],
)
def test_light_commands_import_neither_torch_nor_transformers(args) -> None:
    code = (
        "import sys; from placement import cli; code = cli.run(sys.argv[1:]);"
        "print(sorted({'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_names_every_command(run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(f"  {command} " in out for command in ("check", "fmt", "explain", "emit", "verify"))


# -- check ------------------------------------------------------------------------------------------


def test_check_of_a_text_alone(run) -> None:
    code, out, err = run("check", os.path.relpath(MLP))
    assert (code, err) == (0, "")
    assert "7 statements, nothing wrong" in out


def test_check_with_a_model_says_what_was_checked(run) -> None:
    code, out, err = run("check", os.path.relpath(MLP), *ON_TWO, "-v")
    assert code == 0
    assert "fits ResidualMLP on tp = 2: 16 parameters (6 sharded)" in " ".join(out.split())
    assert "note[PLC208]: no line of examples/mlp/mlp.plc places 10 parameters, used" in out
    assert "norm.{weight,bias} [64]" in out
    assert err.startswith("stages: capture ")


def test_check_reports_every_fault_of_a_spec(run, own) -> None:
    (own / "own.plc").write_text(OWN_SPEC.replace("mesh tp\n", "mesh tp\nparm x\n") + "param : Shard(0)\n")
    code, out, err = run("check", "own.plc")
    assert (code, out) == (1, "")
    assert err.count("error[PLC") == 2
    assert "own.plc:2:1" in err
    assert "\x1b" not in err


def test_check_with_a_model_reports_what_the_model_lacks(run, own) -> None:
    (own / "own.plc").write_text(OWN_SPEC + "param nowhere.weight : Shard(out) @ tp\n")
    code, _, err = run("check", "own.plc", "--model", "own_model:build", "--mesh", "tp=2")
    assert code == 1
    assert "error[PLC104]" in err
    assert "own.plc:5:7" in err


def test_check_needs_a_model_for_a_mesh(run) -> None:
    code, _, err = run("check", MLP, "--mesh", "tp=2", wide=True)
    assert code == 2
    assert "--model" in err


FAULTY = "mesh tp\nfoo\nvalue a : Shrad(0)\n"


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        ([], ["PLC002", "PLC017"]),
        (["--select", "PLC017"], ["PLC017"]),
        (["--select", "plc002,PLC1"], ["PLC002"]),
        (["--ignore", "PLC002"], ["PLC017"]),
        (["--select", "PLC", "--ignore", "PLC002", "--ignore", "PLC017"], []),
        (["--ignore", "PLC0"], []),
    ],
)
def test_check_reports_the_codes_asked_for(run, own, options, codes) -> None:
    (own / "own.plc").write_text(FAULTY)
    code, out, _ = run("check", "own.plc", *options, "--format", "json", wide=True)
    assert [d["code"] for d in json.loads(out)["diagnostics"]] == codes
    assert code == (1 if codes else 0)
    out = run("check", "own.plc", *options)[1]
    assert ("faults left out: 2; nothing is checked" in out) == (not codes)


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        ("concise", "own.plc:2:1: error[PLC002]: unknown statement 'foo'\nother.plc:1:1: error[PLC002]: "),
        ("github", "::error title=PLC002,file=own.plc,line=2,endLine=2,col=1,endColumn=4::unknown"),
        ("json", '"file": "other.plc"'),
    ],
)
def test_check_of_several_specs_in_the_formats_of_machines(run, own, form, shown) -> None:
    (own / "own.plc").write_text("mesh tp\nfoo\n")
    (own / "other.plc").write_text("bar\n")
    (own / "fine.plc").write_text("mesh tp\n")
    code, out, err = run("check", "own.plc", "other.plc", "fine.plc", "own.plc", "--format", form, wide=True)
    assert (code, err) == (1, "")
    assert shown in out
    assert out.count("PLC002") == (4 if form == "json" else 2)  # json names each one's page as well
    code, out, err = run("check", "fine.plc", "--format", form)
    assert (code, err) == (0, "")
    assert out == ("" if form != "json" else '{\n  "format_version": 1,\n  "diagnostics": []\n}\n')


def test_check_of_stdin(run, own, monkeypatch) -> None:
    give(monkeypatch, b'include "own.plc"\nparam down.weight : Replicat\n')
    code, _, err = run("check", "-")
    assert code == 1
    assert " --> <stdin>:2:21" in err
    give(monkeypatch, b"mesh \xff")
    assert "PLC001" in run("check", "-")[2]
    give(monkeypatch, b'include "own.plc"\n')
    assert run("check", "-")[:2] == (0, "-: 4 statements, nothing wrong; --model holds them against a model\n")


def test_notes_do_not_fail(run, own) -> None:
    target = ("own.plc", "--model", "own_model:build", "--mesh", "tp=2")
    code, out, err = run("check", *target)
    assert (code, err) == (0, "")
    assert "note[PLC208]: no line of own.plc places 1 parameter, used replicated\n  = note: down.bias [4]\n" in out
    assert "PLC208" not in run("check", *target, "--ignore", "PLC2")[1]
    _, out, _ = run("check", *target, "--format", "json")
    assert [(d["code"], d["severity"]) for d in json.loads(out)["diagnostics"]] == [("PLC208", "note")]


# -- fmt --------------------------------------------------------------------------------------------


def give(monkeypatch, content: bytes) -> None:
    """Content on stdin."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


UGLY, NEAT = "mesh   tp\n\n\n\nvalue a:auto# c", "mesh tp\n\nvalue a : auto  # c\n"


def test_fmt_writes_what_changes_and_keeps_permissions(run, tmp_path) -> None:
    ugly, neat, link = tmp_path / "sub" / "ugly.plc", tmp_path / "neat.plc", tmp_path / "link.plc"
    (tmp_path / "sub").mkdir()
    ugly.write_text(UGLY)
    ugly.chmod(0o640)
    neat.write_text(NEAT)
    link.symlink_to(ugly)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.plc").write_text(UGLY)
    before = neat.stat()
    code, out, err = run("fmt", str(tmp_path), str(link), wide=True)
    assert (code, out, err.count("formatted")) == (0, "", 1)
    assert ugly.read_text() == NEAT
    assert ugly.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    assert (neat.stat().st_ino, neat.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert (tmp_path / ".hidden" / "x.plc").read_text() == UGLY
    assert sorted(p.name for p in tmp_path.rglob("*")) == [
        ".hidden",
        "link.plc",
        "neat.plc",
        "sub",
        "ugly.plc",
        "x.plc",
    ]
    assert run("fmt", str(tmp_path), wide=True) == (0, "", "nothing to format\n")


def test_fmt_check_and_diff_write_nothing(run, tmp_path) -> None:
    ugly = tmp_path / "ugly.plc"
    ugly.write_bytes(b"\xef\xbb\xbfmesh tp\r\n" + UGLY.encode())
    before = ugly.read_bytes()
    code, out, err = run("fmt", "--check", str(ugly), wide=True)
    assert (code, out, err) == (1, "", f"would format {ugly}\n")
    code, out, _ = run("fmt", "--diff", str(ugly), wide=True)
    assert code == 0
    assert "-value a:auto# c\n\\ No newline at end of file\n+value a : auto  # c\n" in out
    assert "-mesh tp\r\n" in out
    assert run("fmt", "--diff", "--check", str(ugly), wide=True)[0] == 1
    assert ugly.read_bytes() == before
    ugly.write_text(NEAT)
    assert run("fmt", "--diff", "--check", str(ugly), wide=True) == (0, "", "nothing to format\n")


def test_fmt_leaves_what_does_not_parse_and_formats_the_rest(run, own) -> None:
    (own / "bad.plc").write_text("mesh   tp\nfoo\n")
    (own / "worse.plc").write_bytes(b"mesh \xff")
    (own / "ugly.plc").write_text(UGLY)
    code, out, err = run("fmt", "bad.plc", "ugly.plc", "worse.plc", "nowhere.plc")
    assert (code, out) == (1, "")
    assert [c for c in ("PLC002", "PLC001", "PLC014") if c in err] == ["PLC002", "PLC001", "PLC014"]
    assert " --> bad.plc:2:1" in err
    assert (own / "bad.plc").read_text() == "mesh   tp\nfoo\n"
    assert (own / "worse.plc").read_bytes() == b"mesh \xff"
    assert (own / "ugly.plc").read_text() == NEAT


def test_fmt_of_stdin(run, monkeypatch) -> None:
    give(monkeypatch, UGLY.encode())
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output))
    assert cli.run(["fmt", "-"]) == 0
    assert output.getvalue().decode() == NEAT
    give(monkeypatch, b"foo")
    assert cli.run(["fmt", "-"]) == 1
    assert output.getvalue().decode() == NEAT


def test_fmt_replaces_no_pipe(run, tmp_path) -> None:
    pipe = tmp_path / "pipe.plc"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("mesh tp=2",))
    writer.start()
    code, _, err = run("fmt", str(pipe), wide=True)
    writer.join()
    assert (code, err) == (1, f"error: {pipe}: not a regular file\n")
    assert pipe.is_fifo()


def test_a_file_that_cannot_be_written_stays_whole(run, own, monkeypatch) -> None:
    (own / "ugly.plc").write_text(UGLY)

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert run("fmt", "ugly.plc") == (1, "", "error: ugly.plc: No space left on device\n")
    assert (own / "ugly.plc").read_text() == UGLY
    assert not list(own.glob(".*.tmp"))


# -- explain and emit -------------------------------------------------------------------------------


def test_explain_in_every_format(run, tmp_path) -> None:
    spec = os.path.relpath(MLP)
    code, out, _ = run("explain", spec, *ON_TWO, "-v")
    assert code == 0
    assert "all_gather" in out
    assert "Stages" in out
    code, out, _ = run("explain", spec, *ON_TWO, "--format", "json", wide=True)
    assert json.loads(out)["format_version"] == 1
    assert json.loads(out)["mesh"] == {"tp": 2}
    code, out, _ = run("explain", spec, *ON_TWO, "--format", "dot", wide=True)
    assert out.startswith("digraph")
    code, out, _ = run("explain", spec, *ON_TWO, "--format", "html", "-o", str(tmp_path / "plan.html"))
    assert (code, out) == (0, "")
    assert "<html" in (tmp_path / "plan.html").read_text()


def test_sizes_change_the_prices_and_the_example(run) -> None:
    def gathered(size: str) -> int:
        _, out, _ = run("explain", MLP, *ON_TWO, "--size", size, "--format", "json", wide=True)
        return json.loads(out)["totals"]["tp"]["forward"]["all_gather"]["bytes"]

    assert gathered("batch=2,seq=128") * 4 == gathered("batch=2,seq=512")


def test_explain_shows_the_page_of_a_code(run) -> None:
    code, out, _ = run("explain", "PLC204", wide=True)
    assert code == 0
    assert out.startswith("# PLC204: ")
    code, _, err = run("explain", "PLC999", wide=True)
    assert code == 2
    assert "no diagnostic PLC999" in err
    for known in CODES:
        assert run("explain", known, wide=True)[1].startswith(f"# {known}")


def test_a_code_may_be_typed_in_lower_case(run) -> None:
    assert run("explain", "plc204", wide=True) == run("explain", "PLC204", wide=True)


def test_emitted_text_is_a_program(run, tmp_path) -> None:
    target = tmp_path / "mlp_tp2.py"
    code, out, err = run("emit", os.path.relpath(MLP), *ON_TWO, "-o", str(target), wide=True)
    assert (code, out) == (0, "")
    assert "root class ResidualMLP" in err
    code, out, _ = run("emit", os.path.relpath(MLP), *ON_TWO, wide=True)
    assert out == target.read_text()
    names: dict[str, object] = {}
    exec(compile(out, "emitted", "exec"), names)
    assert callable(names["build"])


# -- verify -----------------------------------------------------------------------------------------


def test_verify_of_the_mlp(run) -> None:
    code, out, _ = run("verify", os.path.relpath(MLP), *ON_TWO, "--batch", "3", "--seq", "10", "--steps", "2")
    assert code == 0, out
    assert "mlp.plc, tp = 2: 2 simulated ranks against one device, float64" in out
    assert "ok: the program computes what one device computes" in out


def test_verify_past_the_tolerance_is_1(run) -> None:
    code, out, _ = run("verify", MLP, *ON_TWO, "--steps", "0", "--tolerance", "1e-30")
    assert code == 1
    assert "FAILED" in out


@pytest.mark.gloo
@pytest.mark.usefixtures("warm_ranks")
def test_verify_of_a_file_on_processes(run, own) -> None:
    code, out, err = run(
        "verify", "own.plc", "--model", "own_model.py:build", "--mesh", "tp=2", "--backend", "gloo", "--seq", "4"
    )
    assert code == 0, err
    assert "2 gloo ranks" in out


def test_a_size_that_the_axis_does_not_divide(run) -> None:
    code, _, err = run("verify", MLP, *ON_TWO, "--seq", "7", wide=True)
    assert code == 1
    assert "seq" in err
    assert "PLC901" not in err


# -- transformers -----------------------------------------------------------------------------------


def test_a_transformers_config(run, config) -> None:
    mesh = ("--model", config, "--mesh", "tp=2")
    code, out, err = run("check", os.path.relpath(QWEN3), *mesh)
    assert code == 0, err
    assert "fits Qwen3ForCausalLM on tp = 2" in " ".join(out.split())
    code, out, _ = run("explain", QWEN3, *mesh, "--size", "batch=1,seq=128", "--format", "json", wide=True)
    gathers = [c for c in json.loads(out)["conversions"] if c["forward"] == "all_gather"]
    assert 128 * 32 * 4 in {c["bytes"] for c in gathers}
    code, out, err = run("verify", os.path.relpath(QWEN3), *mesh, "--batch", "3", "--seq", "6", "--steps", "1")
    assert code == 0, out + err
    assert "[transformers]" not in out + err


def test_a_config_that_is_none(run, tmp_path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "worse.json").write_text("{")
    for name, message in (("bad.json", "model_type"), ("worse.json", "not JSON"), ("none.json", "No such file")):
        code, _, err = run("check", MLP, "--model", f"hf:{tmp_path / name}", "--mesh", "tp=2", wide=True)
        assert code == 2
        assert message in err


# -- exit codes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["check"], 2, "Missing argument"),
        (["check", MLP, "--select", "PLC999"], 2, "no diagnostic PLC999"),
        (["check", MLP, "--select", ""], 2, "names no code"),
        (["check", MLP, "--ignore", "PLC1,"], 2, "names no code"),
        (["check", MLP, "--ignore", "PLC2040"], 2, "did you mean PLC204"),
        (["check", MLP, "--format", "xml"], 2, "xml"),
        (["fmt"], 2, "Missing argument"),
        (["fmt", MLP, "-"], 2, "stands alone"),
        (["fmt", "nowhere.plc"], 1, "PLC014"),
        (["chek", MLP], 2, "No such command"),
        (["explain", MLP], 2, "--model"),
        (["explain", MLP, *ON_TWO[:2], "--mesh", "tp"], 2, "name=number"),
        (["explain", MLP, *ON_TWO[:2], "--mesh", "tp=2,tp=4"], 2, "twice"),
        (["explain", MLP, *ON_TWO, "--size", "bacth=2"], 2, "did you mean batch?"),
        (["explain", MLP, *ON_TWO, "--format", "yaml"], 2, "yaml"),
        (["check", MLP, "--model", "examples.nowhere:build"], 2, "no module"),
        (["check", MLP, "--model", "examples.mlp.model:biuld"], 2, "has no 'biuld'"),
        (["check", MLP, "--model", "nonsense"], 2, "MODULE:CALLABLE"),
        (["check", MLP, "--model", "model.py"], 2, "names no callable: write MODULE:CALLABLE, FILE.py:CALLABLE or"),
        (["check", MLP, "--model", "nowhere.py:build"], 2, "no file"),
        (["check", "nowhere.plc"], 1, "PLC014"),
        (["check", MLP, "--model", MLP_MODEL], 1, "PLC102"),
        (["check", MLP, "--model", MLP_MODEL, "--mesh", "tp=3"], 1, "PLC203"),
    ],
)
def test_exit_codes(run, args, code: int, message: str) -> None:
    found, out, err = run(*args, wide=True)
    assert (found, out) == (code, "")
    assert message in err
    assert "Traceback" not in err


def test_a_model_that_fails_is_at_fault(run, own) -> None:
    code, _, err = run("check", "own.plc", "--model", "own_model:broken", "--mesh", "tp=2", wide=True)
    assert code == 1
    assert "PLC404" in err
    assert "no such weights" in err
    code, _, err = run("check", "own.plc", "--model", "own_model:lonely", "--mesh", "tp=2", wide=True)
    assert code == 2
    assert "keyword arguments of one call" in err


@pytest.mark.parametrize(("name", "line"), [("leaves", "raise SystemExit(0)"), ("leaves_later", "raise SystemExit(3)")])
@pytest.mark.parametrize("command", ["check", "explain", "verify"])
def test_a_model_that_exits_does_not_choose_the_exit_code(run, own, command, name, line) -> None:
    code, out, err = run(command, "own.plc", "--model", f"own_model:{name}", "--mesh", "tp=2")
    assert (code, out) == (1, "")
    assert "PLC404" in err
    assert "SystemExit" in err
    assert f"| {line}" in " ".join(err.split())


def test_init_of_a_model_that_exits(run, own) -> None:
    code, out, err = run("init", "--model", "own_model:leaves_later")
    assert (code, out) == (1, "")
    assert "PLC404" in err


def test_init_of_a_size_that_the_model_has_not(run, own) -> None:
    code, out, err = run("init", "--model", "own_model:chatty", "--size", "sq=4096")
    assert (code, out) == (1, "")
    assert "no dim 'sq'" in err


def test_what_a_model_prints_is_no_part_of_the_answer(run, own) -> None:
    code, out, err = run("check", "own.plc", "--model", "own_model:chatty", "--mesh", "tp=2", "--format", "json")
    assert code == 0
    assert json.loads(out)["format_version"] == 1
    assert "loading weights" in err


def test_a_model_that_fails_before_its_own_code_shows_none_of_ours(run, own) -> None:
    (own / "slip.py").write_text("import torch\ndef f(:\n")
    _, _, err = run("check", "own.plc", "--model", "slip.py:f", "--mesh", "tp=2")
    assert "slip.py:2" in err
    assert "importlib" not in err


def test_a_callable_that_needs_arguments_is_a_usage_error(run, own) -> None:
    code, out, err = run("check", "own.plc", "--model", "own_model:needy", "--mesh", "tp=2", wide=True)
    assert (code, out) == (2, "")
    assert "own_model:needy needs 'path': name a callable whose arguments all have defaults" in " ".join(err.split())
    spec = OWN_SPEC.replace("[batch, seq, width]", "[batch, path, width]")
    (own / "own.plc").write_text(spec)
    code, _, err = run("check", "own.plc", "--model", "own_model:needy", "--mesh", "tp=2", "--size", "path=6")
    assert code == 0, err


@pytest.mark.parametrize("command", [["fmt"], ["fmt", "--check"], ["check"]])
def test_names_of_files_steer_no_terminal(run, own, command) -> None:
    name = "a\x1b[31mb.plc"
    (own / name).write_text("mesh   tp\n")
    _, out, err = run(*command, name)
    assert "a\ufffd[31mb.plc" in out + err
    assert "\x1b" not in out + err


def test_our_own_bug_is_3_and_asks_for_a_report(run, monkeypatch) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(commands, "checked_spec", fail)
    code, out, err = run("check", MLP)
    assert (code, out) == (3, "")
    assert "error[PLC901]: internal error: KeyError: 'planted'" in err
    assert "please report it" in err
    assert "Traceback" not in err
    code, _, err = run("check", MLP, "--debug", wide=True)
    assert code == 3
    assert "Traceback" in err
    monkeypatch.setenv("PLACEMENT_DEBUG", "1")
    assert "Traceback" in run("check", MLP, wide=True)[2]


def test_a_full_disk_is_no_bug_of_ours(run, own, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(commands, "show", full)
    assert run("check", "own.plc") == (1, "", "error: No space left on device\n")


def test_without_a_stdout_nothing_is_told_and_the_exit_code_is_right(own) -> None:
    (own / "bad.plc").write_text("mesh\n")
    for spec, expected in (("own.plc", 0), ("bad.plc", 1)):
        command = f"exec {sys.executable} -m placement.cli check {own / spec} >&-"
        ended = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, cwd=ROOT, check=False)
        assert ended.returncode == expected, ended.stderr


def test_ctrl_c_ends_without_a_traceback(run, monkeypatch) -> None:
    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "checked_spec", interrupt)
    code, _, err = run("check", MLP)
    assert code == 130
    assert err.strip() == "interrupted"


# -- a terminal -------------------------------------------------------------------------------------


def test_the_status_line_appears_on_a_terminal_only_and_is_wiped(monkeypatch, capsys) -> None:
    from placement import terminal

    monkeypatch.setattr(terminal, "_PATIENCE", 0.0)

    def slow() -> str:
        with terminal.Status("compiling") as status:
            status.say("training")
            status._done.wait(0.6)
        return capsys.readouterr().err

    assert slow() == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = slow()
    assert "training ... 0 s" in shown
    assert shown.endswith("\r\x1b[K")


def test_colour_is_for_terminals_whose_user_wants_it(monkeypatch) -> None:
    from placement import terminal

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert not terminal.colored(sys.stderr)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert terminal.colored(sys.stderr)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.colored(sys.stderr)
