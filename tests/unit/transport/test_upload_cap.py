"""What may be sent to other hosts, and whose turn it is."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.transport.upload_cap import ByteBucket, UploadCap
from shoal.wire.frame import MIN_PIECE_BYTES

MBIT = 1e6 / 8


def test_a_debt_is_waited_for_and_a_pause_saves_up_a_little() -> None:
    bucket = ByteBucket(1000.0, 5.0)
    assert bucket.wait_s(5.0) == 0.0
    bucket.spend(500, 5.0)
    assert bucket.wait_s(5.0) == pytest.approx(0.5)
    assert bucket.wait_s(5.4) == pytest.approx(0.1)
    bucket.spend(100, 5.4)
    assert bucket.wait_s(5.4) == pytest.approx(0.2)
    bucket.spend(50, 1000.0)
    assert bucket.wait_s(1000.0) == 0.0
    bucket.spend(1, 1000.0)
    assert bucket.wait_s(1000.0) > 0.0


@given(
    st.lists(st.tuples(st.floats(0.0, 0.3), st.integers(1, 5000)), max_size=80),
    st.floats(100.0, 1e6),
)
def test_over_any_window_no_more_is_sent_than_the_rate_one_burst_and_one_piece(
    tries: list[tuple[float, int]], bytes_per_s: float
) -> None:
    bucket, now_s = ByteBucket(bytes_per_s, 0.0), 0.0
    sent: list[tuple[float, int]] = []
    for pause_s, num_bytes in tries:
        now_s += pause_s
        if not bucket.wait_s(now_s):
            bucket.spend(num_bytes, now_s)
            sent.append((now_s, num_bytes))
    for first, (begun_s, _) in enumerate(sent):
        total = 0
        for at_s, num_bytes in sent[first:]:
            total += num_bytes
            assert total <= (at_s - begun_s) * bytes_per_s + 0.05 * bytes_per_s + 5000 + 1


def test_pieces_are_short_on_slow_links() -> None:
    assert UploadCap(8.0).piece_bytes == 50_000
    assert UploadCap(0.01).piece_bytes == MIN_PIECE_BYTES


class SetClock:
    """Shows the time that it was set to."""

    def __init__(self) -> None:
        self.shown_s = 0.0

    def now_s(self) -> float:
        return self.shown_s

    async def sleep_s(self, duration_s: float) -> None:
        raise AssertionError("nobody sleeps here")


async def test_those_that_wait_take_turns_and_none_comes_in_between() -> None:
    clock = SetClock()
    cap = UploadCap(8.0, clock)
    turns: list[str] = []
    done = anyio.Event()

    def sender(name: str, count: int) -> None:
        left = count

        def send() -> None:
            nonlocal left
            while left and cap.allows(send):
                left -= 1
                turns.append(name)
                cap.spend(1000)
                clock.shown_s += 0.001
            if len(turns) == 9:
                done.set()

        send()

    cap.spend(1000)
    for name in "abc":
        sender(name, 3)
    assert turns == []
    clock.shown_s += 0.002
    await done.wait()
    assert sorted(turns) == list("aaabbbccc")
    assert not cap._waiting


async def test_a_connection_that_has_ended_is_not_called_any_more() -> None:
    clock = SetClock()
    cap = UploadCap(8.0, clock)
    called: list[int] = []

    def resume() -> None:
        called.append(1)

    cap.spend(1000)
    assert not cap.allows(resume)
    cap.forget(resume)
    clock.shown_s += 10.0
    assert cap.allows(resume)
    assert called == []
