"""A round ends: it is closed, and its record is written down and acted upon.

What the record says is the coordinator's (`averaging.coordinator`), when a round is closed the run's machine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from shoal.averaging.audit import lost_in
from shoal.averaging.coordinator import RoundCoordinator, RoundOutcome
from shoal.averaging.journal import Genesis, follows, record_files, write_genesis, write_round
from shoal.client.checkpoints import Checkpointing
from shoal.client.data_link import DataLink
from shoal.client.homes import Homes
from shoal.client.ledger import Ledger
from shoal.client.needed_files import NeededFiles
from shoal.client.reassignment import Reassignment
from shoal.client.reports import Reports
from shoal.client.succession import inherit
from shoal.config.schema import Config
from shoal.errors import ControlError, RecordRejected
from shoal.events.incidents import CostsUnknown, StepsLost
from shoal.events.run import CodecChosen, RecordAwaited, RecordRestored, RoundNotWritten, RoundRecorded, RunTakenOver
from shoal.runtime.patient_thread import run_in_thread
from shoal.swarm.records import parameters_of
from shoal.swarm.round_effects import RoundReady
from shoal.swarm.sample_ranges import count
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.wire.messages.round import Record

_MAX_IDLE_ROUNDS = 2
"""So many rounds in a row without a single step may follow losses; more, and the trainers themselves cannot work."""
_SLOW_S = 15.0
"""After so long it is said that the run waits for its disk."""
_PATIENCE_S = 5.0
"""So long may the disk take at the end, and so long is a full one waited for; then the client ends without the file of
the last record."""


@dataclass(kw_only=True, eq=False, repr=False)
class RoundRecords:
    """Ends rounds, one after the other."""

    config: Config
    log_dir: Path
    needed: NeededFiles
    coordinator: RoundCoordinator
    ledger: Ledger
    slots: TrainerSlots
    reports: Reports
    data: DataLink
    homes: Homes
    reassignment: Reassignment
    checkpointing: Checkpointing
    _codec: str = ""

    def close(self, round: int, trained_s: float | None) -> None:
        """Have the replicas average, see `CloseRound`; what comes of it is the coordinator's."""
        slots = {peer: pipeline.slot for pipeline in self.homes.pipelines for peer in pipeline.peers}
        within_s = None if self.config.run.deterministic else self.config.diloco.averaging_timeout_s
        keep = self.checkpointing.is_due(round)
        num_samples = self.ledger.totals.num_train or None
        self.coordinator.close_round(
            round,
            slots,
            self.slots.lowest,
            within_s,
            keep=keep,
            trained_s=trained_s,
            num_samples=num_samples,
            marks=self.data.marks,
        )

    async def recorded(self, ready: RoundReady, begun_s: float | None, closed_s: float | None) -> None:
        """Write the record down and act on it.

        Args:
            begun_s: when this client has begun the round, in the time of the run; None: it has not.
            closed_s: when it has ended the round, likewise.

        Raises:
            ControlError: too many rounds in a row have trained nothing.
            TrainingDiverged: too many rounds in a row have only skipped steps.
            StorageError: it cannot be written.
        """
        outcome = self.coordinator.outcome(ready)
        record = outcome.record
        self.checkpointing.recorded(record)
        await self.needed.written(partial(write, outcome, self.log_dir, self.ledger))
        self._note(outcome, begun_s, closed_s)
        await self._count_costs(record)
        self.data.record(record.round, tuple(sorted((*record.samples, *record.skipped))), record.marks)
        if record.round < self.config.diloco.outer_steps:
            self.reassignment.recorded(outcome.holders, record.round)
        self.reports.divergence.round_over(*(sum(map(len, ranges)) for ranges in (record.samples, record.skipped)))
        idle_rounds = self.ledger.totals.idle_rounds
        if idle_rounds > _MAX_IDLE_ROUNDS:
            reason = self.reports.refusal or "see the trainers' logs"
            raise ControlError(f"{idle_rounds} rounds have passed without a step: {reason}")

    async def inherit(self, ready: RoundReady) -> None:
        """Know what the record says that clients of other hosts have committed, or D_0; see `succession.inherit`."""
        hashes: dict[int, str] = {}
        if ready.tip.signed is not None:
            outcome = self.coordinator.outcome(ready)
            taken = partial(inherit, outcome, self.log_dir, self.slots, self.data, self.ledger)
            hashes = await self.needed.written(taken)
        self.ledger.note(RunTakenOver(ready.tip.round, len(ready.holders), hashes))

    async def write_last(self) -> None:
        """Let no further record be made, and write down the last one if nobody has, whatever has ended this client.

        Raises:
            RecordRejected: a file that is there is no record.
            StorageError: it cannot be written.
        """
        # A record that was committed from here on would be in no file, and nobody would hold the one before it.
        self.coordinator.retire()
        standing = self.coordinator.standing
        if await write_last(standing, self.log_dir, self.ledger, self.needed) and standing is not None:
            self._note(standing, None, None)

    async def _count_costs(self, record: Record) -> None:
        """Of what was lost, note what it has cost. That a file of an earlier round cannot be read ends no run."""
        if not self.ledger.totals.incidents.wants_costs:
            return
        try:
            lost = await run_in_thread(lost_in, self.log_dir, record)
        except (RecordRejected, OSError) as error:
            self.ledger.note(CostsUnknown(record.round, str(error)))
        else:
            self.ledger.note(StepsLost(record.round, lost))

    def _note(self, outcome: RoundOutcome, begun_s: float | None, closed_s: float | None) -> None:
        """A record is on the disk."""
        now_s = self.ledger.run_s()
        duration_s = None if begun_s is None else now_s - begun_s
        averaging_s = None if closed_s is None else now_s - closed_s
        if averaging_s is not None:
            self.reports.phase_took("average", averaging_s)
            if duration_s is not None:
                self.reports.phase_took("train", duration_s - averaging_s)
        record, progress = outcome.record, self.reports.progress
        self.reports.round_over(record.round)
        loss = progress.round_loss
        self.ledger.note(
            RoundRecorded(
                round=record.round,
                loss=loss,
                hashes=parameters_of(record),
                trained=bool(record.samples or record.skipped),
                sent_bytes=dict(outcome.sent_bytes),
                duration_s=duration_s,
                averaging_s=averaging_s,
                samples_before=count(record.recorded),
                curve=progress.round_curve,
            )
        )
        if record.codec != self._codec:
            self.ledger.note(CodecChosen(record.round + 1, record.codec, self._codec))
            self._codec = record.codec
        if loss is not None:
            self.reports.post({"loss/round": loss, "samples": float(progress.samples)})


