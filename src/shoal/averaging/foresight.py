"""The outer step that a round will most likely end with, computed while its last steps go on.

    what all members of the last record have encoded is here --thread: average, outer step, hashes--> foreseen
    quorum of the same members, payloads and shares --> foreseen;   another one --> computed as ever

Foresight saves time, and nothing else: it comes to the bits that the quorum comes to without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import anyio
import anyio.to_thread
from torch import Tensor

from shoal.averaging.gathered import Gathered
from shoal.averaging.payloads_ahead import PayloadsAhead
from shoal.averaging.replica_state import Foreseen
from shoal.errors import MemberFault
from shoal.ids import PeerId
from shoal.wire.messages.round import Payload


class MemberShare(NamedTuple):
    """A member that counts: what it has encoded, its weight over the sum of all weights, and the factor on its
    pseudo-gradient. The same ones in the same order come to the same average."""

    member: PeerId
    payload: Payload
    share: float
    scale: float


class Foresight:
    """That of one replica.

    Args:
        outer_step: Returns what the state becomes in a round by what its members have brought; called in a thread.
    """

    def __init__(self, ahead: PayloadsAhead, outer_step: Callable[[int, Sequence[Gathered]], Foreseen]) -> None:
        self._ahead = ahead
        self._outer_step = outer_step
        self._of: tuple[str, Sequence[MemberShare]] = "", ()
        self._foreseen: Foreseen | None = None
        self._is_known = anyio.Event()

    async def run(self, expected: Callable[[], Sequence[PeerId]]) -> None:
        """Compute until cancelled.

        Args:
            expected: Returns the members that the next quorum has if nothing changes.
        """
        while True:
            coming, base = self._ahead.came.coming, self._ahead.base()
            encoded = self._ahead.encoded_by(expected())
            total = sum(each.num_targets for each in encoded)
            shares = [each.num_targets / total for each in encoded]
            counted = [
                MemberShare(each.peer, each.payload, share, 1.0) for each, share in zip(encoded, shares, strict=True)
            ]
            if (base.record_hash, counted) != self._of:
                self._of, self._foreseen, self._is_known = (base.record_hash, counted), None, anyio.Event()
            if counted and not self._is_known.is_set():
                self._foreseen = await self._computed(base.round + 1, counted, [each.payload_P for each in encoded])
                self._is_known.set()
            await coming.wait()

    async def of(self, quorum: Sequence[MemberShare]) -> Foreseen | None:
        """Return what these come to if that is known, or is being computed; None: it is not."""
        wanted = self._ahead.base().record_hash, quorum
        if not quorum or wanted != self._of:
            return None
        await self._is_known.wait()
        return self._foreseen if wanted == self._of else None

    async def _computed(self, round: int, counted: Sequence[MemberShare], parts: Sequence[Tensor]) -> Foreseen | None:
        brought = [
            Gathered(each.member, payload_P, each.share, each.scale)
            for each, payload_P in zip(counted, parts, strict=True)
        ]
        try:
            return await anyio.to_thread.run_sync(self._outer_step, round, brought, abandon_on_cancel=True)
        except (MemberFault, MemoryError):
            return None  # the quorum finds a fault too, and says it; it may have the memory
