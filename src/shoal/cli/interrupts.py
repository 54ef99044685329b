"""Takes Ctrl-C, also in a process that a shell has started in the background and lets ignore it, and remembers it.

A KeyboardInterrupt can get lost: in a finalizer, or in a library that is being imported.
"""

from __future__ import annotations

import signal
from types import FrameType


class Interrupts:
    """Takes SIGINT from when it is made until it is given back; still raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self._seen = False
        signal.signal(signal.SIGINT, self._interrupt)

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
        """Leave the signal to Python again."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
