"""The record of collectives: kind, axis, bytes of the full value, pass; once per joint execution."""

from __future__ import annotations

import torch

from placement import runtime as rt


def body(axes: dict[str, rt.Axis]) -> torch.Tensor:
    tp = axes["tp"]
    x = torch.ones(2, 4, dtype=torch.float32, requires_grad=True)
    y = rt.all_gather(x, tp, 1)  # full: 2 x 8 x 4 bytes
    z = rt.reduce_scatter(y, tp, 0)  # full: the same
    z = rt.all_to_all(z, tp, 0, 1)  # local 1 x 8, full 2 x 8
    z = rt.split(rt.pad(z, tp, 1), tp, 1, of="R")  # local both ways
    return rt.all_reduce(z, tp)


def test_forward_and_backward() -> None:
    mesh = rt.simulate(tp=2)
    with rt.record() as log:
        out = mesh.run(body)
        torch.stack(out).sum().backward()
    assert [(e.kind, e.bytes, e.phase) for e in log] == [
        ("all_gather", 64, "forward"),
        ("reduce_scatter", 64, "forward"),
        ("all_to_all", 64, "forward"),
        ("all_reduce", 32, "forward"),
        ("all_to_all", 64, "backward"),
        ("all_gather", 64, "backward"),
        ("reduce_scatter", 64, "backward"),
    ]
    assert {e.axis for e in log} == {"tp"}


def test_records_nest_and_end() -> None:
    mesh = rt.simulate(tp=2)
    with rt.record() as outer:
        with rt.record() as inner:
            pass
        mesh.run(lambda axes: axes["tp"].run(rt.ALL_REDUCE, torch.ones(3)))
    mesh.run(lambda axes: axes["tp"].run(rt.ALL_REDUCE, torch.ones(3)))
    assert inner == []
    assert outer == [rt.Event("all_reduce", "tp", 12, "forward")]


def test_one_rank_communicates_nothing() -> None:
    with rt.record() as log:
        rt.simulate(tp=1).run(lambda axes: rt.all_reduce(torch.ones(3), axes["tp"]))
    assert log == []


def test_one_entry_for_all_groups() -> None:
    """As the record of any one process would be: ``tp`` has a group for each rank of ``dp``."""
    with rt.record() as log:
        rt.simulate(dp=2, tp=2).run(lambda axes: rt.all_reduce(torch.ones(1), axes["tp"]))
    assert log == [rt.Event("all_reduce", "tp", 4, "forward")]


def test_the_dtype_that_is_sent_counts() -> None:
    mesh = rt.simulate(tp=2)
    axes = [mesh.axes(rank, torch.float32)["tp"] for rank in range(2)]
    with rt.record() as log:
        mesh.run(lambda own: rt.all_reduce(torch.ones(3, dtype=torch.bfloat16), axes[own["tp"].rank]))
    assert [e.bytes for e in log] == [12]
