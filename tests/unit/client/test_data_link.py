"""The client's link to its data server: one that can be dialled and says nothing is replaced, and only such a one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from tests.alongside import alongside, until
from tests.unit.client.noted import NotedLedger

from shoal.client import data_link
from shoal.client.data_link import DataLink
from shoal.client.run_driver import ClientFacts
from shoal.clock import SystemClock
from shoal.errors import RemoteProtocolError
from shoal.events.data import DataAwaited, SamplesUnknown
from shoal.events.losses import DataServerBack, LossFound
from shoal.events.run import DataSized
from shoal.events.trainers import DataServerFrozen
from shoal.ids import PeerId
from shoal.runtime.launcher_messages import ReplaceDataServer
from shoal.transport.base import Received
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages.base import SampleRange, StepRange
from shoal.wire.messages.feed import (
    BatchesAwaited,
    DataHello,
    HoldoutInfo,
    PauseLeases,
    PlanRound,
    RecordSamples,
    ResumeRound,
    WindowsRead,
)

CLIENT, SERVER = PeerId("client"), PeerId("data")
NOBODY: Any = None


class Desk:
    """A client, and a data server that is reached and of which the test says what it answers."""

    def __init__(self) -> None:
        network = MemoryNetwork()
        self.server = network.endpoint(SERVER)
        self.ledger = NotedLedger()
        self.replaced = 0
        self.asked = anyio.Event()
        self.link = DataLink(
            endpoint=network.endpoint(CLIENT),
            data_server=self.server.hop,
            clock=SystemClock(),
            ledger=self.ledger,
            trainers=SimpleNamespace(present={}, generations={}),  # type: ignore[arg-type]
            launcher=self,  # type: ignore[arg-type]
        )

    async def hello(self) -> None:
        async for event in self.server.events():
            if isinstance(event, Received) and isinstance(event.message, DataHello):
                return

    async def request(self, asked: ReplaceDataServer) -> None:
        self.replaced += 1
        self.asked.set()


async def test_a_data_server_that_is_dialled_and_says_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_link, "_FROZEN_S", 0.05)
    desk = Desk()
    async with alongside(desk.link.run):
        desk.link.peer_lost(SERVER)
        await desk.asked.wait()
        assert desk.replaced == 1


async def test_each_that_follows_one_that_was_replaced_has_twice_as_long_until_one_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_link, "_FROZEN_S", 0.01)
    desk = Desk()
    async with alongside(desk.link.run):
        for is_back in (False, False, True, False):
            if is_back:
                desk.link.receive(Received(SERVER, HoldoutInfo(1, 1, 1)))
            desk.asked = anyio.Event()
            desk.link.peer_lost(SERVER)
            await desk.asked.wait()
    frozen = [event.waited_s for event in desk.ledger.noted if isinstance(event, DataServerFrozen)]
    assert frozen == [0.01, 0.02, 0.01, 0.02]


@pytest.mark.parametrize("is_back", [True, False])
async def test_one_that_answers_or_cannot_be_dialled_is_not(monkeypatch: pytest.MonkeyPatch, is_back: bool) -> None:
    monkeypatch.setattr(data_link, "_FROZEN_S", 1.5)
    desk = Desk()
    async with alongside(desk.link.run):
        desk.link.peer_lost(SERVER)
        with anyio.move_on_after(2.5):
            while True:
                await desk.hello()
                if is_back:
                    desk.link.receive(Received(SERVER, HoldoutInfo(1, 1, 1)))
                else:
                    desk.link.peer_lost(SERVER)
        assert desk.replaced == 0


async def test_a_data_server_is_told_of_which_chain_the_samples_are() -> None:
    desk = Desk()
    desk.link.know(3, (SampleRange(0, 0, 8),), "a chain")
    desk.link.record(4, (SampleRange(0, 8, 9),))
    told: list[object] = []
    async for event in desk.server.events():
        told += [event.message] if isinstance(event, Received) else []
        if len(told) == 2:
            break
    assert told == [
        RecordSamples(3, (SampleRange(0, 0, 8),), "a chain"),
        RecordSamples(4, (SampleRange(0, 8, 9),), "a chain"),
    ]


async def test_a_data_server_that_was_started_again_is_told_of_the_marks_of_the_records_and_not_of_what_was_read() -> (
    None
):
    desk = Desk()
    desk.link.know(3, (SampleRange(0, 0, 8),), "a chain", b"held outwindow 0")
    desk.link.receive(Received(SERVER, WindowsRead(b"held outwindow 0window 1window 2")))
    assert desk.link.marks == b"held outwindow 0window 1window 2"
    desk.link.record(4, (SampleRange(1, 0, 8),), b"held outwindow 0window 1")
    told: list[RecordSamples] = []
    async with alongside(desk.link.run):
        desk.link.peer_lost(SERVER)
        async for event in desk.server.events():
            if isinstance(event, Received) and isinstance(event.message, RecordSamples):
                told.append(event.message)
                if len(told) == 3:
                    break
    assert [(each.round, each.marks) for each in told] == [
        (3, b"held outwindow 0"),
        (4, b""),
        (4, b"held outwindow 0window 1"),
    ]
    assert desk.link.recorded_marks == told[-1].marks
    assert desk.link.marks == b"held outwindow 0window 1window 2", "until the next one says more"


async def test_only_the_data_server_of_the_host_says_what_was_read() -> None:
    desk = Desk()
    with pytest.raises(RemoteProtocolError, match="WindowsRead from trainer, which is not the data server"):
        desk.link.receive(Received(PeerId("trainer"), WindowsRead(b"held out")))


async def test_a_data_server_that_was_started_again_hears_of_a_pause_before_it_can_lease_anything() -> None:
    desk = Desk()
    told: list[object] = []
    async with alongside(desk.link.run):
        desk.link.plan(1, 1, StepRange(0, 4), ())
        desk.link.pause(paused=True)
        desk.link.peer_lost(SERVER)
        async for event in desk.server.events():
            told += [event.message] if isinstance(event, Received) else []
            if told and isinstance(told[-1], DataHello):
                break
        desk.link.pause(paused=False)
        desk.link.receive(Received(SERVER, HoldoutInfo(1, 1, 1)))
        async for event in desk.server.events():
            told += [event.message] if isinstance(event, Received) else []
            break
    assert list(map(type, told)) == [PlanRound, PauseLeases, PauseLeases, ResumeRound, DataHello, PauseLeases]
    assert [each.paused for each in told if isinstance(each, PauseLeases)] == [True, True, False]


async def test_a_data_server_that_was_replaced_while_there_was_no_client_is_back_with_its_first_answer() -> None:
    desk = Desk()
    desk.ledger.note(LossFound("data_server", "the data server", (0,), 5.0, 6.0))
    for _ in range(2):
        desk.link.receive(Received(SERVER, HoldoutInfo(1, 1, 1)))
    assert [event for event in desk.ledger.noted if isinstance(event, DataServerBack)] == [
        DataServerBack(1, desk.ledger.totals.incidents.all[0].back_s or 0.0)
    ]


async def test_a_data_server_is_told_of_no_samples_that_its_data_do_not_have() -> None:
    """It would end the connection each time, and be dialled again each time."""
    desk = Desk()
    desk.ledger.note(DataSized(64, 0))
    desk.link.know(3, (SampleRange(0, 0, 64), SampleRange(7, 60, 1 << 40), SampleRange(8, 64, 65)), "")
    desk.link.record(4, (SampleRange(1, 0, 8), SampleRange(1, 100, 104)))
    told: list[object] = []
    async for event in desk.server.events():
        told += [event.message] if isinstance(event, Received) else []
        if len(told) == 2:
            break
    assert told == [
        RecordSamples(3, (SampleRange(0, 0, 64), SampleRange(7, 60, 64))),
        RecordSamples(4, (SampleRange(1, 0, 8),)),
    ]
    said = [event for event in desk.ledger.noted if isinstance(event, SamplesUnknown)]
    assert said == [SamplesUnknown((1 << 40) - 64 + 1, 64)]


async def test_nobody_is_fed_while_the_data_server_is_lost_or_has_no_samples_for_who_asks() -> None:
    desk = Desk()
    facts = ClientFacts(NOBODY, NOBODY, NOBODY, NOBODY, NOBODY, desk.link, NOBODY, NOBODY)
    assert not facts.is_unfed
    desk.link.receive(Received(SERVER, BatchesAwaited(True)))
    assert facts.is_unfed
    desk.link.receive(Received(SERVER, BatchesAwaited(False)))
    assert not facts.is_unfed
    desk.link.receive(Received(SERVER, BatchesAwaited(True)))
    desk.link.peer_lost(SERVER)
    async with alongside(desk.link.run):
        await desk.hello()
        # The next one says so itself, if it has none either.
        desk.link.receive(Received(SERVER, HoldoutInfo(1, 1, 1)))
        assert not facts.is_unfed
    with pytest.raises(RemoteProtocolError, match="BatchesAwaited from client"):
        desk.link.receive(Received(CLIENT, BatchesAwaited(True)))


@pytest.mark.parametrize("is_lost", [True, False])
async def test_that_samples_are_waited_for_is_said_again_and_again(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    monkeypatch.setattr(data_link, "_SAY_EVERY_S", 0.0)
    monkeypatch.setattr(data_link, "_FROZEN_S", 60.0)
    desk = Desk()

    def num_said() -> int:
        return sum(isinstance(event, DataAwaited) for event in desk.ledger.noted)

    async with alongside(desk.link.run):
        if is_lost:
            desk.link.peer_lost(SERVER)
        else:
            desk.link.receive(Received(SERVER, BatchesAwaited(True)))
        await until(lambda: num_said() >= 3)
        if is_lost:
            await desk.hello()
            desk.link.receive(Received(SERVER, HoldoutInfo(1, 1, 1)))
        else:
            desk.link.receive(Received(SERVER, BatchesAwaited(False)))
        await anyio.wait_all_tasks_blocked()
        before = num_said()
        await anyio.wait_all_tasks_blocked()
        assert num_said() == before
    assert "training has stood still for 0 s: no samples come from the data server" in desk.ledger.said
