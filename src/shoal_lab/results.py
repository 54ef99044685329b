"""What a cluster's run has come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.averaging.audit import Audit, audit
from shoal.averaging.journal import StepLine, read_records, read_steps, rounds_with_steps
from shoal.client.client import Client
from shoal.client.progress import Progress
from shoal.wire.messages.round import Record


@dataclass(frozen=True)
class ClusterResult:
    """What one run has left.

    Attributes:
        hashes: of each stage's outer parameters after the last record, in hex.
        records: D_1, D_2, ... in order.
        steps: the lines of the step logs, by round.
        audit: recomputed from the step logs.
        progress: as the trainers have reported it.
        summary: as `summary.json` has it.
    """

    hashes: Mapping[int, str]
    records: tuple[Record, ...]
    steps: Mapping[int, list[StepLine]]
    audit: Audit
    progress: Progress
    summary: Mapping[str, Any]


async def collect(client: Client, log_dir: Path, num_train: int, exit_reason: str) -> ClusterResult:
    """Read a run's files and ask its client.

    Args:
        num_train: samples of a pass.
        exit_reason: "done" or "failed".

    Raises:
        RecordRejected: a file is damaged.
        OSError: it cannot be read.
    """
    return ClusterResult(
        hashes=client.ledger.totals.hashes,
        records=tuple(record for record, _ in read_records(log_dir)),
        steps={round: read_steps(log_dir, round) for round in rounds_with_steps(log_dir)},
        audit=audit(log_dir, num_train),
        progress=client.reports.progress,
        summary=await client.summary(exit_reason),
    )
