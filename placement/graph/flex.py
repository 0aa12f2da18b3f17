"""``flex_attention`` of torch as attention: what its functions of scalars say is worked out of tensors that broadcast.

A ``mask_mod`` is evaluated once, on indices shaped [batch, 1, 1, 1], [heads, 1, 1], [queries, 1] and [keys], where its
``BlockMask`` is made; the blocks themselves are not. A ``score_mod`` runs on the scores and is followed: where it only
scales and caps them, adds numbers or hides keys, that is attention with a scale, a cap or a mask, and nothing reads the
scores. Whatever else it does is written out: scores, softmax, product.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask
from torch.utils import _pytree as pytree

from placement.graph._torch import ONE_BLOCK, flex_replaced, size_key
from placement.graph.attention import CAPPED
from placement.graph.scalars import Scores, evaluated, followed
from placement.lang.diagnostics import Diagnostic, PlacementError

Size = int | torch.SymInt
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@contextmanager
def flex_captured() -> Generator[None]:
    """While this is entered, ``flex_attention`` and ``create_block_mask`` run as plain ops, compiled or not."""
    with flex_replaced(_attention, _over_scalars, _no_blocks, _block_mask), _padding_unasked():
        yield


@contextmanager
def _padding_unasked() -> Generator[None]:
    """A mask of padding is made, where transformers would leave one out that hides nothing: no number is known here."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    before = getattr(masks, "fast_all", None)
    if before is None:
        yield
        return
    masks.fast_all = lambda _: False
    try:
        yield
    finally:
        masks.fast_all = before


def refuse_block_masks(given: Mapping[str, Any]) -> None:
    """Raise PlacementError (PLC404) with every argument of the model that is a BlockMask."""
    text = "'{}' is a BlockMask, whose function no later call could be held against"
    hint = "make it in the model's forward, of tensors that are passed"
    names = [name for name, value in given.items() if isinstance(value, BlockMask)]
    if names:
        raise PlacementError([Diagnostic("PLC404", text.format(name), hint=hint) for name in names])


# -- masks ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Mask:
    """A mask_mod, and its tensor [batch or 1, heads or 1, queries, keys]; ``whole`` where it is that in any call."""

    function: MaskMod
    seen: Tensor
    whole: bool

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.function(batch, head, query, key)


class _Made(BlockMask):
    """A mask that is made while the model runs for capture. Its blocks say nothing."""


def _made(mask: _Mask, block_size: tuple[int, int]) -> _Made:
    none = torch.zeros((1, 1, 1, 1), dtype=torch.int32, device=mask.seen.device)
    lengths = mask.seen.shape[-2], mask.seen.shape[-1]
    return _Made(lengths, none[0], none, *(None,) * 6, BLOCK_SIZE=block_size, mask_mod=mask)


def _flatten(made: Any) -> tuple[list[Any], Any]:
    if not isinstance(made, _Made):  # what export puts in its place, to name it
        return [made[0]], made[1]
    mask: Any = made.mask_mod
    return [mask.seen], (mask.function, mask.whole, made.BLOCK_SIZE)


def _unflatten(leaves: Any, context: Any) -> Any:
    (seen,), (function, whole, block_size) = leaves, context
    return _made(_Mask(function, seen, whole), block_size) if isinstance(seen, Tensor) else (seen, context)


# So layers that take one are traced once, and what they share is the mask.
pytree.register_pytree_node(_Made, _flatten, _unflatten)


