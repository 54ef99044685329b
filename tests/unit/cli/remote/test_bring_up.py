"""A look of `shoal up` says what a start would do to what runs on a host; and all hosts share one invitation."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from tests.set_clock import SetClock
from tests.unit.cli.remote.test_plan import FACTS

from shoal.cli.remote import unit
from shoal.cli.remote.bring_up import BringUp, ClientInvitation
from shoal.cli.remote.hosts_file import HostsFile
from shoal.cli.remote.plan import Installation, Wanted
from shoal.cli.remote.probe import INSTALLED
from shoal.clock import SystemClock
from shoal.runtime.process_info import read_stat

_INSTALLATION = Installation("shoal-1.0-py3-none-any.whl", b"wheel", ())
_SSH = "import os, sys; os.execv('/bin/sh', ['sh', '-c', sys.argv[-1]])"


class _Box:
    """A host that is this machine, with a home of its own and shoal installed there."""

    def __init__(self, home: Path) -> None:
        self._home = home
        (home / "ssh.py").write_text(_SSH)
        folder = home / INSTALLED / _INSTALLATION.name_for(self._file().hosts["box"])
        (folder / "bin").mkdir(parents=True)
        (folder / "whole").touch()
        python = folder / "bin" / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)

    def _file(self, **entry: Any) -> HostsFile:
        ssh = (sys.executable, str(self._home / "ssh.py"))
        python = {"python": sys.executable}
        return HostsFile.model_validate(
            {"swarm": {"client": "box"}, "hosts": {"box": {**python, **entry}}, "ssh_command": ssh}
        )

    def look(self, **entry: Any) -> list[str]:
        """Return what a look says, with this in the file for the host."""
        said: list[str] = []
        wanted = Wanted(self._file(**entry), "herd", "text: 1", _INSTALLATION)
        look = BringUp(wanted, ("box",), SystemClock(), lambda _, text: said.append(text), is_dry=True)
        assert anyio.run(look.run) == 0
        return said

    def run_all(self) -> None:
        """Let it be noted that both units run, as the file has them; their process is this one."""
        stat = read_stat(os.getpid())
        assert stat is not None
        wanted = Wanted(self._file(), "herd", "text: 1", _INSTALLATION)
        facts = msgspec.structs.replace(FACTS, home=str(self._home))
        for each in (wanted.client("box", facts), wanted.servers("box", facts)):
            assert each is not None
            note = unit._Note(each, 1.0, os.getpid(), stat.started_s)
            path = unit._folder(each.name) / "unit.json"
            path.parent.mkdir(parents=True)
            path.write_bytes(msgspec.json.encode(note))


def test_a_look_compares_what_a_file_says_with_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    box = _Box(tmp_path)
    client, servers, last = box.look()
    assert client.startswith("would start herd-client, in ~/.local/share/shoal/units/herd-client: ")
    assert servers.startswith("would start herd-servers, in ~/.local/share/shoal/units/herd-servers: ")
    assert last == "that was a look: nothing was changed"
    box.run_all()
    assert box.look() == [
        "herd-client would be left as it is",
        "herd-servers would be left as it is",
        "all hosts are as the file says: nothing was changed",
    ]
    client, servers, _ = box.look(servers=2)
    assert client.startswith("herd-client runs as it was started, not as the file says now: it is left alone")
    assert servers.startswith("would restart herd-servers, in ")


async def test_an_invitation_is_asked_for_once_for_all_hosts_and_anew_when_it_is_old() -> None:
    clock = SetClock(0.0)
    asked: list[float] = []

    async def ask() -> str:
        asked.append(clock.now_s())
        await anyio.lowlevel.checkpoint()
        return f"invitation {len(asked)}"

    invitation = ClientInvitation(clock)
    found: list[str | None] = []

    async def join() -> None:
        found.append(await invitation.text())

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(join)
        await anyio.wait_all_tasks_blocked()
        assert asked == [], "nobody knows yet whether there is a client"
        invitation.settle(ask)
    invitation.settle()  # its host has failed after that
    assert found == ["invitation 1"] * 3
    clock.now = 301.0
    assert await invitation.text() == "invitation 2"


async def test_without_a_client_there_is_no_invitation() -> None:
    invitation = ClientInvitation(SetClock())
    invitation.settle()
    assert await invitation.text() is None
