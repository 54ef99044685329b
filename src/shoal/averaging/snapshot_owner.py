"""The owner's end of its snapshots: copied at a step boundary, sealed, and sent to the first buddy that takes it.

boundary -> copy on the device -> OfferSnapshot -> TakeSnapshot -> chunks -> SnapshotKept
                                    '-> NoSnapshot, lost, silent: the next buddy

Nothing but the copy holds up the steps. One snapshot is on its way at a time; what would be due meanwhile is left out.
"""

from __future__ import annotations

import hmac
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import anyio
import anyio.to_thread
import msgspec
from torch import Tensor

from shoal.averaging.round_average import Device
from shoal.averaging.snapshot_transfer import send_content
from shoal.ids import PeerId
from shoal.optim.flat import tensor_sha256
from shoal.swarm.snapshots import Base, buddies, is_due
from shoal.swarm.view import SwarmView
from shoal.transport.base import Endpoint
from shoal.wire.messages.snapshot import NoSnapshot, OfferSnapshot, Snapshot, SnapshotKept, TakeSnapshot
from shoal.wire.messages.step import StepEntry

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0
"""How long a buddy's answer is waited for."""

Answer = TakeSnapshot | NoSnapshot | SnapshotKept
"""What a buddy says."""


@dataclass(frozen=True)
class SnapshotSettings:
    """How a replica keeps snapshots.

    Attributes:
        every_steps: Commits between two snapshots in a round.
        room_bytes: The most that this peer keeps for others.
        key: Seals this peer's snapshots; the same in all its generations, and secret.
    """

    every_steps: int
    room_bytes: int
    key: bytes

    def seal(self, body: bytes) -> bytes:
        """Return the seal of an encoded snapshot."""
        return hmac.digest(self.key, body, "sha256")


class _Made(NamedTuple):
    """A snapshot that was copied and is not kept yet."""

    base: Base
    log: tuple[StepEntry, ...]
    content: Tensor


class SnapshotOwner:
    """The snapshots of one replica.

    Args:
        generation: Which replica of this peer this is, counted from its first; None: not known, and no snapshot is
            made.
        view: Returns the swarm as it is now, to find buddies.
        capture: Copies the replica's state, on the device thread.
        base: Returns the state that the replica's round began from.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        stage: int,
        *,
        generation: int | None,
        settings: SnapshotSettings,
        view: Callable[[], SwarmView],
        device: Device,
        capture: Callable[[], Tensor],
        base: Callable[[], Base],
    ) -> None:
        self._endpoint = endpoint
        self._stage = stage
        self._generation = generation
        self._settings = settings
        self._view = view
        self._device = device
        self._capture = capture
        self._base = base
        self._made: _Made | None = None
        self._talk: tuple[PeerId, str] | None = None
        self._answers: deque[Answer | None] = deque()
        self._changed = anyio.Event()

    async def boundary(self, round: int, log: tuple[StepEntry, ...]) -> None:
        """The replica has committed the last step of `log` in `round`: copy its state, if that is due."""
        base = self._base()
        if self._generation is None or self._made is not None or round != base.round + 1:
            return
        if not is_due(len(log), self._settings.every_steps):
            return
        content = await self._device.run(self._capture)
        # Else a record was swapped in meanwhile, or there is nothing that a step changes.
        if self._base() == base and content.numel():
            self._made = _Made(base, log, content)
            self._notify()

    def answered(self, peer: PeerId, message: Answer) -> bool:
        """Take a buddy's answer; returns whether it is about what was offered to this one."""
        if self._talk != (peer, message.digest):
            return False
        self._answers.append(message)
        self._notify()
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """The connection to a peer has ended."""
        if self._talk is not None and self._talk[0] == peer:
            self._answers.append(None)
            self._notify()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            while self._made is None:
                await self._changed.wait()
            await self._send(self._made, self._generation or 0)
            self._made = None

    async def _send(self, made: _Made, generation: int) -> None:
        base, log, content = made
        me = self._endpoint.hop
        digest = await anyio.to_thread.run_sync(tensor_sha256, content)
        state = (base.round, base.record_hash, base.hashes)
        body = msgspec.msgpack.encode(Snapshot(me.peer, self._stage, generation, *state, log, content.numel(), digest))
        offer = OfferSnapshot(body, self._settings.seal(body))
        fields = {"round": base.round + 1, "stage": self._stage, "steps": len(log), "bytes": content.numel()}
        for buddy in buddies(self._view(), me, self._stage):
            self._endpoint.introduce(buddy.hop)
            self._talk = (buddy.peer, digest)
            self._answers.clear()
            refusal = await self._offer(buddy.peer, digest, offer, made)
            self._talk = None
            if not refusal:
                self._endpoint.metrics.counter("snapshot.kept").add()
                logger.info("snapshot.kept", extra={**fields, "buddy": buddy.peer})
                return
            logger.info("snapshot.refused", extra={**fields, "buddy": buddy.peer, "reason": refusal})
            if self._base() != base:
                return
        logger.warning("snapshot.not_kept", extra={**fields, "effect": "a crash now costs more steps"})

    async def _offer(self, buddy: PeerId, digest: str, offer: OfferSnapshot, made: _Made) -> str:
        """Give a buddy a snapshot; returns why that has failed, or nothing."""
        self._endpoint.post(buddy, offer)
        answer = await self._answer()
        if isinstance(answer, TakeSnapshot):
            # Once the record is there nobody needs it any more.
            is_wanted = lambda: not self._answers and self._base() == made.base  # noqa: E731
            await send_content(self._endpoint, buddy, digest, made.content, is_wanted)
            if self._base() != made.base:
                return "its round is over"
            answer = await self._answer()
        if isinstance(answer, NoSnapshot):
            return answer.reason
        return "" if isinstance(answer, SnapshotKept) else "it is lost or does not answer"

    async def _answer(self) -> Answer | None:
        """The buddy's next answer; None if it is lost or silent."""
        with anyio.move_on_after(_ANSWER_S):
            while not self._answers:
                await self._changed.wait()
        return self._answers.popleft() if self._answers else None

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
