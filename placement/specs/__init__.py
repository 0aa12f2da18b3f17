"""Specs that come with the package, found by the class of the model: what ``compile`` takes where it is given none.

Each is an ordinary file beside this one. It places weights on ``tp`` and batches on ``dp``, whichever of the two the
mesh has, and leaves the rest to the solver.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from placement.lang.diagnostics import Diagnostic
from placement.lang.parser import parse
from placement.lang.spec import InputLine, Name, ParamLine, Spec

if TYPE_CHECKING:
    from torch import nn

_HERE = Path(__file__).parent
_ROLE = re.compile(r"For[A-Z]\w*$|LMHead\w*$|(Vision|Text)?Model(With\w+)?$|PreTrainedModel$")

_FAMILIES = {
    "bart": "Bart MBart Pegasus M2M100 Whisper",
    "bert": "Bert Roberta Electra RoFormer MegatronBert Esm",
    "deepseek": "DeepseekV2 DeepseekV3 MiniCPM3",
    "distilbert": "DistilBert",
    "falcon": "Falcon Mpt",
    "gpt2": "GPT2 GPTJ GPTNeo",
    "gpt_neox": "GPTNeoX",
    "llama": (
        "Llama Mistral Ministral Qwen2 Qwen3 Gemma Gemma2 Gemma3 Olmo Olmo2 Granite SmolLM3 Exaone4 Helium "
        "HunYuanDenseV1 Ernie4_5 SeedOss Nemotron Arcee Apertus DiffLlama Cohere Cohere2 StableLm Glm Glm4"
    ),
    "modernbert": "ModernBert",
    "opt": "OPT XGLM",
    "phi": "Phi Persimmon Starcoder2",
    "phi3": "Phi3",
    "t5": "T5 UMT5",
    "vit": "ViT DeiT Dinov2 Beit",
}
_FILES = {family: name for name, families in _FAMILIES.items() for family in families.split()}


def families() -> Mapping[str, str]:
    """The name of a spec by the family that it is for, as classes of models begin: ``{"Llama": "llama", ...}``."""
    return dict(_FILES)


def find(model: nn.Module) -> Spec | None:
    """The whole spec for a model's class or one that it derives from, None where there is none."""
    for kind in type(model).__mro__:
        name = _FILES.get(_ROLE.sub("", kind.__name__, count=1))
        if name is not None and _ROLE.search(kind.__name__):
            file = f"{name}.plc"
            return parse((_HERE / file).read_text(encoding="utf-8"), file)
    return None


def ready(model: nn.Module, axes: Iterable[str], inputs: Mapping[str, object]) -> Spec | None:
    """The spec for a model, without the lines of axes, inputs and parameters that are not there.

    ``inputs`` are those of a call by name. One that has not the dims of its line, or not the sizes of those before
    it, is left out, as is a second name of a parameter that the model ties. None also where none of the model's
    weights would be placed, as in a part of the model that the spec is for.
    """
    spec = find(model)
    if spec is None:
        return None
    known = {str(axis.name) for axis in spec.axes}
    if known >= set(axes):  # else it is told that there is another
        spec = dataclasses.replace(spec, axes=tuple(axis for axis in spec.axes if str(axis.name) in axes))
    params = _first_of_ties(model, spec.params)
    if not params:
        return None
    text = f"no spec was given: {spec.file}, which comes with the package, is used for {type(model).__name__}"
    return dataclasses.replace(
        spec,
        notes=(Diagnostic("PLC408", text, severity="note"),),
        inputs=tuple(_on(spec, _given(spec.inputs, inputs))),
        params=tuple(line for line in _on(spec, params) if line.placed or line.dims),
    )


def _given(lines: Iterable[InputLine], inputs: Mapping[str, object]) -> Iterator[InputLine]:
    """The lines with the names of inputs that fit them."""
    sizes: dict[str, int] = {}
    for line in lines:
        names: list[Name] = []
        for name in line.names:
            shape = getattr(inputs.get(str(name)), "shape", None)
            dims = tuple(map(str, line.dims or ()))
            if shape is None or len(shape) != len(dims):
                continue
            if all(sizes.get(dim, size) == size for dim, size in zip(dims, shape, strict=True)):
                sizes.update(zip(dims, shape, strict=True))
                names.append(name)
        if names:
            yield dataclasses.replace(line, names=tuple(names))


def _first_of_ties(model: nn.Module, lines: Iterable[ParamLine]) -> list[ParamLine]:
    """The lines that match something, each parameter but by the first that does."""
    named = [(name, id(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)]
    placed: set[int] = set()
    found: list[ParamLine] = []
    for line in lines:
        own = {parameter for name, parameter in named if line.pattern.matches(name)}
        if own - placed:
            found.append(line)
        placed |= own
    return found


Line = TypeVar("Line", bound=Any)


def _on(spec: Spec, lines: Iterable[Line]) -> list[Line]:
    """The lines with the placements on the axes of the spec alone."""
    names = {str(axis.name) for axis in spec.axes}
    return [
        dataclasses.replace(line, placed=tuple(p for p in line.placed if spec.axis_of(p) in names)) for line in lines
    ]
