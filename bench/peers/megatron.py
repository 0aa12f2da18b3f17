"""The same around the layers of megatron-core: one with the rows of q, k and v, and one with those of gate and up.

Under TP+SP its layers ask CUDA for the device of their buffers: on a machine without, they are told the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from bench.peers.expert import Native

if not torch.cuda.is_available():
    torch.cuda.current_device = lambda: torch.device("cpu")  # pyright: ignore[reportAttributeAccessIssue]


class Core(Native):
    """Layers are made where they are first asked for, around this rank's weights."""

    def __init__(self, group: dist.ProcessGroup, *, sp: bool) -> None:
        super().__init__(group, sp=sp)
        # What initialize_model_parallel would make, of the one group that there is: a fake world has no others.
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = group  # noqa: SLF001
        if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # noqa: SLF001
            parallel_state._set_global_memory_buffer()  # noqa: SLF001
        self.layers: dict[tuple[int, ...], tuple[tuple[Tensor, ...], Any]] = {}

    def columns(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """As ``Native``'s."""
        rows = [w.shape[0] for w in weights]

        def layer(config: Any, joined: Tensor) -> nn.Module:
            return ColumnParallelLinear(
                joined.shape[1], self.size * sum(rows), config=config, init_method=_as_it_is, bias=False,
                gather_output=False, tp_group=self.group,
            )  # fmt: skip

        whole = self._layer(layer, weights)(x)[0]
        return whole.split(rows, -1) if len(rows) > 1 else (whole,)

    def row(self, x: Tensor, weight: Tensor) -> Tensor:
        """As ``Native``'s."""

        def layer(config: Any, weight: Tensor) -> nn.Module:
            return RowParallelLinear(
                self.size * weight.shape[1], weight.shape[0], config=config, init_method=_as_it_is, bias=False,
                input_is_parallel=True, skip_bias_add=False, tp_group=self.group,
            )  # fmt: skip

        return self._layer(layer, (weight,))(x)[0]

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """As ``Native``'s."""

        def layer(config: Any, table: Tensor) -> nn.Module:
            return VocabParallelEmbedding(
                self.size * table.shape[0], table.shape[1], init_method=_as_it_is, config=config,
                reduce_scatter_embeddings=self.sp, tp_group=self.group,
            )  # fmt: skip

        return self._layer(layer, (table,))(ids.t() if self.sp else ids)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """As ``Native``'s."""
        valid = target >= 0
        losses = vocab_parallel_cross_entropy(logits, target.masked_fill(~valid, 0))
        return (losses * valid).sum() / valid.sum()

    def reduce_replicated(self, parameters: list[Tensor]) -> None:
        """As ``Native``'s; a layer's gradient is handed to the weights that it has the rows of."""
        for weights, layer in self.layers.values():
            parts = layer.weight.grad.split([w.shape[0] for w in weights])
            for weight, part in zip(weights, parts, strict=True):
                weight.grad = part
            layer.weight.grad = None
        super().reduce_replicated(parameters)

    def _layer(self, made: Callable[[Any, Tensor], nn.Module], weights: tuple[Tensor, ...]) -> Any:
        key = tuple(map(id, weights))
        if key not in self.layers:
            joined = torch.cat([w.detach() for w in weights])
            config = TransformerConfig(
                num_layers=1, hidden_size=8 * self.size, num_attention_heads=self.size, use_cpu_initialization=True,
                perform_initialization=False, tensor_model_parallel_size=self.size, sequence_parallel=self.sp,
                params_dtype=joined.dtype, gradient_accumulation_fusion=False,
            )  # fmt: skip
            layer = made(config, joined)
            layer.weight = nn.Parameter(joined)
            self.layers[key] = weights, layer
        return self.layers[key][1]


def _as_it_is(_: Tensor) -> None:
    """Weights come from the model."""
