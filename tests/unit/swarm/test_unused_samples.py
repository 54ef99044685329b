"""Ranges of any size: each sample is out once until it is put back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.sample_ranges import Ranges, count, merge, subtract
from shoal.swarm.shared_deal import UnusedSamples
from shoal.wire.messages.base import SampleRange


def ranges(*bounds: tuple[int, int], pass_number: int = 0) -> Ranges:
    return tuple(SampleRange(pass_number, start, stop) for start, stop in bounds)


def test_new_samples_come_in_order_and_a_batch_ends_with_its_pass() -> None:
    unused = UnusedSamples(10)
    assert [unused.take(4) for _ in range(4)] == [
        ranges((0, 4)),
        ranges((4, 8)),
        ranges((8, 10)),
        ranges((0, 4), pass_number=1),
    ]


def test_what_came_back_goes_first_joined_with_what_is_new() -> None:
    unused = UnusedSamples(20)
    unused.take(12)
    unused.put_back(ranges((2, 4), (7, 8)))
    assert unused.returned == ranges((2, 4), (7, 8))
    assert unused.take(1) == ranges((2, 3))
    assert unused.take(4) == ranges((3, 4), (7, 8), (12, 14))


def test_samples_of_two_passes_are_never_in_one_batch() -> None:
    unused = UnusedSamples(6)
    unused.take(4)
    unused.take(2)
    unused.take(3)
    unused.put_back(ranges((1, 3)))
    assert unused.take(5) == ranges((1, 3))
    assert unused.take(5) == ranges((3, 6), pass_number=1)


def test_what_somebody_has_is_left_out_and_goes_first_when_it_comes_back() -> None:
    unused = UnusedSamples(10)
    unused.remove((*ranges((2, 3), (5, 10)), *ranges((0, 4), pass_number=1)))
    assert not unused.has(ranges((6, 8)))
    assert not unused.has(ranges((4, 6)))
    assert unused.has(ranges((3, 5)))
    assert unused.take(3) == ranges((0, 2), (3, 4))
    assert not unused.has(ranges((3, 5)))
    unused.put_back(ranges((6, 8)))
    assert unused.has(ranges((6, 7)))
    assert unused.take(9) == ranges((4, 5), (6, 8))
    assert unused.take(9) == ranges((4, 10), pass_number=1)


@given(num_samples=st.integers(1, 30), data=st.data())
def test_whatever_is_taken_removed_and_put_back_nothing_is_out_twice_or_lost(
    num_samples: int, data: st.DataObject
) -> None:
    unused = UnusedSamples(num_samples)
    out: list[SampleRange] = []
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["take", "put_back", "claim"])):
            case "take":
                size = data.draw(st.integers(1, 12))
                peeked = unused.copy().take(size)
                taken = unused.take(size)
                assert peeked == taken
                assert 1 <= count(taken) <= size
                assert len({item.pass_number for item in taken}) == 1
                assert subtract(taken, tuple(out)) == taken
                out += taken
            case "put_back" if out:
                back = out.pop(data.draw(st.integers(0, len(out) - 1)))
                unused.put_back((back,))
            case _:
                start = data.draw(st.integers(0, num_samples - 1))
                stop = data.draw(st.integers(start + 1, num_samples))
                wanted = (SampleRange(data.draw(st.integers(0, 3)), start, stop),)
                assert unused.has(wanted) == (subtract(wanted, tuple(out)) == wanted)
                if unused.has(wanted):
                    unused.remove(wanted)
                    out += wanted
    last = max((item.pass_number for item in out), default=0)
    missing = (last + 1) * num_samples - count(merge(out))
    while missing > 0:
        taken = unused.take(7)
        assert subtract(taken, tuple(out)) == taken
        out += taken
        missing -= count(item for item in taken if item.pass_number <= last)
    assert missing == 0
