"""What stands when a client takes over."""

from __future__ import annotations

import msgspec

from shoal.ids import Ballot, PeerId
from shoal.swarm.records import Tip, record_hash, seal, unseal
from shoal.swarm.round_choice import Choice, choose
from shoal.swarm.view import NO_BASE
from shoal.wire.messages.base import Era, Hop, SampleRange
from shoal.wire.messages.round import Basis, Record, RoundState, SignedRecord, StageHashes, StageOutcome

GENESIS = "D0"


def signed(round: int, previous: str, *, ballot: int = 1, epoch: int = 0, samples: int = 0) -> SignedRecord:
    outcome = StageOutcome(0, epoch, (PeerId("a"),), (1,), StageHashes("p", "m", "b"), 0)
    ranges = (SampleRange(0, 0, samples),) if samples else ()
    record = Record("run", round, Ballot(ballot, PeerId("C"), 1), previous, (outcome,), ranges, (), {})
    return seal(record, PeerId("C"), lambda _body: b"")


D1 = signed(1, GENESIS)
D2 = signed(2, record_hash(D1))


def state(stage: int, record: SignedRecord | None, round: int, prepared: SignedRecord | None = None) -> RoundState:
    basis = Basis(max(round, 0), StageHashes("p", "m", "b"))
    return RoundState(Ballot(9, PeerId("C"), 1), stage, round, record, prepared, Hop(PeerId("x"), ()), "", basis)


def choice(
    *states: RoundState, drop_prepared: bool = False, has_records: bool = False, known: tuple[Tip, ...] = ()
) -> Choice:
    named = {PeerId(f"R{index}"): each for index, each in enumerate(states)}
    return choose(
        named, 2, GENESIS, lambda record: unseal(record, "run", lambda *_: None), drop_prepared, has_records, known
    )


def test_at_the_start_the_genesis_stands() -> None:
    found = choice(state(0, None, 0), state(1, None, 0))
    assert (found.tip.round, found.tip.hash, found.missing) == (0, GENESIS, ())


def test_a_record_that_one_replica_has_swapped_stands() -> None:
    found = choice(state(0, D1, 1), state(1, None, 0, D1))
    assert (found.tip.hash, found.missing) == (record_hash(D1), ())


def test_a_swapped_record_stands_even_if_a_stage_has_no_holder_yet() -> None:
    found = choice(state(0, D1, 1), state(1, None, 0), drop_prepared=True)
    assert (found.tip.hash, found.missing) == (record_hash(D1), (1,))


def test_a_record_that_is_held_everywhere_is_finished() -> None:
    found = choice(state(0, D1, 1, D2), state(1, D1, 1, D2))
    assert (found.tip.round, found.tip.hash, found.missing) == (2, record_hash(D2), ())


def test_of_prepared_records_that_of_the_highest_ballot_then_epoch_is_finished() -> None:
    low, high = signed(1, GENESIS, ballot=1, epoch=5), signed(1, GENESIS, ballot=2)
    later = signed(1, GENESIS, ballot=2, epoch=1)
    assert choice(state(0, None, 0, low), state(1, None, 0, high)).tip.hash == record_hash(high)
    assert choice(state(0, None, 0, high), state(1, None, 0, later)).tip.hash == record_hash(later)


def test_a_prepared_record_whose_bytes_are_gone_is_waited_for_and_then_dropped() -> None:
    states = (state(0, D1, 1, D2), state(1, D1, 1))
    waiting = choice(*states)
    assert (waiting.tip.hash, waiting.missing, waiting.may_be_dropped) == (record_hash(D2), (1,), True)
    dropped = choice(*states, drop_prepared=True)
    assert (dropped.tip.hash, dropped.missing) == (record_hash(D1), ())
    # A holder that comes at the last moment is in time.
    finished = choice(*states, state(1, D1, 1, D2), drop_prepared=True)
    assert (finished.tip.hash, finished.missing) == (record_hash(D2), ())


def test_a_prepared_record_that_one_of_its_members_cannot_have_prepared_is_dropped_at_once() -> None:
    # All records here have the member `a`.
    earlier, later = signed(2, record_hash(D1), epoch=1), signed(2, record_hash(D1), ballot=2)
    elsewhere = signed(2, "another record", epoch=1)

    def stands(of_member: SignedRecord | None, member: str = "a") -> Choice:
        named = {"R0": state(0, D1, 1, later), "R1": state(1, D1, 1), member: state(1, D1, 1, of_member)}
        return choose(
            {PeerId(peer): each for peer, each in named.items()},
            2,
            GENESIS,
            lambda record: unseal(record, "run", lambda *_: None),
            False,
        )

    assert (stands(earlier).tip.hash, stands(earlier).missing) == (record_hash(D1), ())
    assert stands(later).tip.hash == record_hash(later)
    # Who has prepared nothing may have started anew, and who is no member says nothing of this record.
    for waiting in (stands(None), stands(elsewhere), stands(earlier, "b")):
        assert (waiting.tip.hash, waiting.missing) == (record_hash(later), (1,))


def test_a_prepared_record_is_not_dropped_where_the_one_before_has_no_holders_either() -> None:
    lost = choice(state(0, D1, 1, D2), state(1, None, 0), drop_prepared=True)
    assert (lost.tip.hash, lost.missing, lost.may_be_dropped) == (record_hash(D2), (1,), False)
    # Whoever has just started holds D_0: that is no reason to drop what may have been committed.
    first = choice(state(0, None, 0, D1), state(1, None, 0), drop_prepared=True)
    assert (first.tip.hash, first.missing, first.may_be_dropped) == (record_hash(D1), (1,), False)


