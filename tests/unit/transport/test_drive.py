"""A machine that is ticked when its time has come."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import anyio
import anyio.lowlevel
from tests.set_clock import SetClock

from shoal.ids import PeerId
from shoal.runtime.waking import Signal
from shoal.transport.drive import drive


class Alarm:
    """Says at each time at which it was ticked; then it waits for another one to be set."""

    def __init__(self, wake_at_s: float) -> None:
        self.wake_at_s = wake_at_s

    def receive(self, peer: PeerId, message: float, now_s: float) -> Sequence[float]:
        self.wake_at_s = message
        return []

    def lost(self, peer: PeerId, now_s: float) -> Sequence[float]:
        return []

    def tick(self, now_s: float) -> Sequence[float]:
        self.wake_at_s = math.inf
        return [now_s]


HOUR_S = 3600.0
"""No test waits for it."""


async def test_a_machine_is_ticked_when_it_is_due_and_its_effects_are_carried_out() -> None:
    clock, done = SetClock(), list[float]()
    await drive(Alarm(clock.now), clock, Signal(), done.extend, until=lambda: bool(done))
    assert done == [clock.now]


async def test_an_event_that_brings_the_time_forward_wakes_and_one_that_puts_it_off_does_not_tick() -> None:
    clock, changed, done = SetClock(), Signal(), list[float]()
    alarm = Alarm(clock.now + HOUR_S)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drive, alarm, clock, changed, done.extend)
        for later_s in (2 * HOUR_S, math.inf):
            await anyio.wait_all_tasks_blocked()
            alarm.receive(PeerId("A"), clock.now + later_s, clock.now)
            changed.notify()
        await anyio.wait_all_tasks_blocked()
        assert done == []
        alarm.receive(PeerId("A"), clock.now - 1.0, clock.now)
        changed.notify()
        while not done:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert done == [clock.now]


async def test_a_machine_that_has_put_its_time_off_unheard_is_not_ticked_at_the_old_one() -> None:
    clock, changed, done = SetClock(), Signal(), list[float]()
    alarm, looks = Alarm(clock.now), list[float]()

    def is_over() -> bool:
        looks.append(alarm.wake_at_s)
        if len(looks) == 1:
            # As a message does that is taken between the look at the time and its end.
            asyncio.get_running_loop().call_soon(alarm.receive, PeerId("A"), clock.now + HOUR_S, clock.now)
        return len(looks) == 2

    await drive(alarm, clock, changed, done.extend, until=is_over)
    assert (done, looks) == ([], [clock.now, clock.now + HOUR_S])


async def test_it_ends_when_what_was_waited_for_has_come_before_the_time() -> None:
    clock, changed, over = SetClock(), Signal(), list[bool]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drive, Alarm(clock.now + HOUR_S), clock, changed, over.extend, lambda: bool(over))
        await anyio.wait_all_tasks_blocked()
        over.append(True)
        changed.notify()
