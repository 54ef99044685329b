"""`initial_peers.txt`: the addresses at which a swarm can be joined, kept true while peers come and go.

Any peer of the DHT will do to join it, so nothing depends on the first one. The monitor writes the file on the client's
host, the launcher, told by its scout, on a host of servers. Newcomers are given it (`--initial-peers @file`), and so is
whatever is started again on that host.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from shoal.control.membership import Membership

logger = logging.getLogger(__name__)

PEERS_FILE: Final = "initial_peers.txt"
MAX_LISTED: Final = 16
"""Addresses in the file: some may be gone when it is used, not all of them."""


class PeersFile:
    """The file of one run on one host."""

    def __init__(self, log_dir: Path, notice: Callable[[str], None]) -> None:
        """Write nothing yet.

        Args:
            log_dir: of the run on this host.
            notice: told once, in a sentence for the user, if the file cannot be written.
        """
        self._path = log_dir / PEERS_FILE
        self._notice = notice
        self._is_failing = False

    @property
    def exists(self) -> bool:
        """Whether it has been written, perhaps by a process before this one."""
        return self._path.exists()

    def write(self, maddrs: Sequence[str]) -> None:
        """Put these addresses into the file as a whole; the swarm does without it where it cannot be written."""
        aside = self._path.with_name(f".{self._path.name}.new")
        try:
            aside.write_text("".join(f"{maddr}\n" for maddr in maddrs))
            aside.replace(self._path)
        except OSError as error:
            text = f"cannot write {self._path} ({error.strerror or error}): free space there; it may be out of date"
            if not self._is_failing:
                logger.error("peers.unwritten", extra={"reason": text})
                self._notice(text)
            self._is_failing = True
        else:
            self._is_failing = False


def read_peers_file(log_dir: Path) -> tuple[str, ...]:
    """Return the addresses in a run's file on this host; none if there is no such file."""
    with suppress(OSError):
        return tuple((log_dir / PEERS_FILE).read_text().split())
    return ()


async def joinable(membership: Membership, own: Sequence[str] = ()) -> AsyncGenerator[tuple[str, ...]]:
    """Yield the addresses at which the swarm can be joined now, then whenever others are known.

    Args:
        membership: the view of the swarm.
        own: addresses that come first, whatever the view says.
    """
    last: tuple[str, ...] = ()
    while True:
        known = membership.view.maddrs
        listed = tuple(dict.fromkeys((*own, *known)))[:MAX_LISTED]
        # Nobody is seen while this host is cut off: where others were is how it finds back.
        if known and listed != last:
            last = listed
            yield listed
        else:
            await membership.changed()
