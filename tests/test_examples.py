"""Every example stands on its own: its model builds offline, and its specs are short and match the model."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from placement import lang
from placement.lang.format import format_text

FOLDER = Path(__file__).resolve().parent.parent / "examples"
EXAMPLES = sorted(path.parent.name for path in FOLDER.glob("*/model.py"))
SPECS = sorted(FOLDER.glob("*/*.plc"))


def build(example: str, **arguments):
    return importlib.import_module(f"examples.{example}.model").build(**arguments)


def test_each_example_has_a_spec_with_and_one_without_sequence_parallelism() -> None:
    assert {"bert", "gpt2", "llama", "mlp", "qwen3"} <= set(EXAMPLES)
    for example in EXAMPLES:
        assert {f"{example}.plc", f"{example}_tp.plc"} <= {path.name for path in SPECS if path.parent.name == example}


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_pattern_of_a_spec_matches_and_no_parameter_is_placed_twice(path: Path) -> None:
    spec = lang.load(path)
    assert lang.check(spec) == ()
    assert format_text(path.read_text(encoding="utf-8")) == path.read_text(encoding="utf-8")
    model, example = build(path.parent.name)
    with torch.no_grad():
        outputs = model(**example)

    parameters = dict(model.named_parameters(remove_duplicate=False))
    placed = [parameter for line in spec.params for name, parameter in parameters.items() if line.pattern.matches(name)]
    assert len({id(parameter) for parameter in placed}) == len(placed)  # a tied one is one
    for line in spec.params:
        assert any(line.pattern.matches(name) for name in parameters), line
    for line in spec.values:
        assert any(line.pattern.matches(name) for name, _ in model.named_modules()), line
    assert {str(name) for line in spec.inputs for name in line.names} == set(example)
    assert {str(name) for line in spec.outputs for name in line.names} <= set(outputs)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_spec_has_fewer_than_15_lines_that_say_something(path: Path) -> None:
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    assert len([line for line in lines if line]) < 15


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_model_is_the_same_every_time_and_takes_sizes(example: str) -> None:
    model, inputs = build(example, batch=3, seq=10, layers=1, dtype=torch.float64)
    torch.rand(7)  # the factory brings its own seed
    again, same = build(example, batch=3, seq=10, layers=1, dtype=torch.float64)
    for (name, one), (_, two) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert one.dtype is torch.float64, name
        assert torch.equal(one, two), name
    for name, value in inputs.items():
        assert value.shape[:2] == (3, 10)
        assert torch.equal(value, same[name])
    assert len({value.data_ptr() for value in inputs.values()}) == len(inputs)  # torch.export merges equal ones
    model.eval()(**inputs)["loss"].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_model_on_the_meta_device_has_the_same_parameters(example: str) -> None:
    model, _ = build(example)
    meta, inputs = build(example, device="meta")
    assert {name: p.shape for name, p in meta.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert all(tensor.is_meta for tensor in [*meta.parameters(), *inputs.values()])


def test_the_readme_shows_the_spec_of_the_demo() -> None:
    def statements(text: str) -> list[str]:
        return [" ".join(line.split()) for line in text.splitlines() if line.strip()]

    readme = "\n".join(statements((FOLDER.parent / "README.md").read_text(encoding="utf-8")))
    spec = (FOLDER / "qwen3" / "qwen3.plc").read_text(encoding="utf-8").split("\n", 1)[1]
    assert "\n".join(statements(spec)) in readme
