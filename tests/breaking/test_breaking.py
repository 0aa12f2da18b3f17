"""What a sceptical user would try: each is exact against one device, or refused with a diagnostic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import placement

SPEC = """mesh tp
input x : [batch, seq, width]
param a.{weight,bias} : Shard(out)
param b.weight : Shard(in)
"""
MESH = placement.simulate(tp=2)
Body = Callable[..., Any]


class Toy(nn.Module):
    """A column and a row layer around a body that the test gives."""

    def __init__(self, body: Body | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 8)
        self.body = body
        self.double()

    def mlp(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x) if self.body else self.mlp(x)


def given(batch: int = 2, seq: int = 4) -> Tensor:
    return torch.randn(batch, seq, 8, dtype=torch.float64, requires_grad=True)


def compiled(model: nn.Module, spec: str = SPEC, **example: Any) -> Any:
    return placement.compile(model, MESH, spec, example=example or {"x": given()})


def refused(model: nn.Module, code: str, text: str, spec: str = SPEC, **example: Any) -> None:
    with pytest.raises(placement.PlacementError) as caught:
        compiled(model, spec, **example)
    assert [d.code for d in caught.value.diagnostics][:1] == [code]
    assert text in caught.value.diagnostics[0].message


def parity(model: nn.Module, program: Any, *xs: Tensor) -> None:
    """Outputs, input gradients and parameter gradients of both, for each input."""
    for x in xs:
        mine, theirs = (x.detach().clone().requires_grad_() for _ in range(2))
        model.zero_grad()
        program.zero_grad()
        outs = [pytree.tree_leaves(m(x=v)) for m, v in ((model, mine), (program, theirs))]
        for want, got in zip(*outs, strict=True):
            torch.testing.assert_close(got, want)
            assert got.requires_grad == want.requires_grad
        if not outs[0][0].requires_grad:
            continue
        for leaves in outs:
            sum((leaf * leaf).sum() for leaf in leaves).backward()
        torch.testing.assert_close(theirs.grad, mine.grad)
        gradients = program.full_gradients()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


# -- backwards that a capture cannot see -----------------------------------------------------------


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def test_custom_backward_is_refused_and_torch_is_left_as_it_was() -> None:
    before = vars(torch.autograd.Function)["apply"], torch.Tensor.register_hook
    refused(Toy(lambda m, x: m.b(Tripled.apply(m.a(x)))), "PLC407", "Tripled")
    assert (vars(torch.autograd.Function)["apply"], torch.Tensor.register_hook) == before


def hooked(m: Toy, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda grad: grad * 2)
    return m.b(h)


def test_hooks_on_gradients_are_refused() -> None:
    refused(Toy(hooked), "PLC407", "hook")
    model = Toy()
    model.a.register_full_backward_hook(lambda *_: None)
    refused(model, "PLC407", "module 'a'")
    model = Toy()
    model.a.weight.register_hook(lambda grad: grad * 3)
    refused(model, "PLC407", "parameter 'a.weight'")


def frozen_part(m: Toy, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = m.b(m.a(x).sigmoid()).tanh()
    return m.mlp(x) * gate


@pytest.mark.parametrize("body", [frozen_part, lambda m, x: (m.mlp(x), torch.no_grad()(m.mlp)(x))])
def test_no_grad_regions_keep_no_gradient(body: Body) -> None:
    model = Toy(body)
    parity(model, compiled(model), given(), given(1, 6))


def test_second_derivatives() -> None:
    model = Toy(lambda m, x: m.b(m.a(x).tanh()))
    program = compiled(model)
    found = []
    data = given().detach()
    for m in (model, program):
        x = data.clone().requires_grad_()
        (grad,) = torch.autograd.grad(m(x=x).pow(2).sum(), x, create_graph=True)
        grad.pow(2).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])
    gradients = program.full_gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


# -- what a call may not change ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "ok", "bad"),
    [
        (lambda m, x: m.mlp(x) * (2 if x.shape[1] > 3 else 3), (1, 9), (2, 2)),
        (lambda m, x: m.mlp(x) * (2 if x.shape[1] % 2 == 0 else 3), (1, 2), (2, 5)),
        (lambda m, x: m.mlp(x) * (2 if x.shape[1] == 5 else 3), (1, 9), (2, 5)),
        (lambda m, x: m.mlp(x) * (2 if max(x.shape[1], 6) == 6 else 3), (1, 5), (2, 8)),
        (lambda m, x: m.mlp(x) * (2 if abs(x.shape[0] - x.shape[1]) < 4 else 3), (1, 2), (2, 9)),
        (lambda m, x: m.mlp(x) * (2 if x.shape[1] & (x.shape[1] - 1) == 0 else 3), (1, 8), (2, 7)),
        (lambda m, x: m.mlp(x) * (2 if x.shape[0] < x.shape[1] else 3), (1, 2), (5, 2)),
        (lambda m, x: m.mlp(x) * (2 if x.shape[1] * 0.5 > 2.5 else 3), (1, 4), (2, 7)),
    ],
)
def test_branches_on_sizes_are_held(body: Body, ok: tuple[int, int], bad: tuple[int, int]) -> None:
    model = Toy(body)
    program = compiled(model)
    parity(model, program, given(*ok))
    with pytest.raises(ValueError, match="branches on sizes"):
        program(x=given(*bad))


def test_a_branch_on_sizes_that_no_call_can_check_is_refused() -> None:
    refused(Toy(lambda m, x: m.mlp(x) * (2 if torch.sym_sqrt(x.shape[1]) > 2.2 else 3)), "PLC407", "no call can check")


def test_sizes_in_arithmetic() -> None:
    model = Toy(lambda m, x: m.mlp(x) * (1.0 / x.shape[1] ** 0.5) / x.shape[0] + x.shape[1] // 2 + x.shape[1] % 3)
    parity(model, compiled(model), given(), given(3, 7))


class Optional(Toy):
    def forward(self, x: Tensor, mask: Any = None, opts: Any = (1, 2)) -> Any:
        y = self.mlp(x) * opts[0]
        return y if mask is None else y * mask


@pytest.mark.parametrize("changed", [{"mask": torch.zeros(8)}, {"opts": (2, 2)}, {"opts": (1, 2, 3)}])
def test_arguments_that_are_no_tensors_are_held(changed: dict[str, Any]) -> None:
    program = compiled(Optional(), x=given(), mask=None, opts=(1, 2))
    program(x=given())
    with pytest.raises(ValueError, match="when the model was captured"):
        program(x=given(), **changed)


class Batched(Toy):
    def forward(self, *, b: dict[str, Any]) -> Any:
        y = self.mlp(b["x"]) * b["k"]
        return y * b["m"] if "m" in b else y


@pytest.mark.parametrize("changed", [{"k": 3.0}, {"m": 2.0}])
def test_containers_are_held(changed: dict[str, Any]) -> None:
    program = compiled(Batched(), SPEC.replace("input x", "input b.x"), b={"x": given(), "k": 2.0})
    with pytest.raises(ValueError, match="when the model was captured"):
        program(b={"x": given(), "k": 2.0, **changed})


# -- ops that would be wrong ---------------------------------------------------------------------------


def test_draws_of_its_own_and_statistics_are_refused() -> None:
    refused(Toy(lambda m, x: m.mlp(x + torch.randn_like(x))), "PLC407", "draws random numbers")
    refused(Toy(lambda m, x: F.dropout1d(m.mlp(x), 0.5)), "PLC407", "draws random numbers")
    model = Toy()
    model.norm = nn.BatchNorm1d(8).double()
    model.body = lambda m, x: m.mlp(m.norm(x[:, 0]))
    refused(model, "PLC407", "running statistics")


@pytest.mark.parametrize(
    "write",
    [
        lambda total, y: total.mul_(0.9).add_(y),
        lambda total, y: total.view(2, 4).add_(y.view(2, 4)),
        lambda total, y: total[:4].add_(y[:4]),
        lambda total, y: total.copy_(y),
    ],
    ids=["itself", "a view", "a part", "a copy"],
)
@pytest.mark.parametrize("read", [True, False])
def test_writes_to_buffers_are_refused(write: Callable[[Tensor, Tensor], Tensor], read: bool) -> None:
    """They would have to outlive the call."""
    model = Toy()
    model.register_buffer("total", torch.zeros(8, dtype=torch.float64))

    def body(m: Any, x: Tensor) -> Tensor:
        y = m.mlp(x)
        write(m.total, y.detach().mean((0, 1)))
        return y + m.total if read else y

    model.body = body
    refused(model, "PLC407", "")


def test_numbers_out_of_tensors_are_refused() -> None:
    refused(Toy(lambda m, x: m.mlp(x) * x.sum().item()), "PLC407", "out of a tensor")
    refused(Toy(lambda m, x: (m.mlp(x), x.shape[0])), "PLC407", "is a size")


def test_tensors_made_of_numbers_have_their_data() -> None:
    model = Toy(lambda m, x: (m.mlp(x) * torch.tensor([1.0, 2.0]).double().sum(), x * torch.tensor(3)))
    parity(model, compiled(model), given())


# -- names and places ------------------------------------------------------------------------------------


def test_names_that_clash() -> None:
    model = Toy(lambda m, x: m.mlp(x) + m.x)
    model.x = nn.Parameter(torch.randn(8, dtype=torch.float64))  # called like the input
    parity(model, compiled(model), given())
    for name in ("inputs", "restore", "device"):
        model = Toy()
        model.add_module(name, nn.Linear(2, 2))
        refused(model, "PLC407", f"member '{name}'")
    for axis in ("a", "weight", "train"):
        with pytest.raises(placement.PlacementError, match=f"axis '{axis}' has the name"):
            placement.plan(Toy(), {axis: 2}, SPEC.replace("mesh tp", f"mesh {axis}"), example={"x": given()})


@pytest.mark.parametrize("placed", ["Replicate", "Shard(batch)", "Partial"])
def test_a_value_between_two_layers_may_lie_anyhow(placed: str) -> None:
    model = Toy()
    parity(model, compiled(model, f"{SPEC}value a : {placed}\n"), given())


def test_arguments_without_names_are_refused() -> None:
    class Starred(Toy):
        def forward(self, *xs: Tensor) -> Any:
            return self.mlp(xs[0])

    with pytest.raises(placement.PlacementError, match="no names"):
        placement.compile(Starred(), MESH, "mesh tp\n", example=[given()])


class Copies(nn.Module):
    """Writes a result into a buffer of its own making, once of another dtype and shape."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x):
        h = self.up(x)
        wide = torch.zeros(3, *h.shape).copy_(h)
        return torch.zeros_like(h).copy_(h) + wide.sum(0)


