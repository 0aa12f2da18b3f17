"""Gradients of replicated parameters: right, final, summed once, whatever the user does (C01-C03, C26, C29)."""

# ruff: noqa: RUF012 - class attributes as emitted code has them

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from placement import runtime as rt
from tests.gloo import GlooPool
from tests.runtime.programs import BATCH, HIDDEN, SEQ, Net, assert_same, batch, gradients
from tests.runtime.worlds import Pool, assert_replicas_equal, in_worlds, pair, run, whole


def backward(model: Any, **inputs: Any) -> Any:
    out = model(**inputs)
    out["loss"].backward()
    return out


def parity(mesh: Any, n: int) -> None:
    model, program = pair(mesh, n)
    extra = torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64)
    one, many = extra.clone().requires_grad_(), extra.clone().requires_grad_()
    want = backward(model, **batch(), extra=one)
    with rt.record() as log:
        got = backward(program, **batch(), extra=many)
    assert_same(whole(got), want)
    assert_same({"extra": many.grad}, {"extra": one.grad})
    assert_same(program.full_gradients(), gradients(model))
    # One flat reduction: norm.weight 8, mlp.scale 6, mlp.bias 8. The loss does not reach `unused`.
    assert [e.bytes for e in log if e.kind == "all_reduce"] == [8 * (8 + 6 + 8)]


@in_worlds
def test_one_backward_equals_one_device(world: str, n: int, gloo: Pool) -> None:
    """C01: every gradient is right after ``backward()`` alone, on every rank."""
    run(parity, world, n, gloo)


def casts(mesh: Any, n: int) -> None:
    for cast in (
        lambda m: m.to(torch.float32),
        lambda m: m.half().double(),
        lambda m: m.to("cpu").eval().train(),
        lambda m: (torch.optim.AdamW(m.parameters()), m)[1],
        lambda m: m.requires_grad_(requires_grad=True),
    ):
        model, program = pair(mesh, n)
        model, program = cast(model), cast(program)
        backward(model, **batch())
        with rt.record() as log:
            backward(program, **batch())
        tolerance = 1e-5 if next(model.parameters()).dtype == torch.float32 else 1e-11
        assert_same(program.full_gradients(), gradients(model), tolerance)
        assert len([e for e in log if e.kind == "all_reduce"]) == 1


@in_worlds
def test_casts_and_optimizers_keep_the_reduction(world: str, n: int, gloo: Pool) -> None:
    """C02."""
    run(casts, world, n, gloo)


# What each bucket's sum comes before in the backward, in which the loss reaches the last first.
IN_ORDER = (("mlp.bias",), ("mlp.scale",), ("norm.weight", "unused"))
TOO_LATE = (("norm.weight", "unused"), ("mlp.bias", "mlp.scale"))
EARLY = ["all_reduce 64", "all_gather", "all_reduce 48", "reduce_scatter", "all_reduce 64", "all_gather"]
HELD_BACK = ["all_gather", "reduce_scatter", "all_reduce 64", "all_reduce 112", "all_gather"]


@contextmanager
def in_buckets(names: tuple[tuple[str, ...], ...]) -> Iterator[list[tuple[str, Any]]]:
    """Programs made in here have these buckets; what is started for later and what is waited for is listed."""
    seen: list[tuple[str, Any]] = []
    start, finish = rt.Axis.start, rt.Axis.finish

    def started(axis: rt.Axis, step: rt.Step, xs: Any, *, own: bool = False, later: bool = True) -> Any:
        pending = start(axis, step, xs, own=own, later=later)
        if later and step == rt.ALL_REDUCE:
            seen.append(("start", pending))
        return pending

    def finished(axis: rt.Axis, pending: Any) -> Any:
        seen.append(("wait", pending))
        return finish(axis, pending)

    with (
        mock.patch.object(Net, "hooks", {"tp": names}),
        mock.patch.object(rt.Axis, "start", started),
        mock.patch.object(rt.Axis, "finish", finished),
    ):
        yield seen