def test_what_the_coordinator_has_committed_stands_though_nobody_holds_it_any_more() -> None:
    known = Tip(2, record_hash(D2), D2)
    assert choice(state(0, None, 0), state(1, None, 0), known=(known,)).tip == known
    assert choice(state(0, D1, 1), state(1, D1, 1), known=(known,)).missing == (0, 1)
    other = signed(2, record_hash(D1), ballot=3)
    assert choice(state(0, other, 2), state(1, D1, 1), known=(known,)).tip.hash == record_hash(other)


def test_a_prepared_record_on_an_older_chain_is_no_candidate() -> None:
    found = choice(state(0, D1, 1), state(1, D1, 1), state(1, None, 0, signed(1, GENESIS, ballot=7)))
    assert found.tip.hash == record_hash(D1)


def test_of_two_records_of_a_round_the_one_with_all_stages_stands() -> None:
    more, fewer = signed(1, GENESIS, samples=9), signed(1, GENESIS, ballot=8, samples=4)
    found = choice(state(0, more, 1), state(0, fewer, 1), state(1, fewer, 1), drop_prepared=True)
    assert found.tip.hash == record_hash(fewer)


def test_newcomers_alone_are_no_reason_to_start_again_but_in_the_end_they_are_all_there_is() -> None:
    states = (state(0, None, NO_BASE), state(1, None, 0))
    assert choice(*states).missing == (0,)
    assert choice(*states, drop_prepared=True).missing == ()
    assert choice(state(0, D1, 1), state(1, None, NO_BASE)).tip.hash == record_hash(D1)


def test_who_knows_of_records_never_starts_again() -> None:
    states = (state(0, None, 0), state(1, None, 0))
    assert choice(*states, drop_prepared=True, has_records=True).missing == (0, 1)


def on_a_chain(ballot: int, samples: int) -> SignedRecord:
    """The first record of a chain with so many samples."""
    mine = Ballot(ballot, PeerId("C"), 1)
    outcome = StageOutcome(0, 0, (PeerId("a"),), (1,), StageHashes("p", "m", "b"), 0)
    ranges = (SampleRange(0, 0, samples),)
    record = Record("run", 1, mine, GENESIS, (outcome,), ranges, (), {}, (), (Era(1, mine),))
    return seal(record, PeerId("C"), lambda _body: b"")


SMALL, LARGE = on_a_chain(1, 10), on_a_chain(2, 20)


def test_of_two_chains_that_are_whole_the_one_with_more_samples_stands_whatever_its_ballot() -> None:
    found = choice(*(state(stage, record, 1) for stage in (0, 1) for record in (SMALL, LARGE)))
    assert (found.tip.hash, found.missing, found.is_contested) == (record_hash(LARGE), (), False)
    assert [tip.hash for tip in found.left] == [record_hash(SMALL)]


def test_a_chain_of_which_only_older_records_are_held_counts_by_these() -> None:
    ballot = Ballot(2, PeerId("C"), 1)
    ranges, recorded = (SampleRange(0, 20, 30),), (SampleRange(0, 0, 20),)
    record = Record("run", 2, ballot, record_hash(LARGE), (), ranges, (), {}, recorded, (Era(1, ballot),))
    newest = seal(record, PeerId("C"), lambda _body: b"")
    states = [state(stage, LARGE, 1) for stage in (0, 1)]
    known = (Tip(2, record_hash(newest), newest),)
    found = choice(*states, state(0, SMALL, 1), known=known)
    assert (found.tip.hash, found.missing) == (record_hash(newest), (0, 1))
    # Of a chain of which nobody holds anything, nothing is chosen as long as another one is held.
    assert choice(state(0, SMALL, 1), state(1, SMALL, 1), known=known).tip.hash == record_hash(SMALL)


def test_of_two_chains_with_as_many_samples_the_one_with_the_smaller_hash_stands() -> None:
    twins = on_a_chain(1, 10), on_a_chain(3, 10)
    found = choice(*(state(stage, record, 1) for stage in (0, 1) for record in twins))
    assert found.tip.hash == min(map(record_hash, twins))


def test_a_larger_chain_that_lacks_a_stage_is_waited_for_and_then_left() -> None:
    states = (state(0, SMALL, 1), state(1, SMALL, 1), state(0, LARGE, 1))
    waiting = choice(*states)
    assert (waiting.tip.hash, waiting.missing, waiting.is_contested) == (record_hash(LARGE), (1,), True)
    found = choice(*states, drop_prepared=True)
    assert (found.tip.hash, found.missing, found.is_contested) == (record_hash(SMALL), (), False)
    assert [tip.hash for tip in found.left] == [record_hash(LARGE)]
    # A smaller one is not waited for.
    assert choice(state(0, LARGE, 1), state(1, LARGE, 1), state(0, SMALL, 1)).is_contested is False


def test_a_chain_whose_newest_record_lacks_a_stage_counts_as_far_as_it_is_whole() -> None:
    """Some of its replicas have swapped to its last record, and those of one stage hold only the one before."""
    mine = Ballot(2, PeerId("C"), 1)
    outcome = StageOutcome(0, 0, (PeerId("a"),), (1,), StageHashes("p", "m", "b"), 0)
    more = Record(
        "run", 2, mine, record_hash(LARGE), (outcome,), (SampleRange(0, 20, 25),), (), {}, (SampleRange(0, 0, 20),)
    )
    newest = seal(msgspec.structs.replace(more, eras=(Era(1, mine),)), PeerId("C"), lambda _body: b"")
    states = (state(0, SMALL, 1), state(1, SMALL, 1), state(0, newest, 2), state(0, LARGE, 1), state(1, LARGE, 1))
    found = choice(*states, drop_prepared=True)
    assert (found.tip.hash, found.missing) == (record_hash(newest), (1,))
    assert [tip.hash for tip in found.left] == [record_hash(SMALL)]
