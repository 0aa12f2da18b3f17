"""Declaring, binding and calling programs: shapes, ties, guards, outputs."""

# ruff: noqa: RUF012 - class attributes as emitted code has them

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from placement import runtime as rt
from tests.runtime.programs import BATCH, HIDDEN, SEQ, VOCAB, WIDTH, Weight, assert_same, batch, build
from tests.runtime.worlds import Pool, in_worlds, pair, run


def test_members_become_what_they_are() -> None:
    m = rt.Module(
        layers=[Weight(weight=rt.param(2)), Weight(weight=rt.param(3, trainable=False))],
        heads={"a": Weight(weight=rt.param(4, dtype=torch.bfloat16))},
        table=rt.buffer(5, dtype=torch.int64),
        scratch=rt.buffer(6, persistent=False),
        eps=1e-6,
        bias=None,
        **{"0": Weight()},
    )
    assert isinstance(m.layers, nn.ModuleList)
    assert isinstance(m.heads, nn.ModuleDict)
    assert (m.eps, m.bias) == (1e-6, None)
    shapes = {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in m.named_parameters()}
    assert shapes == {
        "layers.0.weight": ((2,), torch.float32, True),
        "layers.1.weight": ((3,), torch.float32, False),
        "heads.a.weight": ((4,), torch.bfloat16, True),
    }
    assert {name for name, _ in m.named_buffers()} == {"table", "scratch"}
    assert "scratch" not in m.state_dict()
    assert all(t.is_meta for t in (*m.parameters(), *m.buffers()))


class Pair(rt.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_a_member_that_is_replaced_is_found() -> None:
    weight = Weight(weight=rt.param(2))
    one, other = (Pair(first=Weight(weight=rt.param(2)), second=nn.Identity(), table=rt.buffer(1)) for _ in range(2))
    assert one.first is one._modules["first"] is not other.first
    one._modules["first"] = weight  # as wrappers do
    assert one.first is weight
    one.first = nn.Identity()
    assert one.first is one._modules["first"] is not weight
    del one.first
    assert not hasattr(one, "first")
    with pytest.raises(AttributeError, match="'Pair' object has no attribute 'first'"):
        _ = one.first
    one.register_buffer("first", torch.ones(1))
    assert torch.equal(one.first, torch.ones(1))
    del weight._parameters["weight"]
    weight.weight = made = torch.ones(2)  # no parameter: an attribute of the instance, as weight norms have it
    assert weight.weight is made
    assert other.table is other._buffers["table"]
    assert copy.deepcopy(other).first is not other.first


def test_a_module_is_called_with_its_hooks() -> None:
    pair, seen = Pair(first=nn.Identity(), second=nn.Identity()), []
    for register in (pair.register_forward_hook, pair.register_forward_pre_hook, pair.register_full_backward_hook):
        handle = register(lambda *_: seen.append(1))
        pair(torch.ones(1, requires_grad=True)).sum().backward()
        handle.remove()
    assert seen == [1] * 3
    with nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module)):
        pair(torch.ones(1))
    assert seen[3:] == [pair.first, pair.second, pair]
    pair(torch.ones(1))
    assert len(seen) == 6


def test_a_member_cannot_hide_a_method() -> None:
    with pytest.raises(ValueError, match="Module cannot have a member 'forward'"):
        rt.Module(forward=Weight())


