"""Silence, heartbeats, and a process that was itself away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InvariantViolation
from shoal.swarm.liveness import Activity, Liveness, Pulse

HEARD, SPOKE, BOTH = Activity(True, False), Activity(False, True), Activity(True, True)
NOTHING = Activity(False, False)
DEAF = Activity(False, False, listening=False)


def liveness() -> Liveness[str]:
    return Liveness[str](heartbeat_s=0.25, deadline_s=2.0, now_s=100.0)


def test_only_connections_on_which_nothing_was_sent_get_a_heartbeat() -> None:
    pulse = liveness().tick(100.25, {"a": HEARD, "b": BOTH, "c": SPOKE, "d": NOTHING})
    assert pulse == Pulse(idle=("a", "d"), dead=())


def test_a_connection_that_no_step_crosses_gets_a_heartbeat_as_seldom_as_the_deadline_allows() -> None:
    watch = liveness()
    unawaited = Activity(True, False, is_waited_for=False)

    def is_beaten(at_s: float, activity: Activity = unawaited) -> bool:
        return bool(watch.tick(100.0 + at_s, {"a": activity}).idle)

    # A tick is never quite in time.
    assert [is_beaten(tick * 0.2499) for tick in range(1, 7)] == [False, True, False, True, False, True]
    assert not is_beaten(1.75, BOTH)
    assert [is_beaten(2.0), is_beaten(2.25)] == [False, True]
    # What this side says is late if it was blocked.
    assert [is_beaten(3.25), is_beaten(4.25)] == [True, True]


def test_a_connection_dies_when_it_was_silent_for_the_deadline_and_not_before() -> None:
    watch = liveness()
    watch.tick(100.25, {"a": BOTH, "b": BOTH})
    for tick in range(2, 9):
        assert watch.tick(100.0 + tick * 0.25, {"a": SPOKE, "b": BOTH}).dead == ()
    assert watch.tick(102.25, {"a": SPOKE, "b": BOTH}).dead == (("a", 2.0),)


def test_one_sign_of_life_starts_the_count_again() -> None:
    watch = liveness()
    for tick in range(1, 40):
        activity = {"a": HEARD if tick % 8 == 0 else NOTHING}
        assert watch.tick(100.0 + tick * 0.25, activity).dead == ()


def test_a_process_that_was_stopped_declares_nobody_dead_when_it_wakes() -> None:
    watch = liveness()
    for tick in range(1, 5):
        watch.tick(100.0 + tick * 0.25, {"a": HEARD, "b": NOTHING})
    assert watch.tick(3600.0, {"a": NOTHING, "b": NOTHING}) == Pulse(("a", "b"), ())
    # What has arrived meanwhile was read between the ticks.
    assert watch.tick(3600.25, {"a": HEARD, "b": HEARD}).dead == ()


def test_a_process_that_is_blocked_again_and_again_still_notices_who_is_silent() -> None:
    watch = liveness()
    dead: list[str] = []
    for tick in range(1, 7):
        dead += [link for link, _ in watch.tick(100.0 + tick * 3.0, {"a": NOTHING, "b": HEARD}).dead]
        if dead:
            break
    assert dead == ["a"]


def test_silence_does_not_count_while_this_side_does_not_read() -> None:
    watch = liveness()
    for tick in range(1, 30):
        assert watch.tick(100.0 + tick * 0.25, {"a": DEAF}).dead == ()
    for tick in range(30, 37):
        assert watch.tick(100.0 + tick * 0.25, {"a": NOTHING}).dead == ()
    assert watch.tick(100.0 + 37 * 0.25, {"a": NOTHING}).dead != ()


def test_a_connection_that_is_gone_is_forgotten_and_a_new_one_starts_from_zero() -> None:
    watch = liveness()
    for tick in range(1, 8):
        watch.tick(100.0 + tick * 0.25, {"a": NOTHING})
    watch.tick(102.0, {})
    assert watch.tick(102.25, {"a": NOTHING}) == Pulse(("a",), ())
    assert watch.tick(102.5, {"a": NOTHING}).dead == ()


def test_a_clock_that_steps_back_counts_nothing() -> None:
    watch = liveness()
    assert watch.tick(50.0, {"a": NOTHING}).dead == ()
    assert watch.tick(50.25, {"a": NOTHING}).dead == ()


def test_a_deadline_without_room_for_a_late_heartbeat_is_refused() -> None:
    with pytest.raises(InvariantViolation, match="less than 4 heartbeats"):
        Liveness[str](heartbeat_s=1.0, deadline_s=3.9, now_s=0.0)


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.booleans()), max_size=60))
def test_whatever_the_intervals_death_needs_four_silent_ticks_in_a_row(ticks: list[tuple[float, bool]]) -> None:
    watch = liveness()
    now_s, silent_ticks = 100.0, 0
    watch.tick(now_s, {"a": HEARD})
    for interval_s, heard in ticks:
        now_s += interval_s
        silent_ticks = 0 if heard else silent_ticks + 1
        dead = watch.tick(now_s, {"a": Activity(heard, True)}).dead
        assert not dead or silent_ticks >= 4
        if dead:
            break


def irregular(watch: Liveness[str], now_s: float, link: str, num_gaps: int) -> float:
    """Have a peer heard at every seventh tick alone; returns the time of the last one."""
    for tick in range(1, 7 * num_gaps + 1):
        now_s += 0.25
        heard = Activity(tick % 7 == 0, True, peer="peer")
        assert watch.tick(now_s, {link: heard, "regular": Activity(True, True, peer="other")}).dead == ()
    return now_s


def silence_until_death_s(watch: Liveness[str], now_s: float, link: str, peer: str) -> float:
    silent = Activity(False, True, peer=peer)
    for tick in range(1, 100):
        for _, silent_s in watch.tick(now_s + tick * 0.25, {link: silent}).dead:
            return silent_s
    raise AssertionError("nobody died")


def adaptive() -> Liveness[str]:
    return Liveness[str](heartbeat_s=0.25, deadline_s=2.0, max_deadline_s=6.0, now_s=100.0)


def test_an_irregular_peer_gets_longer_and_a_regular_one_beside_it_does_not() -> None:
    watch = adaptive()
    now_s = irregular(watch, 100.0, "a", 10)
    assert silence_until_death_s(watch, now_s, "a", "peer") == 2.75
    watch = adaptive()
    now_s = irregular(watch, 100.0, "a", 10)
    assert silence_until_death_s(watch, now_s, "regular", "other") == 2.0


def test_what_is_known_of_a_peer_outlasts_its_connection() -> None:
    watch = adaptive()
    now_s = irregular(watch, 100.0, "a", 10)
    watch.tick(now_s + 0.25, {"a again": Activity(True, True, peer="peer")})
    assert silence_until_death_s(watch, now_s + 0.25, "a again", "peer") == 2.75


def test_a_peer_that_was_given_up_again_and_again_gets_longer() -> None:
    watch, now_s, waits_s = adaptive(), 100.0, list[float]()
    for number in range(8):
        now_s += 0.25
        watch.tick(now_s, {f"connection {number}": Activity(True, True, peer="peer")})
        waits_s.append(silence_until_death_s(watch, now_s, f"connection {number}", "peer"))
        now_s += waits_s[-1]
    assert waits_s[0] == 2.0
    assert waits_s[-1] >= 3.0


def test_silence_while_this_side_does_not_read_is_no_gap_of_the_peer() -> None:
    watch, now_s = adaptive(), 100.0
    for tick in range(1, 200):
        now_s += 0.25
        # Heard at each seventh tick, because this side reads only then.
        now = Activity(tick % 7 == 0, True, listening=tick % 7 == 0, peer="peer")
        assert watch.tick(now_s, {"a": now}).dead == ()
    assert silence_until_death_s(watch, now_s, "a", "peer") == 2.0


def test_a_longest_deadline_below_the_usual_one_is_refused() -> None:
    with pytest.raises(InvariantViolation, match="below"):
        Liveness[str](heartbeat_s=0.25, deadline_s=2.0, max_deadline_s=1.0, now_s=0.0)
