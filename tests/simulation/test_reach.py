"""The worlds do what they are for: an invariant that nothing ever puts to the test would hold as well."""

from __future__ import annotations

import pytest
from tests.simulation.membership.world import World as MembershipWorld
from tests.simulation.placing.world import World as PlacingWorld
from tests.simulation.round.moving import MovingWorld
from tests.simulation.round.world import World as RoundWorld
from tests.simulation.safety import Broken, ChainSafety, Process, Split
from tests.simulation.split.world import SplitWorld
from tests.simulation.state.slow_world import SlowWorld
from tests.simulation.step.world import World as StepWorld
from tests.simulation.swarm.snapshots import SnapshotWorld


def test_every_round_is_decided_without_faults() -> None:
    assert all(RoundWorld(seed, faults=False).run() >= 12 for seed in range(10))


def test_clients_take_over_stages_are_restored_and_the_swarm_is_hardly_ever_split() -> None:
    worlds = [RoundWorld(seed) for seed in range(60)]
    for world in worlds:
        world.run()
    coordinators = [{record.ballot.peer for record in world.checks.records.values()} for world in worlds]
    assert sum(len(peers) > 1 for peers in coordinators) > 5
    assert sum(world.checks.num_restored > 0 for world in worlds) > 2
    assert sum(world.is_split for world in worlds) <= 1


def test_chains_part_and_meet_and_samples_of_those_that_are_left_are_free_again() -> None:
    worlds = [SplitWorld(seed) for seed in range(60)]
    for world in worlds:
        world.run()
    left = [left for world in worlds for left in world.chains_left]
    assert sum(len(world.chains_left) > 0 for world in worlds) > 20
    assert sum(chain.left.round > chain.kept.round for chain in left) > 2, "also the longer one is left"
    assert sum(chain.num_freed > 0 for chain in left) > 2


def test_trainers_are_replaced_and_steps_are_aborted() -> None:
    worlds = [StepWorld(seed) for seed in range(30)]
    for world in worlds:
        world.run()
    assert sum(max(world.generations.values()) > 1 for world in worlds) > 10
    assert any(key.attempt > 0 for world in worlds for key in world.safety.generations_at)


def test_servers_that_die_go_on_from_what_their_buddies_keep() -> None:
    worlds = [SnapshotWorld(seed) for seed in range(40)]
    for world in worlds:
        world.run()
    assert sum(world.num_kept > 20 for world in worlds) > 20
    assert sum(world.num_resumed for world in worlds) > 5


def test_servers_move_to_where_they_are_needed() -> None:
    worlds = [MovingWorld(seed) for seed in range(20)]
    for world in worlds:
        world.run()
    assert sum(world.num_switched for world in worlds) > 10


def test_a_successor_sends_no_second_server_when_the_coordinator_dies_after_an_order() -> None:
    worlds = [MovingWorld(seed, faults=False, coordinators_die=True) for seed in range(30)]
    for world in worlds:
        world.run()
    assert sum(world.num_switched for world in worlds) > 20


def test_peers_are_suspected_and_servers_are_moved() -> None:
    watched, placed = [MembershipWorld(seed) for seed in range(40)], [PlacingWorld(seed) for seed in range(120)]
    for world in (*watched, *placed):
        world.run()
    assert sum(world.num_suspicions > 0 for world in watched) > 10
    assert sum(len(world.order) > 0 for world in placed) > 10


def test_a_newcomer_that_is_too_slow_for_the_ring_does_not_arrive_and_begins_again_and_again() -> None:
    world = SlowWorld(2, 2.6)
    with pytest.raises(Broken, match="has not arrived"):
        world.run()
    assert world.num_restarts > 1


def test_one_that_is_too_slow_arrives_when_a_round_takes_long_enough() -> None:
    arrived_in = [SlowWorld(seed, 2.6, calm_round=12).run() for seed in range(40)]
    assert max(arrived_in) <= 13, "the others had several rounds in which nobody trained"
    assert sum(round >= 12 for round in arrived_in) > 30


A, B, C, D = (Process(peer) for peer in ("R0.0", "R0.1", "R1.0", "R1.1"))


def test_two_records_of_a_round_are_a_split_only_where_nobody_is_a_member_of_both() -> None:
    chain = ChainSafety()
    assert chain.commits(1, "one", {A, C})
    assert not chain.commits(1, "one", {A, C})
    with pytest.raises(Broken, match="members of both"):
        chain.swaps(C, 1, "other", {B, C})
    with pytest.raises(Broken, match="members of both"):
        chain.commits(1, "other", {B, C})
    with pytest.raises(Split):
        chain.swaps(B, 1, "other", {B, D})
    with pytest.raises(Split):  # a CommitRecord of what was dropped reached it late
        chain.swaps(B, 1, "other", {B, C})


@pytest.mark.parametrize(("heard", "found"), [((), Split), ((A,), Broken), ((C,), Split)])
def test_a_member_that_was_started_again_is_another_one_where_nobody_who_has_taken_the_first_record_is_heard(
    heard: tuple[Process, ...], found: type[Exception]
) -> None:
    chain = ChainSafety(lambda _, process: process in heard)
    chain.swaps(A, 1, "one", {A, B}, "b1")
    with pytest.raises(found):
        chain.commits(1, "other", {Process(B.peer, 2), D}, "b2")


def test_a_record_that_its_coordinator_replaces_and_others_finish_is_a_split_unless_somebody_has_taken_both() -> None:
    for both, found in ((set[Process](), Split), ({A}, Broken)):
        chain = ChainSafety()
        for who in {B, *both}:
            chain.swaps(who, 1, "one", {A, B}, "b1")
        with pytest.raises(found):
            chain.swaps(A, 1, "other", {A}, "b1")
    for is_heard, found in ((False, Split), (True, Broken)):
        chain = ChainSafety(lambda *_, is_heard=is_heard: is_heard)
        for who in (B, C):  # C is a member of the other one as well, and was told of the first alone
            chain.swaps(who, 1, "one", {A, B, C}, "b1")
        with pytest.raises(found):
            chain.swaps(A, 1, "other", {A, C}, "b1")
    chain = ChainSafety()
    chain.swaps(B, 1, "one", {A, B}, "b1")
    with pytest.raises(Broken, match="members of both"):
        chain.swaps(A, 1, "other", {A}, "b2")


@pytest.mark.parametrize(("heard", "found"), [((), Split), ((B,), Broken)])
def test_who_takes_a_dropped_record_just_before_its_successor_commits_is_apart_unless_that_has_heard_of_it(
    heard: tuple[Process, ...], found: type[Exception]
) -> None:
    chain = ChainSafety(lambda _, process: process in heard)
    chain.swaps(B, 1, "one", {A, B, C}, "b1")
    with pytest.raises(found):
        chain.commits(1, "other", {A, C}, "b2")
    with pytest.raises(Broken):  # who has taken the one makes no other
        chain.commits(1, "other", {A, B}, "b2")
