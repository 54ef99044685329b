"""The data server's end of the feed: leases by `swarm.lease`, batches by `Preparer`, answers as soon as both are there.

    Lease / ReadTrain / ReadHoldout --> waiting --(batch is ready)--> BatchReady, the place is held by the peer
    held by the peer --(Acknowledge, GiveBack, ReleaseTrainer, RecordSamples)--> the place is free

A place that is held under a lease outlives the connection of its trainer: until the trainer is fenced or the round is
recorded it may be training on these bytes. A place that was only read is free when its reader is gone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.lowlevel import checkpoint

from shoal.clock import Clock, SystemClock
from shoal.data.layout import BatchLayout
from shoal.data.pool import Pool
from shoal.data.preparation import Content, Job, Preparation
from shoal.data.preparer import Preparer
from shoal.data.preparing_threads import PreparingThreads
from shoal.data.shuffle import PassOrder
from shoal.data.source import DataSet, Windows
from shoal.data.worker_messages import Opening
from shoal.data.workers import DataWorkers
from shoal.errors import InvariantViolation, RemoteProtocolError
from shoal.events.base import emit
from shoal.events.data import SamplesRecorded, TrainerReleased, TrainerResumed
from shoal.ids import PeerId
from shoal.runtime.waking import Signal
from shoal.swarm.lease import Denial, Grant, Later, LeaseTable
from shoal.swarm.sample_ranges import BatchStream
from shoal.swarm.takeover import Settled
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.feed import (
    Acknowledge,
    BatchesAwaited,
    BatchReady,
    DataHello,
    GiveBack,
    HoldoutInfo,
    Lease,
    NoBatch,
    NoteAttempt,
    PauseLeases,
    PlanRound,
    ReadHoldout,
    ReadTrain,
    RecordSamples,
    Released,
    ReleaseTrainer,
    ResumeRound,
    WindowsRead,
)

logger = logging.getLogger(__name__)

DEFAULT_NUM_PLACES = 128
"""Places of the pool; one that is never used costs address space only."""

PLACES_PER_SHARE = 4
"""One batch takes at most the pool's places divided by this, however much faster than the others its trainer is."""

MIN_READ_SAMPLES = 64
"""A place holds at least this many samples, so that held-out reads are not cut finer than training is."""

MAX_WAITING = 4096
"""Requests that may wait at the same time; more are refused."""

LATE_S = 1.0
"""So long may nobody have a batch while somebody waits for one, until the client is told: it ends no round for want of
samples."""

_TICKET_BITS = 60
_MAX_STREAM_BATCH = 1 << 40


@dataclass(frozen=True, slots=True)
class _Waiter:
    peer: PeerId
    request: int
    content: Content
    lease: int | None


@dataclass(frozen=True, slots=True)
class _Holding:
    peer: PeerId
    lease: int | None
    place: int | None
    """None: in the memory of an earlier data server."""


