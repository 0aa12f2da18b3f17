"""Complex numbers and Fourier transforms. As sums go, a complex number is two real ones."""

from __future__ import annotations

from placement.graph.ir import Node
from placement.graph.signature import Signature
from placement.rules.core import arguments, aten, elementwise, rule


def _linear(node: Node) -> Signature:
    return elementwise(node, linear=(0,))


rule([aten.real, aten.imag], _linear, view=True)
rule([aten._conj, aten._conj_physical, aten.conj, aten.conj_physical, aten.resolve_conj], _linear)  # noqa: SLF001 - aten's
rule([aten.angle, aten.polar], elementwise)
rule(aten.complex, lambda node: elementwise(node, additive=(0, 1)))
rule(aten.view_as_real, "* -> * c", linear=(0,), view=True)
rule(aten.view_as_complex, "* c -> *", blocked="c", linear=(0,), view=True)


def _transform(node: Node) -> Signature:
    """Whole along the dims that are transformed, which may be shorter or longer after."""
    given, rank = arguments(node), len(node.operands[0].shape)
    listed = given["dim"]
    if listed is None:
        listed = range(rank) if given["s"] is None else range(rank - len(given["s"]), rank)
    dims = {d % rank for d in ((listed,) if isinstance(listed, int) else listed)}
    before = tuple((f"d{i}",) for i in range(rank))
    after = tuple((f"f{i}",) if i in dims else d for i, d in enumerate(before))
    blocked = frozenset({*(f"d{i}" for i in dims), *(f"f{i}" for i in dims)})
    return Signature((before,), (after,), blocked, frozenset({0}))


for _name in ("fft", "fft2", "fftn", "ifft", "ifft2", "ifftn", "rfft", "rfft2", "rfftn", "irfft", "irfft2", "irfftn"):
    rule(getattr(aten, f"fft_{_name}"), _transform)
