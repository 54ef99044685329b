"""A round ends: it is closed, and its record is written down and acted upon.

What the record says is the coordinator's (`averaging.coordinator`), when a round is closed the run's machine's.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread

from shoal.averaging.audit import lost_in
from shoal.averaging.coordinator import RoundCoordinator, RoundOutcome
from shoal.averaging.journal import follows, write_round
from shoal.client.checkpointing import Checkpointing
from shoal.client.data_link import DataLink
from shoal.client.homes import Homes
from shoal.client.ledger import Ledger
from shoal.client.reassignment import Reassignment
from shoal.client.reports import Reports
from shoal.client.succession import inherit
from shoal.config.schema import Config
from shoal.errors import ControlError
from shoal.events.incidents import StepsLost
from shoal.events.run import CodecChosen, RoundNotWritten, RoundRecorded, RunTakenOver
from shoal.runtime.patient_thread import run_in_thread
from shoal.swarm.records import parameters_of
from shoal.swarm.round_effects import RoundReady
from shoal.swarm.sample_ranges import count
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.wire.messages.round import Record

_MAX_IDLE_ROUNDS = 2
"""So many rounds in a row without a single step may follow losses; more, and the trainers themselves cannot work."""
_PATIENCE_S = 5.0
"""So long may the disk take at the end; then the client ends without the file of the last record."""


class RoundRecords:
    """Ends rounds, one after the other."""

    def __init__(
        self,
        *,
        config: Config,
        log_dir: Path,
        coordinator: RoundCoordinator,
        ledger: Ledger,
        slots: TrainerSlots,
        reports: Reports,
        data: DataLink,
        homes: Homes,
        reassignment: Reassignment,
        checkpointing: Checkpointing,
    ) -> None:
        self._config = config
        self._log_dir = log_dir
        self._coordinator = coordinator
        self._ledger = ledger
        self._slots = slots
        self._reports = reports
        self._data = data
        self._homes = homes
        self._reassignment = reassignment
        self._checkpointing = checkpointing
        self._codec = ""

    def close(self, round: int, trained_s: float | None) -> None:
        """Have the replicas average, see `CloseRound`; what comes of it is the coordinator's."""
        slots = {peer: pipeline.slot for pipeline in self._homes.pipelines for peer in pipeline.peers}
        within_s = None if self._config.run.deterministic else self._config.diloco.averaging_timeout_s
        keep = self._checkpointing.is_due(round)
        self._coordinator.close_round(round, slots, self._slots.lowest, within_s, keep=keep, trained_s=trained_s)

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
        outcome = self._coordinator.outcome(ready)
        record = outcome.record
        self._checkpointing.recorded(record)
        # It is forced to the disk, which may take long; the event loop has connections to keep.
        with anyio.CancelScope(shield=True):
            await run_in_thread(write_round, self._log_dir, record, outcome.signed)
        self._note(outcome, begun_s, closed_s)
        await self._count_costs(record)
        self._data.record(record.round, tuple(sorted((*record.samples, *record.skipped))))
        if record.round < self._config.diloco.outer_steps:
            self._reassignment.recorded(outcome.holders, record.round)
        self._reports.divergence.round_over(*(sum(map(len, ranges)) for ranges in (record.samples, record.skipped)))
        idle_rounds = self._ledger.totals.idle_rounds
        if idle_rounds > _MAX_IDLE_ROUNDS:
            reason = self._reports.refusal or "see the trainers' logs"
            raise ControlError(f"{idle_rounds} rounds have passed without a step: {reason}")

    async def inherit(self, ready: RoundReady) -> None:
        """Know what the record says that clients of other hosts have committed, or D_0; see `succession.inherit`."""
        hashes: dict[int, str] = {}
        if ready.tip.signed is not None:
            hashes = await inherit(self._coordinator.outcome(ready), self._log_dir, self._slots, self._data)
        self._ledger.note(RunTakenOver(ready.tip.round, len(ready.holders), hashes))

    async def write_last(self) -> None:
        """Let no further record be made, and write down the last one if nobody has, whatever has ended this client.

        Raises:
            RecordRejected: a file that is there is no record.
            StorageError: it cannot be written.
        """
        # A record that was committed from here on would be in no file, and nobody would hold the one before it.
        self._coordinator.retire()
        standing = self._coordinator.standing
        if await write_last(standing, self._log_dir, self._ledger) and standing is not None:
            self._note(standing, None, None)

    async def _count_costs(self, record: Record) -> None:
        """Of what was lost, note what it has cost; raises as `audit.lost_in` does."""
        if self._ledger.totals.incidents.wants_costs:
            lost = await run_in_thread(lost_in, self._log_dir, record)
            self._ledger.note(StepsLost(record.round, lost))

    def _note(self, outcome: RoundOutcome, begun_s: float | None, closed_s: float | None) -> None:
        """A record is on the disk."""
        now_s = self._ledger.run_s()
        duration_s = None if begun_s is None else now_s - begun_s
        averaging_s = None if closed_s is None else now_s - closed_s
        if averaging_s is not None:
            self._reports.phase_took("average", averaging_s)
            if duration_s is not None:
                self._reports.phase_took("train", duration_s - averaging_s)
        record, progress = outcome.record, self._reports.progress
        self._reports.round_over(record.round)
        loss = progress.round_loss
        self._ledger.note(
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
            self._ledger.note(CodecChosen(record.round + 1, record.codec, self._codec))
            self._codec = record.codec
        if loss is not None:
            self._reports.post({"loss/round": loss, "samples": float(progress.samples)})


async def write_last(standing: RoundOutcome | None, log_dir: Path, ledger: Ledger) -> bool:
    """Write the record that the replicas were told to swap to, if it is the next one. Shielded, and bounded in time.

    Between `CommitRecord` and the file of the record there is time for a Ctrl-C. The replicas hold the record then, and
    without the file nobody could check what they hold.

    Args:
        standing: what the coordinator knows; None: no round has been committed, and D_0 stands.
        log_dir: of this client; may hold records of another chain.

    Returns:
        Whether it was written.

    Raises:
        RecordRejected: a file that is there is no record.
        StorageError: it cannot be written.
    """
    if standing is None:
        return False

    def write() -> bool:
        is_next = follows(log_dir, standing.record)
        if is_next:
            write_round(log_dir, standing.record, standing.signed)
        return is_next

    with anyio.move_on_after(_PATIENCE_S, shield=True):
        return await anyio.to_thread.run_sync(write, abandon_on_cancel=True)
    ledger.note(RoundNotWritten(standing.record.round, _PATIENCE_S))
    return False
