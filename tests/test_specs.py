"""The specs that come with the package: each fits the families that it is for, and no line of it is idle."""

from __future__ import annotations

import pytest
import torch
import transformers

import placement
from placement import specs
from placement.graph.precision import lifted
from tests.cases.toys import close, gradients
from tests.zoo.table import FAMILIES

AXES = {"dp": 2, "tp": 2}
TOKENS = {name: torch.ones(4, 6) for name in ("input_ids", "labels")}
READY = {f.name: f for f in FAMILIES if specs.families().get(f.model.partition("For")[0].removesuffix("LMHeadModel"))}


def on_meta(family):
    config = getattr(transformers, family.config)(**family.sizes)
    with torch.device("meta"):
        return getattr(transformers, family.model)(config)


def names(model):
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def test_every_family_has_a_class_of_transformers() -> None:
    known = dir(transformers)
    for family in specs.families():
        assert any(name.startswith(family) and hasattr(transformers, f"{family}PreTrainedModel") for name in known), (
            family
        )


@pytest.fixture(scope="module")
def fitted():
    """Of each family of the zoo that a spec comes for: its parameters' names, the spec, and what is ready of it."""
    models = {name: on_meta(family) for name, family in READY.items()}
    return {n: (names(model), specs.find(model), specs.ready(model, AXES, TOKENS)) for n, model in models.items()}


def test_most_families_of_the_zoo_have_a_spec(fitted) -> None:
    assert len(fitted) >= 40
    assert all(spec is not None for *_, spec in fitted.values())


def test_a_ready_spec_places_what_an_expert_would(fitted) -> None:
    for family, (known, _, spec) in fitted.items():
        for word, dim in ((READY[family].column, "out"), (READY[family].row, "in")):
            for line in placement.parse(
                "mesh tp\n" + "".join(f"param {p}.weight : Shard({dim}) @ tp\n" for p in word.split())
            ).params:
                for name in filter(line.pattern.matches, known):
                    placed = [str(p) for own in spec.params if own.pattern.matches(name) for p in own.placed]
                    assert placed == [f"Shard({dim}) @ tp"], (family, name)


def test_no_line_is_for_nothing(fitted) -> None:
    idle: dict[str, set[str]] = {}
    for known, whole, _ in fitted.values():
        lines = {str(line) for line in whole.params if not any(map(line.pattern.matches, known))}
        idle[whole.file] = idle.get(whole.file, lines) & lines
    assert not any(idle.values()), idle


def test_lines_of_what_is_not_there_are_left_out() -> None:
    model = on_meta(READY["llama"])
    spec = specs.ready(model, {"dp": 2}, {"inputs_embeds": torch.ones(2, 3, 4), "labels": torch.ones(2, 3)})
    assert [str(axis.name) for axis in spec.axes] == ["dp"]
    assert [tuple(map(str, line.names)) for line in spec.inputs] == [("labels",), ("inputs_embeds",)]
    assert not any(line.placed for line in spec.params)


def test_an_input_of_another_shape_is_not_named() -> None:
    given = {**TOKENS, "labels": torch.ones(4), "position_ids": torch.ones(1, 6), "attention_mask": torch.ones(4, 6)}
    spec = specs.ready(on_meta(READY["llama"]), AXES, given)
    assert [tuple(map(str, line.names)) for line in spec.inputs] == [("input_ids", "attention_mask")]


def test_a_tied_parameter_is_placed_once() -> None:
    for name in ("gpt2", "t5", "bart", "gemma2", "cohere"):
        model = on_meta(READY[name])
        head = model.get_output_embeddings().weight
        own = [n for n, p in model.named_parameters(remove_duplicate=False) if p is head]
        assert len(own) > 1, name
        spec = specs.ready(model, AXES, TOKENS)
        assert sum(any(line.pattern.matches(n) for n in own) for line in spec.params) == 1, name


def test_another_axis_is_told_with_all_that_the_spec_has() -> None:
    with pytest.raises(placement.PlacementError) as caught:
        placement.plan(on_meta(READY["llama"]), {"dp": 2, "x": 2}, example=TOKENS)
    (fault,) = caught.value.diagnostics
    assert (fault.code, fault.hint) == ("PLC101", "the axes of the spec are 'dp', 'tp'")


class Mine(transformers.LlamaForCausalLM):
    """A user's own class."""


class Unknown(torch.nn.Module):
    def forward(self, x):
        return x + 1


def test_a_class_that_derives_from_one_has_its_spec() -> None:
    with torch.device("meta"):
        spec = specs.ready(Mine(transformers.LlamaConfig(num_hidden_layers=1)), AXES, {})
    assert spec.file == "llama.plc"
    assert spec.notes[0].message == "no spec was given: llama.plc, which comes with the package, is used for Mine"


def test_without_a_spec_a_program_is_what_one_device_computes_and_says_which_it_is_of() -> None:
    family = READY["mistral"]
    model, given = family.build(), {k: torch.cat([v, v.flip(0)[:1]]) for k, v in family.inputs().items()}
    with lifted(torch.float64):
        program = placement.compile(model, placement.simulate(dp=2, tp=2), example=given)
        model(**given).loss.backward()
        program(**given).loss.backward()
    close(program.full_gradients(), gradients(model))
    assert [note.code for note in program.plan.bound.notes][:1] == ["PLC408"]
    assert "llama.plc, which comes with the package" in " ".join(program.explain().split())


@pytest.mark.parametrize("model", [Unknown(), transformers.LlamaModel(transformers.LlamaConfig(num_hidden_layers=0))])
def test_where_no_spec_comes_for_a_model_it_is_said(model) -> None:
    with pytest.raises(placement.PlacementError, match=r"error\[PLC408\]") as caught:
        placement.plan(model, {"tp": 2}, example={"x": torch.ones(2)})
    assert "placement init" in caught.value.diagnostics[0].hint
