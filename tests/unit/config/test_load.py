"""Precedence of the sources, other names, and what each wrong input is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from shoal import load_config
from shoal.config import Config, config_from_json, config_to_json, dump_config, published_values
from shoal.config.distqat_names import REMOVED
from shoal.config.keys import ALIASES, flag_names, keys, plain
from shoal.config.load import why_invalid
from shoal.config.sources import read_file
from shoal.errors import ConfigError


def _write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def _refused(*args: object, env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(*args, env=env or {})  # type: ignore[arg-type]
    return str(caught.value)


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    path = _write(tmp_path, "diloco: {inner_steps: 1, outer_steps: 1, batch_size_per_step: 11}")
    env = {"SHOAL_DILOCO__INNER_STEPS": "2", "SHOAL_DILOCO__OUTER_STEPS": "2", "PATH": "/bin"}
    diloco = load_config(path, ["--diloco.inner-steps", "3"], env).diloco
    assert (diloco.inner_steps, diloco.outer_steps, diloco.batch_size_per_step) == (3, 2, 11)
    assert diloco.gradient_accumulation_steps == Config().diloco.gradient_accumulation_steps


@pytest.mark.parametrize(
    "flags",
    [
        ["--diloco.inner-steps", "7"],
        ["--diloco.inner_steps=7"],
        ["--diloco-inner-steps", "7"],
        ["--diloco_inner_steps=7"],
    ],
)
def test_dots_dashes_and_underscores_are_the_same_flag(flags: list[str]) -> None:
    assert load_config(None, flags, {}).diloco.inner_steps == 7


def test_flags_for_truth_values_need_no_value_and_have_a_no_form() -> None:
    assert load_config(None, ["--run.deterministic", "--no-wandb"], {}).run.deterministic
    assert not load_config(None, ["--run.deterministic", "--no-wandb"], {}).wandb
    assert not load_config(None, ["--run.deterministic", "false", "--wandb", "yes"], {}).run.deterministic


def test_words_null_and_none_unset_what_may_be_unset() -> None:
    config = load_config(None, ["--wandb-project", "none", "--diloco.max-grad-norm", "null"], {})
    assert config.wandb_project is None
    assert config.diloco.max_grad_norm is None
    assert load_config(None, ["--quant", "{}", "--disable-quant"], {}).quant is None


@pytest.mark.parametrize(
    "flags",
    [
        ["--initial-peers", "/a", "--network.initial-peers", "/b"],
        ["--initial-peers", "/a,/b"],
        ["--network-initial-peers", " /a  /b"],
        ["--network-initial-peers", '["/a", "/b"]'],
        ["--initial-peers", "@{file}"],
    ],
)
def test_peers_may_be_repeated_or_separated_or_json_or_in_a_file(flags: list[str], tmp_path: Path) -> None:
    file = _write(tmp_path, "/a  # the first\n\n/b\n")
    config = load_config(None, [flag.format(file=file) if "{file}" in flag else flag for flag in flags], {})
    assert config.network.initial_peers == ("/a", "/b")


def test_every_list_of_addresses_may_be_given_in_several_flags() -> None:
    for name in ("initial-peers", "host-maddrs", "announce-maddrs"):
        config = load_config(None, [f"--network.{name}", "/a", f"--network.{name}", "/b"], {})
        assert getattr(config.network, name.replace("-", "_")) == ("/a", "/b")


def test_names_of_distqat_are_aliases_everywhere(tmp_path: Path) -> None:
    path = _write(tmp_path, "diloco: {averaging_timeout: 5}\nmodel_pipeline: {forward_timeout: 6}")
    config = load_config(path, ["--diloco-load-state-timeout", "7"], {"SHOAL_PARAM_MIRROR__REFRESH_EVERY": "8"})
    assert config.diloco.averaging_timeout_s == 5
    assert config.model_pipeline.forward_timeout_s == 6
    assert config.diloco.load_state_timeout_s == 7
    assert config.param_mirror.every_s == 8


def test_every_name_is_one_key_only() -> None:
    spellings = [plain(name) for name in (*keys(), *ALIASES)]
    assert len(spellings) == len(set(spellings)) == len(flag_names())
    assert set(ALIASES.values()) <= set(keys())
    assert not {plain(name) for name in REMOVED} & set(flag_names())


def test_overrides_may_be_nested_or_dotted() -> None:
    config = load_config(None, {"diloco": {"inner_steps": 4}, "run.seed": 9}, {})
    assert (config.diloco.inner_steps, config.run.seed) == (4, 9)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("diloco: {inner_stesp: 3}", ["diloco.inner_stesp", "did you mean diloco.inner_steps?", "config.yaml"]),
        ("dilocco: {inner_steps: 3}", ["dilocco", "diloco"]),
        ("inner_steps: 3", ["did you mean diloco.inner_steps?"]),
        ("diloco: {inner_steps: many}", ["diloco.inner_steps = 'many'", "config.yaml", "whole number"]),
        ("diloco: {inner_steps: 0}", ["diloco.inner_steps = 0", "at least 1"]),
        ("diloco: 5", ["diloco = 5", "section"]),
        ("diloco: {inner_steps: 1, inner_steps: 2}", ["inner_steps", "twice"]),
        ("diloco: {averaging_timeout: 1, averaging_timeout_s: 2}", ["averaging_timeout_s", "twice"]),
        ("- a", ["key: value", "list"]),
        ("a: [", ["not valid YAML: while parsing a flow node", " in line 1, column 5"]),
        ("log_dir: 3", ["log_dir = 3", "must be a path"]),
        ("data: {dataset_name: ''}", ["data.dataset_name = ''", "must not be empty"]),
        ("servers: {threads: []}", ["servers.threads = []", "must name at least 1"]),
        ("data: {precision: bf16-true}", ["data.precision", "not supported", "bf16-mixed", "fp16-mixed", "32-true"]),
        ("data: {task_type: node_pred}", ["data.task_type", "not supported yet"]),
        ("data: {full_model_name: x}", ["full_model_name", "does not exist in shoal"]),
        ("diloco: {outer_optim: {type: adam}}", ["diloco.outer_optim.type", "not supported yet"]),
        ("experiment_prefix: my run!", ["experiment_prefix = 'my run!'", "begins with a letter or a digit"]),
        ("device: gpu", ["device = 'gpu'", "cuda:<index>"]),
        ("model: {family: mpl}", ["model.family", "package.module:Class"]),
        ("model: {family: mlp}", ["data.task_type = cv"]),
        ("model_pipeline: {stages: 5}", ["model_pipeline.stages = 5", "at most 4"]),
        ("model: {num_layers: 5000000000}", ["model.num_layers = 5000000000", "must be at most 4096"]),
        ("servers: {num_servers: -1}", ["servers.num_servers = -1", "at least 1"]),
        ("model: {family: resnet18}", ["data.task_type = cv"]),
        ("model: {num_heads: 3}", ["model.num_heads = 3", "multiple"]),
        ("model_pipeline: {microbatches: 65}", ["microbatches = 65", "batch_size_per_step = 64"]),
        ("health: {deadline_s: 0.4}", ["health.deadline_s", "heartbeat_s"]),
        ("health: {deadline_s: 3.0, max_deadline_s: 2.0}", ["health.max_deadline_s", "raise it"]),
        ("network: {initial_peers: localhost}", ["network.initial_peers", "not a multiaddress"]),
        ("network: {initial_peers: '@nowhere'}", ["network.initial_peers", "nowhere"]),
        (f"network: {{initial_peers: '@{sys.executable}'}}", ["network.initial_peers", "cannot read", "utf-8"]),
    ],
)
def test_wrong_files_are_refused_with_key_place_and_advice(text: str, parts: list[str], tmp_path: Path) -> None:
    message = _refused(_write(tmp_path, text))
    for part in parts:
        assert part in message
    assert "pydantic" not in message


_LAUGHS = "\n".join(f"a{n}: &a{n} [{', '.join(10 * [f'*a{n - 1}'])}]" for n in range(1, 9))
_MERGES = "\n".join(f"a{n}: &a{n} {{<<: [{', '.join(10 * [f'*a{n - 1}'])}]}}" for n in range(1, 9))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (f"a0: &a0 [x]\n{_LAUGHS}", "use fewer aliases in"),
        (f"a0: &a0 {{x: 1}}\n{_MERGES}", "use fewer aliases in"),
        ("a: &a [*a]", "contains itself"),
        ("model: " + 500 * "[", "nested too deeply"),
        ("run: {seed: 2024-13-45}", "'2024-13-45' is no timestamp (month must be"),
        ("run: {seed: !!timestamp x}", "is no timestamp"),
        ("run: {seed: !!bool x}", "is no bool"),
        (f"run: {{seed: {5000 * '9'}}}", "is no int"),
    ],
)
def test_a_small_text_cannot_stand_for_a_large_one_and_says_what_is_odd_in_it(
    text: str, part: str, tmp_path: Path
) -> None:
    message = _refused(_write(tmp_path, text))
    assert "config.yaml: not valid YAML" in message
    assert part in message


def test_a_list_whose_only_item_is_wrong_is_not_said_to_be_empty_too(tmp_path: Path) -> None:
    message = _refused(_write(tmp_path, "servers: {threads: [0]}"))
    assert message.splitlines() == [f"servers.threads[0] = 0 ({tmp_path / 'config.yaml'}): must be at least 1"]


def test_what_is_merged_may_be_said_anew_whatever_the_order_in_which_it_is_read(tmp_path: Path) -> None:
    text = "one: &one {k: 1}\na: {b: {c: &two {<<: *one, k: 2}}}\nd: {<<: *two}"
    assert read_file(_write(tmp_path, text))["d"] == {"k": 2}


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--diloco.inner-step", "3"], ["--diloco.inner-step;", "did you mean --diloco.inner-steps?"]),
        (["--wandb", "maybe", "--run.seed=x"], ["--wandb takes true or false, not 'maybe'", "run.seed"]),
        (["--config-pth", "x"], ["did you mean --config-path?"]),
        (
            ["--model.extra.vocab-size", "3"],
            ["model.extra is a mapping: give its values as --model.extra '{vocab_size: "],
        ),
        (["--config-path=x"], ["--config-path is a flag of other commands"]),
        (["--diloco.inner-steps"], ["--diloco.inner-steps needs a value"]),
        (["--diloco.inner-steps", "--no-wandb"], ["--diloco.inner-steps needs a value"]),
        (["stray"], ["'stray'"]),
        (["--no-wandb=1"], ["takes no value"]),
        (["--run.seed", "x"], ["run.seed = 'x'", "(--run.seed)", "whole number"]),
        (["--max-expert-index", "3"], ["does not exist in shoal"]),
        (["--quant", "5"], ["quant = 5", "section"]),
        (["--model.extra", "{"], ["model.extra", "YAML or JSON"]),
    ],
)
def test_wrong_flags_are_refused_with_advice(flags: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, flags, {}, other_flags=["config-path"])
    for part in parts:
        assert part in str(caught.value)


def test_unknown_variables_with_the_prefix_are_refused() -> None:
    assert "--model.extra '{width: VALUE}'" in _refused(env={"SHOAL_MODEL__EXTRA__WIDTH": "8"})
    assert "did you mean SHOAL_DILOCO__INNER_STEPS?" in _refused(env={"SHOAL_DILOCO_INNER_STEPS": "1"})
    assert "SHOAL_NONSENSE" in _refused(env={"SHOAL_NONSENSE": "1"})
    assert "environment variable SHOAL_RUN__SEED" in _refused(env={"SHOAL_RUN__SEED": "x"})
    assert load_config(None, None, {"SHOAL_REQUIRE_ALL": "1", "SHOAL_PORTABLE": "1"}) == Config()


def test_a_missing_file_names_those_that_exist(tmp_path: Path) -> None:
    _write(tmp_path, "")
    message = _refused(tmp_path / "other.yaml")
    assert "there is no configuration file" in message
    assert "holds config.yaml" in message


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("sandbx", "configs/sandbox.yaml"),
        ("sandbox", "configs/sandbox.yaml"),
        ("resnet-18.yaml", "configs/resnet18.yaml"),
        ("configg.yml", "{folder}/config.yaml"),
    ],
)
def test_a_missing_file_with_a_name_like_another_is_told_which(tmp_path: Path, given: str, meant: str) -> None:
    _write(tmp_path, "")
    told = f"there is no configuration file {tmp_path / given}; did you mean {meant.format(folder=tmp_path)}?"
    assert _refused(tmp_path / given) == told


def test_what_is_wrong_in_file_variables_and_flags_is_told_at_once(tmp_path: Path) -> None:
    file = _write(tmp_path, "diloco: {inner_stesp: 3, outer_steps: 0}\ndata: 5\nquant: {rules: [{pattern: x}]}")
    flags = ["--rnu.seed", "3", "--diloco.inner-steps", "--model.extra", "{", "--no-wandb=1", "--run.seed=-1"]
    lines = _refused(file, flags, env={"SHOAL_NONSENSE": "1"}).splitlines()
    told = (
        "inner_stesp",
        "data = 5",
        "quant.rules.pattern",
        "SHOAL_NONSENSE",
        "--rnu.seed",
        "--diloco.inner-steps needs a value",
        "model.extra needs YAML",
        "--no-wandb takes no value",
        "run.seed = '-1'",
        "diloco.outer_steps = 0",
    )
    assert sorted(part for part in told for line in lines if part in line) == sorted(told)
    assert len(lines) == len(told)


def test_a_missing_file_does_not_hide_a_wrong_flag_nor_blame_what_the_file_would_have_said(tmp_path: Path) -> None:
    flags = ["--run.seed=x", "--model.num-heads=3"]
    lines = _refused(tmp_path / "nowhere.yaml", flags).splitlines()
    assert len(lines) == 2
    assert "nowhere.yaml" in lines[0]
    assert "run.seed = 'x'" in lines[1]


def test_all_keys_that_contradict_each_other_are_told_at_once() -> None:
    together = {"model_pipeline.stages": 9, "model.num_heads": 3, "health.deadline_s": 0.4}
    assert len(_refused(None, together).splitlines()) == 3
    for_a_run = {"model_pipeline": {"stages": 2, "microbatches": 65, "cut": [1, 1]}}
    assert len(_refused(None, for_a_run).splitlines()) == 2
    assert len(_refused(None, {**together, "model_pipeline.microbatches": 65}).splitlines()) == 4


def test_secrets_reach_own_processes_but_neither_dumps_nor_messages() -> None:
    config = load_config(None, None, {"HF_TOKEN": "hf_secret"})
    assert config.data.hf_token is not None
    assert config.data.hf_token.get_secret_value() == "hf_secret"
    assert "hf_secret" not in dump_config(config) + repr(config)
    assert config_from_json(config_to_json(config)) == config
    assert "[1, 2]" not in _refused(None, {"data.hf_token": [1, 2]})


@pytest.mark.parametrize("flags", [["--data.hf-token=hf_secret"], ["--data_hf_token", "hf_secret", "--no-wandb"]])
def test_a_secret_on_a_command_line_is_refused_and_not_repeated(flags: list[str]) -> None:
    said = _refused(None, flags)
    assert "can be read by every user of this host" in said
    assert "set the environment variable HF_TOKEN, or data.hf_token in a file" in said
    assert len(said.splitlines()) == 1
    assert "hf_secret" not in said


def test_what_is_published_has_no_arguments_of_the_users_own_programs() -> None:
    data = {"dataset_name": "sets:Mine", "arguments": {"token": "in_arguments"}}
    config = Config.model_validate({"data": data, "notify": {"command": ["curl", "https://in.notify/"]}})
    published = str(published_values(config))
    assert "in_arguments" not in published
    assert "in.notify" not in published
    assert "sets:Mine" in published


def test_a_dumped_configuration_loads_as_an_equal_one(tmp_path: Path) -> None:
    flags = ["--quant", "{rules: [{class_names: [Conv2d], weight_quant: off}]}", "--initial-peers", "/a,/b"]
    config = load_config(None, [*flags, "--model.extra", '{"a": [1, "x"]}', "--log-dir", "/tmp/x"], {})
    assert load_config(_write(tmp_path, dump_config(config)), env={}) == config


def test_why_values_from_elsewhere_are_no_configuration_is_said_by_key_and_without_the_validator() -> None:
    values = {"model": {"num_layers": "few", "nmu": 1}, "diloco": {"inner_steps": 0}}
    with pytest.raises(ValidationError) as invalid:
        Config.model_validate(values)
    said = "model.num_layers: must be a whole number; model.nmu: is no key; diloco.inner_steps: must be at least 1"
    assert why_invalid(invalid.value) == said