def test_what_is_copied_into_a_fresh_tensor_keeps_its_gradient():
    model, x = Copies(), torch.randn(3, 4)
    spec = "mesh tp\ninput x : [batch, width]\nparam up.{weight,bias} : Shard(out)\n"
    program = placement.compile(model, placement.simulate(tp=2), spec, example={"x": x})
    torch.testing.assert_close(program(x=x), model(x))
    program(x=x).square().sum().backward()
    model(x).square().sum().backward()
    torch.testing.assert_close(program.full_gradients()["up.weight"], model.up.weight.grad)
    assert not any("copy" in str(node.op) for node in program.plan.graph.nodes)


def test_a_program_made_in_inference_mode_trains():
    x = torch.randn(3, 4)
    with torch.inference_mode():
        spec = "mesh tp\ninput x : [batch, width]\nparam up.{weight,bias} : Shard(out)\n"
        program = placement.compile(Copies(), placement.simulate(tp=2), spec, example={"x": x.clone()})
    program(x=x).sum().backward()
    assert set(program.full_gradients()) == {"up.weight", "up.bias"}


# -- writes through views ----------------------------------------------------------------------------


def shifted(m: Toy, x: Tensor) -> Tensor:
    h = m.a(x)
    out = torch.zeros_like(h)
    out[:, 1:] = h[:, :-1]
    out[:, 0] = 2.0
    out[..., 0].mul_(3.0)
    return m.b(out.masked_fill_(out < 0, 0.5))


