"""`--tiny`, and the configurations of known models that it makes small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.checkpoint.model_layout import stage_layouts
from shoal.cli import main
from shoal.config import Config, load_config
from shoal.data.catalog import open_source
from shoal.model.hf.described import config_values
from shoal.model.hf.library import build_without_memory, model_config
from shoal.model.registry import load_exact_family
from shoal.model.stage import build_stage

ROOT = Path(__file__).parents[3]
KNOWN = {
    "qwen3_0.6b": 596_049_920,
    "smollm2_135m": 134_515_008,
    "llama_1b": 1_235_814_400,
    "gemma3_270m": 268_098_176,
    "gpt2_124m": 124_439_808,
    "distilgpt2": 81_912_576,
    "gptneo_small": 125_198_592,
    "gptneo_split": 1_315_575_808,
}
"""The parameters of the models as they are published, with tied embeddings."""
ROTARY = {
    "qwen3_0.6b": {"rope_type": "default", "rope_theta": 1e6},
    "smollm2_135m": {"rope_type": "default", "rope_theta": 1e5},
    "llama_1b": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "gemma3_270m": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    },
}
ALL = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml") if path.stem != "reference")
PEERS = "/ip4/127.0.0.1/tcp/50000/p2p/12D3KooWC1W43CCBCGosZwVWRPF4MTcvTk3tDstTqDMDQMpn8ytY"


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def printed(capsys: pytest.CaptureFixture[str], *argv: str, command: str = "run-local") -> Config:
    """What a run would be told."""
    code = main([command, *argv, "--print-config"])
    output = capsys.readouterr()
    assert code == 0, output.err
    return Config.model_validate(yaml.safe_load(output.out))


def refused(capsys: pytest.CaptureFixture[str], *argv: str, command: str = "run-local") -> str:
    assert main([command, *argv]) == 2
    return capsys.readouterr().err


def of_transformers(config: Config) -> Any:
    return model_config(config_values(config.model), config.model.extra)


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_model_has_its_published_size_and_rotary_frequencies(name: str) -> None:
    config = load_config(f"configs/{name}.yaml", (), {})
    assert len(stage_layouts(config)) == config.num_stages
    published = of_transformers(config)
    assert published.tie_word_embeddings
    model = build_without_memory(published)
    assert sum(parameter.numel() for parameter in model.parameters()) == KNOWN[name]
    assert getattr(published, "rope_parameters", None) == ROTARY.get(name)


@pytest.mark.parametrize("name", ALL)
def test_every_configuration_has_a_small_one_of_the_same_structure_that_needs_no_network(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"--config-path=configs/{name}.yaml"
    large, small = load_config(f"configs/{name}.yaml", (), {}), printed(capsys, path, "--tiny")
    assert printed(capsys, path, "--tiny", command="start-trainer-client") == small
    assert small.num_stages == min(4, large.num_stages)
    assert small.diloco.inner_steps * small.diloco.outer_steps <= 30
    assert (small.model.family, small.model.tie) == (large.model.family, large.model.tie)
    assert open_source(small).holdout.num_samples
    family = load_exact_family(small.model, small.data)
    sizes = [
        sum(parameter.numel() for parameter in build_stage(family, stage, small.num_stages, seed=0).parameters())
        for stage in range(small.num_stages)
    ]
    if small.model.family == "hf":
        assert sum(sizes) < 200_000
        assert small.model.name_or_path is None
        mine, theirs = of_transformers(small), of_transformers(large)
        assert (mine.model_type, mine.tie_word_embeddings) == (theirs.model_type, theirs.tie_word_embeddings)
        kinds = [set(getattr(each, "layer_types", None) or ()) for each in (mine, theirs)]
        assert kinds[0] == kinds[1]
        assert (mine.num_attention_heads == getattr(mine, "num_key_value_heads", mine.num_attention_heads)) == (
            theirs.num_attention_heads == getattr(theirs, "num_key_value_heads", theirs.num_attention_heads)
        )
    elif small.model.family == "gpt":
        assert sum(sizes) < 100_000
        assert small.model.num_layers == min(4, large.model.num_layers)


def test_rounds_of_image_models_average_unless_something_else_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    path = "--config-path=configs/resnet50.yaml"
    outer = printed(capsys, path, "--tiny").diloco.outer_optim
    assert (outer.sgd_lr, outer.sgd_momentum) == (1.0, 0.0)
    outer = printed(capsys, path, "--tiny", "--diloco.outer-optim.sgd-lr=0.5").diloco.outer_optim
    assert (outer.sgd_lr, outer.sgd_momentum) == (0.5, 0.0)
    outer = printed(capsys, "--tiny").diloco.outer_optim
    assert (outer.sgd_lr, outer.sgd_momentum) == (0.9, 0.5)


def test_without_a_file_it_is_the_sandbox_in_small(capsys: pytest.CaptureFixture[str]) -> None:
    small = printed(capsys, "--tiny")
    assert small == printed(capsys, "--tiny", "--config-path=configs/sandbox.yaml")
    assert (small.experiment_prefix, small.model.hidden_size, small.diloco.inner_steps) == ("sandbox", 24, 10)


def test_what_a_flag_or_the_environment_says_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--diloco.inner-steps=40", "--data.dataset-name=./corpus", "--data.seq-len=100", "--model.num-heads=6")
    monkeypatch.setenv("SHOAL_DILOCO__OUTER_STEPS", "7")
    small = printed(capsys, "--tiny", *flags)
    assert (small.diloco.inner_steps, small.diloco.outer_steps, small.diloco.batch_size_per_step) == (40, 7, 8)
    assert (small.data.dataset_name, small.data.seq_len) == ("./corpus", 100)
    assert (small.model.num_heads, small.model.hidden_size) == (6, 48)
    path = "--config-path=configs/gemma3_270m.yaml"
    small = printed(capsys, path, "--tiny", "--data.seq-len=100", "--model.tie=false", "--model-pipeline.stages=1")
    assert (small.model.tie, small.num_stages) == (False, 1)
    assert of_transformers(small).max_position_embeddings == 100
    # With the tokenizer of the large model the small one has its vocabulary; else it is one of bytes.
    large = of_transformers(load_config(ROOT / "configs/gemma3_270m.yaml")).vocab_size
    assert of_transformers(printed(capsys, path, "--tiny")).vocab_size == 256 < large
    assert of_transformers(printed(capsys, path, "--tiny", "--data.tokenizer=./mine")).vocab_size == large
    assert printed(capsys, "--tiny", "--data.tokenizer=./mine", "--model.vocab-size=999").model.vocab_size == 999


def test_a_cut_of_the_large_model_is_none_of_the_small_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.yaml").write_text("{model: {num_layers: 12}, model_pipeline: {cut: [3, 11]}}")
    path = f"--config-path={tmp_path / 'own.yaml'}"
    small = printed(capsys, path, "--tiny")
    assert (small.num_stages, small.model.num_layers, small.model_pipeline.cut) == (2, 4, None)
    assert printed(capsys, path, "--tiny", "--model-pipeline.cut=2,4").model_pipeline.cut == (2, 4)
    assert "adds up to 14 units" in refused(capsys, path, "--tiny", "--model-pipeline.cut=3,11", "--print-config")


def test_a_model_of_a_folder_is_made_small_by_its_config_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = load_config("configs/gemma3_270m.yaml", (), {}).model.extra
    (tmp_path / "config.json").write_text(json.dumps(values))
    named = ("--model.family=hf", f"--model.name-or-path={tmp_path}")
    (tmp_path / "run.yaml").write_text("model: {pretrained: true}\nmodel_pipeline: {stages: 2}")
    small = printed(capsys, path := f"--config-path={tmp_path / 'run.yaml'}", "--tiny", *named)
    assert (small.model.name_or_path, small.model.pretrained) == (None, False)
    assert of_transformers(small).layer_types == [*["sliding_attention"] * 3, "full_attention"]
    problem = refused(capsys, path, "--tiny", *named, "--model.pretrained", "--print-config")
    assert "--tiny and model.pretrained: a small model begins from random weights" in problem
    assert printed(capsys, path, "--tiny", *named, "--model.pretrained=false") == small


def test_data_of_the_hub_and_what_is_as_large_as_they_are_become_what_shoal_carries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.yaml"
    data = {"dataset_name": "wikitext", "dataset_config": "wikitext-2-raw-v1", "dataset_split": "test"}
    path.write_text(yaml.safe_dump({"data": data, "model": {"vocab_size": 5000}}))
    small = printed(capsys, f"--config-path={path}", "--tiny")
    assert (small.data.dataset_name, small.data.dataset_config, small.data.dataset_split) == (
        "pydoc-topics",
        None,
        "train",
    )
    assert small.model.vocab_size == 256
    data = {"dataset_name": "cifar100", "task_type": "cv"}
    path.write_text(yaml.safe_dump({"data": data, "model": {"family": "resnet18", "num_classes": 100}}))
    small = printed(capsys, f"--config-path={path}", "--tiny")
    assert (small.data.dataset_name, small.data.num_channels, small.data.img_size) == ("digits", 1, 8)
    assert small.model.num_classes == open_source(small).num_classes


def test_a_biggan_becomes_narrow_and_attends_where_its_images_are_small(capsys: pytest.CaptureFixture[str]) -> None:
    small = printed(capsys, "--config-path=configs/biggan_imnet.yaml", "--tiny")
    assert (small.data.dataset_name, small.data.num_channels, small.data.img_size) == ("digits", 1, 8)
    extra = small.model.extra
    assert (extra["generator_channels"], extra["discriminator_channels"], extra["latent_size"]) == (16, 16, 64)
    assert (extra["generator_attention"], extra["discriminator_attention"]) == ([8], [4])
    assert small.diloco.inner_optim.settings_of("gan.generator.linear.weight", 2).every_steps == 2
    module = build_stage(load_exact_family(small.model, small.data), 0, 1, seed=0)
    assert sum(".attention." in name for name, _ in module.named_parameters()) == 3 * 5


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("run-local", "--tiny", "--resume"), "--tiny and --resume: a run that goes on keeps its sizes"),
        (("start-trainer-client", "--tiny", "--resume=x"), "--tiny and --resume: a run that goes on keeps its sizes"),
        (("start-trainer-client", "--tiny", "--initial-peers", PEERS), "--tiny and --initial-peers"),
        (("run-local", "--tiny", "--model.family=own.module:Family"), "is code of your own, whose sizes only you know"),
        (("run-local", "--tiny", "--model.hidden-size=50", "--model.num-heads=3"), "is not a multiple of"),
        (("run-local", "--tiny", "--model-pipeline.microbatches=16"), "is more than diloco.batch_size_per_step = 8"),
        (("run-local", "--tiny", "--model-pipeline.stages=6"), "can be cut into at most"),
        (("run-local", "--tiny=3"), "--tiny"),
        (("run-local", "--tinny"), "did you mean --tiny"),
    ],
)
def test_what_does_not_go_with_it_is_said(argv: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *flags = argv
    # A run that is not refused is none that begins.
    assert says in refused(capsys, *flags, "--print-config", command=command)
