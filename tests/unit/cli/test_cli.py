"""Commands, what they print, and their exit codes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shoal.cli import main
from shoal.cli.exits import guarded
from shoal.errors import BootstrapError, ConfigError, ConnectionLost, InvariantViolation, NoPipeline, ShoalError

Capture = pytest.CaptureFixture[str]
PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWC1W43CCBCGosZwVWRPF4MTcvTk3tDstTqDMDQMpn8ytY"


def _raising(error: BaseException):
    def call() -> int:
        raise error

    return call


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (BootstrapError("x"), 2),
        (NoPipeline("x"), 1),
        (ConnectionLost("x"), 1),
        (ShoalError("x"), 1),
        (KeyboardInterrupt(), 130),
        (OSError(24, "Too many open files"), 1),
        (BaseExceptionGroup("of a task group", [ExceptionGroup("x", [OSError(24, "Too many open files")])]), 1),
    ],
)
def test_each_error_has_its_exit_code(error: BaseException, code: int, capsys: Capture) -> None:
    assert guarded(_raising(error)) == code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"), [(ConnectionLost("it is gone"), "it is gone"), (ConnectionLost(), "ConnectionLost")]
)
def test_an_error_is_its_sentence_and_its_name_where_it_has_none(error: ShoalError, said: str, capsys: Capture) -> None:
    assert guarded(_raising(error)) == 1
    assert capsys.readouterr().err == f"shoal: error: {said}\n"


@pytest.mark.parametrize("is_grouped", [False, True])
def test_what_a_disk_says_is_a_sentence_with_its_file(is_grouped: bool, capsys: Capture) -> None:
    full = OSError(28, "No space left on device", "/logs/x")
    assert guarded(_raising(ExceptionGroup("of a task group", [full]) if is_grouped else full)) == 1
    assert capsys.readouterr().err == "shoal: error: /logs/x: No space left on device; free space there\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_standard_output_cannot_write_is_a_question_mark(encoding: str) -> None:
    code = "from shoal.cli.output import lenient_stdout; lenient_stdout(); print('more\\u2026 \\udcff')"
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=False)
    assert (done.stdout, done.stderr) == (b"more? ?\n", b"")


def test_a_user_without_a_home_is_told_to_name_one(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert guarded(lambda: 0 if Path("~/.cache").expanduser() else 1) == 2
    assert capsys.readouterr().err == ("shoal: error: this user has no home directory: set HOME to a folder of yours\n")


def test_bugs_keep_their_traceback() -> None:
    with pytest.raises(InvariantViolation):
        guarded(_raising(InvariantViolation("x")))
    with pytest.raises(ZeroDivisionError):
        guarded(_raising(ZeroDivisionError()))


def test_a_call_that_returns_nothing_is_done() -> None:
    assert guarded(lambda: None) == 0
    assert guarded(lambda: 5) == 5


def test_config_show_prints_what_loads_again(capsys: Capture, tmp_path: Path) -> None:
    assert main(["config", "show", "--diloco.inner-steps", "9"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["diloco"]["inner_steps"] == 9


def test_print_config_starts_nothing(capsys: Capture) -> None:
    assert main(["run-local", "--print-config", "--num-servers", "6", "--wandb-run-id", "abc"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["servers"]["num_servers"] == 6
    assert shown["wandb_run_id"] == "abc"
    assert shown["experiment_prefix"] == "sandbox"


def test_without_a_command_there_is_the_list_of_commands(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "argv", ["shoal"])
    assert main() == main([]) == 0
    assert capsys.readouterr().out.count("run-local") >= 2


def test_every_key_is_listed_as_a_flag(capsys: Capture) -> None:
    assert main(["config", "keys"]) == 0
    assert "--diloco.inner-optim.adam-lr [0.0004]  Peak learning rate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["run-locl"], 'Did you mean "run-local"?'),
        (["run-local", "--num-servers", "-3"], "servers.num_servers = '-3' (--num-servers): must be at least 1"),
        (["run-local", "--num-servers", "two"], "must be a whole number"),
        (["run-local", "--num-servers", "1"], "servers.num_servers = 1 is too few for model_pipeline.stages = 2"),
        (["run-local", "--basline"], "did you mean --baseline?"),
        (["status", "--wach"], "did you mean --watch?"),
        (["status", "sandbox", "--intervall", "2"], "did you mean --interval?"),
        (["start-trainer-client", "--invit"], "did you mean --invite?"),
        (["run-local", "--watch"], "--watch is a flag of other commands, and means nothing to this one; remove it"),
        (["run-local", "--zzzzzz"], "--help lists the command's flags, `shoal config keys` those of all keys"),
        (["run-local", "--config-path"], "shoal run-local: --config-path needs a value"),
        (["run-local", "--num-serevrs", "2"], "did you mean --num-servers?"),
        (["evaluate"], "shoal evaluate: say MODEL, see `shoal evaluate --help`"),
        (["hosts", "logs"], "shoal hosts logs: say NAME"),
        (["export", "logs/sandbox"], "shoal export: --to needs a value"),
        (["run-local", "--config-path", "nowhere.yaml"], "there is no configuration file nowhere.yaml"),
        (["trainer"], "--run-locally"),
        (["trainer", "--run-locally", "--trainer-id", "3"], "--trainer-id 3"),
        (["trainer", "--run-locally", "--trainer-id", "x"], "--trainer-id"),
        (["config", "show", "--model-pipeline.stages", "99"], "at most 4 stages"),
    ],
)
def test_wrong_arguments_are_one_message_and_exit_code_2(arguments: list[str], part: str, capsys: Capture) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert part in captured.err
    assert captured.err.startswith("shoal: error: ")
    assert not captured.out


@pytest.mark.usual("--help-", "config keys-1")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["--help", "run-local --help", "--version", "config keys", "key fingerprint"])
def test_a_full_disk_under_standard_output_is_one_line_and_exit_code_1(
    command: str, unbuffered: str, tmp_path: Path
) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    key_path = tmp_path / "swarm.key"
    key_path.write_bytes(bytes(32))
    key_path.chmod(0o600)
    options = [f"--swarm-key-file={key_path}"] if command.startswith("key") else []
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "shoal", *command.split(), *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "shoal: error: cannot write to standard output: No space left on device\n"


def test_another_error_of_the_system_keeps_its_traceback(capsys: Capture) -> None:
    with pytest.raises(OSError, match="no such device"):
        guarded(_raising(OSError(19, "no such device")))


@pytest.mark.parametrize(
    ("command", "goes_on_with"),
    [
        ("run-local", "--resume"),
        ("start-trainer-client", "--resume"),
        ("start-trainer-client", f"--initial-peers={PEER}"),
    ],
)
def test_a_run_that_goes_on_has_no_plain_loop_beside_it(
    command: str, goes_on_with: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.early.early_start", contextlib.nullcontext)
    assert main([command, "--baseline", goes_on_with]) == 2
    assert "--baseline: no run that goes on has a plain loop" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_said_before_a_client_with_a_plain_loop_starts(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.early.early_start", contextlib.nullcontext)
    assert main(["start-trainer-client", "--baseline", "--device=cuda:99"]) == 2
    assert "device = cuda:99" in capsys.readouterr().err


def test_data_that_is_not_there_is_said_before_a_client_makes_a_key_or_a_folder(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.early.early_start", contextlib.nullcontext)
    flags = [f"--swarm-key-file={tmp_path}/key", f"--log-dir={tmp_path}/logs"]
    assert main(["start-trainer-client", f"--data.dataset-name={tmp_path}/nowhere", *flags]) == 2
    assert f"{tmp_path}/nowhere: there is no such folder or file here" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
