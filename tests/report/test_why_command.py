"""The questions on the command line, what an interrupt leaves, and a problem that is too large to be solved exactly."""

from __future__ import annotations

import json
import re
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from placement import cli
from placement.solver import builder, eliminate

ROOT = Path(__file__).resolve().parents[2]
MLP = str(ROOT / "examples" / "mlp" / "mlp.plc")
TP_ONLY = str(ROOT / "examples" / "mlp" / "mlp_tp.plc")
TARGET = ("--model", "examples.mlp.model:build", "--mesh", "tp=2")


@pytest.fixture
def run(capsys):
    """``run(*args)`` → (exit code, stdout, stderr) of ``placement explain MLP`` on two ranks."""

    def call(*args: str, command: str = "explain") -> tuple[int, str, str]:
        code = cli.run([command, MLP, *TARGET, *args])
        out, err = capsys.readouterr()
        assert all(len(line) <= 80 for line in out.splitlines() if not out.startswith("{"))
        return code, out, err

    return call


def test_why(run) -> None:
    code, out, _ = run("--why", "blocks.*.norm")
    assert code == 0
    assert out.splitlines()[2].startswith("blocks.[0-1].norm  ")
    assert "value norm : Shard(seq) @ tp" in out  # the line of the spec
    code, out, _ = run("--why", "head.weight", "--format", "json")
    (found,) = json.loads(out)["why"]["found"]
    assert (code, found["names"]) == (0, ["head.weight"])
    code, out, err = run("--why", "blocks.*.nrom")
    assert (code, out) == (2, "")
    assert "did you mean 'blocks.*.norm'?" in err


def test_against_a_spec_and_a_saved_plan(run, tmp_path) -> None:
    code, out, _ = run("--against", TP_ONLY)
    assert code == 0
    assert out.startswith("from mlp_tp.plc to mlp.plc ")
    saved = tmp_path / "plan.json"
    assert run("--format", "json", "-o", str(saved))[0] == 0
    code, out, _ = run("--against", str(saved))
    assert (code, "nothing changes" in out) == (0, True)
    code, out, _ = run("--against", TP_ONLY, "--format", "json")
    assert (code, json.loads(out)["against"]["before"]) == (0, "mlp_tp.plc")
    saved.write_text("{}")
    code, out, err = run("--against", str(saved))
    assert (code, out) == (2, "")
    assert "format_version" in err
    code, out, err = run("--against", "nowhere.plc")
    assert (code, out) == (1, "")
    assert "nowhere.plc: No such file" in err


def test_time(run, tmp_path) -> None:
    code, out, _ = run("--time")
    assert code == 0
    assert "One step" in out
    assert "blocks.1 " in out
    traces = [tmp_path / name for name in ("a.json", "b.json")]
    assert run("--format", "chrome", "-o", str(traces[0]))[0] == 0
    assert run("--time", "--format", "chrome", "-o", str(traces[1]))[0] == 0
    assert traces[0].read_text() == traces[1].read_text()
    assert json.loads(traces[0].read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--why", "norm", "--time"), "why and time are two questions"),
        (("--why", "norm", "--format", "dot"), "why is answered as text or json, not as dot"),
        (("--against", MLP, "--format", "chrome"), "not as chrome"),
    ],
)
def test_what_cannot_be_asked(run, args, message) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert message in err


def test_the_same_questions_of_a_compiled_module() -> None:
    import placement
    from examples.mlp.model import build as model_of

    model, example = model_of()
    compiled = placement.compile(model, placement.simulate(tp=2), MLP, example=example)
    assert re.search(r"mlp\.plc:\d+ places it", compiled.explain(why="norm"))
    assert json.loads(compiled.explain("json", time=True))["timeline"]["time"]["compute"] == compiled.plan.compute
    text = placement.explain(model, {"tp": 2}, MLP, example=example, against=TP_ONLY)
    data = json.loads(placement.explain(model, {"tp": 2}, TP_ONLY, example=example, format="json"))
    from_data = placement.explain(model, {"tp": 2}, MLP, example=example, against=data)
    assert from_data.replace("the saved plan", "mlp_tp.plc").splitlines()[3:] == text.splitlines()[3:]
    with pytest.raises(ValueError, match="two questions"):
        placement.explain(model, {"tp": 2}, MLP, example=example, against=data, time=True)


# -- long solves --------------------------------------------------------------------------------------


def test_ctrl_c_says_what_it_ended(run, monkeypatch) -> None:
    def interrupted(*_args: object, **_options: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(builder, "solve", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        code, out, err = run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, out) == (130, "")
    assert (
        err.split() == ["interrupted", "while", "solving,", "after", "0", "s:", "there", "is", "no", "result"]
        or "while solving" in err
    )
    assert "Traceback" not in err


def test_a_long_solve_is_told_on_a_terminal(run, monkeypatch) -> None:
    from placement import terminal

    def slowly(*args, **options):
        import time

        time.sleep(0.6)
        return eliminate.solve(*args, **options)

    monkeypatch.setattr(terminal, "_PATIENCE", 0.0)
    monkeypatch.setattr(builder, "solve", slowly)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, _, err = run("--why", "norm")
    assert code == 0
    assert "\x1b[Ksolving ... " in err
    assert "\x1b[Kpricing alternative 2 of 5 ... " in err


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> str:
    """A spec that places little, and a solver whose tables hold next to nothing."""
    spec = tmp_path / "bare.plc"
    spec.write_text("mesh tp\ninput x, target : [batch, seq, width]\nparam blocks.*.up.weight : Shard(out)\n")
    monkeypatch.setattr(builder, "solve", partial(eliminate.solve, limit=2))
    return str(spec)


def test_past_the_limit_the_bound_and_the_gap_are_told(tiny, capsys) -> None:
    assert cli.run(["explain", tiny, *TARGET]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "above the optimum: no plan takes less than" in out
    assert "Note the plan is not proven to cost least, at most" in out
    assert cli.run(["explain", tiny, *TARGET, "--format", "json"]) == 0
    proof = json.loads(capsys.readouterr().out)["proof"]
    assert 0 < proof["bound"] < proof["cost"]
    assert cli.run(["check", tiny, *TARGET]) == 0
    assert "note[PLC302]" in capsys.readouterr().out
    assert cli.run(["explain", tiny, *TARGET, "--why", "norm"]) == 0
    assert "not every plan is proven to be the best" in " ".join(capsys.readouterr().out.split())


def test_a_plan_that_the_search_did_not_find_is_an_error(tiny, monkeypatch, capsys) -> None:
    monkeypatch.setattr(eliminate.fallback, "search", lambda _buckets: None)
    assert cli.run(["explain", tiny, *TARGET]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "error[PLC302]: no plan was found" in " ".join(err.split())
