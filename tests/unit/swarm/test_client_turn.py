"""Whose turn it is among the clients of a run."""

from __future__ import annotations

import math

import pytest

from shoal.events.losses import ClientReplaced
from shoal.events.run import ClientWaits
from shoal.ids import PeerId, StageIndex
from shoal.swarm.client_turn import (
    ANSWER_WITHIN_S,
    ASK_AGAIN_S,
    PATIENCE_S,
    REDIAL_S,
    AskClient,
    ClientTurn,
    TakeTurn,
    TurnEffect,
)
from shoal.swarm.view import ClientPeer, Replica, Run, SwarmView
from shoal.wire.messages.base import Hop

A, B, ME, SCOUT, SERVER = PeerId("A"), PeerId("B"), PeerId("me"), PeerId("scout"), PeerId("server")


def hop(peer: PeerId) -> Hop:
    return Hop(peer, (f"memory:{peer}",))


def client(peer: PeerId, joined: float, *, waits: bool = True) -> ClientPeer:
    return ClientPeer(hop(peer), joined, waits=waits)


MINE = client(ME, 5.0)
TRAINS = client(A, 1e9, waits=False)
OF_A, KEPT = Run("run", 1, A), Run("run", 1, SCOUT, kept=True)


def seen(*others: ClientPeer, run: Run | None = OF_A, servers: tuple[PeerId, ...] = ()) -> SwarmView:
    replicas = tuple(Replica(hop(peer), 0.0, stage=StageIndex(0)) for peer in servers)
    return SwarmView(replicas, clients=(MINE, *others), run=run)


def asked(effects: list[TurnEffect]) -> list[PeerId]:
    return [effect.hop.peer for effect in effects if isinstance(effect, AskClient)]


def dialled(now_s: float = 0.0) -> ClientTurn:
    """One that has dialled the client that trains."""
    turn = ClientTurn(ME, "run")
    assert asked(turn.look(seen(TRAINS), now_s)) == [A]
    return turn


def test_while_nobody_announces_the_run_nothing_is_known() -> None:
    turn = ClientTurn(ME, "run")
    assert turn.look(seen(TRAINS, run=None), 0.0) == turn.look(seen(TRAINS, run=Run("other", 1, A)), 0.0) == []
    assert (turn.knows_run, turn.wake_at_s) == (False, math.inf)


def test_that_nobody_else_is_known_proves_nothing() -> None:
    turn = ClientTurn(ME, "run")
    assert turn.look(seen(), 0.0) == []
    assert (turn.knows_run, turn.wake_at_s) == (True, math.inf)


def test_its_own_word_says_that_an_earlier_start_has_had_its_turn() -> None:
    assert ClientTurn(ME, "run").look(seen(run=Run("run", 1, ME)), 0.0) == [TakeTurn()]


def test_the_client_that_trains_comes_first_whatever_its_clock_says_and_the_user_is_told_once() -> None:
    turn = dialled()
    turn.up(A)
    assert turn.look(seen(TRAINS), 1e6) == [ClientWaits(A, "peer ...A", "run")]
    assert turn.look(seen(TRAINS), 2e6) == []
    assert turn.wake_at_s == math.inf, "only a loss can change that"


@pytest.mark.parametrize(("joined", "is_before"), [(4.0, True), (6.0, False)])
def test_of_those_that_wait_who_joined_first_comes_first(joined: float, is_before: bool) -> None:
    turn = dialled()
    turn.lost(A, 0.1)
    other = client(B, joined)
    turn.look(seen(other, run=None), 0.2)
    assert (TakeTurn() in turn.look(seen(other, run=None), 0.1 + PATIENCE_S)) is not is_before


