"""A role ends as a process does: off the network, with everything that it did."""

from __future__ import annotations

import anyio
import pytest

from shoal.errors import ConfigError, ConnectionLost
from shoal.ids import PeerId
from shoal.transport.base import PeerLost
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages.control import Heartbeat
from shoal_lab.process import Process

ROLE = PeerId("role")


def connected() -> tuple[MemoryNetwork, MemoryEndpoint, Process]:
    network = MemoryNetwork()
    other, process = network.endpoint(PeerId("other")), Process(network, ROLE)
    other.introduce(process.endpoint.hop)
    other.post(ROLE, Heartbeat())
    return network, other, process


async def loses(endpoint: MemoryEndpoint) -> bool:
    with anyio.move_on_after(60):
        async for event in endpoint.events():
            if isinstance(event, PeerLost):
                return event.peer == ROLE
    return False


async def test_a_killed_process_stops_at_once_and_is_lost_by_the_others() -> None:
    network, other, process = connected()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(process.run, anyio.sleep_forever)
        await anyio.wait_all_tasks_blocked()
        process.kill()
    assert not process.running
    assert process.error is None
    assert await loses(other)
    Process(network, ROLE)  # and can be started anew


async def test_a_frozen_process_does_nothing_but_is_not_lost_before_it_is_killed() -> None:
    _, other, process = connected()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(process.run, anyio.sleep_forever)
        await anyio.wait_all_tasks_blocked()
        process.freeze()
    assert process.running
    assert ROLE in other.peers
    process.kill()
    assert await loses(other)


async def test_a_failed_role_ends_alone() -> None:
    _, other, process = connected()

    async def fail() -> None:
        async with anyio.create_task_group():
            raise ConnectionLost("gone")

    await process.run(fail)
    assert isinstance(process.error, ConnectionLost)
    assert not process.running
    assert await loses(other)


async def test_a_bug_in_a_role_is_raised() -> None:
    _, _, process = connected()

    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await process.run(fail)


async def test_a_peer_is_one_process_at_a_time() -> None:
    network, _, _ = connected()
    with pytest.raises(ConfigError):
        Process(network, ROLE)
