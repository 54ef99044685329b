"""Whose turn it is among the clients of a run."""

from __future__ import annotations

import math

from shoal.ids import PeerId
from shoal.swarm.client_order import PATIENCE_S, REDIAL_S, ClientOrder
from shoal.swarm.view import ClientPeer
from shoal.wire.messages.base import Hop

A, B, ME = PeerId("A"), PeerId("B"), PeerId("me")


def client(peer: PeerId, joined: float, *, waits: bool = True) -> ClientPeer:
    return ClientPeer(Hop(peer, (f"memory:{peer}",)), joined, waits=waits)


MINE = client(ME, 5.0)


def order(*others: ClientPeer, now_s: float = 0.0) -> ClientOrder:
    made = ClientOrder(ME)
    made.announced([MINE, *others], now_s)
    return made


def test_with_nobody_else_it_is_the_turn_of_this_one() -> None:
    alone = order()
    assert alone.is_turn(0.0)
    assert (alone.tick(0.0), alone.wake_at_s) == ([], math.inf)


def test_the_client_that_trains_comes_first_whatever_its_clock_says() -> None:
    found = order(client(A, 1e9, waits=False))
    assert [hop.peer for hop in found.tick(0.0)] == [A]
    found.up(A)
    assert found.reachable == (A,)
    assert not found.is_turn(1e6)
    assert (found.tick(1.0), found.wake_at_s) == ([], math.inf), "only a loss can change that"


def test_of_those_that_wait_who_joined_first_comes_first() -> None:
    assert order(client(A, 6.0)).is_turn(0.0)
    assert not order(client(A, 4.0)).is_turn(PATIENCE_S)


def test_a_client_that_is_lost_has_a_moment_to_come_back() -> None:
    found = order(client(A, 1.0, waits=False))
    found.tick(0.0)
    found.up(A)
    found.lost(A, 10.0)
    found.announced([MINE], 10.0)
    assert not found.is_turn(10.0 + 0.9 * PATIENCE_S)
    assert (found.tick(10.0), found.wake_at_s) == ([], 10.0 + REDIAL_S)
    assert [hop.peer for hop in found.tick(10.0 + REDIAL_S)] == [A]
    assert found.wake_at_s == 10.0 + PATIENCE_S
    assert found.tick(10.0 + 3 * REDIAL_S) == [], "one attempt at a time"
    assert found.wake_at_s == 10.0 + PATIENCE_S
    found.lost(A, 10.5)
    assert not found.is_gone(A, 10.0 + 0.9 * PATIENCE_S)
    assert found.is_gone(A, 10.0 + PATIENCE_S)
    assert not found.is_gone(B, 10.0 + PATIENCE_S), "of whom nothing is known"
    assert found.is_turn(10.0 + PATIENCE_S), "it counts from the first loss"
    found.up(A)
    assert not found.is_turn(20.0)


def test_a_client_that_announces_itself_lives_although_it_cannot_be_reached_from_here() -> None:
    found = order(client(A, 1.0, waits=False))
    found.tick(0.0)
    found.lost(A, 1.0)
    assert not found.is_turn(100.0)
    found.tick(100.0)
    assert found.wake_at_s > 100.0
    found.announced([MINE], 100.0)
    assert found.is_turn(100.0)


def test_one_that_was_before_this_one_and_now_waits_behind_it_is_not_waited_for() -> None:
    found = order(client(A, 1.0, waits=False), client(B, 2.0))
    found.announced([MINE, client(A, 9.0), client(B, 2.0)], 1.0)
    assert [hop.peer for hop in found.tick(1.0)] == [B]
