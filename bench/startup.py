"""What a command without a model takes to start, beside an interpreter that does nothing.

    python bench/startup.py            # half a minute
    python bench/startup.py 50         # so many runs of each

The commands take turns with ``python -c pass``, so that whatever else the machine does slows all of them. Bytecode is
cached, as it is for everyone after the first run. Medians: processor time (user and system) of the whole process, and
time on the clock.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPEC = Path(__file__).resolve().parents[1] / "examples" / "qwen3" / "qwen3.plc"
PLACEMENT = Path(sys.executable).with_name("placement")
UNFORMATTED = "mesh   tp\nparam a.b.weight:Shard( out )@tp\n"


def commands(folder: Path) -> dict[str, list[str]]:
    """What is measured, the interpreter alone first."""
    spec = folder / "spec.plc"
    spec.write_text(SPEC.read_text(encoding="utf-8"), encoding="utf-8")
    loose = folder / "loose.plc"
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "placement --help": [str(PLACEMENT), "--help"],
        "placement fmt FILE, in its layout": [str(PLACEMENT), "fmt", str(spec)],
        "placement fmt FILE, changed": [str(PLACEMENT), "fmt", str(loose)],
        "placement check FILE": [str(PLACEMENT), "check", str(spec)],
    }


def seconds(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Processor time and time on the clock of one run."""
    started = time.perf_counter()
    process = subprocess.Popen(  # noqa: S603 - the commands of this file
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    took = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return usage.ru_utime + usage.ru_stime, took


def main(runs: int = 20) -> None:
    """Measure all and print the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        measured = commands(folder)
        found: dict[str, list[tuple[float, float]]] = {what: [] for what in measured}
        for run in range(runs + 1):
            for what, command in measured.items():
                (folder / "loose.plc").write_text(UNFORMATTED, encoding="utf-8")
                took = seconds(command, environment)
                if run:  # the first one writes the bytecode
                    found[what].append(took)
    rows = {what: [statistics.median(column) for column in zip(*took, strict=True)] for what, took in found.items()}
    nothing = rows["python -c pass"]
    print(f"{'medians of ' + str(runs) + ' runs':36}{'processor':>12}{'more':>8}{'clock':>12}{'more':>8}")
    for what, row in rows.items():
        pairs = zip(row, nothing, strict=True)
        print(f"{what:36}" + "".join(f"{1e3 * a:9.0f} ms{1e3 * (a - b):+8.0f}" for a, b in pairs))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
