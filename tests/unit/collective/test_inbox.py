"""Parts of operations before, during and after them; parts of groups before and after."""

from __future__ import annotations

import pytest

from shoal.collective.inbox import Arrivals, GroupInbox
from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId
from shoal.transport.base import Received
from shoal.wire.messages.collective import RingPart, RingTaken
from shoal.wire.messages.control import Heartbeat
from shoal.wire.tensors import WireTensor

R, Q = PeerId("R"), PeerId("Q")


def age_of(tag: bytes) -> int:
    """Tags are numbers as people write them; who sends something else is refused."""
    if not tag.isdigit():
        raise RemoteProtocolError(f"{tag!r} is no tag")
    return int(tag)


def part(tag: bytes, segment: int = 0, *, operation: int = 0, num_bytes: int = 4, sender: PeerId = R) -> Received:
    message = RingPart(tag, operation, False, 0, 0, segment)
    return Received(sender, message, (WireTensor("uint8", (num_bytes,), memoryview(bytes(num_bytes))),))


def segments(arrivals: Arrivals) -> list[int]:
    """What has come for the next operation, which this ends."""
    parts = arrivals.begin()
    found = [part.message.segment for part in parts._items if isinstance(part.message, RingPart)]
    arrivals.end(parts.number)
    return found


@pytest.fixture
def inbox() -> GroupInbox:
    return GroupInbox(age_of, 100)


def test_parts_that_come_before_their_group_are_kept_in_order(inbox: GroupInbox) -> None:
    assert inbox.receive(part(b"0", 1))
    assert inbox.receive(part(b"0", 0))
    assert segments(inbox.open(b"0", [R, Q])) == [1, 0]


async def test_parts_of_a_running_operation_are_passed_on(inbox: GroupInbox) -> None:
    parts = inbox.open(b"0", [R, Q]).begin()
    inbox.receive(part(b"0", 5))
    assert (await anext(parts)).message == part(b"0", 5).message


def test_parts_of_an_earlier_or_closed_group_are_dropped(inbox: GroupInbox) -> None:
    assert segments(inbox.open(b"1", [R, Q])) == []
    inbox.close()
    inbox.receive(part(b"0"))
    inbox.receive(part(b"1", operation=1))
    assert segments(inbox.open(b"2", [R, Q])) == []


def test_a_newer_group_replaces_what_waits_for_an_older_one(inbox: GroupInbox) -> None:
    inbox.receive(part(b"1", 7))
    inbox.receive(part(b"2", 8))
    inbox.receive(part(b"1", 9))
    assert segments(inbox.open(b"2", [R, Q])) == [8]


def test_what_waits_for_an_older_group_than_the_one_that_opens_is_dropped_and_for_a_newer_one_kept() -> None:
    inbox = GroupInbox(age_of, 4)
    inbox.receive(part(b"1", 7))
    assert segments(inbox.open(b"2", [R, Q])) == []
    inbox.receive(part(b"4", 8))
    assert segments(inbox.open(b"3", [R, Q])) == []
    assert segments(inbox.open(b"4", [R, Q])) == [8]


def test_parts_of_a_newer_group_wait_while_an_operation_runs(inbox: GroupInbox) -> None:
    parts = inbox.open(b"3", [R, Q]).begin()
    inbox.receive(part(b"9", 6))
    assert len(parts) == 0
    assert segments(inbox.open(b"9", [R, Q])) == [6]


def test_the_same_tag_in_other_bytes_is_the_same_group(inbox: GroupInbox) -> None:
    inbox.receive(part(b"03", 1))
    inbox.receive(part(b"3", 2))
    arrivals = inbox.open(b"3", [R, Q])
    inbox.receive(part(b"003", 3))
    assert segments(arrivals) == [1, 2, 3]


def test_each_of_several_operations_has_its_own_parts(inbox: GroupInbox) -> None:
    inbox.receive(part(b"0", 1, operation=1))
    arrivals = inbox.open(b"0", [R, Q])
    first, second = arrivals.begin(), arrivals.begin()
    inbox.receive(part(b"0", 0, operation=0))
    inbox.receive(part(b"0", 2, operation=1))
    assert (first.number, len(first)) == (0, 1)
    assert (second.number, len(second)) == (1, 2)


