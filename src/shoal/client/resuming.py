"""How a run goes on from a checkpoint: the files from which its client starts, as if it had just recorded that round.

    checkpoint -> rounds/: D_0 and the record; those that are newer are set aside
             '--> client.state: totals, samples used, the record as the one that stands

What a client has counted goes into each checkpoint as `client.json`. Its times are those of a clock that may have begun
anew since, so they are moved.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from shoal.averaging.journal import restore_genesis, set_aside, write_round
from shoal.checkpoint.store import CheckpointStore
from shoal.checkpoint.stored import StoredCheckpoint, Unseal
from shoal.client.diary import Saved, leave_saved
from shoal.client.totals import RunTotals
from shoal.control.role_start import ResumedFrom
from shoal.errors import MALFORMED
from shoal.swarm.records import parameters_of, record_hash, used_samples
from shoal.wire.messages.round import Record


class KeptTotals(msgspec.Struct, frozen=True):
    """What a client had counted when it began the round after a record.

    Attributes:
        at_s: When that was, in monotonic seconds of its host.
    """

    totals: RunTotals
    at_s: float

    def encoded(self) -> bytes:
        """`client.json`."""
        return msgspec.json.encode(self)


def go_back(log_dir: Path, checkpoint: StoredCheckpoint, now_s: float) -> list[str]:
    """Prepare the folder of a run, which no process uses, for a client that goes on from a checkpoint.

    Returns:
        What of the run is not known, since it is damaged: files of the folder, or what was counted until then.

    Raises:
        StorageError: A file cannot be written.
        ShoalError: The checkpoint cannot be read.
        OSError: The same, or a file of the folder cannot.
    """
    signed, record = checkpoint.signed, checkpoint.record
    digest = record_hash(signed)
    totals, uncounted = _totals(checkpoint.client, record, now_s)
    problems = [restore_genesis(log_dir, checkpoint.genesis), *set_aside(log_dir, record, digest).values()]
    write_round(log_dir, record, signed)
    # Last: without it the folder is still that of the run that has ended.
    used = used_samples(record)
    saved = Saved(record.run_id, totals, recorded=used, base=digest, chain=digest, resumed=signed, marks=record.marks)
    leave_saved(log_dir, saved)
    said = [f"{problem}: it is set aside" for problem in problems if problem]
    if uncounted:
        said.append(f"what the run has counted until then is not known ({uncounted}): its summary counts from here")
    return said


def needed_checkpoint(source: ResumedFrom | None, saved: Saved, unseal: Unseal) -> StoredCheckpoint | None:
    """Return the checkpoint that a start of a client begins with; None: it begins as any other start does.

    That is so when the run was not resumed, or has gone on, and then the checkpoint may have been removed.

    Args:
        source: from which the run was resumed.
        saved: what the start before has left.

    Raises:
        StateMismatch: It does not say what it is, or is of another run.
        StorageError: It cannot be read.
    """
    if source is None or saved.resumed is None:
        return None
    return CheckpointStore(source.location, saved.run_id, unseal).unread(source.round)


def _totals(content: bytes, record: Record, now_s: float) -> tuple[RunTotals, str]:
    try:
        kept = msgspec.json.decode(content, type=KeptTotals)
    except MALFORMED as error:
        return RunTotals(rounds=record.round, hashes=parameters_of(record)), str(error)
    kept.totals.move(kept.at_s, now_s)
    return kept.totals, ""
