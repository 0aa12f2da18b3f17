"""All that is compared, each as one function: a step of forward and backward, whose gradients are final after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import placement
from bench.peers import dtensor
from bench.peers.decoder import Decoder, Norms
from bench.peers.expert import Native, Traced
from bench.peers.models import Case, block
from placement.graph.precision import lifted

OURS = "placement"


def _nothing() -> None:
    """What most sides do after the backward."""


@dataclass(frozen=True, slots=True)
class Side:
    """One implementation on this rank.

    ``parameters`` by transformers' names; ``forward`` gives the loss; ``around`` is entered for forward and backward,
    ``finish`` called after it.
    """

    name: str
    module: nn.Module
    forward: Callable[[], Tensor]
    parameters: dict[str, Tensor]
    given: dict[str, Tensor]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    finish: Callable[[], None] = _nothing

    def step(self, meanwhile: Callable[[], None] = _nothing) -> Tensor:
        """Forward and backward from no gradients; the loss. ``meanwhile`` is called between the two."""
        for parameter in self.parameters.values():
            parameter.grad = None
        with self.around():
            loss = self.forward()
            meanwhile()
            loss.backward()
        self.finish()
        return loss


def as_it_is(module: nn.Module) -> nn.Module:
    """No compilation."""
    return module


Compiling = Callable[[nn.Module], Any]
Given = dict[str, Tensor]


def ours(case: Case, model: nn.Module, mesh: Any, given: Given, compiling: Compiling = as_it_is) -> Side:
    """The emitted module."""
    # Priced for long sequences: at the sizes of this bench, gathering the logits would be cheaper than two reductions.
    program = placement.compile(model, mesh, case.spec, example=given, sizes={"seq": 4096})
    called = compiling(program)
    return Side(OURS, program, lambda: called(**given)["loss"], dict(program.named_parameters()), given)


def written(
    case: Case,
    model: nn.Module,
    mesh: Any,
    given: Given,
    compiling: Compiling = as_it_is,
    *,
    ops: type[Native] = Native,
    name: str = "expert",
    norms: Norms = "torch",
) -> Side:
    """By hand."""
    made = Decoder(case, model, ops(mesh.get_group(), sp=case.mode == "tp+sp"), norms)
    called = compiling(made)
    parameters = {key.replace("__", "."): p for key, p in made.named_parameters()}
    return Side(name, made, lambda: called(**given)[0], parameters, given, finish=made.finish)


def by_dtensor(case: Case, model: nn.Module, mesh: Any, given: Given, compiling: Compiling = as_it_is) -> Side:
    """``parallelize_module``."""
    made = dtensor.parallelized(case, model, mesh)
    called = dtensor.LossOfClasses(case, compiling(made))
    return Side(
        "DTensor",
        made,
        lambda: called.loss(**given),
        dict(made.named_parameters()),
        given,
        called.around,
        called.finish,
    )


def by_transformers(case: Case, model: nn.Module, mesh: Any, given: Given, compiling: Compiling = as_it_is) -> Side:
    """The plan that comes with the model."""
    del case
    made = dtensor.by_own_plan(model, mesh)
    called = compiling(made)
    return Side("transformers", made, lambda: called(**given).loss, dict(made.named_parameters()), given)


def by_spmd(case: Case, model: nn.Module, mesh: Any, given: Given, compiling: Compiling = as_it_is) -> Side:
    """Collectives of spmd-types."""
    from bench.peers.spmd import Typed  # noqa: PLC0415 - it may not be installed

    return written(case, model, mesh, given, compiling, ops=Typed, name="spmd-types")


def by_megatron(case: Case, model: nn.Module, mesh: Any, given: Given, compiling: Compiling = as_it_is) -> Side:
    """Layers of megatron-core."""
    from bench.peers.megatron import Core  # noqa: PLC0415 - it may not be installed

    return written(case, model, mesh, given, compiling, ops=Core, name="megatron-core")


MAKERS: dict[str, Callable[..., Side]] = {
    OURS: ours,
    "expert": written,
    "expert, traced": partial(written, name="expert, traced", ops=Traced),
    "expert, own norms": partial(written, name="expert, own norms", norms="model"),
    "expert, lean": partial(written, name="expert, lean", norms="lean"),
    "DTensor": by_dtensor,
    "spmd-types": by_spmd,
    "megatron-core": by_megatron,
    "transformers": by_transformers,
}


def mesh_of(case: Case) -> Any:
    """The axis of this world."""
    return init_device_mesh("cpu", (case.tp,), mesh_dim_names=("tp",))


def made(
    case: Case, names: Iterable[str], dtype: torch.dtype = torch.float32, compiling: Compiling = as_it_is
) -> tuple[list[Side], dict[str, str]]:
    """Sides by name, and why others did not run."""
    mesh, given, sides, failed = mesh_of(case), case.inputs(), [], {}
    for name in names:
        if name == "transformers" and case.mode != "tp":  # its plan has nothing else
            continue
        try:
            sides.append(MAKERS[name](case, case.model(dtype), mesh, given, compiling))
        except Exception as error:
            if name in (OURS, "expert"):
                raise
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return sides, failed


def errors(case: Case, names: Iterable[str]) -> dict[str, float | str]:
    """In float64, the largest error of the loss and of every gradient, each relative to its own largest element."""
    given = case.inputs()
    with lifted(torch.float64):
        model = case.model(torch.float64)
        want = model(**given).loss
        want.backward()
        sides, failed = made(case, names, torch.float64)
        found: dict[str, float | str] = dict(failed)
        for side in sides:
            try:
                loss = side.step()
            except Exception as error:  # noqa: BLE001 - as in ``made``
                found[side.name] = f"{type(error).__name__}: {error}"
                continue
            worst = _largest((_whole(loss) - want.detach()) / want.detach())
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                got = side.parameters[name].grad
                goal = (
                    parameter.grad
                    if isinstance(got, DTensor)
                    else block(name, parameter.grad, case.tp, dist.get_rank())
                )
                got = torch.zeros(()) if got is None else _whole(got)
                if got.shape != goal.shape:
                    found[side.name] = f"gradient of {name} is {list(got.shape)}"
                    break
                worst = max(worst, _largest((got - goal) / parameter.grad.abs().max()))
            else:
                found[side.name] = worst
    return found


def _whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def _largest(x: Tensor) -> float:
    return float(x.abs().max().nan_to_num(nan=float("inf")))
