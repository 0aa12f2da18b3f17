"""The pool of gloo ranks itself: a group that lost a rank, or waits for one, is replaced before the next test."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from tests.gloo import GlooPool, RankEnded

pytestmark = pytest.mark.gloo


def _ranks() -> tuple[int, int]:
    dist.barrier()
    return dist.get_rank(), os.getpid()


def _one_ends() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def _one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("not me")
    dist.barrier()


@pytest.mark.parametrize(("body", "error"), [(_one_ends, RankEnded), (_one_raises, ValueError)])
def test_a_group_that_failed_is_replaced(body, error) -> None:
    pool = GlooPool(2, timeout=60)
    try:
        (_, first), (_, second) = pool.run(_ranks)
        with pytest.raises(error):
            pool.run(body)
        ranks = pool.run(_ranks)
        assert [rank for rank, _ in ranks] == [0, 1]
        assert not {first, second} & {process for _, process in ranks}
    finally:
        pool.close()
