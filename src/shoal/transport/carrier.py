"""What carries connections between two peers of one kind of address; an endpoint has one carrier for each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from shoal.transport.connection import Connection


class Carrier(Protocol):
    """Listens and connects. A connection that it makes has `prepare` set, which raises HandshakeError."""

    @property
    def scheme(self) -> str:
        """How its addresses begin, with the colon."""
        ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others reach it now, best first; none before it listens. A host may get other addresses meanwhile."""
        ...

    async def listen(self, make: Callable[[], Connection]) -> None:
        """Take connections from now on, each with a new object of `make`.

        Raises:
            ConfigError: the address cannot be used.
        """
        ...

    async def connect(self, address: str, connection: Connection) -> None:
        """Connect to an address of this scheme and hand the stream to `connection`.

        Raises:
            OSError: it cannot be reached.
            ValueError: it cannot be the address of anything: peers say what they like.
        """
        ...

    async def listen_again(self) -> None:
        """Make anew what others reach it by, if somebody has removed it; not after `stop_listening`."""
        ...

    def stop_listening(self) -> None:
        """Take no more connections and release the address."""
        ...
