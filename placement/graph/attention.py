"""Attention whose mask is known by what it says, and the op that it becomes.

A mask that says nothing goes, a causal one becomes attention's own flag. One that is made of bounds on the distance
between query and key and of comparisons of what is marked at each is ``placement::attention``: query i sees key j where
``j >= i - left``, ``j <= i + right`` and every mark of i and j compares as it says; marks of keys that are left over
must be true. All of it is of size [batch, tokens] at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from placement.graph._torch import aten
from placement.graph.conditions import Affine, Compared, Conditions, Element, Untrue, mapped
from placement.graph.ir import Node, Size, Value, arguments
from placement.graph.visibility import Facts

_LIBRARY = torch.library.Library("placement", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor[] of_query, Tensor[] of_key, *, str[] compare, "
    "int? left=None, int? right=None, float dropout_p=0.0, float? scale=None, bool enable_gqa=False, "
    "float? softcap=None) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_LIBRARY.define(
    "capped_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor probabilities, Tensor repeated, *, "
    "float softcap, float scale, bool enable_gqa=False) -> Tensor"
)

COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "==": torch.eq,
    "!=": torch.ne,
    ">=": torch.ge,
    ">": torch.gt,
    "<=": torch.le,
    "<": torch.lt,
}
_EXCHANGED = {"==": "==", "!=": "!=", ">=": "<=", ">": "<"}


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_query: Sequence[Tensor],
    of_key: Sequence[Tensor],
    *,
    compare: Sequence[str],
    left: int | None = None,
    right: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
) -> Tensor:
    places = [torch.arange(x.shape[-2], device=query.device) for x in (query, key)]
    further = places[1] - places[0].unsqueeze(-1)
    mask = torch.ones_like(further, dtype=torch.bool)
    if left is not None:
        mask = mask & (further >= -left)
    if right is not None:
        mask = mask & (further <= right)
    for how, mine, its in zip(compare, of_query, of_key, strict=False):
        mask = mask & COMPARISONS[how](_beside(mine).mT, _beside(its))
    for mark in of_key[len(compare) :]:
        mask = mask & _beside(mark).bool()
    if softcap is not None:
        return _of_capped(query, key, value, mask, dropout_p, scale, softcap)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa
    )


def _of_capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout_p: float, scale: float | None, softcap: float
) -> Tensor:
    """The plain formula, of scores that a tanh keeps between -softcap and softcap; 0 for a query that sees no key."""
    key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = (softcap * (scores / softcap).tanh()).masked_fill(~mask, -torch.inf)
    blind = ~mask.any(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    return torch.dropout(weights, dropout_p, train=True) @ value


def _beside(mark: Tensor) -> Tensor:
    """Marks [tokens] or [batch, tokens] as of keys of a mask [batch, heads, queries, keys]."""
    return mark.unsqueeze(0) if mark.ndim == 1 else mark[:, None, None]


_LIBRARY.impl("attention", _attention, "CompositeImplicitAutograd")

ATTENTION = torch.ops.placement.attention.default


def _product(*given: Tensor, **_: Any) -> Tensor:
    return torch.matmul(*given[4:])


_LIBRARY.impl("capped_attention", _product, "CompositeExplicitAutograd")

CAPPED = torch.ops.placement.capped_attention.default
"""Stands in a captured program for attention with a softcap. It becomes that where there is no mask or it says what it
hides, else the product of ``probabilities``, which were written out, with values ``repeated`` for groups."""
_SPELLED_OUT = aten.scaled_dot_product_attention.default


def bounds(node: Node) -> tuple[int | None, int | None]:
    """How far before and after a query its keys may be, None for no bound: attention's own, or what its flag means."""
    given = arguments(node)
    return given.get("left"), 0 if given.get("is_causal") else given.get("right")


def with_masks(nodes: Iterable[Node], constants: Mapping[Value, Tensor]) -> Iterator[Node]:
    """The ops of a program, in order, with attention that says itself what it hides instead of masks that do."""
    facts = Facts(constants)
    for node in nodes:
        facts.note(node)
        if node.op is CAPPED:
            yield from _capped(node, facts)
        else:
            yield from _without_mask(node, facts) if node.op is _SPELLED_OUT else (node,)


def _capped(node: Node, facts: Facts) -> Iterator[Node]:
    given = arguments(node)
    mask, found = given["mask"], _Sees()
    if mask is not None:
        said = facts.of(mask)
        found = _read(node, mask, said) if isinstance(said, tuple) else None
    if found is None:
        product = given["probabilities"], given["repeated"]
        yield dataclasses.replace(node, op=aten.matmul.default, args=product, kwargs={})
        return
    rest = {name: given[name] for name in ("scale", "enable_gqa", "softcap")}
    yield from _as_attention(node, found, rest)


