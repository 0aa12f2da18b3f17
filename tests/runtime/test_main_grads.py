"""Gradients added up in buffers of their own: they equal one device's, in their own dtype, and .grad stays None."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import placement
from placement import runtime as rt
from tests.cases import toys
from tests.runtime.programs import Net, assert_same, batch
from tests.runtime.test_reductions import IN_ORDER, backward
from tests.runtime.worlds import Pool, in_worlds, pair, run

module = sys.modules[rt.main_grads.__module__]  # its function has its name


def ranks_of(program: Any) -> list[Any]:
    return program.programs if isinstance(program, rt.Simulated) else [program]


def buffers(program: Any) -> list[Any]:
    return [parameter.main_grad for parameter in program.parameters() if parameter.requires_grad]


def assert_none_in_grad(program: Any) -> None:
    assert all(parameter.grad is None for parameter in program.parameters())


def assert_equal(program: Any, model: nn.Module) -> None:
    """All gradients, a parameter that none has reached having zeros."""
    want = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters(remove_duplicate=False)
        if p.requires_grad
    }
    got = program.full_gradients()
    assert got.pop("frozen") is None
    assert_same(got, want)
    assert_none_in_grad(program)


def accumulated(mesh: Any, n: int) -> None:
    for names in (Net.hooks["tp"], IN_ORDER):
        with mock.patch.object(Net, "hooks", {"tp": names}):
            model, program = pair(mesh, n)
        backward(model, **batch(9))
        backward(program, **batch(9))
        rt.main_grads(program, torch.float64)  # what .grad holds is moved
        assert_equal(program, model)
        held = buffers(program)
        for deferred in (False, True):
            for seed in range(3):
                backward(model, **batch(seed))
                if deferred and seed < 2:
                    with program.no_sync():
                        backward(program, **batch(seed))
                    assert program.waiting()
                    assert_none_in_grad(program)
                else:
                    backward(program, **batch(seed))
            assert_equal(program, model)
            want = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            torch.testing.assert_close(rt.clip_grad_norm_(program, 0.1), want)
            assert_equal(program, model)
            model.zero_grad(set_to_none=False)
            with program.no_sync():
                backward(program, **batch(7))
            program.zero_grad()  # also what waits
            assert program.waiting() == []
            assert_equal(program, model)
        assert all(a is b for a, b in zip(held, buffers(program), strict=True))
        rt.main_grads(program, torch.float64)  # anew
        backward(model, **batch(4))
        backward(program, **batch(4))
        assert_equal(program, model)


@in_worlds
def test_micro_batches_add_up_to_one_batch(world: str, n: int, gloo: Pool) -> None:
    run(accumulated, world, n, gloo)


def usual(mesh: Any, n: int) -> None:
    """What is not for leaves, what somebody watches, and what is left out, as without buffers."""
    model, program = pair(mesh, n)
    rt.main_grads(program, torch.float64)
    ranks = ranks_of(program)
    leaves = [p for rank in ranks for p in (rank.mlp.bias, rank.mlp.down)]
    found = torch.autograd.grad(program(**batch()).loss, leaves)
    want = torch.autograd.grad(model(**batch())["loss"], [model.mlp.bias])
    assert_same({"bias": found[0]}, {"bias": want[0]})
    assert not any(main.any() for main in buffers(program))
    seen: list[Tensor] = []
    for name in ("bias", "down"):
        ranks[0].mlp.get_parameter(name).register_hook(seen.append)
    program(**batch()).loss.backward(inputs=leaves)
    model(**batch())["loss"].backward(inputs=[model.mlp.bias, model.mlp.down])
    assert_equal(program, model)
    bias, down = sorted(seen, key=lambda grad: grad.ndim)
    assert_same({"bias": bias}, {"bias": model.mlp.bias.grad})
    assert down.any()
    model.zero_grad()
    program.zero_grad()
    for m in (model, program):
        m(**batch())["loss"].backward(create_graph=True)
    assert_equal(program, model)
    assert not any(main.requires_grad for main in buffers(program))


@pytest.mark.filterwarnings("ignore:Using backward")
@in_worlds
def test_other_backwards_go_the_usual_way(world: str, n: int, gloo: Pool) -> None:
    run(usual, world, n, gloo)


LINEARS = {
    f"{part}.weight" for part in ("attention.q", "attention.k", "attention.v", "attention.o", "mlp.up", "mlp.down")
}


def straight(mesh: Any, n: int, spec: str) -> None:
    """Weights of linear layers are added to by the products themselves; of the rest torch makes tensors."""
    model, program = toys.pair(mesh, spec)
    moved: list[Tensor] = []
    move = module._moved

    def hook(parameter: Tensor) -> None:  # torch calls it also when nothing has arrived
        if parameter.grad is not None:
            moved.append(parameter)
        move(parameter)

    with mock.patch.object(module, "_moved", hook):
        rt.main_grads(program, torch.float64)
    for seed in range(2):
        toys.step(model, **toys.batch(seed))
        toys.step(program, **toys.batch(seed))
    toys.close(program.full_gradients(), toys.gradients(model))
    assert_none_in_grad(program)
    names = {id(p): name for rank in toys.ranks(program) for name, p in rank.named_parameters()}
    by_hook = {names[id(parameter)].removeprefix("blocks.0.") for parameter in moved}
    assert "embed.weight" in by_hook
    assert not by_hook & LINEARS
    program.zero_grad()
    rt.main_grads(program)  # of another dtype: a product, and one sum
    model.zero_grad()
    toys.step(model, **toys.batch(5))
    toys.step(program, **toys.batch(5))
    toys.close(program.full_gradients(), toys.gradients(model), 1e-5)
    assert {main.dtype for main in buffers(program)} == {torch.float32}


IN_PIECES = [toys.SP + "lower ** : overlap = ring\n", toys.TP + "lower ** : overlap = chunks(2)\n"]


@in_worlds
@pytest.mark.parametrize("spec", [toys.SP, toys.TP, *IN_PIECES], ids=["sharded norms", "replicated", "ring", "chunks"])
def test_products_are_added_without_a_second_tensor(world: str, n: int, spec: str, gloo: Pool) -> None:
    run(straight, world, n, gloo, spec)


class Scale(nn.Module):
    """A parameter whose gradient has a term per token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, bias=False)
        self.norm.forward = lambda x: x * self.norm.weight
        with torch.no_grad():
            self.norm.weight.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).sum()


