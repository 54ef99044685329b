"""A GPT-2 that transformers has saved, read as a native gpt."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.unit.checkpoint.folders import make_config, write_model

import shoal
from shoal.checkpoint.exporting import export_model, import_model
from shoal.checkpoint.loading import open_model
from shoal.errors import ConfigError, StateMismatch

SIZES = {"vocab_size": 300, "n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2}
TOKENS = torch.randint(300, (2, 24), generator=torch.Generator().manual_seed(1))


def saved(
    transformers: ModuleType, folder: Path, *, dtype: torch.dtype = torch.float32, shard: str = "1GB", **changes: Any
) -> Any:
    torch.manual_seed(3)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    theirs = theirs.to(dtype)
    theirs.save_pretrained(folder, max_shard_size=shard)
    return theirs.double()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 48},
        {"shard": "10KB"},
        {"dtype": torch.bfloat16},
    ],
    ids=["tied, gelu_new", "untied, gelu, wide", "in several files", "bfloat16"],
)
def test_an_imported_gpt2_gives_the_logits_of_transformers(
    tmp_path: Path, changes: dict[str, Any], transformers: ModuleType
) -> None:
    theirs = saved(transformers, tmp_path / "theirs", **changes)
    assert ("shard" in changes) == (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    import_model(open_model(tmp_path / "theirs"), tmp_path / "ours")
    ours = shoal.load_model(tmp_path / "ours").double()
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        torch.testing.assert_close(ours(TOKENS), expected, rtol=0, atol=1e-9 * expected.abs().max().item())
    export_model(open_model(tmp_path / "ours"), tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float64).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, expected, rtol=0, atol=1e-9 * expected.abs().max().item())


def test_the_files_of_a_tokenizer_go_with_the_model(tmp_path: Path, transformers: ModuleType) -> None:
    saved(transformers, tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    import_model(open_model(tmp_path / "theirs"), tmp_path / "ours")
    export_model(open_model(tmp_path / "ours"), tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["merges.txt", "special_tokens_map.json"])
def test_no_file_of_a_host_goes_with_the_model_for_a_link_in_its_folder(
    name: str, tmp_path: Path, transformers: ModuleType
) -> None:
    saved(transformers, tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    (tmp_path / "theirs" / name).symlink_to("/proc/self/environ" if name == "merges.txt" else "../secret")
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(ConfigError, match=rf"{name}' is outside of its tokenizer, .*theirs, and is not read; copy"):
        import_model(open_model(tmp_path / "theirs"), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_model_that_the_family_cannot_be_is_refused_with_all_reasons(
    tmp_path: Path, transformers: ModuleType
) -> None:
    folder = tmp_path / "theirs"
    saved(transformers, folder)
    described = json.loads((folder / "config.json").read_text())
    odd = {"layer_norm_epsilon": 1e-6, "scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"}
    (folder / "config.json").write_text(json.dumps({**described, **odd, "n_head": "two"}))
    with pytest.raises(ConfigError) as refused:
        open_model(folder)
    for part in ("layer_norm_epsilon is 1e-06", "inverse_layer_idx is True", "is 'relu'", "n_head is 'two'"):
        assert part in str(refused.value)
    (folder / "config.json").write_text(json.dumps({**described, "n_inner": 40}))
    with pytest.raises(ConfigError, match="n_inner is 40, no multiple of n_embd = 16"):
        open_model(folder)
    (folder / "config.json").write_text(json.dumps({**described, "n_layer": 3}))
    with pytest.raises(StateMismatch, match=r"look at units\.block_2\."):
        open_model(folder)
    (folder / "config.json").write_text(json.dumps({**described, "n_layer": 1 << 50}))
    with pytest.raises(ConfigError, match=f"n_layer is {1 << 50}, and 4096 layers are the most"):
        open_model(folder)
    (folder / "config.json").write_text(json.dumps({**described, "vocab_size": 1 << 50}))
    with pytest.raises(StateMismatch, match=r"look at units\.embedding\.token\.weight"):
        open_model(folder)
    (folder / "config.json").write_text(json.dumps({**described, "model_type": "llama"}))
    with pytest.raises(StateMismatch, match=r"of no part of the model: transformer\.h\.0"):
        open_model(folder)
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="reads no pickled weights"):
        open_model(folder)
    for name in ("../theirs/x", 5000 * "x"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"wte.weight": name}}))
        with pytest.raises(StateMismatch, match="which is no file beside it"):
            open_model(folder)
    for odd in ('{"weight_map": {"wte.weight": 5}}', 5000 * "["):
        (folder / "model.safetensors.index.json").write_text(odd)
        with pytest.raises(ConfigError, match="no index of tensors"):
            open_model(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(StateMismatch, match="names no file"):
        open_model(folder)


def test_an_import_whose_hashes_are_others_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", make_config())
    described = json.loads((folder / "config.json").read_text())
    for hashes, says in (([], "has hashes of 0 stages of 2"), ("none", "names no hashes")):
        (folder / "config.json").write_text(json.dumps({**described, "hashes": hashes}))
        with pytest.raises(ConfigError, match=says):
            open_model(folder)
    (folder / "config.json").write_text(json.dumps({**described, "hashes": described["hashes"][::-1]}))
    with pytest.raises(StateMismatch, match="stage 0 hash to"):
        shoal.load_model(folder)
