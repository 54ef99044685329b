"""Which stage a server takes that was given none."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shoal.ids import PeerId, StageIndex
from shoal.swarm.assignment import Files, StageNeed, assign
from shoal.swarm.view import Candidate, Replica, SwarmView
from shoal.wire.messages.base import Hop


def _candidate(name: str, join_unix_s: float, free_memory_bytes: int = 0) -> Candidate:
    return Candidate(Hop(PeerId(name), (f"unix:/{name}",)), join_unix_s, free_memory_bytes)


def _placed(candidate: Candidate, stage: int, *, serving: bool = False) -> Replica:
    return Replica(
        candidate.hop,
        candidate.join_unix_s,
        candidate.free_memory_bytes,
        candidate.device_memory_bytes,
        candidate.max_microbatch_samples,
        stage=StageIndex(stage),
        serving=serving,
    )


def _view(*servers: Candidate) -> SwarmView:
    replicas = sorted((s for s in servers if isinstance(s, Replica)), key=lambda r: (r.stage, r.seniority))
    candidates = sorted((s for s in servers if not isinstance(s, Replica)), key=lambda c: c.seniority)
    return SwarmView(tuple(replicas), tuple(candidates))


def _needs(*device_bytes: int) -> tuple[StageNeed, ...]:
    return tuple(StageNeed(each) for each in device_bytes)


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


@pytest.mark.parametrize("seed", range(40))
def test_servers_of_one_machine_take_different_stages_in_whatever_order_they_join(seed: int) -> None:
    rng = random.Random(seed)
    num_stages, num_hosts = rng.randint(2, 4), rng.randint(2, 3)
    joins = rng.sample(range(100), num_hosts * num_stages)
    servers = [
        Candidate(
            Hop(PeerId(f"{host}-{index}"), (f"unix:{host}:/{host}-{index}", f"tcp:192.168.1.5:{5000 + index}")),
            float(joins.pop()),
        )
        for host in range(num_hosts)
        for index in range(num_stages)
    ]
    stages = assign(_view(*servers), num_stages)
    assert _spread(list(stages.values()), num_stages) == [num_hosts] * num_stages
    # What one takes last may be what is left; a machine that dies still leaves a replica of each stage.
    for dies in range(num_hosts):
        left = {stage for peer, stage in stages.items() if not peer.startswith(f"{dies}-")}
        assert left == set(range(num_stages))


def test_the_stage_with_the_fewest_servers_is_strengthened() -> None:
    settled = [_placed(_candidate(name, 0.0), stage, serving=True) for name, stage in (("a", 0), ("b", 0), ("c", 1))]
    trained = [replace(replica, step=1) for replica in settled]
    stages = assign(_view(*trained, _candidate("d", 1.0), _candidate("e", 2.0)), 3)
    assert stages == {"d": 2, "e": 1}


def test_a_server_replaces_one_that_left_before_it_served() -> None:
    # Stages 0 1 0 1 were taken by a b c d; then a left: by the rule alone the others would sit elsewhere.
    rest = [_placed(_candidate(name, i), stage) for i, (name, stage) in enumerate([("b", 1), ("c", 0), ("d", 1)])]
    view = _view(*rest, _candidate("e", 9.0))
    assert assign(view, 2)[PeerId("e")] == 0


def test_a_stage_that_does_not_fit_the_memory_is_left_to_others() -> None:
    view = _view(_candidate("small", 0.0, free_memory_bytes=10), _candidate("large", 1.0, free_memory_bytes=1000))
    assert assign(view, 2, _needs(500, 5)) == {"small": 1, "large": 0}
    assert assign(view, 2, _needs(500, 50)) == {"large": 0}


def test_an_older_large_server_leaves_a_small_one_what_fits_it() -> None:
    view = _view(_candidate("large", 0.0, free_memory_bytes=1000), _candidate("small", 1.0, free_memory_bytes=10))
    assert assign(view, 2, _needs(5, 500)) == {"small": 0, "large": 1}


def test_of_two_empty_stages_the_one_that_fewer_could_host_comes_first() -> None:
    # One large server and, later, small ones: had it taken stage 0, stage 1 would stay empty.
    large = _candidate("large", 0.0, free_memory_bytes=1000)
    small = [_candidate(name, 1.0 + i, free_memory_bytes=10) for i, name in enumerate("ab")]
    assert assign(_view(large, *small), 3, _needs(5, 5, 500)) == {"a": 0, "b": 1, "large": 2}


def test_older_large_servers_do_not_crowd_the_stage_of_the_small_ones() -> None:
    large = [_candidate(name, i, free_memory_bytes=1000) for i, name in enumerate("ab")]
    small = [_candidate(name, 5 + i, free_memory_bytes=10) for i, name in enumerate("cd")]
    assert assign(_view(*large, *small), 2, _needs(5, 500)) == {"a": 1, "b": 1, "c": 0, "d": 0}


def test_memory_that_is_not_known_is_enough() -> None:
    assert assign(_view(_candidate("a", 0.0)), 1, _needs(10**12)) == {"a": 0}


@pytest.mark.parametrize("seed", range(30))
def test_with_scarce_memory_everybody_computes_the_same_and_no_stage_is_empty_that_could_be_hosted(seed: int) -> None:
    rng = random.Random(seed)
    num_stages = rng.randint(2, 4)
    needs = _needs(*(rng.choice([10, 100, 1000]) for _ in range(num_stages)))
    memories = [rng.choice([10, 100, 1000]) for _ in range(rng.randint(num_stages, 9))]
    servers = [_candidate(f"p{i}", rng.random(), memory) for i, memory in enumerate(memories)]
    first = assign(_view(*servers), num_stages, needs)
    placed: dict[PeerId, Replica] = {}
    for deciding in rng.sample(servers, len(servers)):
        others = [s for s in servers if s is not deciding]
        seen = [placed[s.peer] if s.peer in placed and rng.random() < 0.5 else s for s in others]
        mine = assign(_view(deciding, *seen), num_stages, needs).get(deciding.peer)
        assert mine == first.get(deciding.peer)
        if mine is not None:
            assert needs[mine].fits_whole(deciding)
            placed[deciding.peer] = _placed(deciding, mine)
    # As many stages are hosted as can be at all: large needs are met by large servers first.
    possible, free = 0, sorted(memories, reverse=True)
    for need in sorted((need.device_bytes for need in needs), reverse=True):
        if free and free[0] >= need:
            free.pop(0)
            possible += 1
    assert len(set(first.values())) == possible


NEED = StageNeed(device_bytes=100, step_bytes=40, sample_bytes=10, host_bytes=7, round_bytes=60, max_samples=8)


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        # Steps and averaging do not happen at the same time: the larger of the two counts.
        (_candidate("cpu", 0.0), (100 + 7 + 40 + 80, 0)),
        (replace(_candidate("capped", 0.0), max_microbatch_samples=1), (100 + 7 + 60, 0)),
        (replace(_candidate("wide", 0.0), max_microbatch_samples=99), (100 + 7 + 40 + 80, 0)),
        (replace(_candidate("gpu", 0.0), device_memory_bytes=1), (67, 220)),
        (replace(_candidate("capped gpu", 0.0), device_memory_bytes=1, max_microbatch_samples=2), (67, 160)),
    ],
    ids=lambda value: value.peer if isinstance(value, Candidate) else "",
)
def test_what_a_stage_needs_depends_on_device_and_cap(server: Candidate, expected: tuple[int, int]) -> None:
    assert NEED.of(server, server.max_microbatch_samples) == expected


def test_an_evaluation_counts_where_its_batches_need_more_than_the_microbatches() -> None:
    need = replace(NEED, eval_sample_bytes=3)
    assert need.of(_candidate("cpu", 0.0), None) == (100 + 7 + 40 + 64 * 3, 0)
    assert need.of(_candidate("capped", 0.0), 4) == (100 + 7 + 40 + 4 * 10, 0)


@pytest.mark.parametrize(
    ("host_bytes", "expected"),
    [(0, 4), (107 + 80 + 4 * 40, 4), (107 + 80 + 4 * 40 - 1, 3), (107 + 80 + 40, 1), (107 + 80 + 40 - 1, 1)],
)
def test_a_server_has_as_many_steps_open_as_its_memory_has_room_for_and_one_at_least(
    host_bytes: int, expected: int
) -> None:
    need = replace(NEED, max_steps=4)
    assert need.steps_of(_candidate("cpu", 0.0, host_bytes), None) == expected
    assert need.fits_whole(_candidate("cpu", 0.0, host_bytes)) == (host_bytes == 0 or host_bytes >= 107 + 80 + 40)


FURTHER = replace(NEED, further_bytes=4, further_sample_bytes=2, max_further=50)
"""Each further microbatch of eight samples takes 20 bytes; two open steps take 100 + 7 + 2 * 40 + 8 * 10 without."""


@pytest.mark.parametrize(
    ("host_bytes", "cap", "steps", "expected"),
    [
        (0, None, 1, 0),  # not known
        (227, None, 1, 0),
        (227 + 39, None, 1, 0),
        (227 + 40, None, 1, 1),  # of what is left half
        (227 + 400, None, 1, 10),
        (267 + 400, None, 2, 5),  # of each
        (107 + 40 + 10 + 400, 1, 1, 33),
        (100_000, None, 1, 50),
    ],
)
def test_a_server_holds_further_microbatches_of_each_open_step_in_half_of_the_memory_that_is_left(
    host_bytes: int, cap: int | None, steps: int, expected: int
) -> None:
    server = _candidate("cpu", 0.0, host_bytes)
    assert FURTHER.further_of(server, cap, steps) == expected
    if host_bytes:
        needed = [FURTHER.of(server, cap, steps, further)[0] for further in (0, expected)]
        assert needed[1] - needed[0] <= (host_bytes - needed[0]) // 2
        assert expected == 50 or not FURTHER.fits(server, cap, steps, 2 * (expected + 1))


def test_further_microbatches_lie_on_a_gpu_and_on_their_way_to_it_in_the_memory_of_the_host() -> None:
    def gpu(host_bytes: int, device_bytes: int) -> Candidate:
        return replace(_candidate("gpu", 0.0, host_bytes), device_memory_bytes=device_bytes)

    assert FURTHER.further_of(gpu(67 + 400, 220 + 400), None, 1) == 10
    assert FURTHER.further_of(gpu(67 + 400, 220 + 40), None, 1) == 1
    assert FURTHER.further_of(gpu(67 + 40, 220 + 400), None, 1) == 1
    assert FURTHER.further_of(gpu(0, 220 + 400), None, 1) == 10, "unknown host memory is enough"


def test_a_gpu_needs_room_on_both_sides() -> None:
    def gpu(host_bytes: int, device_bytes: int) -> Candidate:
        return replace(_candidate("gpu", 0.0, host_bytes), device_memory_bytes=device_bytes)

    assert NEED.fits_whole(gpu(67, 220))
    assert not NEED.fits_whole(gpu(66, 220))
    assert not NEED.fits_whole(gpu(67, 219))
    assert NEED.fits_whole(gpu(0, 220)), "unknown host memory is enough"


FILED = replace(NEED, file_bytes=5, round_file_bytes=30, moment_bytes=50, disk_bytes=80)
"""In memory it takes 227 bytes with eight samples and 167 with one; with vectors in files 222 and 152, with moments
there too 172 and 102."""


def _with_disk(host_bytes: int, disk_bytes: int = 80, cap: int | None = None) -> Candidate:
    return replace(_candidate("disk", 0.0, host_bytes), free_disk_bytes=disk_bytes, max_microbatch_samples=cap)


@pytest.mark.parametrize(
    ("server", "files", "cap", "is_whole"),
    [
        (_with_disk(0), Files.NOTHING, None, True),  # nobody knows how much memory there is
        (_with_disk(227), Files.NOTHING, None, True),
        (_with_disk(226), Files.VECTORS, None, True),
        (_with_disk(222), Files.VECTORS, None, True),
        # Smaller microbatches are rather taken than moments in files.
        (_with_disk(221), Files.VECTORS, 7, False),
        (_with_disk(152), Files.VECTORS, 1, False),
        (_with_disk(151), Files.MOMENTS, 5, False),
        (_with_disk(151, cap=4), Files.MOMENTS, 4, False),
        (_with_disk(102), Files.MOMENTS, 1, False),
        # Without room on a disk all of it lies in memory.
        (_with_disk(226, disk_bytes=79), Files.NOTHING, 7, False),
        (_with_disk(167, disk_bytes=0), Files.NOTHING, 2, False),
        # What a GPU has of its own is in no file.
        (replace(_with_disk(32), device_memory_bytes=220), Files.VECTORS, None, True),
        (replace(_with_disk(32), device_memory_bytes=170), Files.VECTORS, 3, False),
    ],
)
def test_where_memory_is_short_files_take_its_place_and_moments_only_where_nothing_else_helps(
    server: Candidate, files: Files, cap: int | None, is_whole: bool
) -> None:
    assert FILED.fits_cut(server)
    assert (FILED.files_of(server), FILED.cap_of(server), FILED.fits_whole(server)) == (files, cap, is_whole)


def test_a_stage_that_does_not_fit_with_all_in_files_is_not_taken() -> None:
    assert not FILED.fits_cut(_with_disk(101))
    assert not FILED.fits_cut(_with_disk(166, disk_bytes=79))
    assert not FILED.fits_cut(replace(_with_disk(31), device_memory_bytes=220))
    assert not FILED.fits_cut(replace(_with_disk(1000), device_memory_bytes=149))


def test_open_steps_and_further_microbatches_count_what_lies_in_files() -> None:
    need = replace(FILED, max_steps=4, further_bytes=4, max_further=50)
    server = _with_disk(226)
    assert (need.steps_of(server, None), need.further_of(server, None, 1)) == (1, 0)
    more = _with_disk(226, cap=1)  # it takes 167 bytes in memory
    assert need.files_of(more) is Files.NOTHING
    assert need.steps_of(more, 1) == 2
    tight = replace(_with_disk(156 + 40), max_microbatch_samples=5)  # 197 in memory, 192 with files
    assert (need.files_of(tight), need.further_of(tight, 5, 1)) == (Files.VECTORS, 0)
    assert replace(need, further_bytes=1).further_of(tight, 5, 1) == 2


def _reference_cap(need: StageNeed, server: Candidate) -> int | None:
    """Try every number of samples; 0: there is none."""
    if need.fits_whole(server):
        return server.max_microbatch_samples
    most = 200 if server.max_microbatch_samples is None else server.max_microbatch_samples
    return max((n for n in range(need.min_samples, most) if need.fits(server, n)), default=0)


@pytest.mark.parametrize("seed", range(30))
def test_a_server_takes_as_many_samples_as_fit_and_more_memory_never_means_fewer(seed: int) -> None:
    rng = random.Random(seed)
    need = StageNeed(
        rng.randrange(100),
        step_bytes=rng.randrange(50),
        sample_bytes=rng.randrange(20),
        eval_sample_bytes=rng.randrange(10),
        host_bytes=rng.randrange(50),
        round_bytes=rng.randrange(300),
        max_samples=rng.choice([1, 3, 16, 100]),
        min_samples=rng.choice([1, 1, 2]),
    )
    cap, device_bytes = rng.choice([None, None, 1, 5, 40]), rng.choice([0, 400])
    before = -1
    for memory in range(1, 3000, rng.choice([1, 7])):
        server = replace(_candidate("s", 0.0, memory), max_microbatch_samples=cap, device_memory_bytes=device_bytes)
        found = need.cap_of(server) if need.fits_cut(server) else 0
        assert found == _reference_cap(need, server)
        order = 10**6 if found is None else found
        assert before <= order, "monotone in memory"
        before = order


def test_a_stage_that_fits_only_in_small_microbatches_is_taken_where_it_has_nobody_otherwise() -> None:
    needs = tuple(StageNeed(size, sample_bytes=10, max_samples=8) for size in (100, 200))
    small, other, large = (
        _candidate(name, at, free) for name, at, free in (("s", 1, 250), ("o", 2, 250), ("l", 3, 900))
    )
    # Alone, the small ones host all stages; the second stage by one that takes five samples at a time.
    assert assign(_view(small, other), 2, needs) == {"s": 0, "o": 1}
    assert needs[1].cap_of(other) == 5
    # With a large one nobody needs smaller microbatches.
    assert assign(_view(small, other, large), 2, needs) == {"s": 0, "o": 0, "l": 1}
    # A server that takes no stage whole is not turned away.
    tiny = _candidate("t", 4.0, 120)
    assert assign(_view(small, large, tiny), 2, needs) == {"s": 0, "l": 1, "t": 0}
    assert assign(_view(_candidate("none", 0.0, 105), large), 2, needs) == {"l": 0}


def test_what_is_announced_of_a_lowered_cap_changes_no_assignment() -> None:
    needs = tuple(StageNeed(size, sample_bytes=10, max_samples=8) for size in (100, 200))
    small, other = _candidate("s", 1.0, 250), _candidate("o", 2.0, 250)
    placed = replace(_placed(other, 1), cap=5)
    assert assign(_view(small, placed), 2, needs) == assign(_view(small, other), 2, needs)
