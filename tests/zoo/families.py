"""Families of transformers as small random models: how each is built, called and placed.

Sizes are no powers of two where that is legal, and no two alike. Every weight is drawn at random: defaults of ones and
zeros would hide a gradient summed twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, CLASSES = 44, 48, 36, 8, 4, 5
BATCH, SEQ, TARGET = 3, 12, 8
IMAGE, PATCH = 12, 4

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One row of the table.

    model, config: names of classes of transformers. given: what a call is given, a key of ``CALLS``. column, row:
    linear modules, by paths, whose weights are cut in ``out`` and in ``in``; vocab: tables cut in ``vocab``; more:
    further lines. norms: modules whose output is Shard(seq) in sequence parallelism, and with ``@DIM`` another dim.
    refused: the code of the diagnostic and some of its words, where there is no plan. trained: parts of names of
    parameters that alone keep a gradient; all do where none is given. alike: a family that shows the same, so that
    this one is left to the bench.
    """

    name: str
    model: str
    config: str
    sizes: Config
    given: str = "tokens"
    column: str = ""
    row: str = ""
    vocab: str = ""
    more: str = ""
    norms: str = ""
    refused: tuple[str, str] | None = None
    trained: tuple[str, ...] = ()
    alike: str = ""
    nested: tuple[str, ...] = field(default=("text_config", "vision_config", "encoder", "decoder"), repr=False)

    def spec(self, mode: str) -> str:
        """The page of placements: ``tp``, or ``sp`` with the norms' outputs cut too."""
        lines = ["mesh tp", *CALLS[self.given].lines]
        lines += [f"param {path}.* : Shard(out) @ tp" for path in self.column.split()]
        lines += [f"param {path}.weight : Shard(in) @ tp" for path in self.row.split()]
        lines += [f"param {path}.weight : [vocab, hidden], Shard(vocab) @ tp" for path in self.vocab.split()]
        lines += filter(None, map(str.strip, self.more.splitlines()))
        if mode == "sp":
            for word in self.norms.split():
                path, _, dim = word.partition("@")
                lines.append(f"value {path} : Shard({dim or 'seq'}) @ tp")
        return "\n".join(lines) + "\n"

    def modes(self) -> tuple[str, ...]:
        return ("tp", "sp") if self.norms else ("tp",)

    @property
    def unit(self) -> int:
        """How many layers one of ``build``'s has: two where they alternate."""
        return max((int(v) for v in self.sizes.values() if isinstance(v, PerLayer)), default=0)

    def build(self, layers: int = 1) -> nn.Module:
        """The model in training mode, float64, the same weights every time, without dropout."""
        config = getattr(transformers, self.config)(**{k: _layers(v, layers) for k, v in self.sizes.items()})
        for part in (config, *(getattr(config, name, None) for name in self.nested)):
            for name in _DROPS:
                if isinstance(getattr(part, name, None), float):
                    setattr(part, name, 0.0)
        model = getattr(transformers, self.model)(config).to(torch.float64).train()
        draw = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
                parameter.requires_grad_(not self.trained or any(part in name for part in self.trained))
        return model

    def inputs(self, seed: int = 0) -> dict[str, Any]:
        """One call's arguments; those of floats require a gradient where the model allows it."""
        return CALLS[self.given].make(_Draw(seed))


_DROPS = (
    "activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "classifier_dropout",
    "dropout", "dropout_rate", "embd_pdrop", "embed_dropout", "embedding_dropout", "feat_proj_dropout", "ff_dropout",
    "final_dropout", "head_dropout", "hidden_dropout", "hidden_dropout_prob", "layerdrop", "mlp_dropout",
    "path_dropout", "positional_dropout", "resid_dropout", "resid_pdrop", "residual_dropout",
)  # fmt: skip


class PerLayer(int):
    """A number of layers: times as many as are asked for."""


class EachLayer(list[Any]):
    """What a config says of layer after layer: said again for those that are added."""


def _layers(value: Any, layers: int) -> Any:
    if isinstance(value, PerLayer):
        return int(value) * layers
    if isinstance(value, list):
        return [_layers(item, layers) for item in value] * (layers if isinstance(value, EachLayer) else 1)
    return value


L = PerLayer(1)
TWO = PerLayer(2)

# -- what calls are given ---------------------------------------------------------------------------


class _Draw:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(100 + seed)

    def ids(self, *shape: int, high: int = VOCAB) -> Tensor:
        return torch.randint(3, high, shape, generator=self.generator)

    def labels(self, *shape: int) -> Tensor:
        """Labels of which a few are ignored, unequally over the sequence."""
        labels = self.ids(*shape)
        labels[0, : shape[1] // 3] = -100
        return labels

    def floats(self, *shape: int, grad: bool = True) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).requires_grad_(grad)


