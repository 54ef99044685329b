"""Takes Ctrl-C, also in a process that a shell has started in the background and lets ignore it, and remembers it.

A KeyboardInterrupt can get lost: in a finalizer, or in a library that is being imported.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Self


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals by which a launcher ends well: also a terminal that goes away, unless the launcher was started
    to outlive it (`nohup`)."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if outlives else (signal.SIGHUP,)))


class Interrupts:
    """A context that takes SIGINT while it lasts, or until `give_back`; still raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self._seen = False

    def __enter__(self) -> Self:
        signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._seen = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Go no further if Ctrl-C was pressed.

        Raises:
            KeyboardInterrupt: it was.
        """
        if self._seen:
            raise KeyboardInterrupt

    def give_back(self) -> None:
        """Leave the signal to Python, also where a shell has let the process ignore it."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
