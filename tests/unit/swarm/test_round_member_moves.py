"""A replica that is told to serve another stage: under whose ballot, once, and with what it has promised."""

from __future__ import annotations

from shoal.ids import NO_BALLOT, Ballot, PeerId
from shoal.swarm.records import Tip
from shoal.swarm.round_effects import Relocate, Send
from shoal.swarm.round_member import RoundMemberMachine
from shoal.swarm.view import NO_BASE
from shoal.wire.messages.base import Hop
from shoal.wire.messages.round import AskRound, Move, Moving, RoundState, SignedRecord, StageHashes, StaleBallot

HASHES = StageHashes("p", "m", "b")
OLD, NEW = Ballot(1, PeerId("client"), 1), Ballot(2, PeerId("other"), 1)


def member(stage: int = 0, round: int = 1) -> RoundMemberMachine:
    def unseal(signed: SignedRecord) -> None:
        raise AssertionError(signed)

    tip = Tip(round - 1, "tip", None)
    return RoundMemberMachine(Hop(PeerId("me"), ()), stage, tip, HASHES, unseal)


def test_an_order_is_answered_and_carried_out_once_however_often_it_comes() -> None:
    machine = member(round=3)
    answer = Send(OLD.peer, Moving(OLD, 1, ""))
    assert machine.receive(OLD.peer, Move(OLD, 3, 1, False)) == [answer, Relocate(1, False)]
    assert machine.receive(OLD.peer, Move(OLD, 3, 1, False)) == [answer]
    # Nor does it turn round on its way.
    assert machine.receive(OLD.peer, Move(OLD, 3, 2, True)) == [answer]
    assert machine.stay("too small") == [Send(OLD.peer, Moving(OLD, 1, "too small"))]
    assert machine.stay("too small") == []
    assert machine.receive(OLD.peer, Move(OLD, 3, 2, True))[-1] == Relocate(2, True)


def test_an_order_under_a_lower_ballot_is_refused_and_a_new_coordinator_hears_where_it_goes() -> None:
    machine = member()
    machine.receive(NEW.peer, AskRound(NEW))
    assert machine.receive(OLD.peer, Move(OLD, 1, 1, True)) == [Send(OLD.peer, StaleBallot(NEW))]
    assert machine.destination is None

    machine = member()
    machine.receive(OLD.peer, Move(OLD, 1, 1, True))
    first, second = machine.receive(NEW.peer, AskRound(NEW))
    assert first == Send(NEW.peer, Moving(NEW, 1, ""))
    assert isinstance(second.message, RoundState)


def test_orders_for_another_round_are_not_followed() -> None:
    machine = member(round=3)
    assert machine.receive(OLD.peer, Move(OLD, 2, 1, False)) == []
    (refusal,) = machine.receive(OLD.peer, Move(OLD, 4, 1, False))
    assert "round 3" in refusal.message.refused
    assert machine.destination is None


def test_one_that_is_there_says_so() -> None:
    machine = member(stage=1)
    assert machine.receive(OLD.peer, Move(OLD, 1, 1, False)) == [Send(OLD.peer, Moving(OLD, 1, ""))]


def test_what_was_promised_goes_along_and_the_coordinator_is_greeted_on_the_new_connection() -> None:
    machine = member(stage=1)
    machine.succeed(NEW, has_begun=True)
    assert machine.is_behind
    assert machine.receive(OLD.peer, AskRound(OLD)) == [Send(OLD.peer, StaleBallot(NEW))]
    assert machine.lost(PeerId("somebody")) == []
    greeting, state = machine.lost(NEW.peer)
    assert greeting == Send(NEW.peer, Moving(NEW, 1, ""))
    assert (state.message.stage, state.message.base_round) == (1, NO_BASE)
    assert machine.lost(NEW.peer) == []  # once: if it cannot be reached it is not dialled for ever


def test_d_0_stands_at_the_new_stage_as_long_as_the_run_is_not_further() -> None:
    machine = member(stage=1)
    machine.succeed(NO_BALLOT, has_begun=False)
    assert not machine.is_behind
