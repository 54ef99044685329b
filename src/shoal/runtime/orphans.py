"""What dead roles leave behind, where their fork server is dead as well: the supervisor is its parent, and ends it.

Without a subreaper it is init's, whether the fork server lives or not, and the tag in its environment tells it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from shoal.runtime.fork_servers import ForkServers
from shoal.runtime.process_control import kill, reap
from shoal.runtime.process_end import process_ended
from shoal.runtime.waking import Signal


class Orphans:
    """Kills and reaps the children that nobody has asked for."""

    def __init__(self, servers: ForkServers, known: Callable[[], set[int]]) -> None:
        """Prepare; `run` does the work.

        Args:
            servers: tell which children of this process belong to the run.
            known: returns the pids of the roles, which their launches follow.
        """
        self._servers = servers
        self._known = known
        self._due = Signal()

    def look(self) -> None:
        """Somebody has died whose children may be left."""
        self._due.notify()

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self._due.take()
            # Again and again: the children of those that were killed come next.
            while found := self._servers.orphans(self._known()):
                for stat in found:
                    kill(stat.pid)
                for stat in found:
                    with contextlib.suppress(ProcessLookupError):
                        await process_ended(stat.pid)
                    reap(stat.pid)
