"""What the launchers of a run and of servers make of what their roles say, and of what does not work."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import threading
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.lowlevel
import msgspec
import pytest

from shoal.cli import local, run_files
from shoal.cli.host import SwarmHost
from shoal.cli.joining import LastingIdentities
from shoal.cli.local import HostRun
from shoal.cli.run_row import ServersRow
from shoal.cli.server_host import ServerHost
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.errors import RemoteError
from shoal.ids import PeerId, RunId
from shoal.runtime import launcher_messages as messages
from shoal.runtime.role_handle import RoleHandle
from shoal.runtime.role_spec import ExitStatus, RoleSpec


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="shoal")


def _servers(what: str) -> tuple[ServerHost, list[str]]:
    host = ServerHost(cast(Any, what), Config(), {}, b"", (), cast(Any, None), SystemClock(), cast(Any, None))
    said: list[str] = []
    host._display = cast(Any, SimpleNamespace(notice=said.append))
    return host, said


def _host(**more: Any) -> Any:
    return SimpleNamespace(run_id=RunId("mine-1"), name_of=lambda _: "mirror 0", **more)


def test_a_mirror_that_serves_is_said(caplog: pytest.LogCaptureFixture) -> None:
    host, said = _servers("mirror")
    host._hear(messages.RoleReady(), cast(Any, SimpleNamespace(spec=SimpleNamespace(role="mirror"))), _host())
    assert caplog.messages == ["mirror.serves"]
    assert "mine-1" in said[0]


def test_a_role_that_is_started_again_is_said(caplog: pytest.LogCaptureFixture) -> None:
    host, said = _servers("servers")
    role = cast(Any, SimpleNamespace(spec=SimpleNamespace(role="server", index=0), last_error=""))
    host._hear(messages.RoleRestarting(ExitStatus(-9)), role, _host())
    assert caplog.messages == ["role.restarting"]
    assert "killed by SIGKILL" in said[0]


def test_a_role_whose_identity_another_host_has_too_is_said_and_started_again_as_somebody_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host, said = _servers("servers")
    host.identities = LastingIdentities("servers", tmp_path)
    known = host.identities.identity("server", 0).private_bytes
    killed: list[RoleHandle] = []
    scout = RoleHandle(RoleSpec("scout", 0, "", msgspec.msgpack.encode({"identity_key": known})))
    swarm = SwarmHost(
        config=Config(),
        run_id="r",
        log_dir=tmp_path,
        swarm_key=b"",
        run_dir=cast(Any, SimpleNamespace(socket_path=tmp_path.joinpath)),
        supervisor=cast(Any, SimpleNamespace(kill=killed.append, roles=[scout])),
        identity_of=host.identities.identity,
    )
    assert swarm._identity("server", 0).private_bytes == known
    payload = msgspec.msgpack.encode({"role": "server", "identity_key": known})
    role = RoleHandle(RoleSpec("server", 0, "", payload))
    host._servers[role] = swarm.hop("server").peer
    host._hear(messages.IdentityIsCopied("server@box2 at tcp:10.0.0.2:5", yields=False), role, swarm)
    assert not killed
    for _ in range(2):
        host._hear(messages.IdentityIsCopied("server@box2 at tcp:10.0.0.2:5", yields=True), role, swarm)
    assert sorted(each.spec.role for each in killed) == ["scout", "server"]
    assert msgspec.msgpack.decode(scout.spec.payload)["identity_key"] != known
    assert caplog.messages == ["identity.copied"] * 3
    assert "server@box2 at tcp:10.0.0.2:5 have the same identity" in said[0]
    told = msgspec.msgpack.decode(role.spec.payload)
    new = host.identities.identity("server", 0)
    assert told == {"role": "server", "identity_key": new.private_bytes}
    assert new.private_bytes != known
    assert host._servers[role] == new.peer_id
    host.identities.close()


def test_a_peer_that_a_server_does_not_hear_any_more_is_said_once_and_so_is_that_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host, _ = _servers("servers")
    host._row = ServersRow(1, 0.0)
    role, peer = cast(Any, SimpleNamespace(spec=SimpleNamespace(role="server", index=0))), PeerId("a")
    for event in (messages.PeerSilent(peer, "server 2", 3.0), messages.PeerHeard(peer, "server 2")):
        for _ in range(2):
            host._hear(event, role, _host())
    assert caplog.messages == ["peer.silent", "peer.heard"]


def test_a_disk_that_is_full_is_said_on_the_host_that_has_it_and_so_is_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host, said = _servers("servers")
    host._row = ServersRow(1, 0.0)
    role = cast(Any, SimpleNamespace(spec=SimpleNamespace(role="server", index=0), last_error=""))
    for fails in map(float, (0, errno.EIO, errno.EIO, 0, 0)):
        host._hear(messages.WorkDone({"samples": 1.0, "disk_failing": fails}), role, _host(log_dir="/logs/mine-1"))
    assert caplog.messages == ["disk.fails", "disk.takes"]
    assert "cannot write to /logs/mine-1: see in `dmesg` what fails" in said[0]


class _Hurried(SystemClock):
    """Whose pauses take no time."""

    async def sleep_s(self, duration_s: float) -> None:
        await anyio.lowlevel.checkpoint()


class _Gone:
    """A role that has said all that it had to say, and has ended."""

    events: AsyncIterator[object]

    def __init__(self) -> None:
        self.events = self._none()

    async def _none(self) -> AsyncIterator[object]:
        for _ in ():
            yield _

    async def wait(self) -> str:
        return "killed by SIGKILL"


async def test_a_scout_that_ends_has_one_successor_and_is_then_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host, said = _servers("servers")
    started: list[_Gone] = []

    async def start_scout() -> _Gone:
        started.append(_Gone())
        return started[-1]

    await host._watch_run(cast(Any, _Gone()), _host(start_scout=start_scout))
    assert len(started) == 1
    assert caplog.messages == ["scout.lost", "scout.given_up"]
    assert "killed by SIGKILL" in " ".join(said)


async def test_a_scout_that_cannot_be_started_for_a_moment_costs_no_server(caplog: pytest.LogCaptureFixture) -> None:
    host, _ = _servers("servers")
    host.clock = cast(Any, _Hurried())
    refusals = [RemoteError("cannot fork scout: no memory"), RemoteError("scout:0 cannot be started: too many files")]

    async def start_scout() -> _Gone:
        if refusals:
            raise refusals.pop()
        return _Gone()

    await host._watch_run(cast(Any, _Gone()), _host(start_scout=start_scout))
    failed = "role.restart_failed"
    assert caplog.messages == ["scout.lost", failed, failed, "scout.given_up"]


def test_only_a_data_server_that_serves_is_killed_when_another_one_is_wanted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    killed: list[object] = []
    host = cast(Any, SimpleNamespace(supervisor=SimpleNamespace(kill=killed.append), _data_server=None))
    SwarmHost._end_data_server(host)
    for serves in (False, True):
        host._data_server = SimpleNamespace(serves=serves, pid=7)
        SwarmHost._end_data_server(host)
    assert killed == [host._data_server]
    assert caplog.messages == ["data_server.killed"]


async def test_a_swarm_that_cannot_be_announced_on_the_local_network_trains_all_the_same(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lan = pytest.importorskip("shoal.control.lan")

    @contextlib.asynccontextmanager
    async def refused(*_: object) -> AsyncIterator[None]:
        raise OSError("no multicast here")
        yield

    monkeypatch.setattr(lan, "announced", refused)
    run = HostRun(Config(), RunId("mine-1"), tmp_path, SystemClock(), b"")
    await run._announce_on_lan(("/ip4/192.168.1.2/tcp/4000/p2p/12D3",), anyio.CancelScope())
    assert caplog.messages == ["lan.unannounced"]


@pytest.mark.parametrize(("role", "says"), [("mirror", ["mirror 0 has ended (exit code 0)"]), ("trainer", [])])
async def test_a_mirror_that_somebody_has_told_to_leave_is_said(tmp_path: Any, role: str, says: list[str]) -> None:
    run, said = HostRun(Config(), RunId("mine-1"), tmp_path, SystemClock(), b""), list[str]()
    ended: Any = _Gone()
    ended.spec, ended.was_ready, ended.last_error = SimpleNamespace(role=role), True, ""

    async def wait() -> ExitStatus:
        return ExitStatus(0)

    ended.wait = wait
    for _ in range(2):
        await run._follow(ended, _host(), cast(Any, SimpleNamespace(notice=said.append)))
        run._ended.set()  # what leaves with the run is not lost
    assert [line.partition(";")[0] for line in said] == says


@pytest.mark.parametrize("serves", [False, True])
async def test_how_far_a_data_server_is_stands_in_the_state_and_its_client_can_tell_it(
    tmp_path: Any, serves: bool
) -> None:
    run: Any = HostRun(Config(), RunId("mine-1"), tmp_path, SystemClock(), b"")
    state, notices, told = list[str](), list[str](), list[object]()
    view: Any = SimpleNamespace(starting=state.append, notice=notices.append)
    role: Any = SimpleNamespace(was_ready=serves, spec=SimpleNamespace(role="data_server"))
    run._lives_on(messages.RoleDoes("making tokens: 7 %"), role, _host(), view)  # there is no client yet
    run._client = SimpleNamespace(send=told.append)
    run._lives_on(messages.RoleDoes("making tokens: 8 %"), role, _host(), view)
    said = ["making tokens: 7 %", "making tokens: 8 %"]
    assert (state, notices) == (([], said) if serves else (said, []))
    assert told == ([] if serves else [messages.RoleDoes("making tokens: 8 %")])


def test_when_a_process_has_ended_is_told_by_the_clock_of_its_client(tmp_path: Any) -> None:
    clock, nothing = SystemClock(), cast(Any, None)
    host = SwarmHost(Config(), "mine-1", tmp_path, b"", nothing, nothing, clock=clock)
    before_s = clock.now_s()
    host.exited(cast(Any, SimpleNamespace(spec=SimpleNamespace(role="trainer", index=1))))
    [lost] = host._losses
    # Not by its launcher's age: a host that has slept is older than its clock, which stood still.
    assert before_s <= lost.at_s <= clock.now_s()


def test_nothing_ends_because_memory_cannot_be_counted_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_pid: int) -> None:
        raise OSError(24, "too many open files")

    usage = local._PeakUsage()
    usage.sample()
    before = usage.processes
    monkeypatch.setattr(local, "tree_usage", fails)
    usage.sample()
    assert usage.processes == before > 0


def test_the_first_reason_why_a_host_of_servers_has_to_end_is_the_one_that_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host, _ = _servers("servers")
    first = RemoteError("no server of this host is left")
    for error in (first, RemoteError("another one")):
        host._fail(error)
    assert host._failure is first
    assert host._ended.is_set()
    assert caplog.messages == ["servers.failed"]


async def test_a_disk_that_does_not_answer_when_a_run_is_over_is_named_and_keeps_no_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "DISK_PATIENCE_S", 0.01)
    answers, said = threading.Event(), list[str | None]()
    host = HostRun(Config(), RunId("mine-1"), tmp_path, SystemClock(), b"")
    host.exit_code = 0
    monkeypatch.setattr(host, "_write_summary", answers.wait)
    await host._finish(cast(Any, SimpleNamespace(failed=said.append, finish=None)))
    answers.set()
    assert host.exit_code == 1
    [failure] = said
    assert failure is not None
    assert failure.startswith(f"{tmp_path} does not answer")


@pytest.mark.parametrize("summary", [None, {"run_id": "mine-1", "exit": "interrupted", "samples": 8, "model": None}])
async def test_why_a_run_has_failed_is_in_its_summary_with_what_the_end_screen_offers_also_where_the_client_left_none(
    tmp_path: Path, summary: dict[str, Any] | None
) -> None:
    host = HostRun(Config(), RunId("mine-1"), tmp_path, SystemClock(), b"")
    host.summary = summary
    role: Any = _Gone()
    role.spec, role.last_error = SimpleNamespace(role="data_server", index=0), "no such folder"
    role.last_kind = "ConfigError"

    async def wait() -> ExitStatus:
        return ExitStatus(2)

    role.wait = wait
    await host._ended_early(role, _host())
    host._fail("what follows from it")
    assert host._write_summary() == tmp_path / "summary.json"
    written = json.loads((tmp_path / "summary.json").read_text())
    logs, events = f"shoal logs {tmp_path} --level warning", f"shoal events {tmp_path}"
    assert written["failure"] == {
        "kind": "ConfigError",
        "text": "mirror 0 ended early: no such folder",
        "remedy": [logs] if summary is None else [logs, events],
    }
    assert (written["exit"], written["run_id"], written.get("samples")) == (
        *("failed", "mine-1"),
        None if summary is None else 8,
    )
    assert datetime.fromisoformat(written["ended"]).tzinfo is not None
    assert host._exit == "failed"


async def test_a_run_that_is_resumed_and_interrupted_at_once_keeps_the_numbers_that_it_had(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"samples": 8, "exit": "failed", "failure": {"kind": "NoPipeline"}}')
    host = HostRun(Config(), RunId("mine-1"), tmp_path, SystemClock(), b"")
    host._write_summary()
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["samples"], written["exit"], written["failure"]) == (8, "interrupted", None)
