"""Files of DistQat (aether), in its notation: what becomes of them, and what is said of what cannot be carried over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.checkpoint.model_layout import stage_layouts
from shoal.cli import main
from shoal.config import Config, load_config
from shoal.config.distqat_models import PUBLISHED
from shoal.config.distqat_names import NEEDED, REMOVED
from shoal.config.keys import keys
from shoal.errors import ConfigError
from shoal.model.hf.described import config_values
from shoal.model.hf.library import build_without_memory, model_config

IMAGES = """
wandb_project: "none-of-mine"
experiment_prefix: "images"
world_size: 2
device: "cpu"
max_expert_index: 128
log_dir: "logs/images"
data:
  dataset_name: "some/images"
  task_type: "cv"
  precision: "fp16-mixed"
  num_channels: 3
  img_size: 32
  hf_token: "hf_sesame"
diloco:
  inner_optim: {type: "adam", adam_lr: 2e-4, biggan_G_lr: 1e-4}
  outer_optim: {type: "sgd", sgd_lr: 0.07, adam_lr: 4e-4}
  inner_steps: 500
  outer_steps: 100
  batch_size_per_step: 64
  averaging_timeout: 60.0
  min_refresh_period: 5.0
  verbose: true
model_pipeline:
  pipeline:
    - {model_name: "resnet18.head", num_classes: 7, hid_dim: 2048}
    - {model_name: "resnet18.tail", num_classes: 7, idx: 4}
  forward_timeout: 90.0
param_mirror: {enable: false, refresh_every: 300}
data_server: {ipc_port: 52555}
biggan: null
"""

TEXT = """
data: {dataset_name: "some/text", task_type: "llm", full_model_name: "EleutherAI/gpt-neo-125M", seq_len: 2048}
diloco: {batch_size_per_step: 2, gradient_accumulation_steps: 16}
model_pipeline:
  pipeline:
    - {model_name: "gptneo.head", hid_dim: 768, n_layers: 3}
    - {model_name: "gptneo.body", hid_dim: 768, n_layers: 4, idx: 3}
    - {model_name: "gptneo.tail", hid_dim: 768, n_layers: 5, idx: 7}
"""

SPEECH = """
data:
  dataset_name: openslr/librispeech_asr
  task_type: speech
  full_model_name: facebook/wav2vec2-base
  sampling_rate: 8000
model_pipeline:
  pipeline:
    - {model_name: "wav2vec2.head", hid_dim: 768, n_layers: 4}
    - {model_name: "wav2vec2.body", hid_dim: 768, n_layers: 4, idx: 4}
    - {model_name: "wav2vec2.tail", hid_dim: 768, n_layers: 4, idx: 8}
