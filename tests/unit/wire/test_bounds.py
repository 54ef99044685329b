"""What a number in a message may be: nothing that a role could not count on from, index with, or write down as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

from shoal.control import records
from shoal.errors import RemoteProtocolError
from shoal.ids import MAX_SLOTS, Ballot, PeerId, StepKey
from shoal.transport.limits import DEFAULT_LIMITS
from shoal.wire.frame import encode_frame
from shoal.wire.frame_decoder import FrameDecoder
from shoal.wire.messages import FeedMessage, Message
from shoal.wire.messages.base import Hop, ReplicaRef, RouterReport, SampleRange, StepRange
from shoal.wire.messages.control import MetricReport, Metrics, RunOver, RunStatus, StartRound, UpdateReplicas
from shoal.wire.messages.inner import AskInner
from shoal.wire.messages.round import (
    Basis,
    Join,
    Payload,
    PayloadReady,
    Propose,
    Record,
    RoundState,
    StageHashes,
    StaleBallot,
    Swapped,
)
from shoal.wire.messages.snapshot import Snapshot
from shoal.wire.messages.step import Abort, Broken, Commit, MicrobatchDone, Prepared, StepEntry
from shoal.wire.messages.transfer import ContentKind, ContentName, Want

from .decoded import decoded

KEY, BALLOT, BYTES = StepKey(1, 0, 7, 2), Ballot(3, PeerId("client"), 1), StageHashes("a", "b", "c")
HUGE = (1 << 64) - 1
PAYLOAD = Payload("0" * 64, 1 << 62)
PAYLOAD_READY = PayloadReady(1, "hash", 0, PAYLOAD)

# Whoever receives these asks whether they are finite, or shows them and does nothing else with them.
MAY_BE_ANY = {
    "EvalReport.loss_sum",
    "EvalResult.loss",
    "Join.gradient_norm",
    "Metrics.values",
    "Prepared.loss",
    "Prepared.squared_norm",
    "RouterReport.load_cv",
    "RouterReport.loss",
    "StepReport.grad_norm",
    "StepReport.loss",
    # Compared with what is there, and nothing else.
    "AskSnapshot.generation",
    "SharedVector.inode",
}
# They come from the host's own processes, or are shown to who has asked, and nothing is counted up to them.
OF_OWN_HOST = {kind.__name__ for kind in get_args(FeedMessage)} | {"TensorPlace", "HeldBatch"}
FOR_PEOPLE = {"RunStatus", "ServerNumbers", "SeenPeer"}


def numbers(
    kind: inspect.Type, place: str, seen: set[type]
) -> Iterator[tuple[str, inspect.IntType | inspect.FloatType]]:
    match kind:
        case inspect.StructType() | inspect.NamedTupleType():
            if kind.cls in seen:
                return
            seen.add(kind.cls)
            for field in kind.fields:
                yield from numbers(field.type, f"{kind.cls.__name__}.{field.name}", seen)
        case inspect.UnionType(types):
            for each in types:
                yield from numbers(each, place, seen)
        case inspect.VarTupleType():
            yield from numbers(kind.item_type, place, seen)
        case inspect.DictType():
            yield from numbers(kind.key_type, place, seen)
            yield from numbers(kind.value_type, place, seen)
        case inspect.IntType() | inspect.FloatType():
            yield place, kind
        case _:
            pass


def test_every_number_that_another_host_says_has_two_bounds() -> None:
    seen: set[type] = set()
    types = (*get_args(Message), Record, Snapshot, *get_args(records.Record), records._Envelope)
    found = [each for kind in types for each in numbers(inspect.type_info(kind), kind.__name__, seen)]
    assert len(found) > 100
    loose = {
        place
        for place, number in found
        if None in (number.ge if number.gt is None else number.gt, number.le if number.lt is None else number.lt)
    }
    assert {place for place in loose if place.partition(".")[0] not in OF_OWN_HOST | FOR_PEOPLE} == MAY_BE_ANY


def state(stage: int = 0, base_round: int = 0) -> RoundState:
    return RoundState(BALLOT, stage, base_round, None, None, Hop(PeerId("a"), ()), "", Basis(0, BYTES))


def join(**changes: Any) -> Join:
    entry = StepEntry(KEY, (), 0, (SampleRange(0, 0, 4),), 4, 4, 1.0, 0.1, False)
    return Join(BALLOT, 1, 0, 4, (), (msgspec.structs.replace(entry, **changes),), ())


@pytest.mark.parametrize(
    "message",
    [
        StaleBallot(Ballot(HUGE, PeerId("client"), 1)),
        StaleBallot(Ballot(-1, PeerId("client"), 1)),
        Abort(StepKey(MAX_SLOTS, 0, 0, 0)),
        Abort(StepKey(0, HUGE, 0, 0)),
        Abort(StepKey(0, 0, -1, 0)),
        MicrobatchDone(KEY, -1),
        Broken(KEY, PeerId("x" * 129)),
        Commit(KEY, math.nan, 0.1, False),
        Commit(KEY, 1.0, math.inf, False),
        Commit(KEY, -1.0, 0.1, False),
        state(stage=-100),
        state(base_round=-2),
        state(base_round=HUGE),
        join(samples=(SampleRange(0, 0, HUGE),)),
        join(samples=(SampleRange(0, -5, 4),)),
        join(samples=(SampleRange(1 << 33, 0, 4),)),
        join(scale=math.nan),
        join(lr=math.nan),
        join(lr=math.inf),
        Swapped(1, 0, "hash", BYTES, {"state": HUGE}),
        Swapped(1, 0, "hash", BYTES, {f"traffic {number}": 1 for number in range(65)}),
        Want(ContentName(ContentKind.START, -1, "")),
        AskInner(1 << 20, ""),
        RunOver(False, "x" * 301),
        RunStatus("", 1, 1, 1, 1, None, None, 0.0, None, (), num_stages=4097),
    ],
    ids=lambda message: f"{type(message).__name__} {message!r}"[:60],
)
def test_a_number_that_a_role_could_not_use_is_no_message(message: Message) -> None:
    raw = b"".join(encode_frame(message).in_one_piece())
    with pytest.raises(RemoteProtocolError, match="fits no message"):
        list(decoded(FrameDecoder(), raw))


def test_what_is_counted_on_from_the_highest_number_can_be_sent_and_taken() -> None:
    ballot = Ballot(1 << 32, PeerId("client"), 1 << 31)
    raw = b"".join(encode_frame(StaleBallot(ballot)).in_one_piece())
    [frame] = decoded(FrameDecoder(), raw)
    assert frame.message == StaleBallot(ballot)


def test_the_samples_of_a_range_that_ends_before_it_begins_are_none() -> None:
    assert len(SampleRange(0, 4, 1)) == 0


MOST = DEFAULT_LIMITS.max_connections
LONGEST = Hop(PeerId("p" * 128), ("a" * 512,) * 16)
EACH = tuple(ReplicaRef(LONGEST, 1 << 62) for _ in range(MOST // 2))


@pytest.mark.parametrize(
    "message",
    [
        UpdateReplicas((EACH, EACH)),
        StartRound(1, 0, 1, StepRange(0, 1), (LONGEST,) * 64, (EACH, EACH), None),
        Propose(BALLOT, 1, 0, 0, (LONGEST,) * MOST, (1 << 62,) * MOST, (1.0,) * MOST, (PAYLOAD,) * MOST),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_names_all_peers_that_can_be_connected_can_be_sent_and_taken(message: Message) -> None:
    """Else who has to name them ends, and whoever makes them long has ended it."""
    raw = b"".join(encode_frame(message).in_one_piece())
    assert [frame.message for frame in decoded(FrameDecoder(), raw)] == [message]


@pytest.mark.parametrize(
    "message",
    [
        Prepared(KEY, 0, 0, 1.0, True, 1.0, (RouterReport(1.0, 1.0, "loss\n"),)),
        msgspec.structs.replace(PAYLOAD_READY, payload=Payload("0" * 63 + "\n", 1)),
        msgspec.structs.replace(PAYLOAD_READY, payload=Payload("0" * 64 + "\n", 1)),
        Metrics("client", PeerId("c"), 1, {"loss\n": 1.0}),
        Metrics("client\n", PeerId("c"), 1, {}),
        MetricReport("server", {"step.committed\n": 1}, {}, {}),
        MetricReport("server\n", {}, {}, {}),
    ],
    ids=lambda message: f"{type(message).__name__} {message!r}"[:60],
)
def test_no_line_ends_behind_a_name(message: Message) -> None:
    raw = b"".join(encode_frame(message).in_one_piece())
    with pytest.raises(RemoteProtocolError, match="fits no message"):
        list(decoded(FrameDecoder(), raw))
