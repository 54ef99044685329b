"""The content of a snapshot, as it is named, offered and got; see `contents`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from shoal.averaging.contents import Offered, Request
from shoal.ids import PeerId
from shoal.swarm.content_transfer import Distrust, Late, Nobody, TransferSettings
from shoal.swarm.snapshots import CHUNK_BYTES
from shoal.wire.messages.snapshot import Snapshot

ANSWER_S = 10.0
"""How long the other end's answer is waited for."""


def offered(
    content: Tensor, asked: Callable[[PeerId, Request, int], None] = lambda *_: None, hashes: bytes | None = None
) -> Offered:
    """Return a content as `Contents` offers it."""
    return Offered((content,), CHUNK_BYTES, asked, hashes)


def digest_of(chunk_hashes: bytes) -> str:
    """Return the digest of a content with these hashes."""
    return hashlib.sha256(chunk_hashes).hexdigest()


class WantedSnapshot:
    """A content that is wanted; see `Wanted`.

    Args:
        snapshot: its size is allocated at once.
        givers: returns who offers it.
        progressed: is told of each chunk that has come.

    Attributes:
        content: is whole when the transfer has ended well.
    """

    def __init__(
        self, snapshot: Snapshot, givers: Callable[[], Collection[PeerId]], progressed: Callable[[], None]
    ) -> None:
        self.name = snapshot.name
        self.content = torch.empty(snapshot.num_bytes, dtype=torch.uint8)
        self.vectors = (self.content,)
        self.chunk_bytes = CHUNK_BYTES
        self.settings = TransferSettings(retry_s=ANSWER_S)
        self.progressed = progressed
        self._givers = givers
        self._is_lost = False

    def peers(self) -> Mapping[PeerId, None]:
        """They have said so themselves, so there is a connection with each."""
        return dict.fromkeys(self._givers())

    async def is_right(self, chunk_hashes: bytes) -> bool:
        """Compare what has come with the name."""
        return digest_of(chunk_hashes) == self.name.digest

    def is_lost(self, is_offered: bool, base_round: int) -> bool:
        """Nobody waits for a snapshot that all who had it have lost, or give wrong."""
        return self._is_lost

    def report(self, effect: Distrust | Nobody | Late) -> None:
        """Give up if it is not to be had; a single one who gives it wrong is passed over."""
        self._is_lost = self._is_lost or not isinstance(effect, Distrust)
