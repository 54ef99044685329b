"""`shoal invite` and `shoal join`, up to where servers start."""

from __future__ import annotations

import io
import stat
from pathlib import Path

import pytest
from tests.set_clock import SetClock

from shoal.cli import main
from shoal.cli.inviting import JOINED_FILE, Asked, invitation_text, joining_flags, print_invitation
from shoal.clock import SystemClock
from shoal.config import Config, load_config
from shoal.control.invitation import read
from shoal.errors import ConfigError
from shoal.identity import create_swarm_key, load_swarm_key

PEER = "/ip4/203.0.113.7/tcp/50000/p2p/12D3KooWFrCUuswLZqfWycRGiHa1uWQcgJac2rbagi2VKoe6XbJ4"
CLOCK = SetClock(1000.0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host where nothing is known of any swarm."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def _config(path: str, *flags: str) -> Config:
    return load_config(None, [f"--swarm-key-file={path}", *flags], {})


@pytest.fixture
def text(home: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """An invitation of another host, with that host's key in `theirs.key`."""
    create_swarm_key(home / "theirs.key")
    config = _config("~/theirs.key", f"--initial-peers={PEER}", "--experiment-prefix=herd")
    assert print_invitation(config, {"experiment_prefix": "flag"}, "1h", CLOCK) == 0
    printed = capsys.readouterr()
    assert "a member for good" in printed.err
    return printed.out.strip()


def _take(
    monkeypatch: pytest.MonkeyPatch, text: str, path: str = "~/own.key", origins: dict[str, str] | None = None
) -> tuple[list[str], list[str]]:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return joining_flags(_config(path), origins or {}, Asked(), CLOCK)


def test_it_is_taken_once_and_remembered(home: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--experiment-prefix", "herd", "--swarm-key-file", str(home / "own.key")]
    assert _take(monkeypatch, text) == (flags, [PEER])
    assert load_swarm_key(home / "own.key") == load_swarm_key(home / "theirs.key")
    assert stat.S_IMODE((home / "own.key").stat().st_mode) == 0o600
    assert text not in JOINED_FILE.expanduser().read_text()
    assert _take(monkeypatch, "") == (flags, [PEER]), "nothing is asked"


def test_it_is_as_good_as_its_clock_says(text: str) -> None:
    assert read(text, CLOCK.unix_s() + 3599.0).experiment_prefix == "herd"
    with pytest.raises(ConfigError, match="has expired"):
        read(text, CLOCK.unix_s() + 3601.0)


def test_the_key_of_another_swarm_is_left_alone(home: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = create_swarm_key(home / "own.key")
    with pytest.raises(ConfigError, match=r"own\.key holds the key of another swarm, and is left alone"):
        _take(monkeypatch, text)
    assert load_swarm_key(home / "own.key") == own
    assert not JOINED_FILE.expanduser().exists()


def test_a_swarm_whose_key_is_gone_is_asked_for_again(home: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _take(monkeypatch, text)
    (home / "own.key").unlink()
    with pytest.raises(ConfigError, match="is no invitation"):
        _take(monkeypatch, "")


def test_on_a_command_line_it_is_refused_and_not_repeated(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([text], ["--experiment-prefix", text], [f"--invitation={text}"], ["--at", text]):
        assert main(["join", *command]) == 2
        printed = capsys.readouterr()
        assert text not in printed.out + printed.err


@pytest.mark.parametrize(
    "words", [["AAAA"], ["7-482-913"], ["--servers.threads", "1", "AAAA"], ["--servers.threads=1", "AAAA"]]
)
def test_a_code_on_a_command_line_is_refused_with_what_a_code_is(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["join", "--code", *words]) == 2
    said = capsys.readouterr().err
    assert f"--code {words[-1]}: a code is asked for" in said
    assert "looks like 7-482-913, and `shoal invite --code` prints it" in said


def test_who_names_another_key_means_another_swarm(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _take(monkeypatch, text)
    with pytest.raises(ConfigError, match="is no invitation"):
        _take(monkeypatch, "", "~/other.key", {"network.swarm_key_file": "flag"})


def test_who_names_another_run_is_asked_nothing_where_the_key_is_known(
    home: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A join that fails says under which prefix the swarm there runs, and to join it with that one.
    _take(monkeypatch, text)
    config = _config("~/own.key", "--experiment-prefix=flock")
    flags = ["--experiment-prefix", "flock", "--swarm-key-file", str(home / "own.key")]
    assert joining_flags(config, {"experiment_prefix": "flag"}, Asked(), CLOCK) == (flags, [PEER])
    with pytest.raises(ConfigError, match="is no invitation"):
        joining_flags(config, {"experiment_prefix": "flag"}, Asked(again=True), CLOCK)


def test_it_is_taken_from_standard_input_where_a_file_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = invitation_text(_config("~/own.key"), b"k" * 32, [PEER], SystemClock())
    for number, given in enumerate((["--invitation", "-"], ["--invitation=-"])):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        key = home / f"{number}.key"
        assert main(["join", *given, "--remember-only", f"--swarm-key-file={key}"]) == 0
        assert key.exists()


@pytest.mark.parametrize("closed", [True, False])
def test_where_nobody_says_anything_there_is_no_invitation(
    closed: bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None if closed else io.StringIO())
    for asked in (Asked(), Asked(Path("-"))):
        with pytest.raises(ConfigError, match="is no invitation"):
            joining_flags(_config("~/own.key"), {}, asked, CLOCK)
    with pytest.raises(ConfigError, match="a code looks like"):
        joining_flags(_config("~/own.key"), {}, Asked(by_code=True), CLOCK)


@pytest.mark.parametrize("at", ["box", "box:", ":1", "box:0", "box:70000", "box:\u00b2"])
def test_an_address_without_a_port_is_refused(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("7-482-913\n"))
    with pytest.raises(ConfigError, match="give an address and a port"):
        joining_flags(_config("~/own.key"), {}, Asked(at=at), CLOCK)


def test_a_host_that_looks_for_nothing_on_its_network_is_told_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("7-482-913\n"))
    with pytest.raises(ConfigError, match=r"network\.lan is false"):
        joining_flags(_config("~/own.key"), {}, Asked(by_code=True, on_lan=False), CLOCK)


def test_a_code_has_its_own_time(home: Path) -> None:
    with pytest.raises(ConfigError, match="--for and --code"):
        print_invitation(_config("~/theirs.key"), {}, "1m", CLOCK, by_code=True)
