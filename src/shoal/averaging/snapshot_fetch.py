"""The transfer of a snapshot; see `digest_fetch`."""

from __future__ import annotations

from collections.abc import Callable, Collection

from shoal.averaging.contents import Contents
from shoal.averaging.digest_fetch import DigestFetch
from shoal.ids import PeerId
from shoal.wire.messages.snapshot import OfferSnapshot, Snapshot


class SnapshotFetch(DigestFetch):
    """A snapshot whose content is on its way, or here.

    Args:
        heard: is told of each chunk that has come.
    """

    def __init__(
        self,
        contents: Contents,
        snapshot: Snapshot,
        offer: OfferSnapshot,
        givers: Callable[[], Collection[PeerId]],
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        self.snapshot = snapshot
        self.offer = offer
        super().__init__(contents, snapshot.name, snapshot.num_bytes, givers, heard)
