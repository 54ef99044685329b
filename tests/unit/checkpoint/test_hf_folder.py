"""Models of transformers, of every known kind, as folders: theirs are read, ours are loaded there, with equal bits."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.foreign_code import NAME, lay_trap
from tests.unit.checkpoint.folders import assert_same, make_config, write_model
from tests.unit.model.hf.families import EXACT, own_class, values_of

import shoal
from shoal.checkpoint.exporting import export_model, import_model
from shoal.checkpoint.loading import open_model
from shoal.cli import main
from shoal.config import Config
from shoal.errors import ConfigError, StateMismatch
from shoal.model.hf.family import HfFamily

SEQ_LEN = 12
TOKENS = torch.randint(3, 97, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
TIED = ("qwen3", "gemma3_text", "gpt2")


def config_of(kind: str, num_stages: int = 2, **more: Any) -> Config:
    values = values_of(kind, vocab_size=256, **more)
    pipeline = {"stages": num_stages, "microbatches": 1}
    return make_config(model={"family": "hf", "hf_config": values}, data={"seq_len": SEQ_LEN}, model_pipeline=pipeline)


def theirs_from(transformers: ModuleType, folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()


@pytest.mark.usual("mixtral", "qwen3-tied")
@pytest.mark.parametrize("kind", [*EXACT, *(f"{kind}-tied" for kind in TIED)])
def test_an_export_is_loaded_by_transformers_with_equal_bits(
    kind: str, tmp_path: Path, transformers: ModuleType
) -> None:
    kind, _, tied = kind.partition("-")
    config = config_of(kind, 1, tie_word_embeddings=True) if tied else config_of(kind)
    model = write_model(tmp_path / "model", config)
    assert export_model(open_model(model), tmp_path / "out") == "hf"
    ours = shoal.load_model(model)
    theirs = theirs_from(transformers, tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=TOKENS, use_cache=False).logits, ours(TOKENS))
    # What transformers itself would write of it has the same names.
    theirs.save_pretrained(tmp_path / "again")
    names = [safetensors.torch.load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "again")]
    assert names[0].keys() == names[1].keys()
    assert_same(shoal.load_model(tmp_path / "out"), ours)


@pytest.mark.usual("llama")
@pytest.mark.parametrize("kind", [kind for kind in EXACT if kind != "gpt2"])  # that one is read as the family gpt
def test_a_model_from_elsewhere_in_many_files_is_read_unit_by_unit(kind: str, tmp_path: Path) -> None:
    theirs, _ = own_class(HfFamily(values_of(kind, vocab_size=256), SEQ_LEN), torch.float32)
    theirs.eval().save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 3
    source = open_model(tmp_path / "theirs")
    assert source.config.num_stages == 6
    with torch.no_grad():
        expected = theirs(input_ids=TOKENS, use_cache=False).logits
        assert torch.equal(source.whole()(TOKENS), expected)
    import_model(source, tmp_path / "ours")
    with torch.no_grad():
        assert torch.equal(shoal.load_model(tmp_path / "ours")(TOKENS), expected)


def test_a_family_that_the_file_beside_a_model_names_is_imported_only_if_the_caller_names_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = lay_trap(tmp_path, monkeypatch)
    source = open_model(write_model(tmp_path / "model", config_of("llama", 1)))
    export_model(source, out := tmp_path / "out")
    written = (out / "config.yaml").read_text()
    assert "family: hf\n" in written
    (out / "config.yaml").write_text(written.replace("family: hf\n", f"family: {NAME}:X\n"))
    with pytest.raises(ConfigError, match=rf"names '{NAME}:X' by .* say load_model\(\.\.\., family='{NAME}:X'\)"):
        shoal.load_model(out)
    for command in (("generate", str(out), "--prompt=x"), ("export", str(out), f"--to={tmp_path / 'to'}")):
        assert main(command) == 2
        assert f"or --family {NAME}:X" in " ".join(capsys.readouterr().err.split())
    assert not trace.exists()
    own = "shoal.model.hf.family:HfFamily"
    (out / "config.yaml").write_text(written.replace("family: hf\n", f"family: {own}\n"))
    assert_same(shoal.load_model(out, family=own), source.whole())


def test_tied_embeddings_stand_in_the_files_once(tmp_path: Path) -> None:
    values = values_of("qwen3", vocab_size=256, tie_word_embeddings=True)
    theirs, _ = own_class(HfFamily(values, SEQ_LEN), torch.float32)
    theirs.eval().save_pretrained(tmp_path)
    source = open_model(tmp_path)
    # A stage for each unit, but for the two ends.
    assert source.config.num_stages == 5
    whole = source.whole()
    with torch.no_grad():
        assert torch.equal(whole(TOKENS), theirs(input_ids=TOKENS, use_cache=False).logits)
    head = theirs.lm_head.weight.detach().clone()
    _change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": head}))
    assert_same(open_model(tmp_path).whole(), whole)
    _change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": 2 * head}))
    with pytest.raises(StateMismatch, match=r"lm_head.weight is tied to model\.embed_tokens"):
        open_model(tmp_path).whole()
    # Without the head's own values it cannot be a model that is not tied.
    _change(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**described, "tie_word_embeddings": False}))
    with pytest.raises(StateMismatch, match=r"head in .* has 32 elements in the files"):
        open_model(tmp_path).whole()


def _change(folder: Path, change: Any) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"), "block_2 .*up_proj"),
        (lambda tensors: tensors.update(odd=torch.zeros(2)), r"model\.extra, if given.* of no part of the model: odd"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}),
            "head .*norm.weight",
        ),
    ],
    ids=["one is missing", "one is strange", "one has another size"],
)
def test_tensors_that_are_not_the_model_s_are_named(change: Any, says: str, tmp_path: Path) -> None:
    theirs, _ = own_class(HfFamily(values_of("llama", vocab_size=256), SEQ_LEN), torch.float32)
    theirs.save_pretrained(tmp_path)
    _change(tmp_path, change)
    with pytest.raises(StateMismatch, match=says):
        open_model(tmp_path).whole()


def test_sizes_are_compared_before_anything_gets_memory(tmp_path: Path) -> None:
    theirs, _ = own_class(HfFamily(values_of("llama", vocab_size=256), SEQ_LEN), torch.float32)
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 1 << 50}))
    with pytest.raises(StateMismatch, match=r"embedding .* elements in the files"):
        open_model(tmp_path).whole()


def test_a_folder_without_weights_is_no_model_to_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values_of("llama", vocab_size=256)))
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        open_model(tmp_path)
