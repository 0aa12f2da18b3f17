"""Masks that are spelled out from positions and marks become what attention says of itself, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import placement
from placement.graph.capture import capture
from placement.graph.ir import arguments
from placement.graph.visibility import FALSE, TRUE, Affine
from tests.cases.toys import close, gradients

BATCH, HEADS, SEQ, WIDTH = 2, 2, 5, 4
Mask = Callable[[int, Tensor], Tensor]


def at(s: int) -> Tensor:
    return torch.arange(s)


def later(s: int) -> Tensor:
    return at(s)[:, None] <= at(s)


def in_place(s: int, _: Tensor) -> Tensor:
    mask = torch.ones(s, s, dtype=torch.bool)[None]
    mask &= up_to(s)
    return mask


def written(s: int, _: Tensor) -> Tensor:
    mask = torch.zeros(s, s)
    mask[~up_to(s)] = -torch.inf
    return mask


def apart(s: int) -> Tensor:
    return torch.arange(s)[:, None] - torch.arange(s)[None]


def up_to(s: int) -> Tensor:
    return torch.arange(s)[:, None] >= torch.arange(s)[None, :]


def looked_up(s: int, lengths: Tensor) -> Tensor:
    """As a vmap over batch, heads, queries and keys comes out, with documents found from positions."""
    positions = torch.arange(s).unsqueeze(0).expand(lengths.shape[0], -1)
    documents = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    b = torch.arange(lengths.shape[0])[:, None, None, None]
    q, k = torch.arange(s)[None, None, :, None], torch.arange(s)[None, None, None, :]
    seen = torch.ones((), dtype=torch.bool) & (positions[b, k] <= positions[b, q])
    return seen & (documents[b, q] == documents[b, k])


CAUSAL: dict[str, Mask] = {
    "compared": lambda s, _: up_to(s),
    "a triangle": lambda s, _: torch.ones(s, s, dtype=torch.bool).tril(),
    "of four dims": lambda s, x: up_to(s)[None, None].expand(x.shape[0], HEADS, s, s),
    "not what comes later": lambda s, _: ~torch.ones(s, s, dtype=torch.bool).triu(diagonal=1),
    "less than the next": lambda s, _: torch.arange(s)[None] < torch.arange(1, s + 1)[:, None],
    "steps of two": lambda s, _: torch.arange(0, 2 * s, 2)[None] - torch.arange(0, 2 * s, 2)[:, None] < 1,
    "looked up": looked_up,
    # rearranged
    "permuted": lambda s, _: later(s).permute(1, 0),
    "transposed": lambda s, _: later(s).mT,
    "reversed": lambda s, _: later(s).T,
    "a matrix turned": lambda s, _: later(s).t(),
    "swapped": lambda s, _: later(s).swapaxes(0, 1),
    "moved": lambda s, _: later(s)[None].movedim(-1, 1).movedim((1, 0), (-2, -3)),
    "squeezed": lambda s, _: up_to(s)[None, :, None].squeeze(2).squeeze(0),
    "flattened": lambda s, _: up_to(s)[None, None].flatten(0, 1),
    "a shape taken back": lambda s, _: torch.arange(s).expand(4, s).reshape(4 * s).view(4, s)[0][:, None] >= at(s),
    "narrowed": lambda s, _: up_to(s + 2).narrow(0, 1, s).narrow(1, 1, s),
    "the last of several": lambda s, _: up_to(s).expand(3, s, s)[-1],
    "repeated": lambda s, x: up_to(s)[None, None].repeat(x.shape[0], HEADS, 1, 1),
    "laid as tiles": lambda s, x: up_to(s)[None, None].tile(x.shape[0], 1, 1, 1),
    "each repeated": lambda s, x: up_to(s)[None, None].repeat_interleave(HEADS, 1),
    "broadcast": lambda s, x: torch.broadcast_to(up_to(s), (x.shape[0], HEADS, s, s)),
    # truths of truths
    "chosen": lambda s, _: torch.where(up_to(s), True, False),
    "neither of two": lambda s, _: ~(~up_to(s) | (torch.arange(s) < 0)),
    "a product": lambda s, _: up_to(s) * up_to(s),
    "filled": lambda s, _: torch.ones(s, s, dtype=torch.bool).masked_fill(~up_to(s), False),
    "other than the opposite": lambda s, _: ~up_to(s) ^ True,
    "a triangle of ones": lambda s, _: torch.ones(s, s, dtype=torch.int64).tril() == 1,
    "integers negated": lambda s, _: (-torch.arange(s))[:, None] <= -torch.arange(s),
    "integers times two": lambda s, _: (2 * torch.arange(s))[:, None] >= torch.arange(s) * 2,
    "in place": in_place,
    "a truth of no shape": lambda s, _: torch.tensor(True) & up_to(s),
    # numbers that are added
    "numbers of no shape": lambda s, _: torch.where(up_to(s), torch.tensor(0.0), torch.tensor(-torch.inf)),
    "numbers written": written,
    "numbers": lambda s, _: torch.zeros(s, s).masked_fill(~up_to(s), -torch.inf),
    "one of two numbers": lambda s, _: torch.where(up_to(s), 0.0, -torch.inf),
    "a number or another's": lambda s, _: torch.where(up_to(s), torch.zeros(s, s), -torch.inf),
    "a triangle of numbers": lambda s, _: torch.full((s, s), -torch.inf).triu(1),
    "a logarithm": lambda s, _: up_to(s).double().log(),
    "a sum": lambda s, _: torch.full((s, s), -torch.inf).triu(1) + torch.full((s, s), -torch.inf).triu(2),
    "where a triangle is zero": lambda s, _: torch.zeros(s, s).masked_fill(torch.ones(s, s).tril() == 0, -torch.inf),
    "the least number": lambda s, _: (1.0 - torch.ones(s, s).tril()) * torch.finfo(torch.float32).min,
    "numbers filled in place": lambda s, _: torch.full((s, s), -1e38).masked_fill_(up_to(s), 0),
}
EVERYTHING: dict[str, Mask] = {
    "zeros to be added": lambda s, _: torch.zeros(s, s),
    "ones": lambda s, _: torch.ones(s, s, dtype=torch.bool),
    "a true comparison": lambda s, _: torch.arange(s)[None].expand(s, s) >= 0,
}


def padding(s: int, lengths: Tensor) -> Tensor:
    return (at(s) >= lengths[:, None])[:, None, None]


def documents(s: int, lengths: Tensor) -> Tensor:
    """[batch, tokens], out of where each one's second document starts."""
    return (torch.arange(s)[None] >= lengths[:, None]).long()