def bucketed(mesh: Any, n: int, names: tuple[tuple[str, ...], ...], order: list[str]) -> None:
    with in_buckets(names) as seen:
        model, program = pair(mesh, n)
        want = backward(model, **batch())
        out = program(**batch())
        seen.clear()
        with rt.record() as log:
            out.loss.backward()
        assert_same({"loss": whole(out)["loss"]}, {"loss": want["loss"]})
        assert_same(program.full_gradients(), gradients(model))
        shown = [f"{e.kind} {e.bytes}" if e.kind == "all_reduce" else e.kind for e in log]
        if isinstance(program, rt.Simulated):  # ranks' threads have backwards of one graph, in no order of their own
            shown, order = ([one for one in of if "all_reduce" in one] for of in (shown, order))
        assert shown == order
        sums = [id(sum_) for what, sum_ in seen if what == "start"]
        assert len(sums) == len(names)
        assert [id(one) for what, one in seen if what == "wait" and id(one) in sums] == sums  # once each, in order
        # Whatever the user does, as with one bucket.
        for body in (kept, unfinished, zeroed, functional, waits_for_grad, graphs):
            body(mesh, n)


@in_worlds
@pytest.mark.parametrize(("names", "order"), [(IN_ORDER, EARLY), (TOO_LATE, HELD_BACK)], ids=["early", "held back"])
def test_buckets_leave_when_they_are_complete(world: str, n: int, gloo: Pool, names: Any, order: Any) -> None:
    """A sum starts behind the rest of the backward, in the order of the list, and is waited for once."""
    run(bucketed, world, n, gloo, names, order)


def test_what_waits_joins_a_backward_that_reaches_no_part_of_its_bucket() -> None:
    with in_buckets(IN_ORDER):
        model, program = pair(rt.simulate(tp=2), 2)
        with program.no_sync():
            backward(program, **batch(1))
        program(**batch(2)).act.square().mean().backward()  # not from mlp.bias
        backward(model, **batch(1))
        model(**batch(2))["act"].square().mean().backward()
        assert program.waiting() == []
        assert_same(program.full_gradients(), gradients(model))


def second(mesh: Any, n: int) -> None:
    """Gradients of gradients: autograd follows through the sums."""
    with in_buckets(IN_ORDER):
        model, program = pair(mesh, n)
        names = ("norm.weight", "mlp.bias")
        grads = torch.autograd.grad(
            model(**batch())["loss"], [model.get_parameter(m) for m in names], create_graph=True
        )
        sum(grad.pow(3).sum() for grad in grads).backward()
        ranks = program.programs if isinstance(program, rt.Simulated) else [program]
        leaves = [rank.get_parameter(m) for rank in ranks for m in names]
        grads = torch.autograd.grad(program(**batch()).loss, leaves, create_graph=True)
        sum(grad.pow(3).sum() for grad in grads).backward()
        for name in (*names, "mlp.scale"):
            assert_same({name: ranks[0].get_parameter(name).grad}, {name: model.get_parameter(name).grad})


@pytest.mark.gloo
def test_gradients_of_gradients(gloo: Pool) -> None:
    run(second, "gloo", 2, gloo)


def two_dtypes(mesh: Any, n: int) -> None:
    model, program = pair(mesh, n, torch.float32)
    for m in (model, *(program.programs if isinstance(program, rt.Simulated) else [program])):
        m.mlp.bias.data = m.mlp.bias.data.double()
        m.mlp.register_forward_hook(lambda _m, _a, out: (out[0].float(), out[1]) if isinstance(out, tuple) else out)
    with rt.record() as log:
        backward(program, **batch())
    assert sorted(e.bytes for e in log if e.kind == "all_reduce") == [4 * (8 + 6), 8 * 8]
    assert program.full_gradients()["mlp.bias"].dtype == torch.float64


@in_worlds
def test_one_reduction_per_dtype(world: str, n: int, gloo: Pool) -> None:
    run(two_dtypes, world, n, gloo)


def adam(mesh: Any, n: int) -> None:
    model, program = pair(mesh, n)
    one, many = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, program))
    for step in range(20):
        for m, optimizer in ((model, one), (program, many)):
            optimizer.zero_grad()
            for micro in range(2):
                (m(**batch(2 * step + micro))["loss"] / 2).backward()
            optimizer.step()
    assert_same(program.full_state_dict(), model.state_dict(), 1e-9)
    assert_replicas_equal(program)


