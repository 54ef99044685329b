"""Units of a host that runs an image are containers: podman or docker starts, ends and shows them."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import anyio
import msgspec
import pytest
from tests import fake_podman

from shoal.cli.remote.bring_up import BringUp
from shoal.cli.remote.container import ContainerImage
from shoal.cli.remote.container_units import ask_containers, logs_command
from shoal.cli.remote.hosts_file import HostEntry, HostsFile
from shoal.cli.remote.operate import print_units, stop_units
from shoal.cli.remote.plan import Installation, Wanted
from shoal.cli.remote.probe import INSTALLED, UNITS, probe
from shoal.cli.remote.ssh import Ssh
from shoal.cli.remote.unit_messages import AwaitPeers, LookAtUnits, Request, StartUnit, StopUnits, Unit, Units
from shoal.cli.remote.units_there import running_of_other_kind, stop_other_kind
from shoal.clock import SystemClock
from shoal.errors import HostFailed

INSTALLATION = Installation("shoal-1.0-py3-none-any.whl", b"wheel", ())
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

_SSH = """
import os, sys
# As ssh does: what is started on a host keeps nothing open that its starter reads.
os.closerange(3, 1024)
home = os.path.join(os.path.dirname(os.path.abspath(__file__)), "home")
path = os.path.join(home, "bin") + ":" + os.environ["PATH"]
# As a login shell that greets.
os.execve("/bin/sh", ["sh", "-c", "echo Welcome; " + sys.argv[-1]], {**os.environ, "HOME": home, "PATH": path})
"""
_SHOAL = """#!/bin/sh
case "$1" in
  serves) echo "serves stage 0"; exec sleep 600 ;;
  leads) mkdir -p logs/run; date > logs/run/initial_peers.txt; exec sleep 600 ;;
  stays) trap : INT TERM; echo "it stays"; while :; do sleep 0.1; done ;;
  reads) cat config.yaml; exec sleep 600 ;;
  fails) echo "it has failed"; exit 3 ;;
esac
"""


@dataclass
class Box:
    """A host that has podman, or docker, and what looks like shoal in an image."""

    directory: Path
    engine: str

    @property
    def ssh(self) -> Ssh:
        """The way there."""
        return Ssh("box", (sys.executable, str(self.directory / "ssh.py")), self.directory, SystemClock())

    @property
    def programs(self) -> Path:
        """The folder of the host's programs."""
        return self.directory / "home" / "bin"

    def unit(self, *words: str, more: tuple[str, ...] = (), config: str = "") -> Unit:
        """Return a unit that runs this."""
        engine = str(self.programs / self.engine)
        folders = self.directory / "home" / ".local/share/shoal"
        argv = (engine, "run", "--detach", "--name", "shoal-herd-servers", "--stop-signal", "SIGINT", *more)
        argv = (*argv, "--workdir", f"{folders}/units/herd-servers", "--volume", f"{folders}:{folders}")
        return Unit("herd-servers", (*argv, "--entrypoint", "shoal", "herd:1", *words), {"config.yaml": config})

    async def asked(self, request: Request) -> Units:
        """Ask."""
        return await ask_containers(self.ssh, request, within_s=60.0)

    async def until(self, is_so: Callable[[Units], bool]) -> Units:
        """Look until it is so."""
        while not is_so(found := await self.asked(LookAtUnits(("herd-servers",), 9))):  # noqa: ASYNC110 - of a process
            await anyio.sleep(0.05)
        return found


@pytest.fixture(params=["podman", "docker"])
async def box(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Box]:
    box = Box(tmp_path, request.param)
    (tmp_path / "ssh.py").write_text(_SSH)
    (tmp_path / "image").mkdir()
    shoal = tmp_path / "image" / "shoal"
    shoal.write_text(_SHOAL)
    shoal.chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'image'}:{os.environ['PATH']}"}
    image = {"names": ["herd:1"], "environment": environment}
    fake_podman.put(box.programs, box.engine, image)
    (box.programs / "pulled").write_text("herd:1\n")
    yield box
    fake_podman.put(box.programs, box.engine, image)
    await box.asked(StopUnits(("herd-servers",), 5.0))


