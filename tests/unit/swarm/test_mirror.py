"""What a mirror fetches, what it says that it holds, and whom it follows."""

from __future__ import annotations

import pytest
from tests.unit.swarm.test_round_coordinator import unsealed

from shoal.errors import RemoteProtocolError
from shoal.ids import NO_BALLOT, Ballot, PeerId
from shoal.swarm.mirror import FetchStage, MirrorEffect, MirrorMachine
from shoal.swarm.records import Tip, record_hash, seal
from shoal.swarm.round_effects import Send
from shoal.swarm.round_orders import MAX_BALLOTS_AHEAD
from shoal.wire.messages.base import Era
from shoal.wire.messages.mirror import Follow, HeldRecord, Mirrored
from shoal.wire.messages.round import Basis, Record, SignedRecord, StageHashes, StageOutcome, StaleBallot

C, D = PeerId("C"), PeerId("D")
ONE, TWO = Ballot(1, C, 1), Ballot(2, D, 1)
OLD = Basis(1, StageHashes("old", "", ""))


def record(
    round: int, previous: str, *bytes_of: str, ballot: Ballot = ONE, eras: tuple[Era, ...] = (), restored: int = -1
) -> SignedRecord:
    stages = tuple(
        StageOutcome(stage, 0, (PeerId("a"),), (1,), StageHashes(name, name, ""), 0, OLD if stage == restored else None)
        for stage, name in enumerate(bytes_of)
    )
    eras = eras or (Era(1, ballot),)
    body = Record("run", round, ballot, previous, stages, (), (), {}, (), eras)
    return seal(body, ballot.peer, lambda _: b"")


FIRST = record(1, "D0", "a1", "b1")
SECOND = record(2, record_hash(FIRST), "a2", "b1")
THIRD = record(3, record_hash(SECOND), "a3", "b3", restored=1)
OTHER = record(2, record_hash(FIRST), "x2", "y2", ballot=TWO, eras=(Era(1, ONE), Era(2, TWO)))


def tip(signed: SignedRecord) -> Tip:
    return Tip(unsealed(signed).round, record_hash(signed), signed)


def mirror(**held: SignedRecord) -> MirrorMachine:
    return MirrorMachine(2, unsealed, {int(stage[-1]): tip(signed) for stage, signed in held.items()})


def said(effects: list[MirrorEffect]) -> dict[int, tuple[int, ...]]:
    """By round, the stages that the mirror says it holds."""
    [message] = [each.message for each in effects if isinstance(each, Send)]
    assert isinstance(message, Mirrored)
    return {unsealed(each.record).round: each.stages for each in message.held}


def fetches(effects: list[MirrorEffect]) -> dict[int, int]:
    return {each.stage: each.order.record.round for each in effects if isinstance(each, FetchStage)}


def test_a_ballot_after_which_nobody_could_lead_is_refused() -> None:
    machine = MirrorMachine(2, unsealed)
    with pytest.raises(RemoteProtocolError, match="names ballot"):
        machine.follow(C, Follow(Ballot(MAX_BALLOTS_AHEAD + 1, C, 1), None))
    assert machine.promised == NO_BALLOT


def follow(
    machine: MirrorMachine, signed: SignedRecord | None, ballot: Ballot = ONE, instead_of: str = ""
) -> list[MirrorEffect]:
    return machine.follow(ballot.peer, Follow(ballot, signed, instead_of))


def fetched(machine: MirrorMachine, signed: SignedRecord, stage: int) -> list[MirrorEffect]:
    return machine.fetched(stage, record_hash(signed))


def test_it_fetches_every_stage_of_the_record_that_stands_and_says_so_when_the_bytes_are_here() -> None:
    machine = mirror()
    effects = follow(machine, FIRST)
    assert said(effects) == {}
    assert fetches(effects) == {0: 1, 1: 1}
    assert said(fetched(machine, FIRST, 1)) == {1: (1,)}
    assert fetched(machine, FIRST, 0) == [Send(C, Mirrored(ONE, (HeldRecord(FIRST, (0, 1)),)))]
    assert fetches(follow(machine, FIRST)) == {}, "it holds that"


def test_who_only_asks_is_told_what_a_checkpoint_has_given_it() -> None:
    assert said(follow(mirror(stage0=SECOND, stage1=FIRST), None)) == {2: (0,), 1: (1,)}


