"""Units of a host: started once, replaced only if that is wanted, ended as Ctrl-C does, and known for what they are."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import anyio
import msgspec
import pytest

from shoal.cli.remote import unit, unit_starts
from shoal.cli.remote.operate import told
from shoal.cli.remote.own_wheel import own_wheel
from shoal.cli.remote.unit_messages import AwaitPeers, LookAtUnits, Request, StartUnit, StopUnits, Unit, Units
from shoal.errors import ConfigError
from shoal.runtime.process_info import with_environment

_SAYS = "import sys, time; print('hello', *sys.argv[1:], flush=True); time.sleep(600)"
_STUBBORN = (
    "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
)


@pytest.fixture
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    _ask(StopUnits((), 0.5))
    # On a host they are nobody's children by then: who has started them is gone.
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    for process in unit_starts._started:
        process.poll()
    unit_starts._started.clear()


def _ask(request: Request) -> Units:
    return anyio.run(unit.answer, request)


def _start(program: str = _SAYS, *arguments: str, replaces: bool = False, files: dict[str, str] | None = None) -> Units:
    one = Unit("herd-servers", (sys.executable, "-c", program, *arguments), files or {})
    return _ask(StartUnit(one, replaces, by_systemd=False))


def _said() -> Units:
    """Return how it is, once it has said something."""
    while True:
        found = _ask(LookAtUnits(("herd-servers",)))
        if found.units[0].said:
            return found


@pytest.mark.usefixtures("_home")
def test_the_same_unit_is_started_once_and_another_only_if_it_may_replace_it() -> None:
    first = _start()
    assert first.changed == "started"
    pid = first.units[0].pid
    again = _start()
    assert (again.changed, again.differs, again.units[0].pid) == ("", False, pid)
    other = _start(_SAYS, "again")
    assert (other.changed, other.differs, other.units[0].pid) == ("", True, pid)
    replaced = _start(_SAYS, "again", replaces=True)
    assert (replaced.changed, replaced.differs) == ("started anew", False)
    assert replaced.units[0].pid != pid


@pytest.mark.usefixtures("_home")
def test_a_unit_of_a_host_with_the_same_home_folder_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("box1", "box2"):  # on a disk of its own it has got another name
        monkeypatch.setattr(platform, "node", lambda name=name: name)
        assert _start("raise SystemExit(7)").changed == "started"
        while _ask(LookAtUnits()).units[0].is_running:  # nor is one that runs elsewhere a process of this host
            pass
    monkeypatch.setattr(platform, "node", lambda: "box3")
    monkeypatch.setattr(unit, "always_answers", lambda _: False)
    with pytest.raises(ConfigError, match=r"herd-servers is that of box2, which has the same home folder"):
        _start("raise SystemExit(7)")


@pytest.mark.usefixtures("either_way", "_home")
def test_its_end_and_its_exit_code_are_known() -> None:
    _start("raise SystemExit(7)")
    while (found := _ask(LookAtUnits())).units[0].is_running:
        pass
    assert [(each.name, each.code) for each in found.units] == [("herd-servers", 7)]
    assert _start("raise SystemExit(7)").changed == "started", "one that has ended is started again"


@pytest.mark.usefixtures("either_way", "_home")
def test_it_is_interrupted_also_where_who_has_started_it_ignores_interrupts() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _start()
        assert _said().units[0].said == ("hello",)
        assert _ask(StopUnits(("herd-servers",), 60.0)).units[0].code == 130
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("either_way", "_home")
def test_it_is_interrupted_and_killed_only_if_it_does_not_end() -> None:
    _start()
    assert _said().units[0].said == ("hello",)
    assert _ask(StopUnits(("herd-servers",), 60.0)).changed == "herd-servers has ended"
    assert _ask(StopUnits(("herd-servers",), 60.0)).changed == ""
    _start(_STUBBORN, files={})
    while _said().units[0].said != ("deaf",):
        pass
    assert _ask(StopUnits(("herd-servers",), 0.3)).changed == "herd-servers was killed: it did not end"


@pytest.mark.usefixtures("_home")
def test_it_finds_its_files_in_its_folder_and_a_number_of_somebody_else_is_not_it(tmp_path: Path) -> None:
    _start("print(open('config.yaml').read(), flush=True); import time; time.sleep(600)", files={"config.yaml": "a: 1"})
    found = _said().units[0]
    assert found.said == ("a: 1",)
    note = tmp_path / ".local/share/shoal/units/herd-servers/unit.json"
    fields = msgspec.json.decode(note.read_bytes())
    note.write_bytes(msgspec.json.encode(fields | {"started_s": 1.0}))
    assert not _ask(LookAtUnits()).units[0].is_running
    note.write_bytes(msgspec.json.encode(fields))
    assert _ask(LookAtUnits()).units[0].is_running


@pytest.mark.usefixtures("_home")
def test_addresses_of_an_earlier_run_are_not_those_of_this_one(tmp_path: Path) -> None:
    folder = tmp_path / ".local/share/shoal/units/herd-servers/logs/old"
    folder.mkdir(parents=True)
    peers = folder / "initial_peers.txt"
    peers.write_text("/ip4/192.0.2.1/tcp/1/p2p/x")
    _start()
    os.utime(peers, (1.0, 1.0))
    assert _ask(AwaitPeers("herd-servers", 0.2)).changed == ""
    os.utime(peers)
    assert _ask(AwaitPeers("herd-servers", 60.0)).changed
    with pytest.raises(ConfigError, match="no unit other"):
        _ask(AwaitPeers("other", 1.0))


@pytest.mark.usefixtures("either_way", "_home")
def test_what_it_says_is_cut_before_it_fills_the_disk_and_what_was_said_last_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_starts, "_MOST_BYTES", 50_000)
    monkeypatch.setattr(unit_starts, "_BETWEEN_LOOKS_S", 0.02)
    program = "import sys, time\nwhile True: print('x' * 99, flush=True); time.sleep(0.0002)"
    _start(program)
    folder = tmp_path / ".local/share/shoal/units/herd-servers"
    kept, inodes = folder / "output.log.1", set[int]()
    while len(inodes) < 1 or (folder / "output.log").stat().st_size > 50_000:
        inodes |= {kept.stat().st_ino} if kept.exists() else set()
    assert kept.stat().st_size > 50_000
    assert _said().units[0].is_running
    _ask(StopUnits(("herd-servers",), 60.0))
    while with_environment(f"HOME={tmp_path}"):
        pass  # the shell that cuts goes with it


def test_a_service_that_fails_again_and_again_is_left_so_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shown = {"ActiveState": "failed", "ExecMainStatus": "1"}
    called: list[tuple[str, ...]] = []

    def systemctl(*arguments: str) -> str:
        called.append(arguments)
        return shown.get(arguments[1].removeprefix("--property="), "") if arguments[0] == "show" else ""

    for module in (unit, unit_starts):
        monkeypatch.setattr(module, "systemctl", systemctl)
    one = Unit("herd-servers", ("/bin/false",), is_lasting=True)
    state = _ask(StartUnit(one, replaces=True, by_systemd=True)).units[0]
    assert (state.is_running, state.code, state.has_given_up, state.digest) == (False, 1, True, one.digest())
    # Without that, systemd would refuse the start.
    assert called.index(("reset-failed", "shoal-herd-servers.service")) < called.index(
        ("restart", "shoal-herd-servers.service")
    )
    assert "is left so until `shoal up`" in told(state)
    shown["ActiveState"] = "activating"
    assert not _ask(LookAtUnits()).units[0].has_given_up, "between two of its starts"


def test_its_service_is_one_that_systemd_takes(tmp_path: Path) -> None:
    one = Unit("herd-servers", ("/bin/sh", "-c", 'echo "50%" $HOME \\ done'), is_lasting=True)
    text = unit_starts.service_text(one, tmp_path, ("--resume",))
    assert 'ExecStart="/bin/sh" "-c" "echo \\"50%%\\" $$HOME \\\\ done" "--resume"' in text
    assert "Restart=on-failure" in text
    assert re.search(r"\[Unit\][^[]*StartLimitIntervalSec=1800\nStartLimitBurst=10\n", text), "not for ever"
    assert "WantedBy=default.target" in text
    assert "KillMode=mixed\n" in text
    assert "OOMPolicy=continue\n" in text, "a server that is killed for want of memory ends no other one"
    once = unit_starts.service_text(msgspec.structs.replace(one, is_lasting=False), tmp_path)
    assert "Restart" not in once
    if (analyze := shutil.which("systemd-analyze")) is not None:
        for name, content in (("lasting", text), ("once", once)):
            path = tmp_path / f"{name}.service"
            path.write_text(content)
            done = subprocess.run([analyze, "verify", path], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_the_wheel_of_what_runs_here_is_the_same_each_time_and_has_all_of_it() -> None:
    name, content = own_wheel()
    assert (name, content) == own_wheel()
    with zipfile.ZipFile(BytesIO(content)) as wheel:
        names = wheel.namelist()
        record = next(each for each in names if each.endswith("RECORD"))
        listed = {line.partition(",")[0] for line in wheel.read(record).decode().splitlines()}
    assert listed == set(names)
    assert {"shoal/__init__.py", "shoal/configs/sandbox.yaml", "shoal/cli/remote/unit.py"} <= listed
    assert not [each for each in names if "__pycache__" in each]
