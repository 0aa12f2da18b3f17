"""Models of transformers: from a config, or from a directory that ``save_pretrained`` wrote.

``from_config`` makes one without weights; ``compile`` gives its program with them, each rank its own shards.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from placement.integrations.checkpoint import Checkpoint, Stored
from placement.lang.diagnostics import Diagnostic, PlacementError
from placement.runtime import Program, Simulated, StateError

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all that is needed is in the config
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import transformers  # it reads both when it is imported

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from placement.lang.spec import Spec
    from placement.runtime import SimulatedMesh

__all__ = ["ConfigError", "Stored", "compile", "example", "from_config", "load"]

_LABELLED = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")
_TEXT, _IMAGES = "input_ids", "pixel_values"
Config = Any  # a PretrainedConfig, or where one is


class ConfigError(ValueError):
    """No model can be made of a config. The message says why."""


def from_config(
    config: Config,
    *,
    device: str = "meta",
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
) -> nn.Module:
    """The model of a config, without weights on the meta device and with random ones elsewhere, in training mode.

    ``config`` is a ``PretrainedConfig``, a JSON file or a directory with a ``config.json``. The class is the first of
    its ``architectures``, else that of a causal language model; ``dtype`` is the config's where nothing is said, and so
    is ``attn_implementation``, transformers' name of how it computes attention, which files do not hold.
    Raises ConfigError.
    """
    config = _read(config, attn_implementation)
    config.use_cache = False
    with torch.device(device), _default_dtype(dtype or _dtype(config)):
        return _model(config).train()


def example(
    model: nn.Module, *, batch: int = 1, seq: int = 4096, device: str = "meta", longest: bool = True
) -> dict[str, torch.Tensor]:
    """Random inputs of one call: tokens [batch, seq] or images, with labels where the model takes some.

    With ``longest`` a sequence is no longer than the model has positions. Labels are a tensor of their own, as
    torch.export wants them. Raises ConfigError for a model that takes something else.
    """
    config: Any = model.config
    draw = torch.Generator().manual_seed(1)
    kind = getattr(model, "main_input_name", _TEXT)
    if kind == _IMAGES:
        side = config.image_size
        height, width = side if isinstance(side, list | tuple) else (side, side)
        made = {_IMAGES: torch.randn(batch, config.num_channels, height, width, generator=draw)}
        if type(model).__name__.endswith("ForImageClassification"):
            made["labels"] = torch.randint(0, config.num_labels, (batch,), generator=draw)
    elif kind == _TEXT:
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        most = getattr(text, "max_position_embeddings", None) or seq
        seq = min(seq, most) if longest else seq
        names = [_TEXT, "labels"] if type(model).__name__.endswith(_LABELLED) else [_TEXT]
        made = {name: torch.randint(0, text.vocab_size, (batch, seq), generator=draw) for name in names}
    else:
        raise ConfigError(f"{type(model).__name__} takes {kind!r}: name a callable that returns such an example")
    return {name: x.to(device) for name, x in made.items()}


def compile(  # noqa: A001 - as of the package
    source: Config,
    mesh: DeviceMesh | SimulatedMesh,
    spec: Spec | str | Path | None = None,
    *,
    example: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
    **options: Any,
) -> Program | Simulated:
    """``placement.compile`` of the model in a directory, loaded from its safetensors.

    ``source`` holds a ``config.json`` and the files; a config alone gives a program without weights, whose buffers
    are there. No rank holds more of the weights than its own shards, and while it loads one slice of a tensor.
    ``dtype`` and ``attn_implementation`` are those of ``from_config``, ``options`` those of ``placement.compile``.
    Raises PlacementError, also where names or shapes do not fit, and ConfigError.
    """
    from placement import compile as compiled  # noqa: PLC0415 - it imports this package's models

    config = _read(source, attn_implementation)
    model = from_config(config, dtype=dtype)
    program = compiled(model, mesh, spec, example=_on_meta(example), **options)
    program.load_full_state_dict(_computed(config, dtype), strict=False)
    if isinstance(source, str | Path) and Path(source).is_dir():
        load(program, source, ignore=getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    return program


def load(
    program: Program | Simulated, directory: str | Path, *, strict: bool = True, ignore: Iterable[str] = ()
) -> None:
    """Load a directory's safetensors into a program; every rank reads its own blocks and nothing else.

    A checkpoint of the base model alone, whose names lack the prefix of a head's model, fits too. ``ignore`` are
    regular expressions of names that need not be in the program. Raises PlacementError (PLC406) with every name that
    is missing, unknown (if ``strict``) or of another shape, and the nearest names; nothing is changed then.
    """
    checkpoint = Checkpoint(directory)
    own = [name for name, _ in (*program.named_parameters(), *program.named_buffers())]
    own = [name.partition(".")[2] for name in own] if isinstance(program, Simulated) else own
    given = {_within(own, checkpoint, name): stored for name, stored in checkpoint.items()}
    known = set(own)
    skipped = [re.compile(pattern) for pattern in ignore]
    given = {n: s for n, s in given.items() if n in known or not any(p.search(n) for p in skipped)}
    try:
        program.load_full_state_dict(given, strict=strict)
    except StateError as error:
        _, *lines = map(str.strip, str(error).splitlines())
        text = f"the checkpoint in {directory} does not fit the program"
        raise PlacementError([Diagnostic("PLC406", text, notes=tuple(lines) or (str(error),))]) from error


def _within(own: Iterable[str], checkpoint: Mapping[str, Stored], name: str) -> str:
    """The program's name of a stored tensor: the same, or below the one module that the others are below of too."""
    prefixes = {n.partition(".")[0] for n in own} if name not in set(own) else set()
    below = [f"{prefix}.{name}" for prefix in sorted(prefixes) if f"{prefix}.{name}" in set(own)]
    return below[0] if len(below) == 1 and below[0] not in checkpoint else name


