"""A one-device model with the random masks of its program: what a comparison of the two needs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from placement.runtime._torch import in_backward
from placement.runtime.attention import attention
from placement.runtime.rng import Random, dropped

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


@contextmanager
def same_random(model: nn.Module, seed: int = 0, step: int = 0) -> Generator[Random]:
    """Dropout in ``model`` drops what the program compiled from it drops, given the same seed and steps.

    Within, each call of ``model`` in training mode is a step. A mask belongs to a module's path and the number
    of the dropout (``F.dropout``, or ``F.scaled_dot_product_attention`` with dropout) among those that the
    module does in the step; those of probability 0 do not count. Recomputation (torch checkpoint) repeats
    them if ``backward`` runs within too and the recomputed modules are called once per step.

    Raises:
        NotImplementedError: ``nn.MultiheadAttention`` drops within torch's own code, which cannot be given masks.
    """
    random = Random(seed, step)
    mode = _Masks(random)
    handles = [
        handle
        for path, module in model.named_modules()
        for handle in (
            module.register_forward_pre_hook(mode.entering(path)),
            module.register_forward_hook(mode.left, always_call=True),
        )
    ]
    try:
        yield random
    finally:
        for handle in handles:
            handle.remove()
        mode.abandon()


class _Masks(TorchFunctionMode):
    """Dropout by the masks of ``random``; hooks tell it which module is running.

    Active while a module of the model runs, not all the time: torch does ``backward`` outside of a mode, which
    would then miss the modules that run again in it.
    """

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.random = random
        self._paths: list[str] = []
        self._counts: dict[str, int] = {}

    def entering(self, path: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, _: Any) -> None:
            # The root begins a step; in a backward pass whatever comes first begins a recomputation.
            if path == "" or (in_backward() and not self._paths):
                self._counts.clear()
            if path == "":
                self.random.begin(training=module.training)
            if not self._paths:
                self.__enter__()
            self._paths.append(path)

        return hook

    def left(self, *_: Any) -> None:
        if self._paths.pop() == "":
            self.random.end()
        if not self._paths:
            self.__exit__(None, None, None)

    def abandon(self) -> None:
        """Forget calls that an interrupt has ended without their hooks."""
        if self._paths:
            if "" in self._paths:
                self.random.end()
            self._paths.clear()
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in (F.dropout, torch.dropout, torch.dropout_):
            return self._dropout(func, *args, **given)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **given)
        if func is F.multi_head_attention_forward and given.get("training", True) and args[10]:
            raise NotImplementedError("dropout inside of nn.MultiheadAttention")
        return func(*args, **given)

    def _key(self) -> Tensor | int:
        path = self._paths[-1] if self._paths else ""
        site = self._counts.get(path, 0)
        self._counts[path] = site + 1
        return self.random.key(path, site)

    def _dropout(
        self,
        func: Any,
        input: Tensor,  # noqa: A002 - torch's name, by which callers pass it
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool = True,
    ) -> Tensor:
        if p == 0 or not (training and train):
            return input
        out = dropped(input, p, self._key())
        return input.copy_(out) if inplace or func is torch.dropout_ else out

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        if dropout_p == 0:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        mask: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal, **options}
        return attention(query, key, value, dropout_p, self._key(), **mask)
