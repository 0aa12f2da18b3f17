"""What ``verify`` compares, that it passes right programs, and that it catches wrong ones and names the place."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import types
from pathlib import Path

import pytest
import small
import torch
from torch import nn

import placement
from placement.verify import sides

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KINDS = {"outputs", "layers", "input gradients", "parameter gradients", "weights", "replicas"}


@pytest.fixture
def plant(monkeypatch):
    """``plant(old, new)`` changes the emitted text before it runs."""

    def change(old: str, new: str) -> None:
        made = sides.instantiate

        def instantiate(source, graph, mesh):
            assert old in source.text, source.text
            return made(dataclasses.replace(source, text=source.text.replace(old, new)), graph, mesh)

        monkeypatch.setattr(sides, "instantiate", instantiate)

    return change


def test_a_right_program_passes_and_every_kind_is_compared() -> None:
    parity = placement.verify(
        small.Block(), placement.simulate(tp=2), small.spec(), example=small.example(requires_grad=True)
    )
    assert parity.ok, parity
    assert set(parity.worst) == KINDS
    assert all(worst.compared for worst in parity.worst.values())
    assert parity.worst["input gradients"].name == "x"
    assert parity.worst["parameter gradients"].compared == 6
    assert set(parity.layers) == {"norm", "up", "down"}
    assert not parity.failures
    assert "ok: the program computes what one device computes" in str(parity)


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_a_transformer_passes_with_its_dropout_on(name: str) -> None:
    model, example = importlib.import_module(f"examples.{name}.model").build(batch=3, seq=10, layers=1)
    parity = placement.verify(model, {"tp": 2}, EXAMPLES / name / f"{name}.plc", example=example, steps=2)
    assert parity.ok, parity
    assert ("dropout is active" in str(parity)) == (name == "gpt2")
    assert "casts to float32 inside the model are lifted" in str(parity)
    assert parity.worst["layers"].compared > 10


def test_a_missing_gradient_hook_is_caught_and_the_parameter_named(plant) -> None:
    plant('rt.summed(self, "weight", self.tp)', "self.weight")
    parity = placement.verify(small.Block(), {"tp": 2}, small.spec(), example=small.example())
    assert not parity.ok
    assert parity.worst["parameter gradients"].name == "norm.weight"
    assert ("parameter gradients", "norm.weight") in {(f.kind, f.name) for f in parity.failures}
    assert parity.worst["outputs"].ok
    assert parity.worst["layers"].ok
    assert "norm.weight" in str(parity)
    assert "FAILED" in str(parity)


def test_a_wrong_forward_is_caught_and_the_first_module_named(plant) -> None:
    plant("F.layer_norm(", "1.001 * F.layer_norm(")
    parity = placement.verify(small.Block(), {"tp": 2}, small.spec(), example=small.example())
    assert not parity.worst["outputs"].ok
    assert next(f.name for f in parity.failures if f.kind == "layers") == "norm"
    assert "the first module that differs: norm" in str(parity)


def test_replicas_that_drift_apart_are_caught(monkeypatch) -> None:
    load = sides.load

    def drifting(module, *args) -> None:
        load(module, *args)
        with torch.no_grad():
            module.programs[1].get_parameter("norm.bias").add_(1e-15)

    monkeypatch.setattr(sides, "load", drifting)
    parity = placement.verify(small.Block(), {"tp": 2}, small.spec(), example=small.example())
    assert parity.worst["replicas"].name == "norm.bias"
    assert not parity.worst["replicas"].ok
    assert parity.worst["weights"].ok


def test_the_users_model_stays_as_it_is() -> None:
    model = small.Block()
    model.up.weight.grad = torch.ones_like(model.up.weight)
    before = copy.deepcopy(model.state_dict())
    example = small.example(requires_grad=True)
    placement.verify(model, {"tp": 2}, small.spec(), example=example)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.up.weight.dtype is torch.float32
    assert torch.equal(model.up.weight.grad, torch.ones_like(model.up.weight))
    assert model.down.weight.grad is None
    assert example["x"].grad is None


def test_without_a_scalar_output_all_outputs_are_differentiated() -> None:
    parity = placement.verify(small.Block(loss=False), {"tp": 2}, small.spec(loss=False), example=small.example())
    assert parity.ok
    assert "gradients are those of a random weighting of all outputs" in str(parity).replace("\n      ", " ")


def test_the_example_may_be_positional() -> None:
    assert placement.verify(small.Block(), {"tp": 2}, small.spec(), example=(small.example()["x"],)).ok


def test_the_mesh_may_be_in_the_spec() -> None:
    text = small.spec().replace("mesh tp", "mesh tp = 3")
    parity = placement.verify(small.Block(width=12), None, text, example={"x": torch.randn(2, 6, 12)})
    assert parity.ok
    assert "tp = 3: 3 simulated ranks" in str(parity)


def test_frozen_parameters_are_left_out_and_a_frozen_model_has_outputs_only() -> None:
    model = small.Block()
    model.norm.requires_grad_(False)
    parity = placement.verify(model, {"tp": 2}, small.spec(), example=small.example())
    assert parity.ok
    assert parity.worst["parameter gradients"].compared == 4
    model.requires_grad_(False)
    parity = placement.verify(model, {"tp": 2}, small.spec(), example=small.example())
    assert parity.ok
    assert parity.worst["parameter gradients"].compared == 0
    assert parity.worst["outputs"].compared == 2
    assert "no output has a gradient" in str(parity)


def test_zero_steps_compare_gradients_only() -> None:
    parity = placement.verify(small.Block(), {"tp": 2}, small.spec(), example=small.example(), steps=0)
    assert parity.ok
    assert parity.worst["weights"].compared == 0
    assert parity.worst["parameter gradients"].compared == 6


def test_past_the_tolerance_it_fails() -> None:
    parity = placement.verify(small.Block(), {"tp": 2}, small.spec(), example=small.example(), tolerance=1e-30)
    assert not parity.ok


def test_float32_has_its_own_tolerances() -> None:
    parity = placement.verify(small.Block(), {"tp": 2}, small.spec(), example=small.example(), dtype=torch.float32)
    assert parity.ok
    assert parity.worst["parameter gradients"].error > 1e-11
    assert "lifted" not in str(parity)


def test_a_model_on_the_meta_device_is_refused() -> None:
    with pytest.raises(placement.PlacementError, match=r"PLC405.*norm\.weight"):
        placement.verify(small.Block().to("meta"), {"tp": 2}, small.spec(), example=small.example())


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="simulated, gloo, nccl"):
        placement.verify(small.Block(), {"tp": 2}, small.spec(), example=small.example(), backend="mpi")


def test_dropout_that_cannot_be_given_masks_is_switched_off_and_said(monkeypatch) -> None:
    class Dropping(small.Block):
        def forward(self, x):
            y = x + self.down(nn.functional.dropout(self.up(self.norm(x)), 0.5, self.training))
            return {"loss": y.pow(2).mean(), "y": y}

    on_one_device, modes = sides.on_one_device, []

    def refusing(task, device):
        modes.append(task.model.training)
        if task.model.training:
            raise NotImplementedError("dropout inside of Fused")
        return on_one_device(task, device)

    assert placement.verify(Dropping(), {"tp": 2}, small.spec(), example=small.example()).ok
    monkeypatch.setattr(sides, "on_one_device", refusing)
    parity = placement.verify(Dropping(), {"tp": 2}, small.spec(), example=small.example())
    assert modes == [True, False]
    assert parity.ok, parity
    assert "eval mode, without dropout: dropout inside of Fused" in str(parity)


@pytest.mark.parametrize("room", ["emit", "verify"])
def test_a_function_with_the_name_of_a_room_stays_a_function(room: str) -> None:
    importlib.import_module(f"placement.{room}")
    assert not isinstance(getattr(placement, room), types.ModuleType)
    assert callable(getattr(placement, room))
