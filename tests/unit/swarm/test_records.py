"""What a round record says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from tests.unowned_keys import NON_CANONICAL, SIGNATURE, SMALL_ORDER, peer_id

from shoal.errors import SignatureError
from shoal.identity import verify
from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm.records import (
    Tip,
    build_record,
    genesis_hash,
    outcome_of,
    rebase_record,
    record_hash,
    seal,
    trained,
    unseal,
    used_samples,
)
from shoal.wire.messages.base import Era, SampleRange
from shoal.wire.messages.round import Basis, Join, Origin, Record, StageHashes, StageOutcome
from shoal.wire.messages.step import StepEntry, StepsTrained

BALLOT = Ballot(3, PeerId("C"), 1)
HASHES = StageHashes("p", "m", "b")


def entry(number: int, path: Sequence[str], *, skipped: bool = False) -> StepEntry:
    samples = (SampleRange(0, number * 4, number * 4 + 4),)
    return StepEntry(StepKey(0, 1, number, 0), tuple(PeerId(p) for p in path), 0, samples, 4, 4, 1.0, 0.1, skipped)


def join(stage: int, *log: StepEntry) -> Join:
    return Join(BALLOT, 5, stage, 0, (), log, ())


def quorum(stage: int, *members: str) -> StageOutcome:
    return StageOutcome(stage, 2, tuple(PeerId(m) for m in members), (4,) * len(members), HASHES, 0)


def build(
    quorums: Sequence[StageOutcome], joins: dict[str, Join], recorded: Sequence[SampleRange] = (), marks: bytes = b""
) -> Record:
    return build_record(
        run_id="run",
        previous=Tip(4, "hash of D_4", None),
        ballot=BALLOT,
        quorums=quorums,
        joins={PeerId(peer): join for peer, join in joins.items()},
        recorded=tuple(recorded),
        generations={0: 1},
        restored={1: Basis(2, HASHES)},
        marks=marks,
    )


def test_a_record_follows_the_one_before() -> None:
    record = build([quorum(0, "a")], {"a": join(0)})
    assert (record.round, record.previous, record.ballot, record.generations) == (5, "hash of D_4", BALLOT, {0: 1})


def test_a_rebase_record_has_the_origins_round_on_top_of_the_forks_own_beginning() -> None:
    origin = build([quorum(0, "a")], {"a": join(0, entry(0, "a"))}, [SampleRange(0, 4, 16)])
    ballot = Ballot(1, PeerId("D"), 1)
    record = rebase_record(
        run_id="fork",
        genesis="D_0 of the fork",
        ballot=ballot,
        origin=origin,
        origin_hash="hash of D_5",
        stages=[HASHES] * 3,
        recorded=used_samples(origin),
        marks=b"held outwindow 0",
    )
    assert record.marks == b"held outwindow 0"
    assert (record.run_id, record.round, record.previous) == ("fork", 5, "D_0 of the fork")
    assert record.origin == Origin("run", "hash of D_5")
    assert [(stage.stage, stage.members, stage.hashes) for stage in record.stages] == [
        (s, (), HASHES) for s in range(3)
    ]
    assert used_samples(record) == used_samples(origin) == (SampleRange(0, 0, 16),)
    following = build_record(
        run_id="fork",
        previous=Tip(5, "its hash", None),
        ballot=Ballot(2, PeerId("E"), 1),
        quorums=[quorum(0, "a")],
        joins={PeerId("a"): join(0)},
        recorded=used_samples(record),
        generations={},
        restored={},
        eras=record.eras,
    )
    assert (following.round, following.origin) == (6, None)
    assert following.eras == (Era(5, ballot), Era(6, Ballot(2, PeerId("E"), 1)))


def test_a_step_that_any_final_member_holds_is_recorded_and_lost_where_none_does() -> None:
    first, second = entry(0, "ab"), entry(1, "xb")
    record = build([quorum(0, "a"), quorum(1, "b")], {"a": join(0, first), "b": join(1, first, second)})
    assert record.samples == (SampleRange(0, 0, 8),)
    assert [stage.steps_lost for stage in record.stages] == [1, 0]


def test_the_steps_of_members_that_are_not_final_do_not_count() -> None:
    record = build([quorum(0, "a")], {"a": join(0), "x": join(0, entry(0, "x"))})
    assert record.samples == ()


def test_skipped_steps_are_recorded_apart_and_weigh_nothing() -> None:
    skipped = entry(1, "a", skipped=True)
    record = build([quorum(0, "a")], {"a": join(0, entry(0, "a"), skipped)})
    assert (record.samples, record.skipped) == ((SampleRange(0, 0, 4),), (SampleRange(0, 4, 8),))
    assert trained([entry(0, "a"), skipped]) == StepsTrained(1, 4)


def test_samples_of_earlier_records_are_not_recorded_again() -> None:
    record = build([quorum(0, "a")], {"a": join(0, entry(0, "a"))}, [SampleRange(0, 1, 3)])
    assert record.samples == (SampleRange(0, 0, 1), SampleRange(0, 3, 4))


def test_a_record_alone_says_which_samples_are_used() -> None:
    skipped = entry(2, "a", skipped=True)
    earlier = [SampleRange(0, 14, 16), SampleRange(0, 0, 4)]
    record = build([quorum(0, "a")], {"a": join(0, entry(1, "a"), skipped)}, earlier)
    assert record.recorded == (SampleRange(0, 0, 4), SampleRange(0, 14, 16))
    assert used_samples(record) == (SampleRange(0, 0, 12), SampleRange(0, 14, 16))


@pytest.mark.parametrize(("last_pass", "marks"), [(0, b"held outwindow 0"), (1, b"held outwindow 0window 1")])
def test_a_record_has_the_marks_of_the_windows_that_were_trained_on_and_of_none_behind(
    last_pass: int, marks: bytes
) -> None:
    read = b"held outwindow 0window 1window 2"
    recorded = [SampleRange(last_pass, 90, 91)]
    assert build([quorum(0, "a")], {"a": join(0, entry(1, "a"))}, recorded, read).marks == marks
    assert build([quorum(0, "a")], {"a": join(0)}, (), read).marks == b"", "nothing was trained"
    assert build([quorum(0, "a")], {"a": join(0, entry(1, "a"))}, recorded).marks == b"", "it is no stream"


def test_stages_are_named_in_order() -> None:
    record = build([quorum(1, "b"), quorum(0, "a")], {"a": join(0), "b": join(1)})
    assert [stage.stage for stage in record.stages] == [0, 1]
    outcome = outcome_of(record, 1)
    assert outcome is not None
    assert outcome.members == (PeerId("b"),)
    assert outcome_of(record, 2) is None


def test_a_record_says_what_a_stage_was_trained_from_if_not_from_the_record_before() -> None:
    record = build([quorum(1, "b"), quorum(0, "a")], {"a": join(0), "b": join(1)})
    assert [stage.restored for stage in record.stages] == [None, Basis(2, HASHES)]


def test_a_sealed_record_comes_back_and_its_hash_is_that_of_its_bytes() -> None:
    record = build([quorum(0, "a")], {"a": join(0)})
    checked: list[tuple[PeerId, bytes, bytes]] = []
    signed = seal(record, PeerId("C"), lambda body: b"signature of " + body[:1])
    assert unseal(signed, "run", lambda *found: checked.append(found)) == record
    assert checked == [(PeerId("C"), signed.body, signed.signature)]
    assert record_hash(signed) != record_hash(seal(build([quorum(0, "z")], {"z": join(0)}), PeerId("C"), bytes))


@pytest.mark.parametrize("key", SMALL_ORDER + NON_CANONICAL, ids=bytes.hex)
def test_a_key_that_nobody_owns_signs_no_record_of_a_round(key: bytes) -> None:
    signer = peer_id(key)
    record = build([quorum(0, "a")], {"a": join(0)})
    for number in range(32):
        signed = seal(replace(record, ballot=Ballot(number, signer, 1)), signer, lambda _: SIGNATURE)
        with pytest.raises(SignatureError):
            unseal(signed, "run", verify)


def test_the_genesis_depends_on_seed_configuration_and_authority_not_on_the_order_of_keys() -> None:
    one, other = PeerId("one"), PeerId("other")
    base = genesis_hash("run", 1, {"a": 1, "b": {"c": 2, "d": 3}}, one)
    assert base == genesis_hash("run", 1, {"b": {"d": 3, "c": 2}, "a": 1}, one)
    others = [("run", 1, {"a": 1}, one), ("run", 1, {"a": 1}, other), ("run", 2, {"a": 1}, one)]
    others += [("run", 1, {"a": 2}, one), ("r", 1, {"a": 1}, one)]
    assert len({base, *(genesis_hash(*each) for each in others)}) == 6