def _no_blocks(mask: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """In place of the blocks of a mask [batch, heads, queries, keys]: the mask."""
    return mask, None


def _block_mask(
    blocks: tuple[Tensor, None], mask_mod: MaskMod, _: Any, queries_of_block: int, keys_of_block: int
) -> BlockMask:
    batch, heads, queries, keys = blocks[0].shape
    seen, read = evaluated(mask_mod, _indices((batch, heads, queries, keys), blocks[0].device))
    seen = _of_tokens(seen, queries, keys)
    whole = not any(at in read and size == 1 for at, size in enumerate((batch, heads)))
    return _made(_Mask(mask_mod, seen, whole), (queries_of_block, keys_of_block))


def _over_scalars(function: Callable[..., Any], prefix: Sequence[Any], *_: Any, **__: Any) -> Callable[..., Tensor]:
    """In place of what calls a function for each of [batch, heads, queries, keys]: all at once."""

    def over_all(*given: Tensor) -> Tensor:
        scores, ranges = given[: len(prefix)], given[len(prefix) :]
        result, _ = evaluated(function, (*scores, *_apart(ranges)))
        return result.expand([one.shape[0] for one in ranges])

    return over_all


def _indices(sizes: Sequence[Any], device: torch.device) -> tuple[Tensor, ...]:
    return _apart([torch.arange(size, device=device) for size in sizes])


def _apart(ranges: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Each along a dim of its own."""
    made = list(ranges)
    for position in range(len(made)):
        for _ in made[position + 1 :]:
            made[position] = made[position].unsqueeze(-1)
    return tuple(made)


def _of_tokens(seen: Tensor, queries: Size, keys: Size) -> Tensor:
    for _ in range(4 - seen.ndim):
        seen = seen.unsqueeze(0)
    return seen.expand(-1, -1, queries, keys)


# -- attention ------------------------------------------------------------------------------------


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: Mapping[str, Any],
    *_: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """In place of the op: the result, and the logarithms of the sums and the largest scores where they are asked."""
    if query.shape[0] != key.shape[0]:
        key, value = (one.expand(query.shape[0], *one.shape[1:]) for one in (key, value))
    groups = int(query.shape[1] // key.shape[1])
    indices = _indices((*query.shape[:-1], key.shape[-2]), query.device)
    seen = _seen(block_mask, indices)
    exact = torch.float64 if query.dtype is torch.float64 else torch.float32
    scores = (query.to(exact) @ _repeated(key, groups).to(exact).transpose(-2, -1)) * scale
    shape = scores.shape
    scores, form = followed(score_mod, scores, scale, indices)
    for more in form.seen if form is not None else ():
        seen = _of_tokens(more if seen is None else seen & more, query.shape[-2], key.shape[-2])
    plain = _Written(scores.to(exact).expand(shape), seen, _repeated(value, groups).to(query.dtype))
    log2 = 1.0 if kernel_options.get("BACKEND") == "FLASH" else math.log(2)
    sums = plain.scores.logsumexp(-1) / log2 if kernel_options.get("OUTPUT_LOGSUMEXP") else None
    most = plain.scores.amax(-1) / log2 if kernel_options.get("OUTPUT_MAX") else None
    return _result((query, key, value), seen, form, plain), sums, most


def _seen(block_mask: tuple[Any, ...], indices: Sequence[Tensor]) -> Tensor | None:
    """The mask [batch or 1, heads or 1, queries, keys]; None where all is seen."""
    *_, queries_of_block, keys_of_block, mask_mod = block_mask
    if mask_mod is noop_mask:
        if (queries_of_block, keys_of_block) == ONE_BLOCK:
            return None
        text = "a BlockMask without a mask_mod cannot be captured: what its blocks hide is not read"
        raise PlacementError([Diagnostic("PLC407", text, hint="give it a mask_mod, or pass no block_mask")])
    queries, keys = indices[2].shape[0], indices[3].shape[0]
    if isinstance(mask_mod, _Mask) and mask_mod.whole and _alike(mask_mod.seen.shape[-2:], (queries, keys)):
        return mask_mod.seen
    return _of_tokens(evaluated(mask_mod, indices)[0], queries, keys)


def _alike(shape: Sequence[Size], other: Sequence[Size]) -> bool:
    return [size_key(size) for size in shape] == [size_key(size) for size in other]


def _repeated(heads: Tensor, groups: int) -> Tensor:
    """Each head of keys or values several times in a row, for those of a group."""
    if groups == 1:
        return heads
    batch, count, *rest = heads.shape
    return heads.unsqueeze(2).expand(batch, count, groups, *rest).reshape(batch, count * groups, *rest)


class _Written:
    """Attention written out; what is not asked of it is dead."""

    def __init__(self, scores: Tensor, seen: Tensor | None, value: Tensor) -> None:
        self.scores = scores if seen is None else scores.masked_fill(~seen, -math.inf)
        self.value = value

    def probabilities(self) -> Tensor:
        """Of [batch, heads, queries, keys]; 0 for a query that sees no key."""
        blind = self.scores.amax(-1, keepdim=True) == -math.inf
        return self.scores.softmax(-1).masked_fill(blind, 0.0).to(self.value.dtype)


def _result(qkv: tuple[Tensor, Tensor, Tensor], seen: Tensor | None, form: Scores | None, plain: _Written) -> Tensor:
    query, key, _ = qkv
    grouped = query.shape[1] != key.shape[1]
    if form is None or (form.cap is not None and form.added):
        return plain.probabilities() @ plain.value
    if form.cap is not None:
        rest = {"softcap": form.cap, "scale": form.scale, "enable_gqa": grouped}
        return CAPPED(*qkv, seen, plain.probabilities(), plain.value, **rest)
    mask = seen if not form.added else _numbers(form.added, seen, query.dtype)
    return F.scaled_dot_product_attention(*qkv, attn_mask=mask, scale=form.scale, enable_gqa=grouped)


def _numbers(added: Sequence[Tensor], seen: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A mask of numbers to add: in float32 where attention itself is in less."""
    exact = dtype if dtype is torch.float64 else torch.float32
    total = added[0].to(exact)
    for more in added[1:]:
        total = total + more.to(exact)
    for _ in range(4 - total.ndim):
        total = total.unsqueeze(0)
    return total if seen is None else torch.where(seen, total, -math.inf)
