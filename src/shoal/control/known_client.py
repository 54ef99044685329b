"""Where a swarm's client was found last, kept on this host: who looks at the run dials it there before anything else.

It is a hint and no more. Whoever answers has to prove by TLS that it has the swarm's key and is the peer that is named
here, and its first message says which run it is of. A client that is gone costs one dial.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import anyio
import anyio.to_thread
import msgspec

from shoal.control.membership import Membership
from shoal.control.role_start import RoleStart
from shoal.errors import MALFORMED
from shoal.identity import namespace
from shoal.ids import PeerId
from shoal.runtime.user_cache import cached_file, keep, user_cache
from shoal.wire.messages.base import Hop

_FOLDER: Final = "swarms"
_MAX_READ: Final = 64
_MAX_LIVE: Final = 16
_MAX_PEERS: Final = 24
"""Addresses that are kept: those of peers that were there last, and a few of before. By the first ones that a host was
told it knows which swarm is meant, so these stay although nobody may answer there."""
_MAX_BYTES: Final = 1 << 20


class KnownClient(msgspec.Struct, frozen=True, kw_only=True):
    """A client, the run of which it is, and addresses of the swarm: who is told others means another swarm."""

    run_id: str
    peer: Annotated[PeerId, msgspec.Meta(max_length=128)]
    addresses: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)]
    initial_peers: Annotated[tuple[str, ...], msgspec.Meta(max_length=_MAX_READ)]

    @property
    def hop(self) -> Hop:
        """Who it is and where."""
        return Hop(self.peer, self.addresses)


def remember_client(
    swarm_key: bytes,
    experiment_prefix: str,
    run_id: str,
    client: Hop,
    live: Sequence[str],
    told: Sequence[str],
) -> None:
    """Keep where the client is, for the owner alone; what was kept of the same swarm is replaced.

    Args:
        live: addresses of peers that are in the swarm now.
        told: at which this host has joined; of more than can be kept, the first ones are.

    Raises:
        OSError: it cannot be written.
    """
    path = _file(swarm_key, experiment_prefix)
    before = _kept(path)
    # Who was told of one peer knows no reason to forget the others.
    others = before.initial_peers if before is not None and before.run_id == run_id else ()
    peers = tuple(dict.fromkeys((*live[:_MAX_LIVE], *told, *others)))[:_MAX_PEERS]
    known = KnownClient(run_id=run_id, peer=client.peer, addresses=client.addresses, initial_peers=peers)
    if known != before:
        keep(path, msgspec.json.encode(known))


async def keep_known_client(start: RoleStart, run_id: str, membership: Membership) -> None:
    """Keep where the registry says that the client of a run is, whenever that changes, until cancelled.

    Args:
        start: of the role that does it; says which swarm it is.
    """
    config, last = start.config(), None
    while True:
        view = membership.view
        clients = view.clients if view.run is not None and view.run.run_id == run_id else ()
        told = (*config.network.initial_peers, *start.initial_peers)
        found = (clients[0].hop, view.maddrs, told) if clients else last
        if found is None or found == last:
            await membership.changed()
            continue
        last = found
        with suppress(OSError):  # then who looks asks the registry
            await anyio.to_thread.run_sync(remember_client, start.swarm_key, config.experiment_prefix, run_id, *found)


def known_client(swarm_key: bytes, experiment_prefix: str, initial_peers: Collection[str]) -> KnownClient | None:
    """Return the client that is kept of a swarm; None if there is none, or one of a swarm without these peers."""
    known = _kept(_file(swarm_key, experiment_prefix))
    return known if known is not None and set(initial_peers) & set(known.initial_peers) else None


def _kept(path: Path) -> KnownClient | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_BYTES), type=KnownClient)
    except (OSError, *MALFORMED):
        return None  # never written, or by another version


def _file(swarm_key: bytes, experiment_prefix: str) -> Path:
    return cached_file(user_cache(_FOLDER), namespace(swarm_key, experiment_prefix))
