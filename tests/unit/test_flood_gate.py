"""What strangers can cause is logged, and can fill no log."""

from __future__ import annotations

import logging

import pytest
from tests.set_clock import SetClock

from shoal import log
from shoal.events.base import Event


class Refused(Event, frozen=True, tag="refused"):
    """Something was refused."""

    level = logging.WARNING
    source: str


def test_a_flood_leaves_a_few_lines_of_each_source_and_says_how_many_are_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = SetClock(0.0)
    gate = log.FloodGate(logging.getLogger("shoal.test"), clock, window_s=10.0, lines_of_source=3, lines=8)
    for _ in range(1000):
        gate.emit(Refused("mallory"), "mallory")
    gate.emit(Refused("bob"), "bob")
    assert [vars(r)["source"] for r in caplog.records] == ["mallory"] * 3 + ["bob"]
    assert vars(caplog.records[-1])["left_out"] == 997
    for i in range(1000):
        gate.emit(Refused(f"name{i}"), f"name{i}")
    assert len(caplog.records) == 8, "many names are no way around it"
    clock.now = 10.0
    gate.emit(Refused("mallory"), "mallory")
    assert vars(caplog.records[-1])["left_out"] == 996
    assert len(gate._written) == 1
