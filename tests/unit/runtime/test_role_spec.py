"""When a role is started again, and how an end reads."""

from __future__ import annotations

import signal

import pytest

from shoal.runtime.role_spec import ExitStatus, RestartHistory, RestartPolicy

_POLICY = RestartPolicy(max_restarts=3, window_s=10.0, first_delay_s=1.0, max_delay_s=3.0)


def test_pauses_grow_up_to_the_longest_and_then_the_role_is_given_up() -> None:
    history = RestartHistory(_POLICY)
    delays_s = [history.next_delay_s(now_s) for now_s in (0.0, 1.0, 2.0, 3.0)]
    assert delays_s[3] is None
    # Each pause is shortened at random by up to a half.
    for delay_s, longest_s in zip(delays_s[:3], (1.0, 2.0, 3.0), strict=True):
        assert delay_s is not None
        assert longest_s / 2 <= delay_s <= longest_s


def test_restarts_outside_the_window_do_not_count() -> None:
    history = RestartHistory(_POLICY)
    for now_s in (0.0, 1.0, 2.0):
        assert history.next_delay_s(now_s) is not None
    assert history.next_delay_s(9.9) is None
    assert history.next_delay_s(10.0) is not None
    assert history.next_delay_s(10.1) is None


def test_a_role_that_ran_long_starts_with_a_short_pause_again() -> None:
    history = RestartHistory(_POLICY)
    for now_s in (0.0, 1.0, 2.0, 100.0):
        delay_s = history.next_delay_s(now_s)
    assert delay_s is not None
    assert delay_s <= 1.0


def test_of_failures_of_its_own_a_role_has_as_many_within_an_hour() -> None:
    history = RestartHistory(_POLICY)
    for now_s in (0.0, 100.0, 200.0):
        assert history.next_delay_s(now_s, has_failed=True) is not None
        assert history.next_delay_s(now_s + 50.0) is not None, "it was killed"
    assert history.next_delay_s(300.0, has_failed=True) is None
    assert history.next_delay_s(3601.0, has_failed=True) is not None


def test_without_a_policy_nothing_is_restarted() -> None:
    assert RestartHistory(RestartPolicy()).next_delay_s(0.0) is None


@pytest.mark.parametrize(
    ("code", "ok", "text"),
    [
        (0, True, "exit code 0"),
        (2, False, "exit code 2"),
        (-signal.SIGSEGV, False, "killed by SIGSEGV"),
        (-signal.SIGBUS, False, "killed by SIGBUS: a disk fails, or is full, on which memory of it lay in files"),
        (-signal.SIGRTMIN - 2, False, f"killed by signal {signal.SIGRTMIN + 2}"),
    ],
)
def test_an_exit_status_reads_as_what_happened(code: int, ok: bool, text: str) -> None:
    assert ExitStatus(code).ok is ok
    assert str(ExitStatus(code)) == text
