"""Whether names of hosts are known here, asked so that a resolver that does not answer keeps nobody waiting."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from typing import Final

import anyio

NAME_S: Final = 4.0


async def is_known(name: str) -> bool:
    """Return whether this host knows an address of a name; not if it says nothing within `NAME_S`.

    A lookup cannot be interrupted, and the end of an event loop waits for its own ones: this thread is left alone.
    """
    loop, answered, known = asyncio.get_running_loop(), anyio.Event(), False

    def look_up() -> None:
        nonlocal known
        with suppress(OSError, UnicodeError):
            known = bool(socket.getaddrinfo(name, None))
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(answered.set)

    threading.Thread(target=look_up, name="name lookup", daemon=True).start()
    with anyio.move_on_after(NAME_S):
        await answered.wait()
    return known
