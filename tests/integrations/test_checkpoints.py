"""Programs with the weights of a directory that transformers wrote, and back."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import placement
from placement.integrations import checkpoint
from placement.integrations import transformers as hf

IDS = {
    name: torch.randint(0, 37, (3, 5), generator=torch.Generator().manual_seed(seed))
    for seed, name in enumerate(("input_ids", "labels"))
}


def build(**more):
    config = transformers.Qwen3Config(
        vocab_size=38,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        use_cache=False,
        dtype="float64",
        **more,
    )
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config).double().train()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model and where it lies, in several files."""
    folder, model = tmp_path_factory.mktemp("qwen3"), build()
    model.save_pretrained(folder, max_shard_size="12KB")
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return folder, model


def other(folder, change):
    """The same directory but for what ``change`` does to the tensors, in one file."""
    tensors = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def copied(saved, tmp_path, change):
    for file in saved[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return other(tmp_path, change)


@pytest.fixture(scope="module")
def program(saved):
    return hf.compile(saved[0], placement.simulate(tp=2), example=IDS)


def test_a_program_has_the_weights_of_the_directory(saved, program) -> None:
    _, model = saved
    expected, found = model(**IDS), program(**IDS)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)  # its norms compute in float32
    full = program.full_state_dict()
    assert full.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(full[name], value), name


def test_what_a_program_saves_loads_into_the_model(saved, program) -> None:
    _, model = saved
    again = build()
    for parameter in again.parameters():
        torch.nn.init.normal_(parameter)
    again.load_state_dict(program.full_state_dict(), strict=True)
    assert torch.equal(again(**IDS).loss, model(**IDS).loss)


def test_a_rank_reads_only_its_own_blocks(saved, program, monkeypatch) -> None:
    read: list[tuple[str, int]] = []
    get = checkpoint.Stored.__getitem__

    def counting(self, index):
        result = get(self, index)
        read.append((self.name, result.numel()))
        return result

    monkeypatch.setattr(checkpoint.Stored, "__getitem__", counting)
    hf.load(program, saved[0])
    held = sum(p.numel() for p in program.parameters())  # of both ranks
    assert sum(numel for _, numel in read) == held < 2 * sum(p.numel() for p in saved[1].parameters())


def test_a_base_models_checkpoint_fits_and_lacks_the_head(saved, program, tmp_path) -> None:
    def base(tensors) -> None:
        del tensors["lm_head.weight"]
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name) + 1

    folder = copied(saved, tmp_path, base)
    with pytest.raises(placement.PlacementError) as caught:
        hf.load(program, folder)
    assert caught.value.diagnostics[0].notes == ("missing: lm_head.weight",)
    hf.load(program, folder, strict=False)
    assert torch.equal(program.full_state_dict()["model.norm.weight"], saved[1].model.norm.weight + 1)
    hf.load(program, saved[0])


def renamed(tensors) -> None:
    tensors["model.layers.0.mlp.gateproj.weight"] = tensors.pop("model.layers.0.mlp.gate_proj.weight")


def reshaped(tensors) -> None:
    tensors["model.norm.weight"] = torch.ones(17)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (renamed, r"unknown: model.layers.0.mlp.gateproj.weight \(near: model.layers.0.mlp.gate_proj.weight"),
        (renamed, r"missing: model.layers.0.mlp.gate_proj.weight \(near: model.layers.0.mlp.gateproj.weight"),
        (reshaped, r"shape: model.norm.weight is \[17\], the program has \[16\]"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(saved, program, tmp_path, change, told) -> None:
    with pytest.raises(placement.PlacementError) as caught:
        hf.load(program, copied(saved, tmp_path, change))
    (found,) = caught.value.diagnostics
    assert found.code == "PLC406"
    assert any(re.match(told, note) for note in found.notes), found.notes
    assert torch.equal(program.full_state_dict()["model.norm.weight"], saved[1].model.norm.weight)


def test_files_that_are_wrong_are_named(saved, tmp_path) -> None:
    with pytest.raises(placement.PlacementError, match=r"neither model\.safetensors nor"):
        checkpoint.Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(placement.PlacementError, match=r"(?s)model\.safetensors:.*header"):
        checkpoint.Checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(placement.PlacementError, match="no index of safetensors"):
        checkpoint.Checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": 5}}))
    with pytest.raises(placement.PlacementError, match="no index of safetensors: a is in no file"):
        checkpoint.Checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(placement.PlacementError, match=re.escape("names model-1.safetensors, which is not there")):
        checkpoint.Checkpoint(tmp_path)
    save_file({"b": torch.ones(2)}, tmp_path / "model-1.safetensors")
    with pytest.raises(placement.PlacementError, match=r"model-1.safetensors has no a"):
        checkpoint.Checkpoint(tmp_path)


def test_a_config_alone_gives_buffers_and_no_weights() -> None:
    config = build().config
    program = hf.compile(config, placement.simulate(tp=2), example=IDS)
    assert {p.is_meta for p in program.parameters()} == {True}
    assert {b.is_meta for b in program.buffers()} == {False}
    program.load_full_state_dict(build().state_dict())
    torch.testing.assert_close(program(**IDS).loss, build()(**IDS).loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{}", "needs a model_type"),
        ("[", "not JSON"),
        ('{"model_type": "llama", "architectures": ["NoSuchModel"]}', "no architecture 'NoSuchModel'"),
        ('{"model_type": "llama", "architectures": ["LlamaConfig"]}', "no architecture 'LlamaConfig'"),
        ('{"model_type": "llama", "hidden_size": "many"}', "hidden_size"),
    ],
)
def test_a_config_of_no_model_is_told(tmp_path, content, told) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(hf.ConfigError, match=told):
        hf.from_config(tmp_path)
