"""``placement init``: proposals are found in the graph, confirmed by a plan, and compute what one device does."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import scaffold_models as toys
import torch

import placement
from placement import cli
from placement.lang.format import format_text
from placement.propose import scaffold

ROOT = Path(__file__).resolve().parents[2]
TOY = f"{Path(toys.__file__)}:words"


def statements(text: str) -> list[str]:
    """What a spec says, without comments and alignment."""
    lines = (" ".join(line.split("#")[0].split()) for line in text.splitlines())
    return [line for line in lines if line]


HEADS = ["param {apple,pear,plum}.{weight,bias} : Shard(out) @ x", "param bowl.weight : Shard(in) @ x"]
INNER = ["param {wide,open}.weight : Shard(out) @ x", "param back.weight : Shard(in) @ x"]
CASES = {
    "everything divides": (
        (128, 4),
        [
            *("param table.weight : Shard(vocab) @ x", "within floors.* {", *HEADS, *INNER, "}"),
            *("param judge.weight : Shard(out) @ x", "output scores : auto"),
        ],
        [],
    ),
    "127 classes": (
        (127, 4),
        ["within floors.* {", *HEADS, *INNER, "}", "value judge : Shard(seq) @ x", "output scores : auto"],
        ["since out is 127 and 4 does not divide 127 (124 or 128 would do): judge.weight"],
    ),
    "two heads": (
        (128, 2),
        [
            *("param table.weight : Shard(vocab) @ x", "within floors.* {", *INNER, "}"),
            *("param judge.weight : Shard(out) @ x", "output scores : auto"),
        ],
        ["since out is 2·32 and 4 does not divide 2 (4 would do): floors.*.{apple,pear,plum}.weight"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_pairs_come_from_the_graph_and_not_from_names(case: str) -> None:
    (classes, heads), lines, said = CASES[case]
    model, example = toys.words(classes, heads)
    made = scaffold(model, "x", 4, example=example)
    assert statements(made.text) == ["mesh x", "input ids, goal : [batch, seq]", *lines]
    comments = " ".join(line.lstrip("# ") for line in made.text.splitlines() if line.startswith("#"))
    for comment in said:
        assert comment in comments
    assert made.plan.cost[0] < made.replicated


def test_what_frees_memory_is_proposed_only_where_it_costs_next_to_nothing() -> None:
    torch.manual_seed(0)
    made = scaffold(toys.Words(512, width=8), "x", 4, example=toys.words()[1])
    assert made.plan.cost[0] <= made.replicated
    assert "param table.weight : Shard(vocab) @ x" in statements(made.text)  # half of the bytes
    assert "wide" not in " ".join(statements(made.text))  # would be one more, past the fraction allowed


def test_the_text_is_the_same_every_time_and_laid_out() -> None:
    first, second = (scaffold(*model_first(toys.words()), example=toys.words()[1]).text for _ in range(2))
    assert first == second == format_text(first)
    for line in first.splitlines():
        if line.lstrip().startswith("param"):
            assert "# " in line, line


def model_first(built: tuple[torch.nn.Module, dict[str, torch.Tensor]]) -> tuple[torch.nn.Module, str, int]:
    return built[0], "x", 4


def test_what_a_line_saves_is_what_the_plan_without_it_costs_more() -> None:
    model, example = toys.words()
    made = scaffold(model, "x", 4, example=example)
    rest = "\n".join(line for line in made.text.splitlines() if "back.weight" not in line)
    sizes = {"batch": 2, "seq": 2048}
    without = placement.plan(model, {"x": 4}, rest + "\n", example=example, sizes=sizes)
    saved = (without.cost[0] - made.plan.cost[0]) / 1e9
    assert f"saves {saved:.1f} ms" in next(line for line in made.text.splitlines() if "back.weight" in line)


def test_a_model_that_nothing_helps_is_told_so() -> None:
    model, example = toys.twisted()
    made = scaffold(model, "tp", 4, example=example)
    assert statements(made.text) == ["mesh tp", "input x : [batch, seq, width]"]
    assert "Nothing that could be placed costs less" in made.text


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({"x": torch.zeros(2, 6, 8)}, {"x": ("batch", "seq", "width")}),
        ({"x": torch.zeros(2, 6, 8), "y": torch.zeros(2, 5, 8)}, {"y": ("batch", "seq_y", "width")}),
        (
            {"x": torch.zeros(2, 8), "ids": torch.zeros(2, 7).long()},
            {"x": ("batch", "features"), "ids": ("batch", "seq")},
        ),
        ({"inputs_embeds": torch.zeros(2, 6, 8)}, {"inputs_embeds": ("batch", "seq", "hidden")}),
        ({"x": torch.zeros(1, 2, 3, 4, 5)}, {"x": ("batch", "dim1", "dim2", "dim3", "dim4")}),
        ({"x": torch.zeros(3, 4), "n": torch.zeros(())}, {"x": ("batch", "features")}),
    ],
)
def test_dims_have_names_by_convention_and_no_name_two_sizes(inputs, named) -> None:
    from placement.graph.example import Example
    from placement.propose.inputs import _names

    class Takes(torch.nn.Module):
        def forward(self, **_): ...

    found = _names(Example.of(Takes(), inputs), encoder_decoder=False)
    assert {name: found[name] for name in named} == named
    assert "n" not in found


@pytest.mark.parametrize("example", ["bert", "gpt2", "llama", "mlp", "qwen3"])
def test_a_spec_for_an_example_is_short_and_verifies(example: str) -> None:
    build = importlib.import_module(f"examples.{example}.model").build
    meta, inputs = build(device="meta", layers=1)
    text = scaffold(meta, "tp", 4, example=inputs).text
    assert len(statements(text)) < 15
    assert sum(line.startswith("param") for line in statements(text)) >= 2
    model, inputs = build(layers=1, batch=2, seq=12)
    assert placement.check(text, model, {"tp": 4}, example=inputs) == ()
    assert placement.verify(model, {"tp": 4}, text, example=inputs, steps=0).ok


def test_init_never_replaces_a_file_unasked(tmp_path, capsys) -> None:
    target = tmp_path / "first.plc"
    args = ["init", "--model", TOY, "--mesh", "x=4", "-o", str(target)]
    assert cli.run(args) == 0
    text = target.read_text()
    assert "param back.weight" in text
    target.write_text("mine")
    assert cli.run(args) == 1
    assert target.read_text() == "mine"
    assert "exists" in capsys.readouterr().err
    assert cli.run([*args, "--force"]) == 0
    assert target.read_text() == text
    assert cli.run(["check", str(target), "--model", TOY, "--mesh", "x=4"]) == 0


@pytest.mark.parametrize(("args", "code"), [(["--mesh", "a=2,b=2"], 2), (["--model", "nonsense"], 2), ([], 2)])
def test_init_refuses_what_it_cannot_use(args, code: int, capsys) -> None:
    given = args if "--model" in args or not args else [*args, "--model", TOY]
    assert cli.run(["init", *given]) == code
    assert "Traceback" not in capsys.readouterr().err
