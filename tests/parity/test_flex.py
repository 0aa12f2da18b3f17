"""Models that call ``flex_attention``, against torch's own of one device in float64.

Torch computes it on CPUs without gradients, or compiled, in no float64; so a check is left out and it runs as it is.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, flex_attention

import placement
from placement import api
from placement import runtime as rt
from placement.graph.capture import capture
from placement.graph.ir import Graph, op_name
from placement.graph.precision import lifted
from placement.integrations.transformers import from_config
from placement.lang.diagnostics import PlacementError
from tests.gloo import GlooPool
from tests.parity import axes
from tests.parity.measure import Measured

Pool = Callable[[int], GlooPool]
BATCH, SEQ, WIDTH, HEADS, KV, INNER = 2, 24, 10, 4, 2, 6
NAMES = ("batch", "seq", "width")
WAYS = {"gather": "", "all_to_all": "rt.all_to_all", "ring": "rt.ring_attention"}


class Flex(nn.Module):
    """Queries, keys and values with biases, attention as ``how`` calls it, and what comes out of it projected."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = CALLS[how]
        self.q, self.out = nn.Linear(WIDTH, HEADS * INNER), nn.Linear(HEADS * INNER, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, KV * INNER), nn.Linear(WIDTH, KV * INNER)
        self.table = nn.Parameter(torch.randn(HEADS, 2 * SEQ))

    def forward(self, x: Tensor, documents: Tensor, kept: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, INNER)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.out(self.how(self, q, k, v, documents, kept).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A loss in which every token has its own share."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.attention = Flex(how)

    def forward(self, x: Tensor, documents: Tensor, kept: Tensor) -> dict[str, Tensor]:
        y = self.attention(x, documents, kept)
        return {"y": y, "loss": (y * torch.arange(1, x.shape[1] + 1)[:, None]).square().sum()}


def inputs(seq: int = SEQ) -> dict[str, Tensor]:
    """Documents that end inside of blocks; of one row the first queries see nothing."""
    at, generator = torch.arange(seq), torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(BATCH, seq, WIDTH, generator=generator, dtype=torch.float64).requires_grad_(),
        "documents": (at[None, :, None] >= torch.tensor([[[2, 5, SEQ]], [[13, 15, SEQ]]])).sum(-1),
        "kept": torch.stack((at >= 7, at < 11)).long(),
    }


# -- calls -----------------------------------------------------------------------------------------