def _on_meta(given: Mapping[str, Any]) -> dict[str, Any]:
    return {k: x.to("meta") if isinstance(x, torch.Tensor) else x for k, x in given.items()}


# -- models -----------------------------------------------------------------------------------------


def _read(config: Config, attn_implementation: str | None = None) -> Any:
    """The config itself, a copy, or the one that a file holds."""
    if isinstance(config, transformers.PretrainedConfig):
        attention = attn_implementation or getattr(config, "_attn_implementation", None)  # not in the dict
        return type(config).from_dict(config.to_dict(), attn_implementation=attention)
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    kinds: Mapping[str, Any] = transformers.CONFIG_MAPPING
    if not isinstance(data, dict) or data.get("model_type") not in kinds:
        raise ConfigError(f"{path} is no config that transformers knows: it needs a model_type")
    try:
        return kinds[data["model_type"]].from_dict(data, attn_implementation=attn_implementation)
    except Exception as error:
        raise ConfigError(f"{path}: {error}") from error


def _model(config: Any) -> Any:
    names: list[str] = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0], None) if names else None
    if names and not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ConfigError(f"transformers has no architecture {names[0]!r}")
    if names:
        return getattr(transformers, names[0])(config)
    try:
        return transformers.AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        text = f"{type(config).__name__} names no architecture, and no causal LM is known for it: set its architectures"
        raise ConfigError(text) from error


def _computed(config: Config, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The buffers that a model computes when it is made, such as rotary frequencies; its weights stay empty."""
    with _Weightless(), _default_dtype(dtype or _dtype(config)):
        model = _model(config)
    return {name: x for name, x in model.named_buffers(remove_duplicate=False) if not x.is_meta}


class _Weightless(TorchFunctionMode):
    """``torch.empty``, of which layers make their weights, gives tensors without data."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return func(*args, **{**(kwargs or {}), **({"device": "meta"} if func is torch.empty else {})})


def _dtype(config: Any) -> torch.dtype:
    wanted = getattr(config, "dtype", None)
    wanted = getattr(torch, wanted, None) if isinstance(wanted, str) else wanted
    return wanted if isinstance(wanted, torch.dtype) else torch.get_default_dtype()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None]:
    """New tensors have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
