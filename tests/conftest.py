"""What every test shares: threads, seeds, Hypothesis profiles, goldens, and a skip where there is no GPU."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Set before torch is imported: each worker of pytest-xdist, and each process a test starts, would otherwise
# start as many threads as there are cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

from tests.gloo import GlooPool, warm_context

# Deadlines measure the machine, not the code. In CI the same examples run every time.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    if torch := sys.modules.get("torch"):  # tests of the language need none
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def gloo() -> Iterator[Callable[[int], GlooPool]]:
    """``gloo(n)``: a pool of n processes, started when first asked for and shared by all tests of this process."""
    pools: dict[int, GlooPool] = {}
    yield lambda n: pools.setdefault(n, GlooPool(n, timeout=300))
    for pool in pools.values():
        pool.close()


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of ``verify`` are forks of one that has torch, as those of ``gloo`` are; else each imports it."""
    from placement.verify import processes

    monkeypatch.setattr(processes.mp, "get_context", lambda _: warm_context())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="write the golden files anew instead of comparing with them")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)`` compares ``text`` with the file ``tests/goldens/name``; ``--accept`` writes it."""
    folder = Path(__file__).parent / "goldens"

    def compare(name: str, text: str) -> None:
        path = folder / name
        if request.config.getoption("--accept"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no golden {name}: read the text, then run with --accept\n{text}"
        assert text == path.read_text(encoding="utf-8"), f"{name} differs; where that is intended run with --accept"

    return compare


def pytest_collection_finish() -> None:
    """What the imports made stays to the end: no collection of cycles need look at it again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU"))
