"""Marks of the windows of a stream: which window of two readings differs first."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import pytest

from shoal.swarm import window_marks
from shoal.swarm.window_marks import first_difference, longer, mark_of, num_windows, up_to


def marks(windows: Iterable[str]) -> bytes:
    """What is noted of a stream with these windows: each hash has the one before in it."""
    digest = hashlib.sha256(b"facts").hexdigest()
    found = mark_of(digest)
    for window in windows:
        digest = hashlib.sha256((digest + window).encode()).hexdigest()
        found += mark_of(digest)
    return found


@pytest.mark.parametrize("read", ["abcd", "ab", "abcdef", ""])
def test_as_far_as_both_readings_go_they_are_the_same(read: str) -> None:
    assert first_difference(marks("abcd"), marks(read)) is None


@pytest.mark.parametrize(("read", "number"), [("xbcd", 0), ("abxd", 2), ("abcx", 3), ("ax", 1), ("axcdef", 1)])
def test_the_first_window_that_differs_is_found(read: str, number: int) -> None:
    assert first_difference(marks("abcd"), marks(read)) == number
    assert first_difference(marks(read), marks("abcd")) == number


def test_what_is_held_out_differs_before_the_first_window() -> None:
    assert first_difference(marks("abcd"), b"held out" + marks("abcd")[8:]) == -1


def test_where_nothing_is_known_nothing_differs() -> None:
    assert first_difference(b"", marks("ab")) is None


@pytest.mark.parametrize(("windows", "kept"), [(0, b""), (1, marks("a")), (2, marks("ab")), (9, marks("abc"))])
def test_marks_end_with_the_last_window_that_was_trained_on(windows: int, kept: bytes) -> None:
    assert up_to(marks("abc"), windows) == kept
    assert num_windows(kept) == min(windows, 3)


def test_there_are_no_more_marks_than_a_record_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 8 * (window_marks.MAX_WINDOWS + 1) == 1 << 20
    monkeypatch.setattr(window_marks, "MAX_WINDOWS", 2)
    assert up_to(marks("abcd"), 4) == marks("ab")


def test_a_reading_that_goes_on_from_what_is_recorded_takes_its_place_and_no_other_does() -> None:
    assert longer(marks("ab"), marks("abc")) == marks("abc")
    assert longer(b"", marks("a")) == marks("a")
    for read in (b"", marks("a"), marks("xbc")):
        assert longer(marks("ab"), read) == marks("ab")
