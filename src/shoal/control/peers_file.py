"""`initial_peers.txt`: the addresses at which a swarm can be joined, kept true while peers come and go.

Any peer of the DHT will do to join it, so nothing depends on the first one. Monitor and client write the file on the
client's host, the same addresses in the same order, so that it stays true when one of them is gone for good; on a host
of servers the launcher does, told by its scout. Newcomers are given it (`--initial-peers @file`), and so is
whatever is started again on that host.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from shoal.control.membership import Membership
from shoal.events.base import tell
from shoal.events.registry import PeersUnwritten
from shoal.file_thread import FileThread, remedy, said_by_disk
from shoal.runtime.durable_files import put_whole

logger = logging.getLogger(__name__)

PEERS_FILE: Final = "initial_peers.txt"
MAX_LISTED: Final = 16
"""Addresses in the file: some may be gone when it is used, not all of them."""


class PeersFile:
    """The file of one run on one host."""

    def __init__(self, log_dir: Path, notice: Callable[[str], None]) -> None:
        """Write nothing yet.

        Args:
            notice: shows the user a line; it is used once, if the file cannot be written.
        """
        self._path = log_dir / PEERS_FILE
        self._notice = notice
        self._thread = FileThread(PEERS_FILE, path=self._path)
        self._failure = ""
        self._is_failing = False

    @property
    def exists(self) -> bool:
        """Whether it has been written, perhaps by a process before this one; while its disk does not answer it may."""
        asked = self._thread.do(self._path.exists)
        return not asked.done() or asked.result()

    def write(self, maddrs: Sequence[str]) -> None:
        """Put these addresses into the file as a whole; the swarm does without it where it cannot be written."""
        self._thread.do(partial(self._put, "".join(f"{maddr}\n" for maddr in maddrs)))
        failure, self._failure = self._failure, ""
        if failure and not self._is_failing:
            tell(logger, PeersUnwritten(str(self._path), failure), self._notice)
        self._is_failing = bool(failure)

    def _put(self, lines: str) -> None:
        try:
            put_whole(self._path, lines.encode(), lasting=False)
        except OSError as error:
            self._failure = f"{said_by_disk(error, self._path)}: {remedy(error, self._path)}"


def _none() -> Sequence[str]:
    return ()


async def keep_peers_file(file: PeersFile, membership: Membership, own: Callable[[], Sequence[str]] = _none) -> None:
    """Keep a file true, for ever; see `joinable`."""
    async for maddrs in joinable(membership, own):
        file.write(maddrs)


def read_peers_file(log_dir: Path) -> tuple[str, ...]:
    """Return the addresses in a run's file on this host; none if there is no such file."""
    with suppress(OSError):
        return tuple((log_dir / PEERS_FILE).read_text().split())
    return ()


async def joinable(membership: Membership, own: Callable[[], Sequence[str]] = _none) -> AsyncGenerator[tuple[str, ...]]:
    """Yield the addresses at which the swarm can be joined: now, and again after each change.

    Args:
        own: returns addresses that come first, whatever the view says.
    """
    last: tuple[str, ...] = ()
    while True:
        known = membership.view.maddrs
        listed = tuple(dict.fromkeys((*own(), *known)))[:MAX_LISTED]
        # Nobody is seen while this host is cut off: where others were is how it finds back.
        if known and listed != last:
            last = listed
            yield listed
        else:
            await membership.changed()
