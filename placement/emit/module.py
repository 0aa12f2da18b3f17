"""Emitted source to a module: the text is executed as it stands, put on the mesh and given its weights."""

from __future__ import annotations

import itertools
import linecache
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from placement.emit.source import Source
from placement.graph.ir import Graph
from placement.lang.diagnostics import Diagnostic, PlacementError
from placement.runtime import Program, Simulated, SimulatedMesh, StateError

_numbers = itertools.count(1)


def instantiate(
    source: Source, graph: Graph, mesh: DeviceMesh | SimulatedMesh, reduce_dtype: torch.dtype | None = None
) -> Program | Simulated:
    """Run the emitted text and put its program on ``mesh``, without data.

    Tracebacks and debuggers show the emitted lines. The program returns what the original model returned.
    """
    number = next(_numbers)
    name = f"<placement program {number}>"
    linecache.cache[name] = (len(source.text), None, source.text.splitlines(keepends=True), name)
    module = types.ModuleType(f"placement_program_{number}")
    sys.modules[module.__name__] = module  # torch.compile and pickle find a class's module by its name
    exec(compile(source.text, name, "exec"), module.__dict__)  # noqa: S102 - our own text
    program: Program | Simulated = module.build(mesh, reduce_dtype)
    spec = graph.out_spec

    def restore(result: Any) -> Any:
        return pytree.tree_unflatten(list(_leaves(result)), spec)

    program.restore = restore
    return program


def _leaves(result: Any) -> Iterator[Any]:
    if isinstance(result, dict):
        for value in result.values():
            yield from _leaves(value)
    elif isinstance(result, list | tuple):
        for value in result:
            yield from _leaves(value)
    else:
        yield result


def load(program: Program | Simulated, model: torch.nn.Module, graph: Graph) -> None:
    """Give the program the model's parameters and buffers, as far as the model has data."""
    state = {name: tensor.detach() for name, tensor in model.named_parameters(remove_duplicate=False)}
    state |= dict(model.named_buffers(remove_duplicate=False))
    state |= graph.constants
    real = {name: tensor for name, tensor in state.items() if not tensor.is_meta}
    try:
        program.load_full_state_dict(real, strict=False)
    except StateError as error:
        raise PlacementError([Diagnostic("PLC406", str(error))]) from error
    evaluated = {path for path, module in model.named_modules(remove_duplicate=False) if not module.training}
    if graph.training_only and evaluated:
        what = "the model" if "" in evaluated else f"'{min(evaluated)}'"
        text = f"{what} is in eval mode, where the model does something else than in training ({graph.training_only})"
        raise PlacementError([Diagnostic("PLC407", text, hint="compile it in training mode: model.train()")])
    program.train(model.training)
    for root in [program] if isinstance(program, Program) else program.children():
        for path, module in root.named_modules():  # a part that the user froze stays as it is
            module.training = path not in evaluated