def _without_mask(node: Node, facts: Facts) -> Iterator[Node]:
    given = arguments(node)
    mask = given["attn_mask"]
    said = facts.of(mask) if isinstance(mask, Value) and not given["is_causal"] else None
    found = _read(node, mask, said) if isinstance(said, tuple) else None
    if found is None:
        yield node
        return
    query, key, value = node.operands[:3]
    rest = {"scale": given["scale"], "enable_gqa": given["enable_gqa"]}
    square = query.shape[-2] == key.shape[-2]
    if not found.marked and (found.bounds == (None, None) or (found.bounds == (None, 0) and square)):
        args = (query, key, value, None, given["dropout_p"], found.right is not None)
        yield dataclasses.replace(node, args=args, kwargs=rest)
        return
    yield from _as_attention(node, found, {"dropout_p": given["dropout_p"], **rest})


def _as_attention(node: Node, found: _Sees, rest: Mapping[str, Any]) -> Iterator[Node]:
    """The op that says what is seen, after those that make its marks."""
    marks = _Marks(node)
    of_query = tuple(marks.add(one.first) for one in found.compared)
    of_key = tuple(map(marks.add, (*(one.second for one in found.compared), *found.truths)))
    seen = {"compare": tuple(one.how for one in found.compared), "left": found.left, "right": found.right}
    yield from marks.nodes
    args = (*node.operands[:3], of_query, of_key)
    yield dataclasses.replace(node, op=ATTENTION, args=args, kwargs={**seen, **rest})


@dataclasses.dataclass(slots=True)
class _Marks:
    """Elements as tensors [tokens] or [batch, tokens] of their own; ``nodes`` make those that there are not."""

    beside: Node
    nodes: list[Node] = dataclasses.field(default_factory=list)

    def add(self, mark: Element | Untrue) -> Value:
        """The tensor of one, or of where it does not hold."""
        if isinstance(mark, Untrue):
            source = self.add(mark.of)
            return self._made(aten.logical_not.default, (source,), dataclasses.replace(source, name=self._name()))
        source = mark.value
        shape = tuple(size for size, place in zip(source.shape, mark.at, strict=True) if place.by)
        if shape == source.shape:
            return source
        made = dataclasses.replace(source, name=self._name(), shape=shape)
        return self._made(aten.reshape.default, (source, shape), made)

    def _name(self) -> str:
        return f"{self.beside.name}_mark_{len(self.nodes)}"

    def _made(self, op: Callable[..., Any], args: tuple[Any, ...], result: Value) -> Value:
        made = {"name": result.name, "op": op, "args": args, "kwargs": {}, "outputs": (result,)}
        self.nodes.append(dataclasses.replace(self.beside, **made))
        return result


@dataclasses.dataclass(slots=True)
class _Sees:
    """What a mask over [..., queries, keys] says. compared: a query's mark with a key's. truths: marks of keys."""

    left: int | None = None
    right: int | None = None
    compared: list[Compared] = dataclasses.field(default_factory=list)
    truths: list[Element | Untrue] = dataclasses.field(default_factory=list)

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        return self.left, self.right

    @property
    def marked(self) -> bool:
        return bool(self.compared or self.truths)


def _read(node: Node, mask: Value, said: Conditions) -> _Sees | None:
    """None where the mask says more, or is of another size than what it masks."""
    (result,), (_, key, *_) = node.results, node.operands
    whole = (*result.shape[:-1], key.shape[-2])
    rank, more = len(whole), len(whole) - len(mask.shape)
    # A mask may have more batches than what it masks: its shape is the result's then.
    if more < 0 or any(size not in (1, own) for size, own in zip(mask.shape, whole[more:], strict=True)):
        return None
    queries, keys = rank - 2, rank - 1
    found = _Sees()
    for one in (mapped(condition, lambda at: at.moved(lambda dim: dim + more)) for condition in said):
        match one:
            case Affine(by={**by}) if by == {queries: 1, keys: -1}:
                found.right = one.const if found.right is None else min(found.right, one.const)
            case Affine(by={**by}) if by == {queries: -1, keys: 1}:
                found.left = one.const if found.left is None else min(found.left, one.const)
            case Compared() if _of_tokens(one.first, queries, whole) and _of_tokens(one.second, keys, whole):
                found.compared.append(one)
            case Compared() if _of_tokens(one.first, keys, whole) and _of_tokens(one.second, queries, whole):
                found.compared.append(Compared(_EXCHANGED[one.how], one.second, one.first))
            case Element() if _of_tokens(one, keys, whole):
                found.truths.append(one)
            case Untrue() if _of_tokens(one.of, keys, whole):
                found.truths.append(one)
            case _:
                return None
    return found


def _of_tokens(element: Element, tokens: int, whole: tuple[Size, ...]) -> bool:
    """Whether it is one of a tensor of a number for each of these tokens, perhaps in each batch, in this order."""
    dims = [tuple(place.by.items()) for place in element.at if place.by]
    known = [((0, 1),), ((tokens, 1),)] if len(whole) == 4 else [((tokens, 1),)]
    pairs = list(zip(element.value.shape, element.at, strict=True))
    plain = all(not place.const and (place.by or size == 1) for size, place in pairs) and dims in (known, known[-1:])
    sizes = [size for size, place in pairs if place.by]
    return plain and sizes == [whole[dim] for ((dim, _),) in dims]