class DataService:
    """Serves the batches of one data set to the trainers of a host. A `transport.dispatch.Handler`.

    Attributes:
        table: says which trainer has which samples.
        preparer: decides which batches lie ready in the pool.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        dataset: DataSet,
        samples_per_step: int,
        seed: int,
        deterministic: bool,
        num_workers: int,
        opening: Opening | None,
        client: PeerId | None,
        num_places: int = DEFAULT_NUM_PLACES,
        pool_directory: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Create the pool; nothing is read before `run`.

        Args:
            samples_per_step: of a full step batch, as the mean over the trainers.
            seed: of the order of the passes.
            deterministic: slot and step alone decide a batch, not the speed of trainers.
            num_workers: processes that prepare batches; 0: two threads of this process do.
            opening: how these open the data set; None without processes.
            client: the only peer that may plan, record and release; None: no peer may.
            num_places: the most batches in the pool.
            pool_directory: for systems without memfd; see `Pool`.
            clock: measures how long trainers take for their batches.

        Raises:
            ConfigError: the data set or the batch is empty.
        """
        self._endpoint = endpoint
        self._dataset, self._windows = dataset, dataset.windows
        self._client, self._clock = client, clock or SystemClock()
        self._layout = BatchLayout.of(dataset, max(samples_per_step, MIN_READ_SAMPLES))
        self.table = LeaseTable(
            BatchStream(dataset.train.num_samples, samples_per_step),
            deterministic=deterministic,
            max_samples=max(1, num_places // PLACES_PER_SHARE) * self._layout.max_samples,
        )
        self.pool = Pool(place_bytes=self._layout.place_bytes, num_places=num_places, directory=pool_directory)
        self._changed = Signal()
        order = PassOrder.of(dataset, seed)
        self.preparation: Preparation
        if num_workers == 0:
            self.preparation = PreparingThreads(
                dataset=dataset, layout=self._layout, pool=self.pool, order=order, on_filled=self._on_filled
            )
        elif opening is None:
            raise InvariantViolation(f"{num_workers} data workers were asked for and not told what to open")
        else:
            self.preparation = DataWorkers(
                num_workers=num_workers,
                opening=opening,
                dataset=dataset,
                layout=self._layout,
                pool=self.pool,
                order=order,
                on_filled=self._on_filled,
            )
        self.preparer = Preparer(self.pool, self._layout, self.preparation)
        self._waiters: list[_Waiter] = []
        self._early: list[tuple[PeerId, Lease]] = []
        # By ticket, not by place: a late message about a place that has changed hands must not hit its new user.
        self._holdings: dict[int, _Holding] = {}
        # Tickets of an earlier data server may still be out.
        self._tickets = itertools.count(secrets.randbits(_TICKET_BITS))
        # Slots of a resumed round whose trainers have not said yet what they have leased, with their generations.
        self._awaited: dict[int, int] = {}
        self._hellos: dict[int, tuple[PeerId, DataHello]] = {}
        self._num_ahead = 2
        # Since when somebody waits and nothing was handed over, also over the end of a round.
        self._awaited_since_s: float | None = None
        self._is_late = False
        self._needed_from = 0
        # Of the stream, as the client knows them.
        self._told_marks = b""

    @property
    def max_read_samples(self) -> int:
        """Most samples that one ReadHoldout may ask for."""
        return self._layout.max_samples

    def receive(self, event: Received) -> bool:
        """Take a message of the feed protocol; see `transport.dispatch.Handler.receive`.

        Raises:
            RemoteProtocolError: the message makes no sense or is not the sender's to send.
        """
        peer, message = event.peer, event.message
        match message:
            case PlanRound() | ResumeRound() | PauseLeases() | RecordSamples() | ReleaseTrainer():
                self._obey(peer, message)
            case DataHello():
                self._hellos[message.trainer] = (peer, message)
                self._resume()
                train, holdout = self._dataset.train.num_samples, self._dataset.holdout.num_samples
                self._endpoint.post(peer, HoldoutInfo(train, holdout, self.max_read_samples))
                if self._is_late and peer == self._client:
                    self._endpoint.post(peer, BatchesAwaited(True))
            case Lease():
                self._lease(peer, message)
            case ReadTrain():
                self._read_train(peer, message)
            case ReadHoldout():
                self._read_holdout(peer, message)
            case NoteAttempt():
                holding = self._holding(peer, message.ticket)
                if holding is not None and holding.lease is not None:
                    self.table.note(holding.lease, message.key, message.path)
            case Acknowledge():
                self._end(peer, message.ticket, committed=message.committed)
            case GiveBack():
                self._end(peer, message.ticket, committed=None)
            case _:
                return False
        self._changed.notify()
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """Forget what the peer waits for and free what it only read; its leases stay."""
        for waiter in self._waiters:
            if waiter.peer == peer and waiter.lease is not None:
                self.table.give_back(waiter.lease)  # its trainer has never had it
        self._waiters = [waiter for waiter in self._waiters if waiter.peer != peer]
        self._early = [(asker, message) for asker, message in self._early if asker != peer]
        for ticket, holding in list(self._holdings.items()):
            if holding.peer == peer and holding.lease is None:
                self._free(ticket)
        self._changed.notify()

    async def run(self) -> None:
        """Prepare and answer until cancelled; sleeps while there is nothing to do.

        Raises:
            SampleError: a sample cannot be prepared.
            ConfigError: the processes that prepare batches cannot open the data set, or a stream gives other samples
                than it gave.
            StorageError, RemoteError: a stream cannot be kept, or who reads it dies of it.
        """
        if self._windows is not None:
            self._windows.watch(self._tell_of_windows(asyncio.get_running_loop()))
        async with anyio.create_task_group() as group:
            group.start_soon(self.preparation.run)
            while True:
                self._answer_ready()
                # The answers leave now, and not when the next batches have been read.
                await checkpoint()
                self._prepare()
                if not self._answer_ready():
                    with anyio.move_on_after(self._tell_if_late()):
                        await self._changed.wait()

    def _prepare(self) -> None:
        """Begin what somebody waits for, then what will be asked for; small batches are there at once."""
        urgent = [waiter.content for waiter in self._waiters]
        ahead = [Content(batch.samples) for batch in self.table.upcoming(self._num_ahead)]
        if self._windows is not None:
            urgent, ahead = self._arrived(self._windows, urgent, ahead)
            self._tell_marks(self._windows)
        self.preparer.start(urgent, ahead)

    def _tell_marks(self, windows: Windows) -> None:
        """Tell the client of windows that are new, before a batch of theirs is prepared."""
        marks = windows.marks
        if self._client is not None and marks != self._told_marks:
            self._told_marks = marks
            self._endpoint.post(self._client, WindowsRead(marks))

    def _tell_if_late(self) -> float:
        """Tell the client whether nobody can train for want of samples; return after how many seconds to look again."""
        waits, now_s = bool(self._waiters), self._clock.now_s()
        if waits and self._awaited_since_s is None:
            self._awaited_since_s = now_s
        has_some = any(holding.lease is not None for holding in self._holdings.values())
        left_s = math.inf
        if waits and not has_some and self._awaited_since_s is not None:
            left_s = self._awaited_since_s + LATE_S - now_s
        is_late = left_s <= 0
        if is_late != self._is_late and self._client is not None:
            self._is_late = is_late
            self._endpoint.post(self._client, BatchesAwaited(is_late))
        return math.inf if is_late else left_s

    def _tell_of_windows(self, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
        def tell() -> None:
            # Of a loop that has ended, nobody hears.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._changed.notify)

        return tell

    def _arrived(
        self, windows: Windows, urgent: list[Content], ahead: list[Content]
    ) -> tuple[list[Content], list[Content]]:
        """Return what of this can be prepared; have the windows made that somebody waits for, and one that follows."""
        # Before a round is planned it is not known where a run goes on.
        ahead = ahead if self.table.planned_round else []
        passes = {item.pass_number for each in (*urgent, *ahead) if not each.is_holdout for item in each.samples}
        if passes:
            windows.need({*passes, max(passes) + 1})

        def is_there(content: Content) -> bool:
            return content.is_holdout or windows.has({item.pass_number for item in content.samples})

        return list(filter(is_there, urgent)), list(filter(is_there, ahead))

    def close(self) -> None:
        """Let go of the pool, after `run` has ended."""
        self.pool.close()

    def _on_filled(self, job: Job) -> None:
        self.preparer.filled(job)
        if not job.content.is_holdout and job.content.samples[0].pass_number < self._needed_from:
            self._forget_below(self._needed_from)
        self._changed.notify()

    def _obey(
        self, peer: PeerId, message: PlanRound | ResumeRound | PauseLeases | RecordSamples | ReleaseTrainer
    ) -> None:
        if peer != self._client:
            raise RemoteProtocolError(f"{type(message).__name__} from {peer}, which is not the client of this host")
        if isinstance(message, PlanRound | ResumeRound):
            # It may have been started again.
            self._told_marks = b""
        match message:
            case PlanRound(number, num_slots, steps, speeds):
                self._awaited = {}
                self.table.plan_round(number, num_slots, steps, speeds)
                self._planned(num_slots)
            case ResumeRound(number, num_slots, steps, trainers, complete, speeds):
                if number > self.table.planned_round:
                    self.table.resume_round(number, num_slots, steps, speeds, complete=complete)
                    self._awaited = dict(trainers)
                    self._resume()
                    self._planned(num_slots)
            case PauseLeases(paused=True):
                self.table.pause()
            case PauseLeases():
                self.table.go_on()
                self._grant_early()
            case RecordSamples(number, samples, chain, marks):
                if marks and self._windows is not None:
                    self._windows.expect(marks)
                ended = self.table.record(number, samples, chain)
                self._forget_below(self._first_unrecorded())
                self._free_leases(ended)
                emit(logger, SamplesRecorded(number, len(ended)))
            case ReleaseTrainer(trainer, generation, number, committed, in_doubt, witnesses, complete):
                if self._awaited.get(trainer) == generation:
                    self._skip(trainer)
                settled = Settled(number, frozenset(committed), frozenset(in_doubt), witnesses, complete)
                released = self.table.release_trainer(trainer, generation, settled)
                self._free_leases(released.leases)
                emit(logger, TrainerReleased(trainer, len(released.leases)))
                self._endpoint.post(peer, Released(trainer, generation, released.next_step, released.is_known))

    def _forget_below(self, number: int) -> None:
        """Give up the windows before one; those of which something is read that was predicted in vain, after that."""
        self._needed_from = max(number, self._needed_from)
        if self._windows is not None:
            self._windows.forget_below(min({self._needed_from, *self.preparer.passes}))

    def _first_unrecorded(self) -> int:
        """Return the first pass of which not all samples are recorded."""
        for number, item in enumerate(self.table.recorded):
            if (item.pass_number, item.start, item.stop) != (number, 0, self.table.stream.num_samples):
                return number
        return len(self.table.recorded)

    def _planned(self, num_slots: int) -> None:
        # Each trainer takes a batch at about the same time, so the next one of each should lie ready.
        self._num_ahead = 0
        self._look_ahead(num_slots + 1)
        self._grant_early()

    def _look_ahead(self, num_batches: int) -> None:
        """From now on prepare as many batches before they are asked for, if there is room for them."""
        self._num_ahead = max(self._num_ahead, min(num_batches, max(2, self.pool.num_places // 2)))

    def _grant_early(self) -> None:
        """Grant what was asked for too early, or in a pause."""
        early, self._early = self._early, []
        for asker, lease in early:
            self._lease(asker, lease)

    def _resume(self) -> None:
        """Take over the leases of the resumed round of those who have said hello."""
        for trainer, generation in list(self._awaited.items()):
            if trainer not in self._hellos:
                continue
            peer, hello = self._hellos[trainer]
            if hello.generation < generation:
                continue
            if hello.generation > generation:
                self._skip(trainer)
                continue
            for held in hello.held if hello.round == self.table.planned_round else ():
                paths = {attempt.key: attempt.path for attempt in held.attempts}
                lease = self.table.resume(trainer, generation, held.samples, paths, done=held.done, left=held.left)
                if lease is not None:
                    self._holdings[held.ticket] = _Holding(peer, lease, None)
            del self._awaited[trainer]
            emit(logger, TrainerResumed(trainer, len(hello.held)))
        if not self._awaited and self._early:
            self._grant_early()

    def _skip(self, trainer: int) -> None:
        """A trainer that would have said what it has leased is dead."""
        del self._awaited[trainer]
        self.table.forgo()

    def _lease(self, peer: PeerId, message: Lease) -> None:
        too_early = message.round > self.table.planned_round or self._awaited
        if too_early and len(self._early) < MAX_WAITING:
            self._early.append((peer, message))
            return
        now_s = self._clock.now_s()
        match self.table.lease(message.trainer, message.generation, message.round, message.step, now_s):
            case Grant(lease, batch):
                self._waiters.append(_Waiter(peer, message.request, Content(batch.samples), lease))
                # Who uses several at a time will want as many again.
                self._look_ahead(len(self._holdings) + len(self._waiters) + 1)
            case Later() if len(self._early) < MAX_WAITING:
                self._early.append((peer, message))
            case Later():
                self._refuse(peer, message.request)
            case Denial(reason):
                self._endpoint.post(peer, NoBatch(message.request, reason))

    def _read_train(self, peer: PeerId, message: ReadTrain) -> None:
        if not 0 <= message.batch < _MAX_STREAM_BATCH:
            self._endpoint.post(peer, NoBatch(message.request, f"there is no batch {message.batch}"))
            return
        samples = self.table.stream.range_of(message.batch)
        if self._client is None:
            # Nothing is recorded, and it is read in its order.
            self._forget_below(samples.pass_number)
        self._read(peer, message.request, Content((samples,)))

    def _read_holdout(self, peer: PeerId, message: ReadHoldout) -> None:
        num_holdout = self._dataset.holdout.num_samples
        num_samples = message.stop - message.start
        if not 0 <= message.start < message.stop <= num_holdout or num_samples > self.max_read_samples:
            reason = (
                f"samples {message.start} to {message.stop} cannot be read: there are {num_holdout}, and one read "
                f"holds at most {self.max_read_samples}"
            )
            self._endpoint.post(peer, NoBatch(message.request, reason))
            return
        samples = (SampleRange(0, message.start, message.stop),)
        self._read(peer, message.request, Content(samples, is_holdout=True))

    def _read(self, peer: PeerId, request: int, content: Content) -> None:
        if len(self._waiters) >= MAX_WAITING:
            self._refuse(peer, request)
        else:
            self._waiters.append(_Waiter(peer, request, content, lease=None))

    def _refuse(self, peer: PeerId, request: int) -> None:
        self._endpoint.post(peer, NoBatch(request, f"{MAX_WAITING} requests are waiting already"))

    def _answer_ready(self) -> bool:
        """Hand over what is ready; return whether anything was."""
        still_waiting: list[_Waiter] = []
        for waiter in self._waiters:
            place = self.preparer.take(waiter.content)
            if place is None:
                still_waiting.append(waiter)
            else:
                self._hand_over(waiter, place)
        any_was = len(still_waiting) < len(self._waiters)
        self._waiters = still_waiting
        return any_was

    def _hand_over(self, waiter: _Waiter, place: int) -> None:
        content = waiter.content
        self._awaited_since_s = None
        places = self._layout.tensor_places(self.pool.offset_bytes(place), content.num_samples)
        ticket = next(self._tickets)
        self._holdings[ticket] = _Holding(waiter.peer, waiter.lease, place)
        if waiter.lease is not None:
            self.table.begun(waiter.lease, self._clock.now_s())
        ready = BatchReady(
            request=waiter.request,
            pool=self.pool.path,
            pool_bytes=self.pool.num_bytes,
            ticket=ticket,
            inputs=places.inputs,
            labels=places.labels,
            context=dict(places.context),
            samples=() if content.is_holdout else content.samples,
            num_samples=content.num_samples,
        )
        self._endpoint.post(waiter.peer, ready)

    def _holding(self, peer: PeerId, ticket: int) -> _Holding | None:
        """Return the holding if it still stands and is this peer's."""
        holding = self._holdings.get(ticket)
        return holding if holding is not None and holding.peer == peer else None

    def _end(self, peer: PeerId, ticket: int, *, committed: bool | None) -> None:
        """A peer does not need its place any more; `committed` None gives a lease back."""
        holding = self._holding(peer, ticket)
        if holding is None:
            return
        self._free(ticket)
        if holding.lease is None:
            return
        if committed is None:
            self.table.give_back(holding.lease)
        else:
            self.table.acknowledge(holding.lease, committed=committed, now_s=self._clock.now_s())

    def _free_leases(self, leases: tuple[int, ...]) -> None:
        """Free the places under leases that ended, and forget who waits for a batch of theirs."""
        for ticket, holding in list(self._holdings.items()):
            if holding.lease in leases:
                self._free(ticket)
        for waiter in [waiter for waiter in self._waiters if waiter.lease in leases]:
            self._waiters.remove(waiter)
            self._endpoint.post(waiter.peer, NoBatch(waiter.request, "the lease has ended"))

    def _free(self, ticket: int) -> None:
        place = self._holdings.pop(ticket).place
        if place is not None:
            self.pool.release(place)