@in_worlds
def test_replicas_do_not_drift(world: str, n: int, gloo: Pool) -> None:
    """C03: 20 Adam steps of a plain loop with micro-batches; the loop knows nothing of ranks."""
    run(adam, world, n, gloo)


def accumulation(mesh: Any, n: int, *, deferred: bool, set_to_none: bool) -> None:
    model, program = pair(mesh, n)
    for step in range(3):  # more than one, so that .grad is there when a step begins
        for m in (model, program):
            m.zero_grad(set_to_none=set_to_none)
        big = [torch.cat(x) for x in zip(*(batch(4 * step + i).values() for i in range(4)), strict=True)]
        backward(model, input_ids=big[0], labels=big[1])
        with rt.record() as log:
            for micro in range(4):
                out = program(**batch(4 * step + micro))
                if deferred and micro < 3:
                    with program.no_sync():
                        (out.loss / 4).backward()
                else:
                    (out.loss / 4).backward()
        want = gradients(model)
        if not set_to_none and step:  # zeroed, not None: as torch leaves it
            assert torch.equal(want["norm.weight"], model.norm.weight.grad)
        assert_same(program.full_gradients(), want)
        assert len([e for e in log if e.kind == "all_reduce"]) == (1 if deferred else 4)


@in_worlds
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_micro_batches_equal_one_batch(world: str, n: int, gloo: Pool, deferred: bool, set_to_none: bool) -> None:
    """C26, with .grad already there or not."""
    run(_accumulation, world, n, gloo, deferred, set_to_none)


def _accumulation(mesh: Any, n: int, deferred: bool, set_to_none: bool) -> None:
    accumulation(mesh, n, deferred=deferred, set_to_none=set_to_none)


def kept(mesh: Any, n: int) -> None:
    """Gradients never zeroed: steps add up, and what was reduced is not reduced again."""
    model, program = pair(mesh, n)
    for step in range(3):
        backward(model, **batch(step))
        if step == 1:
            with program.no_sync():
                backward(program, **batch(step))
        else:
            backward(program, **batch(step))
    assert_same(program.full_gradients(), gradients(model))


@in_worlds
def test_gradients_that_are_kept(world: str, n: int, gloo: Pool) -> None:
    run(kept, world, n, gloo)


def zeroed(mesh: Any, n: int) -> None:
    for set_to_none in (True, False):
        for before in (False, True):
            model, program = pair(mesh, n)
            if before:  # a gradient that is not zero when the abandoned accumulation begins
                backward(program, **batch(9))
            with program.no_sync():
                backward(program, **batch(1))
                backward(program, **batch(2))
            program.zero_grad(set_to_none=set_to_none)
            assert program.waiting() == []
            with program.no_sync():
                backward(program, **batch(3))
            backward(program, **batch(4))
            for seed in (3, 4):
                backward(model, **batch(seed))
            assert_same(program.full_gradients(), gradients(model))


@in_worlds
def test_zero_grad_drops_what_waits(world: str, n: int, gloo: Pool) -> None:
    run(zeroed, world, n, gloo)


def unfinished(mesh: Any, n: int) -> None:
    _, program = pair(mesh, n)
    with program.no_sync():
        backward(program, **batch())
    for rank in program.programs if isinstance(program, rt.Simulated) else [program]:
        assert not rank.norm.weight.grad.any()  # never numbers that are not summed
        assert rank.mlp.down.grad.any()  # a shard's gradient needs no sum
    for use in (program.full_gradients, lambda: rt.clip_grad_norm_(program, 1.0)):
        with pytest.raises(rt.StateError, match=r"3 parameters \(.* first\) lack what backwards under no_sync"):
            use()


