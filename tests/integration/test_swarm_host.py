"""What a host answers its client, with a real supervisor."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.host import SwarmHost
from shoal.cli.host_network import HostNetwork
from shoal.config import Config
from shoal.config.host import NetworkConfig
from shoal.mirror.spec import MirrorSpec
from shoal.runtime.launcher_messages import Adopt, AnyReply, RoleAsks, StartTrainer
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
            spec = host._spec(MirrorSpec, "mirror", 0)
            assert (spec.listen_tcp, spec.between_hosts) == (("127.0.0.1", tcp_port), True)
            assert spec.config().network.host_maddrs == (f"/ip4/127.0.0.1/tcp/{dht_port}",)
