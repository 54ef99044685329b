"""The trainer's end of the feed: asks the data server for batches and sees them in shared memory, without a copy.

    lease / read_* --> (BatchReady) --> LeasedBatch --> acknowledge or give_back

Shapes: n = samples of the batch.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import anyio
import msgspec
import numpy as np

from shoal.clock import Backoff, Clock
from shoal.config.schema import Config
from shoal.data.fields import Fields
from shoal.data.microbatch import Microbatch, cut, microbatches
from shoal.data.pool import PoolReader
from shoal.data.source import Array
from shoal.errors import ConnectionLost, RemoteError, RemoteProtocolError
from shoal.events.base import emit
from shoal.events.data import DataServerDialledAgain, LeaseDenied
from shoal.ids import PeerId, StepKey
from shoal.runtime.waking import Signal
from shoal.swarm.microbatch_cut import EVAL_SAMPLES
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages import Message
from shoal.wire.messages.base import Hop, SampleRange
from shoal.wire.messages.feed import (
    Acknowledge,
    Attempt,
    BatchReady,
    DataHello,
    GiveBack,
    HeldBatch,
    HoldoutInfo,
    Lease,
    NoBatch,
    NoteAttempt,
    ReadHoldout,
    ReadTrain,
    TensorPlace,
)
from shoal.wire.tensors import ITEM_BYTES, tensor_bytes

logger = logging.getLogger(__name__)

_MAX_UNMAPPED = 4
"""Batches in a row that cannot be mapped, until whoever waits is told why."""


@dataclass(frozen=True, slots=True, eq=False)
class LeasedBatch:
    """One batch in the data server's memory; valid until it is acknowledged or given back.

    Attributes:
        fields: (n, ...) read-only views.
        samples: where the batch lies in the shuffled passes; empty for held-out data.
        num_samples: n.
        ticket: the data server's name for the batch.
    """

    fields: Fields[Array]
    samples: tuple[SampleRange, ...]
    num_samples: int
    ticket: int

    def microbatches(self, config: Config) -> list[Microbatch]:
        """Return the microbatches of a training step, in their order, as views of the batch."""
        return microbatches(
            self.fields,
            batch_samples=config.diloco.batch_size_per_step,
            samples_per_step=config.diloco.samples_per_step,
            num_microbatches=config.model_pipeline.microbatches,
            keeps_size=config.model_pipeline.compile,
        )

    def eval_parts(self) -> list[Microbatch]:
        """Return held-out samples in parts of about `EVAL_SAMPLES`, in order, as views of the batch.

        The parts are the same for a swarm and for the plain loop, so that their losses compare.
        """
        return cut(self.fields, -(-self.num_samples // EVAL_SAMPLES))


@dataclass(slots=True)
class _Pending:
    message: Message | None = None
    arrived: anyio.Event = field(default_factory=anyio.Event)
    answer: BatchReady | NoBatch | HoldoutInfo | ConnectionLost | None = None
    pool: PoolReader | None = None

    def settle(self, answer: BatchReady | NoBatch | HoldoutInfo | ConnectionLost) -> None:
        self.answer = answer
        self.arrived.set()


class Feed:
    """Batches for one trainer. A `transport.dispatch.Handler`."""

    def __init__(
        self, *, endpoint: Endpoint, data_server: Hop, trainer: int, generation: int, clock: Clock | None = None
    ) -> None:
        """Remember where the data server is.

        Args:
            endpoint: the caller dispatches its events to this feed.
            trainer: slot of the trainer; -1 for the baseline, which only reads.
            generation: how often the slot's trainer was started.
            clock: times the pauses before `run` dials a lost data server again; None: waiting for a lost one fails.
        """
        self._endpoint = endpoint
        self._server = data_server.peer
        self._trainer = trainer
        self._generation = generation
        self._requests = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._hello: _Pending | None = None
        self._mapped: tuple[str, PoolReader] | None = None
        self._max_read_samples = 0
        self._clock = clock
        self._backoff = Backoff(first_s=0.1, max_s=1.0)
        self._num_unmapped = 0
        self._lost = Signal()
        self._is_lost = False
        self._round = 0
        self._held: dict[int, HeldBatch] = {}
        endpoint.introduce(data_server)

    def receive(self, event: Received) -> bool:
        """Take a message of the data server; see `transport.dispatch.Handler.receive`.

        Raises:
            RemoteProtocolError: it came from another peer, or names memory that is not there.
        """
        message = event.message
        if not isinstance(message, BatchReady | NoBatch | HoldoutInfo):
            return False
        if event.peer != self._server:
            raise RemoteProtocolError(f"{type(message).__name__} from {event.peer}, which is not the data server")
        pending = self._hello if isinstance(message, HoldoutInfo) else self._pending.get(message.request)
        if isinstance(message, BatchReady):
            self._receive_batch(pending, message)
        elif pending is not None:
            pending.settle(message)
        self._backoff.reset()
        return True

    def _receive_batch(self, pending: _Pending | None, ready: BatchReady) -> None:
        """Map a batch at once: when whoever asked goes on, the data server may be gone, another one have the path."""
        if pending is None:
            # Whoever asked was cancelled meanwhile.
            self._post(GiveBack(ready.ticket))
            return
        try:
            pending.pool = self._map(ready.pool, ready.pool_bytes)
        except RemoteProtocolError as error:
            # Usually its server has just died, and the next one is asked again; not for ever, if this one lives.
            self._num_unmapped += 1
            if self._num_unmapped < _MAX_UNMAPPED:
                raise
            pending.settle(ConnectionLost(str(error)))
            return
        self._num_unmapped = 0
        pending.settle(ready)

    def peer_lost(self, peer: PeerId) -> None:
        """If the data server is gone, fail what waits for it, unless there is a clock: then it will be asked again.

        A batch that is in use stays valid: its memory lives as long as it is mapped.
        """
        if peer != self._server:
            return
        self._mapped = None
        self._lost.notify()
        if self._clock is not None:
            self._is_lost = True
            return
        lost = ConnectionLost("the connection to the data server ended: its log says why")
        for pending in (*self._pending.values(), *([self._hello] if self._hello else [])):
            if pending.answer is None:
                pending.settle(lost)

    async def run(self) -> None:
        """Dial a lost data server again and ask again for what is missing, until cancelled."""
        while self._clock is not None:
            await self._lost.take()
            await self._backoff.wait(self._clock)
            emit(logger, DataServerDialledAgain(len(self._held), len(self._pending)))
            self._is_lost = False
            self._post(self._introduction())
            for pending in self._pending.values():
                if pending.message is not None and pending.answer is None:
                    self._post(pending.message)

    async def hello(self) -> HoldoutInfo:
        """Introduce this trainer; return the sizes of the data set.

        Raises:
            ConnectionLost: the data server is gone.
        """
        pending = self._hello = _Pending()
        try:
            self._post(self._introduction())
            await pending.arrived.wait()
        finally:
            self._hello = None
        if not isinstance(pending.answer, HoldoutInfo):
            raise _lost(pending)
        self._max_read_samples = pending.answer.max_read_samples
        return pending.answer

    async def lease(self, round_number: int, step: int) -> LeasedBatch | None:
        """Get the batch of the step with this number to train on, or None if there is none for this trainer.

        Raises:
            ConnectionLost: the data server is gone.
        """
        request = next(self._requests)
        if round_number != self._round:
            self._round = round_number
            self._held.clear()
        batch = await self._ask(request, Lease(request, self._trainer, self._generation, round_number, step))
        if isinstance(batch, NoBatch):
            emit(logger, LeaseDenied(round_number, step, batch.reason))
            return None
        self._held[batch.ticket] = HeldBatch(batch.ticket, batch.samples)
        return batch

    async def read_train(self, batch: int) -> LeasedBatch:
        """Get batch `batch` of the training stream without a lease: undisturbed, the one trainer of a run gets these.

        Raises:
            ConnectionLost: the data server is gone.
            RemoteError: there is no such batch.
        """
        request = next(self._requests)
        return _read(await self._ask(request, ReadTrain(request, batch)))

    async def read_holdout(self, start: int, stop: int) -> LeasedBatch:
        """Get held-out samples [start, stop), at most `HoldoutInfo.max_read_samples`.

        Raises:
            ConnectionLost: the data server is gone.
            RemoteError: there are no such samples, or they are too many for one read.
        """
        request = next(self._requests)
        return _read(await self._ask(request, ReadHoldout(request, start, stop)))

    async def holdout(self, start: int, stop: int) -> AsyncGenerator[LeasedBatch]:
        """Yield held-out samples [start, stop) in batches that fit; each is given back when the next one is asked for.

        Raises:
            ConnectionLost: the data server is gone.
            RemoteError: there are no such samples.
        """
        if not self._max_read_samples:
            await self.hello()
        for begin in range(start, stop, self._max_read_samples):
            batch = await self.read_holdout(begin, min(begin + self._max_read_samples, stop))
            try:
                yield batch
            finally:
                self.give_back(batch)

    def note(self, key: StepKey, path: tuple[PeerId, ...], batch: LeasedBatch) -> None:
        """Tell the data server, before any replica hears of it, which attempt will train on the batch."""
        if (held := self._held.get(batch.ticket)) is not None:
            self._held[batch.ticket] = msgspec.structs.replace(held, attempts=(*held.attempts, Attempt(key, path)))
        self._post(NoteAttempt(key, path, batch.ticket))

    def acknowledge(self, key: StepKey, batch: LeasedBatch, *, committed: bool) -> None:
        """The step is over: trained, or (`committed` false) its fate is left to the round's record. Ends the batch."""
        if (held := self._held.get(batch.ticket)) is not None:
            # The paths of what is done are of no interest, and a round may have many steps.
            attempts = tuple(Attempt(attempt.key, ()) for attempt in held.attempts) if committed else held.attempts
            self._held[batch.ticket] = msgspec.structs.replace(
                held, attempts=attempts, done=committed, left=not committed
            )
        self._post(Acknowledge(key, batch.ticket, committed))

    def give_back(self, batch: LeasedBatch) -> None:
        """End a batch that was only read, or a lease that was not trained on."""
        if (held := self._held.get(batch.ticket)) is not None:
            if held.attempts:
                self._held[batch.ticket] = msgspec.structs.replace(held, left=True)
            else:
                del self._held[batch.ticket]
        self._post(GiveBack(batch.ticket))

    def _introduction(self) -> DataHello:
        return DataHello(self._trainer, self._generation, self._round, tuple(self._held.values()))

    def _post(self, message: Message) -> None:
        if self._is_lost:
            return  # a new data server hears first who we are; `run` says then what is still of interest
        self._endpoint.post(self._server, message)

    async def _ask(self, request: int, message: Message) -> LeasedBatch | NoBatch:
        pending = self._pending[request] = _Pending(message)
        try:
            self._post(message)
            await pending.arrived.wait()
        except anyio.get_cancelled_exc_class():
            if isinstance(pending.answer, BatchReady):
                self._post(GiveBack(pending.answer.ticket))
            raise
        finally:
            del self._pending[request]
        match pending.answer:
            case NoBatch():
                return pending.answer
            case BatchReady() if pending.pool is not None:
                return _open(pending.answer, pending.pool)
            case _:
                raise _lost(pending)

    def _map(self, path: str, num_bytes: int) -> PoolReader:
        if self._mapped is None or self._mapped[0] != path:
            self._mapped = (path, PoolReader(path, num_bytes))
        return self._mapped[1]


