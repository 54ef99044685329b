"""The checkpoints that one mirror writes, of the records whose bytes it has of every stage.

    every stage's bytes of D_r are here --it is due--> waits --D_0 and the client's counts--> written, in a thread
                                                         |                                      '- inner states are got
                                                         '- a newer one that is due takes its place

Due is a record that says so (`Record.keep`), whose members have copied what their inner optimizers know. A mirror that
gets to none of them in time, on a slow link, writes one that it has, without inner states. Due is also the last record
of a run that ends, however that comes about: its members hold what they knew at the newest one. The client waits until
it is told what was kept of it.

One is written at a time. One that cannot be written is said once, and the next one is tried when it is due; what was
written before stays. Nothing that trains waits for any of this. A disk that takes nothing for long is not waited for
at the end of a run: that is said, and the thread that hangs in it ends with its process.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio
import anyio.from_thread
import anyio.to_thread
from torch import Tensor

from shoal.averaging.inner_fetch import InnerFetch
from shoal.averaging.replica_state import OuterState
from shoal.averaging.stage_fetch import state_bytes
from shoal.checkpoint.model_folder import configuration_with_cut
from shoal.checkpoint.model_layout import StageLayout
from shoal.checkpoint.store import Checkpoint, CheckpointStore, KeepPolicy, StagePart, Written
from shoal.clock import Clock
from shoal.config.schema import Config
from shoal.errors import PlaceTaken, ShoalError, StateMismatch, StorageError
from shoal.events.base import Event, emit, tell
from shoal.events.mirror import (
    CheckpointFailed,
    CheckpointPlaceTaken,
    CheckpointsLeft,
    CheckpointStalled,
    CheckpointWritten,
    InnerMissing,
)
from shoal.file_thread import number_of
from shoal.ids import PeerId
from shoal.runtime.waking import Signal
from shoal.swarm.keep_rule import KeepRule
from shoal.swarm.records import record_hash
from shoal.telemetry.registry import MetricRegistry
from shoal.wire.messages.mirror import LastKept, RunCounts
from shoal.wire.messages.round import Record, SignedRecord

logger = logging.getLogger(__name__)

_OVERDUE = 2
"""Times as old as the last checkpoint should become: then one is written of a record that does not ask for it."""
_MOST_SLOTS: Final[Mapping[str, int | None]] = {"all": None, "first": 1, "none": 0}
_MAX_COUNTED = 4
"""A mirror is behind the client by a few records at most, or it waits for the next one."""
_PATIENCE_S: Final = 60.0
"""So long may a disk take nothing; longer where a file is large, which is forced to the disk as a whole."""
_SLOWEST_BYTES_PER_S: Final = 10e6
_LOOK_S: Final = 1.0


def kept_of(config: Config) -> KeepPolicy:
    """Which checkpoints stay."""
    given = config.param_mirror
    return KeepPolicy(given.keep_last, given.keep_every_rounds, given.max_bytes or 0)


@dataclass(frozen=True)
class WholeRecord:
    """A record, and the bytes of every stage that it names."""

    record: Record
    signed: SignedRecord
    states: Mapping[int, OuterState]

    @property
    def hash(self) -> str:
        """Of the record."""
        return record_hash(self.signed)


@dataclass
class Checkpoints:
    """The checkpoints of one mirror; `run` writes them.

    Attributes:
        layouts: returns the tensors of each stage.
        notice: tells the user what he may want to act on.
        inner: gets what members know.
        is_idle: returns whether no bytes are on their way here.
        on_last: told what was kept of the last record.
    """

    config: Config
    store: CheckpointStore
    layouts: Callable[[], Sequence[StageLayout]]
    clock: Clock
    notice: Callable[[str], None]
    inner: InnerFetch
    is_idle: Callable[[], bool]
    on_last: Callable[[LastKept], None]
    metrics: MetricRegistry = field(default_factory=MetricRegistry)
    _newest: WholeRecord | None = None
    _due: WholeRecord | None = None
    _genesis: bytes = b""
    _counted: dict[str, bytes] = field(default_factory=dict[str, bytes])
    _done: str = ""
    _lacks: str = ""
    _asks: str = ""  # a record of which everything is wanted, though it does not say so
    _last: str = ""  # the same, if the client waits to be told what was kept of it
    _failure: str = ""
    _num_missing: int = 0
    _failed: type[Event] | None = None  # what was said of the last one that could not be written, if that was the last
    _stirred_s: float = math.inf  # when the disk has last taken something; infinite while it is asked for nothing
    _stalled: str = ""
    _finishing: anyio.CancelScope | None = None
    _writing: anyio.Lock = field(default_factory=anyio.Lock)
    _changed: Signal = field(default_factory=Signal)

    def __post_init__(self) -> None:
        self._overdue = KeepRule.of(self.config, _OVERDUE)
        self._reached, self.store.reached = self.store.reached, self._taken

    def counted(self, message: RunCounts) -> None:
        """The client begins the round after a record."""
        self._genesis = message.genesis
        if message.is_last:
            self._counted.setdefault(message.record_hash, message.counted)  # as it was when the round began, if known
        else:
            self._counted[message.record_hash] = message.counted
        while len(self._counted) > _MAX_COUNTED:
            del self._counted[next(iter(self._counted))]
        if message.is_last:
            self._last = self._asks = message.record_hash
            if self._newest is not None:
                self.held(self._newest)
            if self._stalled:
                self._settle_last()
        self._changed.notify()

    def idle(self) -> None:
        """What is not here does not come."""
        self._changed.notify()

    def held(self, whole: WholeRecord | None) -> None:
        """The bytes of a record have come, of every stage; None: what is here is of several records."""
        self._newest = whole
        now_s = self.clock.now_s()
        if whole is None or whole.hash == self._done:
            return
        is_wanted = self._is_wanted(whole)
        if is_wanted or self._overdue.is_due(whole.record.round, now_s):
            self._overdue.begun(whole.record.round, now_s)
            self._due = whole
            for stage, _, peer in self._givers(whole) if is_wanted else ():
                self.inner.reserve(peer, stage, whole.hash)
            self._changed.notify()

    async def run(self) -> None:
        """Write what is due, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_disk)
            while True:
                while self._due is not None and self._due.hash in self._counted:
                    due, self._due = self._due, None
                    await self._write(due)
                self._settle_last()
                await self._changed.wait()

    async def finish(self) -> None:
        """Write the newest record, unless it is written or D_0 was never told; wait for what is being written.

        To be called while `run` runs.

        Raises:
            StorageError: the disk takes nothing.
        """
        newest, self._due = self._newest or self._due, None
        with anyio.CancelScope() as self._finishing:
            if self._stalled:
                self._finishing.cancel()
            async with self._writing:
                pass
            if newest is not None and newest.hash != self._done and self._genesis:
                self._asks = newest.hash
                await self._write(newest)
        if self._finishing.cancelled_caught:
            raise StorageError(self._stalled)

    async def _watch_disk(self) -> None:
        """Say that the disk takes nothing, and wait for it no longer where the run ends."""
        while True:
            # Each request to a store ends in time.
            while math.isinf(self._stirred_s) or "://" in self.config.checkpoint_location:
                await self._changed.wait()
            patience_s = _PATIENCE_S + max(map(state_bytes, self.layouts())) / _SLOWEST_BYTES_PER_S
            left_s = self._stirred_s + patience_s - self.clock.now_s()
            if left_s <= 0 and not self._stalled:
                location = self.config.checkpoint_location
                self._stalled = f"the disk of {location} has taken nothing for {patience_s:.0f} s"
                tell(logger, CheckpointStalled(location, patience_s), self.notice)
                self._settle_last()
                if self._finishing is not None:
                    self._finishing.cancel()
            await self.clock.sleep_s(max(min(left_s, patience_s), _LOOK_S))

    def _taken(self, point: str, round: int) -> None:
        """The disk has taken something; called in the thread that writes."""
        self._stir(self.clock.now_s())
        self._reached(point, round)

    def _stir(self, at_s: float = math.inf) -> None:
        """The disk has taken something, or is asked for nothing."""
        self._stirred_s, self._stalled = at_s, ""

    def _settle_last(self) -> None:
        """Say what was kept of the last record, once nothing more comes of it."""
        is_here = self._newest is not None and self._newest.hash == self._last
        if not self._last or not (is_here or self.is_idle() or self._stalled):
            return
        if self._last == self._done:
            lacks = self._lacks
        elif self._stalled:
            lacks = self._stalled
        else:
            lacks = self._failure if is_here else "its mirror could not get the state of every stage"
        last, self._last = self._last, ""
        self.on_last(LastKept(last, lacks))

    async def _write(self, whole: WholeRecord) -> None:
        round = whole.record.round
        async with self._writing:
            begun_s = self.clock.now_s()
            if whole.hash == self._done:
                return  # the run has ended while it was being written
            self._num_missing, is_wanted = 0, self._is_wanted(whole)
            self._stir(begun_s)
            self._changed.notify()
            try:
                # A thread that hangs in a disk is left behind: it ends with this process.
                written = await anyio.to_thread.run_sync(self._store, whole, abandon_on_cancel=True)
            except PlaceTaken as error:
                # A folder that another mirror writes to is no trouble of the disk.
                self._fails(str(error), CheckpointPlaceTaken(round, error.location, error.holder), 0)
                return
            except ShoalError as error:
                self._fails(str(error), CheckpointFailed(round, str(error)), number_of(error))
                return
            self._stir()
            if written is None:
                self._done, self._lacks = whole.hash, ""
                return
            self._done, self._lacks = whole.hash, self._missing(is_wanted=is_wanted)
            self._note(None, 0)
            took_s = self.clock.now_s() - begun_s
            emit(logger, CheckpointWritten(round, written.location, written.size_bytes, took_s, written.removed))
            if written.problem:
                tell(logger, CheckpointsLeft(written.problem), self.notice)

    def _fails(self, why: str, failed: Event, number: int) -> None:
        """Say why a checkpoint is not written, unless that was so of the one before."""
        self._stir()
        self._failure = why
        if type(failed) is not self._failed:
            tell(logger, failed, self.notice)
        self._note(failed, number)

    def _note(self, failed: Event | None, number: int) -> None:
        self._failed = None if failed is None else type(failed)
        self.metrics.gauge("disk.failing", what="checkpoint").set(number)

    def _is_there(self, whole: WholeRecord) -> bool:
        """Whether an earlier mirror has written this one: the run may have been resumed from it."""
        try:
            return self.store.unread(whole.record.round).manifest.record == whole.hash
        except (StateMismatch, StorageError):
            return False

    def _store(self, whole: WholeRecord) -> Written | None:
        """Write a checkpoint; None: it is there."""
        if self._is_there(whole):
            return None
        checkpoint = Checkpoint(
            signed=whole.signed,
            genesis=self._genesis,
            layouts=self.layouts(),
            cut=configuration_with_cut(self.config)["model_pipeline"]["cut"],
            members=[outcome.members for outcome in whole.record.stages],
            unix_s=self.clock.unix_s(),
            client=self._counted.get(whole.hash, b"{}"),
        )
        parts = (StagePart(stage, state, self._inner(whole, stage)) for stage, state in sorted(whole.states.items()))
        return self.store.write(checkpoint, parts)

    def _inner(self, whole: WholeRecord, stage: int) -> Iterator[tuple[int, Tensor]]:
        """Yield what the members of a stage knew, by slot, as far as they still give it; called in a thread."""
        if not self._is_wanted(whole):
            return
        for slot, peer in [(slot, peer) for its, slot, peer in self._givers(whole) if its == stage]:
            num_parameters = self.layouts()[stage].parameters.numel
            self._stir()  # of a member the disk knows nothing
            content = anyio.from_thread.run(self.inner.fetch, peer, stage, whole.hash, num_parameters)
            self._stir(self.clock.now_s())
            if content is None:
                self._num_missing += 1
                emit(logger, InnerMissing(whole.record.round, stage, peer))
            else:
                yield slot, content

    def _is_wanted(self, whole: WholeRecord) -> bool:
        """Whether members are asked for what they knew; a checkpoint that is overdue does without."""
        return whole.record.keep or whole.hash == self._asks

    def _givers(self, whole: WholeRecord) -> Iterator[tuple[int, int, PeerId]]:
        """Yield stage, slot and peer of each member whose inner state a checkpoint has."""
        for outcome in whole.record.stages:
            members = outcome.members[: _MOST_SLOTS[self.config.param_mirror.inner]]
            yield from ((outcome.stage, slot, peer) for slot, peer in enumerate(members))

    def _missing(self, *, is_wanted: bool) -> str:
        """Say what a checkpoint that was written lacks; empty: nothing."""
        if not is_wanted and _MOST_SLOTS[self.config.param_mirror.inner] != 0:
            return "it was due before the run ended, and lacks what inner optimizers knew: they begin anew"
        of = f"{self._num_missing} server{'s'[: self._num_missing != 1]}"
        return f"it lacks what the inner optimizers of {of} knew: theirs begin anew" if self._num_missing else ""