def test_parts_of_an_operation_that_has_ended_are_dropped_and_of_one_to_come_kept() -> None:
    inbox = GroupInbox(age_of, 4)
    arrivals = inbox.open(b"0", [R, Q])
    arrivals.begin()
    second = arrivals.begin()
    arrivals.end(0)
    for operation in (2, 0, 1):
        inbox.receive(part(b"0", operation, operation=operation))
    assert len(second) == 1
    assert segments(arrivals) == [2]


def test_more_than_members_can_have_sent_is_refused_and_what_has_begun_counts_no_more() -> None:
    inbox = GroupInbox(age_of, 10)
    arrivals = inbox.open(b"0", [R, Q])
    for operation in range(3):
        inbox.receive(part(b"0", operation=operation, num_bytes=8))
        assert segments(arrivals) == [0]
    inbox.receive(part(b"0", operation=3, num_bytes=8))
    with pytest.raises(RemoteProtocolError, match="at most 10"):
        inbox.receive(part(b"0", operation=4, num_bytes=8))


def test_who_sends_too_much_loses_it_and_takes_no_room_from_others() -> None:
    inbox = GroupInbox(age_of, 20)
    inbox.receive(part(b"0", 1, num_bytes=13, sender=Q))
    inbox.receive(part(b"0", 2, num_bytes=4))
    inbox.receive(part(b"0", 3, num_bytes=4))
    assert segments(inbox.open(b"0", [R, Q])) == [2, 3]


def test_who_names_a_group_that_is_never_opened_is_in_nobodys_way() -> None:
    inbox = GroupInbox(age_of, 100)
    inbox.receive(part(b"999", 1, sender=Q))
    for tag in (b"1", b"2"):
        inbox.receive(part(tag, int(tag)))
        assert segments(inbox.open(tag, [R, Q])) == [int(tag)]


def test_who_is_no_member_is_refused_and_what_it_has_sent_before_is_dropped(inbox: GroupInbox) -> None:
    inbox.receive(part(b"0", 1, sender=PeerId("X")))
    inbox.receive(part(b"0", 2))
    arrivals = inbox.open(b"0", [R, Q])
    for event in (part(b"0", 3, sender=PeerId("X")), Received(PeerId("X"), RingTaken(b"0", 0), ())):
        with pytest.raises(RemoteProtocolError, match="no member"):
            inbox.receive(event)
    assert segments(arrivals) == [2]


def test_a_member_that_is_ahead_sends_for_the_open_group_and_for_a_newer_one(inbox: GroupInbox) -> None:
    arrivals = inbox.open(b"0", [R, Q])
    inbox.receive(part(b"0", 1))
    inbox.receive(part(b"1", 2))
    assert segments(arrivals) == [1]
    assert segments(inbox.open(b"1", [R, Q])) == [2]


def test_a_member_that_was_early_and_goes_ahead_keeps_what_it_has_sent_for_the_open_group(inbox: GroupInbox) -> None:
    inbox.receive(part(b"0", 1, operation=1))
    arrivals = inbox.open(b"0", [R, Q])
    inbox.receive(part(b"1", 2))
    assert segments(arrivals) == []
    assert segments(arrivals) == [1]
    assert segments(inbox.open(b"1", [R, Q])) == [2]


@pytest.mark.parametrize(
    "event", [Received(R, part(b"0").message, ()), Received(R, RingTaken(b"0", 0), part(b"0").tensors), part(b"x")]
)
def test_a_part_that_is_none_is_refused(event: Received, inbox: GroupInbox) -> None:
    with pytest.raises(RemoteProtocolError, match=r"tensors|no tag"):
        inbox.receive(event)


def test_other_messages_are_left_to_others(inbox: GroupInbox) -> None:
    assert not inbox.receive(Received(R, Heartbeat(), ()))
