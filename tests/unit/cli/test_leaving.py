"""What a host of servers says when it leaves, and for whom it waits."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from shoal.cli.leaving import HostLeaves
from shoal.clock import SystemClock
from shoal.ids import PeerId
from shoal.runtime.role_handle import RoleEvent, RoleHandle
from shoal.runtime.role_spec import RoleSpec

pytestmark = pytest.mark.anyio


class Server(RoleHandle):
    """A server that serves, and takes note of what it is told."""

    def __init__(self, index: int) -> None:
        super().__init__(RoleSpec("server", index, ""))
        self.deliver({"event": "ready"})
        self.told: list[dict[str, Any]] = []

    def send(self, **fields: object) -> None:
        self.told.append(fields)


class Host:
    """Two servers, and the lines on the screen."""

    def __init__(self, patience_s: float = 30.0) -> None:
        self.lines: list[str] = []
        self.leaves = HostLeaves(self.lines.append, SystemClock(), patience_s)
        self.servers = {Server(0): PeerId("a"), Server(1): PeerId("b")}

    def says(self, index: int, name: str, **fields: object) -> None:
        server = list(self.servers)[index]
        self.leaves.take(RoleEvent(name, {"stage": index, "round": 7, **fields}, 1), server)

    async def left(self, *events: tuple[int, str, dict[str, object]]) -> None:
        with anyio.fail_after(240):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.leaves.run, self.servers)
                await anyio.wait_all_tasks_blocked()
                for index, name, fields in events:
                    self.says(index, name, **fields)


async def test_servers_that_others_can_do_without_leave_without_a_word() -> None:
    host = Host()
    await host.left((0, "may_leave", {"is_kept": False}), (1, "may_leave", {"is_kept": False}))
    assert host.lines == []
    assert [server.told for server in host.servers] == [[{"leave": [PeerId("a"), PeerId("b")]}]] * 2


async def test_the_last_host_names_its_stages_once_and_says_where_their_state_is() -> None:
    host = Host()
    await host.left(
        (0, "last_of_stage", {"problem": ""}),
        (1, "last_of_stage", {"problem": ""}),
        (1, "last_of_stage", {"problem": ""}),
        (0, "may_leave", {"is_kept": True}),
        (1, "may_leave", {"is_kept": True}),
    )
    first, *others = host.lines
    assert first.startswith("this host is the last with stages 0, 1: it hands over what they have learnt up to round 7")
    assert first.endswith("Press Ctrl-C again to leave at once")
    assert others == [f"stage {stage} as of round 7 is with the client now" for stage in (0, 1)]


async def test_where_nobody_takes_it_the_loss_is_named_and_the_wait_ends() -> None:
    host = Host(patience_s=0.05)
    problem = {"problem": "no client can be reached"}
    await host.left((0, "may_leave", {"is_kept": False}), (1, "last_of_stage", problem))
    assert host.lines[0].startswith(
        "this host is the last with stage 1, and nobody takes it (no client can be reached): what it has learnt is lost"
    )
    assert not any("hands over" in line for line in host.lines)
    assert host.lines[-1].startswith("leaving: what stage 1 learnt on this host is lost")


async def test_a_server_that_dies_meanwhile_is_not_waited_for() -> None:
    host = Host()
    with anyio.fail_after(240):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(host.leaves.run, host.servers)
            await anyio.wait_all_tasks_blocked()
            for server in host.servers:
                host.leaves.gone(server)
    assert host.leaves.has_begun
