"""How long samples take at emulated machines: what may be said, and what it means for the device."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from shoal.config.emulation import EmulationConfig
from shoal_lab.emulation.device_pace import PassCounts, emulated_pace

FORWARD = PassCounts(forwards=1)


def test_samples_take_what_is_said_of_their_server_and_operation() -> None:
    config = EmulationConfig(sample_s="1=0.02#7 0=0.005,1=0.04")  # pyright: ignore[reportArgumentType]
    slow = emulated_pace(config.call_s, config.sample_times_of(1))
    assert slow is not None
    assert slow.length_s(FORWARD, took_s=0.001, number=6, num_samples=3) == pytest.approx(0.12)
    assert slow.length_s(FORWARD, took_s=0.001, number=7, num_samples=3) == pytest.approx(0.06)
    fast = emulated_pace(config.call_s, config.sample_times_of(0))
    assert fast is not None
    assert fast.length_s(FORWARD, took_s=0.001, number=99, num_samples=2) == pytest.approx(0.01)
    assert emulated_pace(config.call_s, config.sample_times_of(2)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1", "is no time of a sample"),
        ("1=0", "is no time of a sample"),
        ("server:1=0.1", "is no time of a sample"),
        ("1=0.1#7", "server 1 has no time before its operation 7"),
        ("1=0.1 1=0.2#7 1=0.3#7", "server 1 has two times from operation 7 on"),
    ],
)
def test_a_time_that_says_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EmulationConfig(sample_s=text)  # pyright: ignore[reportArgumentType]
