"""The owner's end of its snapshots: copied at a step boundary, sealed, and given to the first buddy that takes it.

boundary -> copy on the device -> OfferSnapshot -> the buddy gets the content (`contents`) -> SnapshotKept
                                    '-> NoSnapshot, lost, silent: the next buddy

Nothing but the copy holds up the steps. One snapshot is on its way at a time; what would be due meanwhile is left out.
"""

from __future__ import annotations

import hmac
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import anyio
import anyio.to_thread
import msgspec
from torch import Tensor

from shoal.averaging.contents import Contents, Request
from shoal.averaging.digest_fetch import ANSWER_S, digest_of, offered
from shoal.averaging.round_average import Device
from shoal.events.base import emit
from shoal.events.state import SnapshotNotKept, SnapshotRefused, SnapshotWasKept
from shoal.ids import PeerId
from shoal.runtime.waking import Signal
from shoal.swarm.cut_rule import EVERY_STEP, CutRule
from shoal.swarm.snapshots import Base, buddies, is_due
from shoal.swarm.view import SwarmView
from shoal.wire.messages.snapshot import NoSnapshot, OfferSnapshot, Snapshot, SnapshotKept
from shoal.wire.messages.step import StepEntry, StepsTrained

logger = logging.getLogger(__name__)

Answer = NoSnapshot | SnapshotKept
"""What a buddy says."""


@dataclass(frozen=True)
class SnapshotSettings:
    """How a replica keeps snapshots.

    Attributes:
        every_steps: Commits between two snapshots in a round.
        room_bytes: The most that this peer keeps for others.
        key: Seals this peer's snapshots; the same in all its generations, and secret.
        cuts: Which steps the average of a round has.
    """

    every_steps: int
    room_bytes: int
    key: bytes
    cuts: CutRule = EVERY_STEP

    def seal(self, body: bytes) -> bytes:
        """Return the seal of an encoded snapshot."""
        return hmac.digest(self.key, body, "sha256")


class _Made(NamedTuple):
    """A snapshot that was copied and is not kept yet."""

    base: Base
    log: tuple[StepEntry, ...]
    earlier: tuple[StepsTrained, ...]
    content: Tensor


@dataclass(eq=False, repr=False)
class SnapshotOwner:
    """The snapshots of one replica.

    Attributes:
        generation: Which replica of this peer this is, counted from its first; None: not known, and no snapshot is
            made.
        view: Returns the swarm as it is now, to find buddies.
        capture: Copies the replica's state, on the device thread.
        base: Returns the state that the replica's round began from.
    """

    contents: Contents
    stage: int
    _: KW_ONLY
    generation: int | None
    settings: SnapshotSettings
    view: Callable[[], SwarmView]
    device: Device
    capture: Callable[[], Tensor]
    base: Callable[[], Base]

    def __post_init__(self) -> None:
        self._endpoint = self.contents.endpoint
        self._made: _Made | None = None
        self._talk: tuple[PeerId, str] | None = None
        self._answers: deque[Answer | None] = deque()
        self._changed = Signal()

    async def boundary(self, round: int, log: tuple[StepEntry, ...], earlier: tuple[StepsTrained, ...] = ()) -> None:
        """The replica has committed the last step of `log` in `round`: copy its state, if that is due. `earlier` as in
        `Snapshot`."""
        base = self.base()
        if self.generation is None or self._made is not None or round != base.round + 1:
            return
        if not is_due(len(log), self.settings.every_steps, self.settings.cuts.commits(round)):
            return
        content = await self.device.run(self.capture)
        # Else a record was swapped in meanwhile, or there is nothing that a step changes.
        if self.base() == base and content.numel():
            self._made = _Made(base, log, earlier, content)
            self._changed.notify()

    def answered(self, peer: PeerId, message: Answer) -> bool:
        """Take a buddy's answer; returns whether it is about what was offered to this one."""
        if self._talk != (peer, message.digest):
            return False
        self._answers.append(message)
        self._changed.notify()
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """The connection to a peer has ended."""
        if self._talk is not None and self._talk[0] == peer:
            self._answers.append(None)
            self._changed.notify()

    def recorded(self) -> None:
        """The replica holds a newer record: nobody needs a snapshot of the round before any more."""
        self._changed.notify()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            while self._made is None:
                await self._changed.wait()
            await self._send(self._made, self.generation or 0)
            self._made = None

    async def _send(self, made: _Made, generation: int) -> None:
        base, log, earlier, content = made
        me = self._endpoint.hop
        to_give = offered(content, self._asked)
        digest = digest_of(await anyio.to_thread.run_sync(to_give.hashes))
        state = (base.round, base.record_hash, base.hashes)
        snapshot = Snapshot(me.peer, self.stage, generation, *state, log, content.numel(), digest, earlier)
        body = msgspec.msgpack.encode(snapshot)
        offer = OfferSnapshot(body, self.settings.seal(body))
        self.contents.offer(snapshot.name, to_give)
        try:
            await self._give(offer, snapshot, base)
        finally:
            self._talk = None
            self.contents.drop(snapshot.name)

    async def _give(self, offer: OfferSnapshot, snapshot: Snapshot, base: Base) -> None:
        """Offer a snapshot to the buddies in turn, until one keeps it or its round is over."""
        num_steps = len(snapshot.log)
        what = (base.round + 1, self.stage, num_steps, snapshot.num_bytes)
        for buddy in buddies(self.view(), self._endpoint.hop, self.stage):
            self._endpoint.introduce(buddy.hop)
            self._talk = (buddy.peer, snapshot.digest)
            self._answers.clear()
            self._endpoint.post(buddy.peer, offer)
            answer = await self._answer(base)
            if isinstance(answer, SnapshotKept):
                self._endpoint.metrics.counter("snapshot.kept").add()
                emit(logger, SnapshotWasKept(*what, buddy.peer))
                return
            is_over = self.base() != base
            reason = "its round is over" if is_over else "it is lost or does not answer"
            if isinstance(answer, NoSnapshot):
                reason = answer.reason
            emit(logger, SnapshotRefused(*what, buddy.peer, reason))
            if is_over:
                return
        emit(logger, SnapshotNotKept(*what, "a crash now costs more steps"))

    async def _answer(self, base: Base) -> Answer | None:
        """The buddy's answer; None if it is lost, or has neither asked nor said anything, or the round is over."""
        while not self._answers and self.base() == base:
            with anyio.move_on_after(ANSWER_S) as timer:
                await self._changed.wait()
            if timer.cancelled_caught:
                return None
        return self._answers.popleft() if self._answers else None

    def _asked(self, peer: PeerId, request: Request, num_chunks: int) -> None:
        """The buddy gets the content."""
        if self._talk is not None and self._talk[0] == peer:
            self._changed.notify()