def alike(marks: Tensor) -> Tensor:
    return marks[:, None, :, None] == marks[:, None, None]


def of_positions(s: int, x: Tensor) -> Tensor:
    """As ``looked_up``, with positions that are computed from data."""
    ids, k = documents(s, x), torch.arange(s)
    b = torch.arange(x.shape[0])[:, None, None, None]
    q, k = k[None, None, :, None], k[None, None, None, :]
    return (ids[b, k] <= ids[b, q]) & (k > q - 3)


# What each says: bounds before and after a query, comparisons of marks, and marks of keys alone.
SAID: dict[str, tuple[Mask, tuple[int | None, int | None, tuple[str, ...], int]]] = {
    "the next one too": (lambda s, _: torch.ones(s, s, dtype=torch.bool).tril(diagonal=1), (None, 1, (), 0)),
    "a window": (lambda s, _: up_to(s) & (apart(s) < 3), (2, 0, (), 0)),
    "a window both ways": (lambda s, _: apart(s).abs() <= 2, (2, 2, (), 0)),
    "not beyond a distance": (lambda s, _: ~(apart(s).abs() > 2), (2, 2, (), 0)),
    "no distance as long, in numbers": (
        lambda s, _: torch.zeros(s, s).masked_fill(apart(s).abs() >= 3, -torch.inf),
        (2, 2, (), 0),
    ),
    "more than the distance": (lambda s, _: apart(s).abs() < 2, (1, 1, (), 0)),
    "what comes later": (lambda s, _: up_to(s).transpose(-1, 0), (0, None, (), 0)),
    "of the data": (lambda s, x: up_to(s) & (torch.arange(s)[None] < x[:, None, None, None]), (None, 0, (), 1)),
    "padding": (lambda s, x: (torch.arange(s)[None] < x[:, None])[:, None, None], (None, None, (), 1)),
    "padding and some": (
        lambda s, x: (torch.arange(s) < x[:, None])[:, None, None, :] & (torch.arange(s) != 1),
        (None, None, (), 2),
    ),
    "documents": (
        lambda s, x: documents(s, x)[:, None, :, None] == documents(s, x)[:, None, None, :],
        (None, None, ("==",), 0),
    ),
    "documents, exchanged": (
        lambda s, x: ~(documents(s, x)[:, None, None, :] != documents(s, x)[:, None, :, None]) & up_to(s),
        (None, 0, ("==",), 0),
    ),
    "earlier documents": (
        lambda s, x: documents(s, x)[:, None, None, :] < documents(s, x)[:, None, :, None] + 1,
        (None, None, (">",), 0),
    ),
    "not of later documents": (
        lambda s, x: ~(documents(s, x)[:, None, None, :] > documents(s, x)[:, None, :, None]),
        (None, None, (">=",), 0),
    ),
    "chunks": (lambda s, _: (torch.arange(s) // 2)[:, None] == (torch.arange(s) // 2)[None], (None, None, ("==",), 0)),
    "documents in numbers": (
        lambda s, x: torch.where(alike((at(s) - x[:, None]).sign()) & up_to(s), 0.0, torch.finfo(torch.float32).min),
        (None, 0, ("==",), 0),
    ),
    "documents by product": (
        lambda s, x: (alike(documents(s, x)).int() * up_to(s).int()).bool(),
        (None, 0, ("==",), 0),
    ),
    "a row of documents": (lambda s, x: alike((at(s) - x[:, None]).sign()[1:][0][None]), (None, None, ("==",), 0)),
    "padding in numbers": (
        lambda s, x: torch.where((at(s) < x[:, None])[:, None, None], 0.0, -torch.inf) + torch.zeros(s, s),
        (None, None, (), 1),
    ),
    "neither later nor padding": (lambda s, x: ~(~up_to(s) | padding(s, x)), (None, 0, (), 1)),
    "later and padding in numbers": (
        lambda s, x: torch.full((s, s), -torch.inf).triu(1) + torch.zeros(s).masked_fill(padding(s, x), -torch.inf),
        (None, 0, (), 1),
    ),
    "positions": (of_positions, (2, None, (">=",), 0)),
}
KEPT: dict[str, Mask] = {
    "not itself": lambda s, _: torch.arange(s)[:, None] >= torch.arange(s)[None] + (torch.arange(s)[:, None] > 0),
    "beyond a distance": lambda s, _: apart(s).abs() >= 2,
    "one or the other": lambda s, _: up_to(s) | (apart(s) == -1),
    "rows of the data": lambda s, x: (torch.arange(s)[None] < x[:, None])[:, None, :, None] | up_to(s),
    "data of both": lambda s, x: (apart(s)[None] < x[:, None, None])[:, None],
    "by head": lambda s, _: up_to(s)[None] & (torch.arange(HEADS)[:, None, None] >= torch.arange(s)),
    "some that see none, with a finite number": lambda s, _: (1.0 - torch.ones(s, s).tril(-1)) * -3e38,
    "padding by a finite number": lambda s, x: (at(s) >= x[:, None])[:, None, None].double() * -3e38,
    "all hidden by a finite number": lambda s, _: torch.full((s, s), -3e38),
    "a number that a score may make up for": lambda s, _: (1.0 - torch.ones(s, s).tril()) * -3.0,
    "a bias": lambda s, _: torch.ones(s, s).tril(),
    "no number": lambda s, _: torch.zeros(s, s) / (1.0 - torch.ones(s, s).tril()),
    "hidden in two ways": lambda s, _: torch.where(up_to(s), -torch.inf, -1e38),
    "other marks, by a finite number": lambda s, x: torch.where(
        (at(s) - x[:, None]).sign()[:, None, :, None] >= (x[:, None] - at(s)).sign()[:, None, None], 0.0, -1e38
    ),
    "a part of another shape": lambda s, _: torch.arange(s).expand(4, s).reshape(4 * s)[:s][:, None] >= at(s),
    "not in steps of one": lambda s, _: torch.arange(s)[:, None] * 2 >= torch.arange(s)[None],
}
ALL = {**CAUSAL, **EVERYTHING, **KEPT, **{name: mask for name, (mask, _) in SAID.items()}}


class Attention(nn.Module):
    def __init__(self, mask: Mask, heads: int = HEADS) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, heads * WIDTH, bias=False)
        self.mask, self.heads = mask, heads

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        heads = self.up(x).unflatten(-1, (self.heads, WIDTH)).transpose(1, 2)
        mask = self.mask(x.shape[1], lengths)
        mask = mask.to(x.dtype if mask.is_floating_point() else torch.bool)
        return F.scaled_dot_product_attention(heads, heads.flip(-1), heads, attn_mask=mask)


def inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(BATCH, SEQ, WIDTH, dtype=torch.float64), "lengths": torch.tensor([SEQ, 2])}


