"""What a host answers its client, with a real supervisor."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.host import SwarmHost
from shoal.config import Config
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
