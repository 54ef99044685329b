"""What may be sent to other hosts, and whose turn it is."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.transport.uplink import ByteBucket, Uplink, UplinkTime, Urgency
from shoal.wire.frame import MIN_PIECE_BYTES

MBIT = 1e6 / 8


def test_a_debt_is_waited_for_and_a_pause_saves_up_a_little() -> None:
    bucket = ByteBucket(1000.0)
    assert bucket.wait_s(5.0) == 0.0
    bucket.spend(500, 5.0)
    assert bucket.wait_s(5.0) == pytest.approx(0.45)
    assert bucket.wait_s(5.4) == pytest.approx(0.05)
    bucket.spend(100, 5.4)
    assert bucket.wait_s(5.4) == pytest.approx(0.15)
    bucket.spend(50, 1000.0)
    assert bucket.wait_s(1000.0) == 0.0
    bucket.spend(1, 1000.0)
    assert bucket.wait_s(1000.0) > 0.0


def test_processes_that_share_an_uplink_wait_for_what_the_others_have_sent(tmp_path: Path) -> None:
    one, other = (ByteBucket(1000.0, UplinkTime(tmp_path / "uplink")) for _ in range(2))
    one.spend(500, 5.0)
    assert other.wait_s(5.0) == pytest.approx(0.45)
    other.spend(100, 5.0)
    assert one.wait_s(5.0) == pytest.approx(0.55)
    assert (tmp_path / "uplink").stat().st_mode & 0o777 == 0o600


@given(
    st.lists(st.tuples(st.floats(0.0, 0.3), st.integers(1, 5000)), max_size=80),
    st.floats(100.0, 1e6),
)
def test_over_any_window_no_more_is_sent_than_the_rate_one_burst_and_one_piece(
    tries: list[tuple[float, int]], bytes_per_s: float
) -> None:
    bucket, now_s = ByteBucket(bytes_per_s), 0.0
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
    assert Uplink(8.0).piece_bytes == 50_000
    assert Uplink(0.01).piece_bytes == MIN_PIECE_BYTES
    assert Uplink().piece_bytes == Uplink(1000.0).piece_bytes == 64 * 1024


class SetClock:
    """Shows the time that it was set to."""

    def __init__(self) -> None:
        self.shown_s = 0.0

    def now_s(self) -> float:
        return self.shown_s

    def unix_s(self) -> float:
        return self.shown_s

    async def sleep_s(self, duration_s: float) -> None:
        raise AssertionError("nobody sleeps here")


@pytest.mark.parametrize("urgency", Urgency)
async def test_those_that_wait_take_turns_and_none_comes_in_between(urgency: Urgency) -> None:
    clock = SetClock()
    uplink = Uplink(8.0, clock=clock)
    turns: list[str] = []
    done = anyio.Event()

    def sender(name: str, count: int) -> None:
        left = count

        def send() -> None:
            nonlocal left
            while left and uplink.allows(send, urgency):
                left -= 1
                turns.append(name)
                uplink.spend(1000, urgency)
                clock.shown_s += 0.001
            if len(turns) == 9:
                done.set()

        send()

    uplink.spend(1000, None)
    for name in "abc":
        sender(name, 3)
    assert turns == []
    clock.shown_s += 0.002
    with anyio.fail_after(60):
        await done.wait()
    assert sorted(turns) == list("aaabbbccc")
    assert not any(each.waiting for each in uplink._of.values())


async def test_a_connection_that_has_ended_is_not_called_any_more() -> None:
    clock = SetClock()
    uplink = Uplink(8.0, clock=clock)
    called: list[int] = []

    def resume() -> None:
        called.append(1)

    uplink.spend(100_000, None)
    assert not uplink.allows(resume, Urgency.STEP)
    uplink.forget(resume)
    clock.shown_s += 10.0
    assert uplink.allows(resume, Urgency.STEP)
    assert called == []


class Sender:
    """A connection that has frames of one class without end, and sends one piece whenever it may."""

    def __init__(self, uplink: Uplink, urgency: Urgency) -> None:
        self.uplink = uplink
        self.urgency = urgency
        self.sent_bytes = 0
        self.has_sent = anyio.Event()

    def send(self) -> None:
        if self.uplink.allows(self.send, self.urgency):
            self.sent_bytes += 1000
            self.has_sent.set()
            self.uplink.spend(1000, self.urgency)


LESS_URGENT = [(one, other) for one, other in itertools.product(Urgency, Urgency) if one < other]


@pytest.mark.parametrize(("urgent", "other"), LESS_URGENT)
async def test_frames_wait_until_no_more_urgent_ones_are_left(urgent: Urgency, other: Urgency) -> None:
    uplink = Uplink(clock=SetClock())
    step, background = Sender(uplink, urgent), Sender(uplink, other)
    background.send()
    assert background.sent_bytes == 1000
    uplink.unsent(step.send, step.urgency)
    background.send()
    assert background.sent_bytes == 1000, "others are under way"
    uplink.unsent(step.send, None)
    await anyio.wait_all_tasks_blocked()
    assert background.sent_bytes == 2000


async def test_a_connection_with_frames_of_both_classes_does_not_wait_for_itself() -> None:
    uplink = Uplink(clock=SetClock())
    both = Sender(uplink, Urgency.BACKGROUND)
    uplink.unsent(both.send, Urgency.STEP)
    both.send()
    assert both.sent_bytes == 1000


async def test_what_waits_for_the_cap_with_a_step_goes_before_the_background() -> None:
    clock = SetClock()
    uplink = Uplink(8.0, clock=clock)
    step, background = Sender(uplink, Urgency.STEP), Sender(uplink, Urgency.BACKGROUND)
    uplink.spend(1000, None)
    step.send()
    clock.shown_s += 0.01
    background.send()
    assert (step.sent_bytes, background.sent_bytes) == (0, 0), "there is room, but a step waits for it to be given"
    with anyio.fail_after(60):
        await background.has_sent.wait()
    assert step.sent_bytes == 1000


async def test_more_urgent_frames_go_first_whoever_has_come_before() -> None:
    uplink = Uplink(clock=SetClock())
    step, average, state = (Sender(uplink, urgency) for urgency in Urgency)
    uplink.unsent(step.send, Urgency.STEP)
    for each in (state, average):
        each.send()
        assert each.sent_bytes == 0
    uplink.unsent(average.send, Urgency.ROUND)
    uplink.unsent(step.send, None)
    with anyio.fail_after(60):
        await state.has_sent.wait()
    assert average.sent_bytes == 1000, "before, and by it the state has earned its share"


async def test_one_that_has_sent_what_was_more_urgent_is_in_the_way_of_less_urgent_ones_alone() -> None:
    uplink = Uplink(clock=SetClock())
    changing, average = Sender(uplink, Urgency.STEP), Sender(uplink, Urgency.ROUND)
    uplink.unsent(changing.send, Urgency.STEP)
    average.send()
    assert average.sent_bytes == 0
    uplink.unsent(changing.send, Urgency.ROUND)
    with anyio.fail_after(60):
        await average.has_sent.wait()


@pytest.mark.parametrize(("urgent", "other"), LESS_URGENT)
async def test_where_more_urgent_frames_fill_the_line_the_others_have_their_share(
    urgent: Urgency, other: Urgency
) -> None:
    clock = SetClock()
    uplink = Uplink(clock=clock)
    step, background = Sender(uplink, urgent), Sender(uplink, other)
    uplink.unsent(step.send, step.urgency)
    for _ in range(800):
        step.send()
        background.send()
        clock.shown_s += 0.001
        for _ in range(2):  # a timer that is due is called in the next turn of the loop
            await anyio.lowlevel.checkpoint()
    assert step.sent_bytes == 800_000
    assert background.sent_bytes / 900_000 == pytest.approx(1 / 8, rel=0.1)


class Endless(Sender):
    """One that always has more to send, as a connection whose socket takes all it is given."""

    def send(self) -> None:
        for _ in range(8):
            if not self.uplink.allows(self.send, self.urgency):
                return
            self.sent_bytes += 1000
            self.uplink.spend(1000, self.urgency)
        asyncio.get_running_loop().call_soon(self.send)


async def test_where_steps_fill_a_capped_uplink_the_background_has_its_share_and_the_loop_goes_on() -> None:
    """With real timers, which come early and late by less than they can be set to."""
    uplink = Uplink(20.0)
    step, background = Endless(uplink, Urgency.STEP), Endless(uplink, Urgency.BACKGROUND)
    uplink.unsent(step.send, step.urgency)
    step.send()
    background.send()
    turns = 0
    with anyio.fail_after(60):
        while step.sent_bytes + background.sent_bytes < 4_000_000:
            await anyio.lowlevel.checkpoint()
            turns += 1
    assert turns > 1000, "the loop has time for others"
    assert background.sent_bytes / (step.sent_bytes + background.sent_bytes) == pytest.approx(1 / 8, rel=0.25)


async def test_a_peer_that_takes_nothing_does_not_hold_up_the_others() -> None:
    clock = SetClock()
    uplink = Uplink(clock=clock)
    step, background = Sender(uplink, Urgency.STEP), Sender(uplink, Urgency.BACKGROUND)
    uplink.unsent(step.send, step.urgency)
    background.send()
    clock.shown_s += 1.5
    background.send()
    for _ in range(2):  # as above
        await anyio.lowlevel.checkpoint()
    assert background.sent_bytes == 0, "one that begins on a line that others have filled is slow, and not stuck"
    clock.shown_s += 0.51
    with anyio.fail_after(60):
        await background.has_sent.wait()
