"""Long turns on a core for the thread that computes, so that several of them do not empty each other's caches.

With more replicas than cores their threads take turns every few milliseconds, shorter than one operation, and each
finds what the other has left in the caches. Threads that only pass messages on are not held up: they go before one in
batch mode as soon as they wake up (sched(7)).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

from shoal.runtime.linux_calls import LinuxCall, has

_SLICE_NS = 100_000_000
"""The longest turn that Linux takes (sched_setattr(2)); before 6.12 it ignores it."""
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
# size, policy, flags, nice, priority, runtime (here: the turn), deadline, period
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def take_long_turns() -> bool:
    """Ask for long turns for the calling thread; return whether the system has agreed. Needs no privilege."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or not has(LinuxCall.LONG_TURNS):
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_BATCH, 0, nice, 0, _SLICE_NS, 0, 0)
    return ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0
