"""The invitation of the client's run: asked for when it is needed, given to all hosts that join, renewed when old."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from shoal.clock import Clock

_FRESH_S: Final = 300.0
"""Installing may take longer on one host than an invitation is valid."""


class ClientInvitation:
    """What all hosts that join one run share."""

    def __init__(self, clock: Clock) -> None:
        """Begin where nobody knows yet whether there is a client."""
        self._clock = clock
        self._settled = anyio.Event()
        self._ask: Callable[[], Awaitable[str]] | None = None
        self._asking = anyio.Lock()
        self._text = ""
        self._asked_s = 0.0

    def settle(self, ask: Callable[[], Awaitable[str]] | None = None) -> None:
        """Say that the client's host is done, for good.

        Args:
            ask: returns an invitation; None: there is no client, unless one was named before.
        """
        self._ask = self._ask or ask
        self._settled.set()

    async def text(self) -> str | None:
        """Return what others join by, once the client's host is done; None if there is no client.

        Raises:
            HostFailed: the client makes none.
        """
        await self._settled.wait()
        if self._ask is None:
            return None
        async with self._asking:
            if not self._text or self._clock.now_s() - self._asked_s > _FRESH_S:
                self._text, self._asked_s = await self._ask(), self._clock.now_s()
        return self._text