@dataclass(frozen=True)
class _Given:
    lines: tuple[str, ...]
    make: Any


def _pair(draw: _Draw) -> dict[str, Any]:
    ids = draw.ids(4, SEQ)
    ids[:, -1] = 2  # where a text ends
    return {"input_ids": ids, "pixel_values": draw.floats(4, 3, IMAGE, IMAGE), "return_loss": True}


def _image_and_text(draw: _Draw) -> dict[str, Any]:
    ids = draw.ids(BATCH, SEQ + 8).clamp(min=4)
    ids[:, :9] = 3  # an image has nine patches
    kinds = (torch.arange(SEQ + 8) > 12).long().expand(BATCH, -1)
    images = draw.floats(BATCH, 3, IMAGE, IMAGE)
    return {"input_ids": ids, "pixel_values": images, "labels": draw.ids(BATCH, SEQ + 8), "token_type_ids": kinds}


def _without(name: str, make: Any) -> Any:
    return lambda draw: {k: v for k, v in make(draw).items() if k != name}


_TOKENS = ("input input_ids, labels : [batch, seq]",)
_TARGETS = "input decoder_input_ids, labels : [batch, tgt]"
_PIXELS = "input pixel_values : [batch, channels, height, width]"
CALLS: dict[str, _Given] = {
    "tokens": _Given(_TOKENS, lambda d: {"input_ids": d.ids(BATCH, SEQ), "labels": d.labels(BATCH, SEQ)}),
    "embeddings": _Given(
        ("input inputs_embeds : [batch, seq, hidden]", "input labels : [batch, seq]"),
        lambda d: {"inputs_embeds": d.floats(BATCH, SEQ, HIDDEN), "labels": d.labels(BATCH, SEQ)},
    ),
    "source and target": _Given(
        ("input input_ids : [batch, seq]", _TARGETS),
        lambda d: {
            "input_ids": d.ids(BATCH, SEQ), "decoder_input_ids": d.ids(BATCH, TARGET),
            "labels": d.labels(BATCH, TARGET),
        },
    ),
    "image": _Given((_PIXELS,), lambda d: {"pixel_values": d.floats(BATCH, 3, IMAGE, IMAGE)}),
    "image of fixed size": _Given((), lambda d: {"pixel_values": d.floats(BATCH, 3, IMAGE, IMAGE)}),
    "image and class": _Given(
        (_PIXELS, "input labels : [batch]"),
        lambda d: {"pixel_values": d.floats(BATCH, 3, IMAGE, IMAGE), "labels": d.ids(BATCH, high=CLASSES)},
    ),
    "16 by 16 and class": _Given(
        ("input labels : [batch]",),
        lambda d: {"pixel_values": d.floats(2, 3, 16, 16), "labels": d.ids(2, high=CLASSES)},
    ),
    "frames and class": _Given(
        ("input pixel_values : [batch, frames, channels, height, width]", "input labels : [batch]"),
        lambda d: {"pixel_values": d.floats(2, 4, 3, IMAGE, IMAGE), "labels": d.ids(2, high=CLASSES)},
    ),
    "text and image": _Given(("input input_ids : [texts, seq]", _PIXELS), _pair),
    "image in text": _Given(_TOKENS, _without("token_type_ids", _image_and_text)),
    "image in typed text": _Given((*_TOKENS, "input token_type_ids : [batch, seq]"), _image_and_text),
    "spectrum and target": _Given(  # of fixed sizes: the model takes spectra of one length only
        (),
        lambda d: {
            "input_features": d.floats(BATCH, 6, 24), "decoder_input_ids": d.ids(BATCH, TARGET),
            "labels": d.labels(BATCH, TARGET),
        },
    ),
    "spectrum and class": _Given(
        ("input input_values : [batch, time, mel]", "input labels : [batch]"),
        lambda d: {"input_values": d.floats(BATCH, 12, 8), "labels": d.ids(BATCH, high=CLASSES)},
    ),
    "sound": _Given(
        ("input input_values : [batch, time]",), lambda d: {"input_values": d.floats(BATCH, 50, grad=False)},
    ),
    "sound and labels": _Given(
        ("input input_values : [batch, time]", "input labels : [batch, tgt]"),
        lambda d: {"input_values": d.floats(BATCH, 50, grad=False), "labels": d.ids(BATCH, 3)},
    ),
    "series": _Given(
        ("input past_values : [batch, time, channels]",),
        lambda d: {"past_values": d.floats(BATCH, 16, 2), "future_values": d.floats(BATCH, 4, 2, grad=False)},
    ),
}  # fmt: skip
