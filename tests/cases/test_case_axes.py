"""Batch and model on axes of their own, and dims on two axes (C04, C08, C13, C14); loops, outputs and names there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import placement
from placement import api
from placement import runtime as rt
from tests.cases import toys
from tests.cases.toys import close, gradients, ranks, step, whole
from tests.parity.axes import own
from tests.runtime.worlds import Pool, assert_replicas_equal

Sizes = Mapping[str, int]
BOTH = {"dp": 2, "tp": 2}

ON_TP = toys.WEIGHTS.replace("Shard(out)", "Shard(out) @ tp").replace("Shard(in)", "Shard(in) @ tp")
WEIGHTS = ON_TP.replace("mesh tp", "mesh dp\nmesh tp").replace("[batch, seq]", "[batch, seq], Shard(batch) @ dp")
SP = WEIGHTS + toys.NORMS + "Shard(seq) @ tp\noutput logits : Shard(batch) @ dp\n"
PINNED = SP.replace("Shard(seq) @ tp", "Shard(seq) @ tp, Shard(batch) @ dp")  # nothing is free on either axis


def on(*worlds: tuple[str, Sizes]) -> pytest.MarkDecorator:
    """The test on each of these meshes, in its world."""
    params = []
    for world, sizes in worlds:
        name = "-".join([world, *(f"{axis}{n}" for axis, n in sizes.items())])
        params.append(pytest.param(world, sizes, id=name, marks=[pytest.mark.gloo] if world == "gloo" else []))
    return pytest.mark.parametrize(("world", "sizes"), params)


def run(body: Callable[..., None], world: str, sizes: Sizes, gloo: Pool, *args: Any) -> None:
    """Run ``body(mesh, *args)`` on simulated ranks or on gloo processes; its assertions are the test's."""
    if world == "simulated":
        body(rt.simulate(**sizes), *args)
    else:
        gloo(math.prod(sizes.values())).run(_on_mesh, body, dict(sizes), *args)


def _on_mesh(body: Callable[..., None], sizes: Sizes, *args: Any) -> None:
    body(init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)), *args)


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Four rows: of the first none counts in the loss, of the second hardly a token."""
    given = toys.batch(seed, size=4)
    given["labels"][0] = -100
    given["labels"][1, 2:] = -100
    return given


def pair(mesh: Any, spec: str) -> tuple[Any, Any]:
    """A toy and its compiled form. One graph serves all meshes and specs."""
    model = toys.drawn(toys.Toy())
    with mock.patch.object(api, "capture", return_value=toys._captured()):
        return model, placement.compile(model, mesh, spec, example=batch(), sizes={"batch": 4, "seq": 8})


def both(model: Any, program: Any, **given: Tensor) -> list[rt.Event]:
    """One step on both sides, compared; returns what was sent."""
    want = step(model, **given)
    with rt.record() as log:
        got = step(program, **own(program, given))
    close({name: whole(got[name]) for name in want}, want)
    close(program.full_gradients(), gradients(model))
    return log


def same(x: Tensor) -> None:
    """Every process has the same number."""
    if dist.is_initialized():
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, x.item())
        assert len(set(every)) == 1


# -- C04 --------------------------------------------------------------------------------------------


def joint_sums(mesh: Any) -> None:
    model, program = pair(mesh, PINNED)
    log = both(model, program, **batch())
    names = [n for n, _ in model.named_parameters() if n.split(".")[-2].startswith("norm")]
    assert len(names) == 6
    for name in names:
        for rank in ranks(program):  # as autograd left them
            close(rank.get_parameter(name).grad, model.get_parameter(name).grad)
    axes = program.plan.mesh.axes
    hooks = [hook for hook in program.plan.hooks if hook.parameter.name in names]
    (group,) = {hook.axis for hook in hooks}
    assert {axes[i].name for i in hooks[0].axes if axes[i].n > 1} == {axis.name for axis in axes if axis.n > 1}
    nbytes = sum(hook.nbytes for hook in program.plan.hooks if hook.axis == group)
    assert [e.bytes for e in log if e.axis == group and e.phase == "backward" and e.kind == "all_reduce"].count(
        nbytes
    ) == 1


@on(
    ("simulated", BOTH),
    ("simulated", {"dp": 1, "tp": 2}),
    ("simulated", {"dp": 2, "tp": 1}),
    ("gloo", BOTH),
)
def test_C04_gradients_summed_over_both_axes(world: str, sizes: Sizes, gloo: Pool) -> None:
    """Norms that see a part of the batch and of the sequence: their gradients are summed over one axis only."""
    run(joint_sums, world, sizes, gloo)


# -- C08 --------------------------------------------------------------------------------------------

CONTEXT = """
mesh dp
mesh cp
input ids, labels : [batch, seq], Shard(batch) @ dp, Shard(seq) @ cp
output logits : Shard(batch) @ dp, Shard(seq) @ cp
"""


def context(mesh: Any) -> None:
    model, program = pair(mesh, CONTEXT)
    both(model, program, **batch())
    same(whole(program(**own(program, batch()))["loss"]))


@on(
    ("simulated", {"dp": 1, "cp": 2}),
    ("simulated", {"dp": 2, "cp": 1}),
    ("simulated", {"dp": 2, "cp": 2}),
    ("gloo", {"dp": 2, "cp": 2}),
)
def test_C08_one_global_batch(world: str, sizes: Sizes, gloo: Pool) -> None:
    """The loss is multiplied by the ranks of one axis and divided by those of another, somewhere else."""
    run(context, world, sizes, gloo)


# -- C13 and C14 ------------------------------------------------------------------------------------


class Rows(nn.Module):
    """A weight for each feature, and the mean over all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        rows = self.norm(x)
        return {"rows": rows, "loss": (rows.mean(0) * rows[0]).sum() + rows.mean()}


