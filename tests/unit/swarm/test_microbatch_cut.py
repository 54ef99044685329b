"""How microbatches are cut where a replica takes fewer samples."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.ids import PeerId
from shoal.swarm.microbatch_cut import (
    MAX_MICROBATCHES,
    KnownCaps,
    MicrobatchPart,
    cut,
    exceeded,
    lowered,
    refusal,
    smallest_cap,
    too_large,
    within,
)
from shoal.swarm.step_operations import MALFORMED
from shoal.wire.messages.base import Hop, ReplicaRef, Replicas

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


@pytest.mark.parametrize(
    ("sizes", "cap", "expected"),
    [
        ((4, 3), None, [4, 3]),
        ((4, 3), 4, [4, 3]),
        ((4, 3), 3, [2, 2, 3]),
        ((5,), 2, [2, 2, 1]),
        ((2, 1), 1, [1, 1, 1]),
        ((7,), 3, [3, 3, 1]),
    ],
)
def test_parts_are_as_few_and_as_even_as_the_cap_allows(
    sizes: tuple[int, ...], cap: int | None, expected: list[int]
) -> None:
    assert [part.num_samples for part in cut(sizes, cap)] == expected


def test_a_part_says_where_its_samples_lie() -> None:
    assert cut((3, 2), 2) == (MicrobatchPart(0, 0, 2), MicrobatchPart(0, 2, 3), MicrobatchPart(1, 0, 2))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 50))
def test_every_sample_is_in_one_part_and_no_part_above_the_cap(sizes: list[int], cap: int) -> None:
    parts = cut(sizes, cap)
    assert all(1 <= part.num_samples <= cap for part in parts)
    for whole, num_samples in enumerate(sizes):
        own = [part for part in parts if part.whole == whole]
        assert (own[0].start, own[-1].stop) == (0, num_samples)
        assert all(before.stop == after.start for before, after in pairwise(own))
        assert len(own) == -(-num_samples // cap)
    assert [part.whole for part in parts] == sorted(part.whole for part in parts)
    # What a step's log shows of the sizes is enough to cut its batch again in the same way.
    assert cut(sizes, max(part.num_samples for part in parts)) == parts


def replicas(caps: dict[PeerId, int | None]) -> Replicas:
    return (tuple(ReplicaRef(Hop(peer, ()), cap) for peer, cap in caps.items()),)


def test_the_smallest_cap_on_the_path_counts() -> None:
    assert smallest_cap((4, None)) == 4
    assert smallest_cap((4, 2)) == 2
    assert smallest_cap((None,)) is None


def test_a_microbatch_above_the_cap_is_refused_in_words() -> None:
    assert too_large(2, 2) is None
    assert too_large(100, None) is None
    assert "3 samples is above this replica's cap of 2" in str(too_large(3, 2))


@pytest.mark.parametrize("sizes", [(), (2, 0), (2, -1), (1,) * (MAX_MICROBATCHES + 1)])
def test_sizes_that_make_no_step_are_refused(sizes: tuple[int, ...]) -> None:
    assert refusal(sizes, sizes, None) == refusal(sizes, sizes, 1) == MALFORMED


def test_a_step_is_refused_for_its_largest_microbatch() -> None:
    assert refusal((2, 2, 1), (0, 9, 4), 2) is None
    assert refusal((2, 3, 1), (2, 3, 1), 2) == too_large(3, 2)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=6))
def test_the_smallest_cap_leaves_a_number_of_parts_that_replicas_take(sizes: list[int]) -> None:
    cap = within(sizes)
    assert refusal(*2 * ([part.num_samples for part in cut(sizes, cap)],), cap) is None
    assert cap == 1 or len(cut(sizes, cap - 1)) > MAX_MICROBATCHES


@pytest.mark.parametrize(
    ("sizes", "cap", "expected"),
    [
        ((8, 8), None, 4),
        ((7,), None, 3),
        ((8, 5), 8, 4),
        # Steps that were opened before the cap was lowered fail as well: once is enough.
        ((8,), 4, 4),
        ((8,), 2, 2),
        ((4, 4), 4, 2),
        ((3, 1), None, 1),
        ((1, 1), None, None),
        ((1,), 1, None),
        ((2,) * (MAX_MICROBATCHES // 2), None, 1),
        # One more, and a step of single samples would be too many microbatches for anybody.
        ((2,) * (MAX_MICROBATCHES // 2 + 1), None, None),
    ],
)
def test_a_cap_is_halved_where_memory_was_too_small(sizes: tuple[int, ...], cap: int | None, expected: int) -> None:
    assert lowered(sizes, cap) == expected


@given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.none() | st.integers(1, 600))
def test_a_cap_that_is_lowered_again_and_again_ends_at_one_sample(sizes: list[int], cap: int | None) -> None:
    parts = cut(sizes, cap)
    for _ in range(12):
        now = [part.num_samples for part in parts]
        new = lowered(now, cap)
        if new is None:
            break
        assert cap is None or new <= cap
        cap, parts = new, cut(sizes, new)
        assert max(part.num_samples for part in parts) < max(now)
    assert max(part.num_samples for part in parts) == 1


def test_a_refusal_says_the_cap_only_where_it_is_the_reason() -> None:
    assert [exceeded((3, 2), cap) for cap in (None, 1, 2, 3)] == [None, 1, 2, None]
    assert exceeded((), 1) is None


def test_a_lowered_cap_counts_until_the_client_knows_it_or_the_peer_is_gone() -> None:
    caps = KnownCaps()
    caps.told(replicas({A: 8, B: None, C: 6}))
    assert (caps.smallest((A, B)), caps.smallest((A, C)), caps.smallest((B,))) == (8, 6, None)
    caps.lower(A, 4)
    caps.lower(B, 2)
    assert (caps.smallest((A, C)), caps.smallest((A, B))) == (4, 2)
    caps.told(replicas({A: 8, B: 2, C: 6}))
    # The client has heard of B's: what it says of B from now on counts. It is behind about A.
    caps.told(replicas({A: 8, B: 3, C: 6}))
    assert (caps.smallest((A,)), caps.smallest((B,))) == (4, 3)
    caps.forget(A)
    caps.forget(C)
    assert (caps.smallest((A,)), caps.smallest((C,))) == (8, 6)
    caps.lower(B, 1)
    caps.told(replicas({A: None}))
    assert caps.smallest((A, B)) == 1, "no word of a replica is no news of it"
