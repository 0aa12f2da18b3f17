"""The language is light: it starts at once, without torch and without lark."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "llama" / "llama.plc"
CHECK = f"import sys, placement.lang as lang; assert lang.check(lang.load({str(EXAMPLE)!r})) == ()"
HEAVY = {"torch", "transformers", "numpy", "rich", "jinja2", "lark"}
SLOW = {"difflib", "textwrap", "fractions", "pathlib", "shutil", "tempfile", "json"}  # of the standard library


@pytest.fixture
def seconds(tmp_path):
    """The processor time that a fresh process takes, its bytecode cached as it is for everyone but the first user."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path)

    def run(*args):
        process = subprocess.Popen([sys.executable, *args], env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return usage.ru_utime + usage.ru_stime

    return run


@pytest.mark.parametrize("args", [["--help"], ["fmt", "--check", str(EXAMPLE)], ["check", str(EXAMPLE)]])
def test_a_command_without_a_model_takes_less_than_150_ms_more_than_nothing(seconds, args):
    command = ["-c", "import sys; from placement.cli import main; main()", *args]
    seconds(*command)
    took, nothing = [], []
    for _ in range(10):
        took.append(seconds(*command))
        nothing.append(seconds("-c", "pass"))
        if min(took) - min(nothing) < 0.15:  # a busy machine slows both, some tries more
            return
    pytest.fail(f"{min(took):.3f} s, and {min(nothing):.3f} s for nothing; bench/startup.py shows more")


def test_a_check_loads_nothing_heavy():
    code = f"{CHECK}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert (HEAVY | SLOW).isdisjoint(loaded)


def test_the_package_itself_loads_no_part_of_the_language():
    code = "import sys, placement.lang; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in loaded if name.startswith("placement.lang.")] == []


def test_functions_are_not_hidden_by_modules_of_their_name():
    code = """if True:
        import placement.lang.check, placement.lang.render
        from placement.lang import check, render, __all__
        import placement.lang
        assert callable(check) and callable(render) and callable(placement.lang.check)
        assert all(hasattr(placement.lang, name) for name in __all__)
        assert not hasattr(placement.lang, "no_such_name")
    """
    subprocess.run([sys.executable, "-c", code], check=True)
