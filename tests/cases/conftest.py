"""Gloo processes shared by this folder's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.gloo import GlooPool


@pytest.fixture(scope="session")
def gloo() -> Iterator[Callable[[int], GlooPool]]:
    """``gloo(n)``: a pool of n processes, started when first asked for."""
    pools: dict[int, GlooPool] = {}
    yield lambda n: pools.setdefault(n, GlooPool(n, timeout=300))
    for pool in pools.values():
        pool.close()