TWICE = "Shard(row) @ dp, Shard(row) @ cp"


def row_spec(mesh: Any, placed: str = "", returned: str = "") -> str:
    axes = mesh.sizes if isinstance(mesh, rt.SimulatedMesh) else mesh.mesh_dim_names
    lines = [f"mesh {axis}" for axis in axes]
    lines.append(f"input x : [row, feature]{placed and ', '}{placed}")
    return "\n".join([*lines, *([f"output rows : {returned}"] if returned else [])]) + "\n"


def rows(count: int) -> Tensor:
    draw = torch.Generator().manual_seed(count)
    return torch.randn(count, 4, generator=draw, dtype=torch.float64).requires_grad_()


def cut(mesh: Any, x: Tensor) -> Tensor:
    """What a caller hands over: this process's rows, or all of them where the ranks are simulated."""
    if isinstance(mesh, rt.SimulatedMesh):
        return x.detach().clone().requires_grad_()
    return x.detach().chunk(mesh.size())[dist.get_rank()].clone().requires_grad_()


def compared(mesh: Any, model: Any, program: Any, count: int, *, placed: bool) -> None:
    one = rows(count)
    mine = cut(mesh, one) if placed else rows(count)
    model.zero_grad()
    program.zero_grad()
    want, got = step(model, x=one), step(program, x=mine)
    close({name: whole(x) for name, x in got.items()}, want)
    close(mine.grad, cut(mesh, one.grad) if placed else one.grad)
    close(program.full_gradients(), gradients(model))


def unequal(mesh: Any) -> None:
    model = toys.drawn(Rows())
    for count in (3, 1):
        text = row_spec(mesh, "Shard(row) @ dp")
        with pytest.raises(placement.PlacementError) as caught:
            placement.compile(model, simulated(mesh), text, example={"x": rows(count)})
        (fault,) = caught.value.diagnostics
        assert fault.code == "PLC203"
        assert all(word in fault.message for word in ("row", f"{count}", "'dp' of 2"))
        program = placement.compile(model, mesh, row_spec(mesh), example={"x": rows(count)})
        compared(mesh, model, program, count, placed=False)


def simulated(mesh: Any) -> Any:
    """A simulated mesh of the same sizes: on one of processes an example is a block, and blocks are equal."""
    return mesh if isinstance(mesh, rt.SimulatedMesh) else rt.simulate(dp=2, cp=2)


@on(("simulated", {"dp": 2, "cp": 2}), ("gloo", {"dp": 2, "cp": 2}))
def test_C13_a_mean_of_unequal_parts(world: str, sizes: Sizes, gloo: Pool) -> None:
    """Three rows or one on two ranks: a mean of the ranks' means, or NaN where a rank has none."""
    run(unequal, world, sizes, gloo)


def blocks_differ(mesh: Any) -> None:
    """Called with blocks of two rows and of one: refused on every rank before anything is sent."""
    text = row_spec(mesh, "Shard(row) @ dp", "Shard(row) @ dp")
    program = placement.compile(toys.drawn(Rows()), mesh, text, example={"x": rows(2)})
    with pytest.raises(rt.SizeError, match=r"'x' differ on axis 'dp': rank 0: \[2, 4\]; rank 1: \[1, 4\]"):
        program(x=rows(2 - mesh.get_local_rank("dp")))


@on(("gloo", {"dp": 2, "cp": 2}))
def test_C13_blocks_of_unlike_sizes(world: str, sizes: Sizes, gloo: Pool) -> None:
    run(blocks_differ, world, sizes, gloo)


