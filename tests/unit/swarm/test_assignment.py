"""Which stage a server takes that was given none."""

from __future__ import annotations

import random

import pytest

from shoal.ids import PeerId, StageIndex
from shoal.swarm.assignment import assign
from shoal.swarm.view import Candidate, Replica, SwarmView
from shoal.wire.messages.base import Hop


def _candidate(name: str, join_unix_s: float, free_memory_bytes: int = 0) -> Candidate:
    return Candidate(Hop(PeerId(name), (f"unix:/{name}",)), join_unix_s, free_memory_bytes)


def _placed(candidate: Candidate, stage: int, *, serving: bool = False, capacity: float = 0.0) -> Replica:
    return Replica(
        candidate.hop,
        candidate.join_unix_s,
        candidate.free_memory_bytes,
        stage=StageIndex(stage),
        serving=serving,
        capacity=capacity,
    )


def _view(*servers: Candidate) -> SwarmView:
    replicas = sorted((s for s in servers if isinstance(s, Replica)), key=lambda r: (r.stage, r.seniority))
    candidates = sorted((s for s in servers if not isinstance(s, Replica)), key=lambda c: c.seniority)
    return SwarmView(tuple(replicas), tuple(candidates))


def _spread(stages: list[int], num_stages: int) -> list[int]:
    return sorted(stages.count(s) for s in range(num_stages))


@pytest.mark.parametrize("seed", range(40))
def test_servers_that_announce_themselves_in_any_order_end_up_even(seed: int) -> None:
    rng = random.Random(seed)
    num_stages = rng.randint(1, 5)
    servers = [_candidate(f"p{i}", rng.choice([1.0, 2.0, 3.0])) for i in range(rng.randint(num_stages, 12))]
    pending, placed = list(servers), list[Replica]()
    rng.shuffle(pending)
    while pending:
        # Each decides by what it sees: some have announced their stage, others have not yet.
        deciding = pending.pop()
        stage = assign(_view(deciding, *pending, *placed), num_stages)[deciding.peer]
        placed.append(_placed(deciding, stage))
    counts = _spread([r.stage for r in placed], num_stages)
    assert counts[-1] - counts[0] <= 1


@pytest.mark.parametrize("seed", range(40))
def test_it_does_not_matter_whose_announcement_has_been_seen_already(seed: int) -> None:
    rng = random.Random(seed)
    num_stages = rng.randint(2, 5)
    servers = [_candidate(f"p{i}", rng.random()) for i in range(rng.randint(num_stages, 12))]
    placed: dict[PeerId, Replica] = {}
    for deciding in rng.sample(servers, len(servers)):
        # Everybody is seen, but some of those that have announced a stage still as candidates.
        others = [s for s in servers if s is not deciding]
        seen = [placed[s.peer] if s.peer in placed and rng.random() < 0.5 else s for s in others]
        placed[deciding.peer] = _placed(deciding, assign(_view(deciding, *seen), num_stages)[deciding.peer])
    counts = _spread([r.stage for r in placed.values()], num_stages)
    assert counts[-1] - counts[0] <= 1


def test_servers_that_serve_before_the_last_has_chosen_do_not_change_its_choice() -> None:
    a, b, c, d = (_candidate(name, i) for i, name in enumerate("abcd"))
    # c chooses while all wait; b only when a and d, who have chosen stages 0 and 1, serve already.
    assert assign(_view(a, b, c, d), 2)[c.peer] == 0
    serving = (_placed(a, 0, serving=True), _placed(d, 1, serving=True))
    assert assign(_view(*serving, b, c), 2)[b.peer] == 1


def test_the_older_server_takes_the_first_gap_and_equal_times_are_ordered_by_peer_id() -> None:
    view = _view(_candidate("b", 1.0), _candidate("a", 1.0), _candidate("c", 0.5))
    assert assign(view, 2) == {"c": 0, "a": 1, "b": 0}


def test_an_empty_stage_comes_before_one_with_little_capacity() -> None:
    view = _view(_placed(_candidate("a", 0.0), 1, serving=True, capacity=0.001), _candidate("b", 1.0))
    assert assign(view, 2)[PeerId("b")] == 0


def test_the_stage_with_the_least_capacity_is_strengthened_even_if_it_has_more_replicas() -> None:
    view = _view(
        _placed(_candidate("a", 0.0), 0, serving=True, capacity=100.0),
        _placed(_candidate("b", 0.0), 1, serving=True, capacity=20.0),
        _placed(_candidate("c", 0.0), 1, serving=True, capacity=20.0),
        _candidate("d", 1.0),
    )
    assert assign(view, 2)[PeerId("d")] == 1


def test_a_server_replaces_one_that_left_before_it_served() -> None:
    # Stages 0 1 0 1 were taken by a b c d; then a left: by the rule alone the others would sit elsewhere.
    rest = [_placed(_candidate(name, i), stage) for i, (name, stage) in enumerate([("b", 1), ("c", 0), ("d", 1)])]
    view = _view(*rest, _candidate("e", 9.0))
    assert assign(view, 2)[PeerId("e")] == 0


def test_a_stage_that_does_not_fit_the_memory_is_left_to_others() -> None:
    view = _view(_candidate("small", 0.0, free_memory_bytes=10), _candidate("large", 1.0, free_memory_bytes=1000))
    assert assign(view, 2, stage_bytes=(500, 5)) == {"small": 1, "large": 0}
    assert assign(view, 2, stage_bytes=(500, 50)) == {"large": 0}
