"""What a stage goes on from whose bytes are gone, and when that is certain."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.swarm.test_round_coordinator import unsealed

from shoal.ids import Ballot, PeerId
from shoal.swarm.records import Tip
from shoal.swarm.round_choice import Choice
from shoal.swarm.round_effects import Send
from shoal.swarm.round_replicas import RoundReplicas
from shoal.swarm.round_restoration import Here, Restoration
from shoal.swarm.view import NO_BASE
from shoal.wire.messages.base import Hop
from shoal.wire.messages.round import Basis, CommitRecord, Record, RoundState, SignedRecord, StageHashes, StageOutcome

A, B, N = PeerId("a"), PeerId("b"), PeerId("n")
OWN = Basis(5, StageHashes("p5", "m5", ""))
OLD = Basis(3, StageHashes("p3", "m3", ""))
FRESH = Basis(0, StageHashes("p0", "m0", ""))
RECORD = Record(
    "run", 5, Ballot(1, PeerId("C"), 1), "", (StageOutcome(0, 0, (A, B), (1, 1), OWN.hashes, 0),), (), (), {}
)


@pytest.fixture
def restoration() -> Restoration:
    found = Restoration(10.0)
    found.begin(RECORD)
    found.miss([0], 0.0)
    return found


def due(restoration: Restoration, now_s: float, silent: bool = False, **here: Basis) -> dict[int, Basis]:
    return restoration.due(RECORD, restoration.missing, {PeerId(p): Here(0, b) for p, b in here.items()}, silent, now_s)


def test_it_is_certain_when_all_members_have_come_back_without(restoration: Restoration) -> None:
    assert due(restoration, 0.1, a=FRESH) == {}
    assert due(restoration, 0.1, a=FRESH, n=FRESH) == {}
    assert due(restoration, 0.1, silent=True, a=FRESH, b=FRESH) == {}
    assert due(restoration, 0.1, a=FRESH, b=FRESH) == {0: FRESH}


def test_whoever_was_seen_with_the_bytes_counts_as_well(restoration: Restoration) -> None:
    restoration.seen({N: 0})
    assert due(restoration, 0.1, a=FRESH, b=FRESH) == {}
    assert due(restoration, 0.1, a=FRESH, b=FRESH, n=FRESH) == {0: FRESH}


def test_of_a_record_without_members_nobody_can_say_that_all_who_hold_it_are_back(restoration: Restoration) -> None:
    rebase = msgspec.structs.replace(
        RECORD, stages=(msgspec.structs.replace(RECORD.stages[0], members=(), weights=()),)
    )
    here = {A: Here(0, FRESH)}
    assert restoration.due(rebase, restoration.missing, here, False, 9.9) == {}
    assert restoration.due(rebase, restoration.missing, here, False, 10.0) == {0: FRESH}


def test_after_a_while_one_server_is_enough_but_there_has_to_be_one(restoration: Restoration) -> None:
    assert due(restoration, 9.9, n=FRESH) == {}
    assert due(restoration, 10.0) == {}
    assert due(restoration, 10.0, n=FRESH) == {0: FRESH}
    restoration.wait_anew(10.0)
    assert due(restoration, 19.9, n=FRESH) == {}


def test_the_time_begins_when_the_last_holder_is_lost(restoration: Restoration) -> None:
    assert restoration.miss([], 5.0)
    assert restoration.miss([0], 8.0)
    assert not restoration.miss([0], 9.0)
    assert due(restoration, 17.9, n=FRESH) == {}
    assert due(restoration, 18.0, n=FRESH) == {0: FRESH}


def test_who_was_heard_with_the_bytes_is_waited_for_from_then_on_but_not_while_they_are_there(
    restoration: Restoration,
) -> None:
    restoration.hear(OWN.hashes, 9.0)
    restoration.hear(FRESH.hashes, 11.0)
    assert due(restoration, 18.9, n=FRESH) == {}
    assert due(restoration, 19.0, n=FRESH) == {0: FRESH}
    restoration.hear(OWN.hashes, 20.0)
    assert due(restoration, 20.0, a=OWN) == {0: OWN}, "of one that was left out"


@pytest.mark.parametrize("is_known", [True, False])
def test_newcomers_are_told_of_a_record_that_nobody_holds_if_the_coordinator_knows_that_it_is_committed(
    is_known: bool,
) -> None:
    tip = Tip(5, "hash", SignedRecord(b"", PeerId("C"), b""))
    replicas = RoundReplicas("genesis", Restoration(10.0), unsealed)
    hop, ballot = Hop(N, ("unix:/n",)), Ballot(1, PeerId("C"), 1)
    replicas.name(N, hop)
    replicas.answer(N, RoundState(ballot, 0, 0, None, None, hop, "", FRESH))
    known = tip if is_known else Tip(0, "genesis", None)
    sent = replicas.hint(Choice(tip, (0,)), ballot, {known})
    assert sent == ([Send(N, CommitRecord(ballot, tip.signed))] if is_known else [])
    assert replicas.hint(Choice(tip, (0,)), ballot, {known}) == [], "once"


def test_the_newest_bytes_are_taken_and_broken_ones_never(restoration: Restoration) -> None:
    assert due(restoration, 10.0, a=FRESH, b=OLD) == {0: OLD}
    broken = Basis(NO_BASE, StageHashes("", "", ""))
    assert due(restoration, 10.0, a=broken, b=FRESH) == {0: FRESH}
    assert due(restoration, 10.0, a=broken) == {}


def test_the_record_s_own_bytes_are_taken_before_newer_ones_of_another_chain(restoration: Restoration) -> None:
    newer = Basis(7, StageHashes("p7", "m7", ""))
    same = Basis(6, OWN.hashes)
    assert due(restoration, 9.9, a=same, b=newer) == {}
    assert due(restoration, 10.0, a=same, b=newer) == {0: same}, "the other chain's record names the same bytes"


def test_only_the_bytes_that_stand_fit(restoration: Restoration) -> None:
    assert restoration.fits(Here(0, OWN))
    assert not restoration.fits(Here(0, FRESH))
    assert restoration.restore(0, FRESH) == FRESH
    assert not restoration.fits(Here(0, OWN))
    assert restoration.fits(Here(0, FRESH))


def test_better_bytes_win_and_the_record_s_own_end_the_restoration(restoration: Restoration) -> None:
    assert not restoration.is_better(Here(0, OWN))
    restoration.restore(0, FRESH)
    assert [restoration.is_better(Here(0, basis)) for basis in (FRESH, OLD, OWN)] == [False, True, True]
    assert restoration.restore(0, OWN) is None
    assert restoration.bases == {}


def continued(restoration: Restoration, *holders: Here, others: tuple[Here, ...] = ()) -> dict[int, Basis]:
    return restoration.continued(holders, [*holders, *others])


def test_who_takes_over_goes_on_with_what_was_restored(restoration: Restoration) -> None:
    assert continued(restoration, Here(0, FRESH)) == {0: FRESH}
    assert continued(restoration, Here(0, FRESH), Here(0, OLD)) == {0: OLD}
    assert continued(restoration, Here(0, FRESH), Here(0, OWN)) == {}


def test_but_not_where_the_record_s_bytes_are_there_under_the_record_of_another_chain(restoration: Restoration) -> None:
    assert continued(restoration, Here(0, FRESH), others=(Here(0, OWN),)) == {}
    assert continued(restoration, Here(0, FRESH), others=(Here(1, OWN), Here(0, OLD))) == {0: FRESH}


def test_a_new_record_ends_every_restoration(restoration: Restoration) -> None:
    restoration.restore(0, FRESH)
    restoration.begin(RECORD)
    assert restoration.fits(Here(0, OWN))
