"""A whole monitor in this process: DHT, endpoint, status events, and a W&B run that can be read back."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec
import pytest
from tests.wandb_files import rows_of

from shoal.clock import SystemClock
from shoal.config import config_to_json, load_config
from shoal.control.dht import DhtNode
from shoal.control.registry import Registry
from shoal.control.role_start import MonitorSpec
from shoal.identity import Identity, namespace
from shoal.ids import RunId
from shoal.monitor.exporters.wandb_run import WandbRun, WandbSettings, open_rows
from shoal.monitor.service import listen_maddrs, main
from shoal.runtime.control_pipe import ControlPipe, RoleControl
from shoal.runtime.launcher_messages import FromRole, InitialPeers, MonitorReady, StatusChanged, UserNotice
from shoal.runtime.waking import Mailbox
from shoal.telemetry.rows import MetricRow
from shoal.transport.unix import open_unix_endpoint
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import MetricReport, Metrics, PeerMetrics

SWARM_KEY = b"k" * 32
_Said = TypeVar("_Said", bound=FromRole)
LOOPBACK = {"host_maddrs": ("/ip4/127.0.0.1/tcp/0",)}


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_ERROR_REPORTING"):
        # Set first, so that what the code sets is taken back as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def _spec(tmp_path: Path, identity: Identity, client: Identity, *, wandb: bool) -> bytes:
    config = load_config()
    config = config.model_copy(update={"network": config.network.model_copy(update=LOOPBACK), "wandb": wandb})
    (tmp_path / "logs").mkdir()
    spec = MonitorSpec(
        run_id="test-run",
        role="monitor",
        index=0,
        config_json=config_to_json(config),
        identity_key=identity.private_bytes,
        swarm_key=SWARM_KEY,
        socket_path=str(tmp_path / "monitor"),
        client=client.peer_id,
        log_dir=str(tmp_path / "logs"),
    )
    return msgspec.msgpack.encode(spec)


class _Launcher:
    """The supervisor's end of the control pipe."""

    def __init__(self) -> None:
        self.events = Mailbox[FromRole]()
        self.pipe = ControlPipe(self.events.put, FromRole)
        self.role = RoleControl()
        self._passed: list[FromRole] = []

    async def __aenter__(self) -> _Launcher:
        ours, theirs = socket.socketpair()
        await self.pipe.open(ours)
        await self.role.open(theirs)
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.role.aclose()
        await self.pipe.aclose()

    async def until(self, kind: type[_Said], **wanted: float) -> _Said:
        """Return the first event of this kind whose status has these values; others can be asked for afterwards."""

        def is_wanted(event: FromRole) -> bool:
            status = event.values if isinstance(event, StatusChanged) else {}
            return isinstance(event, kind) and all(status.get(key) == value for key, value in wanted.items())

        for event in filter(is_wanted, self._passed):
            self._passed.remove(event)
            return event
        async for event in self.events:
            if is_wanted(event):
                return event
            self._passed.append(event)
        raise AssertionError(f"the monitor ended without {kind}")


