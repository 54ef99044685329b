"""Commands in a pseudo-terminal of a given size, as a user has them on the screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence

from shoal.clock import Deadline, SystemClock
from shoal.errors import RunFailed

_LOOK_S = 0.1
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
"""How a program takes the whole screen, and gives it back."""


class Terminal:
    """A terminal and the command that has it."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self.written = ""
        self._bytes = b""
        self._master = master

    def read(self) -> bool:
        """Take what has been written; returns False when nothing more can come."""
        has_ended = self.process.poll() is not None
        if not select.select([self._master], [], [], 0.0 if has_ended else _LOOK_S)[0]:
            return not has_ended
        self._bytes += os.read(self._master, 1 << 16)
        self.written = self._bytes.decode(errors="ignore")  # the last character may not be whole yet
        return True

    def until(self, text: str, within_s: float) -> None:
        """Wait until this is on the screen that is shown now."""
        deadline = Deadline.after(SystemClock(), within_s)
        while not any(text in line for screen in self.screens[-2:] for line in screen):
            if not self.read() or deadline.expired():
                raise RunFailed(f"no {text!r} on the screen:\n{self.written[-4000:]}")

    def press(self, keys: bytes) -> None:
        """Type."""
        os.write(self._master, keys)

    def ends(self, within_s: float) -> int:
        """Return the exit code."""
        deadline = Deadline.after(SystemClock(), within_s)
        while self.read() and not deadline.expired():
            pass
        return self.process.wait(deadline.remaining_s())

    @property
    def screens(self) -> list[list[str]]:
        """What the whole screen has shown, one after the other, as lines without colours."""
        shown = self.written.partition(ENTER)[2].partition(LEAVE)[0].split("\x1b[H")
        return [_COLOURS.sub("", screen).replace("\x1b[?25l", "").replace("\r", "").split("\n") for screen in shown[1:]]


@contextlib.contextmanager
def terminal(command: Sequence[str], environment: Mapping[str, str], columns: int, rows: int) -> Iterator[Terminal]:
    """Run Python with these arguments in a terminal of so many columns and rows."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    # The first terminal that a process opens which leads a session becomes its own: Ctrl-C reaches it.
    opened = 'exec "$0" "$@" <"$TERMINAL" >"$TERMINAL" 2>&1'
    own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        ["/bin/sh", "-c", opened, sys.executable, *command],
        env=own | {"TERM": "xterm-256color", "LANG": "C.UTF-8", "TERMINAL": os.ttyname(slave), **environment},
        start_new_session=True,
    )
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(slave)
        os.close(master)
