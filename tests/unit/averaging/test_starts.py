"""D_0 goes from who has it to who has not, until a record stands."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest
import torch
from tests.alongside import alongside, until
from tests.set_clock import SetClock
from torch import Tensor, nn

from shoal.averaging.contents import Contents
from shoal.averaging.starts import StartFetch, Starts
from shoal.checkpoint.model_layout import StageLayout
from shoal.clock import SystemClock
from shoal.events.state import StartNobody
from shoal.ids import PeerId
from shoal.swarm.content_transfer import Late, Nobody, TransferSettings
from shoal.swarm.view import ClientPeer, MirrorPeer, SwarmView
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages import Hop
from shoal.wire.messages.transfer import ContentKind, ContentName, Want

LAYOUT = StageLayout.of(nn.Linear(3, 2))
WEIGHTS = [torch.arange(8.0), torch.empty(0), torch.empty(0, dtype=torch.int64)]
SETTINGS = TransferSettings(retry_s=0.02)


class Swarm:
    """A mirror that has the files, or has others, and a server that has none."""

    def __init__(self, given: Sequence[Tensor] | None = None) -> None:
        network = MemoryNetwork(seed=0)
        self.mirror, self.server = network.endpoint(PeerId("mirror")), network.endpoint(PeerId("server"))
        self.view = SwarmView(mirrors=(MirrorPeer(self.mirror.hop),))
        self.read: list[int] = []
        self.given = given
        clock = SystemClock()
        contents = [Contents(endpoint, clock, chunk_bytes=8) for endpoint in (self.mirror, self.server)]
        more = {"view": lambda: self.view, "settings": SETTINGS}
        self.giving = Starts(contents[0], "genesis", 2, read=self._read, **more)  # type: ignore[arg-type]
        self.taking = Starts(contents[1], "genesis", 2, **more)  # type: ignore[arg-type]

    async def _read(self, stage: int) -> Sequence[Tensor] | None:
        self.read.append(stage)
        return self.given

    async def fetched(self) -> Sequence[Tensor] | None:
        async with alongside(self.giving.run) as tasks:
            tasks.start_soon(self.taking.run)
            tasks.start_soon(dispatch, self.mirror, (self.giving,))
            tasks.start_soon(dispatch, self.server, (self.taking,))
            return await self.taking.fetch(1, LAYOUT, self._are_right)

    def _are_right(self, vectors: Sequence[Tensor]) -> bool:
        return all(torch.equal(mine, theirs) for mine, theirs in zip(vectors, WEIGHTS, strict=True))

    def commit(self) -> None:
        """A record is mirrored."""
        self.view = SwarmView(mirrors=(MirrorPeer(self.mirror.hop, 1),))


async def test_what_is_wanted_is_read_once_and_given() -> None:
    swarm = Swarm(WEIGHTS)
    found = await swarm.fetched()
    assert found is not None
    assert swarm._are_right(found)
    assert swarm.read == [1]


async def test_weights_of_a_stage_that_the_model_lacks_are_not_read() -> None:
    swarm = Swarm(WEIGHTS)
    strange = Want(ContentName(ContentKind.START, 2, "genesis"))
    async with alongside(swarm.giving.run) as tasks:
        tasks.start_soon(dispatch, swarm.mirror, (swarm.giving,))
        swarm.server.introduce(swarm.mirror.hop)
        for message in (strange, Want(ContentName(ContentKind.START, 1, "genesis"))):
            swarm.server.post(PeerId("mirror"), message)
        await until(lambda: swarm.read)
    assert swarm.read == [1]


@pytest.mark.parametrize("is_resumed", [False, True])
async def test_once_a_record_stands_nobody_waits_for_d_0(is_resumed: bool) -> None:
    swarm = Swarm()
    async with anyio.create_task_group() as tasks:

        async def commit() -> None:
            await until(lambda: swarm.read)
            swarm.commit()
            if is_resumed:
                swarm.view = SwarmView(clients=(ClientPeer(Hop(PeerId("client"), ()), 0.0, resumed=True),))

        tasks.start_soon(commit)
        assert await swarm.fetched() is None


async def test_other_weights_are_not_taken_and_who_has_the_right_ones_is_waited_for() -> None:
    swarm = Swarm([WEIGHTS[0] + 1, *WEIGHTS[1:]])
    async with anyio.create_task_group() as tasks:

        async def come() -> None:
            await until(lambda: swarm.read)
            await anyio.sleep(0.1)
            swarm.commit()

        tasks.start_soon(come)
        assert await swarm.fetched() is None


async def test_what_is_withdrawn_is_not_given() -> None:
    swarm = Swarm(WEIGHTS)
    swarm.giving.offer(1, WEIGHTS)
    swarm.giving.withdraw()
    with anyio.move_on_after(0.2):
        assert await swarm.fetched() is None
    assert swarm.read == []


async def test_that_nobody_has_the_weights_is_said_once_after_a_while_and_that_they_are_late_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, notices = SetClock(0.0), list[str]()
    contents = Contents(MemoryNetwork(seed=0).endpoint(PeerId("server")), clock, chunk_bytes=8)
    name = ContentName(ContentKind.START, 1, "genesis")
    fetch = StartFetch(contents, name, WEIGHTS, SETTINGS, SwarmView, lambda _: True)
    fetch.notice = notices.append
    fetch.report(Late(2, 4))
    assert caplog.records[-1].getMessage() == "state.late"
    fetch.report(Nobody())
    for clock.now in (0.0, 1e6, 2e6):
        assert not fetch.is_lost(is_offered=False, base_round=0)
    assert caplog.records[-1].getMessage() == "state.start_nobody"
    assert notices[0] == StartNobody(1).say()
    assert notices.count(notices[0]) == 1
