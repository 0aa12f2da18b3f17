"""Conversions in a ring or in chunks beside linear layers, against those in one piece."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from placement import runtime as rt
from placement.runtime.overlap import arriving
from tests.gloo import GlooPool
from tests.runtime import test_linears as linears
from tests.runtime import test_summed_linears as sums
from tests.runtime.test_linears import same

Pool = Callable[[int], GlooPool]

OVERLAPS = ["none", "ring", 2, 3, 5, 64]  # of blocks of 4 rows: chunks of unequal size, and more than there are rows
GATHERED = [
    linears.Case(),
    linears.Case(bias=True, frozen=(1,), cut=rt.Cut(0)),
    linears.Case(frozen=(0, 1, 2)),
    linears.Case(gradient=False, used=2),
    linears.Case(gathered=False, bias=True, used=2),
    linears.Case(gathered=False, frozen=(0, 1, 2)),
]
SUMMED = [
    sums.Case(outermost=True, turned=True),
    sums.Case(cut=rt.Cut(0), frozen=True),
    sums.Case(gradient=False),
    sums.Case(alone=True),
    sums.Case(cut=None),
]


def cut(case: Any, overlap: Any) -> Any:
    summed = not case.gathered if isinstance(case, linears.Case) else case.cut is None
    return None if overlap == "ring" and summed else dataclasses.replace(case, overlap=overlap)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_results_and_gradients_in_pieces(n: int, overlap: Any) -> None:
    for module, cases, how in ((linears, GATHERED, "layers"), (sums, SUMMED, "joined")):
        for case in filter(None, (cut(case, overlap) for case in cases)):
            same(module.simulated(n, case, how), module.simulated(n, case, "plain"))


@pytest.mark.gloo
@pytest.mark.parametrize("n", [2, 3])
def test_pieces_in_processes(n: int, gloo: Pool) -> None:
    for module, given, how in ((linears, GATHERED, "layers"), (sums, SUMMED[:3], "joined")):
        cases = [one for overlap in ("ring", 3) for case in given if (one := cut(case, overlap)) is not None]
        found = (gloo(n).run(module.on_gloo, cases, form) for form in (how, "plain"))
        for ours, plain in zip(*found, strict=True):
            same(ours, plain)


@pytest.mark.parametrize(
    ("overlap", "gathered", "scattered", "reduced"),
    [
        ("ring", ["send_recv"] * 9, ["send_recv"] * 6, None),
        (2, ["all_gather"] * 2 + ["reduce_scatter"] * 2 + ["all_gather"] * 2, None, ["all_reduce"] * 2),
    ],
)
def test_what_pieces_send(overlap: Any, gathered: list[str], scattered: Any, reduced: Any) -> None:
    for module, how, case, kinds in (
        (linears, "layers", linears.Case(overlap=overlap), gathered),
        (sums, "joined", sums.Case(overlap=overlap), scattered),
        (sums, "joined", sums.Case(cut=None, overlap=overlap), reduced),
    ):
        if kinds is not None:
            with rt.record() as log:
                module.simulated(4, case, how)
            assert [event.kind for event in log] == kinds


def test_second_derivatives_of_pieces() -> None:
    for overlap in ("ring", 2):
        for case in (linears.Case(bias=True), linears.Case(gathered=False)):
            found: list[Any] = []
            for one in (cut(case, overlap), case):
                if one is None:
                    continue
                how = "plain" if one is case else "layers"
                ranks = rt.simulate(tp=2).run(lambda axes, one=one, how=how: linears.step(axes["tp"], one, how))
                outs = [y for r in ranks for k, y in r.items() if k.startswith("result")]
                grads = torch.autograd.grad(
                    sum(y.pow(3).sum() for y in outs), [r["x"] for r in ranks], create_graph=True
                )
                sum(g.pow(2).sum() for g in grads).backward()
                found.append([{k: t.grad for k, t in r.items() if not k.startswith("result")} for r in ranks])
            if len(found) == 2:
                same(*found)
        for case in (sums.Case(), sums.Case(cut=None)):
            if (one := cut(case, overlap)) is None:
                continue
            found = []
            for given, how in ((one, "joined"), (case, "plain")):
                ranks = rt.simulate(tp=2).run(lambda axes, given=given, how=how: sums.step(axes["tp"], given, how))
                xs = [r["x"] for r in ranks]
                grads = torch.autograd.grad(sum(r["result"].pow(3).sum() for r in ranks), xs, create_graph=True)
                sum(g.pow(2).sum() for g in grads).backward()
                found.append([{key: r[key].grad for key in ("x", "weight")} for r in ranks])
            same(*found)


@pytest.mark.parametrize("overlap", ["ring", 3])
def test_the_next_block_is_on_its_way_while_one_is_used(overlap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that is started is finished once, after what came before it has been used."""
    seen: list[str] = []
    start, finish = rt.Axis.start, rt.Axis.finish
    monkeypatch.setattr(rt.Axis, "start", lambda self, *a, **k: seen.append("start") or start(self, *a, **k))
    monkeypatch.setattr(rt.Axis, "finish", lambda self, *a: seen.append("finish") or finish(self, *a))

    def body(axes: dict[str, rt.Axis]) -> None:
        def joint(blocks: list[torch.Tensor]) -> list[None]:
            seen.extend("use" for _ in arriving(axes["tp"], overlap, blocks))
            return [None] * len(blocks)

        axes["tp"].together("blocks", torch.ones(6, 2), joint)

    rt.simulate(tp=3).run(body)
    first = [] if overlap == "ring" else ["start", "finish"]
    assert seen == [*first, "start", "use", "finish", "start", "use", "finish", "use"]


def test_weights_gradients_are_made_while_the_inputs_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is left to do is done before a sum in chunks is waited for."""
    seen: list[str] = []
    start, finish, mm = rt.Axis.start, rt.Axis.finish, torch.Tensor.mm
    monkeypatch.setattr(rt.Axis, "start", lambda self, *a, **k: seen.append("start") or start(self, *a, **k))
    monkeypatch.setattr(rt.Axis, "finish", lambda self, *a: seen.append("finish") or finish(self, *a))
    monkeypatch.setattr(torch.Tensor, "mm", lambda self, *a: seen.append("mm") or mm(self, *a))
    linears.simulated(2, linears.Case(gathered=False, used=1, overlap=2), "layers")
    assert seen == [*["mm", "mm", "start"] * 2, "mm", "mm", "finish", "finish"]


def test_pieces_of_a_cut_in_parts_are_refused() -> None:
    def body(axes: dict[str, rt.Axis]) -> None:
        x, weight = torch.ones(2, 4, 6), torch.ones(4, 6)
        with pytest.raises(ValueError, match="in one piece"):
            rt.all_gather_linears([weight], x, axes["tp"], 1, 2, overlap="ring")
        with pytest.raises(ValueError, match="in one piece"):
            rt.reduce_scatter_linear(weight, x, axes["tp"], 1, 2, overlap=4)
        for dim in (2, -1):  # products take whole rows
            with pytest.raises(ValueError, match="in one piece"):
                rt.all_gather_linears([weight], x, axes["tp"], dim, overlap="ring")
            with pytest.raises(ValueError, match="in one piece"):
                rt.reduce_scatter_linear(weight, x, axes["tp"], dim, overlap=4)
        with pytest.raises(rt.SizeError, match="3"):
            rt.reduce_scatter_linear(weight, torch.ones(2, 3, 6), axes["tp"], 1, overlap=4)

    rt.simulate(tp=2).run(body)
