"""The weights that a run begins from: read by unit, told apart by every bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.unit.checkpoint.folders import make_config
from tests.unit.model.hf.families import own_class, values_of

from shoal.checkpoint.model_layout import StageLayout
from shoal.checkpoint.start_weights import StartWeights, fill_start, read_start
from shoal.config import Config
from shoal.errors import ConfigError, WeightsMissing
from shoal.model.hf.described import with_hf_config
from shoal.model.hf.family import HfFamily
from shoal.model.registry import load_family
from shoal.model.stage import StageModule, build_stage

SEQ_LEN = 12


def saved(folder: Path, kind: str = "llama", shard: str = "20KB", **more: Any) -> Any:
    theirs, _ = own_class(HfFamily(values_of(kind, vocab_size=256, **more), SEQ_LEN), torch.float32)
    theirs.eval().save_pretrained(folder, max_shard_size=shard)
    return theirs


def config_of(folder: Path, num_stages: int = 2, **model: Any) -> Config:
    """As a run's first host leaves it, once the profiler has read the weights."""
    pipeline = {"stages": num_stages, "microbatches": 1}
    values = {"family": "hf", "name_or_path": str(folder), "pretrained": True, **model}
    config = make_config(model=values, data={"seq_len": SEQ_LEN}, model_pipeline=pipeline)
    config = config.model_copy(update={"model": with_hf_config(config.model)})
    assert config.lacks_weights
    return with_weights(config, StartWeights(config).digests())


def with_weights(config: Config, weights: tuple[str, ...]) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"weights": weights})})


def stage_of(config: Config, stage: int, fill: Callable[[Config, StageModule], None] = fill_start) -> StageModule:
    family, pipeline = load_family(config.model, config.data), config.model_pipeline
    module = build_stage(family, stage, pipeline.stages, seed=config.run.seed, cut=pipeline.cut)
    fill(config, module)
    return module.eval()


TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("kind", "more", "model"),
    [
        ("llama", {}, {}),
        ("qwen3_moe", {}, {}),
        ("qwen3", TIED, {}),
        # The norm of its head has no parameter, so that its head has nothing of its own.
        ("olmo", TIED, {}),
        # What is tied there begins alike here, and is trained apart.
        ("qwen3", TIED, {"tie": False}),
    ],
    ids=["llama", "qwen3_moe", "qwen3-tied", "olmo-tied", "qwen3-parted"],
)
def test_stages_begin_as_the_model_in_the_files_whatever_the_files_are(
    kind: str, more: dict[str, Any], model: dict[str, Any], tmp_path: Path
) -> None:
    theirs = saved(tmp_path / "many", kind, **more)
    theirs.save_pretrained(tmp_path / "one")
    config = config_of(tmp_path / "many", **model)
    assert config_of(tmp_path / "one", **model).model.weights == config.model.weights
    stages = [stage_of(config, 0), stage_of(config, 1)]
    assert (stages[0].head is not None) == (bool(more) and not model)
    tokens = torch.randint(3, 97, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = stages[1](stages[0](tokens))
        if stages[0].head is not None:
            logits = stages[0](logits, is_head=True)
        assert torch.equal(logits, theirs(input_ids=tokens, use_cache=False).logits)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_tied_embeddings_are_given_and_hashed_once(tmp_path: Path, num_stages: int) -> None:
    theirs = saved(tmp_path / "tied", "qwen3", shard="1GB", tie_word_embeddings=True)
    config = config_of(tmp_path / "tied", num_stages=num_stages)
    module = stage_of(config, 0)
    state = theirs.state_dict()
    ends = sum(
        each.numel() for name, each in state.items() if name in ("model.embed_tokens.weight", "model.norm.weight")
    )
    of_layers = sum(p.numel() for name, p in module.named_parameters() if ".block_" in name)
    vectors, weights, layout = read_start(config, 0), StartWeights(config), StageLayout.of(module)
    assert vectors is not None
    assert vectors[0].numel() == ends + of_layers
    assert weights.are_right(layout, vectors)
    filled = stage_of(config, 0, lambda _, module: weights.fill_from(module, vectors))
    assert all(torch.equal(*pair) for pair in zip(filled.parameters(), module.parameters(), strict=True))
    assert filled.get_parameter("units.head.lm_head.weight") is filled.get_parameter(
        "units.embedding.embed_tokens.weight"
    )
    path = tmp_path / "tied" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.embed_tokens.weight"].view(torch.int32)[0, 0] ^= 1
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    with pytest.raises(WeightsMissing, match=r"^embedding of .* the run began from other weights"):
        stage_of(config, 0)
    vectors[0].view(torch.int32)[0] ^= 1
    assert not weights.are_right(layout, vectors)


def test_another_bit_is_refused_and_its_unit_named(tmp_path: Path) -> None:
    saved(tmp_path / "one", shard="1GB")
    config = config_of(tmp_path / "one")
    path = tmp_path / "one" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.layers.3.mlp.up_proj.weight"].view(torch.int32)[0, 0] ^= 1
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    stage_of(config, 0)
    with pytest.raises(WeightsMissing, match=r"^block_3 of .* the run began from other weights"):
        stage_of(config, 1)
    assert read_start(config, 1) is None


def test_what_a_peer_gives_is_compared_and_taken(tmp_path: Path) -> None:
    saved(tmp_path / "one")
    config = config_of(tmp_path / "one")
    expected, weights = stage_of(config, 1), StartWeights(config)
    vectors = read_start(config, 1)
    assert vectors is not None
    (tmp_path / "one").rename(tmp_path / "gone")
    with pytest.raises(WeightsMissing, match="there is no such folder on this host"):
        stage_of(config, 1)
    module = stage_of(config, 1, lambda _, module: weights.fill_from(module, vectors))
    for mine, theirs in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    layout = StageLayout.of(module)
    assert weights.are_right(layout, vectors)
    vectors[0].view(torch.int32)[-1] ^= 1
    assert not weights.are_right(layout, vectors)


def test_files_that_are_not_those_of_the_model_end_the_run_before_it_begins(tmp_path: Path) -> None:
    saved(tmp_path / "one")
    with pytest.raises(ConfigError, match=r"model\.pretrained: .*up_proj"):
        config_of(tmp_path / "one", extra={"intermediate_size": 80})
    with pytest.raises(ValueError, match=r"model\.pretrained: give the folder"):
        make_config(model={"family": "hf", "extra": values_of("llama"), "pretrained": True})


def test_a_run_of_random_weights_begins_from_its_seed(tmp_path: Path) -> None:
    saved(tmp_path / "one")
    config = make_config(
        model={"family": "hf", "name_or_path": str(tmp_path / "one")},
        data={"seq_len": SEQ_LEN},
        model_pipeline={"stages": 1},
    )
    unfilled = stage_of(config, 0, lambda _, module: None)
    for mine, theirs in zip(stage_of(config, 0).parameters(), unfilled.parameters(), strict=True):
        assert torch.equal(mine, theirs)
