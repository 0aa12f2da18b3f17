"""Parameters that are kept in blocks: gathered for use, and not kept whole but gathered again for the backward.

An op keeps for its backward what it was given: the whole parameter, which would undo what storing blocks saves. So
during a call of the program what is about to be saved is looked at. A tensor that lies in a gathered parameter is
saved as the block and how to gather it, and unpacked by gathering once more.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from placement.runtime import trace
from placement.runtime._torch import eager, version
from placement.runtime.axis import Axis, Step
from placement.runtime.cuts import Cut, joined

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Recipe:
    """How a gathered parameter is made again: the blocks that this process has, and where they go."""

    axis: Axis
    cut: Cut
    blocks: tuple[Tensor, ...]
    versions: tuple[int, ...]

    def again(self) -> Tensor:
        """The whole parameter. Raises RuntimeError where a block has been written to since."""
        if any(version(block) != before for block, before in zip(self.blocks, self.versions, strict=True)):
            raise RuntimeError(
                "a stored parameter was changed in place between forward and backward, which gathers it again"
            )
        blocks = [block.detach() for block in self.blocks]
        step = Step("all_gather", self.cut)
        if len(blocks) == 1:
            return self.axis.run(step, blocks[0])
        if self.axis.recorded and self.axis.rank == 0:  # what ranks in one process do together counts once
            trace.note("all_gather", self.axis.name, sum(b.numel() * b.element_size() for b in blocks))
        return joined(torch.stack(blocks), self.cut, "all_gather")


@dataclass(frozen=True, slots=True)
class _Saved:
    """A view of a gathered parameter, as it is saved."""

    recipe: _Recipe
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Gathered:
    """The gathered parameters that are alive, by where their memory begins."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], _Recipe]] = {}

    def add(self, whole: Tensor, recipe: _Recipe) -> None:
        place = whole.untyped_storage().data_ptr()
        # Forgotten with the tensor: its memory may then be another's, and the recipe holds on to the blocks.
        self._known[place] = weakref.ref(whole, lambda _: self._known.pop(place, None)), recipe

    def find(self, x: Tensor) -> _Recipe | None:
        known = self._known.get(x.untyped_storage().data_ptr())
        return None if known is None else known[1]


_gathered = _Gathered()


def gathered(
    x: Tensor, axis: Axis, dim: int, outer: int = 1, segments: tuple[int, ...] = (), to: Literal["R", "I"] = "R"
) -> Tensor:
    """S → R or S → I of a parameter that is stored in blocks: as ``all_gather``, and again in the backward.

    Volume 1 + 1, and 1 more in the backward of each op that needs the parameter there.
    """
    cut = Cut(dim, outer, segments)
    forward, backward = Step("all_gather", cut), Step("reduce_scatter" if to == "R" else "split", cut)
    if torch.compiler.is_compiling():
        return axis.exchange_again(forward, backward, x)
    whole = axis.exchange(forward, backward, x)
    # A frozen one too: what multiplies it may have a gradient.
    if whole is not x and torch.is_grad_enabled() and axis.size > 1:
        blocks: Sequence[Tensor] = axis.together(
            ("blocks of", forward, tuple(x.shape)), x, lambda xs: [tuple(xs)] * len(xs)
        )
        _gathered.add(whole, _Recipe(axis, cut, tuple(blocks), tuple(version(b) for b in blocks)))
    return whole


@eager
def gathered_again() -> AbstractContextManager[None]:
    """While this is entered, gathered parameters are not saved for the backward but how to gather them."""
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


@eager
def _pack(x: Tensor) -> Any:
    recipe = _gathered.find(x) if x.layout is torch.strided else None
    return x if recipe is None else _Saved(recipe, x.size(), x.stride(), int(x.storage_offset()))


@eager
def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, _Saved):
        return saved
    return saved.recipe.again().as_strided(saved.size, saved.stride, saved.offset)
