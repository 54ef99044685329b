"""DistQat's pipeline list, quantisation, and the values that the schema derives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shoal.config import Config, load_config
from shoal.config.model import ModelPipelineConfig
from shoal.config.per_server import of_server
from shoal.config.quant import QuantScheme
from shoal.errors import ConfigError

CV = {"task_type": "cv"}


def _pipeline(*entries: dict[str, Any], **more: Any) -> Config:
    return load_config(None, {"model_pipeline": {"pipeline": list(entries)}, **more}, {})


def test_head_and_tail_become_two_stages_of_the_family() -> None:
    config = _pipeline({"model_name": "resnet18.head"}, {"model_name": "resnet18.tail", "num_classes": 7}, data=CV)
    assert (config.num_stages, config.model.family, config.model.num_classes) == (2, "resnet18", 7)
    assert config.model_pipeline.pipeline is None


def test_layers_of_the_entries_add_up_and_widths_agree() -> None:
    entries = [{"model_name": f"gpt.{part}", "n_layers": 2, "hid_dim": 64} for part in ("head", "body", "tail")]
    config = _pipeline(*entries)
    assert (config.num_stages, config.model.num_layers, config.model.hidden_size) == (3, 6, 64)
    assert config.model_pipeline.cut == (3, 2, 3), "the embedding goes with the first blocks, the head with the last"


def test_layers_of_the_entries_are_the_cut_by_hand() -> None:
    config = _pipeline({"model_name": "gpt.head", "n_layers": 1}, {"model_name": "gpt.tail", "n_layers": 4})
    assert (config.model.num_layers, config.model_pipeline.cut) == (5, (2, 5))
    assert _pipeline({"model_name": "gpt.full", "n_layers": 4}).model_pipeline.cut is None
    assert _pipeline({"model_name": "gpt.head"}, {"model_name": "gpt.tail"}).model_pipeline.cut is None


def test_entries_of_an_mlp_have_the_sizes_that_distqats_has_unless_others_are_said() -> None:
    config = _pipeline({"model_name": "mlp.full", "num_classes": 7}, data=CV)
    assert (config.model.family, config.model.num_layers, config.model.hidden_size) == ("mlp", 1, 200)
    assert (config.num_stages, config.model.num_classes, config.model_pipeline.cut) == (1, 7, None)
    parts = ({"model_name": "mlp.head"}, {"model_name": "mlp.tail"})
    config = _pipeline(*parts, data=CV)
    assert (config.model.num_layers, config.model.hidden_size, config.model_pipeline.cut) == (2, 200, (2, 2))
    config = _pipeline(*parts, data=CV, model={"num_layers": 6, "hidden_size": 32})
    assert (config.model.num_layers, config.model.hidden_size, config.model_pipeline.cut) == (6, 32, None)
    config = _pipeline(*({**part, "n_layers": 3, "hid_dim": 16} for part in parts), data=CV)
    assert (config.model.num_layers, config.model.hidden_size, config.model_pipeline.cut) == (6, 16, (4, 4))


@pytest.mark.parametrize("said", [[2, 5], "2,5", ["2", "5"], None])
def test_a_cut_that_agrees_with_the_list_may_be_said(said: object) -> None:
    pipeline = [{"model_name": "gpt.head", "n_layers": 1}, {"model_name": "gpt.tail", "n_layers": 4}]
    config = load_config(None, {"model_pipeline": {"pipeline": pipeline, "cut": said}}, {})
    assert config.model_pipeline.cut == (2, 5)


def test_a_cut_that_contradicts_the_list_is_refused() -> None:
    pipeline = [{"model_name": "gpt.head", "n_layers": 1}, {"model_name": "gpt.tail", "n_layers": 4}]
    with pytest.raises(ConfigError, match=r"model_pipeline\.cut = \[3, 4\] contradicts.*\[2, 5\]"):
        load_config(None, {"model_pipeline": {"pipeline": pipeline, "cut": [3, 4]}}, {})


@pytest.mark.parametrize("flag", ["2,4", "2 4", "[2, 4]"])
def test_a_cut_by_hand_also_says_how_many_stages_there_are(flag: str) -> None:
    config = load_config(None, ["--model-pipeline.cut", flag], {})
    assert (config.num_stages, config.model_pipeline.cut) == (2, (2, 4))


@pytest.mark.parametrize(
    ("section", "parts"),
    [
        ({"cut": [3, 4]}, ["[3, 4] adds up to 7", "gpt of this size has 6", "the embedding, 4 blocks and the head"]),
        ({"cut": [3, 3], "stages": 3}, ["[3, 3] has 2 numbers", "model_pipeline.stages = 3"]),
        ({"cut": [6, 0]}, ["cut[1] = 0", "at least 1"]),
        ({"cut": "3,x"}, ["cut[1] = 'x'", "whole number"]),
        ({"cut": "[3"}, ["not a JSON list"]),
        ({"cut": []}, ["has 0 numbers"]),
    ],
)
def test_a_cut_by_hand_that_does_not_fit_is_refused(section: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"model_pipeline": section}, {})
    for part in parts:
        assert part in str(caught.value)


def test_snapshots_need_servers_of_another_stage() -> None:
    with pytest.raises(ConfigError, match=r"snapshot_every_steps = 5: servers of other stages"):
        load_config(None, {"diloco": {"snapshot_every_steps": 5}, "model_pipeline": {"stages": 1}}, {})


def test_the_units_of_a_resnet_are_stem_blocks_and_head() -> None:
    cv = {"data": CV, "model": {"family": "resnet18"}}
    assert load_config(None, {**cv, "model_pipeline": {"cut": [6, 4]}}, {}).num_stages == 2
    with pytest.raises(ConfigError, match="has 10: the stem, 8 blocks and the head"):
        load_config(None, {**cv, "model_pipeline": {"cut": [6, 5]}}, {})


@pytest.mark.parametrize(
    ("entries", "part"),
    [
        ([{"model_name": "resnet18.tail"}, {"model_name": "resnet18.head"}], "must be ['resnet18.head'"),
        ([{"model_name": "resnet18.head"}], "must be ['resnet18.full']"),
        ([{"model_name": "resnet18.head"}, {"model_name": "gpt.tail"}], "do not name one supported family"),
        ([{"model_name": "gptneo.full"}], "do not name one supported family"),
        ([{"model_name": "gpt.head", "n_layers": 1}, {"model_name": "gpt.tail"}], "given for each of 2 stages"),
        ([{"model_name": "gpt.head", "hid_dim": 1}, {"model_name": "gpt.tail", "hid_dim": 2}], "disagree"),
        ([{"model_name": "resnet18.full", "n_layers": 3}], "fixed size"),
        ([{"model_name": "resnet18.full", "num_clases": 3}], "did you mean model_pipeline.pipeline.num_classes?"),
        ([{"model_name": "resnet18.full", "idx": 3}], "does not exist in shoal"),
        ([{"num_classes": 3}], "model_pipeline.pipeline[0].model_name"),
        ([], "at least one stage"),
    ],
)
def test_entries_that_make_no_model_are_refused(entries: list[dict[str, Any]], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _pipeline(*entries, data=CV)
    assert part in str(caught.value)


def test_a_pipeline_list_that_contradicts_other_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.family = 'gpt' contradicts"):
        _pipeline({"model_name": "resnet18.full"}, data=CV, model={"family": "gpt"})


def test_quantisation_is_off_by_default_and_complete_when_it_is_on() -> None:
    assert Config().quant is None
    quant = load_config(None, {"quant": {}}, {}).quant
    assert quant is not None
    assert quant.base.weight_quant == QuantScheme(num_bits=8)


def test_the_word_off_survives_yaml() -> None:
    flags = ["--quant.base.weight-quant", "off", "--quant.base.activation-quant.num-bits", "4"]
    quant = load_config(None, flags, {}).quant
    assert quant is not None
    assert quant.base.weight_quant == "off"
    assert quant.base.activation_quant == QuantScheme(num_bits=4)


def test_channels_of_activations_are_refused() -> None:
    with pytest.raises(ConfigError, match="per_channel is for weights only"):
        load_config(None, {"quant": {"base": {"activation_quant": {"per_channel": True}}}}, {})


def test_servers_follow_from_stages_and_replicas_unless_given() -> None:
    values: dict[str, Any] = {"model_pipeline": {"stages": 2}, "servers": {"replicas": 3}}
    assert Config.model_validate(values).num_servers == 6
    assert Config.model_validate(values | {"servers": {"num_servers": 5}}).num_servers == 5


def test_one_more_microbatch_than_stages_is_in_flight_unless_given() -> None:
    assert Config.model_validate({"model_pipeline": {"stages": 3}}).model_pipeline.microbatches_in_flight == 4
    assert Config.model_validate({"model_pipeline": {"window": 2}}).model_pipeline.microbatches_in_flight == 2


@pytest.mark.parametrize(("stages", "expected"), [(1, 2), (2, 3), (3, 5), (4, 7)])
def test_zero_bubble_has_work_for_the_first_stage_until_the_first_gradient_is_back(stages: int, expected: int) -> None:
    flow = ModelPipelineConfig(stages=stages, schedule="zero_bubble")
    assert flow.microbatches_in_flight == expected
    assert flow.evaluations_in_flight == stages + 1


def test_gpipe_sends_all_microbatches_and_takes_no_window() -> None:
    flow = ModelPipelineConfig(stages=3, schedule="gpipe")
    assert flow.microbatches_in_flight is None
    assert flow.evaluations_in_flight == 4
    with pytest.raises(ValidationError, match="all microbatches are in flight"):
        ModelPipelineConfig(schedule="gpipe", window=2)


def test_accumulated_batches_are_one_step() -> None:
    config = Config.model_validate({"diloco": {"batch_size_per_step": 8, "gradient_accumulation_steps": 3}})
    assert config.diloco.samples_per_step == 24


def test_clips_of_audio_come_from_no_class_of_ones_own() -> None:
    values = {"data": {"task_type": "speech", "dataset_name": "mine.data:Clips"}, "model": {"family": "wav2vec2"}}
    with pytest.raises(ValueError, match=r"from a folder or a table, not from a class"):
        Config.model_validate(values)


def test_own_families_are_named_by_path_and_may_have_any_number_of_stages() -> None:
    config = Config.model_validate({"model": {"family": "my.models:Net"}, "model_pipeline": {"stages": 50}})
    assert config.model.max_stages is None


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().diloco.inner_steps = 3  # type: ignore[misc]


def test_amd_devices_have_the_name_that_torch_gives_them() -> None:
    assert Config.model_validate({"device": "rocm:1"}).device == "cuda:1"


@pytest.mark.parametrize(
    ("flags", "threads", "nice"),
    [
        ([], (1,), (0,)),
        (["--servers.threads=2", "--servers-nice", "19"], (2,), (19,)),
        (["--threads", "1,2", "--nice", "[3, 4]"], (1, 2), (3, 4)),
        (["--threads", "1", "--threads", "2"], (1, 2), (0,)),
    ],
)
def test_threads_and_nice_are_one_value_or_one_for_each_server(
    flags: list[str], threads: tuple[int, ...], nice: tuple[int, ...]
) -> None:
    config = load_config(None, [*flags, "--num-servers=2"], {})
    assert (config.servers.threads, config.servers.nice) == (threads, nice)
    assert config.servers_problem() is None
    assert [of_server(config.servers.threads, i) for i in (0, 1)] == [threads[0], threads[-1]]
    again = load_config(None, {"servers": {"threads": list(threads), "nice": nice[0]}}, {})
    assert (again.servers.threads, again.servers.nice) == (threads, nice[:1])


@pytest.mark.parametrize(
    ("flag", "part"),
    [
        ("--threads=0", "servers.threads"),
        ("--threads=1,x", "servers.threads"),
        ("--threads=1,,2", "servers.threads"),
        ("--nice=20", "servers.nice"),
        ("--nice=-1", "servers.nice"),
        ("--device=cpu,gpu", "'gpu' is not a device"),
        ("--device=cpu,", "'' is not a device"),
    ],
)
def test_values_that_no_server_can_have_are_refused(flag: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part.replace(".", r"\.")):
        load_config(None, [flag], {})


def test_compiled_stages_have_no_split_backward() -> None:
    with pytest.raises(ConfigError, match=r"compile: .*use the schedule 1f1b"):
        load_config(None, ["--model-pipeline.compile", "--model-pipeline.schedule=zero_bubble"], {})


def test_a_device_is_one_for_all_servers_or_one_for_each() -> None:
    assert load_config(None, ["--device", "rocm:0, cpu"], {}).devices == ("cuda:0", "cpu")
    assert load_config(None, [], {}).devices == ("auto",)


@pytest.mark.parametrize("host", ["203.0.113.7", "2001:db8::1", "me.example", "me.example.", "box_2", "127.0.0.1"])
def test_an_address_or_a_name_may_be_the_public_one(host: str) -> None:
    assert load_config(None, ("--public-ip", host), {}).network.public_ip == host


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("x y", "it is neither an IP address nor the name of a host"),
        ("http://me.example", "it is neither an IP address nor the name of a host"),
        ("/ip4/203.0.113.7", "it is neither an IP address nor the name of a host"),
        ("300.1.2.3", "it is not an IPv4 address, which has four numbers from 0 to 255"),
        ("203.0.113", "it is not an IPv4 address, which has four numbers from 0 to 255"),
        ("203.0.113.7:7000", "it is without a port (network.announce_data_port"),
        ("me.example:7000", "it is without a port (network.announce_data_port"),
        ("0.0.0.0", "nobody can dial that address"),
        ("::", "nobody can dial that address"),
        ("224.0.0.1", "nobody can dial that address"),
    ],
)
def test_what_nobody_can_dial_is_no_public_address(host: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, ("--public-ip", host), {})
    assert f"network.public_ip = {host!r} (--public-ip): {reason}" in str(error.value)


@pytest.mark.parametrize("flag", ["--host-name", "--network.host-name"])
def test_a_host_is_called_as_its_user_says(flag: str) -> None:
    assert load_config(None, (flag, "box-2.lan_3"), {}).network.shown_host_name == "box-2.lan_3"


@pytest.mark.parametrize("name", ["", "x" * 33, "two words", "\x1b[31mred", "box\n", "\u202exob", "-box", "a@b", "a#b"])
def test_what_could_mean_something_on_a_terminal_is_no_host_name(name: str) -> None:
    with pytest.raises(ConfigError, match="use 1 to 32 letters, digits, dots, dashes and underscores"):
        load_config(None, (f"--host-name={name}",), {})


@pytest.mark.parametrize(
    ("own", "shown"),
    [
        ("box2", "box2"),
        ("box2.lan", "box2"),
        ("anna's laptop", "anna-s-laptop"),
        ("b\u00f6x\x1b[31m", "b-x--31m"),
        ("_x" * 40, "x" + "_x" * 15 + "_"),
        ("", "host"),
        ("...", "host"),
    ],
)
def test_without_a_name_a_host_is_called_as_the_machine(own: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: own)
    config = load_config(None, (), {})
    assert config.network.shown_host_name == shown
    assert load_config(None, ("--host-name", shown), {}).network.host_name == shown


def test_no_public_address_is_none() -> None:
    assert load_config(None, {"network": {"public_ip": ""}}, {}).network.public_ip is None


def test_too_few_servers_name_the_other_way_to_say_how_many_there_are() -> None:
    problem = load_config(None, {"model_pipeline": {"stages": 2}, "servers": {"num_servers": 1}}, {})
    assert "--servers.replicas how many servers each stage gets" in str(problem.whole_swarm_problem())


def test_checkpoints_lie_beside_the_logs_unless_checkpoint_dir_says_where() -> None:
    def location(**values: str) -> str:
        return Config.model_validate(values).checkpoint_location

    assert location(log_dir="/data/logs") == "/data/logs/checkpoints"
    assert location(checkpoint_dir="") == str(Path("logs/checkpoints").absolute())
    assert location(checkpoint_dir="kept") == str(Path("kept").absolute())
    assert location(checkpoint_dir="~/kept") == str(Path.home() / "kept")
    assert location(checkpoint_dir="s3://bucket/runs") == "s3://bucket/runs"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"task_type": "cv"}}, "model.family = biggan needs data.task_type = image_gen, not cv"),
        ({"model_pipeline": {"stages": 2}}, "can be cut into at most 1 stages"),
        ({"model_pipeline": {"compile": True}}, "model_pipeline.compile: the two players"),
    ],
)
def test_what_a_biggan_cannot_be_trained_with_is_refused(sections: dict[str, Any], message: str) -> None:
    values = {"model": {"family": "biggan"}, "data": {"task_type": "image_gen"}, **sections}
    with pytest.raises(ConfigError, match=message):
        load_config(None, values, {})


def test_who_names_a_model_with_weights_and_begins_from_random_ones_is_told(tmp_path: Path) -> None:
    def told(**model: Any) -> str | None:
        return Config.model_validate({"model": {"family": "hf", **model}}).model.unread_weights()

    folder = str(tmp_path)
    assert told(name_or_path=folder) is None, "it has only a configuration"
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert told(name_or_path=folder) == (
        f"the model begins from random weights; --model.pretrained begins from those of {folder}"
    )
    assert "those of Qwen/Qwen3-0.6B" in (told(name_or_path="Qwen/Qwen3-0.6B") or "")
    assert told(name_or_path=folder, pretrained=True) is None
    assert told(name_or_path=folder, extra={"num_hidden_layers": 2}) is None, "of other sizes"