def test_local_shapes_ties_and_axes() -> None:
    program = build(4).on(rt.simulate(tp=4))
    for index, rank in enumerate(program.programs):
        assert rank.mlp.gate_up.shape == (2 * WIDTH // 4, HIDDEN)
        assert rank.mlp.down.shape == (HIDDEN, WIDTH // 4)
        assert rank.lm_head.weight is rank.embed.weight
        assert rank.mlp.tp is rank.tp
        assert (rank.tp.rank, rank.tp.size, rank.tp.name) == (index, 4, "tp")
    names = dict(program.named_parameters())
    assert "rank3.mlp.down" in names
    assert "rank0.lm_head.weight" not in names  # tied: one parameter
    assert len(names) == 4 * 8


def test_a_parameter_that_the_axis_does_not_divide() -> None:
    class Odd(rt.Program):
        axes = {"tp": 4}

    with pytest.raises(rt.SizeError, match=r"w\.weight on axis 'tp': dim 0 of .* has size 6, .* 4 equal blocks"):
        Odd(w=Weight(weight=rt.param(6, 2, cut=rt.Cut(0)))).on(rt.simulate(tp=4))
    # C17: 2F divides, F does not; each half is cut.
    with pytest.raises(rt.SizeError, match="does not make 2 equal blocks in each of 2 parts"):
        type("Fused", (Odd,), {"axes": {"tp": 2}})(w=rt.param(6, 2, cut=rt.Cut(0, 2))).on(rt.simulate(tp=2))


def test_meshes_that_do_not_fit() -> None:
    with pytest.raises(rt.MeshError, match="axis 'tp' has size 2; the program was emitted for 4"):
        build(4).on(rt.simulate(tp=2))
    with pytest.raises(rt.MeshError, match="needs an axis 'tp'; the mesh has dp"):
        build(4).on(rt.simulate(dp=4))
    with pytest.raises(rt.MeshError, match="is on no mesh"):
        build(2)(**batch())

    class Clash(rt.Program):
        axes = {"tp": 2}

    with pytest.raises(rt.MeshError, match="axis 'tp' cannot have the name of a member of the root"):
        Clash(tp=Weight()).on(rt.simulate(tp=2))
    with pytest.raises(rt.StateError, match="tied to b, which owns no data"):
        Clash(a=rt.tied("b"), b=rt.tied("a")).on(rt.simulate(tp=2))


def guards(mesh: Any, n: int) -> None:
    _, program = pair(mesh, n)
    b = batch()
    with pytest.raises(rt.SizeError, match=rf"dim 1 of input 'input_ids' \(seq\) has size 5, not a multiple of {n}"):
        program(**batch(seq=5))
    with pytest.raises(rt.SizeError, match=r"dim 1 of input 'labels' \(seq\) has size 4, but dim 1 of"):
        program(b["input_ids"], b["labels"][:, :4])
    with pytest.raises(rt.SizeError, match=rf"dim 2 of input 'extra' has size 3; the program was made for {HIDDEN}"):
        program(**b, extra=torch.ones(BATCH, SEQ, 3))
    with pytest.raises(rt.SizeError, match=r"'labels' has shape .*; the program was made for dims \[batch, seq\]"):
        program(b["input_ids"], b["labels"][0])
    with pytest.raises(TypeError, match=r"input 'input_ids' is torch.float32; the program was made for int"):
        program(b["input_ids"].float(), b["labels"])
    with pytest.raises(TypeError, match="labels"):
        program(b["input_ids"])
    program(**batch(batch=5, seq=4 * n))  # other sizes that fit


@in_worlds
def test_each_call_is_checked(world: str, n: int, gloo: Pool) -> None:
    """C18: exact or refused, with the sizes, at each call."""
    run(guards, world, n, gloo)


class Given(rt.Program):
    """Takes a number for each of n, of which it gives no gradient."""

    axes = {"tp": 2}
    inputs = {"x": (("n", 2), None, "float", False), "rest.y": (("n",), None, "int")}

    def forward(self, x: Tensor, rest: dict[str, Tensor]) -> Tensor:
        return x.sum(1) + rest["y"]


def test_what_was_accepted_does_not_let_other_calls_through() -> None:
    program = Given().on(rt.simulate(tp=2))
    x, y = torch.ones(3, 2), torch.ones(3, dtype=torch.int64)
    for _ in range(2):
        assert torch.equal(program(x=x, rest={"y": y}), torch.full((3,), 3.0))
        with torch.no_grad():
            program(x=x.clone().requires_grad_(), rest={"y": y})  # nobody asks for the gradient
        with pytest.raises(TypeError, match="'x' requires a gradient"):
            program(x=x.clone().requires_grad_(), rest={"y": y})
        with pytest.raises(TypeError, match=r"input 'rest.y' is torch.float32"):
            program(x=x, rest={"y": y.float()})
        with pytest.raises(rt.SizeError, match=r"dim 0 of input 'rest.y' \(n\) has size 2"):
            program(x=x, rest={"y": y[:2]})
        with pytest.raises(TypeError, match="missing a required argument: 'rest'"):
            program(x=x)


def without_data(mesh: Any, n: int) -> None:
    program = build(n).on(mesh)
    assert len(program.meta_tensors()) == 11
    with pytest.raises(
        rt.StateError, match=r"no data in unused, frozen, embed.weight and 8 more: load_full_state_dict"
    ):
        program(**batch())
    with pytest.raises(rt.StateError, match="no data"):
        program.full_state_dict()


@in_worlds
def test_parameters_without_data(world: str, n: int, gloo: Pool) -> None:
    run(without_data, world, n, gloo)


# -- inputs and outputs --------------------------------------------------------------------------


class Layouts(rt.Program):
    """Sharded, partial and replicated inputs and outputs, nested."""

    axes = {"tp": 2}
    inputs = {"x": (("n", 4), rt.Cut(0), "float"), "rest.y": (("n",), None)}
    outputs = {"0": rt.Cut(0), "1.part": "P", "1.all": None, "2": rt.Cut(1, 2)}

    def forward(self, x: Tensor, rest: dict[str, Any]) -> Any:
        total = rt.all_reduce(x.sum(), self.tp)
        y = rest["y"] * rt.summed(self, "w", self.tp)
        own = rt.split(rt.replicated(rest["y"], self.tp), self.tp, 0, of="R")
        return (
            2 * x,
            {"part": (own * x.sum(1)).sum(), "all": total, "note": rest["note"]},
            rt.split(x.new_ones(1, 8), self.tp, 1, 2),
            y,
        )


def test_inputs_are_cut_and_outputs_joined() -> None:
    program = Layouts(w=rt.param()).on(rt.simulate(tp=2))
    program.load_full_state_dict({"w": torch.tensor(2.0)})
    x = torch.arange(16.0).reshape(4, 4).requires_grad_()
    y = torch.arange(4.0).requires_grad_()
    doubled, named, ones, w = program(x, rest={"y": y, "note": "kept"})
    assert torch.equal(doubled, 2 * x)
    assert named["note"] == "kept"
    assert named["all"] == x.sum()
    assert named["part"] == (y * x.sum(1)).sum()
    assert torch.equal(ones, torch.ones(1, 8))
    assert torch.equal(w, 2 * y)
    (named["part"] + named["all"] + doubled.sum()).backward()
    assert torch.equal(x.grad, y.detach()[:, None].expand(4, 4) + 3)
    assert torch.equal(y.grad, x.detach().sum(1))


def test_a_hook_restores_the_callers_type() -> None:
    program = build(2)
    program.restore = lambda out: ("restored", out.loss)
    program = program.on(rt.simulate(tp=2))
    program.load_full_state_dict({n: torch.zeros(s) for n, s in _shapes().items()}, strict=False)
    assert program(**batch())[0] == "restored"


def _shapes() -> dict[str, tuple[int, ...]]:
    return {
        "embed.weight": (VOCAB, HIDDEN),
        "norm.weight": (HIDDEN,),
        "mlp.gate_up": (2 * WIDTH, HIDDEN),
        "mlp.scale": (WIDTH // 4,),
        "mlp.down": (HIDDEN, WIDTH),
        "mlp.bias": (HIDDEN,),
        "unused": (5,),
        "frozen": (HIDDEN,),
        "shift": (HIDDEN,),
        "hidden_shift": (HIDDEN,),
    }


def test_output() -> None:
    out = rt.Output(loss=torch.ones(()), logits=None, extra=3)
    assert out.loss is out["loss"] is out[0]
    assert out.logits is None
    assert out[1] == 3
    assert out.to_tuple() == (out.loss, 3)
    with pytest.raises(AttributeError, match="no output 'other': there are loss, logits, extra"):
        _ = out.other


def test_a_module_like_any_other() -> None:
    program = build(2).on(rt.simulate(tp=2))
    program.load_full_state_dict({n: torch.ones(s) for n, s in _shapes().items()})
    program.eval()
    assert not any(m.training for m in program.modules())
    program.train().float()
    assert {p.dtype for p in program.parameters()} == {torch.float32}
    twin = copy.deepcopy(program)
    with torch.no_grad():
        twin.rank0.norm.weight.fill_(3.0)
    assert program.rank0.norm.weight[0] == 1.0
    assert twin(**batch()).loss.isfinite()


class Both(rt.Program):
    """Two axes: the batch on one, features on the other."""

    axes = {"dp": 2, "tp": 2}
    inputs = {"x": (("batch", 4), {"dp": rt.Cut(0)})}
    outputs = {"output": {"dp": rt.Cut(0), "tp": rt.Cut(1)}}

    def forward(self, x: Tensor) -> Tensor:
        # w is used I -> R on dp; the two reductions of a joint axis are for a later stage.
        return rt.replicated(x, self.tp) @ rt.replicated(self.w, self.dp)


def test_two_axes() -> None:
    program = Both(w=rt.param(4, 6, dtype=torch.float64, cut={"tp": rt.Cut(1)})).on(rt.simulate(dp=2, tp=2))
    w = torch.randn(4, 6, dtype=torch.float64)
    program.load_full_state_dict({"w": w})
    x = torch.randn(8, 4, dtype=torch.float64)
    one, many, w1 = x.clone().requires_grad_(), x.clone().requires_grad_(), w.clone().requires_grad_()
    (one @ w1).square().sum().backward()
    out = program(many)
    out.square().sum().backward()
    assert_same(
        {"y": out, "x": many.grad, **program.full_gradients()}, {"y": x @ w, "x": one.grad, "w": w1.grad}, 1e-12
    )


def distributed() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    axis = rt.MeshAxis(mesh, "tp")
    x, y = torch.arange(16.0).reshape(4, 4), torch.arange(4.0)
    with pytest.raises(rt.SizeError, match=r"output '2' on axis 'tp': no DTensor has the layout Cut\(dim=1, outer=2\)"):
        Layouts(w=rt.param()).on(mesh)
    with pytest.raises(rt.SizeError, match=r"no DTensor has the layout Cut\(dim=0, outer=1, segments=\(2, 1\)\)"):
        type("Fused", (Layouts,), {"outputs": {"0": rt.Cut(0, segments=(2, 1))}})(w=rt.param()).on(mesh)
    program = type("Whole", (Layouts,), {"outputs": {"0": rt.Cut(0), "1.part": "P"}})(w=rt.param()).on(mesh)
    program.load_full_state_dict({"w": torch.tensor(2.0)})
    own = x.chunk(2)[axis.rank].clone().requires_grad_()
    doubled, named, _, _ = program(own, rest={"y": y, "note": 1})
    assert isinstance(doubled, DTensor)
    assert torch.equal(doubled.full_tensor(), 2 * x)
    assert named["part"].full_tensor() == (y * x.sum(1)).sum()
    assert type(named["all"]) is Tensor
    # C07: a loss left partial gives the gradients of the sum.
    named["part"].backward()
    assert torch.equal(own.grad, y.chunk(2)[axis.rank][:, None].expand(2, 4))
    # Blocks of different sizes are refused on every rank, not waited for.
    with pytest.raises(rt.SizeError, match=r"blocks of 'x' differ on axis 'tp': rank 0: \[1, 4\]; rank 1: \[2, 4\]"):
        program(x[: 1 + axis.rank], rest={"y": y, "note": 1})
    with pytest.raises(rt.SizeError, match=r"'rest.y' \(n\) has size 3, but dim 0 of input 'x' \(n\) has 4"):
        program(x.chunk(2)[axis.rank], rest={"y": y[:3], "note": 1})
    assert copy.deepcopy(program).tp is program.tp
    with pytest.raises(rt.MeshError, match="axis 'tp' has size 2; the program was emitted for 4"):
        build(4).on(mesh)


@pytest.mark.gloo
def test_inputs_and_outputs_on_a_mesh(gloo: Pool) -> None:
    gloo(2).run(distributed)


def two_axes_distributed() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    program = Both(w=rt.param(4, 6, cut={"tp": rt.Cut(1)})).on(mesh)
    w, x = torch.arange(24.0).reshape(4, 6), torch.arange(32.0).reshape(8, 4)
    program.load_full_state_dict({"w": w})
    out = program(x.chunk(2)[mesh.get_local_rank("dp")])
    assert torch.equal(out.full_tensor(), x @ w)
    out.to_local().sum().backward()
    torch.testing.assert_close(program.full_gradients()["w"], x.sum(0)[:, None].expand(4, 6))


@pytest.mark.gloo
def test_two_axes_on_a_mesh(gloo: Pool) -> None:
    gloo(4).run(two_axes_distributed)