def scaled(mesh: Any, n: int) -> None:
    """Writing .grad in place is no zeroing: what waits stays."""
    model, program = pair(mesh, n)
    for m in (model, program):
        backward(m, **batch(1))
    with program.no_sync():
        backward(program, **batch(2))
    for parameter in program.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    backward(program, **batch(3))
    ranks = program.programs if isinstance(program, rt.Simulated) else [program]
    first = {name: g.clone() for name, g in gradients(model).items() if g is not None}
    for seed in (2, 3):
        backward(model, **batch(seed))
    for name in ("norm.weight", "mlp.scale", "mlp.bias"):
        want = gradients(model)[name] - 0.5 * first[name]
        for rank in ranks:
            assert_same({name: rank.get_parameter(name).grad}, {name: want})


@in_worlds
def test_gradients_scaled_while_others_wait(world: str, n: int, gloo: Pool) -> None:
    run(scaled, world, n, gloo)


@in_worlds
def test_no_sync_without_a_backward_outside(world: str, n: int, gloo: Pool) -> None:
    run(unfinished, world, n, gloo)


def functional(mesh: Any, n: int) -> None:
    model, program = pair(mesh, n)
    names = [name for name, p in model.named_parameters() if p.requires_grad and name != "unused"]
    want = torch.autograd.grad(model(**batch())["loss"], [model.get_parameter(name) for name in names])
    ranks = program.programs if isinstance(program, rt.Simulated) else [program]
    flat = torch.autograd.grad(program(**batch()).loss, [rank.get_parameter(name) for rank in ranks for name in names])
    for rank in range(len(ranks)):
        for index, name in enumerate(names):
            if not ranks[0].layout_of(name):
                assert_same({name: flat[rank * len(names) + index]}, {name: want[index]})
    assert all(p.grad is None for p in program.parameters())


@in_worlds
def test_autograd_grad(world: str, n: int, gloo: Pool) -> None:
    """Gradients come summed from ``torch.autograd.grad`` as well, and .grad stays as it was."""
    run(functional, world, n, gloo)


def waits_for_grad(mesh: Any, n: int) -> None:
    """What waits belongs to .grad: ``torch.autograd.grad`` neither adds to it nor takes of it."""
    model, program = pair(mesh, n)
    ranks = program.programs if isinstance(program, rt.Simulated) else [program]
    with program.no_sync():
        backward(program, **batch(1))
        inside = torch.autograd.grad(program(**batch(5)).loss, [rank.mlp.bias for rank in ranks])
    outside = torch.autograd.grad(program(**batch(5)).loss, [rank.mlp.bias for rank in ranks])
    want = torch.autograd.grad(model(**batch(5))["loss"], [model.mlp.bias])
    for grad in (*inside, *outside):
        assert_same({"mlp.bias": grad}, {"mlp.bias": want[0]})
    # Nor does a backward that leaves a parameter out take what waits for it.
    program(**batch(2)).loss.backward(inputs=[rank.norm.weight for rank in ranks])
    model(**batch(2))["loss"].backward(inputs=[model.norm.weight])
    backward(program, **batch(3))
    for seed in (1, 3):
        backward(model, **batch(seed))
    assert_same(program.full_gradients(), gradients(model))


@in_worlds
def test_what_waits_belongs_to_grad(world: str, n: int, gloo: Pool) -> None:
    run(waits_for_grad, world, n, gloo)


def graphs(mesh: Any, n: int) -> None:
    model, program = pair(mesh, n)
    for m in (model, program):
        out = m(**batch(1))
        out["loss"].backward(retain_graph=True)
        out["loss"].backward()  # the same graph again
        (m(**batch(2))["loss"] + m(**batch(3))["loss"]).backward()  # two calls in one backward
        m(**batch(4))["logits"].square().mean().backward()  # another output
    assert_same(program.full_gradients(), gradients(model))


@in_worlds
def test_graphs_of_several_calls(world: str, n: int, gloo: Pool) -> None:
    run(graphs, world, n, gloo)


