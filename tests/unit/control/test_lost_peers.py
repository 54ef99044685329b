"""Peers that do not answer are asked again, more and more rarely, for as long as they are remembered."""

from __future__ import annotations

from itertools import pairwise

from shoal.control.lost_peers import MAX_AT_ONCE, MAX_KNOWN, MAX_PAUSE_S, LostPeers


def test_who_is_present_is_not_asked_and_who_was_never_seen_is_not_known() -> None:
    lost = LostPeers()
    assert lost.is_empty
    assert lost.due(["a", "b"], 0.0) == []
    assert lost.due(["b", "a"], 100.0) == []
    assert not lost.is_empty
    lost.due([], 200.0)
    assert not lost.is_empty, "whom it has known it looks for"


def test_a_lost_peer_is_asked_at_once_and_then_more_and_more_rarely() -> None:
    lost = LostPeers()
    lost.due(["a", "b"], 0.0)
    asked = [now_s for now_s in range(1, 100) if lost.due(["b"], float(now_s)) == ["a"]]
    assert asked[:5] == [1, 3, 7, 15, 30]
    assert {later - one for one, later in pairwise(asked[3:])} == {MAX_PAUSE_S}
    # Once it was there again it is looked for as at first.
    assert lost.due(["a", "b"], 100.0) == []
    assert lost.due(["b"], 101.0) == ["a"]


def test_only_few_are_asked_at_a_time_and_the_others_next() -> None:
    lost = LostPeers()
    peers = [f"p{n}" for n in range(2 * MAX_AT_ONCE)]
    lost.due(peers, 0.0)
    assert lost.due([], 1.0) == peers[:MAX_AT_ONCE]
    assert lost.due([], 1.1) == peers[MAX_AT_ONCE:]
    assert lost.due([], 1.2) == []


def test_of_too_many_those_are_forgotten_that_were_seen_least_recently() -> None:
    lost = LostPeers()
    lost.due(["oldest"], 0.0)
    lost.due([f"p{n}" for n in range(MAX_KNOWN)], 1.0)
    asked = {peer for now_s in range(2, 100) for peer in lost.due([], float(now_s))}
    assert asked == {f"p{n}" for n in range(MAX_KNOWN)}
