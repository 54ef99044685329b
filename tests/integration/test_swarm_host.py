"""What a host answers its client, with a real supervisor."""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from tests.alongside import alongside, until

from shoal.cli import server_host
from shoal.cli.host import SwarmHost
from shoal.cli.host_network import HostNetwork
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.config.host import NetworkConfig
from shoal.control.role_start import RoleStart
from shoal.errors import HostFailed
from shoal.ids import PeerId
from shoal.runtime.launcher_messages import Adopt, Adoption, AnyReply, LauncherAnswer, RoleAsks, StartTrainer
from shoal.runtime.role_handle import RoleHandle
from shoal.runtime.role_spec import RoleSpec
from shoal.runtime.run_dir import RunDir
from shoal.runtime.supervisor import Supervisor

_SOME_TRAINER = RoleAsks(1, StartTrainer(0, 1))


class Client(RoleHandle):
    """Keeps what it is answered."""

    def __init__(self) -> None:
        super().__init__(RoleSpec("client", 0, "shoal.client.service:main"))
        self.replies: list[tuple[RoleAsks, AnyReply]] = []

    def reply(self, asked: RoleAsks, reply: AnyReply) -> None:
        self.replies.append((asked, reply))


async def test_a_host_that_leaves_does_not_tell_its_client_that_something_failed(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run_dir:
        async with Supervisor(preload=["json"]) as supervisor:
            await supervisor.preloaded()
            host = SwarmHost(Config(), "run-1", tmp_path, b"key", run_dir, supervisor)
            client = Client()
            await host.answer(client, RoleAsks(0, Adopt()))
            assert len(client.replies) == 1
            await supervisor.stop(5.0)
            assert await host.answer(client, _SOME_TRAINER) is None
            assert len(client.replies) == 1, client.replies


async def test_a_client_that_is_started_again_hears_of_trainers_that_could_not_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = RoleHandle(RoleSpec("trainer", 0, "shoal.trainer.service:main"))

    async def start(*_: object) -> RoleHandle:
        if len(client.replies) == 1:
            raise HostFailed("no memory")
        return trainer

    with RunDir(tmp_path) as run_dir:
        async with Supervisor(preload=["json"]) as supervisor:
            host, client = SwarmHost(Config(), "run-1", tmp_path, b"key", run_dir, supervisor), Client()
            monkeypatch.setattr(host, "_start", start)
            for generation in (1, 2):
                await host.answer(client, RoleAsks(generation, StartTrainer(0, generation)))
            await host.answer(client, RoleAsks(3, Adopt()))
    assert [reply for _, reply in client.replies] == [
        LauncherAnswer(),
        LauncherAnswer("no memory"),
        Adoption({0: 2}, [], []),
    ]


async def test_a_server_that_is_stopped_is_said_on_its_host_once_and_so_is_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="shoal")
    monkeypatch.setattr(server_host, "_STATE_INTERVAL_S", 0.01)
    looks: list[int] = []
    async with await anyio.open_process([sys.executable, "-c", "input()"]) as process:
        role = RoleHandle(RoleSpec("server", 1, "shoal.server.service:main"))
        role.pid = process.pid
        nothing: Any = None
        host = server_host.ServerHost("servers", Config(), {}, b"", (), nothing, SystemClock(), nothing)
        host._servers[role] = PeerId("a")
        said: list[str] = []
        monkeypatch.setattr(host, "_say", said.append)
        names: Any = SimpleNamespace(name_of=lambda _: "server 1")
        read_stat = server_host.read_stat
        monkeypatch.setattr(server_host, "read_stat", lambda pid: (looks.append(1), read_stat(pid))[1])
        async with alongside(lambda: host._watch_stopped(names)):
            for number in (signal.SIGSTOP, signal.SIGCONT):
                process.send_signal(number)
                expected = len(caplog.messages) + 1
                await until(lambda expected=expected: len(caplog.messages) >= expected)
                looks.clear()
                await until(lambda: len(looks) > 3)
            process.send_signal(signal.SIGSTOP)
            await until(lambda: len(caplog.messages) >= 3)
            process.kill()
            await process.wait()
            looks.clear()
            await until(lambda: len(looks) > 3)
    assert caplog.messages == ["server.stopped", "server.goes_on", "server.stopped"]
    assert said[0] == (
        f"server 1 stands still (process {process.pid} is stopped): the run does without it; "
        f"`kill -CONT {process.pid}` lets it go on"
    )


@pytest.mark.parametrize(("is_clients", "tcp_port", "dht_port"), [(True, 701, 802), (False, 700, 800)])
async def test_a_mirror_takes_the_ports_after_those_of_the_client_where_both_run(
    tmp_path: Path, is_clients: bool, tcp_port: int, dht_port: int
) -> None:
    settings = NetworkConfig(data_port=700, host_maddrs=("/ip4/127.0.0.1/tcp/800",))
    with RunDir(tmp_path) as run_dir:
        async with Supervisor(preload=["json"]) as supervisor:
            network = HostNetwork(settings)
            host = SwarmHost(Config(network=settings), "run-1", tmp_path, b"key", run_dir, supervisor, network)
            host.monitor_network = settings if is_clients else None
            spec = host._spec(RoleStart, "mirror", 0)
            assert (spec.listen_tcp, spec.between_hosts) == (("127.0.0.1", tcp_port), True)
            assert spec.config().network.host_maddrs == (f"/ip4/127.0.0.1/tcp/{dht_port}",)
