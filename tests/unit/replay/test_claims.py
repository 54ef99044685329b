"""What a replay compares of a record with the step logs alone."""

from __future__ import annotations

from msgspec.structs import replace
from tests.unit.swarm.test_records import BALLOT, build, entry, join, quorum

from shoal.ids import PeerId
from shoal.replay.claims import record_follows
from shoal.swarm.records import Tip, build_record
from shoal.wire.messages.round import Record

PREVIOUS = Tip(4, "hash of D_4", None)
LOGS = {PeerId("a"): (0, (entry(0, "a"),)), PeerId("b"): (0, (entry(1, "b"),))}


def with_scales(*scales: float) -> Record:
    stage = replace(quorum(0, "a", "b"), scales=scales)
    return build_record(
        run_id="run",
        previous=PREVIOUS,
        ballot=BALLOT,
        quorums=[stage],
        joins={peer: join(stage, *log) for peer, (stage, log) in LOGS.items()},
        recorded=(),
        generations={},
        restored={},
    )


def test_the_steps_of_a_member_that_did_not_count_are_lost_in_both() -> None:
    record = with_scales(0.0, 1.0)
    assert [stage.steps_lost for stage in record.stages] == [1], "the other member has not trained it"
    assert list(record_follows(record, PREVIOUS, LOGS, ())) == []


def test_a_record_that_says_otherwise_than_the_logs_is_named() -> None:
    record = with_scales()
    lies = replace(record, stages=(replace(record.stages[0], steps_lost=3),), samples=())
    [samples, lost] = record_follows(lies, PREVIOUS, LOGS, ())
    assert "samples" in samples.what
    assert lost.what == "3 lost steps in the record, 0 by the step log"


def test_a_record_without_scales_follows() -> None:
    record = build([quorum(0, "a", "b")], {str(peer): join(stage, *log) for peer, (stage, log) in LOGS.items()})
    assert list(record_follows(record, PREVIOUS, LOGS, ())) == []
