"""What this replica's inner optimizer knew at a record, and what it takes over from a checkpoint.

a record is swapped to -> copy -> AskInner -> InnerHeld -> mirrors get it (`contents`)
TakeInner -> content from the client -> before the first step: taken -> InnerTaken

One copy is held, and mirrors may need it of two records: of the last that has `keep`, of which they write a checkpoint
now, and of the newest one, of which they write one if the run is stopped. So the copy of a record with `keep` is held
until it is read, and is replaced at each record from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
from torch import Tensor

from shoal.averaging.contents import Contents, Offered, Request
from shoal.averaging.digest_fetch import DigestFetch, digest_of, offered
from shoal.averaging.round_average import Device
from shoal.checkpoint.tensor_file import MAX_HEADER_BYTES, TensorFile, encode_tensors
from shoal.errors import StateMismatch
from shoal.events.base import emit
from shoal.events.state import InnerKept, InnerRefused, InnerTakenOver
from shoal.ids import PeerId
from shoal.runtime.waking import Mailbox
from shoal.swarm.snapshots import Base
from shoal.transport.base import Received
from shoal.wire.messages.inner import AskInner, InnerHeld, InnerState, InnerTaken, TakeInner
from shoal.wire.messages.transfer import Read

logger = logging.getLogger(__name__)

_OWNER: Final = "replica"
"""What the metadata of a content call it whose it was: `<peer>.<generation>`."""

_UNASKED_ROUNDS = 2
"""So many records later a mirror that has not asked for a copy writes no checkpoint with it any more: it has the states
of newer ones."""

Inherit = Callable[[Mapping[str, Tensor], PeerId, int], Awaitable[bool]]
"""Has the replica go on with what another one's optimizer knew; see `pipeline.StageWorker.inherit`."""


_PARAMETER_BYTES: Final = 32
"""Of each parameter no optimizer knows more: AdamW in float64 has 16, and what a codec has left out is one of 4."""
_MAX_OWNER_CHARS: Final = 128
_MAX_REFUSED_CHARS: Final = 400
_MAX_DIGITS: Final = 18
"""Of a generation; Python would not read one of thousands."""


def most_inner_bytes(num_parameters: int) -> int:
    """The most bytes that the content of a stage with so many parameters can have."""
    return num_parameters * _PARAMETER_BYTES + MAX_HEADER_BYTES


def owned_by(peer: PeerId, generation: int) -> dict[str, str]:
    """The metadata of a content that says which replica's it was."""
    return {_OWNER: f"{peer}.{generation}"}


def _owner_of(metadata: Mapping[str, str]) -> tuple[PeerId, int] | None:
    """Whose a content was, and which of that peer's replicas; None: its metadata do not say it."""
    owner, _, generation = metadata.get(_OWNER, "").rpartition(".")
    is_number = generation.isascii() and generation.isdecimal() and len(generation) <= _MAX_DIGITS
    return (PeerId(owner), int(generation)) if 0 < len(owner) <= _MAX_OWNER_CHARS and is_number else None


@dataclass(frozen=True)
class _Kept:
    round: int
    record_hash: str
    content: Tensor
    offered: Offered
    is_wanted: bool


