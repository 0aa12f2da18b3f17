"""The example that a model is captured with: its tensors by name, at the sizes of capture."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from placement.lang.diagnostics import Diagnostic, PlacementError

SMALLEST = 2  # export fixes dims of size 0 and 1, so named dims are captured at two or more


@dataclass(frozen=True, slots=True)
class Example:
    """The example's tensors by name, and how to call the model with such tensors."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    constants: Mapping[str, Any]
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, model: torch.nn.Module, example: Mapping[str, Any] | Sequence[Any]) -> Example:
        """From keyword arguments (a mapping) or positional arguments (a sequence).

        Raises PlacementError (PLC404) where ``model.forward`` does not take such arguments.
        """
        args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
        if args:
            args, kwargs = _by_name(model, args)
        paths, spec = pytree.tree_flatten_with_path((args, kwargs))
        names, tensors, constants = [], [], {}
        for path, leaf in paths:
            name = ".".join(key_text(k) for k in path[1:])
            if isinstance(leaf, torch.Tensor):
                names.append(name)
                tensors.append(leaf)
            else:
                constants[name] = leaf
        return cls(tuple(names), tuple(tensors), constants, spec, tuple(leaf for _, leaf in paths))

    def call(self, model: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
        """``model`` called as in the example, with ``tensors`` in place of the example's."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return model(*args, **kwargs)


def _by_name(model: torch.nn.Module, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments under the names that ``forward`` gives them."""
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args)
    except TypeError as error:
        raise PlacementError(
            [Diagnostic("PLC404", f"the example does not fit the model's forward: {error}")]
        ) from error
    kinds = {signature.parameters[name].kind for name in bound.arguments}
    if kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}:
        return (), dict(bound.arguments)
    raise PlacementError(
        [
            Diagnostic(
                "PLC404",
                "the model's forward takes arguments that have no names (*args, or positional-only ones)",
                hint="wrap the model in a module whose forward names each argument",
            )
        ]
    )


def key_text(key: Any) -> str:
    """A pytree key as it stands in dotted names."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def check_dims(example: Example, names: Mapping[str, Sequence[str]]) -> None:
    """Raise PlacementError where named dims do not fit the example's tensors (PLC107) or each other (PLC108)."""
    problems = []
    for name, dims in names.items():
        if name not in example.names:
            continue  # the binder reports unknown inputs, with the span of the line
        rank = example.tensors[example.names.index(name)].dim()
        if len(dims) != rank:
            text = f"input '{name}' has {rank} dims, not the {len(dims)} of [{', '.join(dims)}]"
            problems.append(Diagnostic("PLC107", text))
    sizes: dict[str, tuple[int, str]] = {}
    for name, tensor in zip(example.names, example.tensors, strict=True):
        for dim, size in zip(names.get(name, ()), tensor.shape, strict=False):
            if sizes.setdefault(dim, (size, name))[0] != size:
                other = sizes[dim]
                problems.append(
                    Diagnostic("PLC108", f"dim '{dim}' is {other[0]} in '{other[1]}' and {size} in '{name}'")
                )
    if problems:
        raise PlacementError(problems)


def capture_sizes(example: Example, names: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The size at which each named dim is captured: the example's, at least two."""
    sizes: dict[str, int] = {}
    for name, tensor in zip(example.names, example.tensors, strict=True):
        for dim, size in zip(names.get(name, ()), tensor.shape, strict=False):
            sizes[dim] = max(size, SMALLEST)
    return sizes


def resized(tensor: torch.Tensor, dims: Sequence[str], sizes: Mapping[str, int]) -> torch.Tensor:
    """A distinct tensor (export merges inputs that are one object) at the size of capture."""
    result = tensor.detach()
    for index, dim in enumerate(dims):
        if result.shape[index] != sizes[dim]:
            result = torch.cat([result] * sizes[dim], index).narrow(index, 0, sizes[dim])
    result = result.clone()
    return result.requires_grad_(tensor.requires_grad) if tensor.requires_grad else result


def argument_names(signature: Any) -> list[str]:
    """A name for each flat input of a module call: keywords have one, positions get ``argument_i``."""
    try:
        args, kwargs = pytree.tree_unflatten(range(len(signature.inputs)), signature.in_spec)
    except (TypeError, ValueError):
        return []
    names = {leaf: f"argument_{i}" for i, arg in enumerate(args) for leaf in pytree.tree_leaves(arg)}
    for key, arg in kwargs.items():
        for position, leaf in enumerate(pytree.tree_leaves(arg)):
            names[leaf] = key if not position else f"{key}_{position}"
    return [names[i] for i in range(len(signature.inputs))]
