"""What autograd really keeps: storages seen by torch's own hooks, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def kept_bytes(
    run: Callable[[], Any], exempt: Iterable[Tensor], inputs: Iterable[Tensor] = (), ranks: int = 1
) -> float:
    """Bytes that one rank keeps while ``run`` builds its graph: parameters left out, inputs whole, 0-dim left out.

    All ``ranks`` run in this process and are alike; what they are given lies there once.
    """
    left_out = {t.untyped_storage().data_ptr() for t in exempt}
    given = {t.untyped_storage().data_ptr() for t in inputs}
    alive: list[Tensor] = []  # an address is one storage while all live
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if tensor.ndim and storage.data_ptr() not in left_out:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    del result
    shared = sum(size for address, size in seen.items() if address in given)
    return (sum(seen.values()) - shared) / ranks + shared
