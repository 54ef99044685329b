"""Chunks, segments and moves of a ring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.collective.plan import RingPlan

plans = st.builds(RingPlan, st.integers(1, 7), st.integers(0, 60), st.integers(1, 9))


@given(plans)
def test_chunks_cut_the_vector_evenly_and_in_order(plan: RingPlan) -> None:
    chunks = [plan.chunk(owner) for owner in range(plan.num_members)]
    assert [element for chunk in chunks for element in chunk] == list(range(plan.num_elements))
    sizes = [len(chunk) for chunk in chunks]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(plans)
def test_segments_cut_a_chunk_without_gaps(plan: RingPlan) -> None:
    for owner in range(plan.num_members):
        segments = [plan.segment(owner, index) for index in range(plan.num_segments(owner))]
        assert [element for segment in segments for element in segment] == list(plan.chunk(owner))
        assert all(0 < len(segment) <= plan.segment_elements for segment in segments)


@given(plans)
def test_a_sum_starts_after_its_owner_ends_there_and_reaches_everyone(plan: RingPlan) -> None:
    for owner in range(plan.num_members):
        if plan.num_members == 1:
            continue
        member = plan.next(owner)
        assert plan.first_chunk(member) == owner
        added = [member]
        while not plan.ends_reduce(member, owner):
            member = plan.next(member)
            added.append(member)
        assert added == [(owner + 1 + k) % plan.num_members for k in range(plan.num_members)]
        reached = {member}
        while plan.passes_gather(member, owner):
            member = plan.next(member)
            reached.add(member)
        assert reached == set(range(plan.num_members))


@given(plans)
def test_what_members_receive_is_what_all_send(plan: RingPlan) -> None:
    hops = 2 * (plan.num_members - 1)
    sent = hops * sum(plan.num_segments(owner) for owner in range(plan.num_members))
    assert sum(plan.num_received(member) for member in range(plan.num_members)) == sent


@pytest.mark.parametrize(("owner", "index"), [(-1, 0), (3, 0), (0, -1), (0, 2)])
def test_there_is_no_segment_outside_the_plan(owner: int, index: int) -> None:
    with pytest.raises(ValueError, match="no segment"):
        RingPlan(3, 10, 2).segment(owner, index)


def test_a_ring_without_members_is_refused() -> None:
    with pytest.raises(ValueError, match="0 members"):
        RingPlan(0, 10, 2)
