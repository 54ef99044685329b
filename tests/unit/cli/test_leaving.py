"""What a host of servers says when it leaves, and for whom it waits."""

from __future__ import annotations

import anyio

from shoal.cli.leaving import HostLeaves
from shoal.clock import SystemClock
from shoal.ids import PeerId
from shoal.runtime.launcher_messages import LastOfStage, LeaveTogether, ServerMayLeave, ServerReady, ToRole
from shoal.runtime.role_handle import RoleHandle
from shoal.runtime.role_spec import RoleSpec


class Server(RoleHandle):
    """A server that serves, and takes note of what it is told."""

    def __init__(self, index: int) -> None:
        super().__init__(RoleSpec("server", index, ""))
        self.deliver(ServerReady(index))
        self.told: list[ToRole] = []

    def send(self, message: ToRole) -> None:
        self.told.append(message)


class Host:
    """Two servers, and the lines on the screen."""

    def __init__(self, patience_s: float = 30.0) -> None:
        self.lines: list[str] = []
        self.leaves = HostLeaves(self.lines.append, SystemClock(), patience_s)
        self.servers = {Server(0): PeerId("a"), Server(1): PeerId("b")}

    async def left(self, *events: LastOfStage | ServerMayLeave) -> None:
        """Each server has the stage of its index."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.leaves.run, self.servers)
            await anyio.wait_all_tasks_blocked()
            for said in events:
                self.leaves.take(said, list(self.servers)[said.stage])


async def test_servers_that_others_can_do_without_leave_without_a_word() -> None:
    host = Host()
    await host.left(ServerMayLeave(0, 7, False), ServerMayLeave(1, 7, False))
    assert host.lines == []
    assert [server.told for server in host.servers] == [[LeaveTogether((PeerId("a"), PeerId("b")))]] * 2


async def test_the_last_host_names_its_stages_once_and_says_where_their_state_is() -> None:
    host = Host()
    await host.left(
        LastOfStage(0, 7, ""),
        LastOfStage(1, 7, ""),
        LastOfStage(1, 7, ""),
        ServerMayLeave(0, 7, True),
        ServerMayLeave(1, 7, True),
    )
    first, remedy, *others = host.lines
    assert first.startswith("this host is the last with stages 0, 1: it hands over what they have learnt up to round 7")
    assert remedy == "  press Ctrl-C again to leave at once"
    assert others == [f"stage {stage} as of round 7 is with the client now" for stage in (0, 1)]


async def test_where_nobody_takes_it_the_loss_is_named_and_the_wait_ends() -> None:
    host = Host(patience_s=0.05)
    await host.left(ServerMayLeave(0, 7, False), LastOfStage(1, 7, "no client can be reached"))
    assert host.lines[0].startswith(
        "this host is the last with stage 1, and nobody takes it (no client can be reached): what it has learnt is lost"
    )
    assert not any("hands over" in line for line in host.lines)
    assert host.lines[-1].startswith("leaving: what stage 1 learnt on this host is lost")


async def test_a_server_that_dies_meanwhile_is_not_waited_for() -> None:
    host = Host()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(host.leaves.run, host.servers)
        await anyio.wait_all_tasks_blocked()
        for server in host.servers:
            host.leaves.gone(server)
    assert host.leaves.has_begun
