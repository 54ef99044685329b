"""What the members of a stage have encoded for a round, given to each other while they go on training.

    own cut  -> give -> PayloadReady to the others
    others': -> PayloadReady -> fetched (`contents`) beside the steps -> encoded_by, for what is foreseen
                                                                      '-> get, in the quorum

What was not announced in time, or could not be fetched, is fetched in the quorum: being early only saves time, and a
round comes to the same bits without it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import anyio
import anyio.to_thread
import torch
from torch import Tensor

from shoal.averaging.content_fetch import INLINE_BYTES, ContentFetch
from shoal.averaging.contents import Contents
from shoal.averaging.digest_fetch import offered
from shoal.codec.raw import to_wire
from shoal.errors import MemberFault
from shoal.ids import PeerId
from shoal.runtime.waking import Mailbox, Signal
from shoal.swarm.content_transfer import Distrust, Late, Nobody, TransferSettings
from shoal.swarm.snapshots import CHUNK_BYTES, Base
from shoal.swarm.view import SwarmView
from shoal.transport.base import Received
from shoal.wire.messages.base import Hop
from shoal.wire.messages.round import Payload, PayloadReady
from shoal.wire.messages.transfer import ContentKind, ContentName

# Four MiB on the way keep a link of 200 Mbit/s busy over 150 ms. What comes late is waited for: the coordinator knows
# whom the round does without.
_PATIENCE = TransferSettings(window=16, retry_s=2.0, slow_s=math.inf, timeout_s=math.inf)

Fetching = Callable[[], Awaitable[Tensor]]


class EncodedBy(NamedTuple):
    """What a member has encoded of a round, and the targets that it has trained for it."""

    peer: PeerId
    payload: Payload
    num_targets: int
    payload_P: Tensor


class _PayloadFetch(ContentFetch):
    """The payload of one member, on its way or here.

    Args:
        is_there: Whether its giver is still of the swarm: else it is not dialled.
    """

    def __init__(
        self, contents: Contents, stage: int, peer: PeerId, payload: Payload, is_there: Callable[[], bool]
    ) -> None:
        self.payload = payload
        self.content = torch.empty(payload.num_bytes, dtype=torch.uint8)
        self.is_wrong = False
        self.ended = anyio.Event()
        self._giver = peer
        self._is_there = is_there
        name = ContentName(ContentKind.PAYLOAD, stage, payload.digest)
        super().__init__(contents.endpoint, contents.clock, name, (self.content,), _PATIENCE, CHUNK_BYTES)

    def peers(self) -> Mapping[PeerId, None]:
        """Who has made it."""
        return {self._giver: None} if self._is_there() else {}

    async def is_right(self) -> bool:
        """Compare what has come with what was announced."""
        data = to_wire(self.content).data
        is_short = data.nbytes <= INLINE_BYTES
        digest = hashlib.sha256(data) if is_short else await anyio.to_thread.run_sync(hashlib.sha256, data)
        self.is_wrong = digest.hexdigest() != self.payload.digest
        return not self.is_wrong

    def is_lost(self, is_offered: bool, base_round: int) -> bool:
        """Only what is wrong is of no use; who is out of reach may be back."""
        return self.is_wrong

    def report(self, effect: Distrust | Nobody | Late) -> None:
        """One that contradicts itself is the only one who has it; who is late is waited for."""
        self.is_wrong = self.is_wrong or isinstance(effect, Distrust)


@dataclass(eq=False, repr=False)
class PayloadsAhead:
    """The payloads of one replica's rounds, its own and the others'.

    Attributes:
        view: Returns the swarm as it is now.
        limit_bytes: Of a payload in a round, at most.
        base: Returns the state that the replica's round is trained from.
        came: What `encoded_by` says may have changed.
    """

    contents: Contents
    stage: int
    _: KW_ONLY
    view: Callable[[], SwarmView]
    base: Callable[[], Base]
    limit_bytes: Callable[[int], int]

    def __post_init__(self) -> None:
        self._endpoint = self.contents.endpoint
        self.came = Signal()
        self._given: EncodedBy | None = None
        self._ready: dict[PeerId, PayloadReady] = {}
        self._fetches: dict[PeerId, _PayloadFetch] = {}
        self._named: set[PeerId] = set()
        self._new = Mailbox[_PayloadFetch]()

    def give(self, payload_P: Tensor, announced: Payload, num_targets: int = 0) -> None:
        """This replica has encoded its pseudo-gradient of the round; again if that has changed.

        Args:
            num_targets: That it has trained for it; 0: that is not known before it joins.
        """
        if self._given is not None and self._given.payload == announced:
            return
        self._forget_own()
        self._given = EncodedBy(self._endpoint.peer_id, announced, num_targets, payload_P)
        self.contents.offer(self._name(announced), offered(payload_P))
        base = self.base()
        ready = PayloadReady(base.round + 1, base.record_hash, self.stage, announced, num_targets)
        for peer, hop in self._others().items():
            self._endpoint.introduce(hop)
            self._endpoint.post(peer, ready)
        self.came.notify()

    def receive(self, event: Received) -> bool:
        """Take an announcement; one of another round is kept until that has begun. See `transport.dispatch.Handler`."""
        message = event.message
        if not isinstance(message, PayloadReady):
            return False
        if message.stage == self.stage and event.peer in self._others():
            self._ready[event.peer] = message
            self._look(event.peer)
            self.came.notify()
        return True

    def encoded_by(self, members: Sequence[PeerId]) -> list[EncodedBy]:
        """What these members have encoded of the round that is under way, without those who are lost; empty unless all
        of it is here, with its targets, and nobody else has anything."""
        own, others = self._given, self._others()
        expected = [peer for peer in members if peer in others or peer == self._endpoint.peer_id]
        ready = {peer: said for peer, said in self._ready.items() if peer in others and self._is_now(said)}
        if own is None or {self._endpoint.peer_id, *ready} != set(expected):
            return []
        found = [own if peer == own.peer else self._here(peer, ready[peer]) for peer in expected]
        here = [each for each in found if each is not None and each.num_targets]
        return here if len(here) == len(found) else []

    def ask(self, peer: PeerId, joined_with: Payload) -> Fetching:
        """Fetch what a member has joined with, unless it is here or on its way; what it announces from now on is of no
        interest any more.

        Returns:
            What waits for it; it raises MemberFault if the member gives other bytes.
        """
        self._named.add(peer)
        fetch = self._fetched(peer, joined_with)

        async def get() -> Tensor:
            await fetch.ended.wait()
            if fetch.is_wrong:
                raise MemberFault("it gives other bytes than it has joined with", peer)
            return fetch.content

        return get

    def end(self) -> None:
        """The replica has gone to a record: what was encoded before is of no use any more."""
        self._forget_own()
        for fetch in self._fetches.values():
            fetch.cancel()
        self._fetches.clear()
        self._named.clear()
        self._new.clear()
        base = self.base()
        self._ready = {peer: ready for peer, ready in self._ready.items() if ready.round > base.round}
        for peer in list(self._ready):
            self._look(peer)
        self.came.notify()

    async def run(self) -> None:
        """Fetch until cancelled."""
        async with anyio.create_task_group() as tasks:
            async for fetch in self._new:
                tasks.start_soon(self._run, fetch)

    # -- parts

    def _others(self) -> dict[PeerId, Hop]:
        """The other replicas of the stage."""
        me, replicas = self._endpoint.peer_id, self.view().replicas
        return {each.peer: each.hop for each in replicas if each.stage == self.stage and each.peer != me}

    def _look(self, peer: PeerId) -> None:
        """What this peer has announced may be of the round that is under way."""
        ready = self._ready[peer]
        if self._is_now(ready) and peer not in self._named and ready.payload.num_bytes <= self.limit_bytes(ready.round):
            self._fetched(peer, ready.payload)

    def _is_now(self, ready: PayloadReady) -> bool:
        """Whether it is of the round that is under way."""
        base = self.base()
        return (ready.round, ready.record_hash) == (base.round + 1, base.record_hash)

    def _here(self, peer: PeerId, ready: PayloadReady) -> EncodedBy | None:
        """What this peer has announced, if it has come."""
        fetch = self._fetches.get(peer)
        if fetch is None or fetch.payload != ready.payload or fetch.is_wrong or not fetch.ended.is_set():
            return None
        return EncodedBy(peer, ready.payload, ready.num_targets, fetch.content)

    def _name(self, payload: Payload) -> ContentName:
        return ContentName(ContentKind.PAYLOAD, self.stage, payload.digest)

    def _fetched(self, peer: PeerId, payload: Payload) -> _PayloadFetch:
        """Return the fetch of a payload, which is begun unless it was."""
        before = self._fetches.get(peer)
        if before is not None and before.payload == payload:
            return before
        if before is not None:
            before.cancel()
        fetch = _PayloadFetch(self.contents, self.stage, peer, payload, lambda: peer in self._others())
        self._fetches[peer] = fetch
        self._new.put(fetch)
        return fetch

    async def _run(self, fetch: _PayloadFetch) -> None:
        if await self.contents.fetch(fetch) or fetch.is_wrong:
            fetch.ended.set()
            self.came.notify()

    def _forget_own(self) -> None:
        if self._given is not None:
            self.contents.drop(self._name(self._given.payload))
            self._given = None
