"""The private torch names that the compiler leans on still mean what it takes them to mean."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch.nn.attention import flex_attention as flex

from placement.graph import _torch

aten = torch.ops.aten


def test_overloads_and_packets_are_told_apart() -> None:
    assert _torch.is_overload(aten.add.Tensor)
    assert not _torch.is_overload(aten.add)
    assert not _torch.is_overload(torch.add)
    assert _torch.op_of(aten.add) is aten.add
    assert _torch.op_of(aten.add.Tensor) is aten.add.Tensor
    assert _torch.op_of(torch.add) is None


def test_a_custom_op_stands_for_its_overload() -> None:
    @torch.library.custom_op("placement_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert _torch.op_of(twice) is torch.ops.placement_test.twice.default


def test_the_overload_of_a_call() -> None:
    x = torch.ones(2)
    assert _torch.overload_for(aten.add, (x, x), {}) is aten.add.Tensor
    assert _torch.overload_for(aten.sum, (x, [0]), {}) is aten.sum.dim_IntList


def test_schemas() -> None:
    assert _torch.schema_name(aten.add.Tensor) == ("aten", "add")
    assert _torch.schema_name(torch.add) == ("", "")
    assert _torch.overload_name(aten.add.Tensor) == "Tensor"
    assert _torch.overload_name(aten.silu.default) == "default"
    found = dict(_torch.schema_arguments(aten.cross_entropy_loss.default))
    assert list(found) == ["self", "target", "weight", "reduction", "ignore_index", "label_smoothing"]
    assert (found["reduction"], found["ignore_index"], found["label_smoothing"]) == (1, -100, 0.0)
    assert _torch.to_copy is aten._to_copy
    assert _torch.unsafe_view is aten._unsafe_view


def test_buffers_outside_the_state_dict() -> None:
    module = torch.nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("passing", torch.ones(1), persistent=False)
    assert _torch.transient_buffers(module) == {"passing"}


def test_sizes_regions_and_guards_of_an_export() -> None:
    class Branches(torch.nn.Module):
        def forward(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
            x = tensors[0]
            with torch.no_grad():
                shift = x + 1
            return shift * x if x.shape[0] > 3 else x

    auto = torch.export.Dim.AUTO
    program = torch.export.export(Branches(), ((torch.ones(5, 2),),), dynamic_shapes=((({0: auto},)),), strict=False)
    placeholder = next(node for node in program.graph.nodes if node.op == "placeholder")
    assert isinstance(_torch.expression(placeholder.meta["val"].shape[0]), sympy.Symbol)
    assert not _torch.from_data(placeholder.meta["val"].shape[0])
    assert not _torch.from_data(3)
    text = " ".join(_torch.size_guards(program, lambda index, dim: f"size_{index}_{dim}"))
    assert "3" in text
    assert "size_0_0" in text


def test_guards_that_always_hold() -> None:
    assert _torch._always("1 + size_0_0 > 1")
    assert _torch._always("max(0, size_0_0) == size_0_0")
    assert not _torch._always("max(0, 20 - size_0_0) != 20 - size_0_0")
    assert not _torch._always("size_0_0 != 5")
    assert _torch._always("size_0_0 != -5")
    assert not _torch._always("2 < size_0_0 < 9")


def test_hooks_of_a_gradient_are_seen() -> None:
    linear = torch.nn.Linear(2, 2)
    assert not _torch.gradient_hooks(linear)
    assert not _torch.gradient_hooks(linear.weight)
    linear.weight.register_hook(lambda grad: grad)
    linear.register_full_backward_hook(lambda *_: None)
    assert _torch.gradient_hooks(linear)
    assert _torch.gradient_hooks(linear.weight)


def test_random_ops_carry_their_tag() -> None:
    assert _torch.draws_numbers(aten.rand_like.default)
    assert not _torch.draws_numbers(aten.add.Tensor)


def test_forward_hooks_are_seen() -> None:
    linear = torch.nn.Linear(2, 2)
    assert _torch.forward_hooks(linear) == ()
    before, after = (lambda *_: None), (lambda *_: None)
    linear.register_forward_hook(after)
    linear.register_forward_pre_hook(before)
    assert _torch.forward_hooks(linear) == (before, after)


def test_tensors_on_one_storage_and_symbolic_sizes() -> None:
    x = torch.ones(3, 4)
    assert _torch.storage_key(x) == _torch.storage_key(x.t())
    assert _torch.storage_key(x) != _torch.storage_key(x.clone())
    seen = []

    class Shows(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.extend(
                [_torch.size_key(x.shape[0]), _torch.size_key((x.t() + 1).shape[1]), _torch.size_key(x.shape[1])]
            )
            return x + 1

    auto = torch.export.Dim.AUTO
    torch.export.export(Shows(), (x,), dynamic_shapes=({0: auto},), strict=False)
    assert seen[0] == seen[1]
    assert isinstance(seen[0], str)
    assert seen[2] == 4


def test_fakes_are_not_remembered() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with _torch.without_cache_of_fakes():
        assert not FakeTensorMode().cache_enabled
    assert FakeTensorMode().cache_enabled


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_what_flex_attention_and_its_masks_call() -> None:
    called: list[tuple[str, Any]] = []

    def attention(*given: Any) -> Any:
        called.append(("attention", given[4]))
        return given[0], None, None

    def over_scalars(_: Any, prefix: Any, **__: Any) -> Any:
        called.append(("over scalars", prefix))
        return lambda *ranges: torch.ones([x.shape[0] for x in ranges], dtype=torch.bool)

    def blocks(mask: Any, *_: Any, **__: Any) -> Any:
        called.append(("blocks", mask.shape))
        return mask, None

    def block_mask(given: Any, function: Any, lengths: Any, *sizes: Any) -> Any:
        called.append(("block mask", (lengths, sizes)))
        none = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
        return flex.BlockMask(lengths, none[0], none, *(None,) * 6, BLOCK_SIZE=(sizes[0], sizes[1]), mask_mod=function)

    x, everything = torch.randn(1, 2, 8, 4, requires_grad=True), flex.noop_mask
    with _torch.flex_replaced(attention, over_scalars, blocks, block_mask):
        for compiled in (lambda function: function, torch.compile):
            called.clear()
            mask = compiled(flex.create_block_mask)(everything, 1, None, 8, 8, device="cpu", BLOCK_SIZE=4)
            assert compiled(flex.flex_attention)(x, x, x, block_mask=mask) is x
            made = [("over scalars", ()), ("blocks", (1, 1, 8, 8)), ("block mask", ((8, 8), (4, 4)))]
            assert called[:3] == made
            (_, given) = called[3]
            assert given[:2] == (8, 8)
            assert given[-3:] == (4, 4, everything)
        flex.flex_attention(x, x, x)
        assert called[-1][1][-3:] == (*_torch.ONE_BLOCK, everything)
