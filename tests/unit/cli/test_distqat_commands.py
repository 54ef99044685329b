"""Every command of DistQat's README, with this project's file names, means something here or says why it cannot."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from shoal.cli import main
from shoal.config import Config, load_config
from shoal.config.load import load_with_origins
from shoal.config.shared import adopt_shared, shared_configuration

ROOT = Path(__file__).parents[3]
PEERS = "/ip4/127.0.0.1/tcp/50000/p2p/12D3KooWC1W43CCBCGosZwVWRPF4MTcvTk3tDstTqDMDQMpn8ytY"
Capture = pytest.CaptureFixture[str]

WORKS = [
    ("run_local.py", {}),
    ("run_local.py --config-path configs/resnet18.yaml --device cpu", {"device": "cpu"}),
    ("run_local.py --config-path configs/resnet18.yaml --wandb-project None", {"wandb_project": None}),
    ("run_local.py --config-path configs/resnet18_split.yaml --num-servers 2", {"experiment_prefix": "resnet18_split"}),
    ("run_local.py --config-path configs/resnet18_lsq.yaml --disable-quant", {"quant": None}),
    ("run_local.py --checkpoint-dir checkpoints", {"checkpoint_dir": "checkpoints"}),
    ("start_trainer_client.py", {"experiment_prefix": "sandbox"}),
    ("start_trainer_client.py --public-ip 203.0.113.7", {}),
    (f"start_servers.py --initial-peers {PEERS}", {"experiment_prefix": "sandbox"}),
    (
        f"start_servers.py --initial-peers {PEERS} --config-path configs/resnet50.yaml",
        {"experiment_prefix": "resnet50"},
    ),
    (
        f"start_servers.py --initial-peers {PEERS} --config-path configs/resnet50.yaml"
        " --diloco-batch-size-per-step 1 --device cpu",
        {"device": "cpu"},
    ),
    (f"start_servers.py --public-ip 203.0.113.7 --num-servers 2 --initial-peers {PEERS}", {}),
    (f"start_servers.py --num-servers 2 --network-initial-peers {PEERS} --diloco-batch-size-per-step 32", {}),
    (f"start_servers.py --disable-quant --initial-peers {PEERS}", {"quant": None}),
]

REFUSED = [
    ("run_local.py --data-precision 16-true", "use '32-true', 'bf16-mixed' or 'fp16-mixed'"),
    ("run_local.py --data-task-type node_pred", "use 'llm', 'cv', 'image_gen' or 'speech'"),
    ("run_local.py --data-shuffle-buffer-size 100", "all samples of a pass are shuffled"),
    ("run_local.py --max-expert-index 128", "the number of stages is not limited"),
    ("run_local.py --network-server-base-hostport 50500", "shoal needs no fixed ports"),
    ("run_local.py --diloco-verbose", "Remove it"),
    ("run_local.py --config-path configs/biggan.yaml", "there is no configuration file configs/biggan.yaml"),
]


def arguments(line: str) -> list[str]:
    script, *flags = shlex.split(line)
    assert (ROOT / script).is_file()
    return [script.removesuffix(".py").replace("_", "-"), *flags]


@pytest.fixture(autouse=True)
def checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("INITIAL_PEERS", raising=False)


def test_flags_of_its_param_mirror_are_those_of_the_mirror(capsys: Capture) -> None:
    line = "run_local.py --no-param-mirror-enable --param-mirror-refresh-every 60"
    assert main([*arguments(line), "--print-config"]) == 0
    mirror = yaml.safe_load(capsys.readouterr().out)["param_mirror"]
    assert (mirror["enable"], mirror["every_s"]) == (False, 60)


@pytest.mark.parametrize(("line", "expected"), WORKS)
def test_a_command_of_its_readme_is_understood(line: str, expected: dict[str, object], capsys: Capture) -> None:
    assert main([*arguments(line), "--print-config"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert {name: resolved[name] for name in expected} == expected
    if PEERS in line:
        assert resolved["network"]["initial_peers"] == [PEERS]
    if "--public-ip" in line:
        assert resolved["network"]["public_ip"] == "203.0.113.7"


@pytest.mark.parametrize(("line", "part"), REFUSED)
def test_what_is_not_there_says_so(line: str, part: str, capsys: Capture) -> None:
    assert main([*arguments(line), "--print-config"]) == 2
    assert part in capsys.readouterr().err


def test_peers_come_from_the_exported_variable(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("INITIAL_PEERS", PEERS)
    assert main(["start-servers", "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["network"]["initial_peers"] == [PEERS]


def test_the_baseline_command_trains_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Config] = []
    monkeypatch.setattr("shoal.cli.baseline.run_baseline_locally", lambda config: trained.append(config) or 0)
    line = (
        f'--run-locally --trainer-id "-1" --config-path "configs/resnet18.yaml" --network-initial-peers \'["{PEERS}"]\''
    )
    assert main(["trainer", *shlex.split(line)]) == 0
    assert trained[0].experiment_prefix == "resnet18"


def test_a_host_with_a_cpu_takes_its_samples_one_by_one() -> None:
    run = load_config(ROOT / "configs/resnet50.yaml", (), {})
    flags = ["--diloco-batch-size-per-step", "1", "--device", "cpu", "--initial-peers", PEERS]
    host, origins = load_with_origins(ROOT / "configs/resnet50.yaml", flags, {})
    joined = adopt_shared(host, origins, shared_configuration(run))
    assert (joined.servers.max_microbatch_samples, joined.device) == (1, "cpu")
    assert shared_configuration(joined) == shared_configuration(run)


def test_a_script_gets_the_resolved_configuration() -> None:
    assert load_config(ROOT / "configs/resnet18.yaml", (), {}).model_dump()["diloco"]["batch_size_per_step"] == 64
