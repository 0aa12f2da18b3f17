"""Products of rows that are linear layers, and the op that they become: ``linear`` with a weight [in, out].

Where the leading dims of a tensor are merged by a view, the rows multiplied with a parameter [in, out], perhaps a bias
added, and the dims split again by a view, nothing was merged for but the product's own sake. ``placement::linear``
takes the tensor as it is.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
import torch.nn.functional as F
from torch import Tensor

from placement.graph._torch import aten
from placement.graph.ir import Node, Value


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - as F.linear has it
    return F.linear(input, weight.t(), bias)


_LIBRARY = torch.library.Library("placement", "FRAGMENT")
_LIBRARY.define("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor")
_LIBRARY.impl("linear", _linear, "CompositeImplicitAutograd")

LINEAR = torch.ops.placement.linear.default


def with_linears(nodes: Sequence[Node], weights: AbstractSet[Value], returned: Iterable[Value]) -> Iterator[Node]:
    """The program with such products as ``LINEAR``; what they were made of is left to die.

    weights: parameters. returned: values that the program or a module returns.
    """
    makers = {value: node for node in nodes for value in node.results}
    uses = Counter(value for node in nodes for value in node.operands)
    uses.update(returned)
    for node in nodes:
        parts = _parts(node, makers, uses, weights)
        if parts is None:
            yield node
            continue
        (source, product, added), (result,) = parts, node.results
        whole = result if added is None else dataclasses.replace(product.results[0], shape=result.shape)
        yield dataclasses.replace(product, op=LINEAR, args=(source, product.args[1]), outputs=(whole,))
        if added is not None:
            yield dataclasses.replace(added, args=(whole, added.args[1]), outputs=(result,))


def _parts(
    back: Node, makers: Mapping[Value, Node], uses: Counter[Value], weights: AbstractSet[Value]
) -> tuple[Value, Node, Node | None] | None:
    """What is multiplied, the product of its rows and the sum with a bias, where ``back`` splits the rows again."""
    last = makers.get(back.args[0]) if back.op is aten.reshape.default else None
    added = last if last is not None and last.op is aten.add.Tensor else None
    product = last if added is None else makers.get(added.operands[0])
    merged = makers.get(product.args[0]) if product is not None and product.op is aten.mm.default else None
    if product is None or merged is None or merged.op is not aten.reshape.default or product.args[1] not in weights:
        return None
    if added is not None and (added.kwargs or len(added.operands) != 2 or len(added.operands[1].shape) != 1):
        return None
    inner = [product] if added is None else [product, added]
    if any(uses[node.results[0]] > 1 for node in inner) or any(n.stack != back.stack for n in (merged, *inner)):
        return None
    source, (result,) = merged.operands[0], back.results
    same = source.shape[:-1] == result.shape[:-1] and source.shape[-1:] == merged.results[0].shape[-1:]
    return (source, product, added) if same and len(source.shape) > 1 else None