def permuted(mesh: Any, returned: str) -> None:
    model = toys.drawn(Rows())
    text = row_spec(mesh, TWICE, returned)
    program = placement.compile(model, mesh, text, example={"x": cut(mesh, rows(8))})
    for count in range(1, 10):
        if count % 4 == 0:
            compared(mesh, model, program, count, placed=True)
            continue
        if isinstance(mesh, rt.SimulatedMesh):
            with pytest.raises(rt.SizeError, match=f"{count}|{count // 2}"):
                program(x=rows(count))


@on(("simulated", {"dp": 2, "cp": 2}), ("simulated", {"cp": 2, "dp": 2}))
@pytest.mark.parametrize("returned", ["", TWICE, "Shard(row) @ dp", "auto @ dp, auto @ cp"])
def test_C14_rows_on_two_axes(world: str, sizes: Sizes, returned: str, gloo: Pool) -> None:
    """One dim cut by two axes and gathered over both at once: rows come back in another order."""
    run(permuted, world, sizes, gloo, returned)


@on(("gloo", {"dp": 2, "cp": 2}))
def test_C14_rows_of_processes_on_two_axes(world: str, sizes: Sizes, gloo: Pool) -> None:
    run(permuted, world, sizes, gloo, "")


@pytest.mark.parametrize("count", [1, 2, 6, 9])
def test_C14_rows_that_the_axes_do_not_divide(count: int) -> None:
    mesh = rt.simulate(dp=2, cp=2)
    with pytest.raises(placement.PlacementError) as caught:
        placement.compile(toys.drawn(Rows()), mesh, row_spec(mesh, TWICE), example={"x": rows(count)})
    assert {fault.code for fault in caught.value.diagnostics} == {"PLC203"}
    assert all(f" {count}" in fault.message for fault in caught.value.diagnostics)


# -- weights on two axes ----------------------------------------------------------------------------


class Lookup(nn.Module):
    """An embedding, a column and a row, and classes."""

    def __init__(self, vocab: int = 16, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 12), nn.Linear(12, width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor, labels: Tensor, x: Tensor) -> dict[str, Tensor]:
        y = self.norm(self.embed(ids) + x)
        logits = self.head(y + self.down(torch.tanh(self.up(y))))
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


LOOKUP = "input ids, labels : [batch, seq]\ninput x : [batch, seq, width]\n"
ON_BOTH = """
param embed.weight : [vocab, hidden], Shard(vocab) @ A, Shard(vocab) @ B
param {up.weight,up.bias,head.weight} : Shard(out) @ A, Shard(out) @ B
param down.weight : Shard(in) @ A, Shard(in) @ B
"""
TWO_DIMS = """
param up.weight : [o, i], Shard(o) @ A, Shard(i) @ B
param down.weight : [p, q], Shard(q) @ A, Shard(p) @ B
param head.weight : Shard(out) @ A, Shard(in) @ B
param embed.weight : Shard(vocab) @ B, Shard(hidden) @ A
"""
SPECS = {
    "one dim": ON_BOTH,
    "one dim, returned so": ON_BOTH + "output logits : Shard(2) @ A, Shard(2) @ B\n",
    "two dims": TWO_DIMS,
    "two dims, other way": TWO_DIMS.replace("A", "C").replace("B", "A").replace("C", "B"),
    "a term and a block": TWO_DIMS + "value down : Partial @ A, Shard(batch) @ B\n",
    "logits of terms": "param head.weight : Shard(in) @ A\noutput logits : Partial @ A, Shard(batch) @ B\n",
    "logits in blocks of both": ON_BOTH + "output logits : Shard(seq) @ A, Shard(batch) @ B\n",
    "a value on one axis": ON_BOTH + "value norm : Shard(seq) @ B\nvalue down : Partial @ A\n",
}


def weights_on_both(mesh: Any, text: str) -> None:
    names = list(mesh.sizes if isinstance(mesh, rt.SimulatedMesh) else mesh.mesh_dim_names)
    spec = "".join(f"mesh {name}\n" for name in names) + LOOKUP
    spec += text.replace("@ A", f"@ {names[0]}").replace("@ B", f"@ {names[1]}")
    model = toys.drawn(Lookup())
    given = batch() | {"x": torch.randn(4, 8, 8, dtype=torch.float64)}
    one, mine = ({**given, "x": given["x"].clone().requires_grad_()} for _ in range(2))
    program = placement.compile(model, mesh, spec, example=mine)
    want = step(model, **one)
    with rt.record() as log:
        got = step(program, **mine)
    close({name: whole(got[name]) for name in want}, want)
    close(mine["x"].grad, one["x"].grad)
    close(program.full_gradients(), gradients(model))
    said = Counter((x.phase, x.action.value, x.axis, x.nbytes) for x in program.plan.launches())
    assert Counter((e.phase, e.kind, e.axis, e.bytes) for e in log) == said
    close(program.full_state_dict(), dict(model.state_dict()))
    for m, clip in ((model, torch.nn.utils.clip_grad_norm_), (program, placement.clip_grad_norm_)):
        clip(m.parameters() if m is model else m, 0.01)
    close(program.full_gradients(), gradients(model), 1e-6)
    assert_replicas_equal(program)


