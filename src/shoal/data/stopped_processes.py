"""Processes that prepare data and stand still: one that was sent SIGSTOP neither ends nor says so.

A look is the letter that the system has for a process. A program that slows others down (cpulimit) stops them and lets
them go on many times a second: what has computed between two looks does not stand still.
"""

from __future__ import annotations

import select
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import UnionType
from typing import Final, TypeVar

from shoal.clock import Clock, SystemClock
from shoal.runtime.frames import FrameReader
from shoal.runtime.process_info import cpu_s, read_stat

LOOK_S: Final = 1.0
"""Between two looks."""

STILL_S: Final = 2.0
"""So long a process has to stand still before something is done about it."""

_READ_BYTES: Final = 1 << 16

_Message = TypeVar("_Message")


class Stillness:
    """What looks at one process have found. The caller has not reaped it, so that the number is its own."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since_s: float | None = None
        self._computed_s = 0.0

    def look(self, now_s: float) -> bool:
        """Look, and return whether it stands still for `STILL_S`, as far as looks tell."""
        stat = read_stat(self._pid)
        if stat is None or not stat.is_stopped:
            self._since_s = None
            return False
        computed_s = cpu_s(self._pid)
        if self._since_s is None or computed_s != self._computed_s:
            self._since_s, self._computed_s = now_s, computed_s
        return now_s - self._since_s >= STILL_S


def said_by(
    process: subprocess.Popen[bytes],
    control: socket.socket,
    kinds: UnionType | type[_Message],
    stands_still: Callable[[], None],
    clock: Clock | None = None,
) -> Iterator[_Message]:
    """Yield what a process says, waiting for it, until it closes its socket or is gone.

    Args:
        control: this end of the socket.
        stands_still: called when it does, and again only after it has gone on.
    """
    clock = clock or SystemClock()
    frames, stillness, is_still = FrameReader[_Message](kinds), Stillness(process.pid), False
    poll = select.poll()
    poll.register(control, select.POLLIN)
    with suppress(ConnectionResetError):
        while True:
            while not poll.poll(LOOK_S * 1000):
                was_still, is_still = is_still, stillness.look(clock.now_s())
                if is_still and not was_still:
                    stands_still()
            if not (data := control.recv(_READ_BYTES)):
                return
            yield from frames.feed(data)