async def test_a_unit_is_started_once_and_another_one_takes_its_place_if_it_may(box: Box) -> None:
    first = box.unit("serves")
    [nothing] = (await box.asked(LookAtUnits(("herd-servers",)))).units
    assert (nothing.is_running, nothing.since_unix_s, nothing.digest) == (False, 0.0, "")
    assert (await box.asked(StartUnit(first, replaces=True, by_systemd=False))).changed == "started"
    found = await box.until(lambda units: bool(units.units[0].said))
    [now] = found.units
    assert (now.is_running, now.code, now.said, now.digest) == (True, None, ("serves stage 0",), first.digest())
    assert now.since_unix_s > 1_700_000_000.0
    assert found.version == "herd:1"

    again = await box.asked(StartUnit(first, replaces=True, by_systemd=False))
    assert (again.changed, again.differs, again.units[0].pid) == ("", False, now.pid)
    other = box.unit("reads", config="text: 'it is'\n")
    kept = await box.asked(StartUnit(other, replaces=False, by_systemd=False))
    assert (kept.changed, kept.differs, kept.units[0].pid) == ("", True, now.pid)
    assert (await box.asked(StartUnit(other, replaces=True, by_systemd=False))).changed == "started anew"
    [now] = (await box.until(lambda units: bool(units.units[0].said))).units
    assert (now.said, now.digest) == (("text: 'it is'",), other.digest())
    config = box.directory / "home" / UNITS / "herd-servers" / "config.yaml"
    assert config.stat().st_mode & 0o777 == 0o600


async def test_a_unit_that_was_ended_says_how_and_what_it_has_said(box: Box) -> None:
    await box.asked(StartUnit(box.unit("serves"), replaces=True, by_systemd=False))
    await box.until(lambda units: bool(units.units[0].said))
    ended = await box.asked(StopUnits(("herd-servers", "herd-client"), 5.0))
    assert ended.changed == "herd-servers has ended"
    [servers, client] = ended.units
    assert (servers.is_running, servers.code, servers.said) == (False, 130, ("serves stage 0",))
    assert (client.is_running, client.code) == (False, None)
    done = await box.ssh.run(logs_command(("herd-servers",), 5, follows=False), within_s=60.0)
    assert done.stdout.decode() == "Welcome\n==> herd-servers <==\nserves stage 0\n"

    await box.asked(StartUnit(box.unit("stays"), replaces=True, by_systemd=False))
    await box.until(lambda units: bool(units.units[0].said))
    killed = await box.asked(StopUnits(("herd-servers",), 0.5))
    assert killed.changed == "herd-servers was killed: it did not end"


async def test_one_that_fails_again_and_again_is_left_so(box: Box) -> None:
    await box.asked(StartUnit(box.unit("fails", more=("--restart", "on-failure:10")), replaces=True, by_systemd=False))
    [unit] = (await box.until(lambda units: not units.units[0].is_running)).units
    assert (unit.code, unit.has_given_up, len(unit.said)) == (3, True, 9)


async def test_a_client_is_awaited_until_it_knows_its_addresses_or_has_ended(box: Box) -> None:
    unit = box.unit("leads")
    await box.asked(StartUnit(unit, replaces=True, by_systemd=False))
    assert (await box.asked(AwaitPeers(unit.name, 60.0))).changed == "knows its addresses"
    # What the one before it has left does not count.
    await box.asked(StopUnits((unit.name,), 5.0))
    await box.asked(StartUnit(box.unit("fails"), replaces=True, by_systemd=False))
    ended = await box.asked(AwaitPeers(unit.name, 60.0))
    assert (ended.changed, ended.units[0].said) == ("", ("it has failed",))


async def test_an_engine_that_does_not_work_says_why(box: Box) -> None:
    facts = await probe(box.ssh, "python3", SystemClock(), "herd:1")
    assert facts.containers.engine == str(box.programs / box.engine)
    assert (facts.containers.has_image, facts.containers.says, facts.containers.is_rootless) == (True, "", False)
    assert facts.containers.user == f"{os.getuid()}:{os.getgid()}"
    (box.programs / "broken").write_text("cannot connect to the daemon")
    facts = await probe(box.ssh, "python3", SystemClock(), "herd:2")
    assert (facts.containers.has_image, facts.containers.says) == (False, "Error: cannot connect to the daemon ")
    refused = box.unit("serves", more=("--no-such-flag",))
    with pytest.raises(HostFailed, match="unknown flag: --no-such-flag"):
        await box.asked(StartUnit(refused, replaces=True, by_systemd=False))
    (box.programs / box.engine).write_text("#!/bin/sh\necho odd\n")
    with pytest.raises(HostFailed, match="says something else of shoal-herd-servers"):
        await box.asked(LookAtUnits(("herd-servers",)))
    (box.programs / box.engine).write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(HostFailed, match="says something else"):
        await box.asked(LookAtUnits(("herd-servers",)))


# -- a file that names an image now, and did not before, or the other way round


