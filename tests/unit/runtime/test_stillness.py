"""Looks at a process: when it counts as standing still."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shoal.runtime import child
from shoal.runtime.child import STILL_S, Stillness
from shoal.runtime.proc_files import ProcessStat

PID = 7


def looks(monkeypatch: pytest.MonkeyPatch, states: str, computed_s: Sequence[float] = ()) -> list[bool]:
    """What looks come to, one a second, at a process of these states; a space: there is none."""
    stillness, found = Stillness(PID), list[bool]()
    for at_s, state in enumerate(states):
        stat = None if state == " " else ProcessStat(PID, state, 1, 1, 0.0, 0, 0)
        monkeypatch.setattr(child, "read_stat", {PID: stat}.__getitem__)
        monkeypatch.setattr(child, "cpu_s", {PID: computed_s[at_s] if computed_s else 0.5}.__getitem__)
        found.append(stillness.look(100.0 + at_s))
    return found


@pytest.mark.parametrize("states", ["TTTT", "tttt", "TtTt"])
def test_one_that_is_stopped_at_every_look_stands_still_after_two_seconds(
    monkeypatch: pytest.MonkeyPatch, states: str
) -> None:
    assert STILL_S == 2
    assert looks(monkeypatch, states) == [False, False, True, True]


@pytest.mark.parametrize("states", ["SSSSS", "RRRRR", "DDDDD", "ZZZZZ", "     ", "TTSTT", "TT TT"])
def test_one_that_waits_computes_is_gone_or_has_gone_on_does_not(monkeypatch: pytest.MonkeyPatch, states: str) -> None:
    assert not any(looks(monkeypatch, states))


def test_nor_does_one_that_has_computed_between_two_looks_though_each_finds_it_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert looks(monkeypatch, "TTTTTT", (0.1, 0.2, 0.3, 0.4, 0.4, 0.4)) == [False] * 5 + [True]
