"""Chunks, segments and moves of the three collectives."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.collective.plan import (
    CENTRAL_MEMBERS,
    SMALL_BYTES,
    Collective,
    CollectivePlan,
    choose_collective,
    even_lengths,
)

shapes, segments = st.sampled_from(Collective), st.integers(1, 9)
lengths = st.lists(st.integers(0, 20), min_size=1, max_size=9)
reductions = st.builds(CollectivePlan.all_reduce, shapes, st.integers(1, 9), st.integers(0, 60), segments)
scatters = st.builds(CollectivePlan.reduce_scatter, shapes, lengths, segments)
gathers = st.builds(CollectivePlan.all_gather, shapes, lengths, segments)
broadcasts = st.builds(CollectivePlan.broadcast, shapes, st.just(9), st.integers(0, 8), st.integers(0, 60), segments)
plans = st.one_of(reductions, scatters, gathers, broadcasts)


@given(st.integers(0, 60), st.integers(1, 9))
def test_even_lengths_differ_by_one_at_most_and_the_longer_ones_come_first(num_elements: int, num_chunks: int) -> None:
    sizes = even_lengths(num_elements, num_chunks)
    assert (len(sizes), sum(sizes)) == (num_chunks, num_elements)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(plans)
def test_chunks_cut_the_vector_in_order(plan: CollectivePlan) -> None:
    assert [element for chunk in plan.chunks for element in chunk] == list(range(plan.num_elements))


@given(plans)
def test_segments_cut_a_chunk_without_gaps(plan: CollectivePlan) -> None:
    for chunk, elements in enumerate(plan.chunks):
        found = [plan.segment(chunk, index) for index in range(plan.num_segments(chunk))]
        assert [element for segment in found for element in segment] == list(elements)
        assert all(0 < len(segment) <= plan.segment_elements for segment in found)
        if found:
            assert plan.span(chunk, range(len(found))) == elements


@given(plans)
def test_every_chunk_is_summed_along_a_tree_and_comes_back_to_everyone_as_far_as_the_operation_has_it(
    plan: CollectivePlan,
) -> None:
    everyone = range(plan.num_members)
    for chunk in range(len(plan.chunks)):
        root = plan.root(chunk)
        for member in everyone:
            for child in plan.children(member, chunk):
                assert plan.parent(child, chunk) == member
            for other in plan.copied_by(member, chunk):
                assert plan.copies_from(other, chunk) == member
        assert reached(plan, chunk, gather=False) == (set(everyone) if plan.sums else {root})
        assert reached(plan, chunk, gather=True) == (set(everyone) if plan.gathers else {root})
        for member in everyone:
            assert (plan.parent(member, chunk) is None) is (member == root or not plan.sums)
            assert (plan.copies_from(member, chunk) is None) is (member == root or not plan.gathers)


def reached(plan: CollectivePlan, chunk: int, *, gather: bool) -> set[int]:
    found, new = {plan.root(chunk)}, [plan.root(chunk)]
    while new:
        member = new.pop()
        following = plan.copied_by(member, chunk) if gather else plan.children(member, chunk)
        assert not found & set(following)
        found |= set(following)
        new += following
    return found


def order(plan: CollectivePlan, member: int, root: int) -> str:
    """How the sum at a member is formed, as an expression."""
    total = str(member)
    for child in plan.children(member, root):
        is_ring = plan.collective is Collective.RING
        below = order(plan, child, root)
        total = f"({below}+{total})" if is_ring else f"({total}+{below})"
    return total


@pytest.mark.parametrize(
    ("collective", "num_members", "root", "expected"),
    [
        (Collective.RING, 4, 1, "(((2+3)+0)+1)"),
        (Collective.RING, 2, 0, "(1+0)"),
        (Collective.TREE, 4, 0, "((0+1)+(2+3))"),
        (Collective.TREE, 7, 0, "(((0+1)+(2+3))+((4+5)+6))"),
        (Collective.CENTRAL, 4, 0, "(((0+1)+2)+3)"),
    ],
)
def test_the_order_of_additions_is_the_documented_one(
    collective: Collective, num_members: int, root: int, expected: str
) -> None:
    # A sum does not depend on which of its two terms stands first.
    assert order(CollectivePlan.all_reduce(collective, num_members, 99, 9), root, root) == expected


@pytest.mark.parametrize(
    ("collective", "root", "expected"),
    [
        (Collective.RING, 1, "((((2+3)+4)+0)+1)"),
        (Collective.TREE, 0, "(((0+1)+(2+3))+4)"),
        (Collective.TREE, 3, "(((3+4)+(0+1))+2)"),
        (Collective.CENTRAL, 3, "((((3+4)+0)+1)+2)"),
    ],
)
def test_a_part_of_a_scattered_sum_is_formed_in_the_order_that_begins_at_its_member(
    collective: Collective, root: int, expected: str
) -> None:
    assert order(CollectivePlan.reduce_scatter(collective, [9] * 5, 9), root, root) == expected


@given(plans)
def test_what_members_receive_is_what_all_send(plan: CollectivePlan) -> None:
    hops = (plan.sums + plan.gathers) * (plan.num_members - 1)
    sent = hops * sum(plan.num_segments(chunk) for chunk in range(len(plan.chunks)))
    assert sum(plan.num_received(member) for member in range(plan.num_members)) == sent


@given(plans)
def test_who_hears_everyone_needs_something_that_each_other_member_has(plan: CollectivePlan) -> None:
    assume(plan.num_members > 1)
    for member in range(plan.num_members):
        needed = {member}
        for chunk in range(len(plan.chunks)):
            if plan.num_segments(chunk) and (plan.gathers or plan.root(chunk) == member):
                needed |= set(range(plan.num_members)) if plan.sums else {plan.root(chunk)}
        assert plan.hears_everyone(member) is (len(needed) == plan.num_members)


@pytest.mark.parametrize(
    ("num_bytes", "num_members", "expected"),
    [
        (SMALL_BYTES + 1, 2, Collective.RING),
        (SMALL_BYTES + 1, 9, Collective.RING),
        (SMALL_BYTES, 2, Collective.CENTRAL),
        (SMALL_BYTES, CENTRAL_MEMBERS, Collective.CENTRAL),
        (SMALL_BYTES, CENTRAL_MEMBERS + 1, Collective.TREE),
        (0, 1, Collective.CENTRAL),
    ],
)
def test_size_and_members_choose_the_collective(num_bytes: int, num_members: int, expected: Collective) -> None:
    assert choose_collective(num_bytes, num_members) is expected


@pytest.mark.parametrize(("root", "index"), [(-1, 0), (3, 0), (0, -1), (0, 2)])
def test_there_is_no_segment_outside_the_plan(root: int, index: int) -> None:
    with pytest.raises(ValueError, match="no segment"):
        CollectivePlan.all_reduce(Collective.RING, 3, 10, 2).segment(root, index)


@pytest.mark.parametrize("numbers", [range(0), range(-1, 1), range(1, 3), range(0, 1 << 70)])
def test_there_is_no_span_outside_the_plan(numbers: range) -> None:
    with pytest.raises(ValueError, match="no segment"):
        CollectivePlan.all_reduce(Collective.RING, 3, 10, 2).span(0, numbers)


def test_a_plan_without_members_is_refused() -> None:
    with pytest.raises(ValueError, match="0 members"):
        CollectivePlan.all_reduce(Collective.TREE, 0, 10, 2)
