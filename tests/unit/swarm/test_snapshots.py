"""Who keeps whose snapshot, what a buddy keeps of it, and which one a new generation goes on from."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import pytest

from shoal.ids import PeerId, StageIndex, StepKey
from shoal.swarm.snapshots import (
    MAX_ASKED,
    AskBuddy,
    Base,
    SnapshotSearch,
    SnapshotStore,
    Take,
    buddies,
    continues,
    is_due,
)
from shoal.swarm.view import Replica, SwarmView
from shoal.wire.messages.base import Hop, SampleRange
from shoal.wire.messages.round import StageHashes
from shoal.wire.messages.snapshot import Snapshot
from shoal.wire.messages.step import StepEntry

ME, A, B, C = PeerId("me"), PeerId("A"), PeerId("B"), PeerId("C")
HASHES = StageHashes("p", "m", "b")
BASE = Base(3, "record", HASHES)


def replica(name: str, stage: int, host: str = "") -> Replica:
    addresses = (f"unix:{host}:/x", "tcp:192.168.1.5:1") if host else ("unix:/x",)
    return Replica(Hop(PeerId(name), addresses), 0.0, stage=StageIndex(stage))


def snapshot(owner: PeerId = ME, *, steps: int = 2, **changes: object) -> Snapshot:
    log = tuple(
        StepEntry(
            StepKey(0, 1, number, 0), (owner, A), number, (SampleRange(0, number, number + 1),), 1, 1, 1.0, 0.1, False
        )
        for number in range(steps)
    )
    made = Snapshot(owner, 0, 1, 3, "record", HASHES, log, 100, f"digest of {steps}")
    return msgspec.structs.replace(made, **changes)


def test_a_buddy_serves_another_stage_and_is_on_another_host_when_there_is_one() -> None:
    near, far = replica("near", 1, "host1"), replica("far", 2, "host2")
    own_stage, unreachable = replica("twin", 0, "host3"), replica("hidden", 1)
    view = SwarmView(replicas=(own_stage, near, unreachable, far))
    me = replica("me", 0, "host1").hop
    assert buddies(view, me, 0)[0] is far
    assert {buddy.peer for buddy in buddies(view, me, 0)} == {"near", "far", "hidden"}
    assert buddies(SwarmView(replicas=(own_stage,)), me, 0) == ()


def test_everybody_computes_the_same_buddy_and_few_change_when_one_leaves() -> None:
    servers = [replica(f"peer{number}", 1, f"host{number}") for number in range(20)]
    owners = [replica(f"owner{number}", 0, "other").hop for number in range(200)]
    view, backwards = SwarmView(replicas=tuple(servers)), SwarmView(replicas=tuple(reversed(servers)))
    first = {owner.peer: buddies(view, owner, 0)[0].peer for owner in owners}
    assert first == {owner.peer: buddies(backwards, owner, 0)[0].peer for owner in owners}
    load = Counter(first.values())
    assert len(load) == 20
    assert max(load.values()) < 40
    left = view.without([PeerId("peer7")])
    moved = {peer for owner in owners if (peer := owner.peer) and buddies(left, owner, 0)[0].peer != first[peer]}
    assert moved == {owner for owner, buddy in first.items() if buddy == "peer7"}
    assert len(buddies(view, owners[0], 0)) == MAX_ASKED


@pytest.mark.parametrize(("commits", "every", "due"), [(0, 2, False), (1, 2, False), (4, 2, True), (4, 0, False)])
def test_a_snapshot_is_due_after_every_so_many_commits(commits: int, every: int, due: bool) -> None:
    assert is_due(commits, every) is due


def test_a_snapshot_continues_exactly_the_state_it_was_trained_from() -> None:
    assert continues(snapshot(), BASE)
    assert not continues(snapshot(round=2), BASE)
    assert not continues(snapshot(record_hash="another chain"), BASE)
    assert not continues(snapshot(hashes=StageHashes("restored", "m", "b")), BASE)


# -- a buddy


def buddy(room_bytes: int = 1000) -> SnapshotStore:
    """Of stage 1, which holds record 3."""
    store = SnapshotStore(1, room_bytes)
    store.recorded(3)
    return store


def test_a_buddy_keeps_only_the_newest_whole_snapshot_of_each_owner() -> None:
    store = buddy()
    for steps in (2, 4):
        assert store.offered(ME, snapshot(steps=steps)) == ""
        store.completed(ME)
    assert store.whole(ME) == snapshot(steps=4)
    assert store.used_bytes == 100
    assert store.offered(A, snapshot(A)) == ""
    store.completed(A)
    assert store.used_bytes == 200


def test_what_is_not_whole_does_not_replace_what_is() -> None:
    store = buddy()
    store.offered(ME, snapshot(steps=2))
    store.completed(ME)
    store.offered(ME, snapshot(steps=4))
    store.lost(ME)
    assert (store.whole(ME), store.coming(ME), store.used_bytes) == (snapshot(steps=2), None, 100)
    store.completed(ME)
    assert store.whole(ME) == snapshot(steps=2)


def test_a_snapshot_that_does_not_fit_is_refused_and_the_one_before_stays() -> None:
    store = buddy(250)
    store.offered(ME, snapshot(steps=2), 20)
    store.completed(ME)
    assert "130" in store.offered(ME, snapshot(steps=4), 31)
    assert store.offered(ME, snapshot(steps=4), 30) == ""
    assert "room for 0" in store.offered(A, snapshot(A))
    assert store.whole(ME) == snapshot(steps=2)


def test_a_buddy_refuses_what_is_old_of_its_own_stage_or_not_the_senders() -> None:
    store = buddy()
    assert "record 2" in store.offered(ME, snapshot(round=2))
    assert "record 5" in store.offered(ME, snapshot(round=5))
    assert store.offered(ME, snapshot(round=4)) == ""
    assert store.offered(ME, snapshot(stage=1))
    assert store.offered(A, snapshot(ME))
    assert store.used_bytes == 0


def test_the_next_record_makes_room() -> None:
    store = buddy()
    store.offered(ME, snapshot())
    store.completed(ME)
    store.offered(ME, snapshot(steps=4))
    store.offered(A, snapshot(A, round=4))
    store.recorded(3)
    assert store.used_bytes == 300
    store.recorded(4)
    assert (store.whole(ME), store.coming(ME), store.coming(A), store.used_bytes) == (
        None,
        None,
        snapshot(A, round=4),
        100,
    )


# -- a new generation


def search(generation: int = 2) -> SnapshotSearch:
    machine = SnapshotSearch(ME, 0, generation, 2.0)
    assert machine.begin([A, B], 0.0) == [AskBuddy(A), AskBuddy(B)]
    return machine


def test_the_newest_snapshot_of_all_buddies_is_taken_once() -> None:
    machine = search()
    assert machine.receive(A, snapshot(steps=2), 0.1) == []
    assert machine.receive(B, snapshot(steps=4), 0.2) == [Take(snapshot(steps=4))]
    assert not machine.is_settled(BASE)
    assert machine.fetched(True, 0.3) == []
    assert machine.is_settled(BASE)
    assert machine.take(BASE) == snapshot(steps=4)
    assert machine.take(BASE) is None


def test_one_whose_content_is_wrong_gives_way_to_the_next_best() -> None:
    machine = search()
    machine.receive(A, snapshot(steps=2), 0.1)
    machine.receive(B, snapshot(steps=4), 0.2)
    assert machine.fetched(False, 0.3) == [Take(snapshot(steps=2))]
    machine.fetched(True, 0.4)
    assert machine.take(BASE) == snapshot(steps=2)


@pytest.mark.parametrize("how", ["lost", "silent"])
def test_a_buddy_that_stops_in_the_middle_gives_way_as_well(how: str) -> None:
    machine = search()
    machine.receive(A, snapshot(steps=2), 0.1)
    machine.receive(B, snapshot(steps=4), 1.0)
    machine.progressed(2.5)
    assert machine.tick(4.0) == []
    effects = machine.lost(B, 4.1) if how == "lost" else machine.tick(4.5)
    assert effects == [Take(snapshot(steps=2))]


def test_what_several_have_comes_from_all_of_them_until_none_is_left() -> None:
    machine = search()
    machine.receive(A, snapshot(), 0.1)
    assert machine.receive(B, snapshot(), 0.2) == [Take(snapshot())]
    assert machine.givers == {A, B}
    assert machine.receive(A, None, 0.3) == []
    assert (machine.taking, machine.givers) == (snapshot(), {B})
    machine.receive(B, None, 0.4)
    assert machine.is_over


def test_nobody_waits_longer_than_its_patience_for_a_silent_buddy() -> None:
    machine = search()
    machine.receive(A, snapshot(), 0.1)
    assert machine.wake_at_s == 2.0
    assert machine.tick(2.0) == [Take(snapshot())]
    assert machine.tick(4.0) == []
    assert machine.is_over
    assert machine.wake_at_s == math.inf
    assert machine.take(BASE) is None


def test_without_buddies_it_is_over_at_once() -> None:
    machine = SnapshotSearch(ME, 0, 2, 2.0)
    assert machine.begin([], 0.0) == []
    assert machine.is_over


@pytest.mark.parametrize(
    "other", [snapshot(A), snapshot(stage=1), snapshot(generation=2)], ids=["owner", "stage", "an older generation"]
)
def test_only_this_replicas_last_life_is_taken(other: Snapshot) -> None:
    machine = search(generation=2 if other.generation == 1 else 4)
    machine.receive(A, other, 0.1)
    machine.receive(B, None, 0.1)
    assert machine.is_over
    assert machine.found is None


def test_what_does_not_continue_the_state_is_not_taken_then_nor_later() -> None:
    machine = search()
    machine.receive(A, snapshot(), 0.1)
    machine.receive(B, None, 0.1)
    assert machine.is_settled(Base(4, "next", HASHES))
    assert not machine.is_settled(BASE)
    machine.fetched(True, 0.2)
    assert machine.take(Base(2, "before", HASHES)) is None  # on its way to what the snapshot continues
    assert machine.take(Base(3, "another chain", HASHES)) is None
    assert machine.take(BASE) is None
