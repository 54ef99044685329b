"""Which elements of a flat vector the rounds average in turn."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.config.diloco import DilocoConfig
from shoal.ids import NO_BALLOT
from shoal.optim.fragments import CHUNK_ELEMENTS, Fragment
from shoal.swarm.cut_rule import CutRule
from shoal.wire.messages.round import Join
from shoal.wire.messages.step import StepsTrained

SIZES = st.integers(0, 7 * CHUNK_ELEMENTS + 3)
COUNTS = st.integers(1, 6)


def in_fragment(num_elements: int, fragment: Fragment) -> Tensor:
    return torch.arange(num_elements) // 4096 % fragment.count == fragment.number


@given(SIZES, COUNTS, st.data())
def test_what_is_taken_and_put_is_every_so_many_th_chunk(size: int, count: int, data: st.DataObject) -> None:
    fragment = Fragment(data.draw(st.integers(0, count - 1)), count)
    vector, is_own = torch.arange(size), in_fragment(size, fragment)
    values = fragment.take(vector)
    assert torch.equal(values, vector[is_own])
    assert values.numel() == fragment.size(size)
    into = torch.zeros(size, dtype=torch.int64)
    fragment.put(values + 1, into)
    assert torch.equal(into, (vector + 1) * is_own)


@given(SIZES, COUNTS)
def test_the_fragments_are_the_vector_the_first_is_the_longest_and_none_is_shorter_by_more_than_a_chunk(
    size: int, count: int
) -> None:
    sizes = [Fragment(number, count).size(size) for number in range(count)]
    assert sum(sizes) == size
    assert sizes[0] == max(sizes)
    assert max(sizes) - min(sizes) <= CHUNK_ELEMENTS


@given(SIZES, COUNTS, st.data())
def test_places_are_where_parts_of_the_vector_are_in_what_is_taken(size: int, count: int, data: st.DataObject) -> None:
    fragment = Fragment(data.draw(st.integers(0, count - 1)), count)
    start = data.draw(st.integers(0, size))
    part = slice(start, data.draw(st.integers(start, size)))
    vector, marked = torch.arange(size), torch.zeros(size, dtype=torch.bool)
    marked[part] = True
    values = fragment.take(vector)
    found = [values[place] for place in fragment.places([part])]
    assert torch.equal(torch.cat([values[:0], *found]), vector[marked & in_fragment(size, fragment)])


def test_the_number_of_a_round_alone_says_which_one_it_averages() -> None:
    assert [Fragment.of_round(round, 3).number for round in (1, 2, 3, 4)] == [1, 2, 0, 1]
    assert [Fragment.of_round(round, 3).has_buffers for round in (1, 2, 3, 4)] == [False, True, False, False]
    assert Fragment.of_round(5, 1) == Fragment()
    assert Fragment().has_buffers


def test_as_many_as_may_be_configured_fit_into_a_join() -> None:
    most = DilocoConfig(fragments=64).fragments
    # Where rounds overlap as well, there are two numbers for each round, and what was behind the cut of one more.
    cuts, earlier = CutRule(most, cut_after=1), tuple[StepsTrained, ...]()
    for round in range(1, 2 * most):
        earlier = cuts.still_earlier(round, earlier, ())
    assert len(earlier) == 2 * (most - 1) + 1
    join = Join(NO_BALLOT, 1, 0, 0, (), (), (), earlier=earlier)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(join), type=Join) == join
    longer = msgspec.structs.replace(join, earlier=(*join.earlier, StepsTrained(1, 2)))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(longer), type=Join)
    with pytest.raises(ValueError, match="less than or equal to 64"):
        DilocoConfig(fragments=most + 1)
