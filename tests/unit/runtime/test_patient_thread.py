"""Work in a thread where there is none for a moment."""

from __future__ import annotations

import threading

import pytest

from shoal.clock import Backoff
from shoal.runtime import patient_thread
from shoal.runtime.patient_thread import run_in_thread


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient_thread, "Backoff", lambda **_: Backoff(first_s=0.0, max_s=0.0))


@pytest.mark.parametrize("refusals", [2, 1000])
async def test_a_thread_that_the_system_refuses_is_asked_for_again_for_a_while(
    monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    start, left = threading.Thread.start, [refusals]

    def refused(thread: threading.Thread) -> None:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    if refusals == 2:
        assert await run_in_thread(max, 3, 7) == 7
        assert left == [0]
    else:
        with pytest.raises(RuntimeError, match="new thread"):
            await run_in_thread(max, 3, 7)


async def test_what_the_function_raises_is_raised_at_once() -> None:
    calls: list[int] = []

    def fails(number: int) -> None:
        calls.append(number)
        raise RuntimeError("torch says something else")

    with pytest.raises(RuntimeError, match="something else"):
        await run_in_thread(fails, 1)
    assert calls == [1]
