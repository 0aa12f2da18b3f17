"""DTensor's ``parallelize_module`` of transformers' model, in torchtitan's plan; and transformers' own plan."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from bench.peers.models import Case, shifted


def parallelized(case: Case, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A copy of ``model``, its parameters DTensors."""
    between = Shard(1) if case.mode == "tp+sp" else Replicate()
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if case.mode == "tp+sp":
        plan["model.norm"] = SequenceParallel()
    for i in range(case.layers):
        at = f"model.layers.{i}."
        plan |= {
            at + "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": between},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            at + "self_attn.o_proj": RowwiseParallel(output_layouts=between),
            at + "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
            at + "mlp.down_proj": RowwiseParallel(output_layouts=between),
        }
        plan |= {at + f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {at + f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        if case.mode == "tp+sp":
            plan |= {at + f"{name}_layernorm": SequenceParallel() for name in ("input", "post_attention")}
        if case.family == "qwen3":  # per head, and the heads are cut
            plan |= {at + f"self_attn.{x}_norm": SequenceParallel(sequence_dim=2, use_local_output=True) for x in "qk"}
    return parallelize_module(copy.deepcopy(model), mesh, plan)


def _no_mask(**_: Any) -> None:
    """In place of transformers' maker of masks: attention is causal without one."""


class LossOfClasses:
    """Forward to the loss, and backward, with ``loss_parallel``.

    Positions are given and no mask is built, as in torchtitan's models: transformers would take both from the length of
    this rank's part of the sequence.
    """

    def __init__(self, case: Case, model: nn.Module) -> None:
        self.model = model
        self.positions = torch.arange(case.seq).unsqueeze(0)
        self.unmasked = f"transformers.models.{case.family}.modeling_{case.family}.create_causal_mask"

    @contextmanager
    def around(self) -> Iterator[None]:
        """Where forward and backward run."""
        with loss_parallel(), mock.patch(self.unmasked, _no_mask):
            yield

    def finish(self) -> None:
        """Sum the gradients that are terms, which a trainer's next use of them would."""
        for parameter in self.model.parameters():
            grad = parameter.grad
            if isinstance(grad, DTensor) and any(place.is_partial() for place in grad.placements):
                parameter.grad = grad.redistribute(placements=[Replicate()])

    def loss(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of a call."""
        logits = self.model(input_ids=input_ids, position_ids=self.positions).logits
        return F.cross_entropy(logits.flatten(0, 1), shifted(labels).flatten())


def by_own_plan(model: Any, mesh: DeviceMesh) -> nn.Module:
    """A copy of ``model`` on the plan of its class, as ``from_pretrained`` applies it to what it has loaded."""
    made = copy.deepcopy(model)
    plan, *_ = made._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))  # noqa: SLF001 - for want of files
    return apply_tensor_parallelism(made, mesh, plan)
