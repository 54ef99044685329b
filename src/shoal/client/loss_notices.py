"""What a server is called where people read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.ids import PeerId
from shoal.swarm.view import SwarmView, network_host


class ServerNames:
    """What a server is called where people read it."""

    def __init__(self, own: Sequence[PeerId], view: Callable[[], SwarmView]) -> None:
        """Know the servers of this host, in the order of their numbers, and where others are looked up."""
        self._names = {peer: f"server {index}" for index, peer in enumerate(own)}
        self._view = view

    def __call__(self, peer: PeerId) -> str:
        """Return `server 1` for one of this host, and the end of its id with its machine for another one.

        A name stands for as long as this process lives: who is lost is not in the view any more.
        """
        if peer not in self._names:
            replica = self._view().replica(peer)
            if replica is None:
                return f"server {peer[-8:]}"
            host = network_host(replica.hop)
            self._names[peer] = f"server {peer[-8:]}" + (f" on {host}" if host else "")
        return self._names[peer]