def causal(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def blocks(mask: Any, q: Tensor, k: Tensor, *, batch: bool = True) -> BlockMask:
    return create_block_mask(mask, q.shape[0] if batch else None, None, q.shape[-2], k.shape[-2], device=q.device)


def _causal(_: Flex, q: Tensor, k: Tensor, v: Tensor, *__: Tensor) -> Tensor:
    return flex_attention(q, k, v, block_mask=blocks(causal, q, k, batch=False), enable_gqa=True)


def _packed(_: Flex, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, __: Tensor) -> Tensor:
    """One mask of two functions, of which one looks its batch up without saying that there are several."""

    def same(batch: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return documents[batch, query] == documents[batch, key]

    return flex_attention(q, k, v, block_mask=blocks(and_masks(causal, same), q, k, batch=False), enable_gqa=True)


def _padded(_: Flex, q: Tensor, k: Tensor, v: Tensor, __: Tensor, kept: Tensor) -> Tensor:
    mask = blocks(lambda b, _, i, j: (j <= i) & kept[b][j].bool(), q, k)
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, scale=0.3)


def _window(_: Flex, q: Tensor, k: Tensor, v: Tensor, *__: Tensor) -> Tensor:
    """Without blocks, by scores alone."""

    def near(score: Tensor, _: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.where(abs(query - key) < 5, score, -float("inf"))

    return flex_attention(q, k, v, score_mod=near, enable_gqa=True)


def _capped(_: Flex, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, __: Tensor) -> Tensor:
    def cap(score: Tensor, _: Tensor, __: Tensor, ___: Tensor, ____: Tensor) -> Tensor:
        return 0.5 * torch.tanh(score / 0.5)

    mask = blocks(lambda b, _, i, j: (i >= j) & (i - j < 9) & (documents[b, i] == documents[b, j]), q, k)
    return flex_attention(q, k, v, score_mod=cap, block_mask=mask, enable_gqa=True)


def _slopes(_: Flex, q: Tensor, k: Tensor, v: Tensor, *__: Tensor) -> Tensor:
    def less(score: Tensor, _: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return 1.5 * score - torch.exp2(-(head + 1.0)) * (query - key)

    return flex_attention(q, k, v, score_mod=less, block_mask=blocks(causal, q, k, batch=False), enable_gqa=True)


def _table(module: Flex, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    """Numbers that are learned, for each distance and head."""

    def more(score: Tensor, _: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + module.table[head, query - key + SEQ]

    return flex_attention(q, k, v, score_mod=more, enable_gqa=True)


def _capped_table(module: Flex, q: Tensor, k: Tensor, v: Tensor, _: Tensor, kept: Tensor) -> Tensor:
    """Two changes that no op of attention has together; a query may see nothing."""

    def more(score: Tensor, _: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(score) * 2.0 + module.table[head, query - key + SEQ]

    mask = blocks(lambda b, _, i, j: (j <= i) & (kept[b, j] > 0), q, k)
    return flex_attention(q, k, v, score_mod=more, block_mask=mask, enable_gqa=True)


def _squared(_: Flex, q: Tensor, k: Tensor, v: Tensor, *__: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * s * (h + 1), enable_gqa=True)


def _capped_or(_: Flex, q: Tensor, k: Tensor, v: Tensor, *__: Tensor) -> Tensor:
    """A cap, with a mask that is no list of conditions."""
    mask = blocks(lambda b, h, i, j: (i - j < 3 + h) ^ (j < 2), q, k)
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.tanh(s), block_mask=mask, enable_gqa=True)


def _sums(_: Flex, q: Tensor, k: Tensor, v: Tensor, *__: Tensor) -> Tensor:
    """Attention with a sink of its own, by the logarithms of the sums."""
    mask = blocks(causal, q, k, batch=False)
    y, aux = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    return y * torch.sigmoid(aux.lse).unsqueeze(-1)


def _everything(_: Flex, q: Tensor, k: Tensor, v: Tensor, *__: Tensor) -> Tensor:
    """A cap alone, on two thirds of the scores."""
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.tanh(s / 1.5), enable_gqa=True)


def _some_keys(_: Flex, q: Tensor, k: Tensor, v: Tensor, *__: Tensor) -> Tensor:
    """Hidden by scores, and by which key it is alone."""

    def some(score: Tensor, _: Tensor, __: Tensor, ___: Tensor, key: Tensor) -> Tensor:
        return torch.where(key % 4 != 3, score, -float("inf"))

    return flex_attention(q, k, v, score_mod=some, enable_gqa=True)


READ = {
    "everything": _everything,
    "causal": _causal,
    "packed": _packed,
    "padded": _padded,
    "window": _window,
    "capped": _capped,
    "some_keys": _some_keys,
}
NUMBERS = {"slopes": _slopes, "table": _table}
WRITTEN = {"capped_table": _capped_table, "squared": _squared, "capped_or": _capped_or, "sums": _sums}
CALLS = {**READ, **NUMBERS, **WRITTEN}


# -- programs --------------------------------------------------------------------------------------


@contextmanager
def one_device(*, learned: bool = False) -> Generator[None]:
    """Torch's own, with gradients; those of what its functions look up, which is ``learned``, take a trace."""
    torch.compiler.reset()
    with (
        mock.patch.multiple(flex, _validate_device=mock.DEFAULT, _warn_once=mock.DEFAULT),
        torch.compiler.set_stance("default" if learned else "force_eager"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # of the way that transformers makes masks
        yield


@functools.cache
def captured(how: str) -> tuple[nn.Module, Graph]:
    torch.manual_seed(2)
    model, given = Model(how).double(), inputs()
    return model, capture(model, given, {name: NAMES[: x.ndim] for name, x in given.items()})


def measured(mesh: Any, how: str, text: str) -> tuple[Measured, Any]:
    (model, graph), found = captured(how), Measured()
    program: Any
    with mock.patch.object(api, "capture", return_value=graph):
        program = placement.compile(model, mesh, text, example=inputs())
    with one_device(learned=how.endswith("table")):
        log = axes.compared(found, model, program, inputs())
        axes.compared(found, model, program, inputs(16))
    axes.explained(log, program.plan)
    return found, program


def by_tokens(way: str) -> str:
    """Only the tokens are placed; a launch costs next to nothing."""
    return (
        "mesh cp over quick\nlink quick = 10 GB/s, 1 ns\n"
        "input x : [batch, seq, width], Shard(seq) @ cp\n"
        "input documents, kept : [batch, seq], Shard(seq) @ cp\n"
        f"strategy attention : {way} @ cp\n"
    )


BY_HEADS = """\
mesh tp over quick
link quick = 10 GB/s, 1 ns
input x : [batch, seq, width]
input documents, kept : [batch, seq]
param attention.{q,k,v}.weight : Shard(out) @ tp
param attention.out.weight     : Shard(in) @ tp
"""


def attentions(graph: Graph) -> list[Any]:
    return [n for n in graph.nodes if op_name(n.op).startswith(("aten.scaled_dot", "placement.attention"))]


def pairs(graph: Graph, seq: Any) -> list[str]:
    """What has a dim of queries and one of keys."""
    return [value.name for value in graph.values() if value.shape[-2:] == (seq, seq)]


@pytest.mark.parametrize("how", READ)
def test_one_op_without_a_mask(how: str) -> None:
    _, graph = captured(how)
    seq = next(symbol.symbol for symbol in graph.symbols if symbol.name == "seq")
    (node,) = attentions(graph)
    assert not pairs(graph, seq)
    said = tuple(node.kwargs.get(name) for name in ("left", "right", "softcap"))
    assert (
        said
        == {
            "everything": (None, None, 1.0),
            "causal": (None, None, None),  # attention's own flag
            "packed": (None, 0, None),
            "padded": (None, 0, None),
            "window": (4, 4, None),
            "capped": (8, 0, 0.5),
            "some_keys": (None, None, None),
        }[how]
    )
    assert node.kwargs["scale"] == pytest.approx({"padded": 0.3, "everything": INNER**-0.5 / 1.5}.get(how, INNER**-0.5))
    assert node.kwargs["enable_gqa"]


@pytest.mark.parametrize("how", READ)
def test_every_way(how: str) -> None:
    for way, call in WAYS.items():
        found, program = measured(rt.simulate(cp=2), how, by_tokens(way))
        assert not found.problems(), (how, way)
        assert call in program.source
    found, _ = measured(rt.simulate(tp=2), how, BY_HEADS)
    assert not found.problems()


@pytest.mark.parametrize("how", NUMBERS)
def test_numbers_that_are_added_are_a_mask(how: str) -> None:
    (node,) = attentions(captured(how)[1])
    assert node.args[3].dtype is torch.float64
    for mesh, text in ((rt.simulate(cp=2), by_tokens("all_to_all")), (rt.simulate(tp=2), BY_HEADS)):
        found, _ = measured(mesh, how, text)
        assert not found.problems(), text


@pytest.mark.parametrize("how", WRITTEN)
def test_the_rest_is_written_out(how: str) -> None:
    graph = captured(how)[1]
    assert len(attentions(graph)) == (how == "sums")
    found, _ = measured(rt.simulate(tp=2), how, BY_HEADS)
    assert not found.problems()


def test_nothing_is_left_of_sums_that_are_not_asked() -> None:
    """On devices other than CPUs torch always has the sums at hand, and transformers always asks for them."""
    x = torch.randn(2, 2, 8, 4, device="meta", requires_grad=True)
    graph = capture(Calls(lambda x: flex_attention(x, x, x, return_aux=AuxRequest(lse=True))[0]), {"x": x})
    assert graph.nodes == tuple(attentions(graph))


def on_gloo() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    cases = [("packed", "gather"), ("capped", "ring"), ("slopes", "all_to_all")]
    found = {case: measured(mesh, case[0], by_tokens(case[1]))[0].problems() for case in cases}
    return [f"{case}: {problem}" for case, problems in found.items() for problem in problems]


@pytest.mark.gloo
def test_processes(gloo: Pool) -> None:
    assert not [problem for problems in gloo(2).run(on_gloo) for problem in problems]


# -- what is refused -------------------------------------------------------------------------------


class Calls(nn.Module):
    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        return self.call(x, **more)


def refused(call: Callable[..., Tensor], **more: Any) -> Any:
    with pytest.raises(PlacementError) as caught:
        capture(Calls(call), {"x": torch.randn(2, 2, 128, 4), **more})
    (diagnostic,) = caught.value.diagnostics
    return diagnostic


def test_functions_that_look_at_more_than_scalars() -> None:
    def branches(x: Tensor) -> Tensor:
        return flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s if i >= j else -s)

    def sized(x: Tensor) -> Tensor:
        return flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s * (s.ndim + 1))

    def rowed(x: Tensor) -> Tensor:
        return flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s + x[b, h, i].sum())

    for call, what in ((branches, "'bool'"), (sized, "'ndim'"), (rowed, "'sum' of a row")):
        found = refused(call)
        assert found.code == "PLC407"
        assert found.message.startswith(what)
        assert "test_flex.py" in found.model_line


def test_blocks_alone_and_masks_from_outside() -> None:
    def some(x: Tensor) -> Tensor:
        one = torch.ones(1, 1, 1, dtype=torch.int32)
        return flex_attention(x, x, x, block_mask=BlockMask.from_kv_blocks(one, one.unsqueeze(0) - 1))

    assert refused(some).code == "PLC407"
    mask = create_block_mask(causal, None, None, 128, 128, device="cpu")
    assert refused(lambda x, mask: flex_attention(x, x, x, block_mask=mask), mask=mask).code == "PLC404"
    kept = capture(Calls(lambda x: flex_attention(x, x, x, block_mask=mask)), {"x": torch.randn(2, 2, 128, 4)})
    assert attentions(kept)[0].args[5] is True


def test_torch_is_as_it_was() -> None:
    names = dict(vars(flex))
    refused(lambda x: flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s.view(1)))
    captured("causal")
    assert vars(flex) == names


# -- transformers ----------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "use_cache": False, "pad_token_id": None,
    "attn_implementation": "flex_attention",
}  # fmt: skip
GEMMA2 = {"sliding_window": 6, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}


@functools.cache
def decoder(family: str, mode: str) -> tuple[nn.Module, Graph, Mapping[str, Tensor]]:
    torch.manual_seed(3)
    kind: Any = {"llama": transformers.LlamaConfig, "gemma2": transformers.Gemma2Config}[family]
    config = kind(**{**TINY, **({**GEMMA2, "num_hidden_layers": 2} if family == "gemma2" else {})})
    model = from_config(config, device="cpu", dtype=torch.float64)
    ids = torch.randint(0, 48, (2, 16))
    given = {"input_ids": ids, "labels": ids.clone()}
    if mode == "packed":
        given["position_ids"] = torch.cat([torch.arange(5), torch.arange(11)]).repeat(2, 1)
    if mode == "padded":
        given["attention_mask"] = (torch.arange(16) < torch.tensor([[16], [11]])).long()
    with lifted(torch.float64):
        return model, capture(model, given, dict.fromkeys(given, ("batch", "seq"))), given


@pytest.mark.parametrize(
    ("family", "mode", "way"),
    [("llama", "padded", "all_to_all"), ("gemma2", "packed", "gather"), ("gemma2", "", "ring")],
)
def test_decoders(family: str, mode: str, way: str) -> None:
    model, graph, given = decoder(family, mode)
    seq = next(symbol.symbol for symbol in graph.symbols if symbol.name == "seq")
    assert len(attentions(graph)) == (2 if family == "gemma2" else 1)
    assert not pairs(graph, seq)
    assert not graph.training_only
    assert {node.kwargs.get("softcap") for node in attentions(graph)} == {2.0 if family == "gemma2" else None}
    text = (
        "mesh cp over quick\nlink quick = 10 GB/s, 1 ns\n"
        f"input {', '.join(given)} : [batch, seq], Shard(seq) @ cp\n"
        f"strategy model.layers.*.self_attn : {way} @ cp\n"
    )
    found = Measured()
    with mock.patch.object(api, "capture", return_value=graph):
        program = placement.compile(model, rt.simulate(cp=2), text, example=given)
    with one_device():
        axes.compared(found, model, program, given)
    assert not found.problems()


def test_files_do_not_say_how_attention_is_computed(tmp_path: Path) -> None:
    transformers.LlamaConfig(**TINY).save_pretrained(tmp_path)
    for name in ("eager", "flex_attention"):
        model: Any = from_config(tmp_path, attn_implementation=name)
        assert model.config._attn_implementation == name
