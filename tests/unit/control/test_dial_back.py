"""Servers that nobody can dial: found by the client, told to both users."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import pytest
from tests.alongside import until

from shoal.clock import SystemClock
from shoal.control import dial_back
from shoal.control.dial_back import DialBack, dial_back_heard
from shoal.control.membership import Membership
from shoal.control.records import (
    MAX_REASON_CHARS,
    MAX_UNDIALLED,
    ClientRecord,
    GoneRecord,
    StageRecord,
    Undialled,
    VerifiedRecord,
)
from shoal.ids import PeerId
from shoal.wire.messages.base import Hop


@dataclass
class Scene:
    """A client that dials; `reasons` says who cannot be dialled, by address."""

    membership: Membership = field(default_factory=lambda: Membership(SystemClock()))
    reasons: dict[str, str] = field(default_factory=dict)
    dialled: list[tuple[str, ...]] = field(default_factory=list)
    announced: list[tuple[Undialled, ...]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    sequence: int = 0

    async def dial(self, hop: Hop) -> str:
        self.dialled.append(hop.addresses)
        return self.reasons.get(hop.addresses[0], "")

    def comes(self, peer: str, address: str, stage: int | None = 0, *, connects: bool = True) -> None:
        if connects:
            self.membership.found(PeerId(peer))
        record = StageRecord((address,), 1.0, stage=stage, host="box2", index=1)
        self.says(peer, "candidates" if stage is None else f"stage.{stage}", record)

    def says(self, peer: str, topic: str, record: StageRecord | ClientRecord | GoneRecord) -> None:
        self.sequence = max(self.sequence + 1, int(SystemClock().unix_s() * 1000))
        self.membership.update([VerifiedRecord(topic, PeerId(peer), self.sequence, math.inf, record)])


@asynccontextmanager
async def running(scene: Scene) -> AsyncGenerator[None]:
    looking = DialBack(
        scene.membership, scene.dial, SystemClock(), on_change=scene.announced.append, notice=scene.notices.append
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(looking.run)
        yield
        tasks.cancel_scope.cancel()


async def test_a_server_that_can_be_dialled_is_dialled_once_and_nothing_is_said() -> None:
    scene = Scene()
    async with running(scene):
        scene.comes("server", "tcp:1.1.1.1:1", stage=None)
        await anyio.wait_all_tasks_blocked()
        scene.comes("server", "tcp:1.1.1.1:1", stage=1)
        await anyio.wait_all_tasks_blocked()
    assert scene.dialled == [("tcp:1.1.1.1:1",)]
    assert (scene.announced, scene.notices) == ([], [])


async def test_one_that_cannot_be_dialled_is_told_with_the_remedy_and_again_when_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dial_back, "RETRY_S", 0.0)
    scene = Scene(reasons={"tcp:1.1.1.1:1": "refused"})
    async with running(scene):
        scene.comes("longpeername", "tcp:1.1.1.1:1")
        await until(lambda: len(scene.dialled) >= 5)
        assert scene.announced == [(Undialled(PeerId("longpeername"), "refused"),)], "said once"
        assert scene.notices[0] == ("server 1@box2 cannot be dialled from this host, so nobody trains over it: refused")
        assert "--public-ip" in scene.notices[1]
        scene.reasons.clear()
        await until(lambda: len(scene.announced) >= 2)
    assert scene.announced[1] == ()
    assert scene.notices[2:] == ["server 1@box2 can be dialled from this host now"]


async def test_one_that_has_ended_and_is_announced_for_a_while_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial_back, "RETRY_S", 0.0)
    scene = Scene(reasons={"tcp:1.1.1.1:1": "refused"})
    async with running(scene):
        scene.comes("server", "tcp:1.1.1.1:1", connects=False)
        await until(lambda: len(scene.dialled) >= 5)
        assert not scene.notices
        await anyio.sleep(0.002)  # records are told apart by milliseconds
        scene.comes("server", "tcp:1.1.1.1:1", connects=False)
        await until(lambda: scene.announced)
    assert scene.announced == [(Undialled(PeerId("server"), "refused"),)], "it lives, and renews its record"


async def test_a_server_at_other_addresses_is_dialled_there_at_once() -> None:
    scene = Scene(reasons={"tcp:1.1.1.1:1": "refused"})
    async with running(scene):
        scene.comes("server", "tcp:1.1.1.1:1")
        await anyio.wait_all_tasks_blocked()
        scene.comes("server", "tcp:2.2.2.2:2")
        await anyio.wait_all_tasks_blocked()
    assert [len(each) for each in scene.announced] == [1, 0]
    assert scene.dialled == [("tcp:1.1.1.1:1",), ("tcp:2.2.2.2:2",)]


async def test_one_that_is_lost_for_its_address_is_not_forgotten_but_one_that_leaves_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dial_back, "RETRY_S", 0.0)
    scene = Scene(reasons={"tcp:1.1.1.1:1": "refused"})
    async with running(scene):
        scene.comes("server", "tcp:1.1.1.1:1")
        await until(lambda: scene.announced)
        scene.membership.lost(PeerId("server"))
        assert not scene.membership.view.replicas
        num_dialled = len(scene.dialled)
        await until(lambda: len(scene.dialled) >= num_dialled + 3)
        assert len(scene.announced) == 1
        scene.says("server", "stage.0", GoneRecord())
        await until(lambda: len(scene.announced) >= 2)
    assert scene.announced[1] == ()
    assert len(scene.notices) == 2, "nobody is told that it can be dialled"


async def test_what_a_record_says_of_them_is_bounded() -> None:
    scene = Scene(reasons={f"tcp:1.1.1.1:{port}": "x" * 1000 for port in range(1, 31)})
    async with running(scene):
        for port in range(1, 31):
            scene.comes(f"server{port}", f"tcp:1.1.1.1:{port}")
        await anyio.wait_all_tasks_blocked()
    assert max(len(each) for each in scene.announced) == MAX_UNDIALLED
    assert {len(each.reason) for each in scene.announced[-1]} == {MAX_REASON_CHARS}


async def test_a_server_hears_of_itself_alone_and_of_each_change_once() -> None:
    scene, heard = Scene(), list[str]()

    def client_says(*undialled: Undialled) -> None:
        scene.says("client", "client", ClientRecord(("tcp:9.9.9.9:9",), 1.0, undialled=undialled))

    me, other = Undialled(PeerId("me"), "refused"), Undialled(PeerId("other"), "silent")
    async with dial_back_heard(scene.membership, PeerId("me"), heard.append):
        for undialled in ((), (other,), (other, me), (me,), (other,)):
            client_says(*undialled)
            await anyio.wait_all_tasks_blocked()
        assert heard == ["refused", ""]
        client_says(me)
        await anyio.wait_all_tasks_blocked()
        # A client that is gone says nothing either way.
        scene.membership.lost(PeerId("client"))
        await anyio.wait_all_tasks_blocked()
    assert heard == ["refused", "", "refused"]
