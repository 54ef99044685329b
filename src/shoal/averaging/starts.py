"""D_0 of a run that begins from weights which not every host has: given to those that lack them, while it stands.

    Want, Read -> Have, Chunk     of a stage whose weights are here, or are read when somebody asks for them
    fetch -> StartFetch -> ...    of a stage whose weights are not here; compared with what the run says of each unit

Once a record stands nobody needs D_0 any more: newcomers get the record's state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import anyio
import anyio.to_thread
import torch
from torch import Tensor

from shoal.averaging.content_fetch import ContentFetch
from shoal.averaging.contents import Contents, Offered
from shoal.events.base import emit, tell
from shoal.events.state import StartNobody, StateDonorDistrusted, StateFetched, StateFetching, StateLate
from shoal.ids import PeerId
from shoal.optim.flat import FlatLayout
from shoal.runtime.waking import Mailbox
from shoal.swarm.content_transfer import Distrust, Late, Nobody, TransferSettings
from shoal.swarm.view import SwarmView
from shoal.transport.base import Received
from shoal.wire.messages import Hop
from shoal.wire.messages.transfer import ContentKind, ContentName, Want

logger = logging.getLogger(__name__)

_NOBODY_S = 10.0
"""So long peers may take to read what they are asked for, before the user is told that nobody has it."""

ReadStart = Callable[[int], Awaitable[Sequence[Tensor] | None]]
"""Reads the weights of a stage from this host's files, as flat vectors; None: they are not here."""


def run_has_begun(view: SwarmView) -> bool:
    """Whether somebody announces a record: then a server that starts has nothing that anyone may use."""
    return any(replica.base_round > 0 for replica in view.replicas)


def record_stands(view: SwarmView) -> bool:
    """Whether a replica or a mirror has a record, or the run goes on from a checkpoint: then nobody needs D_0."""
    is_held = any(mirror.held_round > 0 for mirror in view.mirrors)
    return is_held or run_has_begun(view) or any(client.resumed for client in view.clients)


