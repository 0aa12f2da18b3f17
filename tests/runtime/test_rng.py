"""C19: masks of one device whatever the placement, repeated by recomputation, and of the right statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import placement
from placement import runtime as rt
from placement.runtime.cuts import Cut, block
from placement.runtime.rng import Random, drop_mask, dropped, place
from tests.gloo import GlooPool

Pool = Callable[[int], GlooPool]
HIDDEN, HEADS, KV, HEAD = 8, 4, 2, 6


# -- the mask -------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_probability_and_independence(p: float) -> None:
    n = 200_000
    x = torch.empty(n)
    mask = drop_mask(x, p, 12345).double()
    other = drop_mask(x, p, 12346).double()
    sigma = (p * (1 - p) / n) ** 0.5
    assert abs(mask.mean().item() - p) < 5 * sigma
    for a, b in [(mask, other), (mask[:-1], mask[1:]), (mask[:-64], mask[64:]), (mask[: n // 2], mask[n // 2 :])]:
        correlation = ((a - p) * (b - p)).mean().item() / (p * (1 - p))
        assert abs(correlation) < 5 / len(a) ** 0.5


def test_the_generator_is_splitmix64() -> None:
    """The reference sequence: outputs for seed 1234567 by the algorithm's published code."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    from placement.runtime.rng import _bits

    bits = _bits(torch.arange(1, 6), 1234567)
    assert bits.tolist() == [e & (2**63 - 1) for e in expected]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(
    ("dim", "outer", "shape"), [(0, 1, (24, 5)), (1, 1, (3, 12, 2)), (-1, 2, (5, 24)), (0, 2, (24,))]
)
def test_blocks_of_one_mask(n: int, dim: int, outer: int, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    whole = dropped(x, 0.4, 99)
    assert (whole == 0).any()
    assert torch.equal(whole[whole != 0], x[whole != 0] * (1 / 0.6))
    for rank in range(n):
        axis = rt.simulate(tp=n).axes(rank)["tp"]
        own = dropped(block(x, Cut(dim, outer), n, rank), 0.4, 99, ((axis, Cut(dim, outer)),))
        assert torch.equal(own, block(whole, Cut(dim, outer), n, rank))


@pytest.mark.parametrize(
    ("first", "second", "shape"),
    [
        (Cut(0), Cut(0), (24, 5)),
        (Cut(1), Cut(1, 2), (3, 48)),  # each axis cuts both halves of a fused dim
        (Cut(-1, 2), Cut(1, 2), (3, 48)),
        (Cut(1, 1, (2, 1, 1)), Cut(1), (3, 48)),
        (Cut(0), Cut(1), (4, 6)),
        (Cut(1), Cut(0, 2), (12, 4, 3)),
    ],
)
def test_blocks_of_one_mask_on_two_axes(first: Cut, second: Cut, shape: tuple[int, ...]) -> None:
    """The second axis cuts the blocks of the first."""
    x = torch.ones(shape, dtype=torch.float64)
    whole = dropped(x, 0.4, 99)
    mesh = rt.simulate(dp=2, tp=3)
    for rank, at in enumerate(mesh.ranks):

        def own(y: Tensor, at: dict[str, int] = at) -> Tensor:
            return block(block(y, first, 2, at["dp"]), second, 3, at["tp"])

        axes = mesh.axes(rank)
        assert torch.equal(dropped(own(x), 0.4, 99, ((axes["dp"], first), (axes["tp"], second))), own(whole))


def test_gradient_and_edges() -> None:
    x = torch.randn(50, dtype=torch.float64, requires_grad=True)
    out = dropped(x, 0.3, 1)
    out.sum().backward()
    assert torch.equal(x.grad != 0, out != 0)
    assert dropped(x, 0, 1) is x
    assert not dropped(x, 1, 1).any()
    assert dropped(torch.ones(0, 3), 0.5, 1).shape == (0, 3)
    assert dropped(torch.tensor(1.0), 0.5, 1).shape == ()
    assert dropped(torch.ones(9, dtype=torch.bfloat16), 0.5, 1).dtype == torch.bfloat16
    assert torch.isfinite(dropped(torch.full((100,), torch.inf), 0.5, 1)[drop_mask(torch.ones(100), 0.5, 1)]).all()
    with pytest.raises(ValueError, match="between 0 and 1"):
        dropped(x, 1.5, 1)


def test_places() -> None:
    assert place("layers.0.drop", 1) == place("layers.0", "drop:1") == "layers.0.drop:1"
    assert place("", "drop:1") == "drop:1"
    assert place("", 0) == ":0"


# -- a program ------------------------------------------------------------------------------------


class Block(nn.Module):
    """Dropout on hidden values, in front of a linear, and on probabilities of grouped, causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HEADS * HEAD, HIDDEN, dtype=torch.float64) / 3)
        self.kv = nn.Parameter(torch.randn(2 * KV * HEAD, HIDDEN, dtype=torch.float64) / 3)
        self.back = nn.Parameter(torch.randn(HIDDEN, HEADS * HEAD, dtype=torch.float64) / 3)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        h = F.dropout(x, 0.1, self.training)
        q = F.linear(h, self.weight).view(b, s, HEADS, HEAD).transpose(1, 2)
        k, v = (y.view(b, s, KV, HEAD).transpose(1, 2) for y in F.linear(h, self.kv).chunk(2, -1))
        p = 0.3 if self.training else 0.0
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=True)
        h = F.linear(h.transpose(1, 2).reshape(b, s, HEADS * HEAD), self.back)
        h = F.dropout(h, 0.2, self.training)
        return x + self.drop(self.drop(h))


class OneDevice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return F.dropout(x, 0.5, self.training)


class TensorParallel(rt.Module):
    """Heads sharded; hidden values under sequence sharding before and after."""

    def forward(self, x: Tensor) -> Tensor:
        h = rt.dropout(self, x, 0.1, 0, (self.tp, 1))
        h = rt.all_gather(h, self.tp, 1)
        b, s, _ = h.shape
        q = F.linear(h, self.weight).view(b, s, -1, HEAD).transpose(1, 2)
        k, v = (y.view(b, s, -1, HEAD).transpose(1, 2) for y in F.linear(h, self.kv).chunk(2, -1))
        h = rt.attention(self, q, k, v, 0.3, 1, (self.tp, 1), is_causal=True, enable_gqa=True)
        h = F.linear(h.transpose(1, 2).reshape(b, s, -1), self.back)
        h = rt.reduce_scatter(h, self.tp, 1)
        h = rt.dropout(self, h, 0.2, 2, (self.tp, 1))
        h = rt.dropout(self, h, 0.25, "drop:0", (self.tp, 1))
        return x + rt.dropout(self, h, 0.25, "drop:1", (self.tp, 1))


class Local(rt.Module):
    """The same without sharding: every rank does the whole, and must drop the same."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        h = rt.dropout(self, x, 0.1, 0)
        q = F.linear(h, self.weight).view(b, s, -1, HEAD).transpose(1, 2)
        k, v = (y.view(b, s, -1, HEAD).transpose(1, 2) for y in F.linear(h, self.kv).chunk(2, -1))
        h = rt.attention(self, q, k, v, 0.3, 1, is_causal=True, enable_gqa=True)
        h = F.linear(h.transpose(1, 2).reshape(b, s, -1), self.back)
        h = rt.dropout(self, h, 0.2, 2)
        return x + rt.dropout(self, rt.dropout(self, h, 0.25, "drop:0"), 0.25, "drop:1")


class Sharded(rt.Program):
    axes: ClassVar = {"tp": 2}
    inputs: ClassVar = {"x": (("batch", "seq", HIDDEN), None)}
    draws = True
    recompute = False

    def forward(self, x: Tensor) -> Tensor:
        x = rt.split(x, self.tp, 1)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        x = rt.dropout(self, x, 0.5, 0, (self.tp, 1))
        return rt.all_gather(x, self.tp, 1, to="I")


class Replicated(rt.Program):
    inputs: ClassVar = {"x": (("batch", "seq", HIDDEN), None)}
    draws = True
    recompute = False
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.recompute else layer(x)
        return rt.dropout(self, x, 0.5, 0)


class Replicated2(Replicated):
    axes: ClassVar = {"tp": 2}


class Replicated1(Replicated):
    axes: ClassVar = {"tp": 1}


def program(kind: type[rt.Program], layer: type[rt.Module]) -> rt.Program:
    def cut(dim: int, outer: int = 1) -> rt.Cut | None:
        return rt.Cut(dim, outer) if layer is TensorParallel else None

    f64 = torch.float64
    return kind(
        layers=[
            layer(
                weight=rt.param(HEADS * HEAD, HIDDEN, dtype=f64, cut=cut(0)),
                kv=rt.param(2 * KV * HEAD, HIDDEN, dtype=f64, cut=cut(0, 2)),
                back=rt.param(HIDDEN, HEADS * HEAD, dtype=f64, cut=cut(1)),
            )
            for _ in range(2)
        ]
    )


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(3, 6, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def one_device() -> OneDevice:
    torch.manual_seed(11)
    return OneDevice()


def expected(steps: int, seed: int = 0, step: int = 0) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs of ``steps`` calls of the one-device model and its accumulated gradients."""
    model = one_device()
    outs = []
    with rt.same_random(model, seed, step):
        for i in range(steps):
            outs.append(model(inputs(i)))
            outs[-1].square().sum().backward()
    return [out.detach() for out in outs], {name: p.grad for name, p in model.named_parameters()}


def run(compiled: Any, steps: int) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    outs = []
    for i in range(steps):
        outs.append(compiled(inputs(i).requires_grad_()))
        outs[-1].square().sum().backward()
    return [out.detach() for out in outs], compiled.full_gradients()


def same(got: tuple[list[Tensor], dict[str, Any]], want: tuple[list[Tensor], dict[str, Tensor]]) -> None:
    for out, reference in zip(got[0], want[0], strict=True):
        torch.testing.assert_close(out, reference, rtol=1e-11, atol=1e-12)
    assert set(got[1]) == set(want[1])
    for name, grad in want[1].items():
        torch.testing.assert_close(got[1][name], grad, rtol=1e-11, atol=1e-12 * float(grad.abs().max()), msg=name)


def on(mesh: Any, built: rt.Program) -> Any:
    compiled = built.on(mesh)
    compiled.load_full_state_dict(one_device().state_dict())
    return compiled


@pytest.mark.parametrize(("kind", "layer"), [(Sharded, TensorParallel), (Replicated2, Local)])
def test_one_device_and_simulated(kind: type[rt.Program], layer: type[rt.Module]) -> None:
    compiled = on(rt.simulate(tp=2), program(kind, layer))
    same(run(compiled, 3), expected(3))
    plain = one_device()
    differ = run(compiled, 1)[0][0] - plain(inputs())
    assert differ.abs().max() > 0.1  # so the masks do matter


def test_calls_that_are_recomputed_whole() -> None:
    """Ranks in one process run in threads of their own, of which none is the one that runs the backward."""
    compiled = on(rt.simulate(tp=2), program(Sharded, TensorParallel))
    outs = [checkpoint(compiled, inputs(i).requires_grad_(), use_reentrant=False) for i in range(2)]
    for out in outs:
        out.square().sum().backward()
    same(([out.detach() for out in outs], compiled.full_gradients()), expected(2))


def test_replicas_agree() -> None:
    compiled = on(rt.simulate(tp=2), program(Replicated2, Local))
    outs = rt.simulate(tp=2).run(lambda axes: compiled.programs[axes["tp"].rank](inputs()))
    assert torch.equal(*outs)


def test_steps_and_seeds() -> None:
    compiled = on(rt.simulate(tp=2), program(Sharded, TensorParallel))
    first, second = compiled(inputs()), compiled(inputs())
    assert not torch.equal(first, second)
    rt.seed(compiled, 0)
    assert torch.equal(compiled(inputs()), first)
    assert torch.equal(compiled(inputs()), second)
    assert rt.steps(compiled) == 2
    rt.seed(compiled, 0, step=1)
    assert torch.equal(compiled(inputs()), second)
    rt.seed(compiled, 5)
    seeded = compiled(inputs())
    assert not torch.equal(seeded, first)
    torch.testing.assert_close(seeded.detach(), expected(1, 5)[0][0], rtol=1e-11, atol=1e-12)
    torch.manual_seed(1)  # has no part in it
    rt.seed(compiled, 0)
    assert torch.equal(compiled(inputs()), first)


class Still(Replicated2):
    draws = False


def test_a_program_that_draws_nothing_leaves_the_generator_alone() -> None:
    compiled = placement.compile(
        nn.Linear(4, 4),
        rt.simulate(tp=2),
        "mesh tp\nparam weight : [out, in], Shard(out) @ tp\noutput output : Shard(out) @ tp",
        example={"input": torch.randn(3, 4)},
    )
    before = torch.get_rng_state()
    compiled(input=torch.ones(3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert rt.steps(compiled) == 0


def test_a_program_that_draws_says_so() -> None:
    compiled = on(rt.simulate(tp=2), program(Still, Local))
    with pytest.raises(rt.StateError, match=r"layers\.0 draws random numbers in a program that has no draws = True"):
        compiled(inputs())
    compiled.eval()(inputs())


def test_evaluation_drops_nothing_and_is_no_step() -> None:
    compiled = on(rt.simulate(tp=2), program(Sharded, TensorParallel))
    first, second = compiled(inputs()), compiled(inputs())
    rt.seed(compiled, 0)
    assert torch.equal(compiled(inputs()), first)
    compiled.eval()
    model = one_device().eval()
    with rt.same_random(model):
        torch.testing.assert_close(compiled(inputs()), model(inputs()))
    compiled.train()
    assert torch.equal(compiled(inputs()), second)


def test_torchs_generator_is_left_alone() -> None:
    """A call draws one number, whatever happens inside; evaluation none."""
    compiled = on(rt.simulate(tp=2), program(Sharded, TensorParallel))
    torch.manual_seed(3)
    torch.randint(2**62, ())
    want = torch.rand(3)
    torch.manual_seed(3)
    compiled(inputs())
    assert torch.equal(torch.rand(3), want)
    torch.manual_seed(3)
    compiled.eval()(inputs())
    torch.randint(2**62, ())
    assert torch.equal(torch.rand(3), want)


def test_a_failing_call_leaves_it_too() -> None:
    compiled = on(rt.simulate(tp=2), program(Sharded, TensorParallel))
    torch.manual_seed(3)
    compiled.programs[1].layers[1].register_forward_pre_hook(boom)
    with pytest.raises(RuntimeError, match="boom"):
        compiled(inputs())
    assert torch.initial_seed() == 3


def boom(*_: Any) -> None:
    raise RuntimeError("boom")


# -- recomputation --------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(reentrant: bool) -> None:
    """Also where calls, and evaluation, come between a forward and its backward."""
    compiled = on(rt.simulate(tp=1), program(Replicated1, Local))
    want = run(compiled, 3)
    compiled.zero_grad()
    rt.seed(compiled, 0)
    for one in compiled.programs:
        one.recompute, one.reentrant = True, reentrant
    same(run(compiled, 3), want)

    compiled.zero_grad()
    rt.seed(compiled, 0)
    outs = [compiled(inputs(i).requires_grad_()) for i in range(3)]
    compiled.eval()
    compiled(inputs().requires_grad_())
    compiled.train()
    for out in (outs[1], outs[2], outs[0]):
        out.square().sum().backward()
    same(([out.detach() for out in outs], compiled.full_gradients()), want)


def test_recomputation_of_the_whole_program() -> None:
    compiled = on(rt.simulate(tp=1), program(Replicated1, Local))
    want = run(compiled, 2)
    compiled.zero_grad()
    rt.seed(compiled, 0)
    outs = [checkpoint(compiled, inputs(i), use_reentrant=False) for i in range(2)]
    for out in outs:
        out.square().sum().backward()
    same(([out.detach() for out in outs], compiled.full_gradients()), want)
    assert compiled.programs[0]._random.step == 2


def test_recomputation_without_torchs_help() -> None:
    """Without ``preserve_rng_state`` the latest call's masks are repeated."""
    compiled = on(rt.simulate(tp=1), program(Replicated1, Local))
    (one,) = compiled.programs
    want, got = [], []
    for preserve in (True, False):
        rt.seed(compiled, 0)
        one.zero_grad()

        def forward(x: Tensor, preserve: bool = preserve) -> Tensor:
            return checkpoint(one.layers[0], x, use_reentrant=False, preserve_rng_state=preserve)

        one.forward = forward
        one(inputs()).square().sum().backward()
        (want if preserve else got).append(one.layers[0].weight.grad.clone())
    assert torch.equal(got[0], want[0])


def test_the_one_device_model_recomputes_too() -> None:
    want = expected(2)
    model = one_device()
    model.recompute = True
    with rt.same_random(model):
        outs = [model(inputs(i)) for i in range(2)]
        for out in outs:
            out.square().sum().backward()
    same(([out.detach() for out in outs], {name: p.grad for name, p in model.named_parameters()}), want)


@pytest.mark.parametrize("what", ["whole", "whole, recomputed", "layers, recomputed"])
def test_compiled_equals_eager(what: str) -> None:
    """One graph draws what ops by themselves do, and recomputation repeats it, in the graph or around it."""
    compiled = on(rt.simulate(tp=1), program(Replicated1, Local))
    want = run(compiled, 2)
    compiled.zero_grad()
    rt.seed(compiled, 0)
    (one,) = compiled.programs
    call = torch.compile(one, backend="aot_eager", fullgraph=True) if "whole" in what else one
    one.recompute = "recomputed" in what
    for layer in one.layers if "layers" in what else ():
        layer.compile(backend="aot_eager", fullgraph=True)
    outs = [call(inputs(i).requires_grad_()) for i in range(2)]
    for out in outs:
        out.square().sum().backward()
    same(([out.detach() for out in outs], compiled.full_gradients()), want)
    assert rt.steps(compiled) == 2
    torch.compiler.reset()


# -- the one-device side --------------------------------------------------------------------------


class Forms(nn.Module):
    """Every way that torch offers to say dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Dropout(0.5)
        self.inplace = nn.Dropout(0.5, inplace=True)

    def forward(self, x: Tensor) -> list[Tensor]:
        given = [x + 0, x + 0]
        return [
            self.module(x),
            self.inplace(given[0]),
            given[0],
            F.dropout(x, p=0.0),
            F.dropout(input=x, p=0.5),
            torch.dropout(x, 0.5, True),
            torch.dropout_(given[1], 0.5, train=True),
            F.dropout(x, 0.5, training=False),
        ]


def test_forms_of_dropout() -> None:
    model, x = Forms(), torch.ones(40)
    with rt.same_random(model, seed=4) as random:
        module, inplace, written, none, function, second, third, off = model(x)
    assert random.step == 1
    again = Random(4)
    again.begin(training=True)
    assert torch.equal(module, dropped(x, 0.5, again.key("module", 0)))
    assert torch.equal(inplace, dropped(x, 0.5, again.key("inplace", 0)))
    assert written is inplace
    assert none is off is x
    for site, out in enumerate((function, second, third)):
        assert torch.equal(out, dropped(x, 0.5, again.key("", site)))
    again.end()
    assert not model.module._forward_hooks
    assert not torch.equal(model(x)[0], module)


class Interrupted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


def test_an_interrupted_call_is_forgotten() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(Interrupted())
    with pytest.raises(KeyboardInterrupt), rt.same_random(model):
        model(torch.ones(3))
    assert torch.initial_seed() == 3
    assert torch.overrides._get_current_function_mode_stack() == []


def test_multihead_attention_is_refused() -> None:
    model = nn.MultiheadAttention(4, 2, dropout=0.5)
    x = torch.randn(3, 2, 4)
    with rt.same_random(model):
        with pytest.raises(NotImplementedError, match="MultiheadAttention"):
            model(x, x, x)
        model.eval()(x, x, x)


def test_copies_have_their_own_state() -> None:
    built = program(Replicated1, Local)
    first, second = on(rt.simulate(tp=1), built), on(rt.simulate(tp=1), built)
    a, _ = first(inputs()), first(inputs())
    assert torch.equal(second(inputs()), a)
    assert torch.equal(copy.deepcopy(second)(inputs(1)), second(inputs(1)))


# -- processes ------------------------------------------------------------------------------------


def on_processes() -> list[tuple[list[Tensor], dict[str, Any]]]:
    torch.manual_seed(dist.get_rank())  # ranks may well differ here
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    found = []
    for kind, layer in ((Sharded, TensorParallel), (Replicated2, Local)):
        for recompute in (False, True):
            built = program(kind, layer)
            built.recompute = recompute
            state = one_device().state_dict()
            torch.manual_seed(dist.get_rank())
            compiled = built.on(mesh)
            compiled.load_full_state_dict(state)
            found.append(run(compiled, 2))
    return found


@pytest.mark.gloo
def test_on_processes(gloo: Pool) -> None:
    want = expected(2)
    for answer in gloo(2).run(on_processes):
        for got in answer:
            same(got, want)
