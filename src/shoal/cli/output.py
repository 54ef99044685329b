"""Standard streams that are closed, or that go away while the program runs."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Open descriptors 0 to 2 where the caller has closed them; call it before any other is opened.

    Otherwise a socket would get such a number, and a child process would take it for its standard input or output.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # Takes the lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def discard_stdout() -> None:
    """Send what is printed from now on nowhere, because standard output takes no more (`| head`, a full disk).

    The interpreter flushes it once more at its end: there must be somewhere to flush to.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
