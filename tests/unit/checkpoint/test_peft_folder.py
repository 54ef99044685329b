"""Adapters as a run leaves them and as peft loads them: on the base that they were trained on, with equal logits."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.unit.checkpoint.folders import make_config, write_model
from tests.unit.checkpoint.test_start_weights import saved, with_weights
from tests.unit.model.hf.families import values_of

import shoal
from shoal.checkpoint.exporting import export_model
from shoal.checkpoint.loading import open_model
from shoal.checkpoint.peft_folder import ADAPTER, ADAPTER_CONFIG
from shoal.checkpoint.start_weights import StartWeights
from shoal.config import Config
from shoal.errors import ConfigError, StateMismatch, WeightsMissing
from shoal.model.hf.described import with_hf_config

pytestmark = [
    # Of peft, when it wraps a model of a newer transformers.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

SEQ_LEN = 12
EAGER = {"experts_implementation": "eager"}
TOKENS = torch.arange(SEQ_LEN)[None]


def of_folder(folder: Path, **lora: Any) -> Config:
    """A run on the weights of a folder, as its first host leaves the configuration."""
    config = make_config(
        model={"family": "hf", "name_or_path": str(folder), "pretrained": True},
        data={"seq_len": SEQ_LEN},
        model_pipeline={"stages": 2, "microbatches": 1},
        lora={"r": 4, "alpha": 8, **lora},
    )
    config = config.model_copy(update={"model": with_hf_config(config.model)})
    assert config.lacks_weights
    return with_weights(config, StartWeights(config).digests())


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def from_peft(peft: ModuleType, transformers: ModuleType, base: Path, folder: Path, dtype: torch.dtype) -> Any:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype, **EAGER)
    return peft.PeftModel.from_pretrained(theirs, str(folder)).eval()


@pytest.mark.parametrize(
    ("kind", "lora", "targets"),
    [
        (
            "qwen3",
            {"base_dtype": "bfloat16"},
            ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
        ),
        ("gpt2", {"targets": ["attn.c_proj"]}, None),
        ("qwen3_moe", {"targets": ["q_proj"], "dropout": 0.1}, ["q_proj"]),
    ],
)
def test_peft_loads_what_a_run_leaves_and_what_is_exported_and_computes_the_same_logits(
    kind: str,
    lora: dict[str, Any],
    targets: list[str] | None,
    tmp_path: Path,
    peft: ModuleType,
    transformers: ModuleType,
) -> None:
    saved(tmp_path / "base", kind)
    config = of_folder(tmp_path / "base", **lora)
    left = write_model(tmp_path / "model", config)
    tensors = safetensors.torch.load_file(left / "model.safetensors")
    assert tensors.keys()
    assert all(".lora_" in name for name in tensors)
    ours = shoal.load_model(left)
    with torch.no_grad():
        expected = ours(TOKENS)
    assert export_model(open_model(left), tmp_path / "out") == "peft"
    dtype = getattr(torch, lora.get("base_dtype", "float32"))
    plain = logits_of(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype, **EAGER))
    for folder in (left, tmp_path / "out"):
        assert torch.equal(logits_of(from_peft(peft, transformers, tmp_path / "base", folder, dtype)), expected), folder
        described = json.loads((folder / ADAPTER_CONFIG).read_bytes())
        assert described["base_model_name_or_path"] == str(tmp_path / "base")
        assert (described["r"], described["lora_alpha"], described["lora_dropout"]) == (4, 8, lora.get("dropout", 0.0))
        if targets is not None:
            assert described["target_modules"] == targets
    assert not torch.equal(plain, expected)
    with torch.no_grad():
        assert torch.equal(shoal.load_model(tmp_path / "out")(TOKENS), expected)


def test_a_merged_export_needs_no_base_and_no_peft(tmp_path: Path, transformers: ModuleType) -> None:
    saved(tmp_path / "base", "qwen3", tie_word_embeddings=True)
    left = write_model(tmp_path / "model", of_folder(tmp_path / "base", base_dtype="bfloat16"))
    with torch.no_grad():
        expected = shoal.load_model(left)(TOKENS).float()
    assert export_model(open_model(left), tmp_path / "out", merge=True) == "hf"
    (tmp_path / "base").rename(tmp_path / "gone")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not any("lora" in name for name, _ in theirs.named_parameters())
    # There it computes in float32.
    torch.testing.assert_close(logits_of(theirs), expected, rtol=0.05, atol=0.05)
    with torch.no_grad():
        assert torch.equal(shoal.load_model(tmp_path / "out")(TOKENS), logits_of(theirs))


def test_adapters_on_random_weights_follow_from_the_seed(tmp_path: Path) -> None:
    config = make_config(
        model={"family": "hf", "extra": values_of("llama", vocab_size=256)},
        data={"seq_len": SEQ_LEN},
        lora={"targets": ["q_proj", "v_proj"], "r": 2},
    )
    config = with_weights(config, StartWeights(config).digests())
    left = write_model(tmp_path / "model", config)
    export_model(open_model(left), tmp_path / "out", merge=True)
    export_model(open_model(left), tmp_path / "adapter")
    described = json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_bytes())
    assert described["base_model_name_or_path"] is None
    merged, beside = (shoal.load_model(tmp_path / name) for name in ("out", "adapter"))
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS), beside(TOKENS), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_exported_says_what_to_do(tmp_path: Path) -> None:
    saved(tmp_path / "base")
    left = write_model(tmp_path / "model", of_folder(tmp_path / "base"))
    with pytest.raises(ConfigError, match="this model has adapters beside it; say --merge"):
        export_model(open_model(left), tmp_path / "out", "hf")
    plain = write_model(tmp_path / "plain", make_config())
    with pytest.raises(ConfigError, match="--merge: this model has no adapters"):
        export_model(open_model(plain), tmp_path / "out", merge=True)
    with pytest.raises(ConfigError, match="--format peft: this model has no adapters"):
        export_model(open_model(plain), tmp_path / "out", "peft")
    assert not (tmp_path / "out").exists()


def test_adapters_on_another_base_or_of_another_run_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "base", shard="1GB")
    left = write_model(tmp_path / "model", of_folder(tmp_path / "base"))
    export_model(open_model(left), tmp_path / "out")
    adapter = safetensors.torch.load_file(tmp_path / "out" / ADAPTER)
    safetensors.torch.save_file({**adapter, "strange": torch.zeros(1)}, tmp_path / "out" / ADAPTER)
    with pytest.raises(StateMismatch, match="has tensors of no adapter of the run: strange"):
        open_model(tmp_path / "out")
    path = tmp_path / "base" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.layers.3.mlp.up_proj.weight"].view(torch.int32)[0, 0] ^= 1
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    with pytest.raises(WeightsMissing, match=r"^block_3 of .* take the folder as it is where the run began$"):
        shoal.load_model(left)
