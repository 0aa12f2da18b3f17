"""Where the elements of rearranged tensors come from, each by its own number."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from placement.graph._torch import schema_name
from placement.graph.capture import capture
from placement.graph.conditions import Affine
from placement.graph.ir import arguments
from placement.graph.places import REARRANGED

View = Callable[[Tensor], Tensor]

VIEWS: dict[str, View] = {  # of [3, 4, 1, 5]
    "permute": lambda x: x.permute(2, -1, 0, 1),
    "transpose": lambda x: x.transpose(-1, 0),
    "swapdims": lambda x: x.swapdims(1, 2),
    "mT": lambda x: x.mT,
    "mH": lambda x: x.mH,
    "adjoint": lambda x: x.adjoint(),
    "matrix_H": lambda x: x[:, 0, 0].H,
    "t": lambda x: x[0, :, 0].t(),
    "numpy_T": lambda x: x[0, :, 0].T,
    "movedim, one": lambda x: x.movedim(0, -2),
    "movedim, several": lambda x: x.movedim((0, 3), (3, 1)),
    "unsqueeze": lambda x: x.unsqueeze(-2),
    "expand": lambda x: x.expand(2, 3, 4, 6, 5),
    "broadcast_to": lambda x: torch.broadcast_to(x, (2, 3, 4, 6, 5)),
    "slice": lambda x: x[:, :, :, 1:],
    "slice, steps": lambda x: x[:, 1:4:2],
    "slice, from the end": lambda x: x[:, -3:-1],
    "slice, from before the start": lambda x: x[:, -9:3],
    "narrow": lambda x: x.narrow(-1, 2, 3),
    "narrow, from the end": lambda x: x.narrow(1, -2, 2),
    "select": lambda x: x.select(1, 2),
    "select, the last": lambda x: x[..., -1],
    "flip": lambda x: x.flip(0, -1),
    "repeat": lambda x: x.repeat(2, 1, 1, 6, 1),
    "tile": lambda x: x.tile(6, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(6, -2),
    "reshape": lambda x: x.reshape(1, 3, 4, 5, 1),
    "reshape, a dim less": lambda x: x.squeeze(),
}
NOT_EACH: dict[str, View] = {  # places that no index alone tells
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, -1),
    "repeat_interleave, flat": lambda x: x.repeat_interleave(2),
    "reshape": lambda x: x.reshape(12, 5),
    "reshape, exchanged": lambda x: x.reshape(4, 3, 5),
}
SHAPE = (3, 4, 1, 5)


class Seen(nn.Module):
    def __init__(self, view: View) -> None:
        super().__init__()
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        return self.view(x)


def places(view: View, x: Tensor) -> tuple[str, list[Affine | None] | None]:
    """Of the last op, whose operand is what was taken of ``x`` before."""
    node = capture(Seen(view), {"x": x}).nodes[-1]
    name, given = schema_name(node.op)[1], arguments(node)
    found = REARRANGED[name](given["self"], node.results[0], given)
    return name, None if found is None else list(found)


@pytest.mark.parametrize("kind", VIEWS)
def test_each_element_comes_from_its_place(kind: str) -> None:
    x = torch.arange(60).reshape(SHAPE)
    result, source = VIEWS[kind](x), {"matrix_H": x[:, 0, 0], "t": x[0, :, 0], "numpy_T": x[0, :, 0]}.get(kind, x)
    name, found = places(VIEWS[kind], x)
    assert name == kind.split(",", 1)[0]
    assert found is not None
    for index in itertools.product(*map(range, result.shape)):
        at = [place.const + sum(f * index[d] for d, f in place.by.items()) for place in found if place is not None]
        assert source[tuple(at)] == result[index]


@pytest.mark.parametrize("kind", NOT_EACH)
def test_what_no_index_tells(kind: str) -> None:
    name, found = places(NOT_EACH[kind], torch.arange(60).reshape(SHAPE))
    assert name == kind.split(",", 1)[0]
    assert found is None or None in found


def test_sizes_that_are_no_numbers() -> None:
    """Of a dim whose size the call says, the end is nowhere."""
    x = torch.arange(12).reshape(3, 4)
    for view in (lambda x: x.flip(1), lambda x: x[:, -1], lambda x: x[:, -2:]):
        node = capture(Seen(view), {"x": x}, {"x": ("a", "b")}).nodes[-1]
        given = arguments(node)
        found = REARRANGED[schema_name(node.op)[1]](given["self"], node.results[0], given)
        assert found is not None
        assert (found[0], found[1]) == (Affine(0, {0: 1}), None)