@dataclass
class Changed:
    """A host whose file has changed from an installation to an image, or the other way round."""

    box: Box
    said: list[str]

    def file(self, *, has_image: bool) -> HostsFile:
        ssh = self.box.ssh.command
        values = {"swarm": {"client": "box"}, "hosts": {"box": {}}, "ssh_command": ssh}
        return HostsFile.model_validate({**values, "image": "herd:1"} if has_image else values)

    def bring_up(self, *, has_image: bool, is_dry: bool = False) -> BringUp:
        installation = ContainerImage("herd:1") if has_image else INSTALLATION
        wanted = Wanted(self.file(has_image=has_image), "herd", "", installation)
        return BringUp(wanted, ("box",), SystemClock(), lambda _, text: self.said.append(text), is_dry=is_dry)

    async def start(self, *, has_image: bool, replaces: bool = True, is_dry: bool = False) -> bool:
        """Have the servers' unit run as the file says."""
        facts = await probe(self.box.ssh, "python3", SystemClock(), "herd:1" if has_image else None)
        unit = self.box.unit("serves") if has_image else Unit("herd-servers", ("/bin/sleep", "600"))
        up = self.bring_up(has_image=has_image, is_dry=is_dry)
        facts = msgspec.structs.replace(facts, has_user_units=False)
        return await up._start("box", self.box.ssh, facts, unit, replaces=replaces)

    async def running(self) -> tuple[bool, bool]:
        """Return whether the unit runs as an installation's process, and as a container."""
        names = ("herd-servers",)
        found = [
            await running_of_other_kind(self.box.ssh, names, in_containers=in_containers)
            for in_containers in (True, False)
        ]
        return found[0] == names, found[1] == names


@pytest.fixture
async def changed(box: Box) -> AsyncIterator[Changed]:
    entry = HostEntry()
    folder = box.directory / "home" / INSTALLED / INSTALLATION.name_for(entry)
    (folder / "bin").mkdir(parents=True)
    (folder / "whole").touch()
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    yield Changed(box, [])
    await stop_other_kind(box.ssh, ("herd-servers",), 5.0, in_containers=True)


async def test_a_unit_takes_the_place_of_the_one_that_ran_before_its_file_named_an_image_or_still_named_one(
    changed: Changed,
) -> None:
    assert await changed.running() == (False, False)
    await changed.start(has_image=False)
    assert await changed.running() == (True, False)
    await changed.start(has_image=True, is_dry=True)
    assert changed.said[-1].startswith("would restart herd-servers, in ")
    await changed.start(has_image=True)
    assert await changed.running() == (False, True)
    assert changed.said[-2:] == ["herd-servers has ended", "herd-servers started"]
    await changed.start(has_image=False)
    assert await changed.running() == (True, False)


async def test_a_client_that_runs_as_its_file_has_said_before_is_left_alone(changed: Changed) -> None:
    await changed.start(has_image=False)
    for is_dry in (True, False):
        assert await changed.start(has_image=True, replaces=False, is_dry=is_dry) == is_dry
        assert "left alone, since that would be another run; `shoal hosts restart box` does it" in changed.said[-1]
    assert await changed.running() == (True, False)


@pytest.mark.parametrize("has_image", [True, False])
async def test_what_is_taken_down_is_also_what_ran_before_the_file_has_changed(
    changed: Changed, has_image: bool
) -> None:
    await changed.start(has_image=not has_image)
    say = changed.said.append
    file = changed.file(has_image=has_image)
    assert await stop_units(file, ("box",), "herd", lambda _, text: say(text), SystemClock()) == 0
    assert changed.said[-1] == "herd-servers has ended"
    assert await changed.running() == (False, False)
    assert await stop_units(file, ("box",), "herd", lambda _, text: say(text), SystemClock()) == 0
    assert changed.said[-1] == "nothing ran"


@pytest.mark.parametrize("has_image", [True, False])
async def test_what_runs_still_as_before_the_file_has_changed_is_seen(
    changed: Changed, capsys: pytest.CaptureFixture[str], has_image: bool
) -> None:
    await changed.start(has_image=not has_image)
    await print_units(changed.file(has_image=has_image), ("box",), "herd", SystemClock())
    *_, seen = capsys.readouterr().out.splitlines()
    assert seen.startswith("box")
    assert "herd-servers  runs since " in seen
    assert "in a container, though" in seen
    assert ("not in a container" in seen) == has_image
    await changed.start(has_image=has_image)
    await print_units(changed.file(has_image=has_image), ("box",), "herd", SystemClock())
    assert "though" not in capsys.readouterr().out


async def test_on_a_host_where_what_ran_it_before_does_not_work_any_more_nothing_is_left_of_that(box: Box) -> None:
    await box.asked(StartUnit(box.unit("serves"), replaces=True, by_systemd=False))
    await box.asked(StopUnits(("herd-servers",), 5.0))
    (box.programs / box.engine).unlink()
    assert await running_of_other_kind(box.ssh, ("herd-servers",), in_containers=False) == ()
