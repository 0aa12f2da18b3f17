"""``verify`` on real processes: the same numbers, and a clear end whatever becomes of a rank."""

from __future__ import annotations

import time

import pytest
import small
import torch

import placement
from placement.verify import ProcessFailure

pytestmark = pytest.mark.gloo


def verify(model, *, example=None, **options):
    example = small.example() if example is None else example
    return placement.verify(model, {"tp": 2}, small.spec(), example=example, backend="gloo", **options)


# The first test has its processes import everything, as a user's do; the others' are forks of one that has.


def test_gloo_ranks_compute_what_one_device_computes() -> None:
    parity = verify(small.Block(), example=small.example(requires_grad=True))
    assert parity.ok, parity
    assert all(worst.compared for worst in parity.worst.values())
    assert "2 gloo ranks" in str(parity)


@pytest.mark.usefixtures("warm_ranks")
def test_an_input_that_is_cut_has_its_gradient_joined() -> None:
    text = small.spec().replace("[batch, seq, width]", "[batch, seq, width], Shard(seq) @ tp")
    text = text.replace("output loss", "output y : Shard(seq) @ tp\noutput loss")
    example = small.example(requires_grad=True)
    parity = placement.verify(small.Block(), {"tp": 2}, text, example=example, backend="gloo")
    assert parity.ok, parity
    assert parity.worst["input gradients"].compared == 1


def test_a_model_that_does_not_pickle_is_refused() -> None:
    class Local(small.Block):
        pass

    with pytest.raises(placement.PlacementError, match=r"(?s)cannot be sent to processes: .*Local"):
        verify(Local())


@pytest.mark.usefixtures("warm_ranks")
def test_a_rank_that_raises_is_named_with_its_traceback(tmp_path) -> None:
    with pytest.raises(ProcessFailure, match=r"(?s)rank [01] of 2 failed while starting:.*RuntimeError: planted"):
        verify(small.Faulty("raise", tmp_path))


@pytest.mark.usefixtures("warm_ranks")
def test_a_rank_that_is_killed_ends_the_run(tmp_path) -> None:
    started = time.monotonic()
    with pytest.raises(ProcessFailure, match=r"rank [01] of 2 was ended by SIGKILL while starting"):
        verify(small.Faulty("die", tmp_path))
    assert time.monotonic() - started < 120  # not the 600 s that ranks may take


@pytest.mark.usefixtures("warm_ranks")
def test_a_rank_that_hangs_is_shown_where_it_is(tmp_path) -> None:
    with pytest.raises(ProcessFailure, match="no progress for 6 s") as caught:
        verify(small.Faulty("hang", tmp_path), timeout=6)
    assert "in __setstate__" in str(caught.value), str(caught.value)


def test_nccl_without_gpus_is_refused() -> None:
    if torch.cuda.device_count() >= 2:
        pytest.skip("there are GPUs")
    with pytest.raises(ValueError, match="a GPU for each of the 2 ranks"):
        placement.verify(small.Block(), {"tp": 2}, small.spec(), example=small.example(), backend="nccl")
