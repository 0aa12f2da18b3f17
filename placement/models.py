"""What ``--model`` names: a callable that returns a model and an example, or a transformers config."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["Built", "ModelNameError", "build", "resized"]

Example = Mapping[str, Any]


class ModelNameError(ValueError):
    """``--model`` names nothing that could be called. The message says what was looked for."""


@dataclass(frozen=True, slots=True)
class Built:
    """A model, and the keyword arguments of one call of it."""

    model: nn.Module
    example: Example


def build(name: str, sizes: Mapping[str, int], *, meta: bool, batch: int = 1, seq: int = 4096) -> Built:
    """The model that ``MODULE:CALLABLE``, ``path/to/file.py:CALLABLE`` or ``hf:CONFIG.json`` names.

    ``sizes`` go to arguments of the callable of the same names, and to ``batch`` and ``seq`` of a transformers
    example, whose defaults are given here. With ``meta`` the model has no weights where that can be asked for.

    Raises:
        ModelNameError: there is no such module, callable, file or architecture.
        Exception: whatever the callable raises.
    """
    if name.startswith("hf:"):
        return _from_config(
            Path(name.removeprefix("hf:")), {"batch": batch, "seq": seq, **sizes}, meta=meta, given=sizes
        )
    found = _callable(name)
    accepted = _parameters(found)
    arguments: dict[str, Any] = {k: v for k, v in sizes.items() if k in accepted}
    if meta and "device" in accepted:
        arguments["device"] = "meta"
    if missing := [f"'{k}'" for k, parameter in accepted.items() if _is_required(parameter) and k not in arguments]:
        raise ModelNameError(
            f"{name} needs {', '.join(missing)}: name a callable whose arguments all have defaults, "
            "or give the sizes among them with --size"
        )
    result = found(**arguments)
    match result:
        case (nn.Module() as model, Mapping() as example):
            return Built(model, example)  # pyright: ignore[reportUnknownArgumentType]
        case _:
            kind = type(result).__name__
            raise ModelNameError(f"{name} returned {kind}, not a model and the keyword arguments of one call (a dict)")


def resized(example: Example, dims: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]) -> Example:
    """The example with its named dims at ``sizes``: what is too short is repeated, what is too long cut."""

    def at_size(path: tuple[Any, ...], leaf: Any) -> Any:
        named = dims.get(".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path), ())
        if not isinstance(leaf, torch.Tensor) or leaf.dim() != len(named):
            return leaf
        made = leaf.detach()
        for index, dim in enumerate(named):
            size, have = sizes.get(dim, made.shape[index]), made.shape[index]
            if size != have and have:
                made = torch.cat([made] * -(-size // have), index).narrow(index, 0, size)
        return made.clone().requires_grad_(leaf.requires_grad)

    return pytree.tree_map_with_path(at_size, dict(example))


# -- a callable -------------------------------------------------------------------------------------


def _callable(name: str) -> Callable[..., Any]:
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        forms = "MODULE:CALLABLE, FILE.py:CALLABLE or hf:CONFIG.json"
        names = "names no callable" if name.rstrip(":").endswith(".py") else "names no model"
        raise ModelNameError(f"{name!r} {names}: write {forms}")
    module = _file(Path(where)) if where.endswith(".py") else _module(where)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
            raise ModelNameError(f"{where} has no {attribute!r}; it has {', '.join(known[:8]) or 'nothing to call'}")
        found = getattr(found, part)
    if not callable(found):
        raise ModelNameError(f"{name} is not callable")
    return found


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # written in C
        return {}


def _is_required(parameter: inspect.Parameter) -> bool:
    several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not several


def _module(where: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{where}.".startswith(f"{error.name}."):
            raise ModelNameError(f"no module {where!r} on sys.path or in {here}") from error
        raise


def _file(path: Path) -> ModuleType:
    """The module of a file, importable by its name too: processes that are given the model import it again."""
    full = path.resolve()
    if not full.is_file():
        raise ModelNameError(f"no file {str(path)!r}")
    sys.path.insert(0, str(full.parent))
    name = full.stem
    known = sys.modules.get(name)
    if known is None:
        return importlib.import_module(name)
    if known.__file__ is not None and Path(known.__file__).resolve() == full:
        return known
    spec = importlib.util.spec_from_file_location(f"placement_model_{name}", full)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# -- transformers -----------------------------------------------------------------------------------


def _from_config(path: Path, sizes: Mapping[str, int], *, meta: bool, given: Mapping[str, int]) -> Built:
    hf = _transformers()
    device = "meta" if meta else "cpu"
    torch.manual_seed(0)
    try:
        model = hf.from_config(path, device=device)
        made = hf.example(model, batch=sizes["batch"], seq=sizes["seq"], device=device, longest="seq" not in given)
    except hf.ConfigError as error:
        raise ModelNameError(str(error)) from error
    return Built(model, made)


def _transformers() -> Any:
    """Our bridge to the package, which need not be there."""
    try:
        return importlib.import_module("placement.integrations.transformers")
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "safetensors"):
            raise
        raise ModelNameError("hf: needs transformers: pip install 'placement[hf]'") from error
