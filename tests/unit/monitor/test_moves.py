"""A monitor whose host gets another address tells its launcher, which announces the swarm there."""

from __future__ import annotations

from typing import Any

import anyio
from tests.alongside import alongside

from shoal.clock import SystemClock
from shoal.control.membership import Membership
from shoal.control.records import MonitorRecord, VerifiedRecord, topic_of
from shoal.ids import PeerId
from shoal.monitor.service import moves_told
from shoal.runtime.launcher_messages import MonitorReady


class Pipe:
    """Keeps what is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def tell(self, message: object) -> None:
        self.told.append(message)


async def test_an_address_that_is_gone_is_told_and_one_that_comes_beside_others_is_not() -> None:
    membership, pipe = Membership(SystemClock()), Pipe()
    control: Any = pipe
    now = ("/old",)

    async def announce(sequence: int, *maddrs: str) -> None:
        nonlocal now
        now = maddrs
        record = MonitorRecord(("unix:/m",), 1.0, maddrs=maddrs)
        expires_unix_s = SystemClock().unix_s() + 100
        membership.update([VerifiedRecord(topic_of(record) or "", PeerId("m"), sequence, expires_unix_s, record)])
        await anyio.wait_all_tasks_blocked()

    async with alongside(lambda: moves_told(membership, lambda: now, ("/old",), control)):
        await anyio.wait_all_tasks_blocked()
        await announce(1, "/old")
        await announce(2, "/old", "/more")
        assert pipe.told == []
        await announce(3, "/new")
        await announce(4, "/new")
        assert pipe.told == [MonitorReady(("/new",))]
        await announce(5, "/old", "/new")
        await announce(6, "/old")
        assert pipe.told == [MonitorReady(("/new",)), MonitorReady(("/old",))]