def written_twice(m: Toy, x: Tensor) -> Tensor:
    h = m.mlp(x).clone()
    h[:, 0:2][:, 1] *= 2
    h[:, 1] += h[:, 0]
    return h


def at_indices(m: Toy, x: Tensor) -> Tensor:
    h = m.mlp(x).clone()
    h[:, [0, 1]] = 2.0 * h[:, [1, 0]]
    return h


@pytest.mark.parametrize("body", [shifted, written_twice, at_indices])
def test_writes_to_slices(body: Body) -> None:
    model = Toy(body)
    parity(model, compiled(model), given(), given(1, 6))


def read_later(m: Toy, x: Tensor) -> Tensor:
    h = m.mlp(x).clone()
    first = h[:, 0]
    h.mul_(2)
    return h + first.unsqueeze(1)


def returned_later(m: Toy, x: Tensor) -> Any:
    h = m.mlp(x).clone()
    first = h[:, 0]
    h.mul_(2)
    return h, first


def through_a_transpose(m: Toy, x: Tensor) -> Tensor:
    h = m.mlp(x).clone()
    h.transpose(0, 1)[0] = 1.0
    return h


@pytest.mark.parametrize(
    ("body", "text"),
    [(read_later, "is read later"), (returned_later, "is read later"), (through_a_transpose, "read later")],
)
def test_writes_that_views_would_show_are_refused(body: Body, text: str) -> None:
    refused(Toy(body), "PLC407", text)


