"""What stands for a process in a cluster: an endpoint and its tasks, which end or are killed as a whole."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio

from shoal.errors import ShoalError
from shoal.events.base import emit
from shoal.events.processes import ProcessFailed
from shoal.ids import PeerId
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork

logger = logging.getLogger(__name__)


class Process:
    """One role of a cluster.

    Attributes:
        error: why it failed; None if it did not.
        ended: set once the role has ended or has been killed.
    """

    def __init__(self, network: MemoryNetwork, peer: PeerId) -> None:
        """Take a place on the network; messages are queued until `run`.

        Raises:
            ConfigError: the peer is there already.
        """
        self.endpoint: MemoryEndpoint = network.endpoint(peer)
        self.error: ShoalError | None = None
        self.ended = anyio.Event()
        self._network = network
        self._scope = anyio.CancelScope()
        self._running = True
        self._frozen = False

    @property
    def peer(self) -> PeerId:
        """Who it is."""
        return self.endpoint.peer_id

    @property
    def running(self) -> bool:
        """Whether it has neither ended nor been killed."""
        return self._running

    async def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """Run the role to its end; then it is off the network, as an exited process is.

        A `ShoalError` ends the role alone, as in a process of its own. Whatever else it raises is raised here: a bug.
        """
        try:
            with self._scope:
                await main()
        except* ShoalError as errors:
            self.error = _first(errors)
            emit(logger, ProcessFailed(self.peer, str(self.error)))
        finally:
            if not self._frozen:
                self._leave("ended")

    async def run_here(self, main: Callable[[], Awaitable[None]]) -> bool:
        """Run the role to its end as `run` does, but let all errors out; returns False if it was killed."""
        with self._scope:
            await main()
            return True
        return False

    def kill(self) -> None:
        """End it as SIGKILL would: the others lose it, and what it posts from now on goes nowhere."""
        self._leave("killed")
        self._scope.cancel()

    def freeze(self) -> None:
        """Stop it for good as SIGSTOP would: it does nothing more, but its connections stay until it is killed."""
        self._frozen = True
        self._scope.cancel()

    def _leave(self, reason: str) -> None:
        if self._running:
            self._running = False
            self.ended.set()
            self._network.remove(self.peer, reason)


def _first(errors: BaseExceptionGroup[ShoalError]) -> ShoalError:
    """Return the first error that the groups of the task groups hold."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