"""

Capture = pytest.CaptureFixture[str]


def converted(tmp_path: Path, text: str, capsys: Capture) -> tuple[Config, str]:
    """What a run would be told by the translation, and the translation."""
    (tmp_path / "aether.yaml").write_text(text)
    assert main(["config", "convert", str(tmp_path / "aether.yaml")]) == 0
    translated = capsys.readouterr().out
    (tmp_path / "mine.yaml").write_text(translated)
    return load_config(tmp_path / "mine.yaml", (), {}), translated


def refused(tmp_path: Path, text: str, capsys: Capture) -> str:
    (tmp_path / "aether.yaml").write_text(text)
    assert main(["config", "convert", str(tmp_path / "aether.yaml")]) == 2
    output = capsys.readouterr()
    assert not output.out
    return output.err


def test_a_file_is_carried_over_key_by_key(tmp_path: Path, capsys: Capture) -> None:
    config, text = converted(tmp_path, IMAGES, capsys)
    assert (config.experiment_prefix, config.wandb_project, config.device) == ("images", "none-of-mine", "cpu")
    assert (config.data.dataset_name, config.data.task_type) == ("some/images", "cv")
    assert config.data.precision == "fp16-mixed"
    assert (config.model.family, config.model.num_classes, config.model.stem) == ("resnet18", 7, "imagenet")
    assert (config.num_stages, config.model_pipeline.pipeline) == (2, None)
    assert (config.diloco.inner_steps, config.diloco.outer_steps, config.diloco.inner_optim.adam_lr) == (500, 100, 2e-4)
    assert (config.diloco.averaging_timeout_s, config.model_pipeline.forward_timeout_s) == (60, 90)
    assert (config.param_mirror.enable, config.param_mirror.every_s) == (False, 300)
    # A comment stands above what has another name or value.
    lines = [line.strip() for line in text.splitlines()]
    [at] = [index for index, line in enumerate(lines) if line.startswith("averaging_timeout_s:")]
    assert lines[at - 1].startswith("# diloco.averaging_timeout there")
    assert "sesame" not in text


def test_speech_is_the_model_that_it_names_with_the_cut_that_its_stages_say(tmp_path: Path, capsys: Capture) -> None:
    config, text = converted(tmp_path, SPEECH, capsys)
    assert (config.data.task_type, config.data.sampling_rate, config.data.characters) == ("speech", 8000, None)
    assert (config.model.family, config.model.extra) == ("wav2vec2", PUBLISHED["facebook/wav2vec2-base"])
    # The features and their projection are units of the first stage, the head is one of the last.
    assert config.model_pipeline.cut == (6, 4, 5)
    assert len(stage_layouts(config)) == 3
    assert "text is trained as bytes" not in text.lower()
    other, _ = converted(tmp_path, SPEECH.replace("facebook/wav2vec2-base", "somebody/wav2vec2"), capsys)
    assert other.model.name_or_path == "somebody/wav2vec2"
    assert "hid_dim is 512" in refused(tmp_path, SPEECH.replace("hid_dim: 768", "hid_dim: 512"), capsys)


def test_keys_without_effect_are_named_with_the_reason_and_left_out(tmp_path: Path, capsys: Capture) -> None:
    _, text = converted(tmp_path, IMAGES, capsys)
    head = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    for name in (
        "world_size",
        "max_expert_index",
        "diloco.min_refresh_period",
        "diloco.verbose",
        "data_server",
        "diloco.inner_optim.biggan_G_lr",
        "diloco.outer_optim.adam_lr",
        "model_pipeline.pipeline.idx",
        "model_pipeline.pipeline.hid_dim",
        "data.hf_token",
    ):
        assert name in head
        assert REMOVED.get(name, ":") in head or name == "model_pipeline.pipeline.idx"
    assert not {"world_size", "biggan", "data_server"} & set(yaml.safe_load(text))


def test_what_a_file_does_not_say_is_what_it_is_there(tmp_path: Path, capsys: Capture) -> None:
    config, text = converted(tmp_path, "wandb_project: null", capsys)
    assert (config.model.family, config.model.num_layers, config.model.hidden_size) == ("mlp", 1, 200)
    assert (config.data.dataset_name, config.data.task_type, config.data.precision) == ("mnist", "cv", "fp16-mixed")
    assert config.diloco.max_grad_norm is None
    assert text.count("DistQat's default") == 5


def test_a_language_model_is_the_published_one_of_transformers_with_the_cut_of_the_file(
    tmp_path: Path, capsys: Capture
) -> None:
    config, _ = converted(tmp_path, TEXT, capsys)
    assert (config.model.family, config.model.extra) == ("hf", PUBLISHED["eleutherai/gpt-neo-125m"])
    assert (config.model.extra["num_layers"], config.model.extra["attention_types"]) == (12, [[["global", "local"], 6]])
    assert (config.num_stages, config.model_pipeline.cut) == (3, (4, 4, 6))
    assert (config.diloco.batch_size_per_step, config.model_pipeline.microbatches) == (2, 2)
    whole = TEXT.partition("model_pipeline:")[0] + "model_pipeline: {pipeline: [{model_name: distilgpt2.full}]}"
    config, _ = converted(tmp_path, whole.replace("EleutherAI/gpt-neo-125M", "distilbert/distilgpt2"), capsys)
    assert (config.model.extra["model_type"], config.model.extra["n_layer"]) == ("gpt2", 6)
    assert (config.num_stages, config.model_pipeline.cut) == (1, None)
    config, _ = converted(tmp_path, whole.replace("EleutherAI/gpt-neo-125M", "somebody/neo"), capsys)
    assert (config.model.name_or_path, config.model.extra, config.model.pretrained) == ("somebody/neo", {}, False)


def test_quantisation_keeps_its_bits(tmp_path: Path, capsys: Capture) -> None:
    weights = "{algo: LearnedStepQuantizer, num_bits: 4, slice_bits: 2, params: {}}"
    schemes = f"{{weight_quant: {weights}, accumulator_bits: 8}}"
    config, text = converted(tmp_path, f"quant: {{base: {schemes}}}", capsys)
    assert config.quant is not None
    assert config.quant.base.weight_quant != "off"
    assert config.quant.base.weight_quant.num_bits == 4
    assert "quant.base.weight_quant.slice_bits" in text


def test_all_that_cannot_be_carried_over_is_said_at_once(tmp_path: Path, capsys: Capture) -> None:
    problems = refused(
        tmp_path,
        "biggan: {G_ch: 64, G_param: SVD, use_ema: true, D_attn: wide}\n"
        "data: {task_type: rl, num_classes: 10}\n"
        "diloco: {inner_optim: {type: biggan, biggan_G_lr: 1e-4}, inner_steps: many}\n"
        "quant: {overrides: [{name_patterns: ['*'], payload: {}}]}\n"
        "model_pipeline: {pipeline: [{model_name: biggan.full}]}\n",
        capsys,
    )
    for part in (
        "biggan.G_param = 'SVD': only 'SN' is here",
        "biggan.use_ema = True: only False is here",
        "biggan.D_attn = 'wide': must be sizes of images",
        "data.task_type = 'rl'",
        "diloco.inner_steps = 'many'",
        "quant.overrides: write quant.rules",
    ):
        assert part in problems


GAN = """
biggan: {G_ch: 96, D_ch: 32, dim_z: 120, shared_dim: 0, hier: true, G_attn: "32_64", D_attn: "0", G_init: N02,
  D_init: ortho, BN_eps: 1.0e-12, SN_eps: 1.0e-6, resolution: 64, num_D_steps: 4, G_param: SN, ema: true,
  use_ema: false, enable_eval: true, G_lr: 7.0}
