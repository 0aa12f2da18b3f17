"""A PlacementError that nobody catches: what a script prints."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import subprocess
import sys

import pytest

import placement
from placement.undisturbed import undisturbed

TEXT = """
import placement

def mine(text):
    placement.parse(text)

mine("mesh tp\\nvalue a : Shrad(0) @ tp\\n")
"""
MODEL = """
import placement, torch

class Odd(torch.nn.Module):
    def forward(self, x):
        return x * x.sum().item()

placement.compile(Odd(), placement.simulate(tp=2), "mesh tp\\n", example={"x": torch.ones(2)})
"""


def printed(folder, script, **environment):
    (folder / "script.py").write_text(script)
    command = [sys.executable, "script.py"]
    env = {**os.environ, "PLACEMENT_DEBUG": "", **environment}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stderr


def frames(shown):
    return [line.rpartition(" in ")[2] for line in shown.split("\n") if line.startswith("  File ")]


def test_a_script_shows_its_own_call_and_the_diagnostics(tmp_path):
    shown = printed(tmp_path, TEXT)
    assert "placement.PlacementError: error[PLC017]: unknown placement 'Shrad'\n --> <string>:2:11\n" in shown
    assert "2 | value a : Shrad(0) @ tp\n  |           ^^^^^\n  = help: did you mean 'Shard'?" in shown
    assert frames(shown) == ["<module>", "mine", "call"]
    assert len(frames(printed(tmp_path, TEXT, PLACEMENT_DEBUG="1"))) > 4


def test_the_line_of_the_model_is_shown_and_nothing_of_torch(tmp_path):
    shown = printed(tmp_path, MODEL)
    assert "::: script.py:6\n  |\n6 |         return x * x.sum().item()\n  |         ^^^^^^^^^^^^^^^^^^^^^^^^^" in shown
    assert frames(shown) == ["<module>", "call"]


def test_the_face_keeps_signatures_and_errors_travel():
    assert list(inspect.signature(placement.compile).parameters)[:3] == ["model", "mesh", "spec"]
    with pytest.raises(placement.PlacementError) as caught:
        placement.parse("foo")
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is placement.PlacementError
    assert (again.diagnostics, str(again)) == (caught.value.diagnostics, str(caught.value))


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_of_cycles_is_left_as_it_was(enabled: bool) -> None:
    within = undisturbed()(gc.isenabled)
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        assert not within()
        with pytest.raises(TypeError):
            undisturbed()(len)(None)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()