@dataclass(eq=False, repr=False)
class InnerExchange:
    """The inner states of one replica. A `transport.dispatch.Handler`.

    Attributes:
        generation: Which replica of this peer this is, counted from its first; None: not known, and nothing is kept,
            since whoever went on from it could not be replayed.
        num_parameters: Of the stage: what is taken over has a size.
        capture: Returns what the inner optimizer knows (not copies), on the device thread.
        base: Returns the state that the replica's round began from.
        has_mirrors: Returns whether somebody is there who writes checkpoints.
        is_client: Whether a peer is the client that the replica follows, which alone gives a state to go on with.
    """

    contents: Contents
    stage: int
    _: KW_ONLY
    generation: int | None
    device: Device
    num_parameters: int
    capture: Callable[[], Mapping[str, Tensor]]
    inherit: Inherit
    base: Callable[[], Base]
    has_mirrors: Callable[[], bool]
    is_client: Callable[[PeerId], bool] = lambda _: True

    def __post_init__(self) -> None:
        self._endpoint = self.contents.endpoint
        self._most_bytes = most_inner_bytes(self.num_parameters)
        self._kept: _Kept | None = None
        self._is_asked = False  # somebody wants what is held
        self._unread: dict[PeerId, set[int]] = {}  # who has not all of it yet, and the chunks that each has
        self._taken = ""
        self._jobs = Mailbox[Callable[[], Coroutine[None, None, None]]]()

    async def keep(self, round: int, record_hash: str, *, is_wanted: bool) -> None:
        """The replica has swapped to a record, and no step of the next round has begun.

        Args:
            is_wanted: A checkpoint of it is wanted, whatever comes.
        """
        if self.generation is None or not (is_wanted or self._is_free(round)):
            return
        self._forget()  # before the next copy is made: two of them would take twice the memory
        owner = owned_by(self._endpoint.peer_id, self.generation)
        content = await self.device.run(lambda: encode_tensors(self.capture(), owner, self.contents.memory))
        self._kept = _Kept(round, record_hash, content, offered(content, self._read), is_wanted)
        emit(logger, InnerKept(round, self.stage, content.nbytes))

    # -- events

    def receive(self, event: Received) -> bool:
        """Take a message about inner states; see `transport.dispatch.Handler`."""
        match event.message:
            case AskInner() as asked:
                self._jobs.put(partial(self._answer, event.peer, asked))
            case TakeInner(inner) if self.is_client(event.peer):
                self._jobs.put(partial(self._take, event.peer, inner))
            case _:
                return False
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """Whoever gets a content sees to that itself; who was to read what is held does not any more."""
        self._unread.pop(peer, None)

    async def run(self) -> None:
        """Work until cancelled."""
        async with anyio.create_task_group() as tasks:
            async for job in self._jobs:
                tasks.start_soon(job)

    # -- parts

    def _is_free(self, round: int) -> bool:
        """Whether what is held may give way to a copy of a newer record that nobody has asked for yet."""
        if not self.has_mirrors():
            return False
        kept = self._kept
        if kept is None:
            return True
        is_coming = kept.is_wanted and not self._is_asked and round - kept.round <= _UNASKED_ROUNDS
        return not self._unread and not is_coming

    def _read(self, peer: PeerId, request: Request, num_chunks: int) -> None:
        """A chunk of what is held goes to somebody."""
        chunks = self._unread.get(peer)
        if chunks is None or not isinstance(request, Read):
            return
        chunks.add(request.chunk)
        if len(chunks) >= num_chunks:
            del self._unread[peer]

    def _forget(self) -> None:
        self._is_asked = False
        self._unread.clear()
        kept, self._kept = self._kept, None
        if kept is not None and kept.offered.is_hashed:
            self.contents.drop(self._named(kept).name)

    def _named(self, kept: _Kept) -> InnerState:
        digest = digest_of(kept.offered.hashes())
        return InnerState(self.stage, kept.record_hash, digest, kept.content.nbytes)

    async def _answer(self, peer: PeerId, asked: AskInner) -> None:
        kept, inner = self._kept, None
        self._unread.pop(peer, None)
        if kept is not None and (asked.stage, asked.record_hash) == (self.stage, kept.record_hash):
            self._is_asked, self._unread[peer] = True, set()
            await anyio.to_thread.run_sync(kept.offered.hashes)
            if self._kept is kept:
                inner = self._named(kept)
                self.contents.offer(inner.name, kept.offered)
        self._endpoint.post(peer, InnerHeld(asked.stage, asked.record_hash, inner))

    async def _take(self, peer: PeerId, inner: InnerState) -> None:
        if inner.digest == self._taken:
            self._endpoint.post(peer, InnerTaken(inner.digest))
            return
        # What is wrong with a content may be as long as that is.
        refused = (await self._fetched(peer, inner))[:_MAX_REFUSED_CHARS]
        if refused:
            emit(logger, InnerRefused(self.stage, peer, refused))
        self._endpoint.post(peer, InnerTaken(inner.digest, refused))

    async def _fetched(self, peer: PeerId, inner: InnerState) -> str:
        """Get a content and go on with it; returns why not."""
        if inner.num_bytes > self._most_bytes:
            return f"it has {inner.num_bytes} bytes, and of this stage there are {self._most_bytes} at most"
        fetch = DigestFetch(self.contents, inner.name, inner.num_bytes, lambda: (peer,))
        if not await self.contents.fetch(fetch):
            return "it did not come whole"
        return await self._inherited(inner, fetch.content)

    async def _inherited(self, inner: InnerState, content: Tensor) -> str:
        """Go on with a content; returns why not."""
        base = self.base()
        if (inner.stage, inner.record_hash) != (self.stage, base.record_hash):
            return f"it is of stage {inner.stage} and another record"
        try:
            file = TensorFile(Path(inner.digest), content.numpy().tobytes())
            found = _owner_of(file.metadata)
            if found is None:
                return "it does not say whose it is"
            owner, generation = found
            tensors = {name: file.read(name) for name in file.shapes}
            is_taken = await self.inherit(tensors, owner, generation)
        except StateMismatch as error:
            return str(error)
        if not is_taken:
            return "steps have begun"
        self._taken = inner.digest
        emit(logger, InnerTakenOver(base.round, self.stage, owner, len(tensors)))
        return ""
