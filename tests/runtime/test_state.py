"""Full state dicts and gradients: names, original order, errors that list everything, nothing half-loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from placement import runtime as rt
from tests.runtime.programs import WIDTH, assert_same, batch, build, full_state, one_device
from tests.runtime.worlds import Pool, in_worlds, pair, run


def round_trip(mesh: Any, n: int) -> None:
    model, program = pair(mesh, n)
    state = program.full_state_dict()
    assert list(state) != []
    assert_same(state, model.state_dict(), 0)
    assert state["lm_head.weight"] is state["embed.weight"]
    # Copies: training the program leaves them alone, and the other way round.
    for tensor in state.values():
        tensor.zero_()
    assert_same(program.full_state_dict(), model.state_dict(), 0)


@in_worlds
def test_round_trip(world: str, n: int, gloo: Pool) -> None:
    """C17: a fused weight cut inside each part comes back in the original order."""
    run(round_trip, world, n, gloo)


def ranks_of(program: Any) -> list[Any]:
    return program.programs if isinstance(program, rt.Simulated) else [program]


def in_place(mesh: Any, n: int) -> None:
    """Loading again keeps Parameter objects, so an optimizer made before still steps them."""
    model, program = pair(mesh, n)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    before = [id(p) for p in program.parameters()]
    state = {name: torch.full_like(x, 0.25) for name, x in full_state(model).items()}
    program.load_full_state_dict(state)
    assert [id(p) for p in program.parameters()] == before
    program(**batch()).loss.backward()
    optimizer.step()
    model.load_state_dict(state, strict=False)
    model.hidden_shift.fill_(0.25)
    model(**batch())["loss"].backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_same(program.full_state_dict(), model.state_dict())
    for rank in ranks_of(program):
        assert not rank.frozen.requires_grad
        assert rank.norm.weight.requires_grad


@in_worlds
def test_loading_again(world: str, n: int, gloo: Pool) -> None:
    run(in_place, world, n, gloo)


def aliases(mesh: Any, n: int) -> None:
    state = full_state(one_device())
    for name in ("embed.weight", "lm_head.weight"):
        program = build(n).on(mesh)
        program.load_full_state_dict({k: v for k, v in state.items() if k != name})
        assert program.meta_tensors() == []
        for rank in ranks_of(program):
            assert rank.lm_head.weight is rank.embed.weight
    program = build(n).on(mesh)
    with pytest.raises(rt.StateError, match=r"tied: embed.weight and lm_head.weight are one parameter, but differ"):
        program.load_full_state_dict({**state, "lm_head.weight": torch.zeros_like(state["lm_head.weight"])})


@in_worlds
def test_one_name_of_a_tied_group_is_enough(world: str, n: int, gloo: Pool) -> None:
    run(aliases, world, n, gloo)


def faults(mesh: Any, n: int) -> None:
    model, program = pair(mesh, n)
    state = {name: torch.zeros_like(x) for name, x in full_state(model).items()}
    state["norm.weigth"] = state.pop("norm.weight")
    state["mlp.down"] = torch.zeros(WIDTH, 3)
    state["nothing.like.it"] = torch.zeros(1)
    with pytest.raises(rt.StateError) as caught:
        program.load_full_state_dict(state)
    assert str(caught.value).splitlines()[1:] == [
        "  unknown: norm.weigth (near: norm.weight)",
        "  unknown: nothing.like.it",
        "  missing: norm.weight (near: norm.weigth)",
        f"  shape: mlp.down is [{WIDTH}, 3], the program has [8, {WIDTH}]",
    ]
    assert_same(program.full_state_dict(), model.state_dict(), 0)  # nothing was loaded
    with pytest.raises(rt.StateError, match=r"shape: mlp.down"):  # a wrong shape is never passed over
        program.load_full_state_dict(state, strict=False)
    assert_same(program.full_state_dict(), model.state_dict(), 0)
    program.load_full_state_dict({"mlp.bias": torch.ones(8), "other": torch.ones(2)}, strict=False)
    assert torch.equal(program.full_state_dict()["mlp.bias"], torch.ones(8, dtype=torch.float64))


@in_worlds
def test_faults_are_listed_and_nothing_is_loaded(world: str, n: int, gloo: Pool) -> None:
    run(faults, world, n, gloo)


def buffers(mesh: Any, n: int) -> None:
    """A buffer outside the state dict is loaded if named, and may be missing; without data it is reported."""
    state = one_device().state_dict()
    program = build(n).on(mesh)
    program.load_full_state_dict(state)
    assert program.meta_tensors() == ["hidden_shift"]
    with pytest.raises(rt.StateError, match="no data in hidden_shift"):
        program(**batch())
    program.load_full_state_dict({"hidden_shift": torch.ones(8)}, strict=False)
    program(**batch())
    assert "hidden_shift" not in program.full_state_dict()


@in_worlds
def test_buffers(world: str, n: int, gloo: Pool) -> None:
    run(buffers, world, n, gloo)


def gradient_names(mesh: Any, n: int) -> None:
    model, program = pair(mesh, n)
    assert set(program.full_gradients().values()) == {None}
    program(**batch()).loss.backward()
    grads = program.full_gradients()
    assert set(grads) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert {name for name, grad in grads.items() if grad is None} == {"unused", "frozen"}
    assert grads["lm_head.weight"] is grads["embed.weight"]
    kept = grads["norm.weight"].clone()
    grads["norm.weight"].zero_()
    assert torch.equal(program.full_gradients()["norm.weight"], kept)


@in_worlds
def test_gradients_by_name(world: str, n: int, gloo: Pool) -> None:
    run(gradient_names, world, n, gloo)


def dtypes(mesh: Any, n: int) -> None:
    """Tensors are cast to what the program has now."""
    program = build(n).on(mesh).to(torch.bfloat16)
    program.load_full_state_dict(full_state(one_device(torch.float32)))
    assert {x.dtype for x in program.full_state_dict().values()} == {torch.bfloat16}


@in_worlds
def test_dtypes(world: str, n: int, gloo: Pool) -> None:
    run(dtypes, world, n, gloo)


def compiled_part(mesh: Any, n: int) -> None:
    """What torch.compile puts around a module of the program is in no name."""
    model, program = pair(mesh, n)
    program(**batch()).loss.backward()
    want = program.full_gradients()
    for one in ranks_of(program):
        one.mlp = torch.compile(one.mlp, backend="eager")
    state = model.state_dict()
    assert_same(program.full_state_dict(), state, 0)
    found = program.full_gradients()
    assert list(found) == list(want)
    assert all(grad is None or torch.equal(found[name], grad) for name, grad in want.items())
    program.load_full_state_dict({name: tensor + 1 for name, tensor in state.items()})
    assert_same(program.full_state_dict(), {name: tensor + 1 for name, tensor in state.items()}, 0)


@in_worlds
def test_a_compiled_part(world: str, n: int, gloo: Pool) -> None:
    run(compiled_part, world, n, gloo)