@dataclass(eq=False, repr=False)
class Starts:
    """What one peer has of the weights that a run begins from. A `transport.dispatch.Handler`.

    Attributes:
        contents: For this alone: nobody else gives its events there.
        genesis: The hash that stands for D_0.
        num_stages: Of the model: peers may ask for others.
        view: Returns the swarm as it is now.
        read: Asked once for each stage that somebody wants; None: what is offered is all.
        notice: Tells the user what he may want to act on.
    """

    contents: Contents
    genesis: str
    num_stages: int
    _: KW_ONLY
    view: Callable[[], SwarmView]
    read: ReadStart | None = None
    notice: Callable[[str], None] = lambda _: None
    settings: TransferSettings = field(default_factory=TransferSettings)

    def __post_init__(self) -> None:
        self._wanted = Mailbox[int]()
        self._asked: set[int] = set()

    def offer(self, stage: int, vectors: Sequence[Tensor]) -> None:
        """Give the weights of a stage from now on.

        Args:
            vectors: Parameters, floating and integer buffers, flat; must not change any more.
        """
        self.contents.offer(self._name(stage), Offered(vectors, self.contents.chunk_bytes, memory=self.contents.memory))

    def withdraw(self) -> None:
        """A record stands: give nothing any more."""
        self.read = None
        for name in list(self.contents.offered):
            self.contents.drop(name)

    async def fetch(
        self, stage: int, layout: Sequence[FlatLayout], are_right: Callable[[Sequence[Tensor]], bool]
    ) -> Sequence[Tensor] | None:
        """Get the weights of a stage from a peer that has them; None: the run has begun meanwhile.

        Args:
            layout: Of parameters, floating and integer buffers.
            are_right: Whether vectors are what the run begins from; called in a thread.
        """
        vectors = [torch.empty(each.numel, dtype=each.dtype) for each in layout]
        fetch = StartFetch(self.contents, self._name(stage), vectors, self.settings, self.view, are_right)
        fetch.notice = self.notice
        clock = self.contents.clock
        begun_s = clock.now_s()
        emit(logger, StateFetching(stage, 0, False, fetch.num_chunks))
        if not await self.contents.fetch(fetch):
            return None
        emit(logger, StateFetched(stage, 0, False, round(clock.now_s() - begun_s, 3), dict(fetch.machine.sources)))
        return vectors

    def receive(self, event: Received) -> bool:
        """Take what is about D_0; see `transport.dispatch.Handler`."""
        name = getattr(event.message, "name", None)
        if not isinstance(name, ContentName) or name.kind is not ContentKind.START:
            return False
        is_wanted = isinstance(event.message, Want) and name == self._name(name.stage)
        if is_wanted and name.stage < self.num_stages and self.read is not None and name.stage not in self._asked:
            self._asked.add(name.stage)
            self._wanted.put(name.stage)
        return self.contents.receive(event)

    def peer_lost(self, peer: PeerId) -> None:
        self.contents.peer_lost(peer)

    async def run(self) -> None:
        """Serve until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.contents.run)
            async for stage in self._wanted:
                await self._look(stage)

    async def _look(self, stage: int) -> None:
        """Read what somebody wants; it is offered unless a record has come meanwhile."""
        vectors = None if self.read is None else await self.read(stage)
        if vectors is not None and self.read is not None:
            self.offer(stage, vectors)

    def _name(self, stage: int) -> ContentName:
        return ContentName(ContentKind.START, stage, self.genesis)


class StartFetch(ContentFetch):
    """The weights of one stage, on their way.

    Args:
        vectors: The transfer writes into them.
        are_right: Whether they are what the run begins from; called in a thread.

    Attributes:
        notice: Tells the user that nobody has them.
    """

    def __init__(
        self,
        contents: Contents,
        name: ContentName,
        vectors: Sequence[Tensor],
        settings: TransferSettings,
        view: Callable[[], SwarmView],
        are_right: Callable[[Sequence[Tensor]], bool],
    ) -> None:
        super().__init__(contents.endpoint, contents.clock, name, vectors, settings, contents.chunk_bytes)
        self.notice: Callable[[str], None] = lambda _: None
        self._nobody_since_s: float | None = None
        self._me = contents.endpoint.peer_id
        self._vectors = vectors
        self._view = view
        self._are_right = are_right

    def peers(self) -> Mapping[PeerId, Hop]:
        """The stage's replicas, and mirrors, which may be on a host that has the files."""
        view = self._view()
        holders = (*view.by_stage(self.name.stage), *view.mirrors)
        return {holder.peer: holder.hop for holder in holders if holder.peer != self._me}

    async def is_right(self) -> bool:
        """Compare them with what the run says of each unit."""
        return await anyio.to_thread.run_sync(self._are_right, self._vectors)

    def is_lost(self, is_offered: bool, base_round: int) -> bool:
        """Once a record stands its state is what counts."""
        now_s = self._clock.now_s()
        if is_offered:
            self._nobody_since_s = None
        elif self._nobody_since_s is not None and now_s - self._nobody_since_s >= _NOBODY_S:
            self._nobody_since_s = math.inf  # once until somebody has them
            tell(logger, StartNobody(self.name.stage), self.notice)
        return record_stands(self._view())

    def report(self, effect: Distrust | Nobody | Late) -> None:
        """Say what goes wrong."""
        stage = self.name.stage
        match effect:
            case Distrust(peer, reason):
                emit(logger, StateDonorDistrusted(peer, stage, f"peer {peer}: weights of stage {stage}: {reason}"))
            case Nobody():
                self._nobody_since_s = self._clock.now_s()
            case Late(num_missing, num_chunks):
                reason = f"{num_missing} of {num_chunks} chunks are missing; everybody is asked again"
                emit(logger, StateLate(stage, 0, reason))
