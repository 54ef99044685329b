"""What a host takes from the run, what it keeps, and what it may not say otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.config import Config, load_config
from shoal.config.load import load_with_origins
from shoal.config.shared import adopt_shared, changed_keys, fork_shared, shared_configuration
from shoal.errors import ConfigError

RUN = load_config(
    None,
    {
        "experiment_prefix": "other",
        "model_pipeline": {"cut": [4, 2], "microbatches": 2, "window": 5},
        "model": {"hidden_size": 64},
        "diloco": {"inner_steps": 7, "batch_size_per_step": 8},
        "data": {"hf_token": "secret", "num_workers": 3},
        "quant": {},
        "servers": {"threads": 4},
    },
    {},
)


def _adopt(*flags: str, run: Config = RUN, file: Path | None = None) -> Config:
    host, origins = load_with_origins(file, flags, {"HF_TOKEN": "own"})
    return adopt_shared(host, origins, shared_configuration(run))


def test_shared_keys_come_from_the_run_and_host_keys_stay() -> None:
    flags = (
        "--device=cpu",
        "--servers.threads=2",
        "--num-servers=1",
    )
    config = _adopt(*flags)
    assert shared_configuration(config) == shared_configuration(RUN)
    assert (config.device, config.servers.threads, config.num_servers) == ("cpu", (2,), 1)
    assert config.model_pipeline.window == 5
    assert config.data.hf_token is not None
    assert config.data.hf_token.get_secret_value() == "own"
    assert "secret" not in str(shared_configuration(RUN))


def test_the_schedule_is_the_run_s_and_a_host_may_not_have_another() -> None:
    run = RUN.model_copy(
        update={
            "model_pipeline": RUN.model_pipeline.model_copy(
                update={"schedule": "zero_bubble", "activation_checkpointing": True}
            )
        }
    )
    adopted = _adopt("--device=cpu", run=run).model_pipeline
    assert (adopted.schedule, adopted.activation_checkpointing) == ("zero_bubble", True)
    with pytest.raises(ConfigError, match=r"model_pipeline\.schedule = 'gpipe'.*'zero_bubble'"):
        _adopt("--model-pipeline.schedule=gpipe", run=run)


def test_whether_stages_are_compiled_is_the_run_s() -> None:
    run = RUN.model_copy(update={"model_pipeline": RUN.model_pipeline.model_copy(update={"compile": True})})
    assert _adopt("--device=cpu", run=run).model_pipeline.compile
    assert shared_configuration(run) != shared_configuration(RUN)
    with pytest.raises(ConfigError, match=r"model_pipeline\.compile = True.*the run has False"):
        _adopt("--model-pipeline.compile")


def test_the_cut_of_the_run_travels_with_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for said in ("{stages: 2}", "{stages: 2, cut: null}", "{cut: [4, 2]}"):
        file.write_text(f"model_pipeline: {said}")
        config = _adopt("--device=cpu", file=file)
        assert config.model_pipeline.cut == (4, 2)
        assert shared_configuration(config) == shared_configuration(RUN)


def test_a_list_in_distqats_notation_has_to_agree_with_the_cut_if_it_says_one(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    head, tail = (f"{{model_name: gpt.{part}, hid_dim: 64, n_layers: %d}}" for part in ("head", "tail"))
    for layers, agrees in (((3, 1), True), ((2, 2), False)):
        file.write_text(f"model_pipeline:\n  pipeline: [{head % layers[0]}, {tail % layers[1]}]\n")
        if agrees:
            assert _adopt(file=file).model_pipeline.cut == (4, 2)
            continue
        with pytest.raises(ConfigError, match=r"model_pipeline\.cut = \[3, 3\].*the run has \[4, 2\]"):
            _adopt(file=file)
    file.write_text("model_pipeline:\n  pipeline: [{model_name: gpt.head, hid_dim: 64}, {model_name: gpt.tail}]\n")
    assert _adopt(file=file).model_pipeline.cut == (4, 2)


def test_the_same_file_on_both_hosts_agrees(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "data: {task_type: cv, dataset_name: digits, num_channels: 1, img_size: 8}\n"
        "model_pipeline:\n  pipeline: [{model_name: resnet18.head}, {model_name: resnet18.tail}]\n"
    )
    config = _adopt("--device=cpu", run=load_config(file, (), {}), file=file)
    assert (config.model.family, config.num_stages) == ("resnet18", 2)


@pytest.mark.parametrize(
    ("flag", "parts"),
    [
        ("--model.hidden-size=128", ["model.hidden_size = 128 (--model.hidden-size)", "the run has 64"]),
        ("--diloco.inner-steps=8", ["diloco.inner_steps = 8", "the run has 7"]),
        ("--diloco-batch-size-per-step=9", ["diloco.batch_size_per_step = 9", "the run has 8"]),
        ("--experiment-prefix=x", ["experiment_prefix = 'x'", "the run has 'other'"]),
        ("--no-quant", ["quant = None"]),
        ("--model-pipeline.cut=2,4", ["model_pipeline.cut = [2, 4] (--model-pipeline.cut)", "the run has [4, 2]"]),
        ("--model-pipeline.window=9", ["model_pipeline.window = 9", "the run has 5"]),
    ],
)
def test_a_shared_key_that_differs_is_named(flag: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        _adopt(flag)
    for part in parts:
        assert part in str(caught.value)


def test_a_smaller_batch_is_this_hosts_cap_and_no_difference(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("diloco: {batch_size_per_step: 8}\nmodel_pipeline: {microbatches: 2, stages: 2}\n")
    config = _adopt("--diloco-batch-size-per-step", "1", "--device", "cpu", file=file)
    assert config.servers.max_microbatch_samples == 1
    assert shared_configuration(config) == shared_configuration(RUN)
    assert _adopt("--diloco-batch-size-per-step=8").servers.max_microbatch_samples is None
    assert _adopt("--servers.max-microbatch-samples=3").servers.max_microbatch_samples == 3


def test_two_different_caps_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"batch_size_per_step = 1 .*max_microbatch_samples = 3 .*remove one"):
        _adopt("--diloco-batch-size-per-step=1", "--servers.max-microbatch-samples=3")


def test_a_shared_key_that_agrees_may_be_said() -> None:
    assert _adopt("--model.hidden-size=64", "--diloco.inner-steps=7").model.hidden_size == 64


def test_code_of_somebody_else_runs_only_where_its_name_was_said() -> None:
    shared: dict[str, Any] = shared_configuration(RUN)
    shared["model"]["family"] = "somebody.models:Theirs"
    with pytest.raises(
        ConfigError, match=r"names 'somebody\.models:Theirs' by .* say --model\.family somebody\.models"
    ):
        adopt_shared(Config(), {}, shared)
    host, origins = load_with_origins(None, ("--model.family=somebody.models:Theirs",), {})
    assert adopt_shared(host, origins, shared).model.family == "somebody.models:Theirs"


def test_a_host_that_takes_a_run_over_names_its_data_if_that_is_code_and_one_of_servers_need_not() -> None:
    shared: dict[str, Any] = shared_configuration(RUN)
    shared["data"] |= {"dataset_name": "somebody.data:Theirs", "arguments": {"path": "x"}}
    said = (
        r"the run names 'somebody\.data:Theirs' by data\.dataset_name.* say --data\.dataset-name somebody\.data:Theirs"
    )
    with pytest.raises(ConfigError, match=said):
        adopt_shared(Config(), {}, shared)
    for flags, opens_data in (((), False), (("--data.dataset-name=somebody.data:Theirs",), True)):
        host, origins = load_with_origins(None, flags, {})
        adopted = adopt_shared(host, origins, shared, opens_data=opens_data)
        assert adopted.data.dataset_name == "somebody.data:Theirs"


def test_a_host_that_takes_a_run_over_reads_its_own_files_only_where_they_were_named(tmp_path: Path) -> None:
    """Whoever tells the run may have any folder of this host trained on, and look at it on a server of his."""
    shared: dict[str, Any] = shared_configuration(RUN)
    (tmp_path / "letters").mkdir()
    for name in (str(tmp_path / "letters"), "~/letters", "./letters", f"{tmp_path}/*/*.txt"):
        shared["data"] |= {"dataset_name": name, "eval_split": None}
        with pytest.raises(ConfigError, match=r"the run names files of this host by data\.dataset_name, .* say --data"):
            adopt_shared(Config(), {}, shared)
        host, origins = load_with_origins(None, (f"--data.dataset-name={name}",), {})
        assert adopt_shared(host, origins, shared).data.dataset_name == name
        assert adopt_shared(Config(), {}, shared, opens_data=False).data.dataset_name == name
        assert adopt_shared(Config(), {}, shared, from_peers=False).data.dataset_name == name
    shared["data"] |= {"dataset_name": "somebody/texts", "eval_split": "/home"}
    with pytest.raises(
        ConfigError, match=r"of this host by data\.eval_split, '/home', .* say --data\.eval-split /home"
    ):
        adopt_shared(Config(), {}, shared)
    shared["data"] |= {"eval_split": "test"}
    assert adopt_shared(Config(), {}, shared).data.dataset_name == "somebody/texts"


def test_what_a_checkpoint_names_was_not_said_here_though_the_host_is_read_over_it() -> None:
    run: dict[str, Any] = shared_configuration(RUN)
    run["data"]["dataset_name"], run["model"]["family"] = "somebody.data:Theirs", "somebody.models:Theirs"
    host, origins = load_with_origins(None, ("--diloco.inner-steps=9",), {}, run=run)
    for adopt in (
        lambda: adopt_shared(host, {}, run, told_by="its checkpoint"),
        lambda: fork_shared(host, origins, changed_keys(host, origins, run), run, told_by="its checkpoint"),
    ):
        with pytest.raises(ConfigError) as error:
            adopt()
        for key in ("--model.family somebody.models:Theirs", "--data.dataset-name somebody.data:Theirs"):
            assert key in str(error.value)
        assert str(error.value).count("its checkpoint names") == 2


@pytest.mark.parametrize(
    ("section", "content"),
    [
        ("notify", {"command": ["sh", "-c", "touch x"]}),
        ("log_dir", "/tmp"),
        ("data", {"cache_dir": "/tmp"}),
        ("model_pipeline", {"pipeline": []}),
        ("data", 5),
    ],
)
def test_what_each_host_decides_for_itself_no_run_says(section: str, content: object) -> None:
    shared: dict[str, Any] = shared_configuration(RUN)
    shared[section] = {**shared.get(section, {}), **content} if isinstance(content, dict) else content
    with pytest.raises(ConfigError, match=rf"says '{section}.*, which no run of this version of shoal shares"):
        adopt_shared(Config(), {}, shared)


def test_keys_of_another_version_are_an_error_of_the_user() -> None:
    shared: dict[str, Any] = shared_configuration(RUN)
    shared["diloco"]["from_the_future"] = 1
    with pytest.raises(ConfigError, match=r"diloco\.from_the_future.*client's version"):
        adopt_shared(Config(), {}, shared)


def _hf_run(**more: Any) -> Config:
    model = {"family": "hf", "name_or_path": "./qwen", "hf_config": {"model_type": "qwen3", "hidden_size": 64}, **more}
    return load_config(None, {"model": model, "model_pipeline": {"cut": [3, 3]}}, {})


def test_what_a_model_of_transformers_is_travels_with_the_run() -> None:
    for flags in ((), ("--model.family=hf", "--model.name-or-path=./qwen")):
        assert _adopt(*flags, run=_hf_run()).model == _hf_run().model
    with pytest.raises(ConfigError, match=r"model\.name_or_path = '\./llama' .*the run has '\./qwen'"):
        _adopt("--model.family=hf", "--model.name-or-path=./llama", run=_hf_run())


@pytest.mark.parametrize(
    ("flag", "known"),
    [("--model.name-or-path=./qwen", True), ("--model.name-or-path=./llama", False), ("--model.revision=v2", False)],
)
def test_a_run_that_goes_on_reads_the_model_again_only_if_it_is_another_one(flag: str, known: bool) -> None:
    run = shared_configuration(_hf_run(commit="c0ffee", weights=["0" * 32], pretrained=True))
    host, origins = load_with_origins(None, (flag,), {}, run=run)
    for model in (host.model, fork_shared(host, origins, changed_keys(host, origins, run), run).model):
        assert [value is not None for value in (model.hf_config, model.commit, model.weights)] == 3 * [known]
