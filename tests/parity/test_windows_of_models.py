"""What models of transformers, and masks as models write them, hide from a query, where ranks hold only their tokens.

Windows before a token and on both sides of it, padding at either end, packed documents; masks as truths, as numbers
that are added, filled in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import placement
from placement import api
from placement import runtime as rt
from placement.graph.capture import capture
from placement.graph.precision import lifted
from tests.parity.axes import explained
from tests.parity.measure import Measured, gradients
from tests.zoo.families import BATCH, HEADS, HIDDEN, KV_HEADS, VOCAB
from tests.zoo.parity import step

SEQ = 24
HEAD = "mesh cp over quick\nlink quick = 10 GB/s, 1 ns\n"
ZIGZAG = ", zigzag"
_SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "vocab_size": VOCAB, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_BART = {
    "vocab_size": VOCAB, "d_model": HIDDEN, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "dropout": 0.0,
    "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip


def gemma() -> nn.Module:
    """A layer that sees five tokens."""
    kinds = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": 5}
    config = transformers.Gemma3TextConfig(**{**_SIZES, **kinds}, num_key_value_heads=KV_HEADS, head_dim=6)
    return transformers.Gemma3ForCausalLM(config)


def modernbert() -> nn.Module:
    """A layer that sees all, and one that sees two tokens on either side."""
    words = {"cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2, "local_attention": 4}
    return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**_SIZES, **words))


def bart() -> nn.Module:
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**_BART))


def drawn(model: nn.Module) -> nn.Module:
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return model.double().train()


def tokens(names: str, seed: int = 0) -> dict[str, Tensor]:
    """Ids and labels, or these and which tokens are none, or where documents' positions start again."""
    draw = torch.Generator().manual_seed(seed)
    given = {name: torch.randint(3, VOCAB, (BATCH, SEQ), generator=draw) for name in names.split()}
    for name in given:
        if name.endswith("attention_mask"):  # the rows begin, or end, with padding
            at, ends = torch.arange(SEQ), torch.tensor([[5, SEQ], [0, 11], [2, 20]])
            given[name] = ((at >= ends[:, :1]) & (at < ends[:, 1:])).long()
        if name.endswith("position_ids"):
            rows = ([7, 17], [10, 3, 11], [24])
            given[name] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    return given


def measured(model: nn.Module, given: Mapping[str, Tensor], n: int, spec: str, dims: Mapping[str, Any]) -> Any:
    """A step next to one device; what it sends is what the plan says."""
    with lifted(torch.float64):
        graph = capture(model, given, dims)
        with mock.patch.object(api, "capture", return_value=graph):
            program = placement.compile(model, rt.simulate(cp=n), spec, example=given)
    found = Measured()
    model.zero_grad()
    want, into = step(model, given)
    with rt.record() as log:
        got, back = step(program, given)
    found.note("output", got, want)
    found.note("input gradient", back, into)
    found.note("gradient", program.full_gradients(), gradients(model))
    explained(log, program.plan)
    assert not found.problems()
    return program


# By model: its call, what of it has the source's dims, where it attends; then a way, ranks and an order.
MODELS: dict[str, tuple[Callable[[], nn.Module], str, str, str, str, int, str]] = {
    "gemma 3, packed": (
        gemma, "input_ids labels position_ids", "", "model.layers.*.self_attn", "all_to_all", 2, ZIGZAG
    ),
    "modernbert, padded": (
        modernbert, "input_ids labels attention_mask", "", "model.layers.*.attn", "ring", 3, ZIGZAG
    ),
    "bart's decoder, padded": (
        bart, "decoder_input_ids labels decoder_attention_mask", "input_ids", "model.decoder.layers.*.self_attn",
        "gather", 2, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str) -> None:
    build, call, source, attends, way, n, order = MODELS[name]
    model, cut = drawn(build()), call.split()
    given = {**tokens(call), **(tokens(source, seed=1) if source else {})}
    dims = dict.fromkeys(cut, ("batch", "seq")) | ({source: ("batch", "src")} if source else {})
    spec = f"{HEAD}input {', '.join(cut)} : [batch, seq], Shard(seq{order}) @ cp\nstrategy {attends} : {way} @ cp\n"
    spec += f"input {source} : [batch, src]\n" if source else ""
    program = measured(model, given, n, spec, dims)
    call = {"ring": "rt.ring_attention", "all_to_all": "rt.all_to_all", "gather": "rt.visible"}[way]
    assert call in program.source


# -- masks as models write them ---------------------------------------------------------------------

Mask = Callable[[int, Tensor, Tensor], Tensor]  # of the length, what is kept of a row, and documents


def numbers(s: int, _: Tensor, __: Tensor) -> Tensor:
    """As torch's own transformer has it."""
    return torch.triu(torch.full((s, s), -torch.inf, dtype=torch.float64), diagonal=1)


def of_both(s: int, kept: Tensor, _: Tensor) -> Tensor:
    """As torch's own transformer has it, with padding added."""
    padding = torch.zeros(kept.shape, dtype=torch.float64).masked_fill_(kept == 0, -torch.inf)
    return numbers(s, kept, kept) + padding[:, None, None]


def least(s: int, kept: Tensor, _: Tensor) -> Tensor:
    """A window in the least numbers that there are."""
    at, few = torch.arange(s), torch.finfo(torch.float64).min
    mask = torch.full((s, s), few, dtype=torch.float64)
    mask.masked_fill_(at < (at + 1).view(s, 1), 0)
    mask = mask[None, None].expand(kept.shape[0], 1, s, s)
    return mask.masked_fill((1 - torch.triu(torch.ones_like(mask, dtype=torch.int), diagonal=-4)).bool(), few)


def in_place(s: int, kept: Tensor, documents: Tensor) -> Tensor:
    mask = torch.ones(s, s, dtype=torch.bool).tril()[None, None].repeat(kept.shape[0], 1, 1, 1)
    mask &= kept[:, None, None].bool()
    mask &= documents[:, None, :, None] == documents[:, None, None]
    return mask


def segments(s: int, kept: Tensor, documents: Tensor) -> Tensor:
    """Documents and padding in one mark, and zeros for what is seen."""
    marks = documents * kept
    seen = (marks[:, :, None] == marks[:, None]) & (marks != 0)[:, None] & torch.ones(s, s).tril().bool()
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf).unsqueeze(1)


class Attention(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.mask = mask

    def forward(self, x: Tensor, kept: Tensor, documents: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mask = self.mask(x.shape[1], kept, documents)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.attention = Attention(mask)

    def forward(self, **given: Tensor) -> dict[str, Tensor]:
        return {"y": self.attention(**given)}


@pytest.mark.parametrize("way", ["gather", "ring", "all_to_all"])
@pytest.mark.parametrize("mask", [numbers, of_both, least, in_place, segments])
def test_masks_as_models_write_them(mask: Mask, way: str) -> None:
    model, at = drawn(Model(mask)), torch.arange(SEQ)
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    kept = tokens("attention_mask")["attention_mask"]
    documents = 1 + (at >= torch.tensor([[7], [10], [23]])).long().cumsum(0)[:, at] // 2
    given = {"x": x.requires_grad_(), "kept": kept, "documents": documents}
    dims = {"x": ("batch", "seq", "width"), "kept": ("batch", "seq"), "documents": ("batch", "seq")}
    spec = (
        HEAD
        + f"strategy attention : {way} @ cp\n"
        + "".join(f"input {name} : [{', '.join(names)}], Shard(seq{ZIGZAG}) @ cp\n" for name, names in dims.items())
    )
    measured(model, given, 2, spec, dims)
