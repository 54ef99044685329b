"""Which parts of rings a replica takes: those of quorums of its own stage, the newest quorum first."""

from __future__ import annotations

import itertools

import pytest
from tests.unit.averaging.conftest import FakeStage, InlineDevice

from shoal.averaging.replica_state import ReplicaState
from shoal.averaging.round_average import DEFAULT_RING, RoundAverage
from shoal.errors import RemoteProtocolError
from shoal.ids import Ballot, PeerId
from shoal.optim.outer import OuterSgd
from shoal.transport.base import Received
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages.collective import MAX_TAG_BYTES, RingTaken
from shoal.wire.messages.round import QuorumTag

BALLOT = Ballot(1, PeerId("C"), 1)


def average() -> RoundAverage:
    state = ReplicaState(FakeStage(10), OuterSgd(lr=0.5, momentum=0.9, nesterov=True))
    return RoundAverage(
        MemoryNetwork().endpoint(PeerId("R0")), 0, state, InlineDevice(), DEFAULT_RING, blame=lambda _: None
    )


@pytest.mark.parametrize(
    "tag",
    [
        QuorumTag(1, BALLOT, 0, 1).encoded(),
        QuorumTag(1, BALLOT, 0, 0).encoded().replace(b"\xa1C", b"\xa1\xff"),
        b"\x91" * 256,
        b"\x93\x01\x02\x03",
        b"\xc1",
        b"",
    ],
)
def test_a_part_of_another_stage_or_of_no_quorum_is_refused(tag: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=r"stage 1|no tag of a quorum"):
        average().receive(Received(PeerId("R1"), RingTaken(tag, 0), ()))


def test_a_quorum_is_newer_by_its_round_then_its_ballot_then_its_epoch() -> None:
    rising = [
        QuorumTag(1, Ballot(2, PeerId("C"), 1), 9, 0),
        QuorumTag(2, BALLOT, 7, 0),
        QuorumTag(2, BALLOT, 8, 0),
        QuorumTag(2, Ballot(1, PeerId("D"), 1), 0, 0),
        QuorumTag(2, Ballot(2, PeerId("C"), 1), 0, 0),
    ]
    assert all(older < newer for older, newer in itertools.pairwise(rising))
    assert [QuorumTag.decoded(tag.encoded()) for tag in rising] == rising


def test_the_tag_of_a_quorum_fits_into_a_message_whoever_coordinates() -> None:
    peer = PeerId("1" * 60)  # of an Ed25519 key: 52
    assert len(QuorumTag(1 << 62, Ballot(1 << 62, peer, 1 << 62), 1 << 62, 1 << 62).encoded()) <= MAX_TAG_BYTES
