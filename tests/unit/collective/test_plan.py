"""Chunks, segments and moves of the three collectives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.collective.plan import CENTRAL_MEMBERS, SMALL_BYTES, AllReducePlan, Collective, choose_collective

plans = st.builds(AllReducePlan, st.sampled_from(Collective), st.integers(1, 9), st.integers(0, 60), st.integers(1, 9))


@given(plans)
def test_chunks_cut_the_vector_evenly_and_in_order(plan: AllReducePlan) -> None:
    chunks = [plan.chunk(root) for root in range(plan.num_chunks)]
    assert [element for chunk in chunks for element in chunk] == list(range(plan.num_elements))
    sizes = [len(chunk) for chunk in chunks]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(plans)
def test_segments_cut_a_chunk_without_gaps(plan: AllReducePlan) -> None:
    for root in range(plan.num_chunks):
        segments = [plan.segment(root, index) for index in range(plan.num_segments(root))]
        assert [element for segment in segments for element in segment] == list(plan.chunk(root))
        assert all(0 < len(segment) <= plan.segment_elements for segment in segments)
        if segments:
            assert plan.span(root, range(len(segments))) == plan.chunk(root)


@given(plans)
def test_every_chunk_is_summed_along_a_tree_and_comes_back_to_everyone(plan: AllReducePlan) -> None:
    everyone = range(plan.num_members)
    for root in range(plan.num_chunks):
        for member in everyone:
            for child in plan.children(member, root):
                assert plan.parent(child, root) == member
            for other in plan.copied_by(member, root):
                assert plan.copies_from(other, root) == member
        assert sum(len(plan.children(member, root)) for member in everyone) == plan.num_members - 1
        assert reached(plan, root, gather=False) == reached(plan, root, gather=True) == set(everyone)
        assert [m for m in everyone if plan.parent(m, root) is None] == [root]
        assert [m for m in everyone if plan.copies_from(m, root) is None] == [root]


def reached(plan: AllReducePlan, root: int, *, gather: bool) -> set[int]:
    found, new = {root}, [root]
    while new:
        member = new.pop()
        following = plan.copied_by(member, root) if gather else plan.children(member, root)
        assert not found & set(following)
        found |= set(following)
        new += following
    return found


def order(plan: AllReducePlan, member: int, root: int) -> str:
    """How the sum at a member is formed, as an expression."""
    total = str(member)
    for child in plan.children(member, root):
        total = f"({order(plan, child, root)}+{total})" if plan.num_chunks > 1 else f"({total}+{order(plan, child, 0)})"
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
    assert order(AllReducePlan(collective, num_members, 99, 9), root, root) == expected


@given(plans)
def test_what_members_receive_is_what_all_send(plan: AllReducePlan) -> None:
    hops = 2 * (plan.num_members - 1)
    sent = hops * sum(plan.num_segments(root) for root in range(plan.num_chunks))
    assert sum(plan.num_received(member) for member in range(plan.num_members)) == sent


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
        AllReducePlan(Collective.RING, 3, 10, 2).segment(root, index)


@pytest.mark.parametrize("segments", [range(0), range(-1, 1), range(1, 3), range(0, 1 << 70)])
def test_there_is_no_span_outside_the_plan(segments: range) -> None:
    with pytest.raises(ValueError, match="no segment"):
        AllReducePlan(Collective.RING, 3, 10, 2).span(0, segments)


def test_a_plan_without_members_is_refused() -> None:
    with pytest.raises(ValueError, match="0 members"):
        AllReducePlan(Collective.TREE, 0, 10, 2)
