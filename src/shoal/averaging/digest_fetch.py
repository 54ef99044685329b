"""Contents that are named by their digest: how they are offered, and their transfer; see `contents`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from shoal.averaging.content_fetch import ContentFetch
from shoal.averaging.contents import Asked, Contents, Offered
from shoal.ids import PeerId
from shoal.swarm.content_transfer import Distrust, Late, Nobody, TransferSettings
from shoal.swarm.snapshots import CHUNK_BYTES
from shoal.wire.messages.transfer import ContentName

ANSWER_S = 10.0
"""How long the other end's answer is waited for."""
_SLOW_S = 0.5
"""After so long without a chunk the others help: well before a search gives up all who are silent."""


def offered(content: Tensor, asked: Asked | None = None, hashes: bytes | None = None) -> Offered:
    """Return a content as `Contents` offers it."""
    return Offered((content,), CHUNK_BYTES, asked, hashes)


def digest_of(chunk_hashes: bytes) -> str:
    """Return the digest of a content with these hashes."""
    return hashlib.sha256(chunk_hashes).hexdigest()


class DigestFetch(ContentFetch):
    """A content that its name gives the digest of, on its way or here.

    Args:
        num_bytes: its size, which is allocated at once.
        heard: is told of each chunk that has come.
    """

    def __init__(
        self,
        contents: Contents,
        name: ContentName,
        num_bytes: int,
        givers: Callable[[], Collection[PeerId]],
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        self.content = contents.memory.empty(num_bytes, torch.uint8)
        self._givers = givers
        self._heard = heard
        self._is_lost = False
        # However slow the link is: it goes on until the round is over, or whoever waits for it gives it up.
        settings = TransferSettings(retry_s=ANSWER_S, slow_s=_SLOW_S, timeout_s=math.inf)
        super().__init__(contents.endpoint, contents.clock, name, (self.content,), settings, CHUNK_BYTES)

    def peers(self) -> Mapping[PeerId, None]:
        """They have said so themselves, so there is a connection with each."""
        return dict.fromkeys(self._givers())

    async def is_right(self) -> bool:
        """Compare what has come with the name."""
        return digest_of(self.machine.offer) == self.name.digest

    def is_lost(self, is_offered: bool, base_round: int) -> bool:
        """Nobody waits for what all who had it have lost, or give wrong."""
        return self._is_lost

    def progressed(self) -> None:
        """A chunk has come."""
        self._heard()

    def report(self, effect: Distrust | Nobody | Late) -> None:
        """A single one who gives it wrong is passed over."""
        self._is_lost = self._is_lost or not isinstance(effect, Distrust)
