"""Names for the dims of a model's inputs: by the argument's name where convention has one, else by its shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from placement.graph.capture import capture
from placement.graph.example import Example
from placement.graph.ir import Graph
from placement.lang.diagnostics import PlacementError

Named = Mapping[str, tuple[str, ...]]

_TOKENS = ("batch", "seq")
_IMAGE = ("batch", "channels", "height", "width")
# Arguments of transformers models whose shape alone says too little.
_BY_NAME = {
    "inputs_embeds": (*_TOKENS, "hidden"),
    "encoder_hidden_states": (*_TOKENS, "hidden"),
    "pixel_values": _IMAGE,
    "input_features": ("batch", "features", "frames"),
}
_BY_RANK: dict[int, tuple[str, ...]] = {1: ("batch",), 2: ("batch", "features"), 3: (*_TOKENS, "width"), 4: _IMAGE}
_FIXES_A_DIM = {"PLC401", "PLC403"}  # the model, or its export, does not leave a named dim open


def captured(model: torch.nn.Module, example: Mapping[str, Any] | Sequence[Any]) -> tuple[Graph, Named]:
    """The graph of ``model``, and a name for every dim of its inputs that it leaves open.

    Dims that the model makes equal have one name. Where it fixes the sizes of an input, that input's dims go
    without names. Raises PlacementError where it cannot be captured at all.
    """
    flat = Example.of(model, example)
    names = _names(flat, encoder_decoder=bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)))
    failure: PlacementError | None = None
    for attempt in _attempts(flat, names):
        try:
            graph = capture(model, example, attempt)
        except PlacementError as error:
            failure = failure or error
            if not {d.code for d in error.diagnostics} <= _FIXES_A_DIM:
                raise
            continue
        return graph, _as_captured(graph, attempt)
    assert failure is not None
    raise failure


def _attempts(flat: Example, names: Named) -> Iterator[Named]:
    """All names; then those of integer inputs alone; then none."""
    tokens = {n: names[n] for n, t in zip(flat.names, flat.tensors, strict=True) if not t.is_floating_point()}
    yield names
    if tokens and tokens != names:
        yield tokens
    if names:
        yield {}


def _names(flat: Example, *, encoder_decoder: bool) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    sizes: dict[str, int] = {}
    for name, tensor in zip(flat.names, flat.tensors, strict=True):
        if not tensor.dim():
            continue
        leaf = name.rpartition(".")[2]
        usual = _usual(leaf, tensor)
        if encoder_decoder and (leaf.startswith("decoder_") or leaf == "labels"):
            usual = tuple("target" if dim == "seq" else dim for dim in usual)
        dims: list[str] = []
        for dim, size in zip(usual, tensor.shape, strict=True):
            if dim in dims or sizes.get(dim, size) != size:  # one name is one size
                dim = f"{dim}_{leaf}"
            sizes[dim] = size
            dims.append(dim)
        found[name] = tuple(dims)
    return found


def _usual(leaf: str, tensor: torch.Tensor) -> tuple[str, ...]:
    rank = tensor.dim()
    if len(_BY_NAME.get(leaf, ())) == rank:
        return _BY_NAME[leaf]
    if rank == len(_TOKENS) and not tensor.is_floating_point():
        return _TOKENS
    return _BY_RANK.get(rank) or ("batch", *(f"dim{index}" for index in range(1, rank)))


def _as_captured(graph: Graph, names: Named) -> Named:
    """One name for dims that capture found to be equal; the names of fixed dims stay, they are names all the same."""
    result: dict[str, tuple[str, ...]] = {}
    symbols = {symbol.symbol: symbol.name for symbol in graph.symbols}
    for item in graph.inputs:
        if item.name in names:
            pairs = zip(names[item.name], item.value.shape, strict=True)
            result[item.name] = tuple(symbols.get(size, dim) for dim, size in pairs)  # type: ignore[arg-type]
    return result