data: {task_type: image_gen}
diloco:
  inner_optim: {type: biggan, biggan_G_lr: 1e-4, biggan_D_lr: 4e-4, biggan_D_B2: 0.99, biggan_adam_eps: 1e-7,
    biggan_model_config: {}}
model_pipeline: {pipeline: [{model_name: biggan.full, num_classes: 1000, extra: {G_ch: 96}}]}
"""


def test_a_biggan_keeps_its_sizes_and_both_its_optimizers(tmp_path: Path, capsys: Capture) -> None:
    config, text = converted(tmp_path, GAN, capsys)
    assert (config.model.family, config.model.num_classes, config.data.img_size) == ("biggan", 1000, 64)
    assert config.model.extra == {
        "generator_channels": 96,
        "discriminator_channels": 32,
        "latent_size": 120,
        "hierarchical": True,
        "wide": True,
        "generator_attention": [32, 64],
        "discriminator_attention": [],
        "generator_init": "normal",
        "discriminator_init": "orthogonal",
        "norm_eps": 1e-12,
        "spectral_eps": 1e-6,
    }
    optim, eps = config.diloco.inner_optim, 1e-7
    values = (optim.adam_lr, optim.adam_betas1, optim.adam_betas2, optim.adam_eps, optim.adam_weight_decay)
    assert (optim.type, *values) == ("adam", 4e-4, 0.0, 0.99, eps, 0.0)
    generator, every_steps = optim.settings_of("gan.generator.linear.weight", 2)
    assert (generator.adam_lr, generator.adam_betas2, generator.adam_eps, every_steps) == (1e-4, 0.999, eps, 4)
    assert optim.settings_of("gan.discriminator.linear.weight", 2).every_steps == 1
    for name in ("biggan.ema", "biggan.enable_eval", "biggan.G_lr", "model_pipeline.pipeline.extra"):
        assert name in text
    config, _ = converted(tmp_path, GAN.replace("num_D_steps: 4, ", ""), capsys)
    assert config.diloco.inner_optim.settings_of("gan.generator.linear.weight", 2).every_steps == 1


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (TEXT.replace("n_layers: 5", "n_layers: 2"), "the sum of n_layers is 9, but EleutherAI/gpt-neo-125M"),
        (TEXT.replace("hid_dim: 768", "hid_dim: 512"), "hid_dim is 512, but EleutherAI/gpt-neo-125M"),
        (TEXT.replace("gptneo.body", "gptneo.head"), "3 stages must be ['gptneo.head', 'gptneo.body', 'gptneo.tail']"),
        ("model_pipeline: {pipeline: resnet18.full}", "must be a list of stages"),
        ("model_pipeline: {pipeline: [{model_name: resnet18.full, num_classes: x}]}", "num_classes = 'x'"),
        ("model_pipeline: {pipeline: []}", "do not name one supported family"),
        ("data: {}\ndata: {}", "given twice"),
        ("- a list", "must hold `key: value` lines"),
    ],
)
def test_what_makes_no_run_is_refused(text: str, part: str, tmp_path: Path, capsys: Capture) -> None:
    assert part in refused(tmp_path, text, capsys)


def test_a_file_of_distqat_that_is_given_for_a_run_names_the_command_that_translates_it(tmp_path: Path) -> None:
    path = tmp_path / "aether.yaml"
    path.write_text(IMAGES)
    with pytest.raises(ConfigError) as caught:
        load_config(path, (), {})
    assert "world_size does not exist in shoal" in str(caught.value)
    assert f"`shoal config convert {path} > mine.yaml` translates it" in str(caught.value)
    path.write_text("diloco: {inner_stps: 5}")
    with pytest.raises(ConfigError) as caught:
        load_config(path, (), {})
    assert "config convert" not in str(caught.value)


def test_a_configuration_of_distqat_that_is_not_shipped_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reference\.yaml lists all keys"):
        load_config(tmp_path / "template_config.yaml", (), {})


def test_no_removed_key_is_a_key_of_shoal() -> None:
    assert not REMOVED.keys() & keys().keys()
    assert REMOVED.keys() >= NEEDED


@pytest.mark.parametrize(
    ("name", "millions"), [("eleutherai/gpt-neo-125m", 125.198592), ("distilbert/distilgpt2", 81.912576)]
)
def test_published_models_have_their_published_size(name: str, millions: float) -> None:
    values: dict[str, Any] = {"model": {"family": "hf", "extra": PUBLISHED[name]}}
    config = Config.model_validate(values)
    model = build_without_memory(model_config(config_values(config.model), config.model.extra))
    assert sum(parameter.numel() for parameter in model.parameters()) == round(millions * 1e6)