def attention_of(mask: Mask) -> dict[str, object]:
    names = {"x": ("batch", "seq", "width"), "lengths": ("batch",)}
    graph = capture(Attention(mask).double(), inputs(), names)
    (node,) = (n for n in graph.nodes if "attention" in str(n.op))
    return {**arguments(node), "program": [n.name for n in graph.nodes], "sizes": [v.shape for v in node.operands]}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_becomes_the_flag(name: str) -> None:
    found = attention_of(CAUSAL[name])
    assert (found.get("attn_mask"), found["is_causal"]) == (None, True)
    assert not any("arange" in n for n in found["program"])  # type: ignore[union-attr]


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_mask_that_hides_nothing_goes(name: str) -> None:
    found = attention_of(EVERYTHING[name])
    assert (found.get("attn_mask"), found["is_causal"]) == (None, False)


@pytest.mark.parametrize("name", SAID)
def test_what_a_mask_says(name: str) -> None:
    """No tensor of queries and keys is left, and the op is the same as with the mask."""
    mask, (left, right, compare, truths) = SAID[name]
    found = attention_of(mask)
    assert (found["left"], found["right"]) == (left, right)
    assert (found["compare"], len(found["of_key"])) == (compare, len(compare) + truths)
    assert not any(len(shape) == 4 and shape[-1] == shape[-2] for shape in found["sizes"])
    model, given = Attention(mask).double(), inputs()
    program = placement.compile(
        model, placement.simulate(tp=1), "mesh tp\ninput x : [batch, seq, width]\n", example=given
    )
    close(program(**given), model(**given))