def test_a_client_that_is_lost_has_a_moment_to_come_back() -> None:
    turn, nobody = dialled(), seen(run=None)
    turn.up(A)
    turn.look(seen(TRAINS), 1.0)
    turn.lost(A, 10.0)
    assert turn.look(nobody, 10.0) == []
    assert turn.wake_at_s == 10.0 + REDIAL_S
    assert asked(turn.look(nobody, 10.0 + REDIAL_S)) == [A]
    assert turn.wake_at_s == 10.0 + PATIENCE_S
    assert turn.look(nobody, 10.0 + 3 * REDIAL_S) == [], "one attempt at a time"
    turn.lost(A, 10.5)
    assert turn.look(nobody, 10.0 + 0.9 * PATIENCE_S) == [AskClient(hop(A))]
    replaced, take = turn.look(nobody, 10.0 + PATIENCE_S)
    assert isinstance(replaced, ClientReplaced)
    assert (replaced.peer, replaced.silent_s, take) == (A, PATIENCE_S, TakeTurn()), "it counts from the first loss"
    turn.up(A)
    assert TakeTurn() not in turn.look(nobody, 20.0)


def test_a_client_that_announces_itself_lives_although_it_cannot_be_reached_from_here() -> None:
    turn = dialled()
    turn.lost(A, 1.0)
    assert asked(turn.look(seen(TRAINS), 100.0)) == [A]
    assert turn.look(seen(TRAINS), 200.0) == []
    assert TakeTurn() in turn.look(seen(run=None), 200.0)


def test_one_that_was_before_this_one_and_now_waits_behind_it_is_not_waited_for() -> None:
    turn = ClientTurn(ME, "run")
    before, behind = client(B, 2.0), client(A, 9.0)
    turn.look(seen(TRAINS, before), 0.0)
    turn.lost(A, 0.1)
    turn.lost(B, 0.1)
    assert asked(turn.look(seen(behind, before), 1.0)) == [B]


@pytest.mark.parametrize("told", [None, ME])
def test_what_hosts_of_servers_keep_counts_when_servers_say_that_they_have_no_client(told: PeerId | None) -> None:
    turn, kept = ClientTurn(ME, "run"), seen(run=KEPT, servers=(SERVER, B))
    assert asked(turn.look(kept, 0.0)) == [SERVER, B]
    assert turn.wake_at_s == ANSWER_WITHIN_S
    turn.told(SERVER, told)
    assert turn.look(kept, 1.0) == [], "the other one may still have a client"
    turn.told(B, told)
    *replaced, take = turn.look(kept, 1.0)
    assert (len(replaced), take) == (told is None, TakeTurn()), "an earlier start of its own replaces nobody"


def test_while_there_is_nobody_to_ask_only_a_change_can_help() -> None:
    turn, kept = ClientTurn(ME, "run"), seen(run=KEPT)
    assert (turn.look(kept, 0.0), turn.wake_at_s) == ([], math.inf)
    assert asked(turn.look(seen(run=KEPT, servers=(SERVER,)), 1.0)) == [SERVER]
    turn.lost(SERVER, 2.0)
    assert (turn.look(kept, 100.0), turn.wake_at_s) == ([], math.inf)


def test_a_server_that_does_not_answer_is_not_waited_for_longer_than_a_dial_takes() -> None:
    turn, kept = ClientTurn(ME, "run"), seen(run=KEPT, servers=(SERVER, B))
    turn.look(kept, 0.0)
    turn.told(SERVER, None)
    assert TakeTurn() in turn.look(kept, ANSWER_WITHIN_S)


def test_a_client_that_a_server_has_keeps_its_place_whatever_the_registry_says() -> None:
    turn, kept = ClientTurn(ME, "run"), seen(run=KEPT, servers=(SERVER,))
    turn.look(kept, 0.0)
    turn.told(SERVER, PeerId("hidden"))
    assert turn.look(kept, 1.0) == []
    assert turn.wake_at_s == ASK_AGAIN_S
    assert asked(turn.look(kept, ASK_AGAIN_S)) == [SERVER]
    turn.told(SERVER, None)
    assert TakeTurn() in turn.look(kept, ASK_AGAIN_S)
    turn.lost(SERVER, 3.0)
    assert TakeTurn() not in turn.look(kept, 3.0), "what a lost server has said counts no more"