@on(("simulated", BOTH))
@pytest.mark.parametrize("text", SPECS.values(), ids=SPECS)
def test_weights_on_two_axes(world: str, sizes: Sizes, text: str, gloo: Pool) -> None:
    run(weights_on_both, world, sizes, gloo, text)


@on(("gloo", BOTH))
@pytest.mark.parametrize("name", ["one dim", "a term and a block"])
def test_weights_of_processes_on_two_axes(world: str, sizes: Sizes, name: str, gloo: Pool) -> None:
    run(weights_on_both, world, sizes, gloo, SPECS[name])


# -- loops -------------------------------------------------------------------------------------------


def loop(mesh: Any) -> None:
    model, program = pair(mesh, PINNED)
    program.load_full_state_dict(program.full_state_dict())
    close(program.full_state_dict(), dict(model.state_dict()), 0.0)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, program)]
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=number != 1)
        for micro in range(3):
            (model(**batch(3 * number + micro))["loss"] / 3).backward()
            loss = whole(program(**own(program, batch(3 * number + micro)))["loss"]) / 3
            with rt.record() as log:
                if micro < 2:
                    with program.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            flat = {hook.axis: 0 for hook in program.plan.hooks}
            flat |= {axis: sum(h.nbytes for h in program.plan.hooks if h.axis == axis) for axis in flat}
            fired = [(e.axis, e.bytes) for e in log if (e.axis, e.bytes) in flat.items()]
            assert fired == ([] if micro < 2 else [*dict.fromkeys(fired)])
            assert micro < 2 or dict(fired) == flat
        close(program.full_gradients(), gradients(model))
        want = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        got = placement.clip_grad_norm_(program, 0.1)
        close(got, want, 1e-6)
        same(got)
        for optimizer in optimizers:
            optimizer.step()
    close(program.full_state_dict(), dict(model.state_dict()), 1e-5)  # the norms agree to float32
    assert_replicas_equal(program)


@on(("simulated", BOTH), ("gloo", BOTH))
def test_a_loop_with_micro_batches_and_clipping(world: str, sizes: Sizes, gloo: Pool) -> None:
    run(loop, world, sizes, gloo)


# -- names and orders --------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return next(self.children())(x)


@pytest.mark.parametrize(
    ("axes", "member", "words"),
    [
        (["dp", "tp"], "tp", "axis 'tp' has the name of the model's member 'tp'"),
        (["dp", "tp"], "dp_tp", "the group of the axes dp, tp has the name of the model's member 'dp_tp'"),
        (["dp", "tp", "dp_tp"], "up", "the group of the axes dp, tp has the name of axis 'dp_tp'"),
        (["a", "b_c", "a_b", "c"], "up", "the group of the axes a_b, c has the name of the group of the axes a, b_c"),
    ],
)
def test_names_of_axes_and_groups(axes: list[str], member: str, words: str) -> None:
    spec = "".join(f"mesh {axis}\n" for axis in axes) + "input x : [row, feature]\n"
    with pytest.raises(placement.PlacementError) as caught:
        placement.compile(Named(member), rt.simulate(**dict.fromkeys(axes, 2)), spec, example={"x": torch.ones(4, 4)})
    (fault,) = caught.value.diagnostics
    assert (fault.code, fault.message) == ("PLC112", words)


def test_an_emitted_program_is_for_axes_in_its_own_order() -> None:
    model, spec = toys.drawn(Rows()), row_spec(rt.simulate(dp=2, cp=2), TWICE)
    text = placement.emit(model, {"dp": 2, "cp": 2}, spec, example={"x": rows(8)})
    scope: dict[str, Any] = {}
    exec(text, scope)
    scope["build"](rt.simulate(dp=2, pp=1, cp=2))
    with pytest.raises(rt.MeshError, match="axes are dp, cp, outermost first; the mesh has cp, dp"):
        scope["build"](rt.simulate(cp=2, dp=2))


def test_an_axis_that_nothing_uses() -> None:
    spec = PINNED.replace("mesh dp", "mesh pp\nmesh dp")
    model, program = pair(rt.simulate(pp=2, **BOTH), spec)
    log = both(model, program, **batch())
    assert not any("pp" in event.axis for event in log)
