"""Gets what the inner optimizers of a record's members knew, for a checkpoint.

AskInner -> InnerHeld -> content (`contents`)
    '- lost, silent, or has it no more: None
"""

from __future__ import annotations

import anyio
from torch import Tensor

from shoal.averaging.contents import Contents
from shoal.averaging.digest_fetch import DigestFetch
from shoal.averaging.inner_exchange import most_inner_bytes
from shoal.control.membership import Membership
from shoal.ids import PeerId
from shoal.runtime.waking import Signal
from shoal.transport.base import Received
from shoal.wire.messages.base import Hop
from shoal.wire.messages.inner import AskInner, InnerHeld, InnerState

_SILENT_S = 30.0
"""Without a word from a member that is there: it hashes a large state before it offers it."""


class InnerFetch:
    """Asks one member at a time. A `transport.dispatch.Handler`."""

    def __init__(self, contents: Contents, membership: Membership) -> None:
        self._contents = contents
        self._endpoint = contents.endpoint
        self._membership = membership
        self._asked: tuple[PeerId, AskInner] | None = None
        self._answer: InnerHeld | None = None
        self._is_lost = False
        self._changed = Signal()

    def reserve(self, peer: PeerId, stage: int, record_hash: str) -> None:
        """Say that this will be fetched: the member holds it until then."""
        if (hop := self._hop(peer)) is not None:
            self._endpoint.introduce(hop)
            self._endpoint.post(peer, AskInner(stage, record_hash))

    async def fetch(self, peer: PeerId, stage: int, record_hash: str, num_parameters: int) -> Tensor | None:
        """Return the bytes of a safetensors file, whose digest is what the member says; None: nobody gives it.

        Args:
            num_parameters: Of the stage: a content that is too large for them is none of its optimizer's.
        """
        hop = self._hop(peer)
        if hop is None:
            return None
        self._asked, self._answer, self._is_lost = (peer, AskInner(stage, record_hash)), None, False
        self._endpoint.introduce(hop)
        self._endpoint.post(*self._asked)
        inner = await self._answered()
        self._asked = None
        if inner is None or (inner.stage, inner.record_hash) != (stage, record_hash):
            return None
        if inner.num_bytes > most_inner_bytes(num_parameters):
            return None
        fetch = DigestFetch(self._contents, inner.name, inner.num_bytes, lambda: (peer,))
        return fetch.content if await self._contents.fetch(fetch) else None

    def receive(self, event: Received) -> bool:
        """Take a member's answer; one that was not asked for has no effect."""
        held = event.message
        if not isinstance(held, InnerHeld):
            return False
        if self._asked == (event.peer, AskInner(held.stage, held.record_hash)):
            self._answer = held
            self._changed.notify()
        return True

    def peer_lost(self, peer: PeerId) -> None:
        if self._asked is not None and self._asked[0] == peer:
            self._is_lost = True
            self._changed.notify()

    def _hop(self, peer: PeerId) -> Hop | None:
        return next((each.hop for each in self._membership.view.replicas if each.peer == peer), None)

    async def _answered(self) -> InnerState | None:
        with anyio.move_on_after(_SILENT_S):
            while self._answer is None and not self._is_lost:
                await self._changed.wait()
        return None if self._answer is None else self._answer.inner