def _read(batch: LeasedBatch | NoBatch) -> LeasedBatch:
    if isinstance(batch, NoBatch):
        raise RemoteError(f"the data server cannot read this: {batch.reason}")
    return batch


def _open(ready: BatchReady, pool: PoolReader) -> LeasedBatch:
    places = Fields(ready.inputs, ready.labels, ready.context)
    fields = places.each(lambda place: _view(pool, place, ready.num_samples))
    return LeasedBatch(fields, ready.samples, ready.num_samples, ready.ticket)


def _lost(pending: _Pending) -> ConnectionLost:
    if isinstance(pending.answer, ConnectionLost):
        return pending.answer
    return ConnectionLost("the data server gave no answer")


def _view(pool: PoolReader, place: TensorPlace, num_samples: int) -> Array:
    """Return a tensor in the pool as a read-only array.

    Raises:
        RemoteProtocolError: it is not inside the pool, which may have been cut, or not `num_samples` of anything.
    """
    known = place.dtype in ITEM_BYTES and place.dtype != "bfloat16" and all(size > 0 for size in place.shape)
    if not known or place.shape[:1] != (num_samples,) or place.offset_bytes < 0:
        raise RemoteProtocolError(f"the data server offers {place.dtype}{list(place.shape)} for {num_samples} samples")
    num_bytes = tensor_bytes(place.dtype, place.shape)
    if place.offset_bytes + num_bytes > pool.num_bytes:
        raise RemoteProtocolError(f"the data server offers memory outside its pool, at {place.offset_bytes}")
    content = pool.read(place.offset_bytes, num_bytes)
    return np.frombuffer(content, dtype=place.dtype, count=math.prod(place.shape)).reshape(place.shape)