def test_what_is_being_fetched_is_not_ordered_again_until_a_newer_record_stands() -> None:
    machine = mirror()
    follow(machine, FIRST)
    assert fetches(follow(machine, FIRST)) == {}
    assert fetches(follow(machine, SECOND)) == {0: 2, 1: 2}
    assert said(fetched(machine, SECOND, 0)) == {2: (0,)}
    assert fetched(machine, FIRST, 0) == [], "that is not wanted any more"


def test_what_was_under_way_when_a_newer_record_came_is_held_until_that_is_here() -> None:
    machine = mirror()
    follow(machine, FIRST)
    follow(machine, SECOND)
    assert said(fetched(machine, FIRST, 0)) == {1: (0,)}
    assert said(fetched(machine, SECOND, 0)) == {2: (0,)}
    machine = mirror()
    follow(machine, SECOND)
    follow(machine, OTHER, TWO)
    assert fetched(machine, SECOND, 0) == [], "it is of the chain that was left"


def test_a_stage_that_nobody_has_trained_is_ordered_as_well_since_it_is_given_by_the_name_of_the_newer_record() -> None:
    machine = mirror(stage0=FIRST, stage1=FIRST)
    effects = follow(machine, SECOND)
    assert fetches(effects) == {0: 2, 1: 2}
    assert said(effects) == {1: (0, 1)}
    assert said(fetched(machine, SECOND, 1)) == {2: (1,), 1: (0,)}


def test_what_it_has_goes_on_being_held_until_the_newer_bytes_are_here() -> None:
    machine = mirror(stage0=FIRST)
    assert said(follow(machine, SECOND)) == {1: (0,)}
    assert said(fetched(machine, SECOND, 0)) == {2: (0,)}


def test_an_order_says_whether_the_bytes_follow_from_those_that_are_here() -> None:
    machine = mirror(stage0=SECOND, stage1=SECOND)
    [first, second] = [each.order for each in follow(machine, THIRD) if isinstance(each, FetchStage)]
    assert first.follows_base
    assert not first.starts_anew
    assert second.starts_anew, "the stage was restored from older bytes"
    assert not second.follows_base


def test_it_never_goes_back() -> None:
    machine = mirror(stage0=SECOND, stage1=SECOND)
    assert fetches(follow(machine, FIRST)) == {}
    assert fetches(follow(machine, FIRST, instead_of=record_hash(SECOND))) == {}, "that is its own chain"
    machine = mirror()
    follow(machine, SECOND)
    assert fetches(follow(machine, FIRST)) == {}, "it was sent before, and is late"


def test_another_chain_is_followed_only_where_it_was_chosen_in_place_of_the_own_one() -> None:
    machine = mirror(stage0=SECOND, stage1=FIRST)
    assert fetches(follow(machine, OTHER, TWO)) == {1: 2}, "which has held nothing yet that is of one of them alone"
    effects = follow(machine, OTHER, TWO, instead_of=record_hash(SECOND))
    assert fetches(effects) == {0: 2}
    assert said(effects) == {2: (0,), 1: (1,)}, "it gives what it has until it has the other one"
    assert said(fetched(machine, OTHER, 0)) == {2: (0,), 1: (1,)}


def test_a_lower_ballot_is_refused_while_the_client_of_the_higher_one_is_connected() -> None:
    machine = mirror(stage0=FIRST)
    follow(machine, None, TWO)
    told = Mirrored(ONE, (HeldRecord(FIRST, (0,)),))
    assert follow(machine, SECOND) == [Send(C, told), Send(C, StaleBallot(TWO))], "what it holds it says to everybody"
    machine.lost(C)
    assert follow(machine, SECOND) == [Send(C, told), Send(C, StaleBallot(TWO))]
    machine.lost(D)
    assert fetches(follow(machine, SECOND)) == {0: 2, 1: 2}
    assert machine.promised == ONE


def test_while_nobody_is_followed_nobody_is_told() -> None:
    machine = mirror()
    follow(machine, FIRST)
    machine.lost(C)
    assert fetched(machine, FIRST, 0) == []
    assert said(follow(machine, None, TWO)) == {1: (0,)}


def test_who_uses_another_client_s_ballot_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="used the ballot of"):
        mirror().follow(D, Follow(ONE, FIRST))