async def write(outcome: RoundOutcome, log_dir: Path, ledger: Ledger) -> None:
    """Write a record, and say so where the disk takes long. It is not left undone, whatever is cancelled.

    Raises:
        StorageError: it cannot be written.
    """
    # The event loop has connections to keep meanwhile.
    with _said_if_slow(outcome.record.round, log_dir, ledger), anyio.CancelScope(shield=True):
        await run_in_thread(write_round, log_dir, outcome.record, outcome.signed)


async def write_beginning(genesis: Genesis, log_dir: Path, ledger: Ledger, needed: NeededFiles) -> None:
    """Write D_0, and say so where the disk takes long; whoever ends before the first round does without.

    Raises:
        StorageError: the disk has taken nothing for long.
    """

    async def write() -> None:
        with _said_if_slow(0, log_dir, ledger):
            await anyio.to_thread.run_sync(write_genesis, log_dir, genesis, abandon_on_cancel=True)

    await needed.written(write)


@contextmanager
def _said_if_slow(round: int, log_dir: Path, ledger: Ledger) -> Generator[None]:
    said = asyncio.get_running_loop().call_later(_SLOW_S, ledger.note, RecordAwaited(round, str(log_dir), _SLOW_S))
    try:
        yield
    finally:
        said.cancel()


async def write_last(standing: RoundOutcome | None, log_dir: Path, ledger: Ledger, needed: NeededFiles) -> bool:
    """Write the record that the replicas were told to swap to, if it is the next one, or what stands there for it is
    damaged. Shielded, and bounded in time.

    Between `CommitRecord` and the file of the record there is time for a Ctrl-C. The replicas hold the record then, and
    without the file nobody could check what they hold, nor fetch the model from them.

    Args:
        standing: what the coordinator knows; None: no round has been committed, and D_0 stands.
        log_dir: of this client; may hold records of another chain.

    Returns:
        Whether it was written, and never before.

    Raises:
        RecordRejected: a file that is there is no record.
        StorageError: the disk does not take it.
    """
    if standing is None:
        return False

    def write() -> tuple[bool, bool]:
        is_next = follows(log_dir, standing.record)
        was_there = any(round == standing.record.round for round, _ in record_files(log_dir))
        if is_next:
            write_round(log_dir, standing.record, standing.signed)
        return is_next, was_there

    async def answered() -> tuple[bool, bool] | None:
        with anyio.move_on_after(_PATIENCE_S):
            return await anyio.to_thread.run_sync(write, abandon_on_cancel=True)
        return None

    written: tuple[bool, bool] | None = None
    with anyio.CancelScope(shield=True):
        written = await needed.written(answered, _PATIENCE_S)
    if written is None:
        ledger.note(RoundNotWritten(standing.record.round, _PATIENCE_S))
        return False
    is_written, was_there = written
    if is_written and was_there:
        ledger.note(RecordRestored(standing.record.round))
    return is_written and not was_there