@pytest.mark.parametrize("name", KEPT)
def test_any_other_mask_stays(name: str) -> None:
    found = attention_of(KEPT[name])
    assert found["attn_mask"] is not None
    assert not found.get("is_causal")


@pytest.mark.parametrize("cut", ["up.weight : Shard(out)", "up.weight : Replicate"])
@pytest.mark.parametrize("name", ["looked up", "a window", "ones"])
def test_the_result_is_that_of_one_device(name: str, cut: str) -> None:
    """With heads cut, and with tokens cut: each rank then has queries of its own and all the keys."""
    model, given = Attention(ALL[name], 3 if "Replicate" in cut else 2).double(), inputs()
    given["x"] = torch.randn(BATCH, 6, WIDTH, dtype=torch.float64)
    spec = f"mesh tp\ninput x : [batch, seq, width]{', Shard(seq)' if 'Replicate' in cut else ''}\n"
    placed = "Shard(2)" if "Replicate" in cut else "auto"
    spec += f"input lengths : [batch]\nparam {cut}\noutput output : {placed}\n"
    program = placement.compile(model, placement.simulate(tp=2), spec, example=given, sizes={"seq": 4096})
    want, got = model(**given), program(**given)
    close(got, want)
    want.pow(3).sum().backward()
    got.pow(3).sum().backward()
    close(program.full_gradients(), gradients(model))
    made = "rt.visible" in program.source
    assert made == (name == "a window" or (name == "looked up" and "Replicate" in cut))


def test_numbers_of_indices() -> None:
    a, b = Affine(1, {0: 2}), Affine(3, {0: -2, 1: 1})
    assert a + b == Affine(4, {1: 1})
    assert a - a == Affine(0)
    assert a * 0 == Affine(0)
    assert a.moved(lambda dim: dim + 2) == Affine(1, {2: 2})
    assert TRUE != FALSE


OTHERS: dict[str, Mask] = {  # of which a part is taken, or which count in narrow numbers
    "up to a place of its own": lambda s, _: (torch.arange(s) < torch.arange(s)[3:4]).expand(s, s),
    "the first row for all": lambda s, _: torch.ones(1, s, dtype=torch.bool).tril().expand(s, s),
    "the first place for all": lambda s, _: (torch.arange(s)[0:1, None] >= torch.arange(s)).expand(s, s),
    "numbers that wrap": lambda s, _: (
        torch.arange(s, dtype=torch.uint8)[:, None] - torch.arange(s, dtype=torch.uint8)[None] >= 0
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_dims_of_one_place_and_narrow_numbers(name: str) -> None:
    model, given = Attention(OTHERS[name]).double(), inputs()
    program = placement.compile(
        model, placement.simulate(tp=1), "mesh tp\ninput x : [batch, seq, width]\n", example=given
    )
    assert "is_causal=True" not in program.source
    close(program(**given), model(**given))
