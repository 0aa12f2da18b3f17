"""Products of matrices: parallel in the free dims, contracted over the shared one, linear in each factor."""

from __future__ import annotations

import math
from collections.abc import Mapping

from placement.graph.ir import Node
from placement.graph.signature import Signature
from placement.rules.core import aten, rule


def twice_all(extent: Mapping[str, int]) -> int:
    """A multiplication and an addition for every combination of letters."""
    return 2 * math.prod(extent.values())


rule(aten.linear, "* k, n k -> * n", linear=(0, 1), flops=twice_all, code="F.linear({input}, {weight})")
rule(aten.mm, "m k, k n -> m n", linear=(0, 1), flops=twice_all, code="{self} @ {mat2}")
rule(aten.bmm, "b m k, b k n -> b m n", linear=(0, 1), flops=twice_all, code="{self} @ {mat2}")
rule(aten.mv, "m k, k -> m", linear=(0, 1), flops=twice_all, code="{self} @ {vec}")
rule(aten.dot, "k, k -> ", linear=(0, 1), flops=twice_all)
rule(aten.outer, "m, n -> m n", linear=(0, 1), flops=twice_all)


def _matmul(node: Node) -> Signature | None:
    """``matmul`` for two tensors of at least two dims, leading dims broadcast."""
    left, right = node.operands
    (result,) = node.results
    if min(len(left.shape), len(right.shape)) < 2:  # noqa: PLR2004
        return None
    rank = len(result.shape)

    def leading(shape: tuple[object, ...]) -> list[tuple[str, ...]]:
        offset = rank - len(shape)
        return [() if s == 1 and result.shape[i + offset] != 1 else (f"b{i + offset}",) for i, s in enumerate(shape[:-2])]

    batch = [(f"b{i}",) for i in range(rank - 2)]
    return Signature(
        operands=((*leading(left.shape), ("m",), ("k",)), (*leading(right.shape), ("k",), ("n",))),
        results=((*batch, ("m",), ("n",)),),
        linear=frozenset({0, 1}),
    )


rule(aten.matmul, _matmul, flops=twice_all, code="{self} @ {other}")