def frozen(mesh: Any, n: int) -> None:
    model, program = pair(mesh, n)
    ranks = program.programs if isinstance(program, rt.Simulated) else [program]
    for m in (model, *ranks):
        m.norm.weight.requires_grad_(requires_grad=False)
    backward(model, **batch())
    with rt.record() as log:
        backward(program, **batch())
    assert_same(program.full_gradients(), gradients(model))
    assert [e.bytes for e in log if e.kind == "all_reduce"] == [8 * (6 + 8)]
    with torch.no_grad(), rt.record() as log:
        assert_same(whole(program(**batch())), model(**batch()))
    assert "all_reduce" not in {e.kind for e in log}


@in_worlds
def test_frozen_later_and_no_grad(world: str, n: int, gloo: Pool) -> None:
    run(frozen, world, n, gloo)


# -- only between processes ----------------------------------------------------------------------


def outside(mesh: Any, n: int) -> None:
    """A submodule called by itself reduces its own parameters."""
    model, program = pair(mesh, n)
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64)
    program.norm(x.chunk(n, 1)[mesh.get_local_rank()]).square().sum().backward()
    want = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * model.norm.weight
    want.square().sum().backward()
    assert_same({"w": program.norm.weight.grad}, {"w": model.norm.weight.grad})


@pytest.mark.gloo
def test_a_submodule_alone(gloo: Pool) -> None:
    run(outside, "gloo", 2, gloo)


def checkpointed(mesh: Any, n: int) -> None:
    for reentrant in (False, True):
        model, program = pair(mesh, n)
        plain = program.mlp.forward
        program.mlp.forward = lambda x, plain=plain, r=reentrant: checkpoint(plain, x, use_reentrant=r)
        backward(model, **batch())
        with rt.record() as log:
            backward(program, **batch())
        assert_same(program.full_gradients(), gradients(model))
        again = [e for e in log if e.phase == "backward" and e.kind == "all_gather"]
        assert len(again) == 2 + 1  # the duals of a reduce-scatter and of a split, and the gather recomputed


@pytest.mark.gloo
def test_checkpointing(gloo: Pool) -> None:
    """Recomputation in backward reduces each parameter once, both ways of torch's checkpoint."""
    run(checkpointed, "gloo", 2, gloo)


