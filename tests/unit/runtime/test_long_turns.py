"""Turns of the thread that computes."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable

import pytest

from shoal.pipeline.torch_device import device_initialiser
from shoal.runtime.long_turns import take_long_turns

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="elsewhere turns are as they are")


def _policy_after(call: Callable[[], object]) -> int:
    """Return how the system schedules a thread that has made a call."""
    found: list[int] = []

    def run() -> None:
        call()
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_that_computes_asks_for_them_and_the_others_of_its_process_stay_as_they_were() -> None:
    before, agreed = os.sched_getscheduler(0), []
    policy = _policy_after(lambda: agreed.append(take_long_turns()))
    # A container may forbid it.
    assert policy == (os.SCHED_BATCH if agreed == [True] else before)
    assert _policy_after(device_initialiser("cpu", 1)) == policy
    assert os.sched_getscheduler(0) == before


def test_a_machine_whose_calls_are_not_known_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert _policy_after(take_long_turns) == os.sched_getscheduler(0)