SPEC = """
mesh tp
input x : [batch, seq, hidden]
value norm : Shard(seq)
"""


@pytest.mark.parametrize("deferred", [False, True])
def test_a_sum_is_added_in_the_dtype_of_the_sum(deferred: bool) -> None:
    """C22: 1 and 2^-10 of two ranks are 1.0009765625 in float32; bfloat16 has no such number."""
    x = torch.tensor([1.0, 2.0**-10])[None, :, None].expand(1, 2, 4).bfloat16()
    program = placement.compile(
        Scale().bfloat16(), rt.simulate(tp=2), SPEC, example={"x": x}, reduce_dtype=torch.float32
    )
    placement.main_grads(program)
    if deferred:  # one rank has 1 and then 2^-10, the other nothing and then 1
        with program.no_sync():
            program(x=x * torch.tensor([1, 0])[:, None]).backward()
        x = x.flip(1)
    program(x=x).backward()
    total = 2.0009765625 if deferred else 1.0009765625
    assert program.full_gradients()["norm.weight"].unique().tolist() == [total]
    assert placement.clip_grad_norm_(program, 1e9) == 2 * total
    assert_none_in_grad(program)


def test_what_cannot_be_added_up_is_refused() -> None:
    _, program = pair(rt.simulate(tp=2), 2)
    with pytest.raises(ValueError, match=r"unused, torch.float64, cannot be added up in torch.int32"):
        rt.main_grads(program, torch.int32)
    with program.no_sync():
        backward(program, **batch())
    with pytest.raises(rt.StateError, match=r"lacks what waits under no_sync"):
        rt.main_grads(program)
    assert not any(hasattr(parameter, "main_grad") for parameter in program.parameters())
