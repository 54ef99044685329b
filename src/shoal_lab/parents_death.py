"""A child that ends with its parent, however that ends: Linux alone can do it (PR_SET_PDEATHSIG of prctl(2))."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable

from shoal.runtime.linux_calls import LinuxCall, has

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> Callable[[], None]:
    """Return what a child process has to call before it executes its program, to get a signal when its parent dies.

    Nothing is loaded or imported in the child itself, which has only the thread that forked.
    """
    if not has(LinuxCall.PRCTL):
        return lambda: None
    libc = ctypes.CDLL(None)
    prctl, request, signal_number = libc.prctl, ctypes.c_int(_PR_SET_PDEATHSIG), ctypes.c_ulong(number)

    def ask() -> None:
        prctl(request, signal_number)

    return ask
