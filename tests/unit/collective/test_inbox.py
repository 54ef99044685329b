"""Parts of rings before, during and after their ring."""

from __future__ import annotations

import pytest

from shoal.collective.inbox import RingInbox, RingTag
from shoal.errors import RemoteProtocolError
from shoal.ids import Ballot, PeerId
from shoal.transport.base import Received
from shoal.wire.messages.round import AskRound, RingPart
from shoal.wire.tensors import WireTensor

BALLOT = Ballot(1, PeerId("C"), 1)


def tag(epoch: int, ballot: Ballot = BALLOT) -> RingTag:
    return RingTag(1, ballot, epoch)


def part(epoch: int, segment: int = 0, *, ballot: Ballot = BALLOT, stage: int = 0, num_bytes: int = 4) -> Received:
    message = RingPart(ballot, 1, epoch, stage, False, 0, 0, segment)
    return Received(PeerId("R"), message, (WireTensor("uint8", (num_bytes,), memoryview(bytes(num_bytes))),))


pytestmark = pytest.mark.anyio


async def segments(inbox: RingInbox, epoch: int) -> list[int]:
    parts = inbox.open(tag(epoch))
    found = [(await parts.take()).message.segment for _ in range(len(parts))]
    inbox.close()
    return found


async def test_parts_that_come_early_are_kept_in_order() -> None:
    inbox = RingInbox(0, 100)
    assert inbox.receive(part(0, 1))
    assert inbox.receive(part(0, 0))
    assert await segments(inbox, 0) == [1, 0]


async def test_parts_of_the_open_ring_are_passed_on() -> None:
    inbox = RingInbox(0, 100)
    parts = inbox.open(tag(0))
    inbox.receive(part(0, 5))
    assert (await parts.take()).message.segment == 5


async def test_parts_of_an_earlier_or_ended_ring_are_dropped() -> None:
    inbox = RingInbox(0, 100)
    assert await segments(inbox, 1) == []
    inbox.receive(part(0))
    inbox.receive(part(1))
    assert await segments(inbox, 2) == []


async def test_a_newer_epoch_replaces_what_waits_for_an_older_one() -> None:
    inbox = RingInbox(0, 100)
    inbox.receive(part(1, 7))
    inbox.receive(part(2, 8))
    inbox.receive(part(1, 9))
    assert await segments(inbox, 2) == [8]


async def test_parts_of_a_higher_ballot_wait_while_a_ring_runs() -> None:
    inbox = RingInbox(0, 100)
    higher = Ballot(2, PeerId("D"), 1)
    parts = inbox.open(tag(3))
    inbox.receive(part(0, 6, ballot=higher))
    assert len(parts) == 0
    newer = inbox.open(tag(0, higher))
    assert (await newer.take()).message.segment == 6


def test_more_than_a_ring_can_have_sent_is_refused() -> None:
    inbox = RingInbox(0, 10)
    inbox.receive(part(0, 0, num_bytes=8))
    with pytest.raises(RemoteProtocolError, match="at most 10"):
        inbox.receive(part(0, 1, num_bytes=8))


@pytest.mark.parametrize("event", [part(0, stage=1), Received(PeerId("R"), part(0).message, ())])
def test_a_part_that_is_none_is_refused(event: Received) -> None:
    with pytest.raises(RemoteProtocolError, match="ring part"):
        RingInbox(0, 10).receive(event)


def test_other_messages_are_left_to_others() -> None:
    assert not RingInbox(0, 10).receive(Received(PeerId("R"), AskRound(BALLOT), ()))