@pytest.mark.anyio
async def test_a_monitor_is_the_first_peer_and_reports_numbers_to_the_terminal_and_to_wandb(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    me, client, other = (Identity.generate() for _ in range(3))
    server = Identity.generate().peer_id
    spec = _spec(tmp_path, me, client, wandb=True)
    with anyio.fail_after(240):
        async with _Launcher() as launcher, anyio.create_task_group() as tasks:
            tasks.start_soon(main, spec, launcher.role)
            ready = await launcher.until(MonitorReady)
            listed = await anyio.Path(tmp_path / "logs" / "initial_peers.txt").read_text()
            assert tuple(listed.split()) == ready.maddrs
            hop = Hop(me.peer_id, (f"unix:{tmp_path / 'monitor'}",))
            await _joins(tmp_path, other, ready.maddrs, hop)
            async with open_unix_endpoint(
                peer_id=client.peer_id, run_id=RunId("test-run"), role="client", path=tmp_path / "client"
            ) as endpoint:
                endpoint.introduce(hop)
                report = MetricReport("server", {"step.committed{stage=0}": 3}, {}, {"step.open_seconds": {0: 3}})
                endpoint.post(hop.peer, PeerMetrics(server, report))
                for step in range(3):
                    values = {"loss/train": 5.0 - step, "samples": 10.0 * step, "alive_peers": 4.0, "pipelines": 2.0}
                    endpoint.post(hop.peer, Metrics("client", client.peer_id, 1, values))
                await launcher.until(StatusChanged, **{"loss/train": 3.0, "round": 1.0, "alive_peers": 4.0})
                notice = await launcher.until(UserNotice)
            launcher.role.stopping.set()
    assert "offline" in notice.text
    losses = await anyio.to_thread.run_sync(_logged, tmp_path / "logs", "loss/train")
    assert losses[-1] in (3.0, 3.5, 4.0), "of a second, the mean"
    committed = f"server ...{server[-8:]}/step.committed"
    assert await anyio.to_thread.run_sync(_logged, tmp_path / "logs", committed) == [3.0]
    lines = (await anyio.Path(tmp_path / "logs" / "monitor_0.log").read_text()).splitlines()
    [left] = [line["measured"] for line in map(json.loads, lines) if line["event"] == "monitor.peers"]
    assert left[committed.partition("/")[0]]["step.committed"] == 3.0
    assert capfd.readouterr() == ("", "")


async def _joins(tmp_path: Path, identity: Identity, maddrs: Sequence[str], monitor: Hop) -> None:
    """Check that another peer finds the monitor through the DHT."""
    clock, name = SystemClock(), namespace(SWARM_KEY, load_config().experiment_prefix)
    async with await DhtNode.create(
        identity, namespace=name, state_dir=tmp_path, clock=clock, initial_peers=maddrs
    ) as node:
        registry = Registry(node, identity, name, 2, clock)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(registry.run)
            await registry.membership.wait_for(lambda view: view.monitor == monitor)
            tasks.cancel_scope.cancel()


def _logged(directory: Path, name: str) -> list[float]:
    """Read the values of one metric back from W&B's own file."""
    (part,) = directory.glob("wandb/offline-run-*")
    return [item[name] for item in rows_of(part) if name in item]


def _rows(part: Path) -> list[tuple[int, float]]:
    """Read row numbers and training losses back from one folder of W&B."""
    return [(int(item["_step"]), item["loss/train"]) for item in rows_of(part) if "loss/train" in item]


@pytest.mark.anyio
async def test_without_wandb_the_monitor_works_and_makes_no_run(tmp_path: Path) -> None:
    spec = _spec(tmp_path, Identity.generate(), Identity.generate(), wandb=False)
    with anyio.fail_after(240):
        async with _Launcher() as launcher, anyio.create_task_group() as tasks:
            tasks.start_soon(main, spec, launcher.role)
            await launcher.until(MonitorReady)
            await launcher.until(StatusChanged, alive_peers=1.0, missing_stages=float(load_config().num_stages))
            launcher.role.stopping.set()
    assert not await anyio.Path(tmp_path / "logs" / "wandb").exists()


def test_a_missing_package_is_said_once_and_numbers_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    notices: list[str] = []
    run = WandbRun(WandbSettings("test", tmp_path, {}, "test"), notices.append)
    for i in range(3):
        run.row(MetricRow(datetime.now(UTC), {"loss/train": float(i)}))
    assert run.close(5.0)
    [_, remedy] = notices
    assert "shoal[wandb]" in remedy


def test_whatever_wandb_fails_with_is_said_and_numbers_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused(Exception):
        """As its users know it."""

    def log(_values: object, step: int) -> None:
        raise EOFError("0 bytes read on a total of 5 expected bytes")  # its own process was killed

    settings = SimpleNamespace(mode="disabled")
    run = SimpleNamespace(step=0, log=log, settings=settings, define_metric=lambda *_args, **_more: None)
    errors = SimpleNamespace(UsageError=Refused, CommError=Refused)
    fake = SimpleNamespace(Error=Refused, errors=errors, init=lambda **_: run, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    notices: list[str] = []
    export = WandbRun(WandbSettings("test", tmp_path, {}, "test"), notices.append)
    export.row(MetricRow(datetime.now(UTC), {"loss/train": 1.0}))
    assert export.close(5.0)
    assert [line for line in notices if "stopped logging (0 bytes read" in line]


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_monitor_that_is_started_again_goes_on_with_the_same_wandb_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    # Whether there is an account, and how long it takes to hear that there is none, is not asked here.
    monkeypatch.setenv("WANDB_MODE", "offline")
    identity, client, logs = Identity.generate(), Identity.generate(), tmp_path / "logs"
    spec = _spec(tmp_path, identity, client, wandb=True)
    notices: list[str] = []
    for start in range(2):
        with anyio.fail_after(240):
            async with _Launcher() as launcher, anyio.create_task_group() as tasks:
                tasks.start_soon(main, spec, launcher.role)
                if start:
                    launcher.pipe.send(InitialPeers(()))
                await launcher.until(MonitorReady)
                hop = Hop(identity.peer_id, (f"unix:{tmp_path / 'monitor'}",))
                async with open_unix_endpoint(
                    peer_id=client.peer_id, run_id=RunId("test-run"), role="client", path=tmp_path / f"client_{start}"
                ) as endpoint:
                    endpoint.introduce(hop)
                    for step in range(3):
                        values = {"loss/train": 5.0 - step - 3 * start}
                        endpoint.post(hop.peer, Metrics("client", client.peer_id, 1, values))
                    await launcher.until(StatusChanged, **{"loss/train": 3.0 - 3 * start})
                    notices.append((await launcher.until(UserNotice)).text)
                launcher.role.stopping.set()
        await anyio.sleep(1.1)  # W&B names its folders by the second
    assert len(set(notices)) == 1
    pattern = Path(notices[0].rpartition(" ")[2])
    parts = sorted(logs.glob(str(pattern.relative_to(logs))))
    assert [part.name.endswith("-test-run") for part in parts] == [True, True], "each start has its folder"
    rows = [await anyio.to_thread.run_sync(_rows, part) for part in parts]
    assert [number for part in rows for number, _ in part] == list(range(sum(map(len, rows))))
    assert all(3.0 <= loss <= 5.0 for _, loss in rows[0])
    assert all(0.0 <= loss <= 2.0 for _, loss in rows[1])


def test_rows_go_on_from_what_wandb_knows_of_other_hosts(tmp_path: Path) -> None:
    with open_rows(tmp_path, first=0) as rows:
        assert [rows.next(), rows.next()] == [0, 1]
    with open_rows(tmp_path, first=0) as rows:
        assert rows.next() == 2
    with open_rows(tmp_path, first=40) as rows:
        assert rows.next() == 40
    (tmp_path / "wandb.rows").write_bytes(bytes(12))
    with open_rows(tmp_path, first=7) as rows:
        assert rows.next() == 7


def test_the_monitor_port_replaces_any_free_port_only() -> None:
    config = load_config()
    network = config.network.model_copy(
        update={"monitor_port": 50000, "host_maddrs": ("/ip4/0.0.0.0/tcp/0", "/ip4/10.0.0.1/tcp/7")}
    )
    maddrs = listen_maddrs(config.model_copy(update={"network": network}))
    assert maddrs == ("/ip4/0.0.0.0/tcp/50000", "/ip4/10.0.0.1/tcp/7")
