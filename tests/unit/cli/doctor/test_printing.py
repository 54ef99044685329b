"""What `shoal doctor` prints: groups on a terminal, lines on a pipe, one JSON object; and after a failed join."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.cli import main
from shoal.cli.doctor import after_join, printing
from shoal.cli.doctor.checking import Check, diagnosis
from shoal.cli.doctor.diagnosis import CheckResult, Condition, Diagnosis, failed, ok, skipped, warning
from shoal.cli.doctor.examine import CHECKS
from shoal.cli.doctor.facts import nothing_seen
from shoal.config import Config, load_config
from shoal.errors import BootstrapError, ConfigError

SCHEMA = Path(__file__).parents[4] / "docs" / "doctor.schema.json"
PEERS = ("/ip4/127.0.0.1/tcp/1",)


class Terminal(StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        return True


def results(*more: CheckResult) -> tuple[CheckResult, ...]:
    return (
        CheckResult("key.mode", "nobody else can read it", Condition.FAILED, "its mode is 644", "chmod 600 k"),
        CheckResult("swarm.peers", "a peer", Condition.WARNING, "1 of 2\nh: refused", "start it\nor not"),
        *more,
    )


def found_of(*checks: CheckResult) -> Diagnosis:
    return Diagnosis(experiment_prefix="p", verdict=Condition.FAILED, checks=checks)


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Callable[[Diagnosis], list[tuple[Config, bool]]]:
    """Let a diagnosis stand for an examination; returns what was examined."""

    def stand_for(found: Diagnosis) -> list[tuple[Config, bool]]:
        asked: list[tuple[Config, bool]] = []

        async def examine(config: Config, _origins: Mapping[str, str], *, are_remembered: bool) -> Diagnosis:
            asked.append((config, are_remembered))
            return found

        monkeypatch.setattr(printing, "examine", examine)
        return asked

    return stand_for


def test_the_worst_that_is_said_is_the_verdict_and_findings_come_worst_first() -> None:
    said = {"key.file": warning("w", "do"), "key.mode": failed("f", "do"), "key.form": ok("o")}
    checks = [Check(name, "a title", lambda _, name=name: said[name]) for name in said]
    for left_out, verdict in (("", "failed"), ("key.mode", "warning"), ("key.file", "ok")):
        if left_out:
            said[left_out] = skipped("not now")
        found = diagnosis("p", checks, nothing_seen(1.0))
        assert found.verdict == verdict
        assert [each.verdict for each in found.findings] == sorted(each.verdict for each in found.findings)


def test_the_names_of_checks_are_unique_and_say_their_groups_in_a_row() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names) >= 18
    groups = [name.partition(".")[0] for name in names]
    assert groups == sorted(groups, key=["key", "host", "swarm"].index)


def test_on_a_pipe_each_check_is_a_line_with_what_to_do_under_it(capsys: pytest.CaptureFixture[str]) -> None:
    stream = StringIO()
    printing._print(results(), stream)
    assert [" ".join(line.split()) for line in stream.getvalue().splitlines()] == [
        "failed key.mode its mode is 644",
        "do chmod 600 k",
        "warning swarm.peers 1 of 2; h: refused",
        "do start it",
        "do or not",
    ]


def test_on_a_terminal_checks_stand_in_groups_and_fit_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    printing._print(results(CheckResult("swarm.run", "a run", Condition.OK, "run r\x1b[2J " * 9, "")), stream)
    lines = stream.getvalue().splitlines()
    plain = [line.replace("\x1b[1m", "").replace("\x1b[2m", "").replace("\x1b[0m", "") for line in lines]
    assert [line.strip() for line in plain if not line.startswith(" ")] == ["key", "swarm"]
    assert max(map(len, plain)) <= 60
    assert "\x1b[2J" not in stream.getvalue(), "what others say moves no cursor"


def test_the_form_of_the_json_object_is_the_one_that_is_written_down(
    examined: Callable[[Diagnosis], object], capsys: pytest.CaptureFixture[str]
) -> None:
    examined(found_of(*results()))
    assert main(["doctor", "--json", f"--initial-peers={PEERS[0]}"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["checks"][0] == {
        "name": "key.mode",
        "title": "nobody else can read it",
        "verdict": "failed",
        "evidence": "its mode is 644",
        "remedy": "chmod 600 k",
    }
    assert (said["schema"], said["verdict"], said["experiment_prefix"]) == (1, "failed", "p")
    schema = json.dumps(msgspec.json.schema(Diagnosis), indent=2) + "\n"
    assert SCHEMA.read_text() == schema, f"the form has changed; only add keys, then write it anew:\n{schema}"


def test_only_a_failure_ends_with_exit_code_1(
    examined: Callable[[Diagnosis], object], capsys: pytest.CaptureFixture[str]
) -> None:
    for verdict, code in ((Condition.FAILED, 1), (Condition.WARNING, 0), (Condition.OK, 0)):
        examined(Diagnosis(experiment_prefix="p", verdict=verdict, checks=results()))
        assert main(["doctor", f"--initial-peers={PEERS[0]}"]) == code
        assert capsys.readouterr().out.splitlines()[-1] == "2 checks: 1 warning, 1 failed"


def test_of_one_check_or_of_a_group_is_told_alone_and_it_alone_decides(
    examined: Callable[[Diagnosis], object], capsys: pytest.CaptureFixture[str]
) -> None:
    lan = CheckResult("host.lan", "a run is found", Condition.OK, "run herd is announced", "")
    examined(found_of(*results(), lan))
    for said in ("lan", "host.lan", "host"):
        assert main(["doctor", said, f"--initial-peers={PEERS[0]}"]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "1 check: 1 ok"
    assert main(["doctor", "key", "--json"]) == 1
    assert [check["name"] for check in json.loads(capsys.readouterr().out)["checks"]] == ["key.mode"]
    assert main(["doctor", "lam"]) == 2
    assert "lam: no such check; did you mean lan?" in capsys.readouterr().err


def test_a_check_of_a_configuration_that_cannot_be_read_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "lan", "--public-ip=x!"]) == 2
    assert "network.public_ip" in capsys.readouterr().err


def test_a_configuration_that_cannot_be_read_is_a_finding_and_nothing_else_is_judged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--json", "--public-ip=x!"]) == 1
    found = msgspec.json.decode(capsys.readouterr().out, type=Diagnosis)
    [finding] = found.findings
    assert finding.name == "host.configuration"
    assert "network.public_ip" in finding.evidence
    assert "neither an IP address nor the name of a host" in finding.evidence
    assert {each.evidence for each in found.of(Condition.SKIPPED)} == {"the configuration cannot be read"}
    assert len(found.of(Condition.SKIPPED)) == len(CHECKS) - 1


def test_without_peers_those_of_the_newest_run_are_remembered(
    examined: Callable[[Diagnosis], list[tuple[Config, bool]]], tmp_path: Path
) -> None:
    asked = examined(found_of())
    flags = [f"--log-dir={tmp_path}"]
    main(["doctor", *flags])
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "initial_peers.txt").write_text(f"{PEERS[0]}\n")
    main(["doctor", *flags])
    main(["doctor", *flags, "--initial-peers=/ip4/127.0.0.2/tcp/1"])
    assert [(config.network.initial_peers, are_remembered) for config, are_remembered in asked] == [
        ((), True),
        (PEERS, True),
        (("/ip4/127.0.0.2/tcp/1",), False),
    ]


def test_a_join_that_fails_says_why_first_and_then_what_the_doctor_finds(
    examined: Callable[[Diagnosis], list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(None, {"network": {"initial_peers": PEERS}}, {})

    def join() -> int:
        raise BootstrapError("the swarm cannot be joined")

    asked = examined(found_of(*results(CheckResult("swarm.run", "a run", Condition.OK, "all is well", ""))))
    assert after_join.explaining(join, lambda: (config, {})) == 2
    assert [each for each, _ in asked] == [config]
    said = capsys.readouterr().err
    places = [said.index(part) for part in ("error: the swarm cannot be joined", "shoal doctor finds", "chmod 600 k")]
    assert places == sorted(places)
    assert "all is well" not in said
    examined(found_of())
    after_join.explaining(join, lambda: (config, {}))
    assert "shoal doctor finds nothing else" in capsys.readouterr().err


def test_what_is_no_failed_join_is_left_alone(examined: Callable[[Diagnosis], list[Any]]) -> None:
    asked = examined(found_of())

    def refuse() -> int:
        raise ConfigError("no key")

    assert after_join.explaining(lambda: 7, lambda: (Config(), {})) == 7
    with pytest.raises(ConfigError):
        after_join.explaining(refuse, lambda: (Config(), {}))
    assert asked == []


def test_an_examination_that_is_interrupted_hides_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def join() -> int:
        raise BootstrapError("the swarm cannot be joined")

    def interrupted(_load: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(printing, "print_findings", interrupted)
    with pytest.raises(KeyboardInterrupt):
        after_join.explaining(join, lambda: (Config(), {}))
    assert "error: the swarm cannot be joined" in capsys.readouterr().err
