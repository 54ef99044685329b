"""Lets a machine act when its time has come; what its peers say and their losses it is told by its driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import anyio

from shoal.clock import Clock
from shoal.runtime.waking import Signal
from shoal.swarm.machine import Machine

_Effect = TypeVar("_Effect")


async def drive(
    machine: Machine[Any, _Effect],
    clock: Clock,
    changed: Signal,
    do: Callable[[Sequence[_Effect]], None],
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Tick a machine whenever it is due.

    Args:
        changed: notified when `until` may hold, or the machine is due earlier than before; more often does no harm.
        until: whether to return; without it this goes on until it is cancelled.
    """
    while not until():
        coming = changed.coming
        with anyio.move_on_after(machine.wake_at_s - clock.now_s()):
            await coming.wait()
        now_s = clock.now_s()
        if machine.wake_at_s <= now_s:
            do(machine.tick(now_s))