def compiled(mesh: Any, n: int) -> None:
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(len(graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for how in (lambda m: torch.compile(m, backend=backend), lambda m: m.compile(backend=backend) or m):
        graphs.clear()
        model, program = pair(mesh, n)
        fast = how(program)
        for seed in range(2):
            want = backward(model, **batch(seed))
            with rt.record() as log:
                out = fast(**batch(seed))
                assert type(out.logits) is torch.Tensor  # plain, though the loss does not use it
                out.loss.backward()
            assert_same(whole(out), want)
            assert len([e for e in log if e.kind == "all_reduce"]) == 1
        assert_same(program.full_gradients(), gradients(model))
        assert sum(graphs) > 30  # the model's ops were compiled, not skipped
        torch.compiler.reset()


@pytest.mark.gloo
def test_compiled_equals_eager(gloo: Pool) -> None:
    """C29: same outputs and gradients under torch.compile, one of the outputs unused by the loss."""
    run(compiled, "gloo", 2, gloo)


def wrapped(mesh: Any, n: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, program = pair(mesh, n)
    both = init_device_mesh("cpu", (1, n), mesh_dim_names=("dp", "tp"))
    for module in (program.norm, program.mlp):
        fully_shard(module, mesh=both["dp"])
    backward(model, **batch())
    backward(program, **batch())
    for name in ("norm.weight", "mlp.scale", "mlp.bias"):
        got = program.get_parameter(name).grad.full_tensor()
        assert_same({name: got}, {name: model.get_parameter(name).grad})


@pytest.mark.gloo
def test_fully_shard_keeps_the_reduction(gloo: Pool) -> None:
    """C02: a wrapper that swaps Parameter objects for its own; sums still happen, once."""
    run(wrapped, "gloo", 2, gloo)


class Around(nn.Module):
    """A wrapper that knows the members of what it wraps, as wrappers do, but does not have them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


@pytest.mark.parametrize("how", ["copied", "wrapped", "bound", "registered", "parametrized"])
def test_modules_and_parameters_replaced_between_calls(how: str) -> None:
    """What a name stands for is found at each call; what is used is summed, and once."""
    model, program = pair(rt.simulate(tp=2), 2)
    backward(program, **batch(1))
    program.zero_grad()
    for rank in program.programs:
        if how == "copied":
            rank.mlp = copy.deepcopy(rank.mlp)
        elif how == "wrapped":
            rank.mlp = Around(rank.mlp)
        elif how == "bound":  # another module of the program
            own = rank.mlp.named_parameters()
            rank.mlp = copy.copy(rank.mlp)
            rank.mlp.__dict__["_parameters"] = {name: nn.Parameter(p.detach().clone()) for name, p in own}
        elif how == "registered":
            rank.mlp.register_parameter("scale", nn.Parameter(rank.mlp.scale.detach().clone()))
        else:
            parametrize.register_parametrization(rank.mlp, "scale", nn.Identity())
    backward(model, **batch(2))
    with rt.record() as log:
        backward(program, **batch(2))
    for rank in program.programs:
        inner = rank.mlp.inner if how == "wrapped" else rank.mlp
        scale = inner.parametrizations.scale.original if how == "parametrized" else inner.scale
        assert_same(
            {"scale": scale.grad, "bias": inner.bias.grad}, {"scale": model.mlp.scale.grad, "bias": model.mlp.bias.grad}
        )
    sent = [e.bytes for e in log if e.kind == "all_reduce"]
    assert sum(sent) == 8 * (8 + 6 + 8)
    assert len(sent) == (3 if how == "copied" else 1)  # a copy is in no program: its parameters have sums of their own


def test_a_copy_after_a_call() -> None:
    """What was found in a call is not what a copy's names stand for."""
    model, program = pair(rt.simulate(tp=2), 2)
    backward(program, **batch(1))
    other = copy.deepcopy(program)
    other.zero_grad()
    backward(model, **batch(2))
    with rt.record() as log:
        backward(other, **batch(2))
    assert_same(other.full_gradients(), gradients(model))
    assert [e.bytes for e in log if e.kind == "all_reduce"] == [8 * (8 + 6 + 8)]


def swapped(mesh: Any, n: int) -> None:
    model, program = pair(mesh, n)
    other = {name: (2 * p.detach()).requires_grad_() for name, p in program.named_parameters()}
    torch.func.functional_call(program, other, kwargs=batch()).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    backward(model, **batch())
    assert_same({"w": other["norm.weight"].grad}, {"w": model.norm.weight.grad})
    assert program.norm.weight.grad is None


@pytest.mark.gloo
def test_functional_call(gloo: Pool) -> None:
    run(swapped, "gloo", 2, gloo)


def test_the_pool_reports_a_failed_body(gloo: Pool) -> None:
    """These tests assert inside of ranks: an assertion that fails there fails here."""
    assert isinstance(gloo(2), GlooPool)
    with pytest.raises(AssertionError, match="rank says no"):
        gloo(2).run(_refuse)


def _refuse() -> None:
    raise AssertionError("rank says no")


def test_hooks_must_name_parameters() -> None:
    class Wrong(rt.Program):
        axes = {"tp": 2}
        hooks = {"tp": (("weight.nothing",),)}

    with pytest.raises(AttributeError):
        Wrong(weight=rt.param(4)).on(rt.simulate(tp=2))
    assert issubclass(Wrong, nn.Module)


class TiedScales(rt.Program):
    """One parameter under two names, both used I -> R."""

    axes = {"tp": 2}
    inputs = {"x": (("n",), rt.Cut(0))}
    outputs = {"output": "P"}
    hooks = {"tp": (("a", "b"),)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * rt.summed(self, "a", self.tp) + rt.summed(self, "b", self.tp)).sum()


def test_tied_parameters_are_summed_once() -> None:
    program = TiedScales(a=rt.param(), b=rt.tied("a")).on(rt.simulate(tp=2))
    program.load_full_state_dict({"b": torch.tensor(2.0)})
    with program.no_sync():
        program(torch.arange(4.0)).backward()
    program(torch.arange(4.0)).backward()
    assert program.full_gradients() == {"a": torch.tensor(20.0), "b": torch.tensor(20.0)}
