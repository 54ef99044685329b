"""A native model as other programs load it, and back."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.unit.checkpoint.folders import GPT, assert_same, make_config, state_of, trained_stages, write_model

import shoal
from shoal.checkpoint import exporting, model_source, tensor_file
from shoal.checkpoint.exporting import export_model, import_model
from shoal.checkpoint.loading import open_model
from shoal.config import Config
from shoal.errors import ConfigError, StateMismatch, StorageError

TOKENS = torch.randint(256, (3, 32), generator=torch.Generator().manual_seed(1))
WEIGHTS_OF_FOUR_BITS = {
    "base": {"weight_quant": {"num_bits": 4, "per_channel": True}, "activation_quant": "off"},
    "rules": [{"stages": [1], "weight_quant": {"num_bits": 3}}],
}
"""What is quantised how depends on the stage."""


def exported(tmp_path: Path, config: Config, format: Any = None) -> tuple[Path, Path]:
    model, to = write_model(tmp_path / "model", config), tmp_path / "out"
    export_model(open_model(model), to, format)
    return model, to


def logits_there(transformers: ModuleType, folder: Path, dtype: torch.dtype) -> torch.Tensor:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return theirs(TOKENS).logits


@pytest.mark.parametrize(
    "sections",
    [
        {"model_pipeline": {"stages": 1}},
        {"model": {**GPT, "activation": "gelu_new"}, "model_pipeline": {"stages": 3}},
        {"quant": WEIGHTS_OF_FOUR_BITS},
    ],
    ids=["in one stage", "in three, with gelu_new", "weights that were trained in four bits"],
)
def test_an_exported_gpt_gives_the_logits_of_the_native_one(
    tmp_path: Path, sections: dict[str, Any], transformers: ModuleType
) -> None:
    model, to = exported(tmp_path, make_config(**sections))
    with torch.no_grad():
        single = shoal.load_model(model)(TOKENS)
        # The weights as they were rounded in training, which is float32.
        double = shoal.load_model(to).double()(TOKENS)
    largest = double.abs().max().item()
    torch.testing.assert_close(logits_there(transformers, to, torch.float32), single, rtol=0, atol=1e-6 * largest)
    torch.testing.assert_close(logits_there(transformers, to, torch.float64), double, rtol=0, atol=1e-9 * largest)


def test_a_folder_of_another_version_says_which_key_is_strange_and_names_no_validator(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", make_config())
    described = json.loads((model / "config.json").read_text())
    described["configuration"]["model"]["colour"] = "red"
    (model / "config.json").write_text(json.dumps(described))
    with pytest.raises(
        ConfigError, match=r"does not describe a model of this version of shoal: model\.colour: is no key$"
    ):
        open_model(model)


def test_what_a_class_of_the_user_s_own_was_called_with_is_not_handed_on(tmp_path: Path) -> None:
    data = {"seq_len": 32, "dataset_name": "somebodys.data:Texts", "arguments": {"url": "https://me:token@host"}}
    _, to = exported(tmp_path, make_config(data=data))
    assert "somebodys.data:Texts" in (to / "config.yaml").read_text()
    for path in to.iterdir():
        assert b"token@" not in path.read_bytes(), path.name


def test_the_tokenizer_of_an_export_is_exact_both_ways_for_every_byte(tmp_path: Path, transformers: ModuleType) -> None:
    _, to = exported(tmp_path, make_config())
    tokenizer = transformers.AutoTokenizer.from_pretrained(to)
    for text in ("plain", " two  spaces\r\n\ttab", "naïve café — 東京 🦈", "".join(map(chr, range(0x250))), "\x00</s>"):
        ids = tokenizer(text)["input_ids"]
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 256


@pytest.mark.parametrize("format", ["hf", "safetensors"])
def test_import_of_an_export_is_what_was_exported(tmp_path: Path, format: str) -> None:
    config = make_config(model={**GPT, "dropout": 0.2}, run={"seed": 9})
    model, to = exported(tmp_path, config, format)
    assert_same(shoal.load_model(to), shoal.load_model(model))
    import_model(open_model(to), tmp_path / "back")
    assert_same(shoal.load_model(tmp_path / "back"), shoal.load_model(model))
    described = [json.loads((folder / "config.json").read_text()) for folder in (model, tmp_path / "back")]
    assert described[0]["configuration"] == described[1]["configuration"]
    assert described[0]["hashes"] == described[1]["hashes"]
    assert not (tmp_path / "back" / "tokenizer").exists(), "its tokens are bytes"


def resnet(**sections: dict[str, Any]) -> Config:
    data = {"dataset_name": "digits", "task_type": "cv", "num_channels": 1, "img_size": 8}
    return make_config(model={"family": "resnet18"}, data=data, **sections)


@pytest.mark.usual("weights and inputs quantised")
@pytest.mark.parametrize(
    "quant",
    [None, WEIGHTS_OF_FOUR_BITS, {"base": {"weight_quant": {"num_bits": 4}, "activation_quant": {"num_bits": 8}}}],
    ids=["plain", "weights quantised", "weights and inputs quantised"],
)
def test_an_exported_resnet_computes_what_the_trained_one_does(tmp_path: Path, quant: dict[str, Any] | None) -> None:
    model, to = exported(tmp_path, resnet(quant=quant))
    images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    ours, theirs = shoal.load_model(model), shoal.load_model(to)
    with torch.no_grad():
        assert torch.equal(theirs(images), ours(images))
    state = safetensors.torch.load_file(to / "model.safetensors")
    assert state.keys() == state_of(theirs).keys()
    assert not [name for name in state if "parametrizations" in name], "weights are what they are rounded to"
    assert any("input_quantiser" in name for name in state) == (
        quant is not None and quant["base"] is not WEIGHTS_OF_FOUR_BITS["base"]
    )


def test_a_gpt_whose_inputs_are_quantised_is_no_gpt2_of_transformers(tmp_path: Path) -> None:
    config = make_config(quant={"base": {"activation_quant": {"num_bits": 8}}})
    model = write_model(tmp_path / "model", config)
    with pytest.raises(ConfigError, match="--format safetensors"):
        export_model(open_model(model), tmp_path / "out", "hf")
    assert export_model(open_model(model), tmp_path / "out") == "safetensors"
    with torch.no_grad():
        assert torch.equal(shoal.load_model(tmp_path / "out")(TOKENS), shoal.load_model(model)(TOKENS))
    with pytest.raises(ConfigError, match="of the families gpt and hf, not of resnet18"):
        export_model(open_model(write_model(tmp_path / "resnet", resnet())), tmp_path / "other", "hf")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_of_a_model_that_is_exported_or_imported_one_stage_at_a_time_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0
    build = model_source.build_stage

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal most
        gc.collect()
        stage = build(*args, **kwargs)
        alive.add(stage)
        most = max(most, len(alive))
        return stage

    monkeypatch.setattr(model_source, "build_stage", counted)
    _, to = exported(tmp_path, make_config(model_pipeline={"stages": 3}))
    import_model(open_model(to), tmp_path / "back")
    assert most == 1
    (to / "config.yaml").unlink()
    assert open_model(to).config.model_pipeline.cut == (2, 1, 2), "a model from elsewhere is cut into its blocks"


def test_what_is_read_back_as_something_else_is_not_put_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = tensor_file.TensorFile.read

    def changed(self: tensor_file.TensorFile, name: str) -> torch.Tensor:
        return read(self, name) + (1e-7 if name == "transformer.h.1.ln_2.bias" else 0)

    model = write_model(tmp_path / "model", make_config())
    monkeypatch.setattr(tensor_file.TensorFile, "read", changed)
    with pytest.raises(StateMismatch, match=r"block_1\.mlp_norm\.bias is read back as something else"):
        export_model(open_model(model), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_full_disk_leaves_the_export_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, to = exported(tmp_path, make_config())
    before = {path.name: path.read_bytes() for path in to.iterdir()}

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting.TensorFileWriter, "write", full)
    with pytest.raises(StorageError, match="No space left on device"):
        export_model(open_model(model), to)
    assert {path.name: path.read_bytes() for path in to.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_trained_stages_differ_from_where_they_start() -> None:
    config = make_config()
    assert len(trained_stages(config)) == 2
