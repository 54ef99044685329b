"""Who moves before the first round: where servers stand, and what is corrected of it."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest

from shoal.ids import PeerId, StageIndex
from shoal.swarm.placement import StageMove, improve
from shoal.swarm.view import Candidate, Replica, SwarmView
from shoal.wire.messages.base import Hop

correction = partial(improve, trains=False)


def _hop(name: str, host: str) -> Hop:
    return Hop(PeerId(name), (f"unix:{host}:/{name}", "tcp:192.168.1.5:5000") if host else (f"unix:/{name}",))


def _swarm(*servers: tuple[str, str, int], pinned: str = "") -> SwarmView:
    """Servers (name, machine, stage), the oldest first."""
    return SwarmView(
        tuple(
            Replica(_hop(name, host), float(age), stage=StageIndex(stage), pinned=name in pinned)
            for age, (name, host, stage) in enumerate(servers)
        )
    )


def _peers(view: SwarmView) -> set[PeerId]:
    return {replica.peer for replica in view.replicas}


def _corrected(view: SwarmView, num_stages: int) -> tuple[SwarmView, list[StageMove]]:
    """Carry out what is wanted, one move after the other."""
    moves: list[StageMove] = []
    while (move := correction(view, num_stages, _peers(view))) is not None:
        replica = view.replica(move.peer)
        assert replica is not None
        assert replica.stage == move.origin != move.stage
        assert len(view.by_stage(move.origin)) > 1
        assert move.urgent == (not view.by_stage(move.stage))
        view = view.placed({move.peer: move.stage})
        moves.append(move)
        assert len(moves) <= 2 * len(view.replicas), "it comes to an end"
    return view, moves


def _counts(view: SwarmView, num_stages: int) -> list[int]:
    return sorted(view.num_replicas(num_stages))


def test_servers_that_stand_well_stay() -> None:
    view = _swarm(("a", "left", 0), ("b", "left", 1), ("c", "right", 0), ("d", "right", 1))
    assert correction(view, 2, _peers(view)) is None


def test_three_of_one_stage_give_one_away_which_shares_its_machine() -> None:
    view = _swarm(("a", "left", 0), ("b", "left", 0), ("c", "right", 0), ("d", "right", 1))
    # Of c and b the youngest is c, but its machine has a replica of the other stage.
    assert correction(view, 2, _peers(view)) == StageMove(PeerId("b"), 0, 1, False)


def test_two_machines_that_each_have_all_of_a_stage_swap_one() -> None:
    view = _swarm(("a", "left", 0), ("b", "left", 0), ("c", "right", 1), ("d", "right", 1))
    after, moves = _corrected(view, 2)
    assert len(moves) == 2
    assert {replica.hosts for replica in after.by_stage(0)} == {frozenset({"left"}), frozenset({"right"})}
    assert {replica.hosts for replica in after.by_stage(1)} == {frozenset({"left"}), frozenset({"right"})}


def test_servers_of_one_machine_only_count() -> None:
    for host in ("", "here"):
        view = _swarm(("a", host, 0), ("b", host, 0), ("c", host, 0), ("d", host, 1))
        after, moves = _corrected(view, 2)
        assert _counts(after, 2) == [2, 2]
        assert [move.peer for move in moves] == ["c"], "the youngest"


def test_a_stage_without_anybody_comes_first_and_the_last_one_of_a_stage_stays() -> None:
    view = _swarm(("a", "left", 0), ("b", "right", 0))
    assert correction(view, 2, _peers(view)) == StageMove(PeerId("b"), 0, 1, True)
    assert correction(_swarm(("a", "left", 0)), 2, {PeerId("a")}) is None
    # The other one is only heard of.
    assert correction(view, 2, {PeerId("b")}) is None


def test_who_was_given_its_stage_who_refuses_and_who_cannot_be_reached_stays() -> None:
    servers = (("a", "left", 0), ("b", "left", 0), ("c", "left", 0), ("d", "left", 1))
    view = _swarm(*servers, pinned="c")
    assert correction(view, 2, _peers(view)) == StageMove(PeerId("b"), 0, 1, False)
    assert correction(view, 2, _peers(view), {PeerId("b")}) == StageMove(PeerId("a"), 0, 1, False)
    assert correction(view, 2, _peers(view), {PeerId("a"), PeerId("b")}) is None
    assert correction(view, 2, {PeerId("a"), PeerId("c")}) == StageMove(PeerId("a"), 0, 1, False)


def test_nobody_moves_for_a_place_that_a_candidate_will_take() -> None:
    view = _swarm(("a", "left", 0), ("b", "left", 0), ("c", "left", 1))
    coming = SwarmView(view.replicas, (Candidate(_hop("z", "right"), 9.0),))
    assert correction(coming, 2, _peers(view)) is None


@pytest.mark.parametrize("seed", range(60))
def test_whatever_each_has_chosen_the_end_is_even_and_no_machine_has_more_of_a_stage_than_it_must(seed: int) -> None:
    rng = random.Random(seed)
    num_stages = rng.randint(2, 4)
    sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 6))]
    names = [(f"{host}-{index}", f"10.0.0.{host}") for host, size in enumerate(sizes) for index in range(size)]
    rng.shuffle(names)
    # What the first has chosen, others who have not seen it often choose as well.
    favourite = rng.randrange(num_stages)
    stages = [favourite if rng.random() < 0.6 else rng.randrange(num_stages) for _ in names]
    view = _swarm(*((name, host, stage) for (name, host), stage in zip(names, stages, strict=True)))
    after, _ = _corrected(view, num_stages)
    counts = _counts(after, num_stages)
    assert counts[-1] - counts[0] <= 1
    on_host = Counter[tuple[str, int]]((next(iter(replica.hosts)), replica.stage) for replica in after.replicas)
    for host, size in enumerate(sizes):
        of_host = [on_host[f"10.0.0.{host}", stage] for stage in range(num_stages)]
        assert max(of_host) <= -(-size // num_stages), (of_host, after)
