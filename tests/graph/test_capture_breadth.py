"""What models do that capture has to see through: other names of ops, writes into views, sizes given to modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placement
from placement import PlacementError
from placement.graph import capture as captures
from placement.graph.capture import capture
from placement.graph.ir import Graph, op_name
from placement.graph.precision import lifted


class Calls(nn.Module):
    """A function of one tensor as a model."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def captured(model: nn.Module | Callable[[Tensor], Any], x: Tensor, *dims: str) -> Graph:
    model = model if isinstance(model, nn.Module) else Calls(model)
    return capture(model, {"x": x}, {"x": dims} if dims else {})


def ops(graph: Graph) -> list[str]:
    return [op_name(node.op).removeprefix("aten.") for node in graph.nodes]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: torch.multiply(x, x), ["mul.Tensor"]),
        (lambda x: torch.subtract(x, x[:1]), ["slice.Tensor", "sub.Tensor"]),
        (lambda x: torch.true_divide(x, 3.0), ["div.Tensor"]),
        (lambda x: torch.concat([x, x]).clip(0), ["cat.default", "clamp.default"]),
        (lambda x: x.sum(0, keepdim=True).expand_as(x), ["sum.dim_IntList", "expand.default"]),
        (lambda x: x.reshape_as(x.new_ones(12)) + 1, ["reshape.default", "add.Tensor"]),
        (lambda x: torch.broadcast_tensors(x, x[:1])[1] + 1, ["slice.Tensor", "expand.default", "add.Tensor"]),
        (lambda x: x + x.new_empty(4).fill_(2.0), ["full.default", "add.Tensor"]),
    ],
)
def test_one_spelling(function: Callable[[Tensor], Tensor], expected: list[str]) -> None:
    assert ops(captured(function, torch.randn(3, 4))) == expected


def _written(x: Tensor, *, read: bool) -> Tensor:
    whole = x * 2
    part = whole.reshape(4, 3)[:2]
    part *= 3
    return part + whole.sum() if read else part


def test_a_write_into_another_shape_of_a_tensor() -> None:
    assert "mul.Tensor" in ops(captured(lambda x: _written(x, read=False), torch.randn(3, 4)))
    with pytest.raises(PlacementError, match="changes a view that is read later") as raised:
        captured(lambda x: _written(x, read=True), torch.randn(3, 4))
    assert raised.value.diagnostics[0].code == "PLC407"


def test_complex_numbers_have_gradients() -> None:
    x = torch.randn(3, 4, 2, requires_grad=True)
    graph = captured(lambda x: torch.view_as_real(torch.view_as_complex(x) * 1j), x)
    assert [node.results[0].requires_grad for node in graph.nodes] == [True, True, True]


class Told(nn.Module):
    """Adds a number; which is told by a size, and what for by a word."""

    def forward(self, x: Tensor, size: Any, word: str) -> Tensor:
        return x + size if word == "add" else x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.told, self.norm = Told(), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.told(x, x.shape[0], "add"))


def test_a_module_that_is_told_a_size_hides_no_other_module() -> None:
    graph = captured(Outer(), torch.randn(3, 4), "batch", "hidden")
    assert graph.modules["norm"].returned
    assert not graph.modules["told"].returned


class Dropping(nn.Module):
    """Leaves out its layer at random, if it is so made."""

    def __init__(self, layerdrop: float) -> None:
        super().__init__()
        self.layer, self.layerdrop = nn.Linear(4, 4), layerdrop

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.layerdrop > 0.0:
            return x
        return self.layer(x)


@pytest.mark.parametrize(("layerdrop", "times"), [(0.0, 1), (0.5, 2)])
def test_a_flag_that_decides_nothing_costs_no_second_capture(
    layerdrop: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    export = captures._export
    monkeypatch.setattr(captures, "_export", lambda *given: calls.append(given) or export(*given))
    graph = captured(Dropping(layerdrop), torch.randn(3, 4))
    assert (len(calls), bool(graph.training_only)) == (times, times == 2)


class Table(nn.Module):
    """Positions in a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = torch.arange(4, dtype=torch.float32).unsqueeze(0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.positions.detach().type_as(x).to(device=x.device, copy=True)


def test_a_constant_keeps_its_dtype_where_casts_are_lifted() -> None:
    model, x = Table(), torch.randn(3, 4, dtype=torch.float64)
    with lifted(torch.float64):
        program = placement.compile(model, placement.simulate(tp=2), "mesh tp\n", example={"x": x})
        assert torch.equal(program(x=x), model(x))


def _centres(x: Tensor) -> Tensor:
    return x[:, : x.shape[1] // 2] + torch.arange(0.5, x.shape[1] // 2, dtype=x.dtype)


def test_sizes_rounded_up_are_held_to_what_was_taken_for_granted() -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    spec = "mesh tp\ninput x : [batch, seq]\n"
    program = placement.compile(Calls(_centres), placement.simulate(tp=2), spec, example={"x": x})
    for seq in (8, 6):
        given = torch.randn(2, seq, dtype=torch.float64)
        assert torch.equal(program(x=given), _centres(given))


def test_a_list_of_modules_may_have_a_forward_of_its_own() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    program = placement.compile(model, placement.simulate(tp=2), "mesh tp\n", example={"input": x})
    torch.testing.assert_close(program(input=x), model(x))