def double(view: Callable[[Tensor], Tensor]) -> Body:
    def body(m: Toy, x: Tensor) -> Tensor:
        h = m.mlp(x).clone()
        view(h).mul_(2)
        return h

    return body


@pytest.mark.parametrize(
    "view",
    [
        lambda h: h.movedim(0, 1)[0],
        lambda h: h.mT[:, 0],
        lambda h: h.view_as(h),
        lambda h: h.tensor_split(2, -1)[0],
        lambda h: h.unsafe_chunk(2, -1)[0],
        lambda h: h.diagonal(dim1=0, dim2=2),
        lambda h: torch.view_as_complex(h.unflatten(-1, (4, 2))),
    ],
)
def test_a_write_through_any_other_view_is_refused(view: Callable[[Tensor], Tensor]) -> None:
    refused(Toy(double(view)), "PLC407", "through a view")


@pytest.mark.parametrize("view", [lambda h: F.dropout(h, 0.0), lambda h: F.dropout(h, 0.5, training=False)])
def test_a_dropout_that_drops_nothing_returns_what_it_was_given(view: Callable[[Tensor], Tensor]) -> None:
    model = Toy(double(view))
    parity(model, compiled(model), given(), given(1, 6))


def test_a_dropout_switched_off_by_the_model_drops_nothing() -> None:
    model = Toy(lambda m, x: m.b(F.dropout(m.a(x), 0.5, training=False)))
    parity(model, compiled(model), given())


@torch.library.custom_op("breaking::accumulate", mutates_args={"x"})
def accumulate(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def accumulated(m: Toy, x: Tensor) -> Tensor:
    total = torch.zeros_like(x.detach())
    accumulate(total, x.detach())
    return m.mlp(x) + total


def at_once(m: Toy, x: Tensor) -> Tensor:
    h, g = m.mlp(x).clone(), x.clone()
    torch._foreach_mul_([h, g], 2.0)
    return h + g


@pytest.mark.parametrize("body", [accumulated, at_once])
def test_ops_that_only_write_are_refused(body: Body) -> None:
    refused(Toy(body), "PLC407", "returns nothing")


def read_without_a_gradient(m: Toy, x: Tensor) -> Tensor:
    h = m.mlp(x)
    out = torch.zeros_like(h.detach())
    out[:, 0] = h[:, 0]
    with torch.no_grad():
        gate = out * 2
    return out * gate


def test_what_was_written_is_cut_off_under_no_grad() -> None:
    model = Toy(read_without_a_gradient)
    parity(model, compiled(model), given(), given(1, 6))


def test_a_class_whose_name_is_no_identifier() -> None:
    model = type('Toy-"""2', (Toy,), {})(lambda m, x: m.mlp(x))
    program = compiled(model)
    parity(model, program, given())
    assert "class Toy____2(" in program.source
