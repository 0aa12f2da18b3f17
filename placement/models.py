"""What ``--model`` names: a callable that returns a model and an example, or a transformers config."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
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

_LABELLED = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")
_TEXT, _IMAGES = "input_ids", "pixel_values"


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
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelNameError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelNameError(f"{path} is not JSON: {error}") from error
    transformers = _transformers()
    kinds: Mapping[str, Any] = transformers.CONFIG_MAPPING
    if not isinstance(data, dict) or data.get("model_type") not in kinds:
        raise ModelNameError(f"{path} is no config that transformers knows: it needs a model_type")
    config = kinds[data["model_type"]].from_dict(data)
    config.use_cache = False
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"), _default_dtype(config):
        model = _model(transformers, config).train()
    return Built(model, _example(model, config, sizes, given, device="meta" if meta else "cpu"))


def _transformers() -> Any:
    """The package, silent and offline: everything it needs is in the config."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModelNameError("hf: needs transformers: pip install 'placement[hf]'") from error


class _default_dtype:  # noqa: N801 - reads as a function where it is used
    """New tensors have the dtype that the config asks for."""

    def __init__(self, config: Any) -> None:
        wanted = getattr(config, "dtype", None)
        wanted = getattr(torch, wanted, None) if isinstance(wanted, str) else wanted
        self.dtype = wanted if isinstance(wanted, torch.dtype) else torch.get_default_dtype()
        self.before = torch.get_default_dtype()

    def __enter__(self) -> None:
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)


def _model(transformers: Any, config: Any) -> nn.Module:
    names: list[str] = getattr(config, "architectures", None) or []
    if names and not hasattr(transformers, names[0]):
        raise ModelNameError(f"transformers has no architecture {names[0]!r}")
    if names:
        return getattr(transformers, names[0])(config)
    try:
        return transformers.AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ModelNameError("the config names no architecture, and its model has no causal LM") from error


def _example(model: Any, config: Any, sizes: Mapping[str, int], given: Mapping[str, int], *, device: str) -> Example:
    """Random inputs, the same ones every time; labels are a tensor of their own, as torch.export wants them."""
    draw = torch.Generator().manual_seed(1)
    kind = getattr(model, "main_input_name", _TEXT)
    batch = sizes["batch"]
    if kind == _IMAGES:
        side = config.image_size
        height, width = side if isinstance(side, list | tuple) else (side, side)
        example = {_IMAGES: torch.randn(batch, config.num_channels, height, width, generator=draw)}
        if type(model).__name__.endswith("ForImageClassification"):
            example["labels"] = torch.randint(0, config.num_labels, (batch,), generator=draw)
    elif kind == _TEXT:
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        seq = sizes["seq"]
        if "seq" not in given:
            seq = min(seq, getattr(text, "max_position_embeddings", None) or seq)
        names = [_TEXT, "labels"] if type(model).__name__.endswith(_LABELLED) else [_TEXT]
        example = {name: torch.randint(0, text.vocab_size, (batch, seq), generator=draw) for name in names}
    else:
        raise ModelNameError(f"{type(model).__name__} takes {kind!r}: name a callable that returns such an example")
    return {name: x.to(device) for name, x in example.items()}
